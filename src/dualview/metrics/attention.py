"""How alike ICL and FT look at the query's own tokens: SimAM, and the attention mass on the demonstrations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dualview.metrics.vectors import Form, defined_mean, layer_of, overall_mean, similarity


def map_cosines(
    form: Form,
    zsl: Float[np.ndarray, "query layer head column"],
    icl: Float[np.ndarray, "query layer head column"],
    ft: Float[np.ndarray, "query layer head column"],
    columns: Int[np.ndarray, " query"] | None = None,
) -> Float[np.ndarray, "query layer head"]:
    """The cosine over columns of each query, layer and head; `form` "map" compares the maps, "update" their changes."""
    return np.stack(
        [
            similarity(form, layer_of(zsl, layer, columns), layer_of(icl, layer, columns), layer_of(ft, layer, columns))
            for layer in range(zsl.shape[1])
        ],
        axis=1,
    )


@dataclass(frozen=True)
class SimAM:
    """SimAM per head, NaN where undefined; `by_query` averages the heads.

    before = cos(m_icl, m_zsl) and after = cos(m_icl, m_ft) compare whole maps (Dai et al. 2212.10559, section 4.3):
    both are near 1 wherever nothing changes much, and only after − before can tell. delta = cos(m_icl − m_zsl,
    m_ft − m_zsl) compares the changes (Deutch et al. 2311.07772, section 3): 1 the same change, 0 unrelated. Caveat:
    a constant added to all columns counts as a change, though softmax over the same columns ignores it.
    """

    before: Float[np.ndarray, "query layer head"]
    after: Float[np.ndarray, "query layer head"]
    delta: Float[np.ndarray, "query layer head"]


def sim_am(
    zsl: Float[np.ndarray, "query layer head column"],
    icl: Float[np.ndarray, "query layer head column"],
    ft: Float[np.ndarray, "query layer head column"],
    columns: Int[np.ndarray, " query"] | None = None,
) -> SimAM:
    """All three SimAM similarities from the pre-softmax logits over the query's own tokens."""
    return SimAM(
        before=map_cosines("map", zsl, icl, zsl, columns),
        after=map_cosines("map", zsl, icl, ft, columns),
        delta=map_cosines("update", zsl, icl, ft, columns),
    )


def by_query(values: Float[np.ndarray, "query layer head"]) -> Float[np.ndarray, "query layer"]:
    """The mean over the heads that are defined."""
    return defined_mean(values, axis=2)


@dataclass(frozen=True)
class DemoMass:
    """How much attention goes to the demonstrations: λ, 0 none of it, 1 all of it."""

    mean: float
    per_layer: Float[np.ndarray, " layer"]
    per_head: Float[np.ndarray, "layer head"]

    def to_json(self) -> dict[str, object]:
        return {"mean": self.mean, "per_layer": self.per_layer.tolist(), "per_head": self.per_head.tolist()}


def demo_mass_summary(demo_mass: Float[np.ndarray, "query layer head"]) -> DemoMass:
    """Means of λ over queries (per head), heads (per layer) and layers."""
    values = demo_mass.astype(np.float64)
    heads_first = by_query(values)
    return DemoMass(overall_mean(heads_first), defined_mean(heads_first, axis=0), defined_mean(values, axis=0))
