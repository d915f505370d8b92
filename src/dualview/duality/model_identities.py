"""The identities on a language model's own weights and activations, for `verify --model`.

Every check makes a small comparison of its own (three demonstrations, one query, a few steps of SGD), so each stands
alone. Each has a tolerance for single precision and one for float64. In a model whose attention hardly moves its logits
(small random weights) a small update drowns in rounding; there the rate is raised until the logits move (`Trial.move`),
so that what is checked is the identity and not the rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.algebra import norm
from dualview.duality.attention import state_weights
from dualview.duality.context_patch import PatchReport, Token, patch_report
from dualview.duality.feed_forward import FeedForward, feed_forwards
from dualview.duality.heads import record_heads, split_heads
from dualview.duality.identities_implicit import DHERIN, GOLDWASER
from dualview.duality.identities_linear import DAI, IRIE
from dualview.duality.identity import Draws, Measured, ModelIdentity, NotApplicable
from dualview.duality.meta_gradients import projected
from dualview.duality.reusable import fit_patch, in_context_aims
from dualview.duality.rows import last_logits
from dualview.duality.tensors import lin_attn, relative_error
from dualview.duality.tuning import (
    dual_patch,
    reconstruct,
    role_factors,
    rows_within,
    score_contributions,
    update_contributions,
    worn_by,
)
from dualview.duality.weight_space import tuned_on_base_states
from dualview.errors import UserError
from dualview.learning.factors import TrainingTrace, trace_training
from dualview.learning.finetune import Recipe
from dualview.learning.update import Deltas
from dualview.models.loading import LanguageModel
from dualview.models.passes import compute_prefix
from dualview.tasks.prompt import Demo, PromptSet, Query, resolve_bos

_TEXTS = (
    ("The soup was cold and the waiter never came back.", "bad"),
    ("We laughed until the lights went on.", "good"),
    ("Two hours of my life that I would like to have again.", "bad"),
    ("A small, warm, clever book.", "good"),
    ("The room smelled of smoke and the bed was broken.", "bad"),
    ("Everything worked on the first try.", "good"),
    ("It rained, the train was late, and nobody told us.", "bad"),
    ("The best bread in the whole town.", "good"),
)
_RATE = 3e-3
_MOST_POWERS = 9


@dataclass(frozen=True)
class Trial:
    """A model, three demonstrations and two queries."""

    lm: LanguageModel
    prompts: PromptSet

    @property
    def query(self) -> Query:
        return self.prompts.queries[0]

    @property
    def bare(self) -> tuple[int, ...]:
        return self.prompts.zero_prefix

    @property
    def demo_places(self) -> range:
        return range(len(self.bare), len(self.prompts.prefix))

    @property
    def in_context_ids(self) -> list[int]:
        return [*self.prompts.prefix, *self.query.ids]

    @property
    def zero_shot_ids(self) -> list[int]:
        return [*self.bare, *self.query.ids]

    def train(self, rate: float = _RATE, epochs: int = 1) -> TrainingTrace:
        """Fine-tune K and V on the demonstrations, keeping the factors."""
        (trace,) = trace_training(self.lm, self.prompts.training_sequences, [rate], Recipe(epochs=epochs))
        return worn_by(self.lm, trace)

    def move(self, share: float = 1e-2, epochs: int = 1) -> Moved:
        """Fine-tune at the least rate of 0.003 · 10ⁿ that changes the query's logits by `share` of their spread."""
        base = last_logits(self.lm, self.zero_shot_ids)
        enough = share * norm(base - base.mean())
        for power in range(_MOST_POWERS):
            try:
                trace = self.train(_RATE * 10**power, epochs)
            except UserError:  # it diverged
                break
            tuned = last_logits(self.lm, self.zero_shot_ids, trace.tuned.patch)
            if norm(tuned - base) >= enough:
                return Moved(trace, base, tuned)
        raise NotApplicable("no learning rate changes its logits and leaves them finite")


@dataclass(frozen=True)
class Moved:
    """A fine-tuning that changed the query's logits, before and after."""

    trace: TrainingTrace
    base: Float[Tensor, " vocab"]
    tuned: Float[Tensor, " vocab"]

    def miss(self, found: Float[Tensor, " vocab"]) -> float:
        """‖found − tuned‖ / ‖tuned − base‖: 0 is the fine-tuned model, 1 the base, 2 the opposite update."""
        return norm(found - self.tuned) / norm(self.tuned - self.base)


def require_model(model: object) -> LanguageModel:
    """The model itself, or an error for anything that is none."""
    if not isinstance(model, LanguageModel):
        raise UserError(f"There are no identities to check on a {type(model).__name__}; give a LanguageModel.")
    if model.dtype not in (torch.float32, torch.float64):
        raise UserError(f"The identities are checked in float32 or float64, not in {model.dtype}; load the model so.")
    return model


