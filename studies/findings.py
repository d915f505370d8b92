"""docs/findings.md, its appendix and the home page's answer, from the studies' results.

`python studies/findings.py` writes tables, sentences and figures.

The pages hold pairs of marks, `<!-- study: NAME -->` (or `NAME ARGUMENT`) and `<!-- end -->`; the text between them is
made by the function NAME of `front`, `front_prose` or `parts`, from `studies/results/**/*.parquet` and the lab's files.
Prose outside of the marks has no numbers of ours.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import by_layer
import dai
import front
import front_prose
import meta_gradients
import parts
from front_figures import FIGURES

from dualview.io.atomic import write_text
from dualview.io.errors import UserError
from dualview.report.figures.style import save

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (DOCS / "findings.md", DOCS / "appendix.md", DOCS / "index.md")
PARTS = {**parts.PARTS, **front.PARTS, **front_prose.PARTS, **dai.PARTS, "meta_gradients": meta_gradients.table}
_PART = re.compile(r"(<!-- study: (\w+)(?: ([\w-]+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """The page with every table made from the results."""

    def part(found: re.Match[str]) -> str:
        given = () if found[3] is None else (found[3],)
        return f"{found[1]}\n{PARTS[found[2]](*given)}\n\n{found[4]}"

    return _PART.sub(part, text)


def main() -> None:
    """Make the figures and the pages, and write them once all are made."""
    made = {page: filled(read(page)) for page in PAGES}
    figures = {by_layer.FIGURE: by_layer.figure(), **{path: draw() for path, draw in FIGURES.items()}}
    for path, figure in figures.items():
        save(figure, path)
    for page, text in made.items():
        write_text(page, text)


def read(page: Path) -> str:
    try:
        return page.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{page} cannot be read ({error.strerror}); it holds the text around the tables.") from error


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
