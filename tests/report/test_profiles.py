"""Per-layer quantiles, floors and ceilings, against slow computations written otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dualview.report.charts.profiles import profiles
from report.made import Bend, TinyRun, without_layers


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def test_quantiles_are_those_of_the_queries(run: TinyRun) -> None:
    raw = next(p for p in profiles(run.result, run.records) if p.metric.key == "sim_aou.raw")
    zsl, icl, ft = (run.records[name].h for name in ("zsl", "icl", "ft"))
    assert zsl is not None and icl is not None and ft is not None and raw.quantiles is not None
    for layer in range(raw.layers):
        values = sorted(
            cosine(icl[q, layer] - zsl[q, layer], ft[q, layer] - zsl[q, layer]) for q in range(run.records.n_queries)
        )
        for name, part in (("q05", 0.05), ("q25", 0.25), ("q50", 0.5), ("q75", 0.75), ("q95", 0.95)):
            place = part * (len(values) - 1)
            low = int(place)
            between = values[low] + (place - low) * (values[min(low + 1, len(values) - 1)] - values[low])
            assert raw.quantiles[name][layer] == pytest.approx(between, abs=1e-9)
        assert raw.mean[layer] == pytest.approx(np.mean(values), abs=1e-9)


def test_floors_and_ceilings_average_to_the_verdict_s(run: TinyRun) -> None:
    controls: dict[str, Any] = run.result.to_json()["controls"]
    for profile in profiles(run.result, run.records):
        control = controls[profile.metric.control]
        assert set(profile.floors) | {"rotated"} >= set(control["floors"])
        for group, rows in (("floors", profile.floors), ("ceilings", profile.ceilings)):
            for name, row in rows.items():
                known = [value for value in row if value is not None]
                wanted = control[group][name]
                if wanted is None:
                    assert known == []
                else:
                    assert np.mean(known) == pytest.approx(wanted, abs=1e-9)


def test_the_highest_floor_is_taken_layer_by_layer(run: TinyRun) -> None:
    for profile in profiles(run.result, run.records):
        for layer in range(profile.layers):
            rows = [row[layer] for row in profile.floors.values() if row[layer] is not None]
            assert profile.floor[layer] == (max(rows) if rows else None)


def test_without_records_there_are_means_and_flat_bounds(run: TinyRun, bend: Bend) -> None:
    for profile in profiles(bend(without_layers)):
        assert profile.quantiles is None
        assert len(set(profile.floor)) == 1 and len(set(profile.ceiling)) == 1
        control = run.result.to_json()["controls"][profile.metric.control]
        assert profile.floor[0] == max(v for v in control["floors"].values() if v is not None)


def test_a_result_that_tells_its_layers_needs_no_records(run: TinyRun, bend: Bend) -> None:
    from_records = {p.metric.key: p for p in profiles(bend(without_layers), run.records)}

    def tell(content: dict[str, Any]) -> None:
        for profile in from_records.values():
            content["controls"][profile.metric.control]["per_layer"] = {
                "quantiles": dict(profile.quantiles or {}),
                "floors": dict(profile.floors),
                "ceilings": dict(profile.ceilings),
            }

    for profile in profiles(bend(tell)):
        assert profile == from_records[profile.metric.key]


def test_papers_stand_beside_their_own_rule(bend: Bend) -> None:
    def on_mr(content: dict[str, Any]) -> None:
        content["task"]["name"] = "mr"

    def causal(content: dict[str, Any]) -> None:
        on_mr(content)
        content["ft"]["rule"] = "layer-causal"

    raw = {p.metric.key: p.papers for p in profiles(bend(on_mr))}
    assert raw["sim_aou.raw"] == {
        "Deutch et al., 1.3B": 0.17,
        "Deutch et al., 1.3B, embeddings and norms trained": 0.24,
    }
    assert raw["sim_aou.normalised"]["Dai et al., 2.7B"] == 0.157
    assert {p.metric.key: p.papers for p in profiles(bend(causal))}["sim_aou.raw"] == {
        "Deutch et al., 1.3B, layer-causal": 0.21
    }


def test_a_run_without_controls_gets_quantiles_and_no_floors(run: TinyRun, bend: Bend) -> None:
    bare = profiles(bend(lambda content: content.pop("controls")), run.records)
    for ours, theirs in zip(bare, profiles(run.result, run.records), strict=True):
        assert ours.floors == {} and set(ours.floor) == {None}
        for name, layers in theirs.quantiles.items():  # computed vector by vector here, from inner products there
            assert ours.quantiles[name] == [None if x is None else pytest.approx(x, abs=1e-12) for x in layers]
