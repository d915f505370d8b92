"""The verdict's certificate as tables, a figure and a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dualview.analyses.certificate.certificate import LIMIT, Certificate
from dualview.io.atomic import write_json, write_text
from dualview.io.display import TextTable
from dualview.io.saving import extra, save_somewhere
from dualview.metrics.verdict import DECIDING
from dualview.report.figures.curves import Curve, curves
from dualview.report.figures.style import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "calibration"
LEVELS = (*DECIDING, "overall")


def certificate_tables(found: Certificate) -> list[TextTable]:
    """Nulls, positives, and the smallest dose that each level finds."""
    nulls = [
        [family.name, str(family.judged), _shown(family.testable, "d"), str(family.supported)]
        + [_shown(None if family.testable == 0 else family.upper, ".3f")]
        + [_shown(family.contradicted, "d")]
        + [str(family.levels[level]) for level in DECIDING]
        for family in (*found.nulls, found.all_nulls)
    ]
    positives = [
        [each.name, each.overall, *(_shown(each.values.get(level), ".3f") for level in DECIDING)]
        for each in found.positives
    ]
    sizes = {(p.queries, p.draws): "one run" if p.draws == 1 else f"{p.draws} draws" for p in found.power}
    doses = [
        [f"{queries} queries, {runs}", *(_shown(found.smallest_dose(level, queries, draws), "g") for level in LEVELS)]
        for (queries, draws), runs in sizes.items()
    ]
    return [
        TextTable(
            "Nulls",
            ["nulls", "judged", "testable", "supported", "at most", "contradicted", *DECIDING],
            nulls,
            range(1, 9),
            "Testable: both have learnt. Supported: false support. At most: upper end of the 95 % interval (Clopper "
            f"and Pearson) of its rate among the testable; all together must be at most {LIMIT:.0%}. No kind may have "
            f"more than {LIMIT:.0%} of its testable cases supported, and all together no more than that contradicted. "
            "The last three columns count each level alone, where both have learnt. A kind with nothing testable shows "
            "only that nothing is claimed of models that do not learn.",
        ),
        TextTable(
            "Positives", ["positives", "verdict", *DECIDING], positives, range(2, 5), "The number behind each level."
        ),
        TextTable(
            "Power",
            ["smallest dose found", *LEVELS],
            doses,
            range(1, 5),
            "Dose: the share α of the in-context update in FT's, α û + √(1 − α²) of something else. The smallest from "
            "which on at least 80 % are found; – where none is. Overall also needs enough queries to show that both "
            "learn.",
        ),
    ]


def _shown(value: float | None, style: str) -> str:
    return "–" if value is None else format(value, style)


def sentence(found: Certificate) -> str:
    """The certificate in one sentence."""
    nulls, yes = found.all_nulls, sum(each.overall == "supported" for each in found.positives)
    return (
        f"{'Passed' if found.passed else 'Not passed'}: {nulls.supported} of {nulls.judged} nulls are supported (at "
        f"most {nulls.upper:.1%} by the 95 % bound, limit {LIMIT:.0%}) and {yes} of {len(found.positives)} positives."
    )


def power_figure(found: Certificate) -> Figure:
    """Power against dose, each level, in single runs with the most queries."""
    most = max((point.queries for point in found.power), default=0)
    points = {
        level: sorted(
            (p for p in found.power if (p.level, p.queries, p.draws) == (level, most, 1)), key=lambda p: p.dose
        )
        for level in LEVELS
    }
    series = {level: Curve([p.dose for p in own], [p.power for p in own]) for level, own in points.items()}
    count = points["overall"][0].judged if points["overall"] else 0
    note = f"{found.model}, {found.task}: {count} records for each dose, {most} queries each, one run alone."
    title = "Power of the verdict"
    return curves(
        series, title, "dose α of the in-context update in FT's", "share supported", note, references={"80 %": 0.8}
    )


def page(found: Certificate) -> str:
    """The certificate as Markdown."""
    parts = [
        "# Calibration",
        "A measuring instrument is trusted because known things were put under it. Here known nulls and known "
        "positives are put under the verdict of `dualview run`: it must not support the first and must support "
        "the second. The figure says how much similarity it needs to see it.",
        f"**{sentence(found)}**",
        f"```\n{found.provenance['command']}\n```",
        *(table.markdown() for table in certificate_tables(found)),
        f"![Power against dose]({NAME}.png)",
        "## What was put under it",
        "\n".join(
            f"- *{each.name}*: {each.meaning}." for each in (*found.nulls, *found.positives) if _first(each.name)
        ),
        "Made-up records share everything but what is claimed: a mean direction, features of the query, shrinkage of "
        "the zero-shot output, a label bias, the same features in all layers, queries that are easier than others for "
        "both (their predictions agree, and the level says so), features that both read (they agree or disagree by "
        "chance). `--seed` draws everything again; `--full` judges more. The verdict's own page is "
        "[Metrics](metrics.md).",
    ]
    return "\n\n".join(parts) + "\n"


def _first(name: str) -> bool:
    """Variants of one case (`exact, over draws`) are explained once, made-up records in a sentence of their own."""
    return ", over" not in name and not name.startswith("planted")


def write_certificate(found: Certificate, folder: Path) -> list[Path]:
    """calibration.json, then the page and the figure; one of these that fails is a warning."""
    kept, text, figure = (folder / f"{NAME}.{kind}" for kind in ("json", "md", "png"))
    written = save_somewhere([kept], lambda place: write_json(place, found.to_json()))
    written += extra(f"Writing {text}", lambda: [write_text(text, page(found))], written[0]) or []
    return written + (extra(f"Writing {figure}", lambda: save(power_figure(found), figure), written[0]) or [])
