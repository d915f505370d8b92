"""Documents, their split, the tokenizer and the stored tokens."""

from __future__ import annotations

import gzip
import lzma
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.io.errors import UserError
from dualview.lab.gpt import corpus
from dualview.lab.gpt.corpus import (
    SEPARATOR,
    Document,
    Source,
    encode,
    prepare,
    read_source,
    separator_id,
    split_documents,
    tokenise,
    train_tokenizer,
)

WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "then", "it", "happy", "slow")


def _text(documents: int, seed: int = 0, words: int = 40) -> str:
    draw = np.random.default_rng(seed)
    made = [" ".join(draw.choice(WORDS, words)) + f" {number}." for number in range(documents)]
    return "\n\n".join(made)


def test_formats_and_folders_read_alike(tmp_path):
    text = _text(150)
    plain, folder = tmp_path / "a.txt", tmp_path / "folder" / "deeper"
    folder.mkdir(parents=True)
    plain.write_text(text, encoding="utf-8")
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(text.encode()))
    (folder / "a.txt.gz").write_bytes(gzip.compress(text.replace("\n", "\r\n").encode()))
    (folder / "a.bin").write_bytes(b"\xff\xfe")  # not text, and not asked for
    digests = {read_source((path,), 1).digest for path in (plain, tmp_path / "a.txt.xz", tmp_path / "folder")}
    assert len(digests) == 1


def test_a_document_falls_on_the_same_side_whatever_stands_beside_it(tmp_path):
    first, second = tmp_path / "1.txt", tmp_path / "2.txt"
    first.write_text(_text(300, seed=1), encoding="utf-8")
    second.write_text(_text(300, seed=2), encoding="utf-8")
    alone = {d.text: d.held_out for d in read_source((first,), 1).documents}
    both = {d.text: d.held_out for d in read_source((second, first, first), 1).documents}
    assert all(both[text] == side for text, side in alone.items())
    assert 0.03 < np.mean(list(alone.values())) < 0.2


def test_too_much_text_is_cut_by_document_and_keeps_order_and_sides(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(_text(400), encoding="utf-8")
    whole, part = read_source((path,), 1), read_source((path,), 0.02)
    total = sum(len(d.text) for d in part.documents)
    assert 0.015e6 < total <= 0.02e6
    places = [list(whole.documents).index(document) for document in part.documents]
    assert places == sorted(places) and places[-1] > 300  # from everywhere, in order


def test_a_text_of_few_documents_is_cut_into_pieces(tmp_path):
    path = tmp_path / "a.txt"
    lines = _text(2000).replace("\n\n", "\n")
    path.write_text(lines + "\n" + "x" * 9000, encoding="utf-8")
    source = read_source((path,), 10)
    assert len(source.documents) > 50 and "pieces" in source.about["document"]
    assert max(len(d.text) for d in source.documents) <= 4001
    joined = "".join(d.text for d in source.documents).replace("\n", "")
    assert joined == lines.replace("\n", "") + "x" * 9000


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"\xff\xfe\x00bad", "not UTF-8"),
        ("a.txt.xz", b"nonsense", "cannot be unpacked"),
        ("a.txt.gz", gzip.compress(b"text" * 100, mtime=0)[:20], "cannot be unpacked"),
        ("a.txt", b" \n \n", "holds no text"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_source((tmp_path / name,), 1)


def test_missing_and_empty_places(tmp_path):
    with pytest.raises(UserError, match="no text file or folder"):
        read_source((tmp_path / "none.txt",), 1)
    with pytest.raises(UserError, match="holds no text files"):
        read_source((tmp_path,), 1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(min_size=1).filter(lambda t: t.strip() and SEPARATOR not in t), min_size=1, max_size=5))
def test_any_text_comes_back_from_its_tokens(texts):
    tokenizer = train_tokenizer(["the cat sat on the mat " * 20], 300)
    ids = encode(texts, tokenizer)
    assert tokenizer.decode([int(i) for i in ids], clean_up_tokenization_spaces=False) == "".join(
        SEPARATOR + text for text in texts
    )


def test_the_tokenizer_begins_texts_with_the_separator_and_has_its_size():
    tokenizer = train_tokenizer([_text(50)], 300)
    assert len(tokenizer) == 300
    assert tokenizer("cat")["input_ids"][0] == separator_id(tokenizer) == tokenizer.bos_token_id
    assert separator_id(tokenizer) not in tokenizer(" cat", add_special_tokens=False)["input_ids"]
    with pytest.raises(UserError, match="--vocab"):
        train_tokenizer(["abc"], 100)


def test_held_out_text_teaches_the_tokenizer_nothing():
    documents = [Document("cat dog " * 50, False), Document("zyx zyx " * 200, True)]
    made = tokenise(Source(documents, {}), "trained", 280)
    assert not any("zy" in token for token in made.tokenizer.get_vocab())
    assert made.about["tokens"]["held_out"] == len(made.held_out) > 0


_TRAIN = """
import sys
from pathlib import Path
from dualview.lab.gpt.corpus import train_tokenizer
print(train_tokenizer([Path(sys.argv[1]).read_text()], 600).backend_tokenizer.to_str())
"""


def test_the_tokenizer_is_the_same_in_every_process(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(_text(400, seed=3) + "\u00e9\u00e8 caf\u00e9 na\u00efve " * 30, encoding="utf-8")
    outputs = set()
    for threads in ("1", "2"):
        threaded = {"RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true", "PYTHONHASHSEED": threads}
        command = [sys.executable, "-c", _TRAIN, str(path)]
        outputs.add(subprocess.run(command, env={**os.environ, **threaded}, check=True, capture_output=True).stdout)
    assert len(outputs) == 1


def test_stored_tokens_are_made_once_and_read_back(tmp_path, monkeypatch):
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_text(_text(300), encoding="utf-8")
    how = {"kind": "trained", "vocab": 300, "max_text": 1.0, "least": 10}
    first = prepare((path,), out, **how)
    fresh = prepare((path,), None, **how)
    monkeypatch.setattr(corpus, "tokenise", None)  # not called again
    again = prepare((path,), out, **how)
    for one in (fresh, again):
        np.testing.assert_array_equal(one.train, first.train)
        np.testing.assert_array_equal(one.held_out, first.held_out)
        assert one.about == first.about and one.vocab == first.vocab and one.separator == first.separator
    assert isinstance(again.train, np.memmap)
    assert again.tokenizer("a cat")["input_ids"] == fresh.tokenizer("a cat")["input_ids"]


def test_too_little_text_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(_text(120, words=5), encoding="utf-8")
    with pytest.raises(UserError, match="are needed"):
        prepare((path,), None, kind="trained", vocab=300, max_text=1.0, least=100_000)


def test_the_embedded_text_holds_no_sentence_the_tasks_ask_about():
    from dualview.tasks.embedded import embedded_rows, identity

    source = read_source((), 1)
    seen = {identity(line) for document in source.documents for line in document.text.split("\n")}
    trained = {identity(line) for d in source.documents if not d.held_out for line in d.text.split("\n")}
    assert not seen & {identity(row.text) for row in embedded_rows("source", "validation")}
    assert not trained & {identity(row.text) for row in embedded_rows("source", "selection")}


def test_blank_lines_separate_documents():
    assert split_documents("\n\none\r\ntwo\r\n\r\nthree\n \t\n\n") == ["one\ntwo", "three"]
