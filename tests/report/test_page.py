"""Whatever a text holds, it stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from dualview.io.display import TextTable
from dualview.report.html.page import TEMPLATES, data_json, policy, render_page
from report.parsed import data_of, parse

NASTY = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [
            "</script><script>alert(1)</script>",
            "<!--",
            "]]>",
            '" onmouseover="x',
            "' x='",
            "&lt;",
            "<img src=x onerror=y>",
        ]
    ),
)


def as_parsed(text: str) -> str:
    """What any HTML parser makes of line ends and of NUL."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


@given(NASTY, NASTY)
def test_text_and_attributes_come_back_as_they_went_in(text: str, attribute: str) -> None:
    root = parse(
        TEMPLATES.from_string('<p title="{{ attribute }}">{{ text }}</p>').render(text=text, attribute=attribute)
    )
    (element,) = root.children
    assert not isinstance(element, str) and element.name == "p"
    assert [child for child in element.children if not isinstance(child, str)] == []
    assert as_parsed(element.text) == as_parsed(text) and set(element.attributes) == {"title"}
    assert as_parsed(element.attributes["title"] or "") == as_parsed(attribute)


def json_values() -> st.SearchStrategy[Any]:
    plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | NASTY
    return st.recursive(plain, lambda v: st.lists(v, max_size=3) | st.dictionaries(NASTY, v, max_size=3), max_leaves=8)


@given(json_values())
def test_data_comes_back_and_cannot_end_its_element(content: Any) -> None:
    inner = str(data_json(content))
    assert json.loads(inner) == content
    assert not set("<>&\u2028\u2029") & set(inner)


def test_every_template_escapes() -> None:
    assert all(TEMPLATES.get_template(name).environment.autoescape is True for name in TEMPLATES.list_templates())
    sources = [TEMPLATES.get_template(name).filename for name in TEMPLATES.list_templates()]
    assert len(sources) >= 5
    for source in sources:
        text = Path(str(source)).read_text(encoding="utf-8")
        assert "safe" not in text and "autoescape" not in text
        assert not re.search(r"=\s*\{\{", text), "an attribute without quotes"


def test_markup_is_the_only_thing_not_escaped() -> None:
    page = render_page("page.html", "t", {}, body=Markup("<b>&amp;</b>"))
    assert "<b>&amp;</b>" in page and "&lt;b&gt;" in render_page("page.html", "t", {}, body="<b>")
    table = TextTable('"x"', ["a", "b"], [["<i>", "2"]], {1})
    module: Any = TEMPLATES.get_template("tables.html").module
    rows = parse(module.text_table(table))
    assert [cell.text for cell in rows.all("td")] == ["2"] and rows.all("th")[2].text == "<i>"
    assert rows.all("i") == [] and rows.all("div")[0].attributes["aria-label"] == '"x"'


def test_a_page_allows_its_own_script_and_style_and_nothing_else() -> None:
    page = parse(render_page("page.html", "<t>", {"a": "</script>"}, body="x"))
    (meta,) = [m for m in page.all("meta") if m.attributes.get("http-equiv") == "Content-Security-Policy"]
    allowed = meta.attributes["content"] or ""
    assert allowed == policy() and "default-src 'none'" in allowed and "unsafe" not in allowed
    scripts = [s for s in page.all("script") if s.attributes.get("type") is None]
    for kind, (element,) in (("script", scripts), ("style", page.all("style"))):
        digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in allowed
    assert page.all("title")[0].text == "dualview: <t>" and data_of(page) == {"a": "</script>"}


def test_nothing_is_asked_of_another_place() -> None:
    page = render_page("page.html", "t", {}, body="x")
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(https?:)?//", page)
    assert re.findall(r"https?://[^\s\"'`]+", page) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert " on" not in "".join(re.findall(r"<[a-z]+( on[a-z]+)=", page))


def test_a_lone_surrogate_can_be_written() -> None:
    assert "x?y" in render_page("page.html", "t", {}, body="x\ud800y")
