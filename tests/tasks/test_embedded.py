"""The embedded tasks' splits: fixed, disjoint, balanced, and made as documented."""

from __future__ import annotations

import collections
import html
from pathlib import Path

import pytest

from dualview.io import assets
from dualview.io.errors import UserError
from dualview.tasks import embedded
from dualview.tasks.embedded import (
    LabelledText,
    Snippet,
    digest,
    embedded_rows,
    five_grades,
    identity,
    polarity,
    read_collection,
    split_of,
)
from dualview.tasks.sampling import sample_demos, sample_queries, selection_rows
from dualview.tasks.task import load_task

TASKS = ("movie", "movie5", "tweet", "product", "source")
SPLITS = ("train", "selection", "validation")


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], list[LabelledText]]:
    return {(name, split): embedded_rows(name, split) for name in TASKS for split in SPLITS}


Rows = dict[tuple[str, str], list[LabelledText]]


def test_labels() -> None:
    assert [polarity(Snippet("", v, "movie")) for v in (-4, -1, -0.99, 0, 0.99, 1, 4)] == [0, 0, None, None, None, 1, 1]
    grades = [five_grades(Snippet("", v, "movie")) for v in (-4, -2.01, -1, -0.51, 0, 0.49, 0.6, 1.9, 2, 4)]
    assert grades == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_an_unknown_name() -> None:
    with pytest.raises(UserError, match="embedded:films does not exist; the embedded tasks are movie, "):
        embedded_rows("films", "train")


def test_duplicates_disputes_and_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "1\t3\ta good film it was",
        "2\t2\tA GOOD film, it was!!",  # a copy of the first
        "3\t3\tsome say good some bad",
        "4\t-3\tSome say good, some bad.",  # and a copy that disagrees: both go
        "5\t3\tfar too short",
        "6\t3\t" + "long " * 41,
        "7\t0.5\ta lukewarm film it is",
        "8\t-2\ta bad &amp;amp; sad   film",
        "9\t2\tanother good film it was",
        "10\t-1\tanother bad film it is",
    ]
    (tmp_path / "movie.txt").write_text("\r\n".join(lines) + "\r\n", encoding="utf-8", newline="")
    monkeypatch.setattr(embedded, "embedded_data", lambda: tmp_path)
    monkeypatch.setattr(embedded, "split_of", lambda digest: "train")
    rows = embedded_rows("movie", "train")
    assert [row.label for row in rows] == [0, 1, 0, 1]
    assert {row.text for row in rows if row.label == 0} == {"a bad & sad film", "another bad film it is"}
    assert {row.text for row in rows if row.label == 1} == {"a good film it was", "another good film it was"}


def test_shares() -> None:
    counts = collections.Counter(split_of(digest(f"text{i}")) for i in range(4000))
    assert abs(counts["validation"] / 4000 - 0.30) < 0.03
    assert abs(counts["selection"] / 4000 - 0.15) < 0.03
    assert identity("Same text!") == identity("same TEXT")


@pytest.mark.embedded
@pytest.mark.parametrize("name", TASKS)
def test_splits_are_balanced_and_disjoint(name: str, rows: Rows) -> None:
    task = load_task(name)
    seen: set[str] = set()
    for split in SPLITS:
        members = rows[name, split]
        counts = collections.Counter(row.label for row in members)
        assert len(counts) == len(task.labels) and len(set(counts.values())) == 1, split
        texts = [identity(row.text) for row in members]
        assert len(set(texts)) == len(texts)
        assert not seen & set(texts)
        seen |= set(texts)
        assert all(5 <= len(row.text.split()) <= 40 for row in members)
    first = collections.Counter(row.label for row in rows[name, "selection"][:64])
    assert max(first.values()) - min(first.values()) <= 1


@pytest.mark.embedded
def test_the_task_files_serve_these_rows(rows: Rows) -> None:
    task = load_task("tweet")
    for split in SPLITS:
        served = [(row.fields["text"], row.label) for row in task.rows(split)]
        assert served == [(row.text, row.label) for row in rows["tweet", split]]
    assert len(selection_rows(task)) == 64


@pytest.mark.embedded
def test_no_task_shows_what_another_asks(rows: Rows) -> None:
    asked = {identity(row.text) for (_, split), members in rows.items() if split == "validation" for row in members}
    shown = {identity(row.text) for (_, split), members in rows.items() if split != "validation" for row in members}
    assert not asked & shown


@pytest.mark.embedded
def test_rows_are_the_files_own_sentences_with_their_label(rows: Rows) -> None:
    """Against a reading of the raw file written apart."""
    valence: dict[str, set[float]] = {}
    raw = (assets.embedded_data() / "movie.txt").read_bytes().decode("utf-8")
    for line in raw.split("\r\n"):
        if line:
            number, value, text = line.split("\t")
            assert number.isdigit()
            while "&amp;" in text:
                text = text.replace("&amp;", "&")
            valence.setdefault(" ".join(html.unescape(text).split()), set()).add(float(value))
    for split in SPLITS:
        for row in rows["movie", split]:
            assert {value >= 1 for value in valence[row.text]} == {bool(row.label)}
            assert all(abs(value) >= 1 for value in valence[row.text])


@pytest.mark.embedded
def test_the_splits_never_change(rows: Rows) -> None:
    """Frozen: if this fails, every published number of the embedded tasks means something else."""
    sizes = {name: tuple(len(rows[name, split]) for split in SPLITS) for name in TASKS}
    assert sizes == {
        "movie": (4822, 1292, 2594),
        "movie5": (1395, 445, 775),
        "tweet": (776, 224, 388),
        "product": (872, 262, 496),
        "source": (7160, 1968, 3936),
    }
    movie = load_task("movie")
    assert [row.fields["text"][:20] for row in sample_demos(movie, 1, 3)] == [
        "In visual fertility ",
        "The movie's ultimate",
        "Children may not und",
    ]
    assert [row.fields["text"][:20] for row in sample_queries(movie, 3)] == [
        "At once disarmingly ",
        "Heaven is a haunting",
        "What is captured dur",
    ]


@pytest.mark.embedded
def test_nothing_odd_is_left_in_the_texts() -> None:
    for name in embedded.SOURCES:
        for snippet in read_collection(assets.embedded_data(), name):
            assert "&amp;" not in snippet.text and "  " not in snippet.text and "\ufffd" not in snippet.text
            assert -4 <= snippet.valence <= 4
