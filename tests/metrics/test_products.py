"""Everything from inner products equals the same from whole vectors, in float64 to 1e-9 and in float32 to rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dualview.analyses.certificate.plants import planted
from dualview.metrics.cosine import similarity_table
from dualview.metrics.floors.covariates import known_numbers
from dualview.metrics.floors.nulls import RecordFloors, contrast_floors, record_floors, shuffle_test
from dualview.metrics.floors.tables import Replaced, setting_tables
from dualview.metrics.label_contrast import label_contrast
from dualview.metrics.sim_am import sim_am
from dualview.metrics.sim_aou import relative_update_norm, sim_aou, sim_aou_normalised
from dualview.records import Records
from metrics import direct_nulls


def outputs(n: int = 150, layers: int = 2, d: int = 24, size: float = 0.6) -> list[np.ndarray]:
    """zsl, icl and ft with every kind of odd query, and what the two change outside some span."""
    rng = np.random.default_rng(0)
    z, a, b = rng.normal(size=(3, n, layers, d))
    a, b = size * (a + 0.3 * rng.normal(size=d)), size * (0.5 * a + b)
    a[5], b[6] = 0, 0
    a[7], b[8], b[9] = np.nan, np.inf, -0.3 * z[9]
    return [z, z + a, z + b, a - 0.2 * a[..., :1] * z, b - 0.1 * z]


def maps(n: int = 90, layers: int = 2, heads: int = 3, c: int = 7) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(1)
    z, a, b = rng.normal(size=(3, n, layers, heads, c))
    columns = rng.integers(2, c + 1, n)
    columns[3] = 1
    a[4], b[6], b[7, :, 1] = 0, np.inf, 0
    return [z, z + a, z + 0.4 * a + b], columns


def assert_same(got: RecordFloors, wanted: RecordFloors, tolerance: float) -> None:
    def close(a: object, b: object) -> None:
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)  # pyright: ignore

    close(got.value, wanted.value)
    assert got.floors.keys() == wanted.floors.keys()
    for name, floor in wanted.floors.items():
        close(got.floors[name].per_query, floor.per_query)
        close(got.floors[name].excess, floor.excess)
    for name, test in wanted.tests.items():
        assert got.tests[name].p == test.p
        close(got.tests[name].p_per_layer, test.p_per_layer)
        close(got.tests[name].spread, test.spread)
    assert (got.rotated is None) == (wanted.rotated is None)
    if got.rotated is not None and wanted.rotated is not None:
        close(list(vars(got.rotated).values()), list(vars(wanted.rotated).values()))


@pytest.mark.parametrize("size", [0.6, 0.003])
@pytest.mark.parametrize("spans", [True, False])
def test_floors_of_outputs(spans: bool, size: float) -> None:
    z, p, f, *off = outputs(size=size)
    forms, off = ["update", "normalised"], off if spans else []
    numbers = np.random.default_rng(3).normal(size=(2, len(z)))
    known = {"off": off, "gold": np.arange(len(z)) % 3, "known": numbers, "seed": 2}
    got, wanted = (each.record_floors(z, p, f, forms, **known) for each in (_fast, direct_nulls))
    for form in forms:
        assert_same(got[form], wanted[form], 1e-9)


class _fast:
    record_floors = staticmethod(record_floors)


@pytest.mark.parametrize("n", [1, 2, 3, 70])
def test_floors_of_few_outputs(n: int) -> None:
    z, p, f, *off = (side[10 : 10 + n] for side in outputs())
    got, wanted = (each.record_floors(z, p, f, ["update"], off=off)["update"] for each in (_fast, direct_nulls))
    assert_same(got, wanted, 1e-9)


@pytest.mark.parametrize("known", [True, False])
def test_floors_of_maps(known: bool) -> None:
    stacks, columns = maps()
    if not known:
        columns = None
    forms = ["update", "map"]
    got, wanted = (each.record_floors(*stacks, forms, columns=columns, seed=1) for each in (_fast, direct_nulls))
    for form in forms:
        assert_same(got[form], wanted[form], 1e-9)


def test_single_precision_records_differ_by_rounding() -> None:
    exact = outputs()
    single = [side.astype(np.float32) for side in exact]
    got = record_floors(*single[:3], ["update"], off=single[3:])["update"]
    wanted = record_floors(*exact[:3], ["update"], off=exact[3:])["update"]
    for name, floor in wanted.floors.items():
        np.testing.assert_allclose(got.floors[name].excess, floor.excess, atol=2e-5)


def test_the_contrast_is_an_update_laid_on_zsl() -> None:
    records = planted(0, labels=0.5, layers=2)
    h = {name: setting.h for name, setting in records.settings.items()}
    sides = [h["zsl"] + (h[name] - h[f"{name}_flipped_labels"]) for name in ("icl", "ft")]  # pyright: ignore
    found = contrast_floors(records)
    assert found is not None
    numbers = known_numbers(records["zsl"].log_probs, records.gold)
    known = {"gold": records.gold, "known": numbers, "by_size": True}
    wanted = direct_nulls.record_floors(h["zsl"], *sides, ["update"], **known)["update"]  # pyright: ignore
    assert_same(found, wanted, 1e-9)
    off = [0.5 * (h[name] - h[f"{name}_flipped_labels"]) for name in ("icl", "ft")]  # pyright: ignore
    spans = {name: replace(records[name], off_contrast=each) for name, each in zip(("icl", "ft"), off, strict=True)}
    found = contrast_floors(Records(records.gold, {**records.settings, **spans}))
    wanted = direct_nulls.record_floors(h["zsl"], *sides, ["update"], off=off, **known)["update"]  # pyright: ignore
    assert found is not None
    assert_same(found, wanted, 1e-9)


def test_permutations_are_those_of_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    pairs = [rng.normal(size=(3, k, k)) for k in (5, 8)]
    pairs[0][1, 2] = np.nan
    found = shuffle_test(pairs, seed=4, name="t")
    draws = np.random.default_rng([4, *b"t"])
    weight = 1 / sum((~np.isnan(block)).sum((1, 2)) / block.shape[1] for block in pairs)
    total = np.zeros((3, 999))
    for block in pairs:
        orders = draws.permuted(np.broadcast_to(np.arange(block.shape[1]), (999, block.shape[1])), axis=1)
        for number, order in enumerate(orders):
            total[:, number] += weight * np.nan_to_num(block)[:, np.arange(order.size), order].sum(1)
    own = sum(weight * np.nan_to_num(np.diagonal(block, axis1=1, axis2=2)).sum(1) for block in pairs)
    assert found.p == (1 + (total.sum(0) >= own.sum() - 1e-12).sum()) / 1000
    np.testing.assert_allclose(found.p_per_layer, (1 + (total >= own[:, None] - 1e-12).sum(1)) / 1000)
    assert found.spread == pytest.approx(total.sum(0).std() / 3)


def test_tables_are_the_metrics_vector_by_vector() -> None:
    z, p, f, a, b = outputs()
    with np.errstate(invalid="ignore"):
        stacks = {"icl_other": z + b, "ft_other": z - a, "icl_flipped_labels": p + 0.1 * b, "ft_flipped_labels": f + a}
    controls = {name: Replaced("ft" if name.startswith("ft") else "icl", stack) for name, stack in stacks.items()}
    found = setting_tables(z, p, f, controls)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)  # noqa: E731
    close(found.main["update"][..., 0], sim_aou(z, p, f))
    close(found.main["normalised"][..., 0], sim_aou_normalised(z, p, f))
    for name, side in (("icl", p), ("ft", f)):
        close(found.sizes[name], relative_update_norm(z, side))
    for form in ("update", "normalised"):
        close(found.controls["icl_other"][form], similarity_table(form, z, stacks["icl_other"], f))
        close(found.controls["ft_other"][form], similarity_table(form, z, p, stacks["ft_other"]))
    finite = [side[10:] for side in (z, p, stacks["icl_flipped_labels"], f, stacks["ft_flipped_labels"])]
    assert found.contrast is not None
    close(found.contrast[10:], label_contrast(finite[0], finite[1], finite[2], finite[3], finite[4]))
    assert setting_tables(z, p, f).contrast is None


def test_tables_of_maps_are_the_metrics_vector_by_vector() -> None:
    (z, p, f), columns = maps()
    z[..., -1] += np.where(columns < z.shape[-1], 7.0, 0.0)[:, None, None]  # beyond a map's columns: no part of it
    found = setting_tables(z, p, f, {"icl_other": Replaced("icl", f)}, columns)
    wanted = sim_am(z, p, f, columns)
    found_sides = found.before, found.main["map"], found.main["update"]
    for got, right in zip(found_sides, (wanted.before, wanted.after, wanted.delta), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-9)  # pyright: ignore
    right = similarity_table("map", z, f, f, columns)
    np.testing.assert_allclose(found.controls["icl_other"]["map"], right, rtol=1e-9, atol=1e-9)
