"""Is it the attention sink? What that explanation of the damage of signed values predicts, and what of it holds.

The explanation: models attend strongly to their first token and take little from it. Signing at a scale that is not the
token's own inflates its small value, and that is what breaks. It predicts, for every scale that inflates it (one
constant, a constant for each head, the sequence's mean), with G the reduction of the loss in nats by a treatment:

    attention   the first token gets far more attention than an even share: FAR times as much
    value       its value is smaller than the others'
    helps       sparing it (keeping its value) helps:                                     G_sink > 0
    own scale   where nothing is inflated, sparing it helps much less:                    G_sink(token) < ½ G_sink
    another     sparing another token does not help, or much less:                        G_other ≤ 0 or < ½ G_sink
    zeroed      zeroing it, which removes the inflation too, helps about as much:         G_zeroed > ½ G_sink

The first, second, third and fifth say that there is a sink and that it matters; if one of them fails, the explanation
does not hold. The other two say that it matters because it is inflated: with both it holds, with one it holds in part,
with neither it does not hold. An inequality holds if the 95 % bootstrap interval of its two sides' difference, over
pieces of text, is on one side of 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from dualview.lab.summaries import bootstrap_ci, is_positive

INFLATING = ("sequence", "head", "constant")
FAR = 5.0

Gain = Float[np.ndarray, " row"]


@dataclass(frozen=True)
class Prediction:
    """One thing the explanation predicts, and what was found."""

    name: str
    holds: bool
    found: str


def losses_of(found: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Gain]:
    """The losses of all pieces of text, by scale and by what is spared."""
    return {(each["scale"], each["spared"]): np.array(each["rows"]) for each in found}


def explain(found: Sequence[Mapping[str, Any]], layers: Mapping[str, Any]) -> dict[str, Any]:
    """Each prediction, the verdict, and a sentence."""
    losses = losses_of(found)
    if len(losses["none", "nothing"]) < 2:
        return _untested("one piece of text gives no interval")
    if any(losses[scale, "nothing"].mean() <= losses["none", "nothing"].mean() for scale in INFLATING):
        return _untested("signing did no damage that could be explained")
    predictions = [*_of_the_sink(layers), *_of_sparing(losses)]
    verdict = verdict_of({each.name: each.holds for each in predictions})
    return {
        "predictions": [asdict(each) for each in predictions],
        "verdict": verdict,
        "sentence": _in_words(predictions, verdict),
    }


def verdict_of(holds: Mapping[str, bool]) -> str:
    """One of three verdicts from the six predictions."""
    if not all(holds[name] for name in ("attention", "value", "helps", "another")):
        return "does not hold"
    return ("does not hold", "holds in part", "holds")[holds["own scale"] + holds["zeroed"]]


def _untested(why: str) -> dict[str, Any]:
    return {"predictions": [], "verdict": None, "sentence": f"The sink explanation is not tested here: {why}."}


def _in_words(predictions: Sequence[Prediction], verdict: str) -> str:
    parts = [
        f"{title}: {'; '.join(each.found for each in predictions if each.holds is held)}."
        for title, held in (("As it predicts", True), ("Against what it predicts", False))
        if any(each.holds is held for each in predictions)
    ]
    return f"The sink explanation {verdict} here. {' '.join(parts)}"


def _of_the_sink(layers: Mapping[str, Any]) -> list[Prediction]:
    mass, even, value = statistics.fmean(layers["mass"]), layers["even"], statistics.median(layers["value"])
    return [
        Prediction(
            "attention",
            mass >= FAR * even,
            f"the first token gets {mass:.0%} of the attention (read evenly: {even:.0%})",
        ),
        Prediction("value", value < 1, f"its value is {value:.2f} times as large as the others' (median over layers)"),
    ]


def _of_sparing(losses: Mapping[tuple[str, str], Gain]) -> list[Prediction]:
    def gain(scale: str, spared: str) -> Gain:
        return losses[scale, "nothing"] - losses[scale, spared]

    sink = {scale: gain(scale, "sink") for scale in INFLATING}
    own = gain("token", "sink")
    other = {scale: gain(scale, "another token") for scale in INFLATING}
    zeroed = {scale: gain(scale, "sink zeroed") for scale in INFLATING}
    cost = losses["none", "sink zeroed"].mean() - losses["none", "nothing"].mean()
    where = "at the sequence's mean, a constant for each head and one constant as scale"
    return [
        Prediction("helps", all(map(_positive, sink.values())), f"sparing it gains {_nats(sink)} nats {where}"),
        Prediction(
            "own scale",
            all(_positive(0.5 * each - own) for each in sink.values()),
            f"at the token's own scale, where nothing is inflated, sparing it gains {own.mean():.2f}",
        ),
        Prediction(
            "another",
            all(not _positive(other[scale]) or _positive(0.5 * sink[scale] - other[scale]) for scale in INFLATING),
            f"sparing another token gains {_nats(other)}",
        ),
        Prediction(
            "zeroed",
            all(_positive(zeroed[scale] - 0.5 * sink[scale]) for scale in INFLATING),
            f"zeroing it, which takes away the inflation as well, gains {_nats(zeroed)} "
            f"(and costs {cost:.2f} in the model as it is)",
        ),
    ]


def _nats(gains: Mapping[str, Gain]) -> str:
    first, second, third = (f"{gain.mean():.2f}" for gain in gains.values())
    return f"{first}, {second} and {third}"


def _positive(values: Gain) -> bool:
    return is_positive(bootstrap_ci(values, "sink explanation"))
