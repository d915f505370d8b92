"""The five embedded tasks' rows, made from the four rated collections of Hutto & Gilbert (ICWSM 2014).

Each sentence of 5 to 40 words is cleaned (HTML entities, runs of blanks) and labelled by its mean human valence
(−4 to +4) or by its collection. A sentence's split is decided by a hash of its text alone, so the splits are fixed,
disjoint, and the same across the five tasks: no task shows as a demonstration what another is tested on. Each split is
then cut to equally many sentences of every label, in an order that alternates the labels.
"""

from __future__ import annotations

import hashlib
import html
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dualview.io.assets import embedded_data
from dualview.io.errors import UserError

WORDS = range(5, 41)
SHARES = {"validation": 0.30, "selection": 0.15, "train": 0.55}
SALT = "dualview embedded splits, 1\n"


@dataclass(frozen=True)
class Snippet:
    """One sentence of one collection with its mean human valence, −4 (extremely negative) to +4."""

    text: str
    valence: float
    collection: str


@dataclass(frozen=True)
class LabelledText:
    text: str
    label: int


@dataclass(frozen=True)
class SplitRecipe:
    """Which collections a task is made from, and a snippet's label (None: left out)."""

    collections: tuple[str, ...]
    label: Callable[[Snippet], int | None]


def polarity(snippet: Snippet) -> int | None:
    """0 below a valence of −1, 1 above +1 (both included); the neutral middle is left out."""
    if abs(snippet.valence) < 1:
        return None
    return int(snippet.valence > 0)


def five_grades(snippet: Snippet) -> int:
    """0 to 4, with cuts at −2, −0.5, 0.5 and 2: terrible, bad, neutral, good, great."""
    return bisect_right([-2.0, -0.5, 0.5, 2.0], snippet.valence)


SOURCES = ("movie", "tweet", "product", "news")
RECIPES: Mapping[str, SplitRecipe] = {
    "movie": SplitRecipe(("movie",), polarity),
    "movie5": SplitRecipe(("movie",), five_grades),
    "tweet": SplitRecipe(("tweet",), polarity),
    "product": SplitRecipe(("product",), polarity),
    "source": SplitRecipe(SOURCES, lambda snippet: SOURCES.index(snippet.collection)),
}


def embedded_rows(task: str, split: str) -> list[LabelledText]:
    """The rows of one split of one embedded task, label-balanced, in a fixed order that alternates the labels."""
    if task not in RECIPES:
        raise UserError(f"embedded:{task} does not exist; the embedded tasks are {', '.join(RECIPES)}.")
    ranked = _ranked(embedded_data(), task)
    members = sorted((pair for pair in ranked if split_of(pair[0]) == split), key=lambda pair: pair[0])
    by_label: dict[int, list[LabelledText]] = {}
    for _, row in members:
        by_label.setdefault(row.label, []).append(row)
    columns = [by_label[label] for label in sorted(by_label)]
    return [row for deal in zip(*columns, strict=False) for row in deal]  # stops at the rarest label: balanced


@lru_cache(maxsize=1)  # every split of a task is made from the same texts, and cleaning them takes a moment
def _ranked(folder: Path, task: str) -> list[tuple[int, LabelledText]]:
    """All rows of a task, each with the number that decides its split and its place."""
    recipe = RECIPES[task]
    snippets = [snippet for name in recipe.collections for snippet in read_collection(folder, name)]
    return [(digest(key), row) for key, row in _without_duplicates(snippets, recipe).items()]


def read_collection(folder: Path, name: str) -> list[Snippet]:
    """A collection's snippets of 5 to 40 words, cleaned, in file order."""
    snippets: list[Snippet] = []
    for line in (folder / f"{name}.txt").read_text(encoding="utf-8").strip("\n").split("\n"):
        _, valence, text = line.split("\t")
        text = clean(text)
        if len(text.split()) in WORDS:
            snippets.append(Snippet(text, float(valence), name))
    return snippets


def clean(text: str) -> str:
    """Entities decoded (some are encoded twice) and every run of blanks made one space.

    >>> clean("Meagher &amp;amp; Flom,  the ")
    'Meagher & Flom, the'
    """
    return " ".join(html.unescape(html.unescape(text)).split())


def identity(text: str) -> str:
    """What two copies of one text share: its letters and digits, without case, blanks and punctuation.

    >>> identity("So GOOD!!") == identity("so good.")
    True
    """
    return re.sub(r"[\W_]+", "", text.casefold()) or text


def digest(key: str) -> int:
    """64 bits of a text's identity: they order the texts and decide their split, the same on every machine."""
    return int.from_bytes(hashlib.sha256((SALT + key).encode()).digest()[:8])


def split_of(digest: int) -> str:
    """`validation` for 30 % of all texts, `selection` for 15 %, `train` for 55 %."""
    position, edge = digest / 2**64, 0.0
    for split, share in SHARES.items():
        edge += share
        if position < edge:
            return split
    return "train"


def _without_duplicates(snippets: list[Snippet], recipe: SplitRecipe) -> dict[str, LabelledText]:
    """The first copy of every text, by its identity; a text is left out if its copies have different labels."""
    first: dict[str, LabelledText] = {}
    disputed: set[str] = set()
    for snippet in snippets:
        label = recipe.label(snippet)
        if label is None:
            continue
        key = identity(snippet.text)
        if first.setdefault(key, LabelledText(snippet.text, label)).label != label:
            disputed.add(key)
    return {key: row for key, row in first.items() if key not in disputed}
