"""Results in a notebook: the verdict, the numbers and two figures, as HTML without any script."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualview.report.catalogue import run_lines, run_title
from dualview.report.html.page import TEMPLATES
from dualview.report.tables import TextTable, metrics_table, seeds_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dualview.comparison.result import Result
    from dualview.comparison.seeds import SeedsResult


def result_html(result: Result) -> str:
    """One run: what was run, the verdict, every number with its controls, accuracy and SimAOU by layer."""
    from dualview.report.figures.run import accuracy, sim_aou

    sentence = "No verdict: this run has no controls." if result.verdict is None else result.verdict.sentence
    figures = [accuracy(result), *([] if result.sim_aou.raw_per_layer is None else [sim_aou(result)])]
    line = "; ".join(run_lines(result))
    return _render(run_title(result), line, sentence, metrics_table(result), figures, result.warnings)


def seeds_html(several: SeedsResult) -> str:
    """Several seeds: each number's mean, its interval and every seed's value, with accuracy and SimAOU by layer."""
    from dualview.report.figures.store import accuracy_by_task, similarity_by_layer
    from dualview.report.overview import RunSummary, groups_of

    group = groups_of([RunSummary.of(result) for result in several.results])[0]
    figures = [accuracy_by_task(group)]
    if group.layers(group.tasks[0], "sim_aou.raw"):
        figures.append(similarity_by_layer(group, "sim_aou.raw", "SimAOU, raw"))
    verdicts = ", ".join(f"{verdict} {count}" for verdict, count in several.verdicts.items())
    line = f"seeds {', '.join(map(str, several.seeds))}"
    title = run_title(several.results[0])
    over = "" if several.verdict is None else f"{several.verdict.sentence} "
    return _render(title, line, f"{over}Verdicts of the draws: {verdicts or 'none'}.", seeds_table(several), figures)


def _render(
    title: str, line: str, sentence: str, table: TextTable, figures: Sequence[Figure], warnings: Sequence[str] = ()
) -> str:
    images = [{"source": _svg(figure), "title": figure.get_suptitle()} for figure in figures]
    template = TEMPLATES.get_template("notebook.html")
    return template.render(title=title, line=line, sentence=sentence, warnings=warnings, table=table, images=images)


def _svg(figure: Figure) -> str:
    """In base 64, for an image of its own: the ids of two figures inside one page could collide."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dualview"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return base64.b64encode(buffer.getvalue()).decode()
