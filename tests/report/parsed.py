"""A report as a browser's parser sees it: its elements with their attributes and text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "input", "br", "hr", "col", "img", "link"}


@dataclass
class Element:
    name: str
    attributes: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    children: list[Element | str] = field(default_factory=list["Element | str"])

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, name: str) -> list[Element]:
        inner = [child for child in self.children if isinstance(child, Element)]
        return [e for child in inner for e in ([child] if child.name == name else []) + child.all(name)]

    def by_id(self, name: str) -> Element:
        found = [e for e in self.everything() if e.attributes.get("id") == name]
        assert len(found) == 1, f"{len(found)} elements with id {name}"
        return found[0]

    def everything(self) -> list[Element]:
        inner = [child for child in self.children if isinstance(child, Element)]
        return [e for child in inner for e in (child, *child.everything())]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("root")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, dict(attrs))
        self.open[-1].children.append(made)
        if tag not in VOID:
            self.open.append(made)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> closes <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(text: str) -> Element:
    parser = _Parser()
    parser.feed(text)
    parser.close()
    assert len(parser.open) == 1, "an element was left open"
    return parser.open[0]


def data_of(page: Element) -> Any:
    return json.loads(page.by_id("data").text)
