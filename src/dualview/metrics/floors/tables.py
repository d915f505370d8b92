"""Every similarity of every setting, per query and layer, from one reading of the records.

Each chunk of queries is read once in double precision, and everything follows from its inner products
(`dualview.metrics.floors.updates`). `sim_aou`, `sim_am` and `label_contrast` define the same numbers vector by vector.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from dualview.metrics.arrays import NUMPY, Backend, as_type, library, to_numpy
from dualview.metrics.cosine import Form, cosine, defined_mean, dot, norm, ratio, root
from dualview.metrics.floors.updates import BlockProducts, Compared
from dualview.metrics.label_contrast import FLIPPED
from dualview.records import MAIN_SETTINGS, Records

FORMS: Mapping[str, tuple[Form, ...]] = {"h": ("update", "normalised"), "m": ("update", "map")}
_CHUNK = 64


@dataclass(frozen=True)
class SettingTables:
    """The similarities of `h` or `m`: those of ICL and FT, and with each control in the place of one of them."""

    main: Mapping[Form, Float[np.ndarray, "query layer group"]]
    before: Float[np.ndarray, "query layer group"] | None
    """cos(m_icl, m_zsl), for maps."""
    sizes: Mapping[str, Float[np.ndarray, "query layer"]]
    """‖h − h_zsl‖ / ‖h_zsl‖ of ICL and FT, for outputs."""
    contrast: Float[np.ndarray, "query layer"] | None
    """The label contrast, for outputs where flipped labels were run."""
    controls: Mapping[str, Mapping[Form, Float[np.ndarray, "query layer"]]]
    """Averaged over heads."""


@dataclass(frozen=True)
class Replaced:
    """A setting in the place of ICL or FT."""

    place: Literal["icl", "ft"]
    stack: Float[np.ndarray, "query layer *rest"]


class _Chunk:
    """Some queries in some layers, in double precision; zero beyond a map's columns."""

    def __init__(
        self, at: tuple[slice, slice], zsl: np.ndarray, columns: Int[np.ndarray, " query"] | None, backend: Backend
    ):
        self.at, self.backend, self.beyond = at, backend, None
        if columns is not None and zsl.ndim == 4 and columns[at[0]].min() < zsl.shape[-1]:
            self.beyond = backend.put(np.arange(int(zsl.shape[-1])) >= columns[at[0]].reshape(-1, 1, 1, 1))
        self.z = self.read(zsl)

    def read(self, stack: np.ndarray) -> Float[np.ndarray, "query layer group dim"]:
        part = self.backend.put(stack[self.at])
        if self.beyond is not None:
            part = library(part).where(self.beyond, 0.0, part)
        return as_type(part if part.ndim == 4 else part[:, :, None], "float64")

    def update(self, stack: np.ndarray) -> Float[np.ndarray, "query layer group dim"]:
        return self.read(stack) - self.z


