"""Real records in which fine-tuning is replaced by something known.

`dosed` puts a known share of the in-context update into FT's; `reassigned` gives every query another query's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from dualview.records import Records, Setting

Rotations = list[Float[np.ndarray, "d_model d_model"]]
_KEPT = ("zsl", "icl", "ft", "icl_flipped_labels", "ft_flipped_labels")


def main_settings(records: Records, queries: int | None = None) -> Records:
    """The settings that the deciding levels read, without attention maps, of the first queries."""
    first = slice(queries)
    settings = {
        name: Setting(setting.log_probs[first], None if setting.h is None else setting.h[first])
        for name, setting in records.settings.items()
        if name in _KEPT
    }
    columns = None if records.columns is None else records.columns[first]
    return Records(records.gold[first], settings, columns)


def rotations(records: Records, rng: np.random.Generator) -> Rotations:
    """A random rotation for each layer (the Q of a Gaussian matrix, its signs made uniform)."""
    _, layers, d = _h(records["zsl"]).shape
    found: Rotations = []
    for _ in range(layers):
        q, r = np.linalg.qr(rng.normal(size=(d, d)).astype(np.float32))
        found.append(q * np.sign(np.diag(r)))
    return found


def dosed(records: Records, dose: float, turned: Rotations, order: Int[np.ndarray, " query"]) -> Records:
    """FT with a known dose α of what ICL does, at FT's own size, for every query:

        Δh_FT := ‖Δh_FT‖ · (α û + √(1 − α²) R ŵ)        û, ŵ: ICL's and FT's updates, of length 1

    and the same for the contrast between true and flipped labels. The scores change by α times what ICL does to them
    plus √(1 − α²) times what it does to those of another query of the same class (`order`): FT knows the task as well
    as ICL at any dose, so that only the similarity is weak.
    """
    rest = (1 - dose**2) ** 0.5
    zsl, icl, ft = (records[name] for name in ("zsl", "icl", "ft"))
    icl_flipped, ft_flipped = (records[f"{name}_flipped_labels"] for name in ("icl", "ft"))

    def mixed(a: Float[np.ndarray, "query layer d"], b: Float[np.ndarray, "query layer d"]) -> np.ndarray:
        own = np.stack([b[:, layer] @ turn for layer, turn in enumerate(turned)], 1)
        size, other = (np.linalg.norm(part, axis=-1, keepdims=True) for part in (own, a))
        return dose * a * np.divide(size, other, out=np.zeros_like(size), where=other > 0) + rest * own

    h = _h(zsl) + mixed(_h(icl) - _h(zsl), _h(ft) - _h(zsl))
    contrast = mixed(_h(icl) - _h(icl_flipped), _h(ft) - _h(ft_flipped))
    scores = {
        name: zsl.log_probs + dose * change + rest * change[order]
        for name, change in (("ft", icl.log_probs - zsl.log_probs), ("flipped", icl_flipped.log_probs - zsl.log_probs))
    }
    own = {"ft": Setting(scores["ft"], h), "ft_flipped_labels": Setting(scores["flipped"], h - contrast)}
    return replace(records, settings={**records.settings, **own})


def reassigned(records: Records, others: Records, order: Int[np.ndarray, " query"]) -> Records:
    """FT from other records of the same queries, each query with what happened to another one."""
    zsl, zsl_other = _h(records["zsl"]), _h(others["zsl"])
    settings = dict(records.settings)
    for name in ("ft", "ft_flipped_labels"):
        other = others[name]
        moved = other.log_probs - others["zsl"].log_probs
        settings[name] = replace(
            other,
            log_probs=records["zsl"].log_probs + moved[order],
            h=zsl + (_h(other) - zsl_other)[order],
        )
    return replace(records, settings=settings)


def within_classes(gold: Int[np.ndarray, " query"], rng: np.random.Generator) -> Int[np.ndarray, " query"]:
    """A random order of the queries that keeps every gold label in place."""
    order = np.arange(len(gold))
    for label in np.unique(gold):
        own = np.flatnonzero(gold == label)
        order[own] = rng.permutation(own)
    return order


def _h(setting: Setting) -> Float[np.ndarray, "query layer d_model"]:
    assert setting.h is not None
    return setting.h
