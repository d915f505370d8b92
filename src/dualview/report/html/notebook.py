"""Results in a notebook: the verdict, the numbers and two figures, as HTML without any script."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualview.io.display import TextTable
from dualview.metrics.measured import Measured, VerdictPart
from dualview.metrics.predictions import accuracy
from dualview.records.as_xarray import DIMS
from dualview.report.catalogue import run_lines, run_title
from dualview.report.html.page import TEMPLATES
from dualview.report.tables import levels_table, metrics_table, seeds_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dualview.comparison.result import Result
    from dualview.comparison.seeds import SeedsResult
    from dualview.metrics.verdict import Verdict
    from dualview.records import Records

Learner = tuple[str, str, TextTable | None]
"""The title, the verdict's sentence and the numbers of what is judged in fine-tuning's place."""


def result_html(result: Result) -> str:
    """One run: what was run, the verdict, every number with its controls, accuracy and SimAOU by layer."""
    from dualview.report.figures.run import accuracy as accuracies
    from dualview.report.figures.run import sim_aou

    sentence = "No verdict: this run has no controls." if result.verdict is None else result.verdict.sentence
    figures = [accuracies(result), *([] if result.sim_aou.raw_per_layer is None else [sim_aou(result)])]
    line = "; ".join(run_lines(result))
    return _render(
        run_title(result), line, sentence, metrics_table(result), figures, result.warnings, _learners(result)
    )


def _learners(measured: Measured) -> list[Learner]:
    """Patches and adapters: each with its own verdict and numbers."""
    found: list[Learner] = []
    for name, learner in measured.learners.items():
        title = name.replace(":", " ", 1)
        sentence = "no verdict, without controls." if learner.verdict is None else learner.verdict.sentence
        found.append((title, sentence, metrics_table(learner, learner=title)))
    return found


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
    learners = [(name.replace(":", " ", 1), verdict.sentence, None) for name, verdict in several.learners.items()]
    sentence = f"{over}Verdicts of the draws: {verdicts or 'none'}."
    return _render(title, line, sentence, seeds_table(several), figures, learners=learners)


def measured_html(measured: Measured) -> str:
    """What `dualview.metrics` recomputed: the verdict and every number with its controls."""
    sentence = "No verdict: these records have no controls." if measured.verdict is None else measured.verdict.sentence
    return _render(
        "Metrics", "from records", sentence, metrics_table(measured), [], measured.warnings, _learners(measured)
    )


def verdict_html(verdict: Verdict | VerdictPart) -> str:
    """A verdict: its word, its sentence, and its levels."""
    part = verdict if isinstance(verdict, VerdictPart) else VerdictPart.model_validate(verdict.to_json())
    return _render("Verdict", part.overall, part.sentence, levels_table(part), [])


def records_html(records: Records) -> str:
    """The settings of some records: accuracy, and the shape of every array."""
    rows: list[list[str]] = []
    for name, setting in records.settings.items():
        shapes = [() if (array := getattr(setting, what)) is None else array.shape for what in DIMS]
        right = f"{accuracy(setting.log_probs, records.gold):.3f}"
        rows.append([name, right, *(" × ".join(map(str, shape)) for shape in shapes)])
    head = ("setting", "accuracy", *(f"{what} [{', '.join(dims)}]" for what, dims in DIMS.items()))
    table = TextTable("Settings", head, rows, numeric=set(range(1, len(head))))
    line = f"{records.n_queries} queries, {len(rows)} settings"
    return _render("Records", line, "`to_xarray()` names the dimensions; `dualview.metrics` measures them.", table, [])


def _render(
    title: str,
    line: str,
    sentence: str,
    table: TextTable | None,
    figures: Sequence[Figure],
    warnings: Sequence[str] = (),
    learners: Sequence[Learner] = (),
) -> str:
    images = [{"source": _svg(figure), "title": figure.get_suptitle()} for figure in figures]
    template = TEMPLATES.get_template("notebook.html")
    return template.render(
        title=title, line=line, sentence=sentence, warnings=warnings, table=table, images=images, learners=learners
    )


def _svg(figure: Figure) -> str:
    """In base 64, for an image of its own: the ids of two figures inside one page could collide."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dualview"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return base64.b64encode(buffer.getvalue()).decode()
