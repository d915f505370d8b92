"""On a GPU: one cell from command to result, at a small and at a large shape: stage times, peak memory, matrix rate.

    python benchmarks/gpu_cell.py                       # both rows of the README
    python benchmarks/gpu_cell.py --shape 32,4096,32,8,14336 --dtype bfloat16 --controls quick --queries 500

Weights are random (speed does not depend on them); the tokenizer is the embedded model's, or that of `--tokenizer`. The
cell runs in a process of its own, from a model folder on disk, so that importing and loading count. Imports find
bytecode, as they do after an installation; where the packages have none, it is made first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import report, timed
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

SHAPES = {"135M": "30,576,9,3,1536", "8B": "32,4096,32,8,14336"}
"""layers, width, heads, key-value heads, width of the MLP"""
ROWS = (("135M", "float32", "full"), ("8B", "bfloat16", "quick"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PASSES = ("zsl", "icl", "ft")
IMPORTS = """
import dualview.verbs, dualview.comparison.run, dualview.models.loading
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", help="135M, 8B, or layers,width,heads,kv_heads,mlp; default: both rows")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--controls", default="quick")
    parser.add_argument("--task", default="movie")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--shots", type=int, default=32)
    parser.add_argument("--tokenizer", help="a folder with a tokenizer; default: the embedded model's")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside is not None:
        inside(chosen)
        return
    rows = ROWS if chosen.shape is None else ((chosen.shape, chosen.dtype, chosen.controls),)
    environment = with_bytecode()
    for shape, dtype, controls in rows:
        cell(chosen, shape, dtype, controls, environment)


def with_bytecode() -> dict[str, str]:
    """The environment of a process whose imports find bytecode."""
    environment = dict(os.environ)
    if not Path(importlib.util.cache_from_source(torch.__file__)).is_file():
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "dualview-bytecode")
        subprocess.run([sys.executable, "-c", IMPORTS], env=environment, check=True)
    return environment


def cell(chosen: argparse.Namespace, shape: str, dtype: str, controls: str, environment: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        weights = make_model(Path(folder), SHAPES.get(shape, shape), dtype, chosen.tokenizer)
        command = [sys.executable, __file__, "--inside", folder, "--dtype", dtype, "--controls", controls]
        command += ["--task", chosen.task, "--queries", str(chosen.queries), "--shots", str(chosen.shots)]
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
            assert running.stdout is not None
            line = running.stdout.readline()
            whole = time.perf_counter() - start  # to the result; taking the process down again is not part of it
        if running.returncode:
            raise SystemExit(f"the cell failed with exit code {running.returncode}")
    found: dict[str, Any] = json.loads(line)
    stages: dict[str, float] = found["stages"]
    statistics = stages["metrics"]
    passes = sum(stages[name] for name in PASSES)
    rate = found["pass_flops"] / passes / matrix_rate(dtype)
    stages["import and the rest"] = round(whole - sum(stages.values()), 3)
    report(
        f"one cell, {shape} {dtype}, {controls} controls, {chosen.shots} shots, {chosen.queries} queries",
        whole_s=whole,
        stages=stages,
        peak_gb=found["peak"] / 1e9,
        peaks_gb=found["peaks_gb"],
        weights_gb=weights / 1e9,
    )
    print(
        f"cell {whole:.1f} s · statistics {statistics / whole:.1%} of it · "
        f"peak memory {found['peak'] / weights:.2f} × the weights · passes at {rate:.0%} of the matrix rate",
        flush=True,
    )


def make_model(folder: Path, shape: str, dtype: str, tokenizer: str | None) -> int:
    """A model folder with random weights; the bytes of its weights."""
    if tokenizer is None:
        from dualview.io.assets import embedded_model

        tokenizer = str(embedded_model())
    speaks: Any = AutoTokenizer.from_pretrained(tokenizer)
    layers, width, heads, kv_heads, mlp = (int(n) for n in shape.split(","))
    config = LlamaConfig(
        vocab_size=len(speaks),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=mlp,
        max_position_embeddings=8192,
        tie_word_embeddings=width < 2048,
        bos_token_id=speaks.bos_token_id,
        eos_token_id=speaks.eos_token_id,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    speaks.save_pretrained(folder)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    del model
    if DEVICE == "cuda":
        torch.cuda.empty_cache()  # the measured process needs the room
    return size


def inside(chosen: argparse.Namespace) -> None:
    """The measured process: one cell, as `dualview run` makes it."""
    import dualview
    from dualview.io.clock import Clock

    peaks, lap = dict[str, float](), Clock.lap

    def noted(clock: Clock, name: str) -> None:
        lap(clock, name)
        if torch.cuda.is_available():
            peaks[name] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
            torch.cuda.reset_peak_memory_stats()

    Clock.lap = noted
    start = time.perf_counter()
    lm = dualview.load_model(chosen.inside, dtype=chosen.dtype)
    loading = time.perf_counter() - start
    options = {"task": chosen.task, "shots": chosen.shots, "n_queries": chosen.queries, "controls": chosen.controls}
    result = dualview.run(model=lm, **options)
    stages = {"loading": round(loading, 3), **result.provenance.run.seconds}
    flops = pass_flops(lm, dualview.build_prompts(chosen.task, lm, shots=chosen.shots, n_queries=chosen.queries))
    peak = 1e9 * max(peaks.values(), default=0.0)
    print(json.dumps({"stages": stages, "peak": peak, "peaks_gb": peaks, "pass_flops": flops}))


def pass_flops(lm: Any, prompts: Any) -> float:
    """Floating-point operations of the three passes: two for each weight of a block and token, and the unembedding's
    where a label is read; attention's own products are left out."""
    weights = sum(p.numel() for block in lm.anatomy.blocks for p in block.parameters())
    queries = sum(len(query.ids) for query in prompts.queries)
    tokens = 3 * queries + 2 * len(prompts.zero_prefix) + len(prompts.prefix)
    read = 3 * sum(max(len(c) for c in query.candidates) for query in prompts.queries)
    return 2.0 * (weights * tokens + read * lm.vocab * lm.model.config.hidden_size)


def matrix_rate(dtype: str) -> float:
    """What the GPU reaches in a plain matrix product, in operations a second."""
    size = 8192 if DEVICE == "cuda" else 1024
    a, b = (torch.randn(size, size, device=DEVICE, dtype=getattr(torch, dtype)) for _ in range(2))

    def products() -> None:
        for _ in range(10):
            a @ b

    products()
    return 10 * 2 * size**3 / timed(products, 3).seconds


if __name__ == "__main__":
    main()
