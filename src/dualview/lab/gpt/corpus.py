"""Plain text as tokens: documents, a split into training and held-out text, a tokenizer, and one array for each side.

Blank lines separate documents. A hash of its text alone decides a document's side, so the split is the same for every
seed and machine, and two copies of a document are always on the same side. The tokens of all documents form one row,
each document after the token `<|endoftext|>`. Training reads blocks of that row, so a block may have parts of several
documents, as is usual for small GPTs.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from filelock import FileLock
from jaxtyping import UInt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dualview.io.atomic import write_json
from dualview.io.errors import UserError
from dualview.io.versions import version_of

SEPARATOR = "<|endoftext|>"
SUFFIXES = (".txt", ".text", ".md", ".xz", ".gz")
FEW, PIECE = 100, 4000
"""A text of fewer documents than FEW is cut, at line ends, into pieces of about PIECE characters."""
SMALL_TEXT, SHARE_OF_SMALL, SHARE = 5_000_000, 0.10, 0.02
"""The share of the documents that is held out, larger for a text of fewer than SMALL_TEXT characters."""
_SENTENCES = 40
"""Sentences of one embedded collection per document."""
_TOKENIZER_TEXT = 20_000_000
"""The most characters a tokenizer is trained on: more hardly change its merges."""

TokenizerKind = Literal["trained", "embedded"]


@dataclass(frozen=True)
class Document:
    text: str
    held_out: bool


@dataclass(frozen=True)
class Source:
    """The text as read, and its description for the result."""

    documents: Sequence[Document]
    about: dict[str, Any]

    @property
    def digest(self) -> str:
        """sha256 over every document and its side."""
        found = hashlib.sha256()
        for document in self.documents:
            found.update(f"{document.held_out} {len(document.text)} ".encode())
            found.update(document.text.encode())
        return found.hexdigest()


@dataclass(frozen=True)
class Corpus:
    """Token ids of both sides, their tokenizer, and a description for the result."""

    train: UInt[np.ndarray, " token"]
    held_out: UInt[np.ndarray, " token"]
    tokenizer: PreTrainedTokenizerFast
    about: dict[str, Any]

    @property
    def vocab(self) -> int:
        return len(self.tokenizer)

    @property
    def separator(self) -> int:
        """The id before every document."""
        return separator_id(self.tokenizer)


# ------------------------------------------------------------------------------------------------------------ reading


def read_source(paths: Sequence[Path], max_text: float) -> Source:
    """Documents of these files and folders (none: the embedded tasks' sentences), at most `max_text` million
    characters of them.

    A longer text is sampled by another hash of the document, so every file keeps its share.
    """
    if not paths:
        return embedded_source()
    files = [file for path in paths for file in _files(path)]
    texts = [text for file in files for text in split_documents(_read(file))]
    whole_documents = len(texts) >= FEW
    if not whole_documents:
        texts = [piece for text in texts for piece in _pieces(text)]
    characters = sum(map(len, texts))
    if not characters:
        raise UserError(f"{', '.join(map(str, paths))} holds no text; give files of plain text.")
    kept = _within(texts, int(max_text * 1e6))
    share = SHARE if characters >= SMALL_TEXT else SHARE_OF_SMALL
    documents = [Document(text, _fraction("held out", text) < share) for text in kept]
    about = {
        "source": [file.name for file in files],
        "document": "what blank lines separate" if whole_documents else f"pieces of about {PIECE} characters",
        "characters_read": characters,
        "held_out": f"{share:.0%} of the documents, by a hash of their text",
    }
    return Source(documents, about)


def embedded_source() -> Source:
    """The sentences behind the embedded tasks: 1.61 million characters, 1.26 million of them to train on.

    Training: the sentences that the tasks draw demonstrations from. Held out: those they choose learning rates on. The
    tasks' queries are in neither. A document is forty sentences of one collection, in file order, so little can be
    predicted beyond a sentence: this text is for trying the lab out.
    """
    from dualview.io.assets import embedded_data
    from dualview.tasks.embedded import SOURCES, digest, identity, read_collection, split_of

    folder, documents = embedded_data(), list[Document]()
    for held_out, split in ((False, "train"), (True, "selection")):
        for name in SOURCES:
            found = [snippet.text for snippet in read_collection(folder, name)]
            mine = [text for text in found if split_of(digest(identity(text))) == split]
            groups = ("\n".join(mine[at : at + _SENTENCES]) for at in range(0, len(mine), _SENTENCES))
            documents += [Document(group, held_out) for group in groups]
    about = {
        "source": ["embedded"],
        "document": f"{_SENTENCES} sentences of one of the four embedded collections",
        "characters_read": sum(len(document.text) for document in documents),
        "held_out": "the sentences of the embedded tasks' selection split; those of their validation split are unused",
    }
    return Source(documents, about)


def split_documents(text: str) -> list[str]:
    r"""What blank lines separate, without blanks at either end.

    >>> split_documents("one\nstill one\n\n \ntwo\n")
    ['one\nstill one', 'two']
    """
    parts = re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n"))
    return [part.strip() for part in parts if part.strip()]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in SUFFIXES)
        if not found:
            raise UserError(f"The folder {path} holds no text files ({', '.join(SUFFIXES)}).")
        return found
    if not path.is_file():
        raise UserError(f"There is no text file or folder {path}; check --text.")
    return [path]


def _read(path: Path) -> str:
    openers: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
    try:
        with openers.get(path.suffix, Path.open)(path, "rb") as stream:
            return cast(bytes, stream.read()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8."
        ) from error
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path} cannot be unpacked ({error}); it may be truncated: fetch it again.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}).") from error


def _pieces(text: str) -> Iterator[str]:
    """A text cut at line ends into pieces of about PIECE characters."""
    piece: list[str] = []
    size = 0
    for line in text.split("\n"):
        for at in range(0, max(len(line), 1), PIECE):  # a line may be as long as the text
            part = line[at : at + PIECE]
            if size + len(part) > PIECE and piece:
                yield "\n".join(piece)
                piece, size = [], 0
            piece.append(part)
            size += len(part) + 1
    if "\n".join(piece).strip():
        yield "\n".join(piece)


def _within(texts: Sequence[str], most: int) -> list[str]:
    """As many of the texts as fit, chosen by a hash, in their own order."""
    if sum(map(len, texts)) <= most:
        return list(texts)
    chosen, total = set[int](), 0
    for index in sorted(range(len(texts)), key=lambda i: (_fraction("kept", texts[i]), i)):
        total += len(texts[index])
        if total > most and chosen:
            break
        chosen.add(index)
    return [texts[index] for index in sorted(chosen)]


def _fraction(purpose: str, text: str) -> float:
    """A number in [0, 1) that depends on the purpose and the text alone."""
    found = hashlib.sha256(f"dualview corpus, {purpose}, 1\n{text}".encode()).digest()
    return int.from_bytes(found[:8]) / 2**64


# ----------------------------------------------------------------------------------------------------------- tokenising


def train_tokenizer(texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocab` tokens, which begins every text with `<|endoftext|>`.

    Every byte is a token, so any text can be encoded. Ties between merges are broken by token id: the same text gives
    the same tokenizer.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab < len(alphabet) + 2:
        raise UserError(
            f"--vocab must be at least {len(alphabet) + 2}, one for each byte and some merges; not {vocab}."
        )
    raw = cast(Any, Tokenizer(models.BPE()))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[SEPARATOR], initial_alphabet=sorted(alphabet), show_progress=False
    )
    raw.train_from_iterator(texts, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single=f"{SEPARATOR} $A", special_tokens=[(SEPARATOR, raw.token_to_id(SEPARATOR))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=SEPARATOR, eos_token=SEPARATOR)


def embedded_tokenizer() -> PreTrainedTokenizerFast:
    from dualview.io.assets import embedded_model

    return cast(Any, AutoTokenizer).from_pretrained(str(embedded_model()), local_files_only=True)


def separator_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """`<|endoftext|>`, which both kinds of tokenizer have; another model's end of text."""
    found = cast(Any, tokenizer).get_vocab().get(SEPARATOR, cast(Any, tokenizer).eos_token_id)
    if found is None:
        raise UserError("The model's tokenizer has no end-of-text token to put between documents; use another model.")
    return int(found)


def encode(documents: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> UInt[np.ndarray, " token"]:
    """All documents in one row, each behind the separator."""
    raw: Any = cast(Any, tokenizer).backend_tokenizer
    kind = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    head = np.array([separator_id(tokenizer)], kind)
    texts, parts = list(documents), list[np.ndarray]()
    for at in range(0, len(texts), 512):
        for encoding in raw.encode_batch_fast(texts[at : at + 512], add_special_tokens=False):
            parts += [head, np.array(encoding.ids, kind)]
    return np.concatenate(parts) if parts else np.empty(0, kind)


def tokenise(source: Source, kind: TokenizerKind, vocab: int, given: PreTrainedTokenizerFast | None = None) -> Corpus:
    """Both sides as tokens. Held-out documents are ordered by a hash, so that the first of them are a fair sample."""
    training = [document.text for document in source.documents if not document.held_out]
    tested = [document.text for document in source.documents if document.held_out]
    if given is not None:
        tokenizer, about_it = given, "the model's"
    elif kind == "embedded":
        tokenizer, about_it = embedded_tokenizer(), "the embedded model's"
    else:
        tokenizer = train_tokenizer(_within(training, _TOKENIZER_TEXT), vocab)
        about_it = "byte-level BPE trained on the training side"
    train = encode(training, tokenizer)
    held_out = encode(sorted(tested, key=lambda text: (_fraction("order", text), text)), tokenizer)
    about = {
        **source.about,
        "sha256": source.digest,
        "documents": {"train": len(training), "held_out": len(tested)},
        "characters": {"train": sum(map(len, training)), "held_out": sum(map(len, tested))},
        "tokens": {"train": len(train), "held_out": len(held_out)},
        "tokenizer": about_it,
        "vocab": len(tokenizer),
    }
    return Corpus(train, held_out, tokenizer, about)


def prepare(
    paths: Sequence[Path],
    out: Path | None,
    *,
    kind: TokenizerKind = "trained",
    vocab: int = 0,
    max_text: float,
    least: int,
    given: PreTrainedTokenizerFast | None = None,
) -> Corpus:
    """The corpus, made once for all processes that share `out` and then read from there (memory-mapped).

    `least` tokens are needed on either side. A `given` tokenizer takes the place of `kind` and `vocab`.
    """
    source = read_source(paths, max_text)
    if out is None:
        corpus = tokenise(source, kind, vocab, given)
    else:
        how = f"{kind} {vocab}" if given is None else cast(Any, given).backend_tokenizer.to_str()
        key = f"{source.digest} {how} {version_of('tokenizers')}"
        folder = out / f".tokens-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _store(tokenise(source, kind, vocab, given), folder)
        corpus = _stored(folder)
    for side, tokens in (("train on", corpus.train), ("hold out", corpus.held_out)):
        if len(tokens) < least:
            raise UserError(
                f"The text has {len(tokens)} tokens to {side} and {least} are needed; "
                "give more text, or a smaller --context."
            )
    return corpus


def _store(corpus: Corpus, folder: Path) -> None:
    """Written under another name and moved into place: complete or absent."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-tokens-", ignore_cleanup_errors=True) as place:
        made = Path(place) / "made"
        made.mkdir()
        np.save(made / "train.npy", corpus.train, allow_pickle=False)
        np.save(made / "held_out.npy", corpus.held_out, allow_pickle=False)
        cast(Any, corpus.tokenizer).save_pretrained(str(made / "tokenizer"))
        write_json(made / "about.json", corpus.about)
        shutil.move(made, folder)


def _stored(folder: Path) -> Corpus:
    train, held_out = (
        np.load(folder / f"{side}.npy", mmap_mode="r", allow_pickle=False) for side in ("train", "held_out")
    )
    tokenizer = cast(Any, AutoTokenizer).from_pretrained(str(folder / "tokenizer"), local_files_only=True)
    return Corpus(train, held_out, tokenizer, json.loads((folder / "about.json").read_text(encoding="utf-8")))
