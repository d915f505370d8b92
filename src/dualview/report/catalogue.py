"""Which numbers of a result are shown, in which order, under which names, and what each is to be read against.

The terminal's tables, the HTML report and the notebook all go by this one list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Number:
    """One number of a result."""

    key: str
    """Where it stands in the result file."""
    name: str
    style: str
    """How to write it, as `format` takes it."""
    control: str | None
    """Which of the result's controls speaks of it."""
    meaning: str


NUMBERS = (
    Number("accuracy.zsl", "accuracy, zero-shot", ".3f", None, "share of the queries answered right without help"),
    Number("accuracy.icl", "accuracy, in-context", ".3f", None, "the same with the demonstrations in the prompt"),
    Number("accuracy.ft", "accuracy, fine-tuned", ".3f", None, "the same after training on the demonstrations"),
    Number(
        "rec2ftp.value",
        "Rec2FTP",
        ".3f",
        "rec2ftp",
        "of the queries that fine-tuning mended, the share that ICL mended too; read it against chance, never "
        "against 0: an accurate ICL mends much of anything",
    ),
    Number(
        "sim_aou.raw",
        "SimAOU raw",
        "+.3f",
        "sim_aou",
        "cosine of what ICL and fine-tuning changed in attention's output; 1 the same direction, 0 unrelated",
    ),
    Number(
        "sim_aou.normalised",
        "SimAOU normalised",
        "+.3f",
        "sim_aou_normalised",
        "the same once outputs have length 1, as the first paper has it; large updates alone raise it, by the noise "
        "floor beside it",
    ),
    Number("sim_am.before", "SimAM before", "+.3f", None, "cosine of ICL's attention logits with zero-shot's"),
    Number(
        "sim_am.after",
        "SimAM after",
        "+.3f",
        "sim_am_after",
        "cosine of ICL's attention logits with the fine-tuned ones; only what it adds to SimAM before can tell",
    ),
    Number(
        "sim_am.delta",
        "SimAM delta",
        "+.3f",
        "sim_am",
        "cosine of the two changes of the attention logits; 1 the same change, 0 unrelated",
    ),
    Number(
        "kendall.dual_v.tau_token",
        "Kendall, dual form of W_V",
        "+.3f",
        "kendall_dual_v",
        "tau-b between ICL's attention to the training tokens and their shares in fine-tuning's update; 1 the same "
        "order, 0 unrelated; read it against the same at a learning rate of 0",
    ),
    Number(
        "kendall.released.tau_token",
        "Kendall, as released",
        "+.3f",
        "kendall_released",
        "the same with q·q in place of the shares, as the first paper's program has it; it hardly depends on training",
    ),
    Number(
        "overlap.ft.token_overlap",
        "top-10 tokens shared, ICL and FT",
        ".3f",
        "token_overlap",
        "share of the ten likeliest next tokens that ICL and fine-tuning have in common",
    ),
    Number("update_norm.icl", "update norm, in-context", ".3f", None, "size of ICL's change of attention's output"),
    Number(
        "update_norm.ft", "update norm, fine-tuned", ".3f", None, "size of fine-tuning's change; 1: the output's own"
    ),
)


PATCHED = Number(
    "accuracy.patch",
    "accuracy, patched",
    ".3f",
    None,
    "the same with a compiled patch of the weights, no demonstrations",
)
"""Only of a run that asked a patch."""


_LIMITS = {
    "accuracy": (0.0, 1.0),
    "rec2ftp": (0.0, 1.0),
    "overlap": (0.0, 1.0),
    "sim_aou": (-1.0, 1.0),
    "sim_am": (-1.0, 1.0),
    "kendall": (-1.0, 1.0),
    "update_norm": (0.0, math.inf),
}


@dataclass(frozen=True)
class Limits:
    """What a number can be at all: a share lies from 0 to 1, a cosine or a tau from -1 to 1."""

    low: float = -math.inf
    high: float = math.inf

    def cut(self, value: float) -> float:
        """The end of an interval, which a symmetric one may have beyond what the number can be."""
        return min(max(value, self.low), self.high)


