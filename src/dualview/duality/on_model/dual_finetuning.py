"""The comparison's own fine-tuning as attention over its training tokens (Irie et al. 2022), on a real model.

`learning.traces.trace_training` keeps, for every trained projection, what it read (x_t) and the error signal it got
back (e_t = −lr ∂loss/∂(W x_t), at the weights of that step). From those alone:

    W_T x = W_0 x + Σ_t e_t (x_tᵀ x),   b_T = b_0 + Σ_t e_t                `reconstruct`, `DualPatch`: exact
    ⟨u, (W_T − W_0) x⟩ = Σ_t ⟨u, e_t⟩ (x_tᵀ x)                             `update_contributions`: exact
    s(W_T) − s(W_0) = Σ_t Σ_projections ∫₀¹ ⟨∇s(W_0 + αΔW), e_t x_tᵀ⟩ dα   `score_contributions`: exact in sum

The last line is for a score s that the whole model computes, such as the difference of two candidates' log-probs, to
which no token contributes linearly: each token's part of the update is credited along the straight path from the base
weights to the tuned ones (integrated gradients, Sundararajan et al. 2017), by Gauss–Legendre quadrature, and `residual`
is what the quadrature left. All of it decomposes one training run; it does not say what would have happened without
a token.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dualview.anatomy.hooks import hooked
from dualview.anatomy.layers import Projection, Role
from dualview.duality.on_model.single_prompt import forward_row
from dualview.duality.theory.linear import DualForm, Residual, TokenIndex, residual
from dualview.duality.theory.toy_attention import lin_attn
from dualview.io.errors import UserError
from dualview.learning.traces import Factors, TrainingTokens, TrainingTrace
from dualview.learning.training_step import Tape
from dualview.learning.weight_patches import Deltas, Linearised, added
from dualview.models.language_model import LanguageModel

_MOST_NODES = 64


def dual_form(factors: Factors, tokens: TrainingTokens, dtype: torch.dtype | None = None) -> DualForm:
    """One tuned projection as `W_0 + attention over its training tokens` (the rate is already in the errors)."""
    projection, errors = factors.projection, factors.errors.to(dtype or factors.errors.dtype)
    # Fine-tuning shows one sequence a step in one call, so call and sequence say nothing.
    nowhere = torch.zeros_like(tokens.step)
    return DualForm(
        weight0=projection.weight().to(errors.dtype),
        bias0=_bias(projection, errors.dtype),
        keys=factors.inputs.T.to(errors.dtype),
        grads=errors.T,
        index=TokenIndex(step=tokens.step, call=nowhere, sequence=nowhere, position=tokens.position),
    )


def _bias(projection: Projection, dtype: torch.dtype) -> Tensor | None:
    bias = cast("Tensor | None", getattr(projection.module, "bias", None))
    if bias is None:
        return None
    own = bias.detach() if projection.rows is None else bias.detach()[projection.rows]
    return own.to(dtype)


def reconstruct(trace: TrainingTrace) -> tuple[Residual, ...]:
    """Every tuned projection rebuilt from its factors, against the one training made (T1c): errors per projection.

    Summed in float64, so that what is reported is training's own rounding, which `rounding` estimates.
    """
    deltas = deltas_of(trace)
    steps = int(trace.tokens.step.max()) + 1 if len(trace.tokens.step) else 0
    index = {projection.name: i for i, projection in enumerate(deltas.projections)}
    found: list[Residual] = []
    for factors in _made(trace):
        form = dual_form(factors, trace.tokens, torch.float64)
        at = index[factors.projection.name]
        bias = deltas.biases[at]
        change, bias_change = deltas.weights[at][0], None if bias is None else bias[0]
        found.append(residual(factors.projection.name, form, change, bias_change, steps, apart=True))
    return tuple(found)


def _made(trace: TrainingTrace) -> tuple[Factors, ...]:
    """The factors of the update that was made: a rate of 0 made none, whatever gradients its trace keeps."""
    if trace.tuned.lr != 0:
        return trace.factors
    return tuple(replace(factors, errors=torch.zeros_like(factors.errors)) for factors in trace.factors)


def _followed(trace: TrainingTrace) -> TrainingTrace:
    """The trace of a model that follows its tuned weights; the first-order expansion of one does not."""
    if isinstance(trace.tuned.patch, Linearised):
        raise UserError(
            "A linearised fine-tuning answers by the model's first-order expansion, not with tuned weights, so it has "
            "no dual form; use the rule sgd or layer-causal."
        )
    return replace(trace, factors=_made(trace))


def deltas_of(trace: TrainingTrace) -> Deltas:
    """The update that a training made; an error if it diverged."""
    if trace.tuned.status == "diverged":
        raise UserError(
            f"Fine-tuning at learning rate {trace.tuned.lr:g} diverged, so it has no dual form; take a smaller rate."
        )
    assert isinstance(trace.tuned.patch, Deltas)
    return trace.tuned.patch


@dataclass(frozen=True)
class DualPatch:
    """The fine-tuned model in dual form: base weights plus linear attention over the training tokens.

    No ΔW is ever formed: every projection attends to what it saw in training. Applied like any patch.
    """

    factors: tuple[Factors, ...]

    rows = 1

    def change(self, index: int, x: Float[Tensor, "*token d_in"]) -> Float[Tensor, "*token row"]:
        """LinAttn(X, E, x) + Σ_t e_t (the bias's part, where there is one)."""
        factors = self.factors[index]
        errors = factors.errors
        queries = x.to(errors.dtype).reshape(-1, x.shape[-1]).T
        found = lin_attn(factors.inputs.T.to(errors.dtype), errors.T, queries).T
        found = found + errors.sum(0) if factors.projection.biased else found
        return found.reshape(*x.shape[:-1], errors.shape[1])

    @contextmanager
    def applied(self) -> Generator[None]:
        def add(index: int, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return added(output, self.change(index, inputs[0]), self.factors[index].projection)

        modules = (factors.projection.module for factors in self.factors)
        with hooked(module.register_forward_hook(partial(add, i)) for i, module in enumerate(modules)):
            yield


def dual_patch(lm: LanguageModel, trace: TrainingTrace) -> DualPatch:
    """The fine-tuned model of a traced run, in dual form, for `lm`."""
    return DualPatch(trace_for(lm, _followed(trace)).factors)


def trace_for(lm: LanguageModel, trace: TrainingTrace) -> TrainingTrace:
    """The trace with its patch and factors on `lm`'s own modules.

    A model narrower than float32 is trained as a copy, and what is on the copy's modules does nothing to the model.
    """
    patch = deltas_of(trace).moved_to(lm.anatomy)
    own = {projection.name: projection for projection in patch.projections}
    factors = tuple(replace(f, projection=own[f.projection.name]) for f in trace.factors)
    return replace(trace, tuned=replace(trace.tuned, patch=patch), factors=factors)


def role_factors(lm: LanguageModel, trace: TrainingTrace, role: Role) -> tuple[Factors, ...]:
    """Each layer's factors of the map that makes k or v: of a fused matrix, the rows of that role alone.

    Where several maps in a row make it (low-rank attention), the one nearest to the attention.
    """
    known = {factors.projection.name: factors for factors in trace.factors}
    found: list[Factors] = []
    for number, layer in enumerate(lm.anatomy.layers):
        own = [p for p in layer.projections[role] if p.name in known]
        if not own:
            raise UserError(f"Layer {number} of {lm.name} has no trained {role} projection; train k and v.")
        whole = known[own[-1].name]
        columns = rows_within(own[-1], whole.projection)
        errors = whole.errors if columns is None else whole.errors[:, columns]
        found.append(Factors(own[-1], whole.inputs, errors))
    return tuple(found)


def rows_within(part: Projection, whole: Projection) -> Int[Tensor, " row"] | None:
    """Where a role's rows lie among the trained rows of the same map."""
    if part.rows is None:
        return None
    # Both lists of rows are sorted, and the part's rows are among the whole's.
    return part.rows if whole.rows is None else torch.searchsorted(whole.rows, part.rows)


def update_contributions(factors: Factors, x: Float[Tensor, "*query d_in"]) -> Float[Tensor, "*query token"]:
    """What each training token adds to the length of a projection's update at x: ⟨e_t, ΔW x⟩ (x_t·x) / ‖ΔW x‖.

    Exact: their sum is ‖ΔW x‖. Positive tokens made the update what it is, negative ones worked against it. Zeros where
    the projection did not move.
    """
    keys, errors = factors.inputs.to(factors.errors.dtype), factors.errors
    weights = x.to(errors) @ keys.T
    update = weights @ errors
    size = update.square().sum(-1, keepdim=True).sqrt()
    # A projection that did not move has no direction; 0/0 would be NaN in every share.
    direction = torch.where(size > 0, update / size, torch.zeros_like(update))
    return (direction @ errors.T) * weights


@dataclass(frozen=True)
class ScoreContributions:
    """What every training token's part of the update did to a score, projection by projection."""

    names: tuple[str, ...]
    tokens: TrainingTokens
    values: Float[Tensor, "projection token"]
    base: float
    """The score at the base weights."""
    tuned: float
    """The score at the tuned weights."""

    @property
    def residual(self) -> float:
        """|Σ − (tuned − base)|: what the quadrature missed."""
        return abs(float(self.values.sum()) - (self.tuned - self.base))

    @property
    def by_token(self) -> Float[Tensor, " token"]:
        return self.values.sum(0)


def score_contributions(
    lm: LanguageModel,
    trace: TrainingTrace,
    ids: Sequence[int],
    candidate: Sequence[int],
    against: Sequence[int],
    nodes: int = 8,
    tolerance: float = 1e-3,
    least: float = 0.01,
) -> ScoreContributions:
    """Each training token's share of the change of s = score(candidate) − score(against) after the prompt `ids`.

    A candidate's score is the mean log-prob of its tokens, so for single tokens s is the difference of their logits.
    The quadrature begins with `nodes` points and doubles them (at most to 64) until what it misses is less than
    `tolerance` of the change (or of `least`, if the change is smaller). Where experts are routed, the score jumps along
    the path and no quadrature sees the jump: `residual` shows it.
    """
    if not candidate or not against:
        raise UserError("Contributions need two candidates of at least one token each.")
    if nodes < 1:
        raise UserError(f"The quadrature needs at least one node, not {nodes}.")
    trace = trace_for(lm, _followed(trace))
    found = _quadrature(lm, trace, _Lead(ids, candidate, against), nodes)
    # Nothing is reused when the points are doubled: Gauss–Legendre rules of different sizes share none.
    while nodes < _MOST_NODES and found.residual > tolerance * max(abs(found.tuned - found.base), least):
        nodes *= 2
        found = _quadrature(lm, trace, _Lead(ids, candidate, against), nodes)
    return found


def _quadrature(lm: LanguageModel, trace: TrainingTrace, lead: _Lead, nodes: int) -> ScoreContributions:
    deltas = deltas_of(trace)
    values = torch.zeros(len(trace.factors), len(trace.tokens.step), dtype=torch.float64, device=lm.device)
    points, weights = np.polynomial.legendre.leggauss(nodes)
    for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
        _accumulate(values, lm, trace, deltas.scaled(float(point)), lead, float(weight))
    ends: list[float] = []
    for end in (deltas.scaled(0.0), deltas):
        with torch.no_grad(), end.applied():
            ends.append(float(lead.score(lm)))
    names = tuple(factors.projection.name for factors in trace.factors)
    return ScoreContributions(names, trace.tokens, values.cpu(), ends[0], ends[1])


@dataclass(frozen=True)
class _Lead:
    """score(candidate) − score(against) after a prompt."""

    ids: Sequence[int]
    candidate: Sequence[int]
    against: Sequence[int]

    def score(self, lm: LanguageModel) -> Float[Tensor, ""]:
        if len(self.candidate) == len(self.against) == 1:  # one pass does for both
            # The normaliser of the softmax cancels in the difference.
            logits = forward_row(lm, self.ids)[0, 0].double()
            return logits[self.candidate[0]] - logits[self.against[0]]
        return _candidate_score(lm, self.ids, self.candidate) - _candidate_score(lm, self.ids, self.against)


def _candidate_score(lm: LanguageModel, ids: Sequence[int], candidate: Sequence[int]) -> Float[Tensor, ""]:
    """The mean log-prob of a candidate's tokens after a prompt."""
    row = [*ids, *candidate[:-1]]
    logits = forward_row(lm, row, keep=range(len(ids) - 1, len(row)))[0].double()
    targets = torch.tensor(list(candidate), device=logits.device)
    return torch.log_softmax(logits, -1).gather(1, targets[:, None]).mean()


def _accumulate(
    values: Tensor, lm: LanguageModel, trace: TrainingTrace, deltas: Deltas, lead: _Lead, weight: float
) -> None:
    """Add weight · ⟨∇s, e_t x_tᵀ⟩ at these weights, for every training token and projection."""
    tape = Tape(deltas.projections, deltas)
    with torch.enable_grad(), tape.running():
        score = lead.score(lm)
    places = {factors.projection.name: place for place, factors in enumerate(trace.factors)}
    for (index, x, _), g in zip(tape.calls, tape.signals(score), strict=True):
        place = places[deltas.projections[index].name]
        factors = trace.factors[place]
        errors, keys = factors.errors, factors.inputs.to(factors.errors.dtype)
        shares = keys @ x[0].to(errors).T + (1.0 if factors.projection.biased else 0.0)  # x_t·x_s, and 1 for the bias
        values[place] += weight * ((errors @ g[0].to(errors).T) * shares).sum(1)
