"""A prompt made visible: every token with its id and the span it belongs to, as rows for JSON or in colour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.text import Text

from dualview.io.errors import UserError
from dualview.tasks.prompts import PromptSet

STYLES = {
    "bos": "black on bright_yellow",
    "template": "black on bright_cyan",
    "label": "black on bright_green",
    "separator": "white on bright_black",
    "query": "black on bright_magenta",
    "candidate": "black on bright_green",
}


class Decoder(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def decode(self, token_ids: Any) -> Any: ...
    def convert_ids_to_tokens(self, ids: Any) -> Any: ...


@dataclass(frozen=True)
class ShownPrompt:
    """The in-context prompt of one query: what `dualview prompt` shows."""

    prompts: PromptSet
    tokenizer: Decoder
    query: int

    @property
    def tokens(self) -> list[dict[str, object]]:
        """Every token as a row; see `describe_prompt`."""
        return describe_prompt(self.prompts, self.tokenizer, self.query)

    def table(self) -> RenderableType:
        return render_prompt(self.prompts, self.tokenizer, self.query)

    def __rich__(self) -> RenderableType:
        return self.table()


@dataclass(frozen=True)
class _Token:
    index: int
    id: int
    span: str
    number: int | None
    """Which demonstration or candidate, from 0."""


def describe_prompt(prompts: PromptSet, tokenizer: Decoder, query: int = 0) -> list[dict[str, object]]:
    """The in-context prompt of one query, token by token, and then each candidate's tokens.

    `index` is the position in the sequence (every candidate begins where the prompt ends), `token` the vocabulary's
    entry, `text` what it decodes to alone, `span` one of bos, template, label, separator, query, candidate; `number`
    counts the demonstrations or candidates from 0.
    """
    return [
        {
            "index": token.index,
            "id": token.id,
            "token": str(tokenizer.convert_ids_to_tokens(token.id)),
            "text": str(tokenizer.decode([token.id])),
            "span": token.span,
            "number": token.number,
        }
        for token in _tokens(prompts, query)
    ]


def render_prompt(prompts: PromptSet, tokenizer: Decoder, query: int = 0) -> RenderableType:
    """The same in colour: a legend, the prompt, the candidates with the right one marked, and the counts."""
    tokens = describe_prompt(prompts, tokenizer, query)
    legend = Text("  ").join(Text(f" {span} ", style) for span, style in STYLES.items() if span != "candidate")
    prompt, answers = Text(), Text()
    shades: dict[str, int] = {}
    for token in tokens:
        span, number = str(token["span"]), token["number"]
        line = prompt
        if span == "candidate":
            line = answers
            if token["index"] == len(prompts.prefix) + len(prompts.queries[query].ids):
                right = " (right)" if number == prompts.queries[query].gold else ""
                line.append(f"\ncandidate {number}{right}: ")
        shades[span] = shades.get(span, 0) + 1  # every other token is underlined, so that neighbours can be told apart
        line.append(_visible(token), f"{STYLES[span]}{' underline' if shades[span] % 2 else ''}")
        if span == "separator" and str(token["text"]).endswith("\n"):
            line.append("\n")
    counts = (
        f"{len(prompts.prefix)} prefix tokens ({prompts.shots_used} of {prompts.shots} demonstrations), "
        f"{len(prompts.queries[query].ids)} query tokens; query {query} of 0 to {len(prompts.queries) - 1}"
    )
    return Group(legend, Text(), prompt, answers, Text(), Text(counts))


def _visible(token: dict[str, object]) -> str:
    """The token's text with its blanks shown; the vocabulary's entry where it is only a part of a character."""
    text = str(token["text"])
    if not text or "�" in text:
        text = str(token["token"])
    return text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")


def _tokens(prompts: PromptSet, query: int) -> Iterator[_Token]:
    if not 0 <= query < len(prompts.queries):
        raise UserError(f"Query {query} does not exist; there are {len(prompts.queries)}, counted from 0.")
    prefix = prompts.prefix
    if prompts.bos is not None:
        yield _Token(0, prompts.bos, "bos", None)
    for number, spans in enumerate(prompts.demo_spans):
        for name, span in (("template", spans.template), ("label", spans.label), ("separator", spans.separator)):
            for index in span:
                yield _Token(index, prefix[index], name, number)
    asked = prompts.queries[query]
    for index, token in enumerate(asked.ids, start=len(prefix)):
        yield _Token(index, token, "query", None)
    for number, candidate in enumerate(asked.candidates):
        for index, token in enumerate(candidate, start=len(prefix) + len(asked.ids)):
            yield _Token(index, token, "candidate", number)
