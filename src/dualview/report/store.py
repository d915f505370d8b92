"""The report of many runs: the six-task table with the papers' beside it, verdicts, figures, and every run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualview.errors import UserError
from dualview.files import write_text
from dualview.report.charts import COLOURS, Chart, norm_charts
from dualview.report.extracts import SETTING_NAMES
from dualview.report.figures_store import (
    accuracy_by_task,
    group_caption,
    similarity_against_norm,
    similarity_by_layer,
)
from dualview.report.figures_style import save
from dualview.report.numbers import NUMBERS, Number, shown
from dualview.report.overview import Group, Mean, Run, groups_of, mean_of, ordered, tasks_of
from dualview.report.page import Markup, document, join, scrolling, table, tag
from dualview.report.published import published
from dualview.report.sections import chart_cards, meanings, no_script, page_header, section
from dualview.result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPERS = ("Dai et al., 1.3B", "Dai et al., 2.7B", "Deutch et al., 1.3B", "Deutch et al., 1.3B, layer-causal")
DRAWN = 8
"""Groups that get charts; all have their table."""
LISTED = 2000
_LAYERED = {"sim_aou.raw": "SimAOU, raw", "sim_aou.normalised": "SimAOU, normalised", "sim_am.delta": "SimAM, delta"}
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
    groups = groups_of(runs)
    charts = [chart for group in groups[:DRAWN] for chart in group_charts(group)]
    points = [point for run in runs if (point := run.point) is not None]
    grid = [point for run in runs for point in run.points]
    said = "A point a run; rules compare at equal size only."
    scattered = [_scattered(chart) for chart in norm_charts(points, said)]
    scattered += [
        _scattered(chart, "over the learning rates") for chart in norm_charts(grid, "A point a learning rate of a run.")
    ]
    fewer = f"Charts of the first {DRAWN} of {len(groups)} groups." if len(groups) > DRAWN else None
    parts: dict[str, tuple[object, ...]] = {
        "verdicts": (verdict_counts(groups, tasks_of(runs)), _verdict_note()),
        "table": (*(_group_card(group, tasks_of(runs), i == 0) for i, group in enumerate(groups)), meanings()),
        "figures": (no_script(), tag("p", fewer) if fewer else None, tag("div", chart_cards(charts), class_="cards")),
        "norms": (tag("div", chart_cards(scattered, first=len(charts)), class_="cards"),),
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
    data = {"charts": [chart.to_json() for chart in (*charts, *scattered)], "prompts": None}
    return document(f"dualview: {title}", tag("div", body, class_="page"), data)


def store_report(results: Iterable[Result | Run], path: Path, *, title: str = "Many runs") -> Path:
    """Write the report of many runs, whole or not at all."""
    write_text(path, render_store(results, title))
    return path


def write_store_figures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write the figures of many runs as PDF, SVG and PNG into a folder, numbered by group where there are several."""
    figures: dict[str, Figure] = {}
    groups = groups_of(ordered(runs))
    for number, group in enumerate(groups, start=1):
        suffix = f"-{number}" if len(groups) > 1 else ""
        figures[f"accuracy{suffix}"] = accuracy_by_task(group)
        for key, title in _LAYERED.items():
            if any(group.layers(task, key) for task in group.tasks):
                figures[f"{key.replace('.', '_')}{suffix}"] = similarity_by_layer(group, key, title)
    if any(run.point is not None for run in runs):
        figures["update_norm"] = similarity_against_norm(runs)
    return [path for name, figure in figures.items() for path in save(figure, folder / name)]


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
    """Every number on every task: the mean over seeds with its interval, the papers' values beneath it."""
    body: list[Markup] = []
    for number in NUMBERS:
        means = [group.mean(task, number.key) for task in tasks]
        if all(mean is None for mean in means):
            continue
        average = mean_of(None if mean is None else mean.value for mean in means)
        cells = [_mean_cell(mean, number) for mean in means]
        last = "" if average is None else shown(average.value, number.style)
        body.append(_line(number.name, [*cells, last], strong=True))
        if number.key == "rec2ftp.value":
            chances = [group.mean(task, "rec2ftp.chance") for task in tasks]
            body.append(_line("chance", [_mean_cell(chance, number) for chance in chances] + [""]))
        body += _papers(number, tasks)
    titles = [
        tag("th", "number", scope="col"),
        *(tag("th", text, scope="col", class_="num") for text in (*tasks, "mean")),
    ]
    head = tag("thead", tag("tr", *titles))
    inner = tag("table", tag("caption", group_caption(group)), head, tag("tbody", *body))
    return scrolling(inner, f"Numbers by task: {group.label}")


