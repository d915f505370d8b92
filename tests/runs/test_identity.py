"""Keys: what decides a cell's numbers changes its key, and nothing else does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dualview import comparison
from dualview.errors import UserError
from dualview.options import RunOptions
from dualview.runs import hub
from dualview.runs.identity import (
    ASIDE,
    Fingerprints,
    asked_id,
    canonical,
    code_version,
    computing_sources,
    identify,
)
from dualview.runs.index import Index
from runs.study import save_study

CHANGES: dict[str, Any] = {
    "shots": 2,
    "seed": 2,
    "n_queries": 5,
    "lr": 0.01,
    "epochs": 2,
    "ft_loss": "label",
    "ft_params": "v",
    "ft_rule": "layer-causal",
    "at": "label0",
    "bos": "no",
    "separator": "eos",
    "calibrate": True,
    "controls": "quick",
    "dtype": "float64",
    "batch_size": 2,
    "max_context": 60,
    "weights": "untrained",
}


@pytest.fixture
def study(tmp_path: Path) -> dict[str, Any]:
    return save_study(tmp_path)


def key(study: dict[str, Any], **changed: Any) -> str:
    return identify(comparison.prepare(RunOptions.make(**{**study, **changed}))).key


def test_every_setting_is_in_the_key(base: dict[str, Any]) -> None:
    found = {name: key(base, **{name: value}) for name, value in CHANGES.items()}
    assert len({key(base), *found.values()}) == len(CHANGES) + 1


def test_where_and_how_is_not_in_the_key(base: dict[str, Any], study: dict[str, Any]) -> None:
    plain = key(base)
    assert plain == key(base) == key(base, save_records=True) == key(base, device="auto")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert key(base) == plain
    finally:
        torch.set_num_threads(threads)
    assert key(base, task=study["task"]) == plain  # the same rows from another folder


def weights(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 1e-6
    save_file(tensors, path, {"format": "pt"})


def configuration(folder: Path) -> None:
    path = folder / "model" / "config.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps({**stated, "rms_norm_eps": 1e-4}))


def train_rows(folder: Path) -> None:
    path = folder / "task" / "train.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[::-1]))


def labels(folder: Path) -> None:
    path = folder / "task" / "validation.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("\n".join(json.dumps({**row, "label": (row["label"] + 1) % 3}) for row in rows))


def template(folder: Path) -> None:
    path = folder / "task" / "tiny.yaml"
    path.write_text(path.read_text().replace("Review: {text}", "Review: film {text}"))


@pytest.mark.parametrize("change", [weights, configuration, train_rows, labels, template])
def test_what_is_behind_the_names_is_in_both_keys(change: Callable[[Path], None], study: dict[str, Any]) -> None:
    options = RunOptions.make(**study)
    before, planned = key(study), Fingerprints().plan_key(options)
    change(Path(study["model"]).parent)
    assert key(study) != before and Fingerprints().plan_key(options) != planned


def test_a_file_saved_again_changes_the_plan_and_not_the_cell(study: dict[str, Any]) -> None:
    options, folder = RunOptions.make(**study), Path(study["model"])
    before, planned = key(study), Fingerprints().plan_key(options)
    tensors = load_file(folder / "model.safetensors")
    save_file(dict(sorted(tensors.items())), folder / "model.safetensors", {"format": "pt", "again": "yes"})
    assert Fingerprints().plan_key(options) != planned and key(study) == before


def test_given_demonstrations_and_queries_count_by_content(study: dict[str, Any], tmp_path: Path) -> None:
    rows = (Path(study["task"]).parent / "train.jsonl").read_text().splitlines()[:3]
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("\n".join(rows))
    assert key(study, demos=tmp_path / "a.jsonl") == key(study, demos=tmp_path / "b.jsonl")
    options = RunOptions.make(**study, demos=tmp_path / "a.jsonl")
    planned = Fingerprints().plan_key(options)
    (tmp_path / "a.jsonl").write_text("\n".join(rows[::-1]))
    assert key(study, demos=tmp_path / "a.jsonl") != key(study, demos=tmp_path / "b.jsonl")
    assert Fingerprints().plan_key(options) != planned
    with pytest.raises(UserError, match=r"none\.jsonl cannot be read"):
        Fingerprints().plan_key(RunOptions.make(**study, queries=tmp_path / "none.jsonl"))


def test_options_have_one_text_each() -> None:
    assert canonical(RunOptions.make(lr=1)) == canonical(RunOptions.make(lr=1.0))
    assert asked_id(RunOptions.make(seed=1)) != asked_id(RunOptions.make(seed="auto"))
    assert asked_id(RunOptions.make(shots=1)) != asked_id(RunOptions.make(seed=1, shots=2))
    assert len(canonical(RunOptions.make()).splitlines()) == len(vars(RunOptions.make()))


def test_the_code_that_computes_is_in_the_key() -> None:
    """Whatever a run imports of dualview is either hashed or known to decide no number."""
    loaded = {name.removeprefix("dualview.") for name in sys.modules if name.startswith("dualview.")}
    needed = reached("dualview.comparison")
    assert {"metrics.controls", "models.passes", "learning.finetune", "tasks.prompt", "verdict"} <= needed <= loaded
    sources = computing_sources()
    unhashed = {name.partition(".")[0] for name in needed - sources.keys()}
    assert unhashed <= {*ASIDE, "gguf"} - {"runs"} and not any(name.startswith("runs") for name in sources)
    assert not {name for name in sources if name.startswith(("report", "web", "lab", "cli"))}
    assert "compile" not in sources and "compile" in computing_sources(patched=True)
    assert code_version() != code_version(patched=True)


def reached(name: str) -> set[str]:
    """The modules of dualview that importing one binds, found by what they hold and not by what they say."""
    found: set[str] = set()
    todo = [name]
    while todo:
        module = sys.modules[todo.pop()]
        for value in list(vars(module).values()):
            home = value.__name__ if isinstance(value, type(sys)) else getattr(value, "__module__", None)
            if isinstance(home, str) and home.startswith("dualview.") and home.removeprefix("dualview.") not in found:
                found.add(home.removeprefix("dualview."))
                todo.append(home)
    return found


def test_a_hash_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, path = Index(None), tmp_path / "weights"
    path.write_bytes(b"one")
    calls: list[Path] = []
    monkeypatch.setattr("dualview.runs.index.sha256_of", lambda p: calls.append(p) or f"{len(calls)}")
    assert [index.sha256(path), index.sha256(path)] == ["1", "2"]  # changed this very moment: not trusted yet
    now = [path.stat().st_mtime + 60]
    monkeypatch.setattr("dualview.runs.index.time.time", lambda: now[0])
    assert [index.sha256(path), index.sha256(path)] == ["3", "3"]
    times = path.stat()
    path.write_bytes(b"two")  # as long as before, and its times set back
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert index.sha256(path) == "4"


def test_a_hub_name_is_known_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    options = RunOptions.make(model="someone/something", task="movie")
    assert Fingerprints().plan_key(options) is None  # nothing is known of it before it is fetched
    reference = tmp_path / "models--someone--something" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    found: list[str | None] = []
    for commit in ("abc", "def"):
        reference.write_text(commit)
        found.append(Fingerprints().plan_key(options))
    assert None not in found and found[0] != found[1]

    class Info:
        sha = "fed"

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: Info)
    assert hub.commit_of("someone/something", "model") == "fed"

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", unreachable)
    assert hub.commit_of("someone/something", "model") == "def"
