"""docs/findings.md from the study's results: `python studies/findings.py` writes its tables and figure.

The page holds pairs of marks, `<!-- study: NAME -->` and `<!-- end -->`; the text between them is made by the
function NAME of `parts`, from `studies/results/*.parquet` and the lab's files. Prose outside of the marks has no
numbers of ours.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import by_layer
from parts import PARTS

from dualview.io.atomic import write_text
from dualview.io.errors import UserError
from dualview.report.figures.style import save

PAGE = Path(__file__).parents[1] / "docs" / "findings.md"
_PART = re.compile(r"(<!-- study: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """The page with every table made from the results."""
    return _PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n\n{found[3]}", text)


def main() -> None:
    """Make the figure and the page, and write them once both are made."""
    try:
        text = PAGE.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{PAGE} cannot be read ({error.strerror}); it holds the text around the tables.") from error
    figure, page = by_layer.figure(), filled(text)
    save(figure, by_layer.FIGURE)
    write_text(PAGE, page)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
