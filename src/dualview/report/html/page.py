"""One HTML file that needs nothing else: a template filled with escaped text, and the style, script and data inside it.

Text from a run (demonstrations, labels, model names) may hold anything. It reaches the page in two ways only: through
the templates, which escape it, and as JSON in a data block, in which `<` is written as an escape. The page's policy
allows its one script and one style sheet, by their hashes, and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Environment(
    loader=PackageLoader("dualview.report.html"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


_STYLE = ("dualview.css",)
_SCRIPT = ("frame.js", "charts.js", "report.js")


@cache
def _static(*names: str) -> Markup:
    """The package's own style sheet or scripts, one after another."""
    return Markup("").join(
        Markup((files("dualview.report.html") / "static" / name).read_text(encoding="utf-8")) for name in names
    )


def policy() -> str:
    """The content-security policy of every report: its own script and style, images in the page, no connections."""
    script, style = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (_static(*_SCRIPT), _static(*_STYLE))
    )
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def data_json(content: Any) -> Markup:
    """JSON for the script to read. With `<` escaped, nothing in it can end its element."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for bad in "<>&\u2028\u2029":
        text = text.replace(bad, f"\\u{ord(bad):04x}")
    return Markup(text)


def render_page(
    template: str,
    title: str,
    data: Any,
    *,
    lines: Sequence[str] = (),
    contents: Mapping[str, str] | None = None,
    **context: Any,
) -> str:
    """A whole page from a template that extends `page.html`.

    title       the heading
    lines       the text under it
    contents    the title of every section, by its id
    data        for the script: its charts, and the prompts
    """
    page = TEMPLATES.get_template(template).render(
        title=title,
        lines=lines,
        contents=contents or {},
        data=data_json(data),
        policy=policy(),
        style=_static(*_STYLE),
        script=_static(*_SCRIPT),
        **context,
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate in a text could not be written
