"""Which cells the front page's numbers are made of, where a draw was run more than once."""

from __future__ import annotations

import sys

import pandas as pd
import pytest

from docs.blocks import ROOT

sys.path.insert(0, str(ROOT / "studies"))

import collect
import front


def test_a_draw_counts_once_by_the_latest_version_then_by_full_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    def cell(key: str, seed: int, controls: str, version: int, **more: object) -> dict[str, object]:
        asked = {"model": "qwen2.5-coder-1.5b", "task": "mr", "labels": "natural", "seed": seed, "controls": controls}
        plain = {"lr_asked": "auto", "protocol": "modern", "ft_rule": "sgd", "ft_loss": "all", "epochs": 1}
        found = {"verdict_learning": "supported", "verdict_labels": "supported", "accuracy_icl": 0.5 + seed / 10}
        found |= {"accuracy_ft": 0.5, "verdict_predictions": "supported", "order_sensitivity_ft": 0.0}
        found |= {"sim_aou_raw": version / 100, "order_sensitivity_icl": 0.1 if controls == "full" else float("nan")}
        return {**asked, **plain, **found, "key": key, "code": f"numerics {version}, torch", **more}

    cells = [
        cell("a9", 1, "quick", 9),
        cell("a12f", 1, "full", 12),  # of the latest version: before the older, and before the quick of its own
        cell("a12q", 1, "quick", 12),
        cell("b9", 2, "full", 9),
        cell("b12", 2, "quick", 12),  # newer than the cell with full controls
        cell("c7", 3, "full", 7),  # of older versions: the one with more controls
        cell("c9", 3, "quick", 9),
        cell("d7", 4, "quick", 7, verdict_learning="not supported"),
        cell("d9", 4, "quick", 9, verdict_learning="not supported"),
        cell("e", 5, "none", 12),
    ]
    floors = pd.DataFrame({"key": ["a12f", "b12", "c7"], "metric": "sim_aou", "kind": "floor", "name": "rotated"})
    floors = pd.concat([floors.assign(value=0.05), floors.assign(name="untrained", value=0.2)[:1]])
    monkeypatch.setattr(front, "table", {"cells": pd.DataFrame(cells), "controls": floors}.__getitem__)
    monkeypatch.setattr(front, "models", lambda: ["qwen2.5-coder-1.5b"])
    front.from_records.cache_clear()
    try:
        assert set(front.draws()["key"]) == {"a12f", "b12", "c7", "d9"}
        assert set(front.draws(full=True)["key"]) == {"a12f", "b9", "c7"}
        claimed = {claim.anchor: claim for claim in front.CLAIMS}
        assert claimed["accuracy"].mean("qwen2.5-coder-1.5b").n == 4
        excess = claimed["representations"].mean("qwen2.5-coder-1.5b")
        assert (excess.n, excess.value) == (3, pytest.approx((0.12 + 0.12 + 0.07) / 3 - 0.05))  # no floor of another
        assert claimed["predictions"].verdicts("qwen2.5-coder-1.5b") == "3 of 3"
        assert claimed["order"].mean("qwen2.5-coder-1.5b").n == 3 and claimed["order"].answer("embedded") == "not run"
        assert "versions 12 (2) and 7 (1) of" in front._note("1.5B", claimed["predictions"].cells("qwen2.5-coder-1.5b"))
        assert front.versions(front.draws().query("key == 'b12'")) == "version 12"
    finally:
        front.from_records.cache_clear()


@pytest.mark.parametrize(
    ("floor", "answer"),
    [(0.1, "**yes**"), (0.9, "**no**, against every control"), (0.49, "unclear, against every control")],
)
def test_what_is_not_above_every_control_is_not_answered_yes(
    floor: float, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "qwen2.5-coder-1.5b"
    cells = pd.DataFrame(
        {"x": [0.5, 0.4, 0.6, 0.5], "controls": ["full", "full", "full", "quick"], "key": list("abcd")}
    )
    kept = {"metric": "sim_aou", "kind": "floor"}
    rows = [{**kept, "key": key, "name": "rotated", "value": 0.0} for key in "abcd"]
    rows += [{**kept, "key": key, "name": "untrained", "value": floor} for key in "abc"]
    monkeypatch.setattr(front, "models", lambda: [model])
    monkeypatch.setattr(front, "table", {"controls": pd.DataFrame(rows)}.__getitem__)
    monkeypatch.setattr(front.Claim, "cells", lambda *_: cells)
    claim = front.Claim("", "", "", lambda cells: cells["x"], "x", metric="sim_aou")
    assert claim.answer(model) == answer
    assert claim.against_every_control(model).value == pytest.approx(0.5 - floor)
    assert front.Claim("", "", "", lambda cells: cells["x"], "x").answer(model) == "**yes**"  # it has no such floors
    monkeypatch.setattr(front.Claim, "cells", lambda *_: cells[1:])  # two with every control tell nothing
    assert claim.answer(model) == "**yes**"


def test_new_cells_replace_older_ones_of_the_same_options_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results as they are, and a store that has every draw again in the next version, with other numbers."""
    folder = ROOT / "studies" / "results" / "second"
    before = {name: pd.read_parquet(folder / f"{name}.parquet") for name in collect.TABLES}
    renamed = {name: table.assign(key="new " + table["key"]) for name, table in before.items()}
    cells = renamed["cells"]
    renamed["cells"] = cells.assign(code="numerics 99, torch", agreement=cells["agreement"] + 1)
    merged = collect.merged([renamed, before])  # in whatever order they come
    assert len(merged["cells"]) == len(before["cells"]) and set(merged["cells"]["code"]) == {"numerics 99, torch"}
    for name in collect.TABLES:
        assert len(merged[name]) == len(before[name]) and merged[name]["key"].str.startswith("new ").all()
    claim, model = front.CLAIMS[0], "qwen2.5-coder-1.5b"
    old = claim.mean(model)
    monkeypatch.setattr(front, "table", merged.__getitem__)
    found = claim.mean(model)
    assert found.n == old.n and old.value + 0.9 < found.value < old.value + 1.1  # perhaps of a quick cell now
    assert "version 99 of dualview's numbers" in front._note("1.5B", claim.cells(model))
