"""The parts of `Records`: one `Setting` for each way of asking, and the scores of the training tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Num

MAIN_SETTINGS = ("zsl", "icl", "ft")
LEARNERS = ("patch", "adapter")
"""Settings that are judged as ft is, each with controls of its own, `<learner>/<control>`. Several adapters are
`adapter:NAME`."""
AXES: Mapping[str, int] = {
    "log_probs": 2,
    "h": 3,
    "m": 4,
    "demo_mass": 3,
    "top_ids": 2,
    "top_probs": 2,
    "off_span": 3,
    "off_contrast": 3,
}
"""A setting's arrays, in the order of its fields, and how many axes each has."""
MEAN_RIDGE = 0.01
"""ρ of the fit of what all queries share (`off_span`): a direction that nearly all queries have in their spans would be
known from a few queries alone, and the fit would follow these; it keeps out of it."""


def is_learner(name: str) -> bool:
    """Whether a setting is judged as ft is.

    >>> is_learner("adapter:mine"), is_learner("adapter/ft_sign_flipped"), is_learner("ft")
    (True, False, False)
    """
    return "/" not in name and name.partition(":")[0] in LEARNERS


def is_away(array: object) -> bool:
    """Whether an array is a tensor, which may be on a GPU."""
    return array is not None and not isinstance(array, np.ndarray)


def to_host(array: Num[np.ndarray, "*_shape"]) -> Num[np.ndarray, "*_shape"]:
    """numpy's array, in at least single precision, of what may be a tensor on a device."""
    if not is_away(array):
        return array
    tensor: Any = array
    return (tensor.float() if tensor.dtype.itemsize < 4 else tensor).cpu().numpy()


@dataclass(frozen=True)
class Setting:
    """One way of asking the model every query (zsl, icl, ft, or a control), recorded at one token of each query.

    While a run on a GPU is being measured, arrays of vectors may be tensors there (in the type of number in which they
    were computed); `on_host` makes them numpy's.
    """

    log_probs: Float[np.ndarray, "query candidate"]
    """Mean log-probability of each candidate's tokens; -inf where a query has fewer candidates."""
    h: Float[np.ndarray, "query layer d_model"] | None = None
    """Attention output after the output projection, before the residual."""
    m: Float[np.ndarray, "query layer head column"] | None = None
    """Scaled pre-softmax logits against the query's own tokens, zero beyond `Records.columns[query]`."""
    demo_mass: Float[np.ndarray, "query layer head"] | None = None
    """λ: the softmax mass on the demonstration tokens."""
    top_ids: Int[np.ndarray, "query k"] | None = None
    """The k most probable next tokens after the prompt, over the whole vocabulary."""
    top_probs: Float[np.ndarray, "query k"] | None = None
    """Their probabilities."""
    off_span: Float[np.ndarray, "query layer d_model"] | None = None
    """h − h_zsl beyond what all queries share and outside the span of the heads' zero-shot outputs and h_zsl, per query
    and layer (`dualview.models.head_span`); kept of the settings that the verdict compares."""
    off_contrast: Float[np.ndarray, "query layer d_model"] | None = None
    """The same of h less the h that flipped labels give; kept of icl, ft, and what is judged as ft is."""

    def on_host(self) -> Setting:
        """The setting itself if it is all numpy's, else a copy that is."""
        away = {name: array for name in AXES if is_away(array := getattr(self, name))}
        return replace(self, **{name: to_host(array) for name, array in away.items()}) if away else self


@dataclass(frozen=True)
class TokenScores:
    """How much each rule counts every template and label token of the demonstrations: what Kendall's tau compares.

    `by_rule["icl"]` is Σ_heads of q·k·scale, `icl_reordered` the same with the demonstrations in another order; the
    other rules are fine-tuning's forms (`released`, `dual_k`, `dual_v`), each with its `_lr0` control. Only the first
    queries are kept. The forms of fine-tuning stay in double precision, since ranks depend on the last digits:
    100 queries, 30 layers and 700 tokens take 16.8 MB a form and 8.4 MB for each in-context side.
    """

    demo: Int[np.ndarray, " token"]
    """The demonstration that each token belongs to."""
    by_rule: Mapping[str, Float[np.ndarray, "query layer token"]]
