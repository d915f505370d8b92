"""In-context learning and fine-tuning as updates of the same matrix, head by head (Dai et al. 2023, eq. 7 and 10).

Relax softmax attention to linear attention and both become a change of the matrix that a head applies to its query
vector (`attention` has the algebra), here with the keys and values a real model really holds:

    ΔW_ICL = Σ_i v'_i k'_iᵀ                     over the demonstrations' tokens, in the in-context prompt
    ΔW_FT  = V₁K₁ᵀ − V₀K₀ᵀ = V₀ΔKᵀ + ΔV K₀ᵀ + ΔV ΔKᵀ    over the query's own tokens (BOS included)

K₀, V₀ come from the base projections and K₁, V₁ from the tuned ones, both reading the base model's own states, as the
expansion assumes. Keys are rotated (and normed) as the model does, so the matrices act on rotated query vectors; for
that to be the same frame, the query has its in-context positions on both sides. A group's heads share keys and
values, hence one matrix for each key/value head. The relaxation drops the softmax and its scale: the two matrices are
what the claim is about, not what the model computes.

Floor: ΔW_ICL with the same keys and the same values, paired at random (Σ_i v'_π(i) k'_iᵀ), against the same ΔW_FT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, get_origin, get_type_hints

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.anatomy.dispatch import AttentionCall, Strategy
from dualview.duality.on_model.rounding import summed
from dualview.duality.on_model.single_prompt import forward_row, whole_row
from dualview.duality.on_model.softmax_split import Heads
from dualview.duality.theory.geometry import compare_weights
from dualview.duality.theory.icl_as_update import FourTerms, state_weights
from dualview.duality.theory.linalg import norm
from dualview.learning.weight_patches import Deltas
from dualview.models.language_model import LanguageModel


@dataclass(frozen=True)
class KeyValues:
    """One layer's keys and values over the same tokens, by the base projections and by the tuned ones."""

    base_keys: Float[Tensor, "kv_head token d_head"]
    base_values: Float[Tensor, "kv_head token d_value"]
    tuned_keys: Float[Tensor, "kv_head token d_head"]
    tuned_values: Float[Tensor, "kv_head token d_value"]

    terms: int
    """How many numbers were added up for one of them: the width of the model times the layers so far."""

    def double(self) -> KeyValues:
        """The same states, for sums in float64."""
        states = (self.base_keys, self.base_values, self.tuned_keys, self.tuned_values)
        return KeyValues(*(x.double() for x in states), terms=self.terms)

    def summed_size(self) -> Float[Tensor, " kv_head"]:
        """Σ_t (‖v₁‖‖k₁‖ + ‖v₀‖‖k₀‖): the size of what V₁K₁ᵀ and V₀K₀ᵀ sum, of which ΔW_FT is the difference."""
        base = self.base_keys.double().norm(dim=-1) * self.base_values.double().norm(dim=-1)
        tuned = self.tuned_keys.double().norm(dim=-1) * self.tuned_values.double().norm(dim=-1)
        return (base + tuned).sum(-1)

    def rounding(self) -> Float[Tensor, " kv_head"]:
        """2 ε √n Σ_t (‖v₁‖‖k₁‖ + ‖v₀‖‖k₀‖): a ΔW_FT no larger than this can be rounding alone (see `rounding`)."""
        return summed(self.base_keys.dtype, self.terms, 1.0) * self.summed_size()

    def four_terms(self) -> FourTerms:
        """The fine-tuned linear head's four parts, one matrix for each key/value head (T2, from states)."""
        keys, values = self.base_keys.mT, self.base_values.mT
        return FourTerms.of_states(keys, values, self.tuned_keys.mT - keys, self.tuned_values.mT - values)


class _BaseStates:
    """Two rows, base and tuned: every attention answers with the base row's output, so both rows read its states."""

    def __init__(self, inner: Strategy, width: int):
        self.inner, self.width = inner, width
        self.layers: list[KeyValues] = []

    def attend(self, layer: int, call: AttentionCall) -> Float[Tensor, "batch query head d_value"]:
        terms = self.width * (len(self.layers) + 1)
        self.layers.append(KeyValues(call.k[0], call.v[0], call.k[1], call.v[1], terms))
        # Only the base row's output goes on: the expansion takes both projections at the same states, layer by layer.
        out = self.inner.attend(layer, call)
        return out[:1].expand_as(out)


def tuned_on_base_states(
    lm: LanguageModel, patch: Deltas, bare: Sequence[int], query: Sequence[int], start: int
) -> tuple[KeyValues, ...]:
    """Every layer's keys and values of `bare + query` (the query's tokens at positions `start` …), base and tuned."""
    ids = [*bare, *query]
    # The query keeps its in-context positions, since rotated keys of other positions live in another frame.
    positions = [*range(len(bare)), *range(start, start + len(query))]
    at = torch.tensor(positions, device=lm.device)
    both = Deltas.side_by_side([Deltas.zero(patch.projections, 1, patch.weights[0].dtype), patch])
    strategy = _BaseStates(whole_row(lm, at), max(projection.d_in for projection in patch.projections))
    with torch.no_grad(), both.applied():
        forward_row(lm, ids, strategy=strategy, positions=positions, rows=2)
    return tuple(strategy.layers)


