"""The identities on a language model's own weights and activations, for `verify --model`.

Every check makes a small comparison of its own (three demonstrations, one query, a few steps of SGD), so each stands
alone. Each is allowed what rounding can make of it, from the model's precision and the conditioning of the check
(`rounding`). In a model whose attention hardly moves its logits (small random weights) a small update drowns in
rounding; there the rate is raised until the logits move (`Trial.move`), so that what is checked is the identity and not
the rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.on_model.context_patch import PatchReport, Token, context_patch, patch_report
from dualview.duality.on_model.dual_finetuning import (
    dual_patch,
    reconstruct,
    role_factors,
    rows_within,
    score_contributions,
    update_contributions,
    worn_by,
)
from dualview.duality.on_model.feed_forward import FeedForward, feed_forwards
from dualview.duality.on_model.meta_gradients import projected
from dualview.duality.on_model.rounding import PassRounding, pass_rounding, require_digits, summed
from dualview.duality.on_model.shared_patch import fit_patch, in_context_aims
from dualview.duality.on_model.single_prompt import last_logits
from dualview.duality.on_model.softmax_split import Heads, record_heads, split_heads
from dualview.duality.on_model.weight_space import tuned_on_base_states
from dualview.duality.theory.icl_as_update import state_weights
from dualview.duality.theory.linalg import column_norms, norm
from dualview.duality.theory.toy_attention import lin_attn, relative_error
from dualview.duality.verify.check import Draws, Measured, ModelIdentity, NotApplicable, worst_of
from dualview.duality.verify.implicit import DHERIN, GOLDWASER
from dualview.duality.verify.linear import DAI, IRIE
from dualview.io.errors import UserError
from dualview.learning.finetune import TrainingRecipe
from dualview.learning.traces import TrainingTrace, trace_training
from dualview.learning.weight_patches import Deltas
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Patch, compute_prefix
from dualview.tasks.prompts import Demo, PromptSet, Query, resolve_bos

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
        (trace,) = trace_training(self.lm, self.prompts.training_sequences, [rate], TrainingRecipe(epochs=epochs))
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


def _reconstruction(draws: Draws, model: object) -> Measured:
    """κ = Σ_t ‖e_t‖‖x_t‖ / ‖ΔW‖, for the sum over training tokens."""
    trace = trial(draws, model).train(epochs=2)
    patch = trace.tuned.patch
    assert isinstance(patch, Deltas)
    sizes = {p.name: norm(w[0]) for p, w in zip(patch.projections, patch.weights, strict=True)}
    found: list[Measured] = []
    for residual, factors in zip(reconstruct(trace), trace.factors, strict=True):
        terms = column_norms(factors.errors.double().T) * column_norms(factors.inputs.double().T)
        kappa = float(terms.sum()) / (sizes[factors.projection.name] or 1.0)
        found.append(Measured(residual.weight, rounding=summed(factors.errors.dtype, len(terms), kappa)))
    return worst_of(found)


def _dual_logits(draws: Draws, model: object) -> Measured:
    setup = trial(draws, model)
    moved = setup.move()
    dual = dual_patch(setup.lm, moved.trace)
    return missed(setup, moved, dual, dual)


def missed(setup: Trial, moved: Moved, found: Patch, right: Patch) -> Measured:
    """By how much the logits under `found` miss the fine-tuned ones; the rounding is that under the right patch."""
    rounding = pass_rounding(setup.lm, setup.zero_shot_ids, right)
    gap = norm(moved.tuned - moved.base)
    require_digits(rounding.length, gap, "fine-tuning changes its logits")
    return Measured(moved.miss(last_logits(setup.lm, setup.zero_shot_ids, found)), rounding=rounding.length / gap)


def _contributions(draws: Draws, model: object) -> Measured:
    """Σ of the tokens' parts, from the factors alone, against ‖ΔW_V x‖, from the ΔW that training summed.

    κ = Σ_t ‖e_t‖ Σ_i |x_ti x_i| / ‖ΔW_V x‖: an entry of ΔW is rounded beside the terms it is the sum of.
    """
    setup = trial(draws, model)
    trace = setup.train()
    patch = trace.tuned.patch
    assert isinstance(patch, Deltas)
    trained = {p.name: (p, w[0]) for p, w in zip(patch.projections, patch.weights, strict=True)}
    factors = role_factors(setup.lm, trace, "v")
    with patch.applied():
        taps = projected(setup.lm, setup.zero_shot_ids, [f.projection for f in factors])
    found: list[Measured] = []
    for f, tap in zip(factors, taps, strict=True):
        whole, delta = trained[f.projection.name]
        rows = rows_within(f.projection, whole)
        x = tap.x[0, -1].double()
        moved = norm((delta if rows is None else delta[rows]).double() @ x)
        parts = update_contributions(replace(f, errors=f.errors.double()), x)
        terms = column_norms(f.errors.double().T) * (f.inputs.double().abs() @ x.abs())
        rounding = summed(f.errors.dtype, len(terms), float(terms.sum()) / (moved or 1.0))
        found.append(Measured(abs(float(parts.sum()) - moved) / (moved or 1.0), rounding=rounding))
    return worst_of(found)


def _lead(draws: Draws, model: object) -> Measured:
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
    change = max(abs(found.tuned - found.base), least)
    # Two logits before and two after, each as far off as a typical one; `least` is a typical change likewise.
    rounded = pass_rounding(setup.lm, setup.zero_shot_ids, moved.trace.tuned.patch)
    rounding = 4 * rounded.length / math.sqrt(len(moved.base))
    require_digits(rounding, change, "fine-tuning changes a logit")
    return Measured(found.residual / change, rounding=rounding / change)


def _split(draws: Draws, model: object) -> Measured:
    setup = trial(draws, model)
    layers = record_heads(setup.lm, setup.in_context_ids)
    errors = split_heads(layers, setup.demo_places).error
    return worst_of([Measured(e, rounding=head_rounding(h)) for e, h in zip(errors, layers, strict=True)])


def head_rounding(heads: Heads) -> float:
    """What rounding can do to a layer's attention, relative to its output."""
    return summed(heads.out.dtype, max(heads.k.shape[1], heads.q.shape[1]), heads.conditioning())


