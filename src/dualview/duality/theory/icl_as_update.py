"""In-context learning as a weight update (Dai et al. 2023, arXiv 2212.10559, with the transposes that are often lost).

X' are the demonstrations' token vectors, X the query's own, q = W_Q x the query vector; columns are tokens.

Linear attention, exactly (T2b), with w(D) = W_V D Dᵀ W_Kᵀ:

    F_ICL(q) = LinAttn(W_K [X', X], W_V [X', X], q) = (w(X) + w(X')) q = (W_ZSL + ΔW_ICL) q,
    ΔW_ICL   = w(X') = Σ_i (W_V x'_i) (W_K x'_i)ᵀ.

Fine-tuning W_K and W_V by ΔW_K and ΔW_V, exactly (T2), with G = X Xᵀ:

    F_FT(q) = (W_V G W_Kᵀ + W_V G ΔW_Kᵀ + ΔW_V G W_Kᵀ + ΔW_V G ΔW_Kᵀ) q = (W_ZSL + ΔW_FT) q.

Softmax attention is no sum of the two parts but their average by mass, exactly (T2c):

    F_ICL(q) = λ F_demos(q) + (1 − λ) F_ZSL(q),    λ = Z'/(Z' + Z),  Z = Σ_i exp(k_iᵀ q · scale).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


def linear_weights(
    w_v: Float[Tensor, "d_v d"], w_k: Float[Tensor, "d_k d"], tokens: Float[Tensor, "d token"]
) -> Float[Tensor, "d_v d_k"]:
    """w(D) = W_V D Dᵀ W_Kᵀ: the matrix that linear attention over the tokens D applies to a query vector."""
    return state_weights(w_k @ tokens, w_v @ tokens)


def state_weights(
    keys: Float[Tensor, "*head d_k token"], values: Float[Tensor, "*head d_v token"]
) -> Float[Tensor, "*head d_v d_k"]:
    """V Kᵀ = Σ_i v_i k_iᵀ from keys and values as a model holds them (rotated, biased, repeated per group)."""
    return values @ keys.mT


def outer_products(
    keys: Float[Tensor, "d_k token"], values: Float[Tensor, "d_v token"]
) -> Float[Tensor, "token d_v d_k"]:
    """v_i k_iᵀ for every token: what each demonstration token adds to ΔW_ICL."""
    return torch.einsum("vi,ki->ivk", values, keys)


@dataclass(frozen=True)
class LinearSplit:
    """Linear attention over demonstrations and query: F_ICL(q) = (zsl + icl) q."""

    zsl: Float[Tensor, "d_v d_k"]
    """W_ZSL = w(X)."""
    icl: Float[Tensor, "d_v d_k"]
    """ΔW_ICL = w(X')."""

    def __call__(self, query: Float[Tensor, "d_k *query"]) -> Float[Tensor, "d_v *query"]:
        """(W_ZSL + ΔW_ICL) q."""
        return (self.zsl + self.icl) @ query


def linear_split(
    w_v: Float[Tensor, "d_v d"],
    w_k: Float[Tensor, "d_k d"],
    demos: Float[Tensor, "d demo"],
    own: Float[Tensor, "d token"],
) -> LinearSplit:
    """Dai et al. eq. 7: W_ZSL and ΔW_ICL of one linear attention head."""
    return LinearSplit(zsl=linear_weights(w_v, w_k, own), icl=linear_weights(w_v, w_k, demos))


@dataclass(frozen=True)
class FourTerms:
    """The four parts of a fine-tuned linear head; `base` is W_ZSL, the rest is ΔW_FT."""

    base: Float[Tensor, "d_v d_k"]
    """W_V G W_Kᵀ."""
    from_key: Float[Tensor, "d_v d_k"]
    """W_V G ΔW_Kᵀ."""
    from_value: Float[Tensor, "d_v d_k"]
    """ΔW_V G W_Kᵀ."""
    cross: Float[Tensor, "d_v d_k"]
    """ΔW_V G ΔW_Kᵀ, of second order in the update."""

    @classmethod
    def of_states(cls, keys: Tensor, values: Tensor, key_change: Tensor, value_change: Tensor) -> "FourTerms":
        """Expand (V + ΔV)(K + ΔK)ᵀ from keys and values as a model holds them (`*head d token`) and their changes."""
        return cls(
            base=state_weights(keys, values),
            from_key=state_weights(key_change, values),
            from_value=state_weights(keys, value_change),
            cross=state_weights(key_change, value_change),
        )

    @property
    def delta(self) -> Float[Tensor, "d_v d_k"]:
        """ΔW_FT."""
        return self.from_key + self.from_value + self.cross

    @property
    def total(self) -> Float[Tensor, "d_v d_k"]:
        """W_ZSL + ΔW_FT = (W_V + ΔW_V) G (W_K + ΔW_K)ᵀ."""
        return self.base + self.delta


def four_terms(
    w_v: Float[Tensor, "d_v d"],
    w_k: Float[Tensor, "d_k d"],
    delta_v: Float[Tensor, "d_v d"],
    delta_k: Float[Tensor, "d_k d"],
    own: Float[Tensor, "d token"],
) -> FourTerms:
    """Expand fine-tuning's effect on a linear head over the query's own tokens X (Dai et al. eq. 10, corrected)."""
    return FourTerms.of_states(w_k @ own, w_v @ own, delta_k @ own, delta_v @ own)


@dataclass(frozen=True)
class SoftmaxPart:
    """Softmax attention over some of the tokens: its output, and the log of the mass those tokens hold."""

    output: Float[Tensor, "*batch d_v"]
    log_mass: Float[Tensor, "*batch"]


def softmax_part(logits: Float[Tensor, "*batch token"], values: Float[Tensor, "*#batch token d_v"]) -> SoftmaxPart:
    """Attend to these tokens alone. Tokens are ROWS here, as in a model's heads (`head query key`, `head key d_head`).

    `logits` are already scaled and masked (−inf). Where every token is masked the output is 0 and the mass is 0, not
    NaN. `values` may broadcast over `*batch`.
    """
    log_mass = torch.logsumexp(logits, dim=-1)
    visible = torch.isfinite(log_mass)
    weights = torch.exp(logits - torch.where(visible, log_mass, 0).unsqueeze(-1))
    return SoftmaxPart(output=(weights.unsqueeze(-2) @ values).squeeze(-2), log_mass=log_mass)


@dataclass(frozen=True)
class SoftmaxSplit:
    """y = mass · demos + (1 − mass) · own."""

    mass: Float[Tensor, "*batch"]
    """λ: the softmax mass on the demonstrations. 0: they are ignored; 1: nothing else is read."""
    demos: Float[Tensor, "*batch d_v"]
    own: Float[Tensor, "*batch d_v"]

    @property
    def output(self) -> Float[Tensor, "*batch d_v"]:
        """The attention output over both parts together."""
        share = self.mass.unsqueeze(-1)
        return share * self.demos + (1 - share) * self.own


def merge(demos: SoftmaxPart, own: SoftmaxPart) -> SoftmaxSplit:
    """Join two softmaxes by their log-masses: λ = Z'/(Z' + Z) = sigmoid(log Z' − log Z).

    The query always sees itself, so `own` must hold some mass; `demos` may hold none (λ = 0).
    """
    return SoftmaxSplit(mass=torch.sigmoid(demos.log_mass - own.log_mass), demos=demos.output, own=own.output)


def softmax_split(
    demo_keys: Float[Tensor, "d_k demo"],
    demo_values: Float[Tensor, "d_v demo"],
    own_keys: Float[Tensor, "d_k token"],
    own_values: Float[Tensor, "d_v token"],
    query: Float[Tensor, " d_k"],
    scale: float | None = None,
) -> SoftmaxSplit:
    """T2c for one query of one head, tokens as columns; scale is 1/√d_k unless given."""
    factor = 1 / math.sqrt(query.shape[0]) if scale is None else scale
    return merge(
        softmax_part(query @ demo_keys * factor, demo_values.T), softmax_part(query @ own_keys * factor, own_values.T)
    )
