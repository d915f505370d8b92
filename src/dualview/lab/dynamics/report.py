"""The dynamics lab's curves: when each similarity rises above its floors, tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dualview.lab.charts import lines
from dualview.lab.harness import LabResult, Table, between, number
from dualview.lab.summaries import interval_curve, mean
from dualview.report.charts.spec import Axis
from dualview.report.figures.curves import Curve
from dualview.report.figures.draw import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = Mapping[str, Any]
LIMITS = (
    "95 % intervals: Student over draws of demonstrations behind the same queries (one draw has none); they cover "
    "neither other queries nor another training. Floors are means over draws."
)
ABOVE = "Above in: draws in which raw SimAOU exceeds every floor at p < .01."


def highest_floor(point: Point, metric: str = "sim_aou") -> float | None:
    """The largest of a metric's floors at one checkpoint."""
    known = [floor for floor in point["floors"].get(metric, {}).values() if floor is not None]
    return max(known, default=None)


def is_above(point: Point) -> bool:
    """Raw SimAOU exceeds every floor at p < .01 (the verdict's own test) in every draw."""
    return all(draw["sim_aou"]["above_every_floor"] for draw in point["draws"])


def by_training(points: Sequence[Point]) -> dict[str, list[Point]]:
    names = dict.fromkeys(point["training"] for point in points)
    return {name: [point for point in points if point["training"] == name] for name in names}


def summarise(points: Sequence[Point]) -> dict[str, Any]:
    """For each training: from which step on raw SimAOU stays above its floors, and a sentence."""
    trainings: dict[str, Any] = {}
    for name, own in by_training(points).items():
        since: int | None = None
        for point in reversed(own):
            if not is_above(point):
                break
            since = point["step"]
        supported = [point["step"] for point in own if set(point["verdicts"]) == {"supported"}]
        trainings[name] = {
            "above_floors_from": since,
            "above_floors_at": [point["step"] for point in own if is_above(point)],
            "supported_at": supported,
            "sentence": _sentence(name, own, since, supported),
        }
    return {"trainings": trainings}


def _sentence(name: str, own: Sequence[Point], since: int | None, supported: Sequence[int]) -> str:
    first, last = own[0]["step"], own[-1]["step"]
    if since is None:
        shown = f"at step {last} raw SimAOU is not above its floors"
    elif since == first == 0:
        shown = "raw SimAOU is above its floors from step 0 on, that is before any learning"
    elif since == first:
        shown = f"raw SimAOU is above its floors at every checkpoint, from step {first} on"
    else:
        shown = f"raw SimAOU is above its floors from step {since} of {last} on"
    accuracies = own[-1]["numbers"]
    icl, zsl = accuracies["accuracy.icl"]["mean"], accuracies["accuracy.zsl"]["mean"]
    where = f"step {', '.join(map(str, supported))}" if supported else "no step"
    verdict = f"the verdict of every draw is *supported* at {where}"
    return f"{name}: {shown}; {verdict}. At the end accuracy is {icl:.3f} in context and {zsl:.3f} without."


def tables(result: LabResult) -> list[Table]:
    """For each training, the similarities and the predictions at every checkpoint."""
    settings = result.settings
    asked = (
        f"{result.results['task']}, {settings['shots']} demonstrations asked for, {settings['n_queries']} queries, "
        f"{settings['draws']} draws."
    )
    shown: list[Table] = []
    said = summarise(result.results["points"])["trainings"]  # again, so that old files get today's wording
    for name, own in by_training(result.results["points"]).items():
        columns = ["step", "SimAOU raw", "95 % interval", "highest floor", "above in", "SimAM delta"]
        columns += ["95 % interval", "highest floor", "‖Δh‖ icl", "‖Δh‖ ft"]
        note = f"{said[name]['sentence']}\n{asked} {LIMITS} {ABOVE}"
        shown.append(Table(f"dynamics, {name}: similarity", columns, [_similarity(point) for point in own], note))
        columns = ["step", "zero-shot", "in-context", "fine-tuned", "Rec2FTP", "by chance", "rate", "supported in"]
        rows = [_predictions(point) for point in own]
        shown.append(Table(f"dynamics, {name}: predictions, means over draws", columns, rows))
    return shown


def _similarity(point: Point) -> list[str]:
    numbers, draws = point["numbers"], len(point["draws"])
    row = [str(point["step"])]
    for key, metric in (("sim_aou.raw", "sim_aou"), ("sim_am.delta", "sim_am")):
        row += [number(numbers[key]["mean"], "+.3f"), between(numbers[key]["ci"], "+.3f")]
        row.append(number(highest_floor(point, metric), "+.3f"))
        if metric == "sim_aou":
            above = sum(bool(draw["sim_aou"]["above_every_floor"]) for draw in point["draws"])
            row.append(f"{above} of {draws}")
    return [*row, *(number(numbers[f"update_norm.{side}"]["mean"]) for side in ("icl", "ft"))]


def _predictions(point: Point) -> list[str]:
    numbers, draws = point["numbers"], point["draws"]
    chances = [draw["rec2ftp"]["chance"] for draw in draws]
    rates = sorted({draw["lr"] for draw in draws})
    return [
        str(point["step"]),
        *(number(numbers[f"accuracy.{name}"]["mean"]) for name in ("zsl", "icl", "ft")),
        number(numbers["rec2ftp.value"]["mean"]),
        number(mean(chances)),
        " to ".join(dict.fromkeys(f"{rate:g}" for rate in (rates[0], rates[-1]))),
        f"{point['verdicts'].get('supported', 0)} of {len(draws)}",
    ]


def figures(result: LabResult) -> dict[str, Figure]:
    """SimAOU with its floor, and the three accuracies, over the steps of each training."""
    settings = result.settings
    note = (
        f"{result.results['task']}, {settings['n_queries']} queries, {settings['draws']} draws of demonstrations. "
        f"{LIMITS} Step 0 is drawn at 0.5."
    )
    drawn: dict[str, Figure] = {}
    for name, own in by_training(result.results["points"]).items():
        similar = {
            "SimAOU raw": _curve(own, "sim_aou.raw"),
            "its highest floor": Curve(_steps(own), [highest_floor(point) for point in own]),
            "SimAM delta": _curve(own, "sim_am.delta"),
        }
        right = {f"accuracy, {each}": _curve(own, f"accuracy.{each}") for each in ("zsl", "icl", "ft")}
        step: Axis = {"label": "training step", "log": True}
        panels = [
            lines(similar, step, {"label": "cosine"}, {"unrelated": 0.0}),
            lines(right, step, {"label": "accuracy"}),
        ]
        drawn[f"dynamics-{name}"] = draw(panels, f"{name}: are the two updates similar?", note, (6.4, 5.6))
    return drawn


def _steps(own: Sequence[Point]) -> list[float]:
    """Steps for a logarithmic axis."""
    return [max(0.5, float(point["step"])) for point in own]


def _curve(own: Sequence[Point], key: str) -> Curve:
    return interval_curve(_steps(own), [point["numbers"][key] for point in own])