def _papers(number: Number, tasks: Sequence[str]) -> list[Markup]:
    lines: list[Markup] = []
    keys = {number.key: ""} | ({"rec2ftp.chance": ", chance"} if number.key == "rec2ftp.value" else {})
    for source in PAPERS:
        for key, what in keys.items():
            values = [published(task).get(source, {}).get(key) for task in tasks]
            average = mean_of(values)
            if average is not None:
                cells = ["" if value is None else shown(value, number.style) for value in values]
                lines.append(_line(f"{source}{what}", [*cells, shown(average.value, number.style)]))
    return lines


def _mean_cell(mean: Mean | None, number: Number) -> Markup | str:
    if mean is None:
        return ""
    value = shown(mean.value, number.style)
    if mean.low is None or mean.high is None:
        return value
    return join(value, tag("span", f"{mean.low:.3f} to {mean.high:.3f}", class_="interval"))


def _line(name: str, cells: Sequence[object], *, strong: bool = False) -> Markup:
    kind = "strong" if strong else "muted"
    return tag("tr", tag("th", name, scope="row"), *(tag("td", cell, class_="num") for cell in cells), class_=kind)


# ------------------------------------------------------------------------------------------------------------ charts


def group_charts(group: Group) -> list[Chart]:
    """Accuracy by task, and each similarity by layer."""
    charts = [_accuracy_chart(group)]
    for key, title in _LAYERED.items():
        series: list[dict[str, Any]] = [
            {
                "name": task,
                "x": list(range(len(means))),
                "values": [None if mean is None else mean.value for mean in means],
                "lo": [None if mean is None else mean.low for mean in means],
                "hi": [None if mean is None else mean.high for mean in means],
            }
            for task in group.tasks
            if (means := group.layers(task, key))
        ]
        if series:
            spec = {
                "title": f"{title}, by layer: {group.label}",
                "x": {"label": "layer", "values": []},
                "y": {"label": "cosine"},
                "series": series,
            }
            charts.append(Chart("lines", spec, "Means over seeds; bands: 95 % intervals over seeds."))
    return charts


def _accuracy_chart(group: Group) -> Chart:
    series: list[dict[str, Any]] = []
    marks: list[dict[str, Any]] = []
    for setting in ("zsl", "icl", "ft"):
        means = [group.mean(task, f"accuracy.{setting}") for task in group.tasks]
        series.append(
            {
                "name": SETTING_NAMES[setting],
                "colour": COLOURS[setting],
                "values": [None if mean is None else mean.value for mean in means],
                "lo": [None if mean is None else mean.low for mean in means],
                "hi": [None if mean is None else mean.high for mean in means],
            }
        )
        for source in PAPERS[:2]:
            values = [published(task).get(source, {}).get(f"accuracy.{setting}") for task in group.tasks]
            if any(value is not None for value in values):
                marks.append({"name": source, "values": values, "series": SETTING_NAMES[setting]})
    spec = {
        "title": f"Accuracy by task: {group.label}",
        "y": {"label": "accuracy", "min": 0, "max": 1},
        "groups": group.tasks,
        "series": series,
        "marks": marks,
    }
    return Chart("bars", spec, "Means over seeds; whiskers: 95 % intervals over seeds; marks: the papers' models.")


def _scattered(chart: Chart, more: str = "") -> Chart:
    """The same chart with points that are not joined: they are runs, not a curve."""
    spec = dict(chart.spec)
    spec["series"] = [{**one, "points": True} for one in spec["series"]]
    spec["title"] = f"{spec['title']}, {more}" if more else spec["title"]
    return Chart(chart.kind, spec, chart.said)


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
