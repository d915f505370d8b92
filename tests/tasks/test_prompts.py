"""Prompts against the contract, with a tokenizer whose ids are bytes, so that the expected ids can be written down."""

from __future__ import annotations

import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dualview.io.errors import UserError
from dualview.tasks.prompts import (
    PromptSet,
    build_prompts,
    content_free_queries,
    encode_queries,
    prompts_hash,
    resolve_bos,
)
from dualview.tasks.rows import Row
from dualview.tasks.show_prompt import ShownPrompt
from dualview.tasks.task import Task

BOS, EOS, FIRST_BYTE = 0, 1, 2


def byte_tokenizer(*, adds_bos: bool = False, specials: bool = True) -> Any:
    """One id a byte: byte b has id b + 2; 0 and 1 are BOS and EOS."""
    alphabet = bytes_to_letters()
    vocabulary = {"<s>": BOS, "</s>": EOS} | {letter: FIRST_BYTE + byte for byte, letter in alphabet.items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    named = {"bos_token": "<s>", "eos_token": "</s>"} if specials else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def bytes_to_letters() -> dict[int, str]:
    """The printable stand-in of every byte, as byte-level tokenizers have it (Radford et al. 2019)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def tok(text: str) -> tuple[int, ...]:
    return tuple(FIRST_BYTE + byte for byte in text.encode())


TOKENIZER = byte_tokenizer()
TASK = Task(name="t", template="Q: {text} A:", labels=("no", "yes!"), train="t.jsonl", validation="v.jsonl")
CHOICE = Task(name="c", template="{text}?", choices="options", train="t.jsonl", validation="v.jsonl")
ROWS = st.builds(
    lambda text, label: Row({"text": text}, label),
    st.text(st.characters(codec="utf-8"), max_size=6),
    st.integers(0, 1),
)


def row(text: str, label: int = 0) -> Row:
    return Row({"text": text}, label)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(ROWS, min_size=1, max_size=5),
    st.lists(ROWS, min_size=1, max_size=3),
    st.sampled_from(["\n", " ## ", "eos"]),
    st.booleans(),
)
def test_ids_are_the_contracts(demos: list[Row], queries: list[Row], separator: str, with_bos: bool) -> None:
    prompts = build_prompts(TASK, TOKENIZER, demos, queries, bos="yes" if with_bos else "no", separator=separator)
    start = (BOS,) if with_bos else ()
    between = (EOS,) if separator == "eos" else tok(separator)
    expected = start
    sequences: list[tuple[int, ...]] = []
    for demo in demos:
        expected += tok(f"Q: {demo.fields['text']} A:") + tok(" " + TASK.labels[demo.label]) + between
        sequences.append(start + tok(f"Q: {demo.fields['text']} A: " + TASK.labels[demo.label]))
    assert prompts.prefix == expected
    assert prompts.zero_prefix == start
    assert [sequence.ids for sequence in prompts.training_sequences] == sequences
    for demo, sequence in zip(demos, prompts.training_sequences, strict=True):
        assert sequence.ids[sequence.label_start :] == tok(" " + TASK.labels[demo.label])
    for asked, query in zip(queries, prompts.queries, strict=True):
        assert query.ids == tok(f"Q: {asked.fields['text']} A:")
        assert query.candidates == (tok(" no"), tok(" yes!"))
        assert query.gold == asked.label
    tiles = [
        index for span in prompts.demo_spans for part in (span.template, span.label, span.separator) for index in part
    ]
    assert tiles == list(range(len(start), len(expected)))
    for demo, span in zip(demos, prompts.demo_spans, strict=True):
        assert tuple(expected[index] for index in span.label) == tok(" " + TASK.labels[demo.label])
        assert tuple(expected[index] for index in span.separator) == between


@settings(deadline=None, max_examples=40)
@given(st.lists(ROWS, min_size=1, max_size=6), st.lists(ROWS, min_size=1, max_size=3), st.integers(1, 120))
def test_truncation_keeps_the_most_that_fit(demos: list[Row], queries: list[Row], context: int) -> None:
    """Against trying every number of demonstrations."""
    whole = build_prompts(TASK, TOKENIZER, demos, queries, bos="yes")
    longest = max(len(query.ids) + len(candidate) for query in whole.queries for candidate in query.candidates)
    fitting = [
        count
        for count in range(len(demos) + 1)
        if len(build_prompts(TASK, TOKENIZER, demos[:count], queries, bos="yes").prefix if count else (BOS,)) + longest
        <= context
    ]
    if not fitting:
        with pytest.raises(UserError, match=rf"Query \d+ needs {1 + longest} tokens .* the context holds {context};"):
            build_prompts(TASK, TOKENIZER, demos, queries, bos="yes", max_context=context)
    elif fitting == [0]:
        with pytest.raises(UserError, match="Not one demonstration fits"):
            build_prompts(TASK, TOKENIZER, demos, queries, bos="yes", max_context=context)
    else:
        kept = build_prompts(TASK, TOKENIZER, demos, queries, bos="yes", max_context=context)
        assert kept.demos == whole.demos[: max(fitting)]
        assert (kept.shots, kept.shots_used) == (len(demos), max(fitting))
        assert len(kept.training_sequences) == kept.shots_used
        assert kept.queries == whole.queries


def test_exactly_full_is_full() -> None:
    whole = build_prompts(TASK, TOKENIZER, [row("a"), row("b")], [row("c")])
    need = len(whole.prefix) + whole.queries[0].longest
    assert build_prompts(TASK, TOKENIZER, [row("a"), row("b")], [row("c")], max_context=need).shots_used == 2
    assert build_prompts(TASK, TOKENIZER, [row("a"), row("b")], [row("c")], max_context=need - 1).shots_used == 1


def test_room_is_kept_for_queries_run_elsewhere() -> None:
    demos, asked = [row("a"), row("b")], [row("c")]
    whole = build_prompts(TASK, TOKENIZER, demos, asked)
    need = len(whole.prefix) + whole.queries[0].longest
    selection = encode_queries(TASK, TOKENIZER, [row("cc")])
    kept = build_prompts(TASK, TOKENIZER, demos, asked, max_context=need, room_for=selection)
    assert kept.shots_used == 1
    assert kept.with_queries(selection).queries == selection
    assert kept.with_queries(selection).prefix == kept.prefix


def test_multiple_choice() -> None:
    demo = Row({"text": "d"}, 1, ("left", "right hand"))
    asked = Row({"text": "q"}, 2, ("x", "yy", "zzz"))
    prompts = build_prompts(CHOICE, TOKENIZER, [demo], [asked, demo])
    assert prompts.prefix == tok("d? right hand\n")
    assert prompts.queries[0].candidates == (tok(" x"), tok(" yy"), tok(" zzz"))
    assert prompts.queries[1].candidates == (tok(" left"), tok(" right hand"))
    assert prompts.queries[0].gold == 2


def test_bos() -> None:
    adds, plain = byte_tokenizer(adds_bos=True), byte_tokenizer()
    assert [resolve_bos(adds, mode) for mode in ("auto", "yes", "no")] == [BOS, BOS, None]
    assert [resolve_bos(plain, mode) for mode in ("auto", "yes", "no")] == [None, BOS, None]
    bare = byte_tokenizer(specials=False)
    assert resolve_bos(bare, "auto") is None
    with pytest.raises(UserError, match="--bos is yes but this model's tokenizer has no BOS"):
        resolve_bos(bare, "yes")
    with pytest.raises(UserError, match="tokenizer has no EOS token"):
        build_prompts(TASK, bare, [row("a")], [row("b")], separator="eos")
    # a tokenizer that adds BOS on its own adds it to no piece
    assert build_prompts(TASK, adds, [row("a")], [row("b")]).prefix == (BOS, *tok("Q: a A: no\n"))


def test_nothing_to_ask_or_to_show() -> None:
    with pytest.raises(UserError, match="no demonstrations"):
        build_prompts(TASK, TOKENIZER, [], [row("a")])
    with pytest.raises(UserError, match="no queries"):
        build_prompts(TASK, TOKENIZER, [row("a")], [])


def word_tokenizer(*words: str) -> Any:
    """Knows some words, drops blanks, and turns all else into one unknown id."""
    backend = Tokenizer(
        models.WordLevel({"<unk>": 0} | {word: i for i, word in enumerate(words, 1)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_a_row_that_does_not_fit_is_named_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    lines = [{"text": "a", "label": 0}, {"text": "a " * 50, "label": 1}]
    file.write_text("\n" + "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    short, long = TASK.read(file)
    with pytest.raises(UserError, match=rf"^Query 1 \({re.escape(str(file))}, line 3\) needs \d+ tokens with"):
        build_prompts(TASK, TOKENIZER, [row("a")], [short, long], max_context=40)
    with pytest.raises(UserError, match=rf"fits: demonstration 0 \({re.escape(str(file))}, line 3\) and the longest"):
        build_prompts(TASK, TOKENIZER, [long], [row("a")], max_context=40)


def test_pieces_without_tokens_are_named() -> None:
    blank = Task(name="b", template="{text}", labels=("no", "yes"), train="t", validation="v", separator=" x ")
    words = word_tokenizer("a", "no", "yes")
    with pytest.raises(UserError, match=r"the separator '\\n' into no tokens"):
        build_prompts(blank, words, [row("a")], [row("a")], separator="\n")
    with pytest.raises(UserError, match="the template of demonstration 1 into no tokens"):
        build_prompts(blank, words, [row("a"), row(" ")], [row("a")])
    with pytest.raises(UserError, match="the template of query 0 into no tokens"):
        build_prompts(blank, words, [row("a")], [row("")])
    with pytest.raises(UserError, match="template without content into no tokens"):
        content_free_queries(blank, words, ((1,), (2,)))


def test_labels_that_cannot_be_told_apart() -> None:
    with pytest.raises(UserError, match="Labels 'no' and 'yes!' are the same tokens"):
        build_prompts(TASK, word_tokenizer("Q:", "A:"), [row("a")], [row("b")], separator="x")


def test_content_free_queries() -> None:
    candidates = (tok(" x"), tok(" y"))
    two = Task(name="t", template="{a} and {b}!", labels=("no", "yes"), train="t", validation="v")
    queries = content_free_queries(two, TOKENIZER, candidates)
    assert [query.ids for query in queries] == [tok("N/A and N/A!"), tok(" and !"), tok("[MASK] and [MASK]!")]
    assert all(query.candidates == candidates and query.gold == -1 for query in queries)


def test_the_hash_is_of_every_token_and_nothing_else() -> None:
    prompts = build_prompts(TASK, TOKENIZER, [row("a"), row("b", 1)], [row("c")], bos="yes")
    document = [
        BOS,
        [[list(tok("Q: a A:")), list(tok(" no")), [12]], [list(tok("Q: b A:")), list(tok(" yes!")), [12]]],
        [[list(tok("Q: c A:")), [list(tok(" no")), list(tok(" yes!"))]]],
    ]
    assert prompts_hash(prompts) == hashlib.sha256(json.dumps(document).replace(" ", "").encode()).hexdigest()
    assert prompts_hash(
        build_prompts(TASK, TOKENIZER, [row("a"), row("b", 1)], [row("c", 1)], bos="yes")
    ) == prompts_hash(prompts)
    others = [
        build_prompts(TASK, TOKENIZER, [row("a"), row("b", 1)], [row("c")], bos="no"),
        build_prompts(TASK, TOKENIZER, [row("b", 1), row("a")], [row("c")], bos="yes"),
        build_prompts(TASK, TOKENIZER, [row("a"), row("b", 0)], [row("c")], bos="yes"),
        build_prompts(TASK, TOKENIZER, [row("a"), row("b", 1)], [row("d")], bos="yes"),
    ]
    assert len({prompts_hash(other) for other in [prompts, *others]}) == 5


@pytest.fixture
def shown() -> PromptSet:
    return build_prompts(TASK, TOKENIZER, [row("a"), row("é", 1)], [row("c"), row("dd", 1)], bos="yes")


def test_the_tokens_of_a_prompt(shown: PromptSet) -> None:
    tokens = ShownPrompt(shown, TOKENIZER, 1).tokens
    query = shown.queries[1]
    prompt = [token for token in tokens if token["span"] != "candidate"]
    assert [token["id"] for token in prompt] == [*shown.prefix, *query.ids]
    assert [token["index"] for token in prompt] == list(range(len(prompt)))
    spans = re.sub(r"(.)\1+", r"\1", "".join(str(token["span"])[0] for token in prompt))
    assert spans == "btlstlsq"
    assert tokens[0]["token"] == "<s>"
    for number, candidate in enumerate(query.candidates):
        listed = [token for token in tokens if token["span"] == "candidate" and token["number"] == number]
        assert tuple(token["id"] for token in listed) == candidate
        assert listed[0]["index"] == len(prompt)
    json.dumps(tokens)
    for wrong in (-1, 2):
        with pytest.raises(UserError, match=f"Query {wrong} does not exist; there are 2"):
            ShownPrompt(shown, TOKENIZER, wrong)


def test_a_prompt_in_colour(shown: PromptSet) -> None:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        console.print(ShownPrompt(shown, TOKENIZER, 1))
    text = capture.get()
    assert "<s>Q: a A: no⏎\nQ: Ã© A: yes!⏎\nQ: dd A:" in text
    assert "candidate 1 (right):  yes!" in text
    assert "(2 of 2 demonstrations), 8 query tokens; query 1 of 0 to 1" in text
    for span in ("bos", "template", "label", "separator", "query"):
        assert span in text.splitlines()[0]


def test_brackets_in_texts_are_not_markup() -> None:
    prompts = build_prompts(TASK, TOKENIZER, [row("[red]a[/]")], [row("[/b]")])
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        console.print(ShownPrompt(prompts, TOKENIZER))
    assert "[red]a[/]" in capture.get()
