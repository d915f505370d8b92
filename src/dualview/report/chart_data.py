"""What the figures and the report's charts draw, taken from a result once for both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualview.comparison.result import Result
from dualview.io.errors import UserError
from dualview.metrics.sim_aou import noise_floor
from dualview.metrics.statistics import wilson_interval
from dualview.report.catalogue import EMBEDDED, at, how_tuned, what_ran
from dualview.report.published import published_values

TITLES = {
    "sim_aou.raw": "SimAOU, raw",
    "sim_aou.normalised": "SimAOU, normalised",
    "sim_am.delta": "SimAM, delta",
    "sim_am.after": "SimAM, after",
}
"""What each similarity is called, by its key in the result file."""
SETTING_NAMES = {"zsl": "zero-shot", "icl": "in-context", "ft": "fine-tuned", "patch": "patched"}


def caption(result: Result) -> str:
    """The small print of every figure: model, task, demonstrations, seed, n, precision, fine-tuning."""
    content = result.to_json()
    model = result.provenance.model
    said = f"{model} on {result.task.name}; {what_ran(content)}; fine-tuning: {how_tuned(content)}."
    return f"{said} {EMBEDDED[0].upper()}{EMBEDDED[1:]}." if model == "embedded" else said


@dataclass(frozen=True)
class Share:
    """The accuracy of one setting, with Wilson's 95 % interval over queries, and what was published for the task."""

    setting: str
    value: float
    low: float
    high: float
    papers: Mapping[str, float]

    @property
    def name(self) -> str:
        return SETTING_NAMES.get(self.setting, self.setting)


def accuracies(result: Result) -> list[Share]:
    """The settings' accuracies: zero-shot, in-context, fine-tuned and, where one was asked, patched."""
    content = result.to_json()
    shares: list[Share] = []
    for setting in SETTING_NAMES:
        value = at(content, f"accuracy.{setting}")
        if value is None:
            continue
        n = result.task.n_queries
        interval = wilson_interval(round(value * n), n)
        low, high = (value, value) if interval is None else (interval.low, interval.high)
        shares.append(Share(setting, value, low, high, published_values(result.task.name, f"accuracy.{setting}")))
    return shares


def n_candidates(result: Result) -> int | None:
    """How many labels the task has; None where rows bring their own choices."""
    return len(at(result.to_json(), "task.labels") or ()) or None


@dataclass(frozen=True)
class NormPoint:
    """One fine-tuning: how large its update was, and how like ICL's."""

    rule: str
    lr: float
    norm: float
    status: str
    accuracy: float | None
    sims: Mapping[str, float | None]
    """By the result file's keys: sim_aou.raw, sim_aou.normalised, sim_am.delta."""
    where: str = ""
    """What it was measured on, where points of several runs stand together."""


NORM_KEYS = {"sim_aou.raw": "sim_aou_raw", "sim_aou.normalised": "sim_aou_normalised", "sim_am.delta": "sim_am_delta"}


def norm_points(result: Result) -> list[NormPoint]:
    """The similarity of every learning rate of the grid, by rule; empty without the full controls."""
    curve: list[dict[str, Any]] = at(result.to_json(), "norm_curve") or []
    return [
        NormPoint(
            rule=point["rule"],
            lr=point["lr"],
            norm=point["update_norm"],
            status=point["status"],
            accuracy=point.get("accuracy"),
            sims={key: point.get(short) for key, short in NORM_KEYS.items()},
        )
        for point in curve
        if point.get("update_norm") is not None and point["update_norm"] > 0
    ]


@dataclass(frozen=True)
class NormSeries:
    """One rule's points that have the similarity, by size of the update; `index` is the rule's among all rules."""

    rule: str
    index: int
    points: Sequence[NormPoint]
    values: Sequence[float]

    @property
    def norms(self) -> list[float]:
        return [point.norm for point in self.points]

    @property
    def crossed(self) -> list[bool]:
        """Which points are of a fine-tuning that diverged or collapsed."""
        return [point.status != "ok" for point in self.points]

    @property
    def joined(self) -> bool:
        """Points of one run make a curve; those of several do not."""
        return not self.points[0].where


def norm_series(points: Sequence[NormPoint], key: str) -> list[NormSeries]:
    """The similarity `key` of every rule that has any: one may be undefined throughout (SimAM of a first layer)."""
    found: list[NormSeries] = []
    for index, rule in enumerate(dict.fromkeys(point.rule for point in points)):
        own = [(p, value) for p in points if p.rule == rule and (value := p.sims[key]) is not None]
        own.sort(key=lambda pair: pair[0].norm)
        if own:
            found.append(NormSeries(rule, index, [point for point, _ in own], [value for _, value in own]))
    return found


def noise_at(sizes: Sequence[float], icl: float) -> list[float]:
    """Normalised SimAOU of two independent random updates: one of ICL's size, one of each of these sizes."""
    return [float(value) for value in noise_floor(np.full(len(sizes), icl), np.array(sizes))]


KENDALL_FORMS = {
    "dual_v": "dual form of W_V",
    "dual_v_lr0": "W_V at lr 0",
    "dual_k": "dual form of W_K",
    "released": "as released (q·q)",
    "released_lr0": "q·q at lr 0",
}


def kendall_layers(result: Result) -> dict[str, list[float | None]]:
    """Kendall's tau of every layer, by form; empty where it was not taken."""
    content = result.to_json()
    found = {form: at(content, f"kendall.{form}.tau_token_per_layer") for form in KENDALL_FORMS}
    return {form: row for form, row in found.items() if row is not None}


@dataclass(frozen=True)
class DemoPart:
    """One demonstration's part in an answer."""

    text: str
    label: str
    icl: float
    ft_v: float
    ft_k: float | None


@dataclass(frozen=True)
class DemoParts:
    """Every demonstration's part in the answer to one query, in context and in fine-tuning's dual form."""

    query: str
    model: str
    task: str
    lr: float
    demos: Sequence[DemoPart]
    tau: float | None
    seed: int | None = None
    """Of the demonstrations, where the explanation tells it."""

    @property
    def caption(self) -> str:
        """The small print: model, task, demonstrations, seed, n and how far the two rankings agree."""
        many = f"{len(self.demos)} demonstration{'' if len(self.demos) == 1 else 's'}"
        drawn = "" if self.seed is None else f" (seed {self.seed})"
        tau = "undefined" if self.tau is None else f"{self.tau:+.2f}"
        return (
            f"{self.model} on {self.task}; {many}{drawn}, n = 1 query; fine-tuning at lr {self.lr:g}; "
            f"Kendall's tau over demonstrations {tau}."
        )


def demo_parts(explanation: Any) -> DemoParts:
    """From what `dualview.analyses.explain` found, or from the JSON it wrote."""
    try:
        content: Any = explanation if isinstance(explanation, Mapping) else explanation.to_json()
        demos = [
            DemoPart(part["text"], part["label"] or "", part["icl"], part["ft_v"], part["ft_k"])
            for part in content["demos"]
        ]
        told = {name: content[name] for name in ("query", "model", "task", "lr")}
        return DemoParts(**told, demos=demos, tau=content["tau"]["demo"], seed=content.get("seed"))
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"This is no explanation ({error}); `dualview explain --json` writes one.") from None
