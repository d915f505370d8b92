"""Results in a notebook: tables and figures, no script, nothing that a text could break."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from dualview.comparison.result import Result
from dualview.comparison.seeds import OverSeeds, SeedsResult
from report.made import Bend, TinyRun, unrecorded
from report.parsed import Element, parse
from report.test_html import HOSTILE, hostile
from report.test_store_report import planted


def images(page: Element) -> list[str]:
    sources = [image.attributes["src"] or "" for image in page.all("img")]
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    return [base64.b64decode(source.partition(",")[2]).decode() for source in sources]


def test_a_result_shows_its_verdict_numbers_and_figures(run: TinyRun) -> None:
    page = parse(run.result._repr_html_())  # pyright: ignore[reportPrivateUsage]
    assert run.result.to_json()["verdict"]["sentence"] in page.text
    rows = {r.all("th")[0].text: r.all("td")[0].text for r in page.all("tr") if r.all("td")}
    assert rows["accuracy, in-context"] == f"{run.result.accuracy.icl:.3f}"
    assert len(images(page)) == 2 and all("<svg" in image for image in images(page))
    assert page.all("script") == []


def test_a_bare_result_is_shown_as_well(bend: Bend) -> None:
    def bare(content: dict[str, Any]) -> None:
        for key in ("controls", "verdict"):
            content.pop(key)
        content["sim_aou"] = unrecorded(content["sim_aou"])

    page = parse(bend(bare)._repr_html_())  # pyright: ignore[reportPrivateUsage]
    assert "No verdict" in page.text and len(images(page)) == 1


def test_several_seeds_show_each(run: TinyRun) -> None:
    results: list[Result] = planted(run.result, ("mr",), 3)[:3]
    values = [result.accuracy.icl for result in results]
    summary = {"accuracy.icl": OverSeeds(mean=float(np.mean(values)), ci=(0.1, 0.9), values=list(values))}
    several = SeedsResult(seeds=[1, 2, 3], summary=summary, verdicts={"supported": 2}, results=results)
    page = parse(several._repr_html_())  # pyright: ignore[reportPrivateUsage]
    (row,) = [r for r in page.all("tr") if r.all("td")]
    assert [cell.text for cell in row.all("td")][2:] == [f"{value:.3f}" for value in values]
    assert "supported 2" in page.text and len(images(page)) == 2


def test_records_metrics_and_verdicts_are_shown(run: TinyRun) -> None:
    import dualview

    records, verdict = run.records, run.result.verdict
    assert verdict is not None
    page = parse(records._repr_html_())  # pyright: ignore[reportPrivateUsage]
    rows = {r.all("th")[0].text: [cell.text for cell in r.all("td")] for r in page.all("tr") if r.all("td")}
    assert rows.keys() == records.settings.keys() and rows["icl"][0] == f"{run.result.accuracy.icl:.3f}"
    assert " × ".join(map(str, records["icl"].log_probs.shape)) in rows["icl"]
    measured = dualview.metrics(records)
    for shown in (verdict, measured, measured.verdict, dualview.judge(records)):
        page = parse(shown._repr_html_())  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]
        assert verdict.overall in page.text.lower() and page.all("script") == []


def test_hostile_text_stays_text(bend: Bend) -> None:
    page = parse(bend(hostile)._repr_html_())  # pyright: ignore[reportPrivateUsage]
    assert HOSTILE in page.text and page.all("script") == [] and len(page.all("img")) == 2
