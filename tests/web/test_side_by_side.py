"""Two sides of a store: every number by hand from the records, the same floors on both, and ids that are not there."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

from dualview.records import Records
from dualview.store import Store
from dualview.sweep import sweep
from dualview.web import results
from dualview.web.side_by_side import compare, groups_json
from equivalence import tiny
from web.live import cache_of, serving
from web.test_server import ask


@pytest.fixture(scope="module")
def store(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds at two rates, and one run without controls."""
    folder = tmp_path_factory.mktemp("pairs")
    spec = {"model": str(model), "task": str(tiny.save_task(folder / "task")), "shots": 3, "n_queries": 6}
    spec |= {"device": "cpu", "save_records": True}
    sweep({**spec, "seed": [1, 2], "lr": [0.05, 0.1]}, folder / "store")
    sweep({**spec, "seed": 1, "lr": 0.05, "controls": "none"}, folder / "store")
    return folder / "store"


@pytest.fixture(scope="module")
def address(model: Path, store: Path) -> Generator[str]:
    with serving(cache_of(model), store=results.routes(store)) as found:
        yield found


def sides(address: str, a: str, b: str) -> list[dict[str, Any]]:
    return ask(address, "GET", f"/api/compare?{urlencode({'a': a, 'b': b})}").json["sides"]


def groups(address: str) -> dict[str, dict[str, Any]]:
    return {group["title"].split(", ", 1)[1]: group for group in ask(address, "GET", "/api/store").json["groups"]}


def cosines(records: Records, array: str, a: tuple[str, str], b: tuple[str, str]) -> list[float]:
    """By layer: the mean over queries (and heads before) of cos(a[0] − a[1], b[0] − b[1]), in plain NumPy."""

    def of(name: str) -> np.ndarray:
        found = np.asarray(getattr(records[name], array), dtype=np.float64).copy()
        if array == "m":
            for row, count in zip(found, np.asarray(records.columns), strict=True):
                row[..., count:] = 0.0
        return found

    x, y, size = of(a[0]) - of(a[1]), of(b[0]) - of(b[1]), np.linalg.norm(of("zsl"), axis=-1)
    lengths = [np.linalg.norm(side, axis=-1) for side in (x, y)]
    value = (x * y).sum(-1) / (lengths[0] * lengths[1])
    value[(lengths[0] < 1e-4 * size) | (lengths[1] < 1e-4 * size)] = np.nan
    means = np.ma.masked_invalid(value)
    return np.ma.filled((means.mean(axis=2) if array == "m" else means).mean(axis=0), np.nan).tolist()


def same(got: list[float | None], rows: list[list[float]]) -> None:
    """The mean of these rows, undefined (null) where they all are."""
    np.testing.assert_allclose(np.array(got, dtype=np.float64), np.mean(rows, axis=0), atol=1e-6)


def test_layers_and_floors_are_those_of_the_records(address: str, store: Path) -> None:
    group = groups(address)["controls quick, lr 0.05"]
    with Store(store) as opened:
        records = [opened.records(key) for key in group["keys"]]
        stored = [opened.result(key) for key in group["keys"]]
    assert len(records) == 2
    one, both = sides(address, group["keys"][0], group["id"])
    assert [run["key"] for run in one["runs"]] == group["keys"][:1] and len(both["runs"]) == 2
    update = (("icl", "zsl"), ("ft", "zsl"))
    flipped = (("icl", "icl_flipped_labels"), ("ft", "ft_flipped_labels"))
    for name, array, pair in (("sim_aou", "h", update), ("sim_am", "m", update), ("label_contrast", "h", flipped)):
        slow = [cosines(each, array, *pair) for each in records if each is not None]
        same(one["metrics"][name]["per_layer"], slow[:1])
        same(both["metrics"][name]["per_layer"], slow)
        assert both["metrics"][name]["value"] == pytest.approx(np.nanmean(slow), abs=1e-6)
    bounds = {"zsl_shifted": ("floors", ("zsl_shifted", "ft")), "icl_reordered": ("ceilings", ("icl", "icl_reordered"))}
    for name, array in (("sim_aou", "h"), ("sim_am", "m")):
        for bound, (kind, (x, y)) in bounds.items():
            slow = [cosines(each, array, (x, "zsl"), (y, "zsl")) for each in records if each is not None]
            same(one["metrics"][name][kind][bound], slow[:1])
            same(both["metrics"][name][kind][bound], slow)
    for name in ("zsl", "icl", "ft"):
        right = [np.mean(r[name].log_probs.argmax(1) == r.gold) for r in records if r is not None]
        assert one["accuracy"][name]["value"] == pytest.approx(right[0])
        assert both["accuracy"][name]["value"] == pytest.approx(np.mean(right))
    verdict = stored[0].verdict
    assert verdict is not None and one["verdict"]["overall"] == verdict.overall
    assert {name: each["outcome"] for name, each in one["verdict"]["levels"].items()} == {
        name: each.outcome for name, each in verdict.levels.items()
    }
    assert set(both["verdict"]["levels"]) == {"learning", "predictions", "representations", "attention", "labels"}


