"""What every part of the records shares: one `Setting`, and the names of the three main ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

MAIN_SETTINGS = ("zsl", "icl", "ft")
ARRAYS = ("log_probs", "h", "m", "demo_mass")
"""A setting's arrays, in the order of its fields."""


@dataclass(frozen=True)
class Setting:
    """One way of asking the model every query (zsl, icl, ft, or a control), recorded at one token of each query."""

    log_probs: Float[np.ndarray, "query candidate"]
    """Mean log-probability of each candidate's tokens; -inf where a query has fewer candidates."""
    h: Float[np.ndarray, "query layer d_model"] | None = None
    """Attention output after the output projection, before the residual."""
    m: Float[np.ndarray, "query layer head column"] | None = None
    """Scaled pre-softmax logits against the query's own tokens, zero beyond `Records.columns[query]`."""
    demo_mass: Float[np.ndarray, "query layer head"] | None = None
    """λ: the softmax mass on the demonstration tokens."""
