"""The report of many runs: the six-task table with the papers' beside it, verdicts, figures, and every run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dualview.comparison.result import Result
from dualview.io.atomic import write_text
from dualview.io.errors import UserError
from dualview.report.catalogue import NUMBERS, Number, shown
from dualview.report.chart_data import NORM_KEYS, TITLES, NormPoint
from dualview.report.charts import group_charts, norm_charts, scattered
from dualview.report.figures.store import (
    accuracy_by_task,
    group_caption,
    similarity_against_norm,
    similarity_by_layer,
)
from dualview.report.figures.style import save
from dualview.report.overview import Group, Mean, Run, groups_of, ordered, tasks_of
from dualview.report.page import Markup, document, join, scrolling, table, tag
from dualview.report.published import published
from dualview.report.sections import chart_cards, meanings, no_script, page_header, section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPERS = ("Dai et al., 1.3B", "Dai et al., 2.7B", "Deutch et al., 1.3B", "Deutch et al., 1.3B, layer-causal")
DRAWN = 8
"""Groups that get charts."""
TABLED = 60
"""Groups that get a table of their own."""
LISTED = 2000
"""Runs in the list of every run."""
POINTS = 2000
"""Points of one scatter."""
_CONTENTS = {
    "verdicts": "Verdicts",
    "table": "By task",
    "figures": "Figures",
    "norms": "Size of the update",
    "runs": "Every run",
}


def render_store(results: Iterable[Result | Run], title: str = "Many runs") -> str:
    """The report of many runs as HTML."""
    runs = ordered(result if isinstance(result, Run) else Run.of(result) for result in results)
    if not runs:
        raise UserError("There are no finished runs to report.")
    groups, tasks = groups_of(runs), tasks_of(runs)
    charts = [chart for group in groups[:DRAWN] for chart in group_charts(group)]
    points = [point for run in runs if (point := run.point) is not None]
    grid = [point for run in runs for point in run.points]
    said = "A point a run; rules compare at equal size only."
    norms = [scattered(chart) for chart in norm_charts(points[:POINTS], said + _first(points))]
    said = "A point a learning rate of a run."
    grids = norm_charts(grid[:POINTS], said + _first(grid))
    norms += [scattered(chart, "over the learning rates") for chart in grids]
    fewer = f"Charts of the first {DRAWN} of {len(groups)} groups." if len(groups) > DRAWN else None
    tabled = (
        f"The first {TABLED} of {len(groups)} groups; `dualview export` gives all." if len(groups) > TABLED else None
    )
    parts: dict[str, tuple[object, ...]] = {
        "verdicts": (tag("p", tabled) if tabled else None, verdict_counts(groups[:TABLED], tasks), _verdict_note()),
        "table": (
            tag("p", tabled) if tabled else None,
            *(_group_card(group, tasks, i == 0) for i, group in enumerate(groups[:TABLED])),
            meanings(),
        ),
        "figures": (no_script(), tag("p", fewer) if fewer else None, tag("div", chart_cards(charts), class_="cards")),
        "norms": (tag("div", chart_cards(norms, first=len(charts)), class_="cards"),),
        "runs": (runs_table(runs),),
    }
    lines = [
        f"{len(runs)} runs, {len(groups)} group{'s' if len(groups) != 1 else ''} of equal options",
        f"models: {', '.join(dict.fromkeys(run.model for run in runs))}",
        f"tasks: {', '.join(dict.fromkeys(run.task for run in runs))}",
    ]
    body = join(
        page_header(title, lines, _CONTENTS),
        tag("main", *(section(name, _CONTENTS[name], *content) for name, content in parts.items()), id="content"),
    )
    data = {"charts": [chart.to_json() for chart in (*charts, *norms)], "prompts": None}
    return document(f"dualview: {title}", tag("div", body, class_="page"), data)


def _first(points: Sequence[NormPoint]) -> str:
    return f" The first {POINTS} of {len(points)} points." if len(points) > POINTS else ""


def store_report(results: Iterable[Result | Run], path: Path, *, title: str = "Many runs") -> Path:
    """Write the report of many runs, whole or not at all."""
    write_text(path, render_store(results, title))
    return path


def write_store_figures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write the figures of many runs as PDF, SVG and PNG into a folder, named after the group if there are several."""
    figures: dict[str, Figure] = {}
    groups = groups_of(ordered(runs))
    for name, group in zip(_file_names(groups), groups, strict=True):
        figures[f"accuracy{name}"] = accuracy_by_task(group)
        for key in NORM_KEYS:
            if group.layered(key):
                figures[f"{key.replace('.', '_')}{name}"] = similarity_by_layer(group, key, TITLES[key])
    if any(run.point is not None for run in runs):
        figures["update_norm"] = similarity_against_norm(runs)
    return [path for name, figure in figures.items() for path in save(figure, folder / name)]


def _file_names(groups: Sequence[Group]) -> list[str]:
    """What to put behind a figure's name: the model and what sets the group apart; nothing if there is one group."""
    if len(groups) == 1:
        return [""]
    names: list[str] = []
    for group in groups:
        model, *more = group.label.split(", ")
        plain = re.sub(r"[^A-Za-z0-9_]+", "-", " ".join([Path(model).name, *more])).strip("-")[:80]
        again = sum(name == f"-{plain}" or name.startswith(f"-{plain}-again") for name in names)
        names.append(f"-{plain}-again{again}" if again else f"-{plain}")
    return names