ANY = Limits()


def limits(key: str) -> Limits:
    """The limits of a number of the result file, by its dotted key.

    >>> limits("accuracy.icl").cut(1.7), limits("sim_am.delta").cut(-3.0)
    (1.0, -1.0)
    """
    return Limits(*_LIMITS.get(key.partition(".")[0], ()))


def at(content: Mapping[str, Any], key: str) -> Any:
    """The value under a dotted key; None where any part is missing."""
    value: Any = content
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None  # pyright: ignore[reportUnknownMemberType]
    return value


def shown(value: float | None, style: str = ".3f") -> str:
    """A number as text, `null` where there is none; a diverged run's in powers of ten."""
    return "null" if value is None else format(value, style if abs(value) < 1e6 else ".3g")


def optional(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


@dataclass(frozen=True)
class Bounds:
    """What a number is held against, as the verdict saw it; empty text where there is none."""

    interval: str = ""
    floor: str = ""
    ceiling: str = ""


def bounds(control: Mapping[str, Any] | None) -> Bounds:
    """The interval, the highest floor with its name, and the ceiling."""
    if control is None:
        return Bounds()
    ci = control["ci"]
    floors = {name: value for name, value in control["floors"].items() if value is not None}
    highest = max(floors, key=lambda name: floors[name], default=None)
    return Bounds(
        interval="" if ci is None else f"{ci[0]:+.3f} to {ci[1]:+.3f}",
        floor="" if highest is None else f"{highest} {floors[highest]:+.3f}",
        ceiling=optional(control["ceiling"]),
    )


def beside(content: Mapping[str, Any], key: str, *, p: bool = True) -> str:
    """The number a value means nothing without; `p` among them unless it has a column of its own."""
    if key == "rec2ftp.value":
        part = content["rec2ftp"]
        if part["value"] is None:
            return str(part.get("reason", ""))
        tested = f"p {part['p']:.2g}; " if p else ""
        return f"{tested}{part['n_both']} of {part['n_ft']}; reverse {optional(part['reverse'])}"
    if key == "sim_aou.normalised":
        return f"noise alone {optional(at(content, 'sim_aou.noise_floor'))}"
    if key == "sim_am.delta":
        undefined = at(content, "sim_am.undefined.delta")
        few = undefined["count"] / undefined["of"] if undefined else 0.0
        return f"{few:.0%} undefined, left out" if few else ""
    return ""


def present(content: Mapping[str, Any]) -> list[Number]:
    """The numbers this result can speak of."""
    found = [number for number in NUMBERS if at(content, number.key) is not None or number.key.split(".")[0] in content]
    if at(content, PATCHED.key) is not None:
        found.insert(1 + max(i for i, number in enumerate(found) if number.key.startswith("accuracy.")), PATCHED)
    return found


EMBEDDED = "embedded: SmolLM2-135M-Instruct, rounded to 4 bits and instruction-tuned"


def what_ran(content: Mapping[str, Any]) -> str:
    """Demonstrations, seed, queries and precision: what stands under every heading and figure."""
    task, provenance = content["task"], content["provenance"]
    shots = task["shots_used"] if task["shots_used"] == task["shots"] else f"{task['shots_used']} of {task['shots']}"
    seed = provenance["seeds"]["demos"]
    drawn = "given" if seed is None else f"seed {seed}"
    weights = provenance["options"].get("weights", "trained")
    redrawn = "" if weights == "trained" else f", weights {weights}"
    return f"{shots} demonstrations ({drawn}), {task['n_queries']} queries, {provenance['dtype']}{redrawn}"


def how_tuned(content: Mapping[str, Any]) -> str:
    ft = content["ft"]
    rule = "" if ft["rule"] == "sgd" else f", {ft['rule']}"
    return f"{ft['params']} at lr {ft['lr']:g}{rule}, {ft['steps']} steps, {ft['status']}"
