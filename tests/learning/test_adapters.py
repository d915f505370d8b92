"""LoRA adapters: those that PEFT made give PEFT's logits here, and those made here give the same logits in PEFT."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from dualview.anatomy.dispatch import run_forward
from dualview.io.errors import UserError
from dualview.learning.adapter_reading import adapter_names, load_adapter
from dualview.learning.adapter_writing import compressed, deltas_as_adapter, must_hold_adapter, save_adapter
from dualview.learning.adapters import CONFIG, WEIGHTS, Adapter, random_directions
from dualview.learning.finetune import finetune
from dualview.learning.recipe import TrainingRecipe
from dualview.models.language_model import LanguageModel
from dualview.models.loading import adopt
from dualview.models.prefix import Causal
from dualview.tasks.prompts import TrainingSequence
from zoo import make as build

IDS = torch.tensor([[1, 17, 5, 80, 3, 42, 9, 77]])


def lm_of(name: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return adopt(build(name).to(dtype), None, name)


def peft_adapter(model: PreTrainedModel, folder: Path, seed: int = 0, **config: Any) -> torch.Tensor:
    """Let PEFT make an adapter with weights that matter, save it, and take it off again; its own logits."""
    torch.manual_seed(seed)
    with warnings.catch_warnings(action="ignore"):  # PEFT advises against one of two tied weights
        wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn_like(parameter) + (parameter if name.endswith("bias") else 0.0))
    wrapped.eval()
    with torch.no_grad():
        logits = wrapped(IDS).logits
    with warnings.catch_warnings(action="ignore"):  # PEFT asks whether biases are shards and embeddings wanted
        wrapped.save_pretrained(str(folder))
    return logits


def own_logits(lm: LanguageModel, adapter: Adapter | None) -> torch.Tensor:
    """The logits through dualview's way of running a model."""
    at = torch.arange(IDS.shape[1])
    with torch.no_grad():
        if adapter is None:
            return run_forward(lm.model, Causal(at), IDS, at[None], None)
        with adapter.applied():
            return run_forward(lm.model, Causal(at), IDS, at[None], None)


