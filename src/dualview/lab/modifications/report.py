"""The modifications lab's tables, sentences and figures, made from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dualview.lab.formatting import between, number
from dualview.lab.harness import LabResult, Table
from dualview.lab.summaries import range_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dualview.report.figures.curves import Curve

REFERENCE = "softmax"
NONE = "–"


def tables(result: LabResult) -> list[Table]:
    return [_outcome_table(result, "last"), _outcome_table(result, "mean"), _verdicts(result)]


def _setting(result: LabResult) -> str:
    s = result.settings
    data = f"{s['dims']} inputs uniform in ±{s['input_range'] / 2:g}, {s['demos']} demonstrations"
    return (
        f"One layer, {s['heads']} heads; {data}; seeds {result.seeds[0]} to {result.seeds[-1]}. "
        f"An epoch is one pass over {s['train_tasks']:,} problems in {result.results['steps_per_epoch']} steps; "
        f"test loss ½(ŷ − y)² on {s['test_tasks']:,} others"
    )


def _outcome_table(result: LabResult, outcome: str) -> Table:
    found = result.results["differences"][outcome]
    rows: list[list[str]] = []
    for model in result.results["models"]:
        row = found[model["name"]]
        cells = [
            number(row["mean"], ".4f", NONE),
            number(row["difference"], "+.4f", NONE),
            between(row["ci"], "+.4f", NONE),
        ]
        tested = [
            number(row["p_holm"], ".2g", NONE),
            _lower(row, len(result.seeds)),
            "yes" if row["survives"] else "no",
        ]
        if model["name"] == REFERENCE:
            cells, tested = [cells[0], "", ""], ["", "", ""]
        rows.append([model["name"], str(model["parameters"]), *cells, *tested])
    columns = ["model", "parameters", "test loss", "difference", "95 % interval", "p (Holm)", "seeds lower", "survives"]
    if outcome == "last":
        return Table(
            f"Test loss after {result.settings['epochs']} epochs",
            columns,
            rows,
            f"{_setting(result)}. Softmax is α = β = 0. 95 % intervals: Student over trainings.",
        )
    note = "How fast a model learns counts here as well as where it ends."
    return Table("Test loss, mean over all epochs", columns, rows, note)


def _verdicts(result: LabResult) -> Table:
    tests = sum(model["name"] != REFERENCE for model in result.results["models"]) * 2
    rows = [[m["name"], sentence(result, m["name"])] for m in result.results["models"] if m["name"] != REFERENCE]
    note = (
        f"Paired t-tests over {len(result.seeds)} seeds, Holm-corrected over all {tests} comparisons; "
        "a difference survives below .05. Not surviving is not being equal."
    )
    return Table("Which differences from softmax attention survive the seeds", ["model", "finding"], rows, note)


def sentence(result: LabResult, name: str) -> str:
    """One model's finding, in one sentence."""
    found: list[str] = []
    missing: list[str] = []
    for outcome, when in (("last", "at the end"), ("mean", "over all epochs")):
        row, reference = (result.results["differences"][outcome][key] for key in (name, REFERENCE))
        if row["difference"] is None:
            return "Training diverged on at least one seed, so it is not tested."
        if row["survives"]:
            share = abs(row["difference"]) / reference["mean"]
            found.append(f"{'lower' if row['difference'] < 0 else 'higher'} by {share:.1%} {when}")
        else:
            missing.append(when)
    if not found:
        return "No difference from softmax attention survives."
    return f"Its test loss is {' and '.join(found)}{''.join(f'; {when} no difference survives' for when in missing)}."


def _lower(row: Mapping[str, Any], seeds: int) -> str:
    return NONE if row["seeds_lower"] is None else f"{row['seeds_lower']} of {seeds}"


# ----------------------------------------------------------------------------------------------------------- figures


def figures(result: LabResult) -> dict[str, Figure]:
    """Test loss over epochs, a figure for each family with softmax attention in it."""
    from dualview.report.figures.curves import curves

    by_family: dict[str, list[str]] = {}
    for model in result.results["models"]:
        if model["name"] != REFERENCE:
            by_family.setdefault(model["family"], []).append(model["name"])
    note = f"{_setting(result)}. Line: mean over seeds; band: lowest to highest seed."
    return {
        f"modifications_{family}": curves(
            {name: _curve(result, name) for name in (REFERENCE, *names)},
            f"Regression in context: {family} attention against softmax attention",
            "epoch",
            "test loss ½(ŷ − y)²",
            note,
        )
        for family, names in by_family.items()
    }


def _curve(result: LabResult, name: str) -> Curve:
    """From the first epoch on; the loss before it, at random weights, would dominate the scale."""
    seeds = [values[1:] for values in result.results["test_loss"][name].values()]
    return range_curve(range(1, len(seeds[0]) + 1), seeds)
