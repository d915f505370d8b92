"""The claim that in-context learning computes "meta-gradients", measured on the same tokens (Dai et al. 2023, sec. 3).

In ΔW_ICL = Σ_i (W_V x'_i)(W_K x'_i)ᵀ the values are where fine-tuning's error signals are in ΔW = Σ_i e_i x_iᵀ, so
W_V x'_i is called a meta-gradient. Here both are computed for every demonstration token and layer:

    m_i = W_V x'_i      the value projection's output at token i of the in-context prompt
    e_i = −lr ∂loss/∂(W_V x_i)      the same projection's error signal at the same token in fine-tuning

and compared: cosine token by token (the claim as written), linear CKA over tokens (equal up to rotation and scale), and
principal angles, of the spaces of values (chance rank/d) and of the spaces of tokens. Shuffling the tokens of one side
gives the floor of everything but the first kind of angle, which no order can change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from dualview.anatomy.layers import Role
from dualview.duality.on_model.demo_tokens import DemoTokens
from dualview.duality.on_model.dual_finetuning import role_factors
from dualview.duality.on_model.single_prompt import projected
from dualview.duality.on_model.weight_space import LayerTable, mean_of, random_orders
from dualview.duality.theory.geometry import column_cosines, linear_cka, orthonormal_basis, overlap
from dualview.duality.theory.linalg import norm
from dualview.learning.traces import TrainingTrace
from dualview.models.language_model import LanguageModel


@dataclass(frozen=True)
class TokenVectors:
    """One layer's two vectors for every shared demonstration token, as columns."""

    meta: Float[Tensor, "d token"]
    error: Float[Tensor, "d token"]


def token_vectors(
    lm: LanguageModel, trace: TrainingTrace, ids: Sequence[int], shared: DemoTokens, role: Role = "v"
) -> tuple[TokenVectors, ...]:
    """Both vectors of every layer; `ids` is the in-context prompt that holds the demonstrations."""
    factors = role_factors(lm, trace, role)
    taps = projected(lm, ids, [f.projection for f in factors])
    return tuple(
        TokenVectors(tap.y[0, shared.place.to(tap.y.device)].T, shared.from_training(f.errors, trace.tokens).T)
        for tap, f in zip(taps, factors, strict=True)
    )


@dataclass(frozen=True)
class MetaGradients(LayerTable):
    """ "Meta-gradients" and true error signals, layer by layer; the floors are means over shuffles of the tokens."""

    cosine: tuple[float, ...]
    """Mean over tokens that have an error signal: 1 the claim as written, 0 unrelated, −1 opposite."""
    cosine_floor: tuple[float, ...]
    cosine_floor_sd: tuple[float, ...]
    cka: tuple[float, ...]
    """1 equal up to rotation and scale, 0 uncorrelated; biased upwards when tokens are few."""
    cka_floor: tuple[float, ...]
    cka_floor_sd: tuple[float, ...]
    overlap: tuple[float, ...]
    """Mean squared cosine of the principal angles of the leading value spaces."""
    overlap_chance: tuple[float, ...]
    """rank / d."""
    token_overlap: tuple[float, ...]
    """The same of the leading token spaces: do both vary over the same tokens?"""
    token_overlap_floor: tuple[float, ...]
    tokens: int
    shuffles: int


def compare_meta_gradients(
    vectors: Sequence[TokenVectors], rank: int = 8, shuffles: int = 5, seed: int = 0
) -> MetaGradients:
    """Measure the similarity on every layer, with `shuffles` random orders of the error signals as the floor."""
    rows = [_layer(layer, rank, shuffles, seed + number) for number, layer in enumerate(vectors)]
    return MetaGradients.from_rows(rows, tokens=vectors[0].meta.shape[1] if vectors else 0, shuffles=shuffles)


def _layer(vectors: TokenVectors, rank: int, shuffles: int, seed: int) -> dict[str, float]:
    meta, error = vectors.meta.double(), vectors.error.double()
    # A layer that training did not reach has no cosine; an empty row becomes NaN in the table.
    if norm(error) == 0 or norm(meta) == 0:
        return {}
    values, error_values = orthonormal_basis(meta, rank), orthonormal_basis(error, rank)
    over_tokens, error_over_tokens = orthonormal_basis(meta.T, rank), orthonormal_basis(error.T, rank)
    orders = random_orders(meta.shape[1], shuffles, seed, meta.device)
    cosines = np.array([_cosine(meta, error[:, order]) for order in orders])
    ckas = np.array([linear_cka(meta, error[:, order]) for order in orders])
    # The space of values needs no shuffles: permuting tokens does not change which values they span.
    shared = np.array([overlap(over_tokens, error_over_tokens[order]) for order in orders])
    return {
        "cosine": _cosine(meta, error),
        "cosine_floor": mean_of(cosines),
        "cosine_floor_sd": float(cosines.std()) if shuffles else float("nan"),
        "cka": linear_cka(meta, error),
        "cka_floor": mean_of(ckas),
        "cka_floor_sd": float(ckas.std()) if shuffles else float("nan"),
        "overlap": overlap(values, error_values),
        "overlap_chance": max(values.shape[1], error_values.shape[1]) / meta.shape[0],
        "token_overlap": overlap(over_tokens, error_over_tokens),
        "token_overlap_floor": mean_of(shared),
    }


def _cosine(a: Float[Tensor, "d token"], b: Float[Tensor, "d token"]) -> float:
    return float(column_cosines(a, b).nanmean())
