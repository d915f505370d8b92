"""SimAM: do ICL and FT attend to the query's own tokens in the same way? And λ, the mass on demonstrations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dualview.metrics.cosine import defined_mean, layer_of, overall_mean, similarity


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
    before: list[np.ndarray] = []
    after: list[np.ndarray] = []
    delta: list[np.ndarray] = []
    for layer in range(zsl.shape[1]):
        base, shown, tuned = (layer_of(maps, layer, columns) for maps in (zsl, icl, ft))
        before.append(similarity("map", base, shown, base))
        after.append(similarity("map", base, shown, tuned))
        delta.append(similarity("update", base, shown, tuned))
    return SimAM(np.stack(before, axis=1), np.stack(after, axis=1), np.stack(delta, axis=1))


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
