"""Control settings take the places they should, and positions between floor and ceiling are what they say."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dualview.metrics import compute_metrics
from dualview.metrics.cosine import overall_mean, similarity_table
from dualview.metrics.floors.controls import FloorResult, MetricControls, compute_controls, role_of
from dualview.metrics.predictions import rec2ftp
from dualview.records import Records

N, LAYERS, D, HEADS, C = 24, 2, 6, 2, 5


def setting(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "log_probs": rng.normal(size=(N, 2)),
        "h": rng.normal(size=(N, LAYERS, D)),
        "m": rng.normal(size=(N, LAYERS, HEADS, C)),
    }


@pytest.fixture(scope="module")
def records() -> Records:
    rng = np.random.default_rng(0)
    names = ("icl_random_labels", "ft_random_labels", "icl_reordered", "icl_other_demos", "ft_all_params", "strange")
    controls = {name: setting(rng) for name in names}
    controls |= {f"untrained_{part}": setting(rng) for part in ("zsl", "icl", "ft")}
    controls["zsl_shifted"] = {"log_probs": rng.normal(size=(N, 2))}  # recorded without h and m
    return Records.from_arrays(
        rng.integers(0, 2, N),
        **{name: setting(rng) for name in ("zsl", "icl", "ft")},
        controls=controls,
    )


def test_each_control_takes_its_place(records: Records) -> None:
    found = compute_controls(records)
    z, i, f = records["zsl"], records["icl"], records["ft"]
    for metric, form, array in (
        ("sim_aou", "update", "h"),
        ("sim_aou_normalised", "normalised", "h"),
        ("sim_am", "update", "m"),
        ("sim_am_after", "map", "m"),
    ):

        def sim(*settings: object, form: str = form, array: str = array) -> float:
            return overall_mean(similarity_table(form, *(getattr(s, array) for s in settings)))

        controls = found[metric]
        assert controls.value == pytest.approx(sim(z, i, f))
        assert controls.floors["icl_random_labels"].value == pytest.approx(sim(z, records["icl_random_labels"], f))
        assert controls.floors["ft_random_labels"].value == pytest.approx(sim(z, i, records["ft_random_labels"]))
        untrained = (records[f"untrained_{part}"] for part in ("zsl", "icl", "ft"))
        assert controls.floors["untrained"].value == pytest.approx(sim(*untrained))
        assert controls.ceilings == {
            name: pytest.approx(sim(z, i, records[name])) for name in ("icl_reordered", "icl_other_demos")
        }
        assert controls.others == {"ft_all_params": pytest.approx(sim(z, i, records["ft_all_params"]))}
        assert "zsl_shifted" not in controls.floors and "strange" not in controls.floors
        drawn = {"icl_random_labels", "ft_random_labels", "untrained"}
        assert {name for name, floor in controls.floors.items() if floor.p is None} == drawn, "one draw has no p"
    assert set(found["sim_am_after"].floors) >= {"before", "gaussian", "shuffled_query", "mean_direction"}
    assert set(found["sim_aou_normalised"].floors) >= {"noise", "zsl_direction"}


def test_rec2ftp_controls(records: Records) -> None:
    found = compute_controls(records)["rec2ftp"]
    scores = {name: s.log_probs for name, s in records.settings.items()}
    own = rec2ftp(records.gold, scores["zsl"], scores["icl"], scores["ft"])
    assert (found.value, found.p, found.floors["chance"].value) == (own.value, own.p, own.chance)
    shifted = rec2ftp(records.gold, scores["zsl"], scores["zsl_shifted"], scores["ft"])
    assert found.floors["zsl_shifted"].value == shifted.value
    again = rec2ftp(records.gold, scores["zsl"], scores["icl"], scores["icl_reordered"])
    assert found.ceilings["icl_reordered"] == again.value


def test_values_agree_with_the_metrics_and_json_is_plain(records: Records) -> None:
    found, metrics = compute_controls(records), compute_metrics(records).to_json()
    assert found["sim_aou"].value == pytest.approx(metrics["sim_aou"]["raw"])
    assert found["sim_aou_normalised"].value == pytest.approx(metrics["sim_aou"]["normalised"])
    assert found["sim_am"].value == pytest.approx(metrics["sim_am"]["delta"])
    assert found["sim_am_after"].value == pytest.approx(metrics["sim_am"]["after"])
    for controls in found.values():
        written = json.loads(json.dumps(controls.to_json(), allow_nan=False))
        assert {"ci", "floors", "ceiling", "p"} <= written.keys()
    per_layer = found["sim_aou"].to_json()["p_per_layer"]
    assert len(per_layer["raw"]) == LAYERS
    assert all(a <= b for a, b in zip(per_layer["raw"], per_layer["holm"], strict=True))


def test_position_between_floor_and_ceiling() -> None:
    floors = {"a": FloorResult(0.1, None), "b": FloorResult(0.2, None), "c": FloorResult(None, None)}
    half = MetricControls("x", 0.4, floors=floors, ceilings={"order": 0.6, "demos": None})
    assert (half.floor, half.ceiling, half.position) == (0.2, 0.6, pytest.approx(0.5))
    assert MetricControls("x", 0.4, floors=floors).position is None
    assert MetricControls("x", 0.4, floors=floors, ceilings={"order": 0.2}).position is None


def test_adding_a_control_changes_no_other_number(records: Records) -> None:
    fewer = Records(records.gold, {name: records[name] for name in ("zsl", "icl", "ft", "icl_random_labels")})
    many, few = compute_controls(records), compute_controls(fewer)
    for metric in few:
        assert few[metric].ci == many[metric].ci and few[metric].p == many[metric].p
        for name, floor in few[metric].floors.items():
            assert many[metric].floors[name] == floor


def test_roles() -> None:
    assert role_of("zsl_shifted").place == "icl" and role_of("zsl_shifted").bound == "floor"
    assert role_of("ft_of_my_own").place == "ft" and role_of("ft_of_my_own").bound == "other"
    assert role_of("something") is None


def test_a_control_that_changes_nothing_but_rounding_is_no_floor(records: Records) -> None:
    """A position shift under rotary positions: bit for bit the same, but for a query here and there."""
    zsl = records["zsl"]
    assert zsl.h is not None and zsl.m is not None
    for changed, defined in ((2, False), (len(zsl.h), True)):
        h = zsl.h.copy()
        h[:changed] += 1e-4 * np.random.default_rng(0).normal(size=h[:changed].shape).astype(h.dtype)
        moved = replace(zsl, h=h)
        found = compute_controls(replace(records, settings={**records.settings, "zsl_shifted": moved}))["sim_aou"]
        assert (found.floors["zsl_shifted"].value is not None) == defined
        assert len(found.floors["zsl_shifted"].draws) == int(defined)
