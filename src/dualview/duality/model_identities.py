"""The identities on a language model's own weights and activations, for `verify --model`.

Every check makes a small comparison of its own (three demonstrations, one query, a few steps of SGD), so each stands
alone. Numbers are for single precision; in float64 the errors are smaller by nine orders.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dualview.duality.algebra import norm
from dualview.duality.attention import state_weights
from dualview.duality.context_patch import Token, patch_report
from dualview.duality.feed_forward import feed_forwards
from dualview.duality.heads import record_heads, split_heads
from dualview.duality.identities_implicit import DHERIN, GOLDWASER
from dualview.duality.identities_linear import DAI, IRIE
from dualview.duality.identity import Draws, ModelIdentity
from dualview.duality.meta_gradients import projected
from dualview.duality.reusable import fit_patch, in_context_aims
from dualview.duality.rows import last_logits
from dualview.duality.tensors import lin_attn, relative_error
from dualview.duality.tuning import (
    dual_patch,
    reconstruct,
    role_factors,
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
    trace = setup.train()
    base, tuned, dual = (
        last_logits(setup.lm, setup.zero_shot_ids, patch)
        for patch in (None, trace.tuned.patch, dual_patch(setup.lm, trace))
    )
    return norm(dual - tuned) / norm(tuned - base)


def _contributions(draws: Draws, model: object) -> float:
    setup = trial(draws, model)
    trace = setup.train()
    patch = trace.tuned.patch
    assert isinstance(patch, Deltas)
    factors = role_factors(setup.lm, trace, "v")
    with patch.applied():
        taps = projected(setup.lm, setup.zero_shot_ids, [f.projection for f in factors])
    with torch.no_grad():
        plain = [tap.x[0, -1].double() @ tap.projection.weight().double().T for tap in taps]
    worst = 0.0
    for f, tap, before in zip(factors, taps, plain, strict=True):
        bias = f.errors.double().sum(0) if f.projection.biased else 0.0
        own_bias = _bias_rows(f.projection.module, f.projection.rows)
        moved = tap.y[0, -1].double() - before - own_bias - bias  # a small difference of rounded numbers
        worst = max(worst, abs(float(update_contributions(f, tap.x[0, -1]).double().sum()) / norm(moved) - 1.0))
    return worst


def _bias_rows(module: torch.nn.Module, rows: torch.Tensor | None) -> torch.Tensor | float:
    bias = getattr(module, "bias", None)
    if not isinstance(bias, torch.Tensor):
        return 0.0
    return (bias if rows is None else bias[rows]).detach().double()


def _lead(draws: Draws, model: object) -> float:
    setup = trial(draws, model)
    try:
        feed_forwards(setup.lm)
    except UserError:
        raise UserError("where experts are routed, the score jumps along the path") from None
    good, bad = setup.query.candidates
    found = score_contributions(setup.lm, setup.train(), setup.zero_shot_ids, good, bad)
    return found.residual / max(abs(found.tuned - found.base), 0.01)


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
    setup = trial(draws, model)
    patch = setup.train().tuned.patch
    assert isinstance(patch, Deltas)
    start = len(setup.prompts.prefix)
    worst = 0.0
    for states in tuned_on_base_states(setup.lm, patch, setup.bare, setup.query.ids, start):
        whole = state_weights(states.tuned_keys.mT, states.tuned_values.mT)
        worst = max(worst, relative_error(states.four_terms().total, whole))
    return worst


def _context(draws: Draws, model: object, token: Token) -> float:
    setup = trial(draws, model)
    return patch_report(setup.lm, setup.prompts.prefix, setup.query.ids, setup.bare, token=token).error


def _one_patch_for_both(draws: Draws, model: object) -> float:
    setup = trial(draws, model)
    lm, prompts = setup.lm, setup.prompts
    places = feed_forwards(lm)
    if any(not isinstance(place.carrier, torch.nn.Linear) and place.kind == "scale" for place in places):
        raise UserError("its blocks end in a norm, whose scale has too few numbers for several queries")
    with torch.no_grad():
        prefix = compute_prefix(lm, prompts.prefix, len(setup.bare))
    aims = in_context_aims(lm, places, prompts.queries, prefix)
    patch = fit_patch(lm, places, prompts.queries, setup.bare, aims, ridge=0.0)
    gaps = [
        last_logits(lm, [*setup.bare, *q.ids], patch) - last_logits(lm, [*prompts.prefix, *q.ids])
        for q in prompts.queries
    ]
    return max(float(gap.abs().max()) for gap in gaps)


MODEL_IDENTITIES = (
    ModelIdentity(
        "model: every tuned K and V is W₀ + Σ_t e_t x_tᵀ over its training tokens", IRIE, _reconstruction, 1e-5
    ),
    ModelIdentity("model: base weights + LinAttn(X, E, ·) gives the fine-tuned logits", IRIE, _dual_logits, 1e-3),
    ModelIdentity("model: ‖ΔW_V x‖ = Σ_t ⟨e_t, ΔW_V x⟩ (x_t·x) / ‖ΔW_V x‖, every layer", IRIE, _contributions, 1e-2),
    ModelIdentity(
        "model: the change of a logit difference is the tokens' parts, summed along the path",
        IRIE + ", Sundararajan et al. 2017",
        _lead,
        5e-3,
    ),
    ModelIdentity("model: attention = λ y_demos + (1−λ) y_own, every head", DAI + ", exact for softmax", _split, 1e-4),
    ModelIdentity("model: relaxed to linear attention, F_ICL(q) = (W_ZSL + ΔW_ICL) q, every head", DAI, _relaxed, 1e-9),
    ModelIdentity("model: tuned heads, V₁K₁ᵀ = V₀K₀ᵀ + V₀ΔKᵀ + ΔV K₀ᵀ + ΔV ΔKᵀ, every head", DAI, _four_terms, 1e-4),
    ModelIdentity(
        "model: zero-shot with rank-1 patches at the last token = in-context logits (largest difference)",
        GOLDWASER + ", Alg. 1",
        lambda draws, model: _context(draws, model, "last"),
        1e-3,
    ),
    ModelIdentity(
        "model: the same as a change of weights that every token meets",
        GOLDWASER + "; " + DHERIN,
        lambda draws, model: _context(draws, model, "every"),
        1e-3,
    ),
    ModelIdentity(
        "model: one least-squares patch (ridge 0) gives two queries their in-context logits",
        "Mazzawi et al. 2025, fitted as " + GOLDWASER,
        _one_patch_for_both,
        1e-2,
    ),
)