def trial(draws: Draws, model: object) -> Trial:
    """Demonstrations and queries in an order that the draws decide: text, or random tokens without a tokenizer."""
    lm = require_model(model)
    order = torch.randperm(len(_TEXTS), generator=draws.generator).tolist()
    tokenizer = lm.tokenizer

    def ids(text: str, count: int) -> tuple[int, ...]:
        if tokenizer is not None:
            return tuple(int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"])
        return tuple(torch.randint(lm.vocab, (count,), generator=draws.generator).tolist())

    labels = {label: ids(f" {label}", 1) for label in ("bad", "good")}
    if not all(labels.values()) or labels["bad"] == labels["good"]:  # no words of this vocabulary: any two tokens
        first, second = torch.randperm(lm.vocab, generator=draws.generator)[:2].tolist()
        labels = {"bad": (first,), "good": (second,)}
    between = ids("\n", 1)
    pairs = [_TEXTS[index] for index in order]
    demos = tuple(Demo(ids(f"Text: {text} It is", 7), labels[label], between) for text, label in pairs[:3])
    candidates = tuple(labels.values())
    queries = tuple(Query(ids(f"Text: {text} It is", 6), candidates, 0) for text, _ in pairs[3:5])
    bos = None if tokenizer is None else resolve_bos(tokenizer, "auto")
    return Trial(lm, PromptSet(bos, demos, queries, len(demos)))


def _reconstruction(draws: Draws, model: object) -> float:
    return max(each.weight for each in reconstruct(trial(draws, model).train(epochs=2)))


def _dual_logits(draws: Draws, model: object) -> float:
    setup = trial(draws, model)
    moved = setup.move()
    return moved.miss(last_logits(setup.lm, setup.zero_shot_ids, dual_patch(setup.lm, moved.trace)))


def _contributions(draws: Draws, model: object) -> float:
    """Σ of the tokens' parts, from the factors alone, against ‖ΔW_V x‖, from the ΔW that training summed."""
    setup = trial(draws, model)
    trace = setup.train()
    patch = trace.tuned.patch
    assert isinstance(patch, Deltas)
    trained = {p.name: (p, w[0]) for p, w in zip(patch.projections, patch.weights, strict=True)}
    factors = role_factors(setup.lm, trace, "v")
    with patch.applied():
        taps = projected(setup.lm, setup.zero_shot_ids, [f.projection for f in factors])
    worst = 0.0
    for f, tap in zip(factors, taps, strict=True):
        whole, delta = trained[f.projection.name]
        rows = rows_within(f.projection, whole)
        x = tap.x[0, -1].double()
        moved = norm((delta if rows is None else delta[rows]).double() @ x)
        parts = update_contributions(replace(f, errors=f.errors.double()), x)
        gap = abs(float(parts.sum()) - moved)
        worst = max(worst, gap / moved if moved else gap)
    return worst


def _lead(draws: Draws, model: object) -> float:
    setup = trial(draws, model)
    try:
        feed_forwards(setup.lm)
    except NotApplicable:
        raise NotApplicable("where experts are routed, the score jumps along the path") from None
    good, bad = setup.query.candidates
    moved = setup.move()
    # Between two candidates by chance the lead may hardly move: a logit's typical change is what there was to explain.
    least = norm(moved.tuned - moved.base) / math.sqrt(len(moved.base))
    found = score_contributions(setup.lm, moved.trace, setup.zero_shot_ids, good, bad, least=least)
    return found.residual / max(abs(found.tuned - found.base), least)


def _split(draws: Draws, model: object) -> float:
    setup = trial(draws, model)
    return max(split_heads(record_heads(setup.lm, setup.in_context_ids), setup.demo_places).error)


def _relaxed(draws: Draws, model: object) -> float:
    """Linear attention over the model's own keys and values: one sum over all tokens, or two matrices."""
    setup = trial(draws, model)
    worst = 0.0
    for layer in record_heads(setup.lm, setup.in_context_ids):
        group = layer.q.shape[0] // layer.k.shape[0]
        inside = torch.zeros(layer.k.shape[1], dtype=torch.bool, device=layer.k.device)
        inside[setup.demo_places.start : setup.demo_places.stop] = True
        for head, q in enumerate(layer.q.double()):
            keys, values = layer.k[head // group].double().T, layer.v[head // group].double().T
            parts = [state_weights(keys[:, mask], values[:, mask]) for mask in (~inside, inside)]
            worst = max(worst, relative_error((parts[0] + parts[1]) @ q, lin_attn(keys, values, q)))
    return worst


def _four_terms(draws: Draws, model: object) -> float:
    """ΔW_FT itself, in float64: beside the base's V₀K₀ᵀ a small update would be lost in rounding."""
    setup = trial(draws, model)
    patch = setup.move().trace.tuned.patch
    assert isinstance(patch, Deltas)
    start = len(setup.prompts.prefix)
    worst = 0.0
    for states in tuned_on_base_states(setup.lm, patch, setup.bare, setup.query.ids, start):
        wide = states.double()
        before = state_weights(wide.base_keys.mT, wide.base_values.mT)
        after = state_weights(wide.tuned_keys.mT, wide.tuned_values.mT)
        worst = max(worst, relative_error(wide.four_terms().delta, after - before))
    return worst


def judged(setup: Trial, report: PatchReport) -> Measured:
    """The largest difference of the logits, or the patched difference beside the unpatched one, whichever is larger.

    The first alone would pass any patch of a model whose logits hardly differ; the second alone, a coarse one where
    they differ much.
    """
    if report.unpatched <= 1e4 * torch.finfo(setup.lm.dtype).eps * report.largest:
        raise NotApplicable(f"the demonstrations change its logits by {report.unpatched:.0e} only, which is rounding")
    error = max(report.error, report.relative)
    if setup.lm.dtype == torch.float64 and any(_rounds(place) for place in feed_forwards(setup.lm)):
        return Measured(error, report.unpatched, 1e-6, "the norms at the end of its blocks round float64 to float32")
    return Measured(error, report.unpatched)


def _rounds(place: FeedForward) -> bool:
    """Whether a block ends in a norm that puts out numbers of single precision in a float64 model (Gemma's).

    The sums of such numbers lie on the edge between two of them so often that a difference of 1e-16 before the next
    norm becomes one of 1e-7 after it.
    """
    if place.kind != "scale":
        return False
    weight = cast(Tensor, place.carrier.weight)
    x = torch.linspace(-1.3, 1.7, weight.shape[0], dtype=torch.float64, device=weight.device)[None]
    with torch.no_grad():
        y = place.carrier.forward(x)
    return bool(torch.equal(y, y.float().double()))


def _context(draws: Draws, model: object, token: Token) -> Measured:
    setup = trial(draws, model)
    return judged(setup, patch_report(setup.lm, setup.prompts.prefix, setup.query.ids, setup.bare, token=token))


def _one_patch_for_both(draws: Draws, model: object) -> Measured:
    setup = trial(draws, model)
    lm, prompts = setup.lm, setup.prompts
    places = feed_forwards(lm)
    if any(not isinstance(place.carrier, torch.nn.Linear) and place.kind == "scale" for place in places):
        raise NotApplicable("its blocks end in a norm, whose scale has too few numbers for several queries")
    with torch.no_grad():
        prefix = compute_prefix(lm, prompts.prefix, len(setup.bare))
    aims = in_context_aims(lm, places, prompts.queries, prefix)
    patch = fit_patch(lm, places, prompts.queries, setup.bare, aims, ridge=0.0)
    found = [judged(setup, patch_report(lm, prompts.prefix, q.ids, setup.bare, patch)) for q in prompts.queries]
    return max(found, key=lambda each: each.error)


MODEL_IDENTITIES = (
    ModelIdentity(
        "model: every tuned K and V is W₀ + Σ_t e_t x_tᵀ over its training tokens", IRIE, _reconstruction, 1e-5, 1e-11
    ),
    ModelIdentity("model: base weights + LinAttn(X, E, ·) gives the fine-tuned logits", IRIE, _dual_logits, 1e-3, 1e-9),
    ModelIdentity(
        "model: ‖ΔW_V x‖ = Σ_t ⟨e_t, ΔW_V x⟩ (x_t·x) / ‖ΔW_V x‖, every layer", IRIE, _contributions, 1e-3, 1e-11
    ),
    ModelIdentity(
        "model: the change of a logit difference is the tokens' parts, summed along the path (by quadrature)",
        IRIE + ", Sundararajan et al. 2017",
        _lead,
        5e-3,  # of a quadrature, in any precision: the kinks of a ReLU leave it as much
    ),
    ModelIdentity(
        "model: attention = λ y_demos + (1−λ) y_own, every head", DAI + ", exact for softmax", _split, 1e-4, 1e-11
    ),
    ModelIdentity("model: relaxed to linear attention, F_ICL(q) = (W_ZSL + ΔW_ICL) q, every head", DAI, _relaxed, 1e-9),
    ModelIdentity("model: tuned heads, V₁K₁ᵀ − V₀K₀ᵀ = V₀ΔKᵀ + ΔV K₀ᵀ + ΔV ΔKᵀ, every head", DAI, _four_terms, 1e-9),
    ModelIdentity(
        "model: zero-shot with rank-1 patches at the last token = in-context logits (largest difference, or its ratio "
        "to the unpatched one)",
        GOLDWASER + ", Alg. 1",
        lambda draws, model: _context(draws, model, "last"),
        1e-3,
        1e-9,
    ),
    ModelIdentity(
        "model: the same as a change of weights that every token meets",
        GOLDWASER + "; " + DHERIN,
        lambda draws, model: _context(draws, model, "every"),
        1e-3,
        1e-9,
    ),
    ModelIdentity(
        "model: one least-squares patch (ridge 0) gives two queries their in-context logits",
        "Mazzawi et al. 2025, fitted as " + GOLDWASER,
        _one_patch_for_both,
        1e-2,
        1e-6,
    ),
)
