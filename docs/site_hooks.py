"""What the site makes when it is built: the pages of results in its menu, and the command line's reference.

`findings.md`, its appendix and `lab/*.md` are written from result files, so the menu lists those that there are; the
files that the findings link to go onto the site. The notebooks become pages. `reference/cli.md` gets every verb and
option, read from the program itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.structure.files import File

from dualview.cli.lab import lab_app
from dualview.cli.main import app

RESULTS = "studies/results"
NOTEBOOKS = "notebooks"
NEEDS = re.compile(r"^(```.*) needs=\"[^\"]*\"", re.MULTILINE)
"""Why a block is not run by the tests: no option of the site's, which would not show such a block as code."""
PLACE = "<!-- every verb, filled in when the site is built -->"


def on_config(config: Any) -> Any:
    """Called by mkdocs first: put the pages of results before the conventions."""
    docs = Path(config["docs_dir"])
    results = {"Findings": "findings.md", "Appendix to the findings": "appendix.md"}
    findings: list[Any] = [{title: page} for title, page in results.items() if (docs / page).is_file()]
    pages = sorted((docs / "lab").glob("*.md"), key=lambda page: (page.stem == "more", page.name))
    labs = [f"lab/{page.name}" for page in pages]
    at = next(i for i, entry in enumerate(config["nav"]) if "Conventions" in entry)
    config["nav"][at:at] = [*findings, *([{"The lab": labs}] if labs else [])]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs once it knows its files: add the study's results and the notebooks' pages."""
    root = Path(config["docs_dir"]).parent
    for path in sorted((Path(config["docs_dir"]) / NOTEBOOKS).glob("*.ipynb")):
        files.append(File.generated(config, f"{NOTEBOOKS}/{path.stem}.md", content=notebook_page(path)))
    for path in sorted((root / RESULTS).rglob("*.parquet")):
        files.append(File.generated(config, path.relative_to(root).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    markdown = NEEDS.sub(r"\1", markdown)
    if page.file.src_uri in ("findings.md", "appendix.md"):
        return markdown.replace(f"](../{RESULTS}/", f"]({RESULTS}/")
    if page.file.src_uri != "reference/cli.md":
        return markdown
    if PLACE not in markdown:
        raise ValueError(f"{page.file.src_uri} has lost the place for the verbs: {PLACE}")
    return markdown.replace(PLACE, "\n".join(verbs()))


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: its text, and its code in blocks."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    shown = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in parts]
    return "\n\n".join([*shown, f"[The notebook itself]({path.name})", ""])


def verbs() -> Iterator[str]:
    """Every verb as Markdown: its sentence, arguments and options."""
    yield from _described(typer.main.get_command(app), "dualview")


def _described(command: Any, name: str) -> Iterator[str]:
    if hasattr(command, "commands"):
        for each, inner in command.commands.items():
            # A lab's command reads its options itself, when it is called.
            whole = typer.main.get_command(lab_app(each)) if name == "dualview lab" else inner
            yield from _described(whole, f"{name} {each}")
        return
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (f"## {name}", "", _plain(command.help or ""), "", "```text", f"{name} {usage}", "```", "")
    records = [p.get_help_record(context) for p in command.params if p.name != "help"]
    rows = [f"| `{names}` | {_plain(said)} |" for names, said in filter(None, records)]
    if rows:
        yield from ("| option | |", "|---|---|", *rows, "")


def _plain(text: str) -> str:
    """As Markdown shows it unchanged: neither table, tag nor link."""
    flat = " ".join(text.split())
    return flat.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[").replace("]", "\\]")
