"""What makes the pages quick to run: the embedded model cut to two layers, and few shots, queries and rates."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from dualview.analyses.compile import compile_patch
from dualview.comparison import prepare as preparing
from dualview.io import assets
from dualview.options import RunOptions
from dualview.sweep.spec import Spec
from dualview.tasks import sources

LAYERS = 2
SHOTS, QUERIES, RATES, SELECTION = 4, 6, 2, 4

read_once = cache(sources.embedded_rows)


@pytest.fixture(scope="session")
def cut_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's first two layers, with its own tokenizer: real prompts, hardly any time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole = assets.embedded_model()
    folder = tmp_path_factory.mktemp("model")
    model = AutoModelForCausalLM.from_pretrained(whole, num_hidden_layers=LAYERS)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(whole).save_pretrained(folder)
    return folder


@pytest.fixture
def small(cut_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`embedded` is the cut model, and no run is larger than it need be; everything else is as it is for a user."""
    make, cells = RunOptions.make, Spec.cells
    monkeypatch.setattr(assets, "embedded_model", lambda *_: cut_model)
    monkeypatch.setattr(RunOptions, "make", staticmethod(lambda **given: smaller(make(**given))))
    monkeypatch.setattr(Spec, "cells", lambda *of: [smaller(cell) for cell in cells(*of)])
    monkeypatch.setattr(preparing, "SELECTION_ROWS", SELECTION)
    monkeypatch.setattr(sources, "embedded_rows", read_once)
    monkeypatch.setitem(compile_patch.__kwdefaults__, "fit_rows", SELECTION)


def smaller(options: RunOptions) -> RunOptions:
    return replace(
        options,
        shots=min(options.shots, SHOTS),
        n_queries=min(options.n_queries, QUERIES),
        lr_grid=options.lr_grid[:RATES],
    )
