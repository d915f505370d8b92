"""A prompt token by token, with ids and spans: as rows for JSON, or in colour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.text import Text

from dualview.io.errors import UserError
from dualview.tasks.prompts import PromptSet

STYLES = {
    "bos": "black on bright_yellow",
    "description": "white on blue",
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
    query: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.query < len(self.prompts.queries):
            raise UserError(
                f"Query {self.query} does not exist; there are {len(self.prompts.queries)}, counted from 0."
            )

    @cached_property
    def tokens(self) -> list[dict[str, object]]:
        """Every token of the prompt, and then those of each candidate.

        `index` is the position in the sequence (every candidate begins where the prompt ends), `token` the vocabulary's
        entry, `text` its decoded text, `span` one of bos, description, template, label, separator, query, candidate;
        `number` counts the demonstrations or candidates from 0.
        """
        return [
            {
                "index": index,
                "id": token,
                "token": str(self.tokenizer.convert_ids_to_tokens(token)),
                "text": str(self.tokenizer.decode([token])),
                "span": span,
                "number": number,
            }
            for index, token, span, number in self._spans()
        ]

    def _spans(self) -> Iterator[tuple[int, int, str, int | None]]:
        prompts, prefix, asked = self.prompts, self.prompts.prefix, self.prompts.queries[self.query]
        if prompts.bos is not None:
            yield 0, prompts.bos, "bos", None
        start = len(prompts.zero_prefix) - len(prompts.description)
        yield from ((index, token, "description", None) for index, token in enumerate(prompts.description, start))
        for number, spans in enumerate(prompts.demo_spans):
            for name, span in vars(spans).items():
                yield from ((index, prefix[index], name, number) for index in span)
        end = len(prefix) + len(asked.ids)
        yield from ((index, token, "query", None) for index, token in enumerate(asked.ids, start=len(prefix)))
        for number, candidate in enumerate(asked.candidates):
            yield from ((index, token, "candidate", number) for index, token in enumerate(candidate, start=end))

    def table(self) -> RenderableType:
        """The same in colour: a legend, the prompt, the candidates with the right one marked, and the counts."""
        prompts, asked = self.prompts, self.prompts.queries[self.query]
        legend = Text("  ").join(Text(f" {span} ", style) for span, style in STYLES.items() if span != "candidate")
        prompt, answers = Text(), Text()
        shades = Counter[str]()
        for token in self.tokens:
            span, line = str(token["span"]), prompt
            if span == "candidate":
                line = answers
                if token["index"] == len(prompts.prefix) + len(asked.ids):
                    right = " (right)" if token["number"] == asked.gold else ""
                    line.append(f"\ncandidate {token['number']}{right}: ")
            shades[span] += 1  # every other token is underlined, to separate neighbours
            line.append(_visible(token), f"{STYLES[span]}{' underline' if shades[span] % 2 else ''}")
            if span == "separator" and str(token["text"]).endswith("\n"):
                line.append("\n")
        counts = (
            f"{len(prompts.prefix)} prefix tokens ({prompts.shots_used} of {prompts.shots} demonstrations), "
            f"{len(asked.ids)} query tokens; query {self.query} of 0 to {len(prompts.queries) - 1}"
        )
        return Group(legend, Text(), prompt, answers, Text(), Text(counts))

    def __rich__(self) -> RenderableType:
        return self.table()


def _visible(token: dict[str, object]) -> str:
    """The token's text with visible blanks; the vocabulary's entry where it is only a part of a character."""
    text = str(token["text"])
    if not text or "�" in text:
        text = str(token["token"])
    return text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
