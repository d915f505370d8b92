"""A run's report: the verdict first, every number, prompt and query in it, nothing of it alive but its own script."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualview.comparison.prepare import prepare
from dualview.comparison.result import Result
from dualview.metrics.sim_aou import noise_floor
from dualview.options import RunOptions
from dualview.report.html.prompts import Missing, ShownPrompts, prompts_of
from dualview.report.html.run import render, write_report
from dualview.report.published import published
from dualview.tasks.show_prompt import ShownPrompt
from report.made import Bend, TinyRun, unrecorded
from report.parsed import Element, data_of, parse
from report.test_figures import with_norms

HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">{{7*7}}\'"&lt;'


@pytest.fixture(scope="module")
def page(run: TinyRun) -> Element:
    return parse(render(run.result, records=run.records))


def text(element: Element) -> str:
    return " ".join(element.text.split())


def test_the_verdict_comes_first(run: TinyRun, page: Element) -> None:
    main = page.all("main")[0]
    order = [section.attributes["id"] for section in main.all("section")]
    assert order == ["verdict", "numbers", "figures", "tuning", "prompts", "queries", "provenance"]
    verdict = run.result.to_json()["verdict"]
    said = text(page.by_id("verdict"))
    assert verdict["sentence"] in said
    for name, level in verdict["levels"].items():
        assert name in said and level["outcome"] in said
    assert all(warning in said for warning in run.result.warnings)


def test_every_number_stands_beside_its_controls(run: TinyRun, page: Element) -> None:
    content = run.result.to_json()
    main = page.by_id("numbers").all("table")[0]
    rows = {r.all("th")[0].text: [c.text for c in r.all("td")] for r in main.all("tr") if r.all("td")}
    control = content["controls"]["sim_aou"]
    value, interval, floor, ceiling, p = rows["SimAOU raw"][:5]
    assert float(value) == pytest.approx(content["sim_aou"]["raw"], abs=5e-4)
    assert interval == f"{control['ci'][0]:+.3f} to {control['ci'][1]:+.3f}"
    highest = max((v, k) for k, v in control["floors"].items() if v is not None)
    assert floor == f"{highest[1]} {highest[0]:+.3f}"
    assert float(ceiling) == pytest.approx(control["ceiling"], abs=5e-4) and float(p) == pytest.approx(
        control["p"], 0.05
    )
    gain = content["controls"]["accuracy_icl"]
    assert f"over zero-shot {gain['value']:+.3f}" in rows["accuracy, in-context"][-1]
    assert not any("over zero-shot" in cells[-1] for name, cells in rows.items() if not name.startswith("accuracy"))
    listed = text(page.by_id("numbers"))
    for name, found in control["floors"].items():
        assert name in listed and (found is None or f"{found:+.3f}" in listed)


def test_the_papers_stand_beside_their_task(bend: Bend) -> None:
    def on_mr(content: dict[str, Any]) -> None:
        content["task"]["name"] = "mr"

    shown = parse(render(bend(on_mr), prompts=Missing("x"))).by_id("numbers").all("table")[0]
    (row,) = [r for r in shown.all("tr") if r.all("td") and r.all("th")[0].text == "Rec2FTP"]
    assert (
        "0.971 (chance 0.874)" in row.text and f"{published('mr')['Dai et al., 2.7B']['rec2ftp.value']:.3f}" in row.text
    )


def test_charts_hold_the_result_s_values(run: TinyRun, page: Element) -> None:
    charts = data_of(page)["charts"]
    slots = [e.attributes["data-chart"] for e in page.everything() if "data-chart" in e.attributes]
    assert slots == [str(i) for i in range(len(charts))]
    titles = {chart["spec"]["title"]: chart for chart in charts}
    accuracy = titles["Accuracy"]["spec"]["series"][0]["values"]
    assert accuracy == [run.result.accuracy.zsl, run.result.accuracy.icl, run.result.accuracy.ft]
    boxes = titles["SimAOU, raw, by layer"]
    assert boxes["kind"] == "boxes"
    assert [box["mean"] for box in boxes["spec"]["boxes"]] == run.result.sim_aou.raw_per_layer
    mass = titles["λ: softmax mass on the demonstrations"]["spec"]
    assert mass["values"] == run.result.to_json()["demo_mass"]["per_head"]


def test_every_query_has_its_predictions(run: TinyRun, page: Element) -> None:
    labels = run.result.to_json()["task"]["labels"]
    rows = page.by_id("query-rows").all("tr")
    assert len(rows) == len(run.result.queries) == 20
    for row, query in zip(rows, run.result.queries, strict=True):
        cells = row.all("td")
        assert text(cells[2]) == labels[query.gold]
        right = ""
        for cell, scores in zip(cells[3:], (query.zsl, query.icl, query.ft), strict=True):
            best = 0
            for index, score in enumerate(scores):  # ties to the lowest index
                if score is not None and score > (scores[best] or -math.inf):
                    best = index
            word = "right" if best == query.gold else "wrong"
            right += str(int(best == query.gold))
            assert word in cell.text and labels[best] in cell.text
        assert row.attributes["data-right"] == right
        assert "Review:" in cells[1].text and "Sentiment:" in cells[1].text


def test_prompts_are_those_the_model_saw(run: TinyRun, page: Element) -> None:
    shown = data_of(page)["prompts"]
    options = RunOptions.make(**{k: v for k, v in run.result.provenance.options.items() if k != "lr_grid"})
    prepared = prepare(options)
    for number in (0, 7, 19):
        wanted = ShownPrompt(prepared.prompts, prepared.lm.tokenizer, number).tokens
        got = [(i, p["span"], p["demo"]) for p in shown["prefix"] for i in p["ids"]]
        got += [(i, "query", None) for i in shown["queries"][number]["ids"]]
        got += [(i, "candidate", c) for c, ids in enumerate(shown["queries"][number]["candidates"]) for i in ids]
        assert got == [(token["id"], token["span"], token["number"]) for token in wanted]
        assert all(shown["tokens"][str(token["id"])] in (token["text"], token["token"]) for token in wanted)


def test_prompts_are_shown_only_if_they_are_the_same(run: TinyRun, bend: Bend, tmp_path: Path) -> None:
    assert isinstance(prompts_of(run.result), ShownPrompts)

    def other(content: dict[str, Any]) -> None:
        content["provenance"]["seeds"]["demos"] = 2

    def gone(content: dict[str, Any]) -> None:
        content["provenance"]["options"]["task"] = str(tmp_path / "none.yaml")

    for change, said in ((other, "hash differs"), (gone, "none.yaml")):
        found = prompts_of(bend(change))
        assert isinstance(found, Missing) and said in found.reason
        shown = parse(render(bend(change)))
        assert said in text(shown.by_id("prompts")) and len(shown.by_id("query-rows").all("tr")) == 20
        assert data_of(shown)["prompts"] is None


def test_a_file_from_anybody_runs_no_code(bend: Bend, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    seen: list[dict[str, Any]] = []

    def refuse(*_args: Any, **options: Any) -> None:
        seen.append(options)
        raise OSError("not here")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)

    def trusting(content: dict[str, Any]) -> None:
        content["provenance"]["options"] |= {"trust_remote_code": True, "model": "someone/some-model"}

    assert isinstance(prompts_of(bend(trusting)), Missing)
    assert seen == [{"local_files_only": True}]


def test_a_result_without_controls_says_so(bend: Bend) -> None:
    def bare(content: dict[str, Any]) -> None:
        for key in ("controls", "verdict", "kendall", "overlap", "demo_mass", "controls_skipped", "selection"):
            content.pop(key, None)
        for part in ("sim_aou", "sim_am", "update_norm"):
            content[part] = unrecorded(content[part])
        content["queries"][0]["ft"] = [None, None, None]  # a diverged model

    shown = parse(render(bend(bare), prompts=Missing("no texts")))
    assert "No verdict" in shown.by_id("verdict").text
    assert "none" in text(shown.by_id("query-rows").all("tr")[0].all("td")[5])


def hostile(content: dict[str, Any]) -> None:
    content["provenance"]["model"] = HOSTILE
    content["task"]["name"] = HOSTILE
    content["task"]["labels"] = [HOSTILE, "b", "c"]
    content["warnings"] = [HOSTILE]
    content["verdict"]["sentence"] = HOSTILE
    content["controls_skipped"] = {HOSTILE: HOSTILE}
    content["provenance"]["options"]["model"] = HOSTILE
    content["provenance"]["run"]["host"] = HOSTILE


def hostile_prompts(run: TinyRun) -> ShownPrompts:
    made = prompts_of(run.result)
    assert isinstance(made, ShownPrompts)
    queries = tuple(replace(query, text=HOSTILE, labels=(HOSTILE, "b", "c")) for query in made.queries)
    return replace(made, queries=queries, tokens=dict.fromkeys(made.tokens, HOSTILE))


def test_hostile_text_stays_text(run: TinyRun, bend: Bend, page: Element) -> None:
    clean, dirty = page, parse(render(bend(hostile), prompts=hostile_prompts(run), records=run.records))
    assert dirty.all("img") == [] and len(dirty.all("script")) == len(clean.all("script")) == 2
    assert not [a for e in dirty.everything() for a in e.attributes if a.startswith("on")]
    assert {e.name for e in dirty.everything()} <= {e.name for e in clean.everything()} | {"p"}
    assert HOSTILE in dirty.all("h1")[0].text and HOSTILE in dirty.by_id("query-rows").text
    assert HOSTILE in data_of(dirty)["prompts"]["tokens"].values()


def many(result: Result, n: int) -> tuple[Result, ShownPrompts]:
    """So many queries of about forty tokens behind a prefix of two thousand."""
    from dualview.report.html.prompts import Piece, ShownQuery

    content = result.to_json()
    content["queries"] = (content["queries"] * (n // 20 + 1))[:n]
    ids = tuple(20_000 + i for i in range(40))
    words = (
        "a reviewer's sentence of the usual length, which runs to a hundred and fifty characters or a little more than "
    )
    queries = tuple(ShownQuery(ids, ((1,), (2,)), f"{i} {words}than that.", ("Negative", "Positive")) for i in range(n))
    pieces = tuple(Piece("template", i, ids) for i in range(50))
    return Result.model_validate(content), ShownPrompts(pieces, queries, {i: f" word{i}" for i in (1, 2, *ids)})


@pytest.mark.parametrize(("n", "most"), [(200, 1_000_000), (2000, 5_000_000)])
def test_size(run: TinyRun, tmp_path: Path, n: int, most: int) -> None:
    result, prompts = many(run.result, n)
    path = write_report(result, tmp_path / "report.html", prompts=prompts)
    assert path.stat().st_size < most, path.stat().st_size
    assert list(tmp_path.iterdir()) == [path]


def test_the_report_does_not_change_with_the_moment(run: TinyRun) -> None:
    prompts = prompts_of(run.result)
    assert render(run.result, prompts=prompts) == render(run.result, prompts=prompts)
    assert json.dumps(data_of(parse(render(run.result, prompts=prompts))))


def test_a_run_in_memory_brings_its_own_prompts(run: TinyRun, bend: Bend) -> None:
    from dualview.comparison.result import AskedPrompts

    def unknown(content: dict[str, Any]) -> None:
        content["provenance"]["options"]["model"] = "not/here"

    prepared = prepare(RunOptions.make(**run.result.provenance.options))
    result = bend(unknown)
    assert isinstance(prompts_of(result), Missing)
    result._asked = AskedPrompts(prepared.prompts, prepared.lm.tokenizer)  # pyright: ignore[reportPrivateUsage]
    assert prompts_of(result) == prompts_of(run.result)


def charts_of(result: Result) -> dict[str, Any]:
    return {chart["spec"]["title"]: chart["spec"] for chart in data_of(parse(render(result)))["charts"]}


def test_charts_show_what_the_figures_show(run: TinyRun, bend: Bend) -> None:
    charts = charts_of(bend(with_norms))
    content = run.result.to_json()
    after = charts["SimAM, after, by layer"]
    assert after["lines"] == [{"name": "before fine-tuning", "values": content["sim_am"]["before_per_layer"]}]
    ceilings = content["controls"]["sim_aou"]["per_layer"]["ceilings"].values()
    band = charts["SimAOU, raw, by layer"]["ceiling"]
    assert band["from"] == [min(column) for column in zip(*ceilings, strict=True)]
    assert band["values"] == [max(column) for column in zip(*ceilings, strict=True)]
    norms = charts["SimAOU, normalised, by size of the update"]
    assert norms["rules"] == [{"name": "ICL's own update norm", "x": content["update_norm"]["icl"], "colour": "--icl"}]
    series = {one["name"]: one for one in norms["series"]}
    assert series["sgd"]["crossed"] == [False, False, False, True]
    sizes, noise = np.array(series["noise alone"]["x"]), series["noise alone"]["values"]
    assert noise == pytest.approx(noise_floor(np.full(len(sizes), content["update_norm"]["icl"]), sizes))
    assert charts["Accuracy"]["rules"] == [{"name": "one of 3 labels", "value": pytest.approx(1 / 3)}]
    assert "noise alone" not in {one["name"] for one in charts["SimAOU, raw, by size of the update"]["series"]}


def test_a_report_of_very_many_queries_stays_small(run: TinyRun, bend: Bend, tmp_path: Path) -> None:
    """As many queries as fit are shown, the rest is counted and its place named."""

    def many(content: dict[str, Any]) -> None:
        content["queries"] = content["queries"] * 1000
        content["task"]["n_queries"] = len(content["queries"])

    shown = prompts_of(run.result)
    assert isinstance(shown, ShownPrompts)
    prompts = replace(shown, queries=shown.queries * 1000)
    for given in (prompts, Missing("gone.")):
        path = write_report(bend(many), tmp_path / "report.html", prompts=given)
        assert 3_000_000 < path.stat().st_size < 5_000_000
        page = parse(path.read_text(encoding="utf-8"))
        rows = len(page.by_id("query-rows").all("tr"))
        said = text(page.by_id("queries"))
        assert f"The first {rows} of 20000 queries" in said and "JSON file has them all" in said
        if isinstance(given, ShownPrompts):
            data = data_of(page)
            assert len(data["queries"]) == len(data["prompts"]["queries"]) == rows
            assert page.by_id("prompt-number").attributes["max"] == str(rows - 1)
