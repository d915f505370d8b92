"""Results in a notebook: the verdict, the numbers and two figures, as HTML without any script."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

from dualview.report.catalogue import NUMBERS, at, beside, bounds, present, shown
from dualview.report.page import Markup, join, tag
from dualview.report.sections import run_lines, run_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dualview.comparison.result import Result
    from dualview.comparison.seeds import SeedsResult

_LEFT = "text-align:left"
_RIGHT = "text-align:right;white-space:nowrap"


def result_html(result: Result) -> str:
    """One run: what was run, the verdict, every number beside its controls, accuracy and SimAOU by layer."""
    from dualview.report.figures.run import accuracy, sim_aou

    content = result.to_json()
    controls = content.get("controls") or {}
    rows = [
        [number.name, shown(at(content, number.key), number.style), held.interval, held.floor, held.ceiling, aside]
        for number in present(content)
        for held in [bounds(controls.get(number.control) if number.control else None)]
        for aside in [beside(content, number.key)]
    ]
    figures = [accuracy(result)]
    if result.sim_aou.raw_per_layer is not None:
        figures.append(sim_aou(result))
    return tag(
        "div",
        tag("p", tag("strong", run_title(result)), ": ", "; ".join(run_lines(result))),
        _sentence(at(content, "verdict.sentence")),
        [tag("p", f"! {warning}") for warning in result.warnings],
        _table(["", "value", "95 % interval", "highest floor", "ceiling", "beside it"], rows),
        [_image(figure) for figure in figures],
    )


def seeds_html(several: SeedsResult) -> str:
    """Several seeds: each number's mean, its interval and every seed's value, with accuracy and SimAOU by layer."""
    from dualview.report.figures.store import accuracy_by_task, similarity_by_layer
    from dualview.report.overview import Run, groups_of

    rows: list[list[str]] = []
    for number in NUMBERS:
        row = several.summary.get(number.key)
        if row is not None:
            interval = "" if row.ci is None else f"{row.ci[0]:+.3f} to {row.ci[1]:+.3f}"
            values = [shown(value, number.style) for value in (row.mean, *row.values)]
            rows.append([number.name, values[0], interval, *values[1:]])
    group = groups_of([Run.of(result) for result in several.results])[0]
    figures = [accuracy_by_task(group)]
    if group.layers(group.tasks[0], "sim_aou.raw"):
        figures.append(similarity_by_layer(group, "sim_aou.raw", "SimAOU, raw"))
    verdicts = ", ".join(f"{verdict} {count}" for verdict, count in several.verdicts.items())
    return tag(
        "div",
        tag("p", tag("strong", run_title(several.results[0])), f": seeds {', '.join(map(str, several.seeds))}"),
        _sentence(f"Verdicts: {verdicts or 'none'}."),
        _table(["", "mean", "95 % interval", *(f"seed {seed}" for seed in several.seeds)], rows),
        [_image(figure) for figure in figures],
    )


def _sentence(text: str | None) -> Markup:
    return tag("p", tag("strong", text or "No verdict: this run was made without controls."))


def _table(head: list[str], rows: list[list[str]]) -> Markup:
    def line(kind: str, cells: list[str]) -> Markup:
        return tag("tr", *(tag(kind, text, style=_RIGHT if 0 < i < 5 else _LEFT) for i, text in enumerate(cells)))

    return tag("table", tag("thead", line("th", head)), tag("tbody", *(line("td", row) for row in rows)))


def _image(figure: Figure) -> Markup:
    """As an image of its own, so that two figures' ids cannot meet on one page."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dualview"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    source = base64.b64encode(buffer.getvalue()).decode()
    title = figure.get_suptitle()
    return join(tag("img", src=f"data:image/svg+xml;base64,{source}", alt=title, style="max-width:100%;height:auto"))
