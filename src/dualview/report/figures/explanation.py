"""The figure of an explanation: every demonstration's part in one answer."""

from __future__ import annotations

from collections.abc import Mapping
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


def attention(explanation: Any) -> Figure:
    """Every demonstration's part in one answer: ICL's attention mass and its share in fine-tuning's update.

    `explanation`: what `dualview.explain` returns, or the JSON it wrote.
    """
    try:
        content: Any = explanation if isinstance(explanation, Mapping) else explanation.to_json()
        demos = content["demos"]
        names = [f"{i}. {short(demo['text'], 34)} → {short(demo['label'] or '', 14)}" for i, demo in enumerate(demos)]
        icl, ft_v, ft_k = ([demo[key] for demo in demos] for key in ("icl", "ft_v", "ft_k"))
        title, note = f"Where the answer came from: {short(content['query'], 90)}", _caption(content)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"This is not an explanation ({error}); `dualview explain --json` writes one.") from None
    rows = range(len(demos))
    figure = new_figure(7.4, 1.7 + 0.27 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
    for axes in (left, right):
        dress(axes)
        axes.grid(visible=False)
        axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axes.axvline(0, color=BLACK, linewidth=0.7)
    left.set_xlabel("softmax mass, mean of heads and layers", fontsize=SMALL)
    right.set_xlabel("share of the update, mean of layers", fontsize=SMALL)
    hatched: dict[str, Any] = {"color": SETTINGS["icl"].colour, "hatch": "///", "edgecolor": "white", "linewidth": 0}
    left.barh(rows, icl, 0.7, label="in context", **hatched)
    both = any(share is not None for share in ft_k)
    colour, height, aside = SETTINGS["ft"].colour, 0.36 if both else 0.7, 0.18 if both else 0.0
    right.barh([row - aside for row in rows], ft_v, height, color=colour, label="fine-tuning, dual form of W_V")
    if both:
        pale: dict[str, Any] = {"color": "#F3C9A8", "hatch": "////", "edgecolor": colour, "linewidth": 0.4}
        right.barh([row + aside for row in rows], finite(ft_k), height, label="fine-tuning, dual form of W_K", **pale)
    for axes in (left, right):
        legend(axes, columns=1)
    left.set_yticks(rows, [plain(name) for name in names], fontsize=SMALL)
    left.invert_yaxis()
    small_print(figure, title, note)
    return figure


def _caption(content: Mapping[str, Any]) -> str:
    """Model, task, demonstrations, seed, n and how far the two rankings agree."""
    count, seed, tau = len(content["demos"]), content.get("seed"), content["tau"]["demo"]
    many = f"{count} demonstration{'' if count == 1 else 's'}" + ("" if seed is None else f" (seed {seed})")
    agreement = "undefined" if tau is None else f"{tau:+.2f}"
    return (
        f"{content['model']} on {content['task']}; {many}, n = 1 query; fine-tuning at lr {content['lr']:g}; "
        f"Kendall's tau over demonstrations {agreement}."
    )