CASES = {
    "llama-kv": ("llama", {"target_modules": ["k_proj", "v_proj"], "r": 4}),
    "llama-all-linear": ("llama", {"target_modules": "all-linear", "r": 3, "lora_alpha": 7}),
    "llama-head": ("llama", {"target_modules": ["lm_head", "o_proj"], "r": 2}),
    "gpt2-fused": ("gpt2", {"target_modules": ["c_attn"], "r": 4, "fan_in_fan_out": True}),
    "gpt2-all-linear": ("gpt2", {"target_modules": "all-linear", "r": 4, "fan_in_fan_out": True}),
    "neox-fused": ("gpt_neox", {"target_modules": ["query_key_value", "dense"], "r": 4}),
    "phi3-fused": ("phi3-fused", {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 4}),
    "rslora": ("llama", {"target_modules": ["q_proj"], "r": 4, "use_rslora": True}),
    "patterns": (
        "llama",
        {"target_modules": ["k_proj", "v_proj"], "r": 2}
        | {"rank_pattern": {"layers.1.self_attn.v_proj": 5}, "alpha_pattern": {"k_proj": 3, "layers.2.*v_proj": 1}},
    ),
    "lora-bias": ("qwen2-bias", {"target_modules": ["k_proj", "v_proj"], "r": 2, "lora_bias": True}),
    "biases": ("qwen2-bias", {"target_modules": ["k_proj", "v_proj"], "r": 2, "bias": "lora_only"}),
    "all-biases": ("gpt_neox", {"target_modules": ["query_key_value"], "r": 2, "bias": "all"}),
    "embeddings-and-head": ("llama", {"target_modules": ["embed_tokens", "lm_head"], "r": 2}),
    "scaled-embeddings": ("gemma3", {"target_modules": ["embed_tokens", "v_proj"], "r": 2}),
    "positions-tied": ("gpt2", {"target_modules": ["wte", "wpe"], "r": 2}),
    "saved-head": ("llama", {"target_modules": ["k_proj"], "r": 2, "modules_to_save": ["lm_head"]}),
    "saved-head-tied": ("gpt2", {"target_modules": ["c_attn"], "r": 2, "modules_to_save": ["lm_head"]}),
    "saved-embeddings-and-norms": (
        "llama",
        {"target_modules": ["v_proj"], "r": 2, "modules_to_save": ["embed_tokens", "norm"]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_peft(case: str, tmp_path: Path) -> None:
    name, config = CASES[case]
    logits = peft_adapter(build(name).float(), tmp_path, **config)
    lm = lm_of(name)
    before = {key: value.clone() for key, value in lm.model.state_dict().items()}
    adapter = load_adapter(tmp_path, lm)
    torch.testing.assert_close(own_logits(lm, adapter), logits, atol=2e-5, rtol=1e-5)
    assert (own_logits(lm, None) - logits).abs().max() > 1e-2
    after = lm.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_whole_parameters_have_their_controls_and_their_size(tmp_path: Path) -> None:
    config: dict[str, Any] = {"target_modules": ["k_proj"], "r": 2, "bias": "lora_only", "modules_to_save": ["lm_head"]}
    peft_adapter(build("qwen2-bias").float(), tmp_path, **config)
    lm = lm_of("qwen2-bias")
    adapter = load_adapter(tmp_path, lm)
    head = next(each for each in adapter.replaced if each.part == "weight")
    found = adapter.summary()
    assert (found["modules"], found["targets"], found["rank"]) == (4, ["k_proj", "lm_head"], 2)
    low_rank = sum(change.norm**2 for change in adapter.changes)
    assert found["norm"] ** 2 == pytest.approx(low_rank + float(head.delta.square().sum()), rel=1e-5)
    base = own_logits(lm, None)
    torch.testing.assert_close(own_logits(lm, adapter.scaled(0.0)), base, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own_logits(lm, adapter.scaled(1.0)), own_logits(lm, adapter), atol=1e-5, rtol=1e-5)
    drawn = adapter.in_random_directions(torch.Generator().manual_seed(0))
    for own, other in zip(adapter.replaced, drawn.replaced, strict=True):
        spectra = [each.delta if own.part == "bias" else torch.linalg.svdvals(each.delta) for each in (own, other)]
        torch.testing.assert_close(*(each.norm() for each in spectra))
        assert own.part == "bias" or torch.allclose(*spectra, atol=1e-4)
        assert abs(torch.nn.functional.cosine_similarity(own.delta.flatten(), other.delta.flatten(), dim=0)) < 0.9
    with pytest.raises(ZeroDivisionError), adapter.applied():
        _ = 1 / 0
    assert torch.equal(own_logits(lm, None), base)


def test_rank_and_norms(tmp_path: Path) -> None:
    peft_adapter(build("llama").float(), tmp_path, target_modules=["k_proj", "v_proj"], r=4, lora_alpha=6)
    lm = lm_of("llama")
    adapter = load_adapter(tmp_path, lm)
    found = adapter.summary()
    raw = load_file(tmp_path / WEIGHTS)
    full = [1.5 * raw[key.replace("_A", "_B")] @ raw[key] for key in raw if "lora_A" in key]
    base = [p for name, p in lm.model.named_parameters() if name.endswith(("k_proj.weight", "v_proj.weight"))]
    norm = torch.cat([w.flatten() for w in full]).norm()
    assert (found["rank"], found["modules"], found["targets"]) == (4, 6, ["k_proj", "v_proj"])
    assert found["norm"] == pytest.approx(float(norm), rel=1e-5)
    assert found["relative_norm"] == pytest.approx(
        float(norm / torch.cat([w.flatten() for w in base]).norm()), rel=1e-5
    )


def test_random_directions_keep_rank_and_singular_values(tmp_path: Path) -> None:
    torch.manual_seed(1)
    for rank, d_out, d_in in ((1, 6, 9), (4, 6, 9), (8, 6, 9), (20, 6, 9)):
        b, a = torch.randn(d_out, rank).double(), torch.randn(rank, d_in).double()
        c, d = random_directions(b, a, torch.Generator().manual_seed(3))
        spectra = [torch.linalg.svdvals(m) for m in (b @ a, c @ d)]
        if rank <= min(d_out, d_in):
            torch.testing.assert_close(*spectra)
        assert abs(torch.nn.functional.cosine_similarity((b @ a).flatten(), (c @ d).flatten(), dim=0)) < 0.9
    b, a = random_directions(torch.ones(200, 1), torch.ones(1, 300), torch.Generator().manual_seed(0))
    assert abs(float((b @ a).mean())) < 0.02


def config_with(folder: Path, **changed: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **changed}))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"r": 0}, "rank 0"),
        ({"rank_pattern": {"k_proj": 0}}, "rank 0"),
        ({"peft_type": "PROMPT_TUNING"}, "type PROMPT_TUNING"),
        ({"peft_type": "IA3"}, "type IA3"),
        ({"r": "4"}, "rank '4'"),
        ({"lora_alpha": None}, "lora_alpha None"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
        ({"alpha_pattern": {"k_proj": "2"}}, "lora_alpha '2'"),
        ({"alpha_pattern": {"(": 2}}, "alpha_pattern"),
        ({"rank_pattern": [2]}, "rank_pattern"),
        ({"target_parameters": ["experts"]}, "not linear maps"),
        ({"init_lora_weights": "pissa"}, "also changes the base weights"),
        ({"base_model_name_or_path": "someone/another-model"}, "of the model someone/another-model"),
    ],
)
def test_what_is_no_plain_lora_of_the_model_is_refused(changed: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    peft_adapter(build("llama").float(), tmp_path, target_modules=["k_proj"], r=2)
    config_with(tmp_path, **changed)
    lm = adopt(build("llama").float(), None, "owner/llama@main")
    with pytest.raises(UserError, match=sentence) as caught:
        load_adapter(tmp_path, lm)
    assert str(caught.value).count(". ") == 0


def test_files_of_peft_that_are_no_lora_are_refused(tmp_path: Path) -> None:
    get_peft_model(
        build("llama").float(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ).save_pretrained(str(tmp_path / "prompt"))
    peft_adapter(build("llama").float(), tmp_path / "dora", target_modules=["v_proj"], r=2, use_dora=True)
    for folder in ("prompt", "dora"):
        with pytest.raises(UserError, match=r"reads (plain )?LoRA only"):
            load_adapter(tmp_path / folder, lm_of("llama"))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    peft_adapter(build("gpt2").float(), tmp_path / "gpt2", target_modules=["c_attn"], r=2, fan_in_fan_out=True)
    peft_adapter(build("llama").float(), tmp_path / "llama", target_modules=["k_proj"], r=2)
    with pytest.raises(UserError, match="has no module"):
        load_adapter(tmp_path / "gpt2", lm_of("llama"))
    config = build("llama").config
    config.num_key_value_heads = 4
    wider = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match="has shape"):
        load_adapter(tmp_path / "llama", adopt(wider, None, "wider"))


def test_other_weights_of_the_same_shape_are_refused(tmp_path: Path) -> None:
    """Where the adapter's own model is a folder here, its weights are compared."""
    for seed in (0, 1):
        build("llama", seed=seed).float().save_pretrained(tmp_path / f"model{seed}")
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "model0")
    peft_adapter(own, tmp_path / "lora", target_modules=["k_proj"], r=2)
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / f"model{seed}") for seed in (0, 1))
    assert load_adapter(tmp_path / "lora", adopt(first, None, "elsewhere")).summary()["rank"] == 2
    with pytest.raises(UserError, match="other weights than elsewhere"):
        load_adapter(tmp_path / "lora", adopt(second, None, "elsewhere"))


