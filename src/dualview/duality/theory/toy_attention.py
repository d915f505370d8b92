"""The two attentions every duality is about, with tokens as columns, and the one error every check reports.

LinAttn(K, V, q)  = V Kᵀ q                      (unnormalised: no softmax, no scale)
SoftAttn(K, V, q) = V softmax(Kᵀ q · scale)     (scale 1/√d_k unless given)
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.theory.linalg import norm

Keys = Float[Tensor, "d_k token"]
Values = Float[Tensor, "d_v token"]
Queries = Float[Tensor, "d_k *query"]
"""One query as a vector, or many as columns; `Outputs` likewise."""
Outputs = Float[Tensor, "d_v *query"]


def lin_attn(keys: Keys, values: Values, query: Queries) -> Outputs:
    """LinAttn(K, V, q) = V Kᵀ q = Σ_t v_t (k_tᵀ q); one query as a vector, or many as columns.

    >>> K, V, q = torch.eye(2), torch.tensor([[1.0, 2.0]]), torch.tensor([3.0, 5.0])
    >>> lin_attn(K, V, q)
    tensor([13.])
    """
    return values @ (keys.T @ query)


def soft_attn(keys: Keys, values: Values, query: Queries, scale: float | None = None) -> Outputs:
    """SoftAttn(K, V, q) = V softmax(Kᵀ q · scale), the softmax over tokens; scale is 1/√d_k when not given."""
    return values @ attention_weights(keys, query, scale)


def attention_weights(keys: Keys, query: Queries, scale: float | None = None) -> Float[Tensor, "token *query"]:
    """softmax(Kᵀ q · scale) over tokens: what each token weighs for each query (columns sum to 1)."""
    factor = 1 / math.sqrt(keys.shape[0]) if scale is None else scale
    return torch.softmax(keys.T @ query * factor, dim=0)


def relative_error(found: Float[Tensor, "*shape"], expected: Float[Tensor, "*shape"]) -> float:
    """‖found − expected‖ / ‖expected‖ (Frobenius, in float64); ‖found‖ itself where the expected value is zero.

    0 is equality; a wrong sign gives 2; NaN anywhere gives NaN, which passes no tolerance.
    """
    distance = norm(found.double() - expected.double())
    size = norm(expected)
    return distance / size if size > 0 else distance
