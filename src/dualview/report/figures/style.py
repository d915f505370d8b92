"""What every figure shares: colours, hatches and markers, the caption, and reproducible files.

Okabe and Ito's palette (colour-blind safe); every series also differs in marker, line or hatch, so that figures work
in black and white. Figures are made without pyplot, hence without any global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualview.io.atomic import whole
from dualview.io.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("pdf", "svg", "png")
SMALL, NORMAL = 7.5, 9.0
BLACK, GREY = "#000000", "#6B6B6B"
FLOOR, CEILING = "#BDBDBD", "#009E73"


@dataclass(frozen=True)
class Look:
    """How one series is drawn, in colour and in black and white."""

    colour: str
    marker: str
    line: Any
    """matplotlib's name of a line style, or its dashes."""
    hatch: str


SETTINGS = {
    "zsl": Look("#8C8C8C", "s", ":", ""),
    "icl": Look("#0072B2", "o", "-", "///"),
    "ft": Look("#D55E00", "^", "--", "..."),
}
CYCLE = (
    Look("#0072B2", "o", "-", "///"),
    Look("#D55E00", "^", "--", "..."),
    Look("#009E73", "s", "-.", "\\\\\\"),
    Look("#CC79A7", "D", ":", "xxx"),
    Look("#000000", "v", (0, (6, 1.5)), "---"),
    Look("#E69F00", "P", (0, (3, 1, 1, 1, 1, 1)), "++"),
    Look("#56B4E9", "X", (0, (1, 1)), "ooo"),
    Look("#6B6B6B", "*", (0, (8, 2, 1, 2)), "**"),
    Look("#8B4513", "<", (0, (4, 1, 1, 1)), "OO"),
)
"""In this order, for series that have no colour of their own."""


def look(index: int) -> Look:
    """After the last, the colours repeat with the markers and lines of their neighbours."""
    again, place = divmod(index, len(CYCLE))
    other = CYCLE[(place + again) % len(CYCLE)]
    return replace(other, colour=CYCLE[place].colour)


def new_figure(width: float = 6.4, height: float = 3.6) -> Figure:
    """An empty figure, its size in inches, laid out so that nothing overlaps."""
    try:
        from matplotlib.figure import Figure
    except Exception as error:  # a broken installation may raise anything
        raise UserError(f"Figures need matplotlib ({error}); run `pip install matplotlib`.") from error

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def dress(axes: Axes, *, xlabel: str = "", ylabel: str = "") -> None:
    """Labels in one size, light grid, no box."""
    axes.set_xlabel(xlabel, fontsize=NORMAL)
    axes.set_ylabel(ylabel, fontsize=NORMAL)
    axes.tick_params(labelsize=SMALL)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def legend(axes: Axes, *, columns: int = 5) -> None:
    """A legend above the plot, outside of the data, in as many columns as fit, if there is anything to name."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    labels = [short(label, 44) for label in labels]
    room = 16 * (axes.get_figure(root=True).get_figwidth() - 0.9)  # pyright: ignore[reportOptionalMemberAccess]
    fitting = max(1, min(len(labels), columns, int(room / (max(map(len, labels)) + 9))))  # in characters
    where: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2}
    axes.legend(handles, labels, ncols=fitting, fontsize=SMALL, frameon=False, handlelength=2.6, **where)


def short(text: str, most: int) -> str:
    """On one line, and cut where it is too long."""
    flat = " ".join(text.split())
    return flat if len(flat) <= most else f"{flat[: most - 1]}…"


def small_print(figure: Figure, title: str, text: str) -> None:
    """The title above the figure, and what was run (model, task, n, seed) in small print below it."""
    width = int(figure.get_figwidth() * 17.5)
    figure.suptitle(_wrapped(title, int(width * 0.8)), fontsize=NORMAL + 0.5, fontweight="bold", x=0.01, ha="left")
    if text:
        figure.supxlabel(_wrapped(text, width), fontsize=SMALL - 0.5, color="#444444", x=0.01, ha="left")


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(
        line for part in text.splitlines() for line in textwrap.wrap(plain(part), width, break_on_hyphens=False)
    )


def plain(text: str) -> str:
    """Text without mathematics: `$` begins it in matplotlib, and a name may hold two."""
    return text.replace("$", r"\$")


def save(figure: Figure, path: Path | str) -> list[Path]:
    """Write a figure in the format of the suffix (pdf, svg or png), or in all three for a name without one.

    The same figure gives the same bytes: no dates, and no random ids in the SVG.
    """
    import matplotlib

    path = Path(path)
    if path.suffix and path.suffix[1:] not in FORMATS:
        raise UserError(f"A figure is written as pdf, svg or png, not as {path.suffix[1:]}; rename {path}.")
    paths = [path] if path.suffix else [path.with_name(f"{path.name}.{kind}") for kind in FORMATS]
    silent: dict[str, dict[str, Any]] = {
        "pdf": {"CreationDate": None, "Producer": "dualview", "Creator": "dualview"},
        "svg": {"Date": None, "Creator": "dualview"},
        "png": {"Software": None},
    }
    steady: Any = {"svg.hashsalt": "dualview", "svg.fonttype": "none", "pdf.fonttype": 42}
    for each in paths:
        kind = each.suffix[1:]
        with whole(each) as temporary, matplotlib.rc_context(steady):
            figure.savefig(temporary, format=kind, dpi=200, metadata=silent[kind])
    return paths


def finite(values: Sequence[float | None]) -> list[float]:
    """None as NaN, which leaves a gap in a line."""
    return [float("nan") if value is None else float(value) for value in values]
