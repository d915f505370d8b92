"""Metrics against a slow, independent computation: plain Python loops over single numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.metrics import compute_metrics
from dualview.records import Records

CUT = 1e-4
ROUNDING = 10 * np.finfo(np.float64).eps / CUT**2
"""Of a cosine from inner products: a normalised update's square is 1 less a cosine, and at least CUT²."""


def slow_cosine(a: list[float], b: list[float], zsl_length: float) -> float | None:
    length_a, length_b = math.sqrt(math.fsum(v * v for v in a)), math.sqrt(math.fsum(v * v for v in b))
    if length_a == 0 or length_b == 0 or length_a < CUT * zsl_length or length_b < CUT * zsl_length:
        return None
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / (length_a * length_b)


def length(v: list[float]) -> float:
    return math.sqrt(math.fsum(x * x for x in v))


def minus(a: list[float], b: list[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def unit(v: list[float]) -> list[float]:
    return [x / length(v) for x in v]


def mean(values: list[float | None]) -> float | None:
    kept = [v for v in values if v is not None]
    return math.fsum(kept) / len(kept) if kept else None


def slow_metrics(records: Records) -> dict[str, list[float | None]]:
    """Per-layer values of everything: heads, then queries."""
    result: dict[str, list[float | None]] = {}
    n, layers = records["zsl"].h.shape[:2]
    heads = records["zsl"].m.shape[2]
    names = ("raw", "normalised", "icl", "ft", "before", "after", "delta")
    for name in names:
        result[name] = []
    for layer in range(layers):
        rows: dict[str, list[float | None]] = {name: [] for name in names}
        for q in range(n):
            z, i, f = (records[s].h[q, layer].astype(float).tolist() for s in ("zsl", "icl", "ft"))
            rows["raw"].append(slow_cosine(minus(i, z), minus(f, z), length(z)))
            rows["normalised"].append(slow_cosine(minus(unit(i), unit(z)), minus(unit(f), unit(z)), 1.0))
            rows["icl"].append(length(minus(i, z)) / length(z))
            rows["ft"].append(length(minus(f, z)) / length(z))
            per_head: dict[str, list[float | None]] = {"before": [], "after": [], "delta": []}
            for head in range(heads):
                c = records["zsl"].m.shape[3] if records.columns is None else int(records.columns[q])
                z, i, f = (records[s].m[q, layer, head, :c].astype(float).tolist() for s in ("zsl", "icl", "ft"))
                per_head["before"].append(slow_cosine(i, z, length(z)))
                per_head["after"].append(slow_cosine(i, f, length(z)))
                per_head["delta"].append(slow_cosine(minus(i, z), minus(f, z), length(z)))
            for name, values in per_head.items():
                rows[name].append(mean(values))
        for name in names:
            result[name].append(mean(rows[name]))
    return result


def random_records(seed: int, dtype: type = np.float64, still: float = 0.0) -> Records:
    """Records with a share of cosines undefined: `still` of FT's vectors do not move."""
    rng = np.random.default_rng(seed)
    n, layers, d, heads, c = 7, 3, 5, 2, 4
    z, mz = rng.normal(size=(n, layers, d)), rng.normal(size=(n, layers, heads, c))
    h = [z, z + rng.normal(size=z.shape), z + rng.normal(size=z.shape) * (rng.random((n, layers, 1)) >= still)]
    m = [
        mz,
        mz + rng.normal(size=mz.shape),
        mz + rng.normal(size=mz.shape) * (rng.random((n, layers, heads, 1)) >= still),
    ]
    scores = rng.normal(size=(3, n, 2))
    return Records.from_arrays(
        rng.integers(0, 2, n),
        *scores,
        h=[a.astype(dtype) for a in h],
        m=[a.astype(dtype) for a in m],
        columns=rng.integers(1, c + 1, n),
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([np.float16, np.float32, np.float64]), st.sampled_from([0.0, 0.4, 1.0]))
def test_everything_equals_the_slow_loops(seed: int, dtype: type, still: float) -> None:
    records = random_records(seed, dtype, still)
    found, slow = compute_metrics(records).to_json(), slow_metrics(records)
    for block, names in (
        ("sim_aou", ("raw", "normalised")),
        ("sim_am", ("before", "after", "delta")),
        ("update_norm", ("icl", "ft")),
    ):
        for name in names:
            per_layer, value = found[block][f"{name}_per_layer"], found[block][name]
            wanted = mean(slow[name])
            assert len(per_layer) == len(slow[name])
            for a, b in zip([*per_layer, value], [*slow[name], wanted], strict=True):
                assert (a is None) == (b is None)
                assert a is None or a == pytest.approx(b, abs=ROUNDING)


def test_undefined_is_null_counted_and_left_out() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(4, 2, 6))
    icl, ft = z + rng.normal(size=z.shape), z + rng.normal(size=z.shape)
    ft[:, 0] = z[:, 0] + 0.9e-4 * z[:, 0]  # just below the threshold in all of layer 0
    ft[0, 1] = z[0, 1] + 1.1e-4 * z[0, 1]  # just above it
    ft[1, 1] = z[1, 1]
    result = compute_metrics(Records.from_arrays([0] * 4, *([[0.0, -1.0]] * 4 for _ in range(3)), h=[z, icl, ft]))
    found = result.to_json()["sim_aou"]
    assert found["raw_per_layer"][0] is None
    assert found["undefined"]["raw"] == {"count": 5, "of": 8}
    per_query = result.sim_aou_per_query
    assert np.isnan(per_query[:, 0]).all() and np.isnan(per_query[1, 1])
    own = [np.dot(icl[q, 1] - z[q, 1], ft[q, 1] - z[q, 1]) for q in (0, 2, 3)]
    own = [
        v / np.linalg.norm(icl[q, 1] - z[q, 1]) / np.linalg.norm(ft[q, 1] - z[q, 1])
        for v, q in zip(own, (0, 2, 3), strict=True)
    ]
    assert found["raw"] == pytest.approx(np.mean(own))
    assert found["reason"]["raw"] is None


def test_nothing_defined_gives_null_with_a_reason() -> None:
    z = np.ones((3, 2, 4))
    result = compute_metrics(
        Records.from_arrays([0] * 3, *([[0.0, -1.0]] * 3 for _ in range(3)), h=[z, z, z])
    ).to_json()
    assert result["sim_aou"]["raw"] is None and result["sim_aou"]["normalised"] is None
    assert "undefined" in result["sim_aou"]["reason"]["raw"]
    assert result["sim_am"]["delta"] is None and result["sim_am"]["reason"]["delta"] == "not recorded"
    assert result["update_norm"] | {"icl": 0.0, "ft": 0.0} == result["update_norm"]
    assert result["sim_aou"]["noise_floor"] == 0.0


def test_diverged_fine_tuning_does_not_crash() -> None:
    rng = np.random.default_rng(1)
    z = rng.normal(size=(6, 2, 4)).astype(np.float32)
    ft = z + 1
    ft[:3], ft[3:5] = np.nan, np.inf
    scores = rng.normal(size=(6, 2))
    broken = scores.copy()
    broken[:3] = np.nan
    result = compute_metrics(
        Records.from_arrays([0] * 6, scores, scores, broken, h=[z, z + rng.normal(size=z.shape), ft])
    )
    found = result.to_json()
    assert found["sim_aou"]["undefined"]["raw"]["count"] == 10
    assert isinstance(found["sim_aou"]["raw"], float) and isinstance(found["update_norm"]["ft"], float)
    assert "ft has scores that are not numbers for 3 of 6 queries." in result.warnings


def test_json_is_plain() -> None:
    import json

    records = random_records(3)
    mass = np.random.default_rng(0).random((7, 3, 2))
    control = {"log_probs": records["icl"].log_probs}
    with_mass = Records.from_arrays(
        records.gold,
        *(records[s].log_probs for s in ("zsl", "icl", "ft")),
        demo_mass={"icl": mass},
        controls={"icl_reordered": control},
    )
    found = compute_metrics(with_mass)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["demo_mass"]["mean"] == pytest.approx(mass.mean())
    np.testing.assert_allclose(found.demo_mass.per_layer, mass.mean(axis=(0, 2)))
    np.testing.assert_allclose(found.demo_mass.per_head, mass.mean(axis=0))
    assert set(found.to_json()["accuracy"]) == {"zsl", "icl", "ft", "icl_reordered"}
    json.dumps(compute_metrics(records).to_json(), allow_nan=False)