def setting_tables(
    zsl: Float[np.ndarray, "query layer *rest"],
    icl: Float[np.ndarray, "query layer *rest"],
    ft: Float[np.ndarray, "query layer *rest"],
    controls: Mapping[str, Replaced] | None = None,
    columns: Int[np.ndarray, " query"] | None = None,
    backend: Backend = NUMPY,
) -> SettingTables:
    """All tables of `h` (three axes) or `m` (four)."""
    n, layers, array = zsl.shape[0], zsl.shape[1], "m" if zsl.ndim == 4 else "h"
    controls, forms, groups = controls or {}, FORMS[array], zsl.shape[2] if array == "m" else 1

    def empty(*rest: int) -> np.ndarray:
        return np.full((n, layers, *rest), np.nan)

    main: dict[Form, np.ndarray] = {form: empty(groups) for form in forms}
    before = empty(groups) if array == "m" else None
    sizes = {name: empty() for name in ("icl", "ft")} if array == "h" else {}
    tables: dict[str, dict[Form, np.ndarray]] = {name: {form: empty() for form in forms} for name in controls}
    contrast = empty() if array == "h" and all(name in controls for name in FLIPPED.values()) else None

    vector = groups * int(zsl.shape[-1])
    together = min(n, _CHUNK if backend.device is None else backend.fitting(vector))

    def fill(step: slice) -> None:
        for start in range(0, n, together):
            at = slice(start, start + together), step
            chunk = _Chunk(at, zsl, columns, backend)
            z = chunk.z
            u, w, kept = chunk.update(icl), chunk.update(ft), dict[str, np.ndarray]()
            zz, own = dot(z, z), {"icl": _Own.of(u, z), "ft": _Own.of(w, z)}
            for form, values in _cosines(forms, zz, own["icl"], own["ft"], dot(u, w)).items():
                main[form][at] = to_numpy(values)
            if before is not None:
                before[at] = to_numpy(_cosines(("map",), zz, own["icl"], _Own.still(zz), 0 * zz)["map"])
            for name, table in sizes.items():
                table[at] = to_numpy(ratio(root(own[name].squared), root(zz))[..., 0])
            for name, control in controls.items():
                s = chunk.update(control.stack)
                this, that = _Own.of(s, z), own["ft" if control.place == "icl" else "icl"]
                sides = (this, that) if control.place == "icl" else (that, this)
                between = dot(s, w if control.place == "icl" else u)
                for form, values in _cosines(forms, zz, *sides, between).items():
                    tables[name][form][at] = to_numpy(defined_mean(values, axis=-1))
                if contrast is not None and name in FLIPPED.values():
                    kept[name] = s
            if contrast is not None:
                found = cosine(u - kept[FLIPPED["icl"]], w - kept[FLIPPED["ft"]], norm(z))
                contrast[at] = to_numpy(found[..., 0])

    def quietly(step: slice) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # a diverged fine-tuning leaves infinities: they become NaN
            fill(step)

    backend.each(quietly, backend.steps(layers, together * vector))
    return SettingTables(main, before, sizes, contrast, tables)


@dataclass(frozen=True)
class RecordTables:
    """The tables of a run's records; None where h or m was not recorded."""

    h: SettingTables | None
    m: SettingTables | None

    @classmethod
    def of(
        cls,
        records: Records,
        places: Mapping[str, Literal["icl", "ft"]],
        backend: Backend = NUMPY,
        wholes: Collection[str] = (),
    ) -> RecordTables:
        """`places`: the control settings to take in, by whose place they take; `wholes`: the models that bring all
        three settings of their own."""

        def tables(array: str) -> SettingTables | None:
            stacks = [getattr(records[name], array) for name in MAIN_SETTINGS]
            if any(stack is None for stack in stacks):
                return None
            given = {name: getattr(records[name], array) for name in places}
            controls = {name: Replaced(places[name], stack) for name, stack in given.items() if stack is not None}
            made = setting_tables(stacks[0], stacks[1], stacks[2], controls, records.columns, backend)
            others = {stem: [getattr(records[f"{stem}_{part}"], array) for part in MAIN_SETTINGS] for stem in wholes}
            found = {
                stem: setting_tables(own[0], own[1], own[2], columns=records.columns, backend=backend).main
                for stem, own in others.items()
                if not any(stack is None for stack in own)
            }
            means = {
                stem: {form: defined_mean(values, axis=-1) for form, values in main.items()}
                for stem, main in found.items()
            }
            return replace(made, controls={**made.controls, **means})

        return cls(tables("h"), tables("m"))


@dataclass(frozen=True)
class _Own:
    """The products of an update with itself and with the ZSL vector."""

    squared: Float[np.ndarray, "query layer group"]
    along: Float[np.ndarray, "query layer group"]

    @classmethod
    def of(cls, update: np.ndarray, z: np.ndarray) -> _Own:
        return cls(dot(update, update), dot(update, z))

    @classmethod
    def still(cls, zz: np.ndarray) -> _Own:
        """Of no update at all."""
        return cls(0 * zz, 0 * zz)


def _cosines(
    forms: tuple[Form, ...],
    zz: Float[np.ndarray, "query layer group"],
    icl: _Own,
    ft: _Own,
    between: Float[np.ndarray, "query layer group"],
) -> dict[Form, Float[np.ndarray, "query layer group"]]:
    products = BlockProducts(zz, icl.squared, ft.squared, icl.along, ft.along, between)
    return {form: Compared.of(form, products).own["value"] for form in forms}
