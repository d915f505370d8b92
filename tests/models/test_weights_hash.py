"""The hash of a model's weights: the same however it is computed, kept by file, never out of date."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zoo
from dualview.models import weights_hash
from dualview.models.loading import load_model
from dualview.models.weights_hash import WeightsHash, hash_weights
from equivalence.tiny import save_model

OLD = 1_000_000_000


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often weights are really read."""
    calls: list[int] = []

    def counted(weights: dict[str, torch.Tensor]) -> str:
        calls.append(1)
        return hash_weights(weights)

    monkeypatch.setattr(weights_hash, "hash_weights", counted)
    return calls


def slow_hash(model: torch.nn.Module) -> str:
    whole = b""
    for name, tensor in sorted(model.state_dict().items()):
        whole += f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode() + bytes(tensor.numpy().tobytes())
    return hashlib.sha256(whole).hexdigest()


def test_the_hash_is_that_of_the_bytes() -> None:
    model = zoo.make("llama")
    assert WeightsHash().value(model.state_dict()) == slow_hash(model)


def test_it_begins_beside_other_work_and_ignores_what_is_swapped_in_later() -> None:
    model = zoo.make("gpt2")
    before, made = slow_hash(model), WeightsHash()
    made.start(model.state_dict())
    model.transformer.wte._parameters["weight"] = torch.zeros(3)  # as training every parameter swaps them
    assert made.value({}) == before


def test_a_second_start_reads_no_weights(tmp_path: Path, hashed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALVIEW_CACHE", str(tmp_path / "cache"))
    folder = save_model(tmp_path / "model")
    for path in folder.iterdir():
        os.utime(path, (OLD, OLD))
    first = load_model(str(folder)).weights_hash
    assert load_model(str(folder)).weights_hash == first
    assert len(hashed) == 1
    assert load_model(str(folder), dtype="float64").weights_hash != first, "another dtype, other bytes"
    for path in folder.glob("*.safetensors"):
        os.utime(path, (OLD + 5, OLD + 5))
    assert load_model(str(folder)).weights_hash == first
    assert len(hashed) == 3, "files of another time are read again"


def test_files_that_have_just_changed_are_not_remembered(
    tmp_path: Path, hashed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALVIEW_CACHE", str(tmp_path / "cache"))
    folder = save_model(tmp_path / "model")
    load_model(str(folder)).weights_hash, load_model(str(folder)).weights_hash
    assert len(hashed) == 2


@pytest.mark.parametrize("spoil", [lambda p: p.write_text("{"), lambda p: p.write_text("[]"), lambda p: p.unlink()])
def test_a_damaged_note_is_computed_again(
    tmp_path: Path, hashed: list[int], monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], object]
) -> None:
    monkeypatch.setenv("DUALVIEW_CACHE", str(tmp_path / "cache"))
    folder = save_model(tmp_path / "model")
    for path in folder.iterdir():
        os.utime(path, (OLD, OLD))
    first = load_model(str(folder)).weights_hash
    (note,) = (tmp_path / "cache" / "weights").iterdir()
    spoil(note)
    assert load_model(str(folder)).weights_hash == first
    assert len(hashed) == 2


@pytest.mark.parametrize("tensor", [torch.randn(7, 5), torch.randn(6, 4).bfloat16().T, torch.tensor(3), torch.empty(0)])
def test_a_copy_in_parts_has_all_bytes(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """As weights on a GPU are read; here from the processor's memory."""
    monkeypatch.setattr(weights_hash, "_PART_BYTES", 24)
    copying = weights_hash._Copying(torch.device("cpu"))
    for _ in range(2):
        found = b"".join(part.numpy().tobytes() for part in copying.parts(tensor))
        assert found == tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
