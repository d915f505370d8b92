"""The figure of an explanation: every demonstration's part in one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dualview.io.errors import UserError
from dualview.report.figures.style import (
    BLACK,
    SETTINGS,
    SMALL,
    dress,
    finite,
    legend,
    new_figure,
    plain,
    short,
    small_print,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """Of the demonstrations, where the explanation has it."""

    @property
    def caption(self) -> str:
        """Model, task, demonstrations, seed, n and how far the two rankings agree."""
        many = f"{len(self.demos)} demonstration{'' if len(self.demos) == 1 else 's'}"
        drawn = "" if self.seed is None else f" (seed {self.seed})"
        tau = "undefined" if self.tau is None else f"{self.tau:+.2f}"
        return (
            f"{self.model} on {self.task}; {many}{drawn}, n = 1 query; fine-tuning at lr {self.lr:g}; "
            f"Kendall's tau over demonstrations {tau}."
        )


def demo_parts(explanation: Any) -> DemoParts:
    """From the result of `dualview.analyses.explain`, or from the JSON it wrote."""
    try:
        content: Any = explanation if isinstance(explanation, Mapping) else explanation.to_json()
        demos = [
            DemoPart(part["text"], part["label"] or "", part["icl"], part["ft_v"], part["ft_k"])
            for part in content["demos"]
        ]
        facts = {name: content[name] for name in ("query", "model", "task", "lr")}
        return DemoParts(**facts, demos=demos, tau=content["tau"]["demo"], seed=content.get("seed"))
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"This is not an explanation ({error}); `dualview explain --json` writes one.") from None


def attention(explanation: Any) -> Figure:
    """Every demonstration's part in one answer: ICL's attention mass and its share in fine-tuning's update.

    `explanation`: what `dualview.analyses.explain` returns, or the JSON it wrote.
    """
    found = demo_parts(explanation)
    rows = list(range(len(found.demos)))
    figure = new_figure(7.4, 1.7 + 0.27 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
    for axes in (left, right):
        dress(axes)
        axes.grid(visible=False)
        axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axes.axvline(0, color=BLACK, linewidth=0.7)
    left.set_xlabel("softmax mass, mean of heads and layers", fontsize=SMALL)
    right.set_xlabel("share of the update, mean of layers", fontsize=SMALL)
    icl: dict[str, Any] = {"color": SETTINGS["icl"].colour, "hatch": "///", "edgecolor": "white", "linewidth": 0}
    left.barh(rows, [demo.icl for demo in found.demos], 0.7, label="in context", **icl)
    both = any(demo.ft_k is not None for demo in found.demos)
    ft, height, aside = SETTINGS["ft"].colour, 0.36 if both else 0.7, 0.18 if both else 0.0
    shares = [demo.ft_v for demo in found.demos]
    right.barh([row - aside for row in rows], shares, height, color=ft, label="fine-tuning, dual form of W_V")
    if both:
        pale: dict[str, Any] = {"color": "#F3C9A8", "hatch": "////", "edgecolor": ft, "linewidth": 0.4}
        shares = finite([demo.ft_k for demo in found.demos])
        right.barh([row + aside for row in rows], shares, height, label="fine-tuning, dual form of W_K", **pale)
    for axes in (left, right):
        legend(axes, columns=1)
    names = [f"{i}. {short(demo.text, 34)} → {short(demo.label, 14)}" for i, demo in enumerate(found.demos)]
    left.set_yticks(rows, [plain(name) for name in names], fontsize=SMALL)
    left.invert_yaxis()
    small_print(figure, f"Where the answer came from: {short(found.query, 90)}", found.caption)
    return figure
