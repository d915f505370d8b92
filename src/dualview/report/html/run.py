"""A run's report: one HTML file, verdict first.

write_report(result, path)                      a run still in memory has its records and its prompts
write_report(result, path, records=records)     one read from disk: its prompts are rebuilt, and checked
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dualview.comparison.result import Result
from dualview.io.atomic import write_text
from dualview.io.display import TextTable
from dualview.metrics.floors.controls import ROLES
from dualview.metrics.measured import Measured
from dualview.metrics.statistics import p_text
from dualview.records import Records
from dualview.report.catalogue import NUMBERS, adapter_line, run_lines, run_title, setting_title, shown
from dualview.report.charts.profiles import profiles
from dualview.report.charts.run import loss_charts, run_charts
from dualview.report.html.page import render_page
from dualview.report.html.prompts import Missing, ShownPrompts, prompts_of
from dualview.report.html.queries import answers_of, patterns_of, query_rows, settings_of, viewer_data
from dualview.report.html.repro_command import command_of
from dualview.report.tables import levels_table, metrics_table

_CONTENTS = {
    "verdict": "Verdict",
    "numbers": "Numbers",
    "learners": "Patches and adapters",
    "figures": "Figures",
    "tuning": "Fine-tuning",
    "prompts": "Prompts",
    "queries": "Queries",
    "provenance": "Provenance",
}
_MARKS = {True: ("✓", "holds", "ok"), False: ("✗", "fails", "no"), None: ("–", "not tested", "muted")}
_RECORD_FLOORS = {
    "chance": "ICL of the same accuracy, with fixes unrelated to fine-tuning's",
    "gaussian": "fine-tuning's update replaced by a random one of the same size",
    "shuffled_query": "fine-tuning's update of another query",
    "mean_direction": "the part due to the mean update over queries",
    "rotated": "fine-tuning's own updates, rotated at random",
    "head_span": "the part due to the span of the heads' own zero-shot outputs",
    "zsl_direction": "the part due to the direction of the zero-shot vector",
    "noise": "random updates of these sizes after outputs are normalised",
    "before": "the map before fine-tuning",
    "untrained": "the same on an untrained model",
    "untrained_but_embeddings": "the same on a model with trained embeddings and norms only",
}
_HASHES = ("weights, sha256", "prompts, sha256")


def render(result: Result, *, records: Records | None = None, prompts: ShownPrompts | Missing | None = None) -> str:
    """The report of one run as HTML."""
    prompts = prompts or prompts_of(result)
    # Records may have to be fetched from a GPU, and controls tell the spread without them.
    spread = any(control.per_layer is not None for control in (result.controls or {}).values())
    records = records or (None if spread else result.records)
    figures, losses = run_charts(result, profiles(result, records)), loss_charts(result)
    settings, answers = settings_of(result), answers_of(result, prompts)
    rows = query_rows(answers, prompts)
    charts = [chart.to_json() for chart in (*figures, *losses)]
    return render_page(
        "run.html",
        run_title(result),
        {"charts": charts, **viewer_data(answers[: len(rows)], settings, prompts)},
        lines=run_lines(result),
        contents={key: title for key, title in _CONTENTS.items() if key != "learners" or result.learners},
        result=result,
        marks=_MARKS,
        levels=None if result.verdict is None else levels_table(result.verdict),
        numbers=metrics_table(result, wide=True),
        floors=floors_table(result),
        catalogue=NUMBERS,
        figures=figures,
        losses=losses,
        tuning=_tuning_tables(result),
        prompts=prompts,
        settings=[setting_title(name) for name in settings],
        learners=_learners(result),
        patterns=patterns_of(answers),
        query_rows=rows,
        command=command_of(result.provenance.options),
        provenance=_provenance(result),
        hashes=_HASHES,
    )


def write_report(
    result: Result, path: Path, *, records: Records | None = None, prompts: ShownPrompts | Missing | None = None
) -> Path:
    """Write the report of one run, whole or not at all."""
    return write_text(path, render(result, records=records, prompts=prompts))


def _learners(result: Result) -> list[dict[str, Any]]:
    """Each patch and adapter: its verdict, its numbers and its floors."""
    found: list[dict[str, Any]] = []
    for name, measured in result.learners.items():
        title, about = name.replace(":", " ", 1), (result.adapters or {}).get(name)
        levels = None if measured.verdict is None else levels_table(measured.verdict)
        found.append(
            {
                "title": title,
                "about": "" if about is None else adapter_line(about),
                "verdict": measured.verdict,
                "levels": None if levels is None else replace(levels, label=f"The verdict on {title}, level by level"),
                "numbers": replace(metrics_table(measured, wide=True, learner=title), label=f"The numbers of {title}"),
                "floors": replace(floors_table(measured), label=f"Every floor and ceiling of {title}"),
            }
        )
    return found


def floors_table(result: Measured) -> TextTable:
    """Every floor and ceiling of every metric, with what it is and its p."""
    names = {number.control: number.name for number in NUMBERS if number.control}
    rows: list[list[str]] = []
    for metric, control in (result.controls or {}).items():
        if metric not in names:
            continue
        groups = {"floor": control.floors, "ceiling": control.ceilings, "other": control.others}
        for kind, group in groups.items():
            for name, value in group.items():
                p = control.floors_p[name] if kind == "floor" and control.value is not None else None
                meaning = ROLES[name].meaning if name in ROLES else _RECORD_FLOORS.get(name, "")
                tested = "" if p is None else p_text(p)
                rows.append([names[metric], kind, name, shown(value, "+.3f"), tested, meaning])
    head = ["number", "bound", "control", "value", "p", "what it is"]
    note = "p: one-sided, that the number does not exceed this floor."
    return TextTable("Every floor and ceiling", head, rows, {3, 4}, note)


def _tuning_tables(result: Result) -> list[TextTable]:
    """How the learning rate and the seed were chosen, and what else the controls found."""
    selection, found = result.selection, list[TextTable]()
    chosen = {"lr": result.ft.lr, "seed": result.provenance.seeds.demos}
    for name, title, unit in (("lr", "Learning rates tried", "rate"), ("seed", "Seeds tried", "seed")):
        trials = (selection.lr if name == "lr" else selection.seed) if selection is not None else None
        if selection is not None and trials:
            rows = [
                [f"{t.value:g}", shown(t.accuracy), t.status, "yes" if t.value == chosen[name] else ""] for t in trials
            ]
            note = f"{title}, on {selection.rows} selection rows that are never reported."
            found.append(TextTable(title, [unit, "accuracy", "status", "chosen"], rows, {1}, note))
    if more := _other_numbers(result):
        found.append(TextTable("Other numbers", ["other numbers", "value", "notes"], more, {1}))
    return found


def _other_numbers(result: Result) -> list[list[str]]:
    rows: list[list[str]] = []
    if (order := result.order_sensitivity) is not None:
        note = f"standard deviation over {order.permutations} orders, {order.queries} queries"
        rows += [
            [f"order sensitivity, {name}", shown(value), note] for name, value in (("ICL", order.icl), ("FT", order.ft))
        ]
    for name, overlap in (result.overlap or {}).items():
        note = f"overlap cosine {shown(overlap.overlap_cosine)}"
        rows.append([f"top-10 tokens shared with ICL, {name}", shown(overlap.token_overlap), note])
    for name, value in (result.calibrated.accuracy if result.calibrated is not None else {}).items():
        rows.append([f"accuracy, calibrated, {name}", shown(value), "contextual calibration (Zhao et al. 2021)"])
    return rows


def _provenance(result: Result) -> dict[str, str]:
    """Everything that decides these numbers."""
    known, run = result.provenance, result.provenance.run
    model = {known.model: known.model_commit} if known.model_commit else {}
    commits = {**model, **known.code_commits, **known.data_commits}
    facts = {
        "model": known.model,
        "hub commits": ", ".join(f"{name} {commit}" for name, commit in commits.items()),
        "architecture": known.architecture,
        "weights, sha256": known.weights_hash,
        "prompts, sha256": known.prompts_hash,
        "computed in": f"{known.dtype} on {known.device}, threads: {known.threads}, {known.attention}",
        "versions": ", ".join(f"{name} {version}" for name, version in known.versions.items()),
        "options": ", ".join(f"{name} = {value}" for name, value in known.options.items()) or "all at their defaults",
        "when and where": "unknown" if run is None else f"{run.date}, {run.host}",
        "seconds": "" if run is None else ", ".join(f"{name} {seconds:g}" for name, seconds in run.seconds.items()),
    }
    return {name: value for name, value in facts.items() if value}