# ---------------------------------------------------------------------------------------------------------- verdicts


def verdict_counts(groups: Sequence[Group], tasks: Sequence[str]) -> Markup:
    """How often each verdict was reached, by group and task."""
    rows = [[group.label, *(_counted(group, task) for task in tasks), _counted(group, None)] for group in groups]
    return table(["group", *tasks, "all"], rows, numeric=set(), class_="tight", label="Verdicts by group and task")


def _counted(group: Group, task: str | None) -> Markup | str:
    counts = group.verdicts(task).most_common()
    return join(*(tag("div", f"{verdict} {count}") for verdict, count in counts)) or "not run"


def _verdict_note() -> Markup:
    return tag(
        "p",
        "A verdict speaks of one draw of demonstrations and one fine-tuning run; read how they are spread over seeds.",
        class_="muted small",
    )


# ------------------------------------------------------------------------------------------------- the table by task


def _group_card(group: Group, tasks: Sequence[str], first: bool) -> Markup:
    content = tag("details", tag("summary", tag("strong", group.label)), six_tasks(group, tasks), open=first)
    return tag("div", content, class_="card")


def six_tasks(group: Group, tasks: Sequence[str]) -> Markup:
    """Every number on every task: the mean over seeds with its interval, the papers' values beneath it.

    A number that some seeds or tasks lack (Rec2FTP where fine-tuning mended nothing) says over how many it was taken.
    """
    body: list[Markup] = []
    for number in NUMBERS:
        means = [group.mean(task, number.key) for task in tasks]
        if all(mean is None for mean in means):
            continue
        body.append(_line(number.name, _own_cells(group, tasks, means, number), strong=True))
        if number.key == "rec2ftp.value":
            chances = [group.mean(task, "rec2ftp.chance", beside=number.key) for task in tasks]
            body.append(_line("chance", _own_cells(group, tasks, chances, number)))
        body += _papers(number, tasks)
    titles = [
        tag("th", "number", scope="col"),
        *(tag("th", text, scope="col", class_="num") for text in (*tasks, "mean")),
    ]
    head = tag("thead", tag("tr", *titles))
    inner = tag("table", tag("caption", group_caption(group)), head, tag("tbody", *body))
    return scrolling(inner, f"Numbers by task: {group.label}")


def _own_cells(group: Group, tasks: Sequence[str], means: Sequence[Mean | None], number: Number) -> list[Markup | str]:
    cells = [_mean_cell(mean, number, len(group.on(task))) for task, mean in zip(tasks, means, strict=True)]
    return [*cells, _over_tasks([None if mean is None else mean.value for mean in means], number)]


def _over_tasks(values: Sequence[float | None], number: Number) -> Markup | str:
    """The mean over tasks; where it is not over all of them, over how many."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    said = shown(sum(known) / len(known), number.style)
    if len(known) == len(values):
        return said
    return join(said, tag("span", f"of {len(known)} task{'' if len(known) == 1 else 's'}", class_="interval"))


def _papers(number: Number, tasks: Sequence[str]) -> list[Markup]:
    lines: list[Markup] = []
    keys = {number.key: ""} | ({"rec2ftp.chance": ", chance"} if number.key == "rec2ftp.value" else {})
    for source in PAPERS:
        for key, what in keys.items():
            values = [published(task).get(source, {}).get(key) for task in tasks]
            if any(value is not None for value in values):
                cells = ["" if value is None else shown(value, number.style) for value in values]
                lines.append(_line(f"{source}{what}", [*cells, _over_tasks(values, number)]))
    return lines


def _mean_cell(mean: Mean | None, number: Number, seeds: int) -> Markup | str:
    if mean is None:
        return ""
    value: Markup | str = shown(mean.value, number.style)
    if mean.low is not None and mean.high is not None:
        value = join(value, tag("span", f"{mean.low:.3f} to {mean.high:.3f}", class_="interval"))
    return join(value, tag("span", f"{mean.n} of {seeds} seeds", class_="interval")) if mean.n < seeds else value


def _line(name: str, cells: Sequence[object], *, strong: bool = False) -> Markup:
    kind = "strong" if strong else "muted"
    return tag("tr", tag("th", name, scope="row"), *(tag("td", cell, class_="num") for cell in cells), class_=kind)


# --------------------------------------------------------------------------------------------------------- every run


def runs_table(runs: Sequence[Run]) -> Markup:
    shown_keys = ("accuracy.zsl", "accuracy.icl", "accuracy.ft", "rec2ftp.value", "sim_aou.raw", "sim_am.delta")
    numbers = [number for number in NUMBERS if number.key in shown_keys]
    head = ["model", "task", "seed", "rule", "lr", *(number.name for number in numbers), "verdict"]
    rows = [
        [
            run.model,
            run.task,
            "given" if run.seed is None else run.seed,
            run.rule if run.status == "ok" else f"{run.rule}, {run.status}",
            f"{run.lr:g}",
            *(shown(run.numbers[number.key], number.style) for number in numbers),
            run.verdict or "none",
        ]
        for run in runs[:LISTED]
    ]
    said = f"The first {LISTED} of {len(runs)}; `dualview export` gives all." if len(runs) > LISTED else None
    return table(head, rows, numeric=set(range(4, 5 + len(numbers))), caption=said, class_="tight", label="Every run")
