"""What the figures and the report's charts draw, taken from a result once for both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualview.errors import UserError
from dualview.metrics.statistics import wilson_interval
from dualview.report.numbers import EMBEDDED, at, how_tuned, what_ran
from dualview.report.published import published_values
from dualview.result import Result

SETTING_NAMES = {"zsl": "zero-shot", "icl": "in-context", "ft": "fine-tuned", "patch": "patched"}


def caption(result: Result) -> str:
    """The small print of every figure: model, task, demonstrations, seed, n, precision, fine-tuning."""
    content = result.to_json()
    model = result.provenance["model"]
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


def demo_parts(explanation: Any) -> DemoParts:
    """From what `dualview.explain` found, or from the JSON it wrote."""
    try:
        content: Any = explanation if isinstance(explanation, Mapping) else explanation.to_json()
        demos = [
            DemoPart(part["text"], part["label"] or "", part["icl"], part["ft_v"], part["ft_k"])
            for part in content["demos"]
        ]
        return DemoParts(
            content["query"], content["model"], content["task"], content["lr"], demos, content["tau"]["demo"]
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"This is no explanation ({error}); `dualview explain --json` writes one.") from None
