"""What makes pages and notebooks quick to run: the embedded model cut to a few layers, few shots, queries and rates.

The notebooks' kernels import it too, so it must not need pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from dualview.analyses.compile import compile_patch
from dualview.comparison import prepare as preparing
from dualview.io import assets
from dualview.options import RunOptions
from dualview.sweep.spec import Spec
from dualview.tasks import sources

SHOTS, QUERIES, RATES, SELECTION = 4, 6, 2, 4

read_once = cache(sources.embedded_rows)


def save_cut_model(folder: Path, layers: int) -> Path:
    """The embedded model's first layers, with its own tokenizer: real prompts, hardly any time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole = assets.embedded_model()
    AutoModelForCausalLM.from_pretrained(whole, num_hidden_layers=layers).save_pretrained(folder)
    AutoTokenizer.from_pretrained(whole).save_pretrained(folder)
    return folder


def make_small(model: Path, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """`embedded` is that model, and no run is larger than it need be; everything else is as it is for a user."""
    make, cells = RunOptions.make, Spec.cells
    put(assets, "embedded_model", lambda *_: model)
    put(RunOptions, "make", staticmethod(lambda **given: smaller(make(**given))))
    put(Spec, "cells", lambda *of: [smaller(cell) for cell in cells(*of)])
    put(preparing, "SELECTION_ROWS", SELECTION)
    put(sources, "embedded_rows", read_once)
    put(compile_patch, "__kwdefaults__", {**compile_patch.__kwdefaults__, "fit_rows": SELECTION})


def smaller(options: RunOptions) -> RunOptions:
    return replace(
        options,
        shots=min(options.shots, SHOTS),
        n_queries=min(options.n_queries, QUERIES),
        lr_grid=options.lr_grid[:RATES],
    )
