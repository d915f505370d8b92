"""Loading from a folder, and every way it can fail, each reported in one sentence."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, Phi3Config, Phi3ForCausalLM

import zoo
from dualview.io.errors import UserError
from dualview.models.devices import pick_device
from dualview.models.loading import adopt, load_model
from dualview.models.scoring import PassPlan, ask
from dualview.tasks.prompts import Query
from equivalence import cases, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def test_a_folder(folder: Path) -> None:
    lm = load_model(str(folder), dtype="float64", device="cpu")
    assert lm.dtype == torch.float64 and lm.device.type == "cpu" and lm.fast and lm.context == 256
    assert not any(parameter.requires_grad for parameter in lm.model.parameters())
    assert not lm.model.training
    narrow = load_model(str(folder), device="cpu")
    assert narrow.dtype == torch.float32, "single precision unless asked otherwise"
    query = cases.QUERIES[0]
    low = type(query)(tuple(t % 30 for t in query.ids), ((3,), (4,)), 0)
    a = ask(lm, [low], PassPlan((1,), 1)).settings[0].log_probs
    b = ask(narrow, [low], PassPlan((1,), 1)).settings[0].log_probs
    assert cases.worst(a, b) < 1e-5


def test_the_weights_hash_is_the_weights(folder: Path, tmp_path: Path) -> None:
    one, again = (load_model(str(folder), dtype="float64", device="cpu") for _ in range(2))
    assert one.weights_hash == again.weights_hash and len(one.weights_hash) == 64
    other = load_model(str(tiny.save_model(tmp_path / "other", seed=1)), dtype="float64", device="cpu")
    assert other.weights_hash != one.weights_hash
    assert load_model(str(folder), device="cpu").weights_hash != one.weights_hash, "another dtype, other weights"
    moved = zoo.make("llama")
    first = adopt(moved, None, "llama").weights_hash
    with torch.no_grad():
        next(moved.parameters()).view(-1)[3] += 1e-12
    assert adopt(moved, None, "llama").weights_hash != first


def complaint(name: str, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        load_model(name, device="cpu", **options)  # pyright: ignore[reportArgumentType]
    said = str(caught.value)
    assert "\n" not in said and said.endswith(".")
    return said


def test_there_is_no_such_model(tmp_path: Path) -> None:
    assert "nobody/has-this-model" in complaint("nobody/has-this-model")
    assert str(tmp_path / "nowhere") in complaint(str(tmp_path / "nowhere"))
    assert "config.json" in complaint(str(tmp_path))
    assert "nowhere.gguf" in complaint(str(tmp_path / "nowhere.gguf"))


def test_a_model_without_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    bare = copied(folder, tmp_path)
    for path in [*bare.glob("*token*"), *bare.glob("*vocab*"), *bare.glob("merges*")]:
        path.unlink()
    with pytest.raises(UserError, match=r"its folder has no tokenizer"):
        load_model(str(bare), device="cpu")


def test_a_broken_gguf(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model at all")
    assert "GGUF" in complaint(str(path))
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 40)  # begins well, and ends
    assert "broken.gguf" in complaint(str(path))


def test_weights_cut_short(folder: Path, tmp_path: Path) -> None:
    broken = copied(folder, tmp_path)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    assert str(broken) in complaint(str(broken))


def test_pickles_are_never_opened(folder: Path, tmp_path: Path) -> None:
    """A folder with nothing but pickled weights is refused, and the pickle is not run."""
    broken, mark = copied(folder, tmp_path), tmp_path / "was-run"
    (broken / "model.safetensors").unlink()
    (broken / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {mark}'\ntR.".encode())
    assert str(broken) in complaint(str(broken))
    assert not mark.exists()


def test_a_models_own_code_is_not_run_unasked(folder: Path, tmp_path: Path) -> None:
    strange, mark = copied(folder, tmp_path), tmp_path / "was-run"
    config = json.loads((strange / "config.json").read_text())
    config["model_type"] = "strange"
    config["auto_map"] = {"AutoConfig": "strange.StrangeConfig", "AutoModelForCausalLM": "strange.StrangeModel"}
    (strange / "config.json").write_text(json.dumps(config))
    (strange / "strange.py").write_text(f"open({str(mark)!r}, 'w')\n")
    assert str(strange) in complaint(str(strange))
    assert not mark.exists()


def test_unknown_dtype_and_device(folder: Path) -> None:
    assert "int4" in complaint(str(folder), dtype="int4")
    with pytest.raises(UserError, match="quantum"):
        pick_device("quantum")
    with pytest.raises(UserError, match="cuda:99"):
        pick_device("cuda:99")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", zoo.HYBRID)
def test_architectures_that_mix_tokens_are_found_out(name: str, dtype: torch.dtype) -> None:
    assert adopt(zoo.make(name, dtype=dtype), None, name).slow_because is not None


@pytest.mark.parametrize("name", zoo.HYBRID)
def test_so_they_are_in_half_precision(name: str) -> None:
    assert adopt(zoo.make(name, dtype=torch.bfloat16), None, name).slow_because is not None


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gptj", "bloom", "gemma3"])
def test_others_stay_fast_in_half_precision(name: str) -> None:
    assert adopt(zoo.make(name, dtype=torch.bfloat16), None, name).fast


def test_an_encoder_is_no_causal_language_model() -> None:
    shape = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"intermediate_size": 48}
    with pytest.raises(UserError, match="not a causal language model"):
        adopt(BertLMHeadModel(BertConfig(**shape)), None, "bert")
    assert adopt(BertLMHeadModel(BertConfig(**shape, is_decoder=True)), None, "bert").fast


def test_positions_scaled_by_length_are_not_shared_across_the_turn() -> None:
    """Phi-3's longrope rotates a prompt of up to 16 tokens otherwise than a longer one."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, **factors}
    config = Phi3Config(
        vocab_size=101,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=rope,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    lm = adopt(Phi3ForCausalLM(config).double(), None, "phi3")
    whole = replace(lm, slow_because="for comparison")
    queries = [Query(tuple(range(3, 11)), ((5,), (6,)), 0)]
    for prefix in (4, 12, 20):
        how = PassPlan(tuple(range(20, 20 + prefix)), 0)
        mine, theirs = (ask(model, queries, how).settings[0] for model in (lm, whole))
        assert abs(mine.log_probs - theirs.log_probs).max() < 1e-9
    assert [lm.shares_prefix(prefix, 8) for prefix in (4, 12, 20)] == [True, False, True]


def test_an_architecture_whose_own_code_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_model: object) -> None:
        raise ValueError("too many values to unpack\nsomewhere inside")

    monkeypatch.setattr("dualview.models.loading.dissect", broken)
    with pytest.raises(UserError, match=r"cannot follow the attention of odd: too many values to unpack\.$"):
        adopt(zoo.make("llama"), None, "odd")
