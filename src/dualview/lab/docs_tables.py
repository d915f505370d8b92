"""Fills the tables of documentation pages from the files that the commands wrote.

A page has pairs of marks with the file's path relative to the page:

    <!-- lab: regression.json -->
    <!-- end -->

and `python -m dualview.lab.docs_tables PAGE …` writes the command and its tables between them. Words after the file's
name select the tables with these words in their title: `<!-- lab: language.json cost -->`.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

from dualview.io.atomic import write_text
from dualview.io.errors import UserError
from dualview.lab import LABS
from dualview.lab.harness import LabResult, markdown

_PART = re.compile(r"(<!-- lab: (\S+)(?: ([^\n]+?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: Path) -> str:
    """The page with every table made from its file."""

    def part(found: re.Match[str]) -> str:
        result = LabResult.load(page.parent / found[2])
        if result.lab not in LABS:
            raise UserError(f"{page.parent / found[2]} is from no known lab: {result.lab!r}.")
        tables = import_module(f"dualview.lab.{result.lab}.run").tables(result)
        chosen = [table for table in tables if (found[3] or "") in table.title]
        if not chosen:
            raise UserError(f"{page.parent / found[2]} has no table with {found[3]!r} in its title.")
        return f"{found[1]}\n{markdown(result, chosen)}\n{found[4]}"

    return _PART.sub(part, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_text(Path(name), filled(Path(name)))
