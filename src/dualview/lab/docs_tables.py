"""Fills the tables of documentation pages from the files that the commands wrote, and draws their figures.

A page has pairs of marks with the file's path relative to the page:

    <!-- lab: regression.json -->
    <!-- end -->

and `python -m dualview.lab.docs_tables PAGE …` writes the command and its tables between them. Words after the file's
name select the tables with these words in their title: `<!-- lab: language.json cost -->`. An image of the page that is
named after a figure of one of its files, `![…](regression.png)`, is drawn anew.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dualview.io.atomic import write_text
from dualview.io.errors import UserError
from dualview.lab import LABS, find_lab
from dualview.lab.harness import LabResult, markdown
from dualview.report.figures.style import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PART = re.compile(r"(<!-- lab: (\S+)(?: ([^\n]+?))? -->\n).*?(<!-- end -->)", re.DOTALL)
_IMAGE = re.compile(r"!\[[^]]*\]\((\S+)\.png\)")


def filled(page: Path) -> str:
    """The page with every table made from its file."""

    def part(found: re.Match[str]) -> str:
        result = _load(page.parent / found[2])
        tables = find_lab(result.lab).tables(result)
        chosen = [table for table in tables if (found[3] or "") in table.title]
        if not chosen:
            raise UserError(f"{page.parent / found[2]} has no table with {found[3]!r} in its title.")
        return f"{found[1]}\n{markdown(result, chosen)}\n{found[4]}"

    return _PART.sub(part, page.read_text(encoding="utf-8"))


def drawn(page: Path) -> dict[str, Figure]:
    """The page's images by name, each drawn from a file of the page.

    The lab's name in a figure's name is replaced by the file's: `language_h200.png` shows language_h200.json.
    """
    text = page.read_text(encoding="utf-8")
    wanted, found = _IMAGE.findall(text), dict[str, "Figure"]()
    for file in dict.fromkeys(part[1] for part in _PART.findall(text)):
        result = _load(page.parent / file)
        if any(name.startswith(Path(file).stem) for name in wanted):
            figures = find_lab(result.lab).figures(result)
            found |= {Path(file).stem + name.removeprefix(result.lab): figure for name, figure in figures.items()}
    if missing := [name for name in wanted if name not in found]:
        raise UserError(f"{page}: no file of the page has the figure {missing[0]}.")
    return {name: found[name] for name in wanted}


def _load(path: Path) -> LabResult:
    result = LabResult.load(path)
    if result.lab not in LABS:
        raise UserError(f"{path} is from no known lab: {result.lab!r}.")
    return result


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        write_text(page, filled(page))
        for name, figure in drawn(page).items():
            save(figure, page.parent / f"{name}.png")