@dataclass(frozen=True)
class LayerTable:
    """A dataclass with tuples of one number per layer; NaN where a layer has none."""

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, float]], **rest: Any) -> Self:
        """One row of numbers a layer, by the names of the fields; a row without a number has none."""
        names = [name for name, kind in get_type_hints(cls).items() if get_origin(kind) is tuple]
        return cls(**{name: tuple(row.get(name, float("nan")) for row in rows) for name in names}, **rest)

    def to_json(self) -> dict[str, Any]:
        return {
            name: [None if np.isnan(x) else x for x in value] if isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class WeightSpace(LayerTable):
    """ΔW_ICL and ΔW_FT, layer by layer, means over key/value heads; every similarity with its shuffled floor."""

    cosine: tuple[float, ...]
    """1 the same update up to size, 0 unrelated, −1 opposite."""
    cosine_floor: tuple[float, ...]
    cosine_floor_sd: tuple[float, ...]
    """Standard deviation of the floor over shuffles."""
    left_overlap: tuple[float, ...]
    """Mean squared cosine of the principal angles of the leading column (value) spaces: 1 shared, rank/d by chance."""
    left_floor: tuple[float, ...]
    right_overlap: tuple[float, ...]
    """The same of the row (key) spaces."""
    right_floor: tuple[float, ...]
    stable_rank_icl: tuple[float, ...]
    stable_rank_ft: tuple[float, ...]
    norm_ratio: tuple[float, ...]
    """‖ΔW_ICL‖ / ‖ΔW_FT‖."""
    from_key: tuple[float, ...]
    """‖V₀ΔKᵀ‖ / ‖ΔW_FT‖: how much of fine-tuning's update each of its terms is (they may cancel, so may exceed 1)."""
    from_value: tuple[float, ...]
    cross: tuple[float, ...]
    rank: int
    shuffles: int


def compare_updates(
    icl: Sequence[Heads],
    demos: range,
    ft: Sequence[KeyValues],
    rank: int = 8,
    shuffles: int = 5,
    seed: int = 0,
) -> WeightSpace:
    """Compare the two updates on every layer; `icl` are the heads of the in-context prompt."""
    rows = [
        _layer(heads, demos, states, rank, shuffles, seed + number)
        for number, (heads, states) in enumerate(zip(icl, ft, strict=True))
    ]
    return WeightSpace.from_rows(rows, rank=rank, shuffles=shuffles)


def _layer(heads: Heads, demos: range, states: KeyValues, rank: int, shuffles: int, seed: int) -> dict[str, float]:
    keys, values = (x[:, demos.start : demos.stop].mT for x in (heads.k, heads.v))
    terms, rounding = states.four_terms(), states.rounding().tolist()
    orders = random_orders(keys.shape[-1], shuffles, seed, keys.device)
    per_head: list[dict[str, float]] = []
    floors: list[list[float]] = []
    for head in range(keys.shape[0]):
        update, aim = state_weights(keys[head], values[head]), terms.delta[head]
        size = norm(aim)
        # The base's and the tuned keys are different rows of a batch, which a processor may round differently.
        if size <= rounding[head] or norm(update) == 0:
            continue
        found = compare_weights(update, aim, rank)
        mixed = [state_weights(keys[head], values[head][:, order]) for order in orders]
        others = [compare_weights(m, aim, rank) for m in mixed]
        floors.append([other.cosine for other in others])
        per_head.append(
            {
                **vars(found),
                "left_floor": mean_of([other.left_overlap for other in others]),
                "right_floor": mean_of([other.right_overlap for other in others]),
                **{part: norm(getattr(terms, part)[head]) / size for part in ("from_key", "from_value", "cross")},
            }
        )
    if not per_head:
        return {}
    floor = np.asarray(floors).mean(0)  # over heads, so that its spread is that of a layer's mean
    row = {name: mean_of([head[name] for head in per_head]) for name in per_head[0]}
    return row | {"cosine_floor": mean_of(floor), "cosine_floor_sd": float(floor.std()) if shuffles else float("nan")}


def random_orders(count: int, shuffles: int, seed: int, device: torch.device) -> list[Int[Tensor, " token"]]:
    """The orders of the tokens that make the floors."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(count, generator=generator).to(device) for _ in range(shuffles)]


def mean_of(values: Sequence[float] | np.ndarray) -> float:
    """NaN for no values at all, without a warning."""
    return float(np.mean(values)) if len(values) else float("nan")