def test_the_same_floors_on_both_sides(address: str) -> None:
    found = groups(address)
    assert set(found) == {"controls quick, lr 0.05", "controls quick, lr 0.1", "controls none, lr 0.05"}
    quick, other, bare = (found[name]["id"] for name in sorted(found, key=lambda name: ("none" in name, name)))
    for side in sides(address, quick, other):
        assert {"shuffled_query", "head_span", "zsl_shifted"} <= set(side["metrics"]["sim_aou"]["floors"])
    left = ask(address, "GET", f"/api/compare?{urlencode({'a': quick, 'b': bare})}").json
    for side in left["sides"]:
        assert all(metric["floors"] == {} and metric["floor"] is None for metric in side["metrics"].values())
    assert "zsl_shifted" in left["left_out"]["sim_aou"]
    assert left["sides"][1]["verdict"] is None and left["sides"][1]["metrics"]["label_contrast"]["per_layer"] == []


def test_order_and_the_draw_that_names_a_model_do_not_matter(address: str) -> None:
    found = list(groups(address).values())
    for one in found:
        for key in one["keys"]:
            same, again = sides(address, f"draws:{key}", one["id"])
            assert {**same, "id": ""} == {**again, "id": ""}
        for other in found:
            assert sides(address, one["id"], other["id"]) == sides(address, other["id"], one["id"])[::-1]


BAD = ["", "x", "0" * 64, "draws:", f"draws:{'0' * 64}", "../..", "a" * 5000, "<b>", "'\"\\", "\x00", "é"]


@pytest.mark.parametrize("bad", BAD)
def test_ids_that_are_not_there(address: str, store: Path, bad: str) -> None:
    with Store(store) as opened:
        key = opened.keys()[0]
    for given in ({"a": bad, "b": key}, {"a": key, "b": bad}, {"a": key}):
        reply = ask(address, "GET", f"/api/compare?{urlencode(given)}")
        sentence = reply.json["error"]
        assert (reply.status == 404 and sentence.startswith("There is no run '")) or sentence.startswith(
            'There is no run "'
        )
        assert sentence.endswith("choose one from its results.") and "\n" not in sentence and len(sentence) < 400


def test_the_page_is_served(address: str, model: Path) -> None:
    reply = ask(address, "GET", "/store/compare?a=x&b=y")
    assert reply.status == 200 and b"compare.js" in reply.body
    with serving(cache_of(model)) as without:
        assert ask(without, "GET", "/store/compare").status == ask(without, "GET", "/api/compare").status == 404
    assert groups_json([]) == []


def test_a_run_that_was_computed_again_can_still_be_linked(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(store) as opened:
        first, *others = opened.keys()
    monkeypatch.setattr(Store, "keys", lambda _self: others)  # the first is no longer current
    one, draws = compare(store, first, f"draws:{first}")["sides"]
    assert [run["key"] for run in one["runs"]] == [first]
    assert first not in [run["key"] for run in draws["runs"]] or len(draws["runs"]) == 1
