"""Records that stay on a GPU until they are reduced: the numbers are those of records that are copied to the host.

Tensors of the CPU stand in for those of a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualview
from close import assert_same_json
from dualview.comparison.run import off_heads
from dualview.metrics import recompute
from dualview.models import staying
from dualview.models.language_model import LanguageModel
from dualview.models.loading import load_model
from dualview.models.scoring import PassPlan, ask
from dualview.records import load_records, save_records
from dualview.records.setting import AXES, is_away
from equivalence import cases, tiny

TINY: dict[str, Any] = {"shots": 5, "n_queries": 12, "lr": 0.05, "lr_grid": (0.01, 0.05)}
VECTORS = ("h", "m", "off_span", "off_contrast")


def stay(monkeypatch: pytest.MonkeyPatch, fits: Any = lambda _lm, _nbytes: True) -> list[dict[str, list[str]]]:
    """Let records stay on the CPU; what of each setting is a tensor when a run is measured goes into the list."""
    seen: list[dict[str, list[str]]] = []
    measure = recompute.measure

    def on_cpu(records: Any, **others: Any) -> Any:
        seen.append({n: [what for what in AXES if is_away(getattr(s, what))] for n, s in records.settings.items()})
        return measure(records, **{**others, "device": "cpu"})

    monkeypatch.setattr(staying, "fits", fits)
    monkeypatch.setattr(recompute, "measure", on_cpu)
    return seen


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save_task(tmp_path_factory.mktemp("task"), train=40, selection=24, validation=20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save_model(tmp_path_factory.mktemp("model")))


def numbers(result: Any) -> dict[str, Any]:
    return {key: value for key, value in result.to_json().items() if key != "provenance"}


@pytest.mark.parametrize(("dtype", "controls"), [("float32", "full"), ("float64", "quick"), ("bfloat16", "quick")])
def test_a_run_gives_the_same_numbers_and_records(
    folder: str, task: str, dtype: Any, controls: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lm = load_model(folder, dtype=dtype, device="cpu")
    wanted = dualview.compare(model=lm, task=task, controls=controls, **TINY)
    seen = stay(monkeypatch)
    found = dualview.compare(model=lm, task=task, controls=controls, **TINY)
    assert seen[0]["icl"] == list(VECTORS) and seen[0]["icl_reordered"] == ["h", "m"]
    assert all(seen[0][name] == ["h", "m"] for name in seen[0] if name.startswith("untrained"))
    assert_same_json(numbers(found), numbers(wanted))
    saved = load_records(save_records(found.records, tmp_path / "records"))
    for name, setting in wanted.records.settings.items():
        for what in AXES:
            there, here = getattr(saved[name], what), getattr(setting, what)
            assert (there is None) == (here is None), (name, what)
            if here is not None:
                assert there.dtype == here.dtype and np.array_equal(there, here, equal_nan=True), (name, what)


def test_some_stay_and_some_do_not(folder: str, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the first records fit, the statistics read some from the device and some from the host."""
    lm = load_model(folder, dtype="float32", device="cpu")
    wanted = dualview.compare(model=lm, task=task, controls="quick", **TINY)
    for allowed in ((True, False), (False, True)):
        answers = iter(allowed)
        seen = stay(monkeypatch, lambda _lm, _nbytes, answers=answers: next(answers, False))
        found = dualview.compare(model=lm, task=task, controls="quick", **TINY)
        assert bool(seen[0]["zsl"]) == allowed[0] and bool(seen[0]["icl"]) == allowed[1] and not seen[0]["ft"]
        assert_same_json(numbers(found), numbers(wanted))
        monkeypatch.undo()


@pytest.mark.parametrize("name", ["llama", "gpt2", "lfm2-hybrid"])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_what_stays_of_a_pass_is_what_is_copied(
    name: str, batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = cases.lm(name)
    taps = tuple(p for layer in lm.anatomy.layers for role in layer.projections.values() for p in role)
    how = PassPlan((cases.BOS,), 1, own=True, taps=taps, detailed=3, batch_size=batch_size)
    host = ask(lm, cases.QUERIES, how)
    monkeypatch.setattr(staying, "fits", lambda _lm, _nbytes: True)
    away = ask(lm, cases.QUERIES, replace(how, stay=True))
    for what in ("h", "m", "demo_mass", "log_probs"):
        moved, here = getattr(away.settings[0].on_host(), what), getattr(host.settings[0], what)
        assert np.array_equal(moved, here) and moved.dtype == here.dtype
    pairs = [(away.own, host.own)]
    for there, kept in zip(away.tapped, host.tapped, strict=True):
        pairs += [(there.x, kept.x), (there.y, kept.y)]
    for there, here in pairs:
        assert isinstance(there, torch.Tensor) and np.array_equal(there.numpy(), here)
    gold = np.arange(len(cases.QUERIES)) % 2
    both = [
        off_heads(
            lm,
            each.own,
            {"zsl": each.settings[0], "icl": ask(lm, cases.QUERIES, context).settings[0]},
            gold,
            each.columns,
        )
        for each, context in ((host, PassPlan(cases.DEMOS, 1)), (away, PassPlan(cases.DEMOS, 1, stay=True)))
    ]
    assert is_away(both[1]["icl"].off_span) == (both[0]["icl"].off_span is not None)
    if both[0]["icl"].off_span is not None:
        assert np.array_equal(both[1]["icl"].on_host().off_span, both[0]["icl"].off_span)


def test_a_wider_layer_is_not_rounded(folder: str) -> None:
    members = staying.Members.of([2, 0], torch.device("cpu"))
    into = torch.zeros(1, 3, 2, dtype=torch.bfloat16)
    value = torch.tensor([[[1 + 2**-20, 1.0], [2.0, 3.0]]])
    found = members.laid(into, value)
    assert found.dtype == torch.float32 and torch.equal(found[0, [2, 0]], value[0]) and not found[0, 1].any()


@pytest.mark.parametrize("weights", [1 << 20, 15 << 30])
def test_what_stays_is_bounded(weights: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to the weights at most a third of them (or four gibibytes), and at most a quarter of what is free."""

    class Weight:
        nbytes, device = weights, torch.device("cuda")

    class Model:
        def parameters(self) -> list[Weight]:
            return [Weight()]

    class Fake:
        device, model = torch.device("cuda"), Model()

    lm: Any = Fake()
    total, held = 200 << 30, [weights]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: held[0])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: held[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (total - held[0], total))
    piece = 100 << 20
    while staying.fits(lm, piece):
        held[0] += piece
    assert 0.95 * max(weights / 3, 4 << 30) <= held[0] - weights <= max(weights / 3, 4 << 30)
    total = held[0] = weights
    total += 3 * piece
    assert not staying.fits(lm, piece)


def test_on_a_cpu_nothing_stays(folder: str) -> None:
    lm: LanguageModel = load_model(folder, dtype="float32", device="cpu")
    assert not staying.fits(lm, 0)