def test_broken_files_are_refused(tmp_path: Path) -> None:
    lm = lm_of("llama")

    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match):
            load_adapter(tmp_path, lm)

    refused("no adapter_config.json")
    (tmp_path / CONFIG).write_text("{")
    refused("cannot be read")
    (tmp_path / CONFIG).write_text("[]")
    refused("not the configuration")
    peft_adapter(build("llama").float(), tmp_path, target_modules=["k_proj"], r=2)
    tensors = load_file(tmp_path / WEIGHTS)
    first = next(iter(tensors))
    for changed, match in (
        ({**tensors, "base_model.model.model.embed_tokens.lora_magnitude": torch.ones(2)}, "not part of a plain"),
        ({**tensors, "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 2)}, "one of the two"),
        ({**tensors, "base_model.model.model.norm.lora_A.weight": torch.ones(2, 2)}, "no linear map"),
        ({**tensors, "base_model.model.lm_head.weight": torch.ones(2, 2)}, "another shape"),
        ({key: value for key, value in tensors.items() if key != first}, "one of the two factors"),
        ({**tensors, first: torch.full_like(tensors[first], torch.nan)}, "not finite"),
        ({first.replace("k_proj", "nothing"): tensors[first]}, "has no module"),
        (
            {key: value[:0] if "lora_A" in key else value[:, :0].contiguous() for key, value in tensors.items()},
            "rank 0",
        ),
        ({}, "holds no weights"),
    ):
        save_file(changed, tmp_path / WEIGHTS)
        refused(match)
    (tmp_path / WEIGHTS).write_bytes(b"nonsense")
    refused("not a readable safetensors")
    (tmp_path / WEIGHTS).rename(tmp_path / "adapter_model.bin")
    refused("safetensors only")


def test_names_of_several_adapters() -> None:
    assert adapter_names((Path("a/one"),)) == {"adapter": Path("a/one")}
    found = adapter_names((Path("a/one"), Path("b/one"), Path("b/v1.2 final")))
    assert list(found) == ["adapter:one", "adapter:one-2", "adapter:v1-2-final"]
    with pytest.raises(UserError, match="twice"):
        adapter_names((Path("a"), Path("./a")))


# --------------------------------------------------------------------------------------------------------- writing


def trained(lm: LanguageModel, **recipe: Any) -> Any:
    torch.manual_seed(0)
    sequences = [TrainingSequence(tuple(torch.randint(3, 100, (n,)).tolist()), 1) for n in (7, 5, 6)]
    return finetune(lm, sequences, [0.05], TrainingRecipe(**recipe))[0].patch


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gpt_neox", "phi3-fused", "falcon-groups", "qwen2-bias", "gpt_bigcode-mqa"]
)
def test_peft_alone_gives_the_logits_of_fine_tuning(name: str, tmp_path: Path) -> None:
    lm = lm_of(name)
    patch = trained(lm)
    exported = deltas_as_adapter(patch, None)
    assert exported.error < 1e-6
    assert max(change.rank for change in exported.adapter.changes) <= 18  # training tokens
    save_adapter(tmp_path, exported.adapter, lm)
    with torch.no_grad():
        wrapped = PeftModel.from_pretrained(build(name).float(), str(tmp_path)).eval()
        logits = wrapped(IDS).logits
    torch.testing.assert_close(own_logits(lm, patch), logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own_logits(lm, load_adapter(tmp_path, lm)), logits, atol=1e-5, rtol=1e-5)
    assert (own_logits(lm, None) - logits).abs().max() > 1e-3


def test_truncation_is_the_best_of_its_rank_and_its_error_is_stated(tmp_path: Path) -> None:
    lm = lm_of("llama")
    patch = trained(lm)
    errors = [deltas_as_adapter(patch, rank).error for rank in (1, 2, 4, 8, 18)]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.01 and errors[-1] < 1e-6
    weights = [w[0].double() for w in patch.weights]
    lost = sum(float(torch.linalg.svdvals(w)[2:].square().sum()) for w in weights)
    assert errors[1] == pytest.approx((lost / sum(float(w.square().sum()) for w in weights)) ** 0.5, rel=1e-4)
    with pytest.raises(UserError, match="at least 1"):
        must_hold_adapter(tmp_path, 0)
    b, a, lost, size = compressed(torch.zeros(3, 2), torch.zeros(2, 5), None)
    assert (b @ a == 0).all() and (lost, size) == (0, 0)


@pytest.mark.parametrize("recipe", [{"params": "all"}, {"rule": "linearised"}])
def test_what_lora_cannot_hold_is_refused(recipe: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="LoRA cannot hold it"):
        deltas_as_adapter(trained(lm_of("llama"), **recipe), None)


def test_an_adapter_written_here_is_refused_by_other_weights(tmp_path: Path) -> None:
    lm = lm_of("llama")
    save_adapter(tmp_path, deltas_as_adapter(trained(lm), None).adapter, lm)
    other = build("llama").float()
    with torch.no_grad():
        next(other.parameters()).add_(0.1)
    with pytest.raises(UserError, match="other weights"):
        load_adapter(tmp_path, adopt(other, None, "llama"))
    assert load_adapter(tmp_path, adopt(build("llama").bfloat16(), None, "llama")).summary()["rank"] <= 18


def test_peft_is_not_needed_to_read_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft_adapter(build("llama").float(), tmp_path, target_modules=["k_proj"], r=2)
    monkeypatch.setitem(sys.modules, "peft", None)
    assert load_adapter(tmp_path, lm_of("llama")).summary()["modules"] == 3
