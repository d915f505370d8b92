"""The changes of a large model's trainings are what a run needs memory for: no more of them at once than one batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import dualview
from dualview.learning import finetune
from dualview.models.language_model import LanguageModel
from dualview.models.loading import adopt
from equivalence import tiny
from live_bytes import LiveBytes

RATES = (0.0003, 0.001, 0.003, 0.01, 0.02, 0.03)  # in two batches of three


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Deep and narrow, in bfloat16, with keys and values as wide as the model."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.save_model(tmp_path_factory.mktemp("model")))
    shape = {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 256}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2, **shape))
    return adopt(model.to(torch.bfloat16), tokenizer, "deep")


@pytest.mark.parametrize("calibrate", [False, True])
def test_a_run_holds_the_changes_of_one_batch_and_one_more(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calibrate: bool
) -> None:
    change = sum(4 * p.d_out * p.d_in for p in lm.anatomy.projections(("k", "v")))
    weights = sum(p.nbytes for p in lm.model.parameters())
    monkeypatch.setattr(finetune, "_DELTA_BYTES", 3 * change)  # three trainings at once, as of an 8B model
    assert weights // 4 < 3 * change
    task = str(tiny.save_task(tmp_path / "task", train=40, selection=24, validation=20))
    with LiveBytes() as live:
        dualview.run(model=lm, task=task, shots=5, n_queries=12, lr_grid=RATES, calibrate=calibrate)
    assert live.peak < (4 + calibrate + 0.75) * change
