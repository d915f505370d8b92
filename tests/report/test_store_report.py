"""The report of many runs: means and intervals over seeds, the papers' values, verdicts counted."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dualview.comparison.result import NormPoint, Result
from dualview.io.errors import UserError
from dualview.metrics.verdict import verdict_over
from dualview.report.charts.run import NORM_KEYS
from dualview.report.figures.store import accuracy_by_task, similarity_against_norm, similarity_by_layer
from dualview.report.html.store import render_store, store_report, write_store_figures
from dualview.report.overview import Mean, RunSummary, groups_of, mean_of, tasks_of
from dualview.report.published import SIX_TASKS, published
from report.made import TinyRun
from report.parsed import Element, data_of, parse
from report.test_figures import text_of
from report.test_html import HOSTILE, hostile


def planted(base: Result, tasks: tuple[str, ...] = ("mr", "sst2", "movie"), seeds: int = 3) -> list[Result]:
    """Runs on several tasks and seeds under two rules, every number its own."""
    made: list[Result] = []
    for number, (rule, task, seed) in enumerate(
        (rule, task, seed) for rule in ("sgd", "layer-causal") for task in tasks for seed in range(1, seeds + 1)
    ):
        content: dict[str, Any] = copy.deepcopy(base.to_json())
        content["task"]["name"] = task
        content["provenance"]["seeds"]["demos"] = seed
        content["provenance"]["options"] |= {"task": task, "seed": seed}
        if rule != "sgd":
            content["provenance"]["options"]["ft_rule"] = rule
        content["ft"]["rule"] = rule
        content["accuracy"] |= {"zsl": 0.4 + 0.01 * number, "icl": 0.6 + 0.01 * number, "ft": 0.5 + 0.01 * number}
        content["sim_aou"]["raw"] = 0.1 + 0.003 * number**1.5
        content["sim_aou"]["raw_per_layer"] = [0.01 * number, None, 0.02 * number]
        content["update_norm"]["ft"] = 0.1 * (number + 1)
        content["verdict"]["overall"] = ("supported", "indistinguishable", "contradicted")[number % 3]
        made.append(Result.model_validate(content))
    return made


@pytest.fixture(scope="module")
def results(run: TinyRun) -> list[Result]:
    return planted(run.result)


@pytest.fixture(scope="module")
def page(results: list[Result]) -> Element:
    return parse(render_store(results, "a study"))


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9))
def test_intervals_over_seeds_are_student_s(values: list[float]) -> None:
    mean = mean_of([*values, None])
    assert mean.n == len(values)
    assert mean.value == pytest.approx(np.mean(values), abs=1e-9)
    error = stats.sem(values)
    if error > 1e-12:
        low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
        assert (mean.low, mean.high) == (pytest.approx(low, abs=1e-7), pytest.approx(high, abs=1e-7))


def test_one_seed_has_no_interval() -> None:
    assert mean_of([None]) == Mean(None, None, None, 0)
    one = mean_of([0.5])
    assert one.low is None and one.high is None


def test_groups_differ_in_more_than_task_and_seed(results: list[Result]) -> None:
    groups = groups_of([RunSummary.of(result) for result in results])
    assert [len(group.runs) for group in groups] == [9, 9]
    assert "ft_rule layer-causal" in groups[1].label and "seed" not in groups[0].label
    assert tasks_of([RunSummary.of(result) for result in results]) == [*SIX_TASKS, "movie"]


def test_untrained_models_are_called_so(run: TinyRun) -> None:
    content = run.result.to_json()
    content["provenance"]["options"]["weights"] = "untrained"
    assert "weights untrained" in groups_of([RunSummary.of(Result.model_validate(content))])[0].label


def rows_of(table: Element) -> dict[str, list[str]]:
    return {r.all("th")[0].text: [c.text for c in r.all("td")] for r in table.all("tr") if r.all("td")}


def test_the_table_has_our_means_and_the_papers(results: list[Result], page: Element) -> None:
    head = [cell.text for cell in page.by_id("table").all("thead")[0].all("th")]
    assert head == ["number", *SIX_TASKS, "movie", "mean"]
    rows = rows_of(page.by_id("table").all("table")[0])
    own = [r.accuracy.icl for r in results if r.task.name == "mr" and r.ft.rule == "sgd"]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(own), scale=stats.sem(own))
    assert rows["accuracy, in-context"][2] == f"{np.mean(own):.3f}{low:.3f} to {high:.3f}"
    assert rows["accuracy, in-context"][1] == ""  # sst5 was not run
    lines = [[c.text for c in (*r.all("th"), *r.all("td"))] for r in page.by_id("table").all("table")[0].all("tr")]
    first = lines.index(next(line for line in lines if line[0] == "accuracy, in-context"))
    assert lines[first + 1][:4] == ["Dai et al., 1.3B", "0.927", "0.450", "0.890"] and lines[first + 1][7] == ""
    chance = next(line for line in lines if line[0] == "Dai et al., 1.3B, chance")
    assert chance[1:7] == [f"{published(task)['Dai et al., 1.3B']['rec2ftp.chance']:.3f}" for task in SIX_TASKS]


def test_verdicts_are_counted(page: Element) -> None:
    rows = rows_of(page.by_id("verdicts").all("table")[0])
    first, second = rows.values()
    assert first[-1] == "supported 3indistinguishable 3contradicted 3" == second[-1]
    assert first[2] == "not testable over 3 drawssupported 1indistinguishable 1contradicted 1", (
        "the draws together first"
    )
    assert first[1] == "not run"


def test_verdicts_over_draws_have_their_levels_and_what_could_have_been_found(
    results: list[Result], page: Element
) -> None:
    runs = [r for r in results if r.ft.rule == "sgd" and r.task.name == "mr"]
    over = verdict_over(runs)
    assert over is not None
    folded = page.by_id("verdicts").all("details")
    assert len(folded) == 2 * 3  # a group and task each
    shown = next(each for each in folded if ", mr" in each.all("summary")[0].text)
    assert over.sentence in shown.text
    table = shown.all("table")[0]
    assert [cell.text for cell in table.all("thead")[0].all("th")][-1] == "detectable"
    assert {name: cells[0] for name, cells in rows_of(table).items()} == {
        name: level.outcome for name, level in over.levels.items()
    }


def test_charts_show_means_over_seeds(results: list[Result], page: Element) -> None:
    charts = {chart["spec"]["title"]: chart["spec"] for chart in data_of(page)["charts"]}
    accuracy = next(spec for title, spec in charts.items() if title.startswith("Accuracy by task"))
    own = [r.accuracy.ft for r in results if r.task.name == "sst2" and r.ft.rule == "sgd"]
    assert accuracy["groups"] == ["sst2", "mr", "movie"]
    assert accuracy["series"][2]["values"][0] == pytest.approx(np.mean(own))
    marks = {m["series"]: m["values"] for m in accuracy["marks"] if "1.3B" in m["name"]}
    assert marks["zero-shot"] == [0.705, 0.659, None]
    norms = charts["SimAOU, raw, by size of the update"]
    assert [one["name"] for one in norms["series"]] == ["sgd", "layer-causal"]
    assert all(one["points"] for one in norms["series"])
    drawn = {x: y for one in norms["series"] for x, y in zip(one["x"], one["values"], strict=True)}
    assert drawn == {r.update_norm.ft: r.sim_aou.raw for r in results}


def test_layers_are_means_over_seeds_with_gaps(results: list[Result]) -> None:
    group = groups_of([RunSummary.of(result) for result in results])[0]
    means = group.layers("mr", "sim_aou.raw")
    assert means[1].value is None and means[2].value == pytest.approx(0.02)
    axes = similarity_by_layer(group, "sim_aou.raw", "SimAOU").axes[0]
    assert len(axes.lines) == 3 and len(axes.collections) == 3


def test_every_run_is_listed(results: list[Result], page: Element) -> None:
    rows = page.by_id("runs").all("tbody")[0].all("tr")
    listed = [[c.text for c in row.all("td")][:3] for row in rows]
    wanted = [[t, str(s), rule] for rule in ("sgd", "layer-causal") for t in ("sst2", "mr", "movie") for s in (1, 2, 3)]
    assert listed == wanted


def test_the_order_of_the_runs_does_not_matter(results: list[Result]) -> None:
    assert render_store(results[::-1]) == render_store(results)


def test_store_figures(results: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [RunSummary.of(result) for result in results]
    group = groups_of(runs)[0]
    bars = accuracy_by_task(group).axes[0]
    heights = [patch.get_height() for patch in bars.patches]  # pyright: ignore
    assert heights[:3] == pytest.approx([group.mean(task, "accuracy.zsl").value for task in group.tasks])  # pyright: ignore
    scattered = similarity_against_norm(runs).axes[0]
    drawn = {str(line.get_label()): len(line.get_xdata()) for line in scattered.lines}  # pyright: ignore
    assert drawn["sgd"] == drawn["layer-causal"] == 9
    monkeypatch.setattr("dualview.report.figures.style.FORMATS", ("svg",))
    written = write_store_figures(runs[:4], tmp_path)
    assert {path.name for path in written} >= {"accuracy.svg", "sim_aou_raw.svg", "update_norm.svg"}


def test_no_runs_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished runs"):
        store_report([], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_hostile_names_stay_text(run: TinyRun, bend: Any) -> None:
    shown = parse(render_store([bend(hostile)], HOSTILE))
    assert shown.all("img") == [] and len(shown.all("script")) == 2 and shown.all("h1")[0].text == HOSTILE


def test_a_thousand_runs_stay_small(results: list[Result], tmp_path: Path) -> None:
    runs = [RunSummary.of(result) for result in results] * 60
    path = store_report(runs, tmp_path / "report.html")
    assert path.stat().st_size < 5_000_000


def two_seeds(base: Result, changes: list[dict[str, Any]]) -> list[Result]:
    """Runs of one task that differ in what is given."""
    made: list[Result] = []
    for result, change in zip(planted(base, ("mr",), len(changes)), changes, strict=False):
        content = result.to_json()
        for key, value in change.items():
            outer, inner = key.split(".")
            content[outer][inner] = value
        made.append(Result.model_validate(content))
    return made


def test_intervals_are_cut_to_what_a_number_can_be(run: TinyRun) -> None:
    wide = [
        {"accuracy.icl": 0.1, "sim_aou.raw": -0.3, "sim_aou.raw_per_layer": [-0.5, 0.1, 0.2], "update_norm.ft": 0.1},
        {"accuracy.icl": 0.9, "sim_aou.raw": 0.6, "sim_aou.raw_per_layer": [0.5, 0.2, 0.2], "update_norm.ft": 9.0},
    ]
    results = two_seeds(run.result, wide)
    (group,) = groups_of([RunSummary.of(result) for result in results])

    def ends(key: str) -> tuple[float | None, float | None]:
        mean = group.mean("mr", key)
        return mean.low, mean.high

    assert ends("accuracy.icl") == (0, 1) and ends("sim_aou.raw") == (-1, 1)
    assert ends("update_norm.ft")[0] == 0
    charts = data_of(parse(render_store(results)))["charts"]
    for chart, low, high in ((charts[0], 0, 1), (charts[1], -1, 1)):
        drawn = [x for one in chart["spec"]["series"] for x in (*one["lo"], *one["hi"]) if x is not None]
        assert drawn and min(drawn) >= low and max(drawn) <= high
    axes = similarity_by_layer(group, "sim_aou.raw", "SimAOU").axes[0]
    bottom, top = axes.get_ylim()
    assert -1.2 < bottom < -0.3 and 0.5 < top < 1.2  # the means, from 0 to 0.2, stay legible
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == -1 and band[:, 1].max() == 1  # pyright: ignore
    bars = accuracy_by_task(group).axes[0]
    ys = [y for line in bars.collections for path in line.get_paths() for y in path.vertices[:, 1]]  # pyright: ignore
    assert min(ys) >= 0 and max(ys) <= 1


def test_the_table_says_over_how_many_seeds_and_tasks(run: TinyRun) -> None:
    some = [
        {"rec2ftp.value": 0.8, "rec2ftp.chance": 0.3},
        {"rec2ftp.value": None, "rec2ftp.chance": 0.9},
        {"rec2ftp.value": 0.6, "rec2ftp.chance": 0.5},
    ]
    page = parse(render_store(two_seeds(run.result, some)))
    rows = rows_of(page.by_id("table").all("table")[0])
    at = SIX_TASKS.index("mr")
    assert rows["Rec2FTP"][at].startswith("0.700") and rows["Rec2FTP"][at].endswith("2 of 3 seeds")
    assert rows["chance"][at].startswith("0.400") and rows["chance"][at].endswith("2 of 3 seeds")
    assert rows["Rec2FTP"][-1] == "0.700of 1 task" and rows["chance"][-1] == "0.400of 1 task"
    assert "seeds" not in rows["accuracy, in-context"][at]
    papers = published("mr")["Dai et al., 1.3B"]
    assert papers and rows["Dai et al., 1.3B"][-1].count("of") <= 1


def test_figures_are_named_after_their_group_and_say_n(
    results: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualview.report.figures.style.FORMATS", ("svg",))
    runs = [RunSummary.of(result) for result in results]
    names = {path.name for path in write_store_figures(runs, tmp_path)}
    assert {"accuracy-model.svg", "accuracy-model-ft_rule-layer-causal.svg", "update_norm.svg"} <= names
    group = groups_of(runs)[0]
    caption = text_of(accuracy_by_task(group))
    assert "3 seeds on every task" in caption and "n = 20 queries" in caption
    assert "number of seeds: 3 on mr, 1 on sst2" in text_of(accuracy_by_task(groups_of(runs[:4])[0]))
    assert "n = 20 queries each" in text_of(similarity_against_norm(runs))


def test_a_store_of_everything_stays_small(results: list[Result], tmp_path: Path) -> None:
    """Three thousand runs of as many groups, each with a grid of rates."""
    sims: Any = dict.fromkeys(NORM_KEYS.values(), 0.123456789)
    points = [
        NormPoint(rule="sgd", lr=0.01, status="ok", queries=20, accuracy=0.5, update_norm=0.1 + i, **sims)
        for i in range(12)
    ]
    one = replace(RunSummary.of(results[0]), points=points)
    runs = [replace(one, options={**one.options, "lr": 0.001 * i}, lr=0.001 * i) for i in range(3000)]
    path = store_report(runs, tmp_path / "report.html")
    assert path.stat().st_size < 5_000_000
    text = path.read_text(encoding="utf-8")
    assert "The first 60 of 3000 groups" in text and "The first 2000 of 36000 points" in text
