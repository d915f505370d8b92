"""The sign lab's summary, tables and figures: the damage of each scale, and what sparing a token recovers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dualview.lab.charts import bars, lines
from dualview.lab.harness import LabResult, Table, between, number
from dualview.lab.sign.explanation import explain, losses_of
from dualview.lab.summaries import bootstrap_ci, ratio_of_means
from dualview.report.charts.spec import Chart
from dualview.report.figures.curves import Curve
from dualview.report.figures.draw import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Measured = Mapping[str, Any]
"""What was measured under one condition."""

SCALES = {
    "none": "values as they are",
    "constant": "one constant",
    "head": "a constant for each head",
    "sequence": "the sequence's mean",
    "token": "each token's own mean",
}
GROUPS = ("as they are", "one constant", "one per head", "sequence's mean", "token's own")
"""The scales, under the bars of the figure."""
SPARED = ("nothing", "sink", "sink zeroed", "another token")


def summarise(found: Sequence[Measured], layers: Measured) -> dict[str, Any]:
    """What each sparing recovers of the damage, and whether the sink explanation holds.

    recovered   (L_signed − L_spared) / (L_signed − L_original): 0, sparing the token does nothing; 1, it undoes the
                signing
    gap         the part of the difference between a scale and the token's own that disappears when both spare the sink,
                1 − (L_scale − L_token with the sink spared) / (L_scale − L_token): 1, the sink is the whole difference

    Intervals are a bootstrap over pieces of text, the same ones on all sides.
    """
    losses = losses_of(found)

    def recovered(scale: str, spared: str) -> dict[str, Any]:
        damaged = losses[scale, "nothing"]
        gained, damage = damaged - losses[scale, spared], damaged - losses["none", "nothing"]
        return ratio_of_means(gained, damage, f"{scale}/{spared}")

    def gap(scale: str) -> dict[str, Any]:
        apart, left = (losses[scale, spared] - losses["token", spared] for spared in ("nothing", "sink"))
        return ratio_of_means(apart - left, apart, f"gap/{scale}")

    signed = list(SCALES)[1:]
    return {
        "recovered": {scale: {spared: recovered(scale, spared) for spared in SPARED[1:]} for scale in signed},
        "gap": {scale: gap(scale) for scale in signed[:-1]},
        "explanation": explain(found, layers),
    }


def _explained(result: LabResult) -> str:
    """The verdict on the sink, computed from the numbers, so that old files show the same sentence."""
    return explain(result.results["conditions"], result.results["sink"])["sentence"]


def tables(result: LabResult) -> list[Table]:
    """Every condition, and the sink by layer."""
    found: Sequence[Measured] = result.results["conditions"]
    first = found[0]
    rows = [_row(each, result.results["recovered"]) for each in found]
    settings = result.settings
    note = (
        f"{result.provenance['model']}; {settings['rows']} pieces of {settings['length']} tokens of "
        f"{', '.join(result.results['text']['source'])}; {settings['task']}, {first['shots_used'][0]} demonstrations, "
        f"{len(first['right'][0])} queries, {len(first['icl'])} draws, chance {first['chance']:.3f}. "
        "95 % intervals: bootstrap over pieces of text, and over queries (averaged over draws). Recovered: the part of "
        f"the loss due to signing at that scale that sparing the token undoes.\n{_explained(result)}"
    )
    columns = ["scale", "spared", "perplexity", "95 % interval", "recovered", "95 % interval"]
    columns += ["accuracy", "95 % interval", "zero-shot"]
    return [Table("sign: attention on the signs of the values", columns, rows, note), _layers_table(result)]


def _row(each: Measured, recovered: Mapping[str, Any]) -> list[str]:
    inside = bootstrap_ci(np.array(each["rows"]), "loss")
    around = bootstrap_ci(np.array(each["right"]).mean(0), "accuracy")
    gain = recovered.get(each["scale"], {}).get(each["spared"], {})
    return [
        SCALES[each["scale"]],
        each["spared"],
        _ppl(each["loss"]),
        "" if inside is None else f"{_ppl(inside[0])} to {_ppl(inside[1])}",
        number(gain.get("value"), ".0%", ""),
        between(gain.get("ci"), ".0%"),
        f"{statistics.fmean(each['icl']):.3f}",
        "" if around is None else f"{max(0.0, around[0]):.3f} to {min(1.0, around[1]):.3f}",
        f"{each['zsl']:.3f}",
    ]


def _ppl(loss: float) -> str:
    perplexity = math.exp(min(loss, 700.0))
    return f"{perplexity:.1f}" if perplexity < 1e4 else f"{perplexity:.1e}"


def _layers_table(result: LabResult) -> Table:
    sink = result.results["sink"]
    rows = [
        [str(layer), f"{mass:.3f}", f"{value:.3f}", f"{share:.3f}"]
        for layer, (mass, value, share) in enumerate(zip(sink["mass"], sink["value"], sink["share"], strict=True))
    ]
    note = (
        f"Read evenly, the first token would get {sink['even']:.3f}. Size of its value: its norm over the median norm "
        "of the others'. Share: of Σ a_i ‖v_i‖; with values of one size it would be the attention."
    )
    columns = ["layer", "attention to the first token", "size of its value", "its share of the output"]
    return Table("sign: the attention sink, in the model as it is", columns, rows, note)


def figures(result: LabResult) -> dict[str, Figure]:
    """The sink by layer, and the loss under every condition."""
    sink = result.results["sink"]
    layers = list(range(len(sink["mass"])))
    series = {
        "attention to the first token": Curve(layers, sink["mass"]),
        "size of its value (others: 1)": Curve(layers, sink["value"]),
        "its share of the output": Curve(layers, sink["share"]),
    }
    note = (
        f"{result.provenance['model']}, {result.settings['calibration']} pieces of {result.settings['length']} tokens."
    )
    panels = [
        _loss_panel(result),
        lines(series, {"label": "layer"}, {"label": "first token"}, {"read evenly": sink["even"]}),
    ]
    note = (
        f"Above: loss on {result.settings['rows']} pieces of text, values signed at each scale and one token spared; "
        f"95 % bootstrap intervals over pieces. Below: {note}"
    )
    return {"sign": draw(panels, "Signed values, one token spared, and the sink by layer", note, (6.4, 6.6))}


def _loss_panel(result: LabResult) -> Chart:
    found = {(each["scale"], each["spared"]): each for each in result.results["conditions"]}

    def bar(scale: str, spared: str) -> dict[str, Any]:
        each = found.get((scale, spared))
        if each is None:
            return {"mean": None, "ci": None}
        return {"mean": each["loss"], "ci": bootstrap_ci(np.array(each["rows"]), "loss")}

    series = {f"spared: {spared}": [bar(scale, spared) for scale in SCALES] for spared in SPARED}
    return bars(series, GROUPS, {"label": "loss, nats per token"})
