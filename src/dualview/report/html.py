"""A run's report: one HTML file, verdict first.

write_report(result, path)                      a run still in memory brings its records and its prompts
write_report(result, path, records=records)     one read from disk: its prompts are made again, and checked
"""

from __future__ import annotations

from pathlib import Path

from dualview.comparison.result import Result
from dualview.io.atomic import write_text
from dualview.records import Records
from dualview.report.charts import loss_chart, run_charts
from dualview.report.page import document, join, tag
from dualview.report.profiles import profiles
from dualview.report.prompts import Missing, ShownPrompts, prompts_of
from dualview.report.queries import fitting, prompts_section, queries_section, viewer_data
from dualview.report.sections import (
    chart_cards,
    floors_table,
    meanings,
    no_script,
    numbers_table,
    page_header,
    provenance_section,
    run_lines,
    run_title,
    section,
    tuning_section,
    verdict_card,
    warnings_of,
)

_CONTENTS = {
    "verdict": "Verdict",
    "numbers": "Numbers",
    "figures": "Figures",
    "tuning": "Fine-tuning",
    "prompts": "Prompts",
    "queries": "Queries",
    "provenance": "Provenance",
}


def render(result: Result, *, records: Records | None = None, prompts: ShownPrompts | Missing | None = None) -> str:
    """The report of one run as HTML."""
    prompts = prompts or prompts_of(result)
    charts = run_charts(result, profiles(result, records or result.records))
    count = fitting(result, prompts)
    losses = [chart for chart in [loss_chart(result)] if chart is not None]
    parts = {
        "verdict": (verdict_card(result), warnings_of(result)),
        "numbers": (tag("div", numbers_table(result), class_="card"), floors_table(result), meanings()),
        "figures": (no_script(), tag("div", chart_cards(charts), class_="cards")),
        "tuning": (tuning_section(result, chart_cards(losses, first=len(charts))),),
        "prompts": (prompts_section(prompts, count),),
        "queries": (queries_section(result, prompts, count),),
        "provenance": (provenance_section(result),),
    }
    body = join(
        page_header(run_title(result), run_lines(result), _CONTENTS),
        tag("main", *(section(name, _CONTENTS[name], *content) for name, content in parts.items()), id="content"),
    )
    data = {"charts": [chart.to_json() for chart in (*charts, *losses)], **viewer_data(result, prompts, count)}
    return document(f"dualview: {run_title(result)}", tag("div", body, class_="page"), data)


def write_report(
    result: Result, path: Path, *, records: Records | None = None, prompts: ShownPrompts | Missing | None = None
) -> Path:
    """Write the report of one run, whole or not at all."""
    write_text(path, render(result, records=records, prompts=prompts))
    return path
