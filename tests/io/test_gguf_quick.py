"""The quick reading of GGUF files gives what the slow one gives: the same numbers, models, files and errors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from dualview.io.gguf import quick
from dualview.io.gguf.reading import GgufModel, count_weights, read_gguf, save_gguf
from tiny_gguf import write_tiny_llama

KINDS = (
    *("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
TINY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    monkeypatch.setattr(quick, "_PIECE", 1024)
    with ThreadPoolExecutor(3) as threads:
        yield threads


def random_blocks(kind: Kind, count: int) -> np.ndarray:
    """Blocks of random bytes, without those whose scale is infinite or not a number."""
    drawn = np.random.default_rng(0).integers(0, 256, (2 * count, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(gguf.dequantize(drawn, kind)).all(1)
    return drawn[finite][:count]


@pytest.mark.parametrize("kind", [Kind[name] for name in KINDS], ids=lambda kind: kind.name)
def test_threads_unpack_any_bytes_to_the_same_bits(pool: Executor, kind: Kind) -> None:
    blocks = random_blocks(kind, 22 * 21)
    for shape in ((22, -1), (2, 11, -1), (1, -1), (-1,)):
        packed = blocks.reshape(shape)
        found, wanted = quick.dequantize(pool, packed, kind), gguf.dequantize(packed, kind)
        assert found.shape == wanted.shape and found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_threads_unpack_what_was_quantised(pool: Executor, name: str) -> None:
    values = np.random.default_rng(1).normal(size=(37, 96)).astype(np.float32)
    packed = gguf.quantize(values, Kind[name])
    found = quick.dequantize(pool, packed, Kind[name])
    assert found.tobytes() == gguf.dequantize(packed, Kind[name]).tobytes()
    np.testing.assert_allclose(found, values, atol=0.5)


def test_what_cannot_be_unpacked_raises_what_gguf_raises(pool: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    for packed, kind in ((np.zeros((500, 35), np.uint8), Kind.Q8_0), (np.zeros((500, 40), np.uint8), Kind.Q8_1)):
        with pytest.raises(Exception) as theirs:
            gguf.dequantize(packed, kind)
        with pytest.raises(theirs.type) as ours:
            quick.dequantize(pool, packed, kind)
        assert str(ours.value) == str(theirs.value)
    packed = gguf.quantize(np.ones((500, 32), np.float32), Kind.Q8_0)

    def fail(piece: np.ndarray, kind: Kind) -> np.ndarray:
        if (piece == 7).all():
            raise ArithmeticError("one piece")
        return gguf.dequantize(piece, kind)

    packed[384:416] = 7
    monkeypatch.setattr(quick, "_dequantize", fail)
    with pytest.raises(ArithmeticError, match="one piece"):
        quick.dequantize(pool, packed, Kind.Q8_0)


def test_a_header_is_read_the_same(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "tiny.gguf")
    found, wanted = quick.Reader(tmp_path / "tiny.gguf"), gguf.GGUFReader(tmp_path / "tiny.gguf")
    assert list(found.fields) == list(wanted.fields)
    for name, field in wanted.fields.items():
        assert found.fields[name].contents() == field.contents() and found.fields[name].types == field.types
    for ours, theirs in zip(found.tensors, wanted.tensors, strict=True):
        assert (ours.name, ours.tensor_type) == (theirs.name, theirs.tensor_type)
        assert np.array_equal(ours.shape, theirs.shape) and np.array_equal(ours.data, theirs.data)
    assert count_weights(tmp_path / "tiny.gguf") == sum(int(tensor.n_elements) for tensor in wanted.tensors)
    (tmp_path / "other.gguf").write_bytes(b"GGML" + bytes(40))
    with pytest.raises(ValueError, match="magic"):
        quick.Reader(tmp_path / "other.gguf")


def test_gguf_is_itself_again_after_a_reading() -> None:
    before = {name: getattr(gguf, name) for name in ("GGUFReader", "dequantize", "get_tensor_name_map")}
    with pytest.raises(KeyError), quick.quick_gguf():
        assert all(getattr(gguf, name) is not function for name, function in before.items())
        raise KeyError
    assert all(getattr(gguf, name) is function for name, function in before.items())


def read_slowly(path: Path, dtype: torch.dtype) -> GgufModel:
    """With gguf as it is, into a model whose weights are drawn first."""
    where: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    unpack = transformers.GgufConfig(dequantize=True)
    packed = transformers.AutoModelForCausalLM.from_pretrained(**where, quantization_config=unpack, dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(**where), dtype=dtype)
    model.load_state_dict(packed.state_dict())
    model.config.architectures = [type(model).__name__]
    return GgufModel(transformers.AutoTokenizer.from_pretrained(**where), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_saved_as_the_same_files(
    tmp_path: Path, tied: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "_PIECE", 512)
    parsed: list[str] = []

    class Counted(quick.Reader):
        def __init__(self, path: Any) -> None:
            parsed.append(path)
            super().__init__(path)

    monkeypatch.setattr(quick, "Reader", Counted)
    expected = write_tiny_llama(tmp_path / "tiny.gguf", tied=tied)
    found = read_gguf(tmp_path / "tiny.gguf", dtype)
    assert len(parsed) == 1, "transformers parsed the header again"
    weights = found.model.state_dict()
    for name, array in expected.items():
        assert torch.equal(weights[name], torch.from_numpy(array).to(dtype)), name
    assert (found.model.lm_head.weight is found.model.model.embed_tokens.weight) == tied
    save_gguf(found, tmp_path / "quick")
    save_gguf(read_slowly(tmp_path / "tiny.gguf", dtype), tmp_path / "slow")
    files = {path.name: path.read_bytes() for path in (tmp_path / "slow").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "quick").iterdir()} == files


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "rope_theta": 500.0}),
        ("qwen2", {}),
        ("gemma2", {"head_dim": 16}),
        ("phi3", {"pad_token_id": 0}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
        ("bloom", {}),
        ("falcon", {}),
        ("mamba", {}),
    ],
)
def test_a_model_is_what_copying_makes_of_it(family: str, options: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(family, **({} if family == "gpt2" else TINY), **options)
    make = transformers.AutoModelForCausalLM.from_config
    source, wanted = make(config, dtype=torch.float32), make(config, dtype=torch.float32)
    wanted.load_state_dict(source.state_dict())
    torch.manual_seed(3)
    with quick.Undrawn():
        found = make(config, dtype=torch.float32)
    after = torch.rand(())
    torch.manual_seed(3)
    assert family == "mamba" or torch.equal(torch.rand(()), after), "something was drawn"
    scattered = {name: torch.stack([weight, weight], -1)[..., 0] for name, weight in source.state_dict().items()}
    quick.take_weights(found, scattered)
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(model, kind)(remove_duplicate=False)) for model in (found, wanted))
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype, name
            assert ours[name].stride() == tensor.stride() and ours[name].requires_grad == tensor.requires_grad, name
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in wanted.named_parameters()]


def test_taken_weights_have_the_dtype_and_memory_of_copied_ones() -> None:
    def linear() -> torch.nn.Module:
        module = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
        module[1].weight = module[0].weight
        return module

    both = torch.randn(8, 4, dtype=torch.float64)
    weights = {"0.weight": both[:4], "1.weight": both[4:]}
    found, wanted = linear(), linear()
    wanted.load_state_dict(weights)
    quick.take_weights(found, dict(weights))
    [ours], [theirs] = found.parameters(), wanted.parameters()
    assert torch.equal(ours, theirs) and ours.dtype == torch.float32 and ours.untyped_storage().nbytes() == 64
    for wrong in ({"0.weight": both[:4]}, weights | {"2.weight": both}, dict.fromkeys(weights, both)):
        with pytest.raises(RuntimeError) as copied:
            linear().load_state_dict(wrong)
        with pytest.raises(RuntimeError) as taken:
            quick.take_weights(linear(), wrong)
        assert str(taken.value) == str(copied.value)