def _relaxed(draws: Draws, model: object) -> Measured:
    """Linear attention over the model's own keys and values: one sum over all tokens, or two matrices.

    In float64, with κ = Σ_t ‖v_t‖ Σ_i |k_ti q_i| / ‖y‖.
    """
    setup = trial(draws, model)
    found: list[Measured] = []
    for layer in record_heads(setup.lm, setup.in_context_ids):
        group = layer.q.shape[0] // layer.k.shape[0]
        inside = torch.zeros(layer.k.shape[1], dtype=torch.bool, device=layer.k.device)
        inside[setup.demo_places.start : setup.demo_places.stop] = True
        for head, q in enumerate(layer.q.double()):
            keys, values = layer.k[head // group].double().T, layer.v[head // group].double().T
            parts = [state_weights(keys[:, mask], values[:, mask]) for mask in (~inside, inside)]
            aim = lin_attn(keys, values, q)
            kappa = float((column_norms(values) * (keys.abs().T @ q.abs())).sum()) / (norm(aim) or 1.0)
            error = relative_error((parts[0] + parts[1]) @ q, aim)
            found.append(Measured(error, rounding=summed(q.dtype, sum(keys.shape), kappa)))
    return worst_of(found)


def _four_terms(draws: Draws, model: object) -> Measured:
    """ΔW_FT itself, in float64: beside the base's V₀K₀ᵀ a small update would be lost in rounding.

    κ = Σ_t (‖v₁‖‖k₁‖ + ‖v₀‖‖k₀‖) / ‖ΔW_FT‖: the update is the difference of two sums over tokens.
    """
    setup = trial(draws, model)
    patch = setup.move().trace.tuned.patch
    assert isinstance(patch, Deltas)
    start = len(setup.prompts.prefix)
    found: list[Measured] = []
    for states in tuned_on_base_states(setup.lm, patch, setup.bare, setup.query.ids, start):
        wide = states.double()
        before = state_weights(wide.base_keys.mT, wide.base_values.mT)
        after = state_weights(wide.tuned_keys.mT, wide.tuned_values.mT)
        kappa = float(wide.summed_size().sum()) / (norm(after - before) or 1.0)
        error = relative_error(wide.four_terms().delta, after - before)
        found.append(Measured(error, rounding=summed(before.dtype, wide.base_keys.shape[1], kappa)))
    return worst_of(found)


def judged(setup: Trial, report: PatchReport, rounding: PassRounding) -> Measured:
    """The largest difference of the logits, or the patched difference beside the unpatched one, whichever is larger.

    The first alone would pass any patch of a model whose logits hardly differ; the second alone, a coarse one where
    they differ much. `rounding` is that of the pass under the right patch.
    """
    require_digits(rounding.length, report.gap, "the demonstrations change its logits")
    note = "the norms at the end of its blocks round float64 to float32" if _narrowed(setup.lm) else None
    error = max(report.error, report.relative)
    return Measured(error, report.unpatched, max(rounding.largest, rounding.length / report.gap), note)


def patched_rounding(setup: Trial, query: Query, patch: Patch) -> PassRounding:
    """What rounding can do to the zero-shot logits of a query under a patch."""
    narrow = torch.float32 if _narrowed(setup.lm) else None
    return pass_rounding(setup.lm, [*setup.bare, *query.ids], patch, narrow)


def _narrowed(lm: LanguageModel) -> bool:
    return lm.dtype == torch.float64 and any(_rounds(place) for place in feed_forwards(lm))


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
    prefix, query = setup.prompts.prefix, setup.query
    patch = context_patch(setup.lm, prefix, query.ids, setup.bare, token)
    report = patch_report(setup.lm, prefix, query.ids, setup.bare, patch)
    return judged(setup, report, patched_rounding(setup, query, patch))


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
    reports = [patch_report(lm, prompts.prefix, q.ids, setup.bare, patch) for q in prompts.queries]
    pairs = zip(reports, prompts.queries, strict=True)
    return worst_of([judged(setup, report, patched_rounding(setup, q, patch)) for report, q in pairs])


MODEL_IDENTITIES = (
    ModelIdentity("model: every tuned K and V is W₀ + Σ_t e_t x_tᵀ over its training tokens", IRIE, _reconstruction),
    ModelIdentity("model: base weights + LinAttn(X, E, ·) gives the fine-tuned logits", IRIE, _dual_logits),
    ModelIdentity("model: ‖ΔW_V x‖ = Σ_t ⟨e_t, ΔW_V x⟩ (x_t·x) / ‖ΔW_V x‖, every layer", IRIE, _contributions),
    ModelIdentity(
        "model: the change of a logit difference is the tokens' parts, summed along the path (by quadrature)",
        IRIE + ", Sundararajan et al. 2017",
        _lead,
        5e-3,  # of a quadrature, in any precision: the kinks of a ReLU leave it as much
    ),
    ModelIdentity("model: attention = λ y_demos + (1−λ) y_own, every head", DAI + ", exact for softmax", _split),
    ModelIdentity("model: relaxed to linear attention, F_ICL(q) = (W_ZSL + ΔW_ICL) q, every head", DAI, _relaxed),
    ModelIdentity("model: tuned heads, V₁K₁ᵀ − V₀K₀ᵀ = V₀ΔKᵀ + ΔV K₀ᵀ + ΔV ΔKᵀ, every head", DAI, _four_terms),
    ModelIdentity(
        "model: zero-shot with rank-1 patches at the last token = in-context logits (largest difference, or its ratio "
        "to the unpatched one)",
        GOLDWASER + ", Alg. 1",
        lambda draws, model: _context(draws, model, "last"),
    ),
    ModelIdentity(
        "model: the same as a change of weights that every token meets",
        GOLDWASER + "; " + DHERIN,
        lambda draws, model: _context(draws, model, "every"),
    ),
    ModelIdentity(
        "model: one least-squares patch (ridge 0) gives two queries their in-context logits",
        "Mazzawi et al. 2025, fitted as " + GOLDWASER,
        _one_patch_for_both,
    ),
)
