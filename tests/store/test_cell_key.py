"""Keys: what decides a cell's numbers changes its key, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import dualview
import dualview.io.hub
from dualview.comparison.numerics import NUMERICS_VERSION
from dualview.comparison.prepare import prepare
from dualview.io.errors import UserError
from dualview.io.hub import HubName
from dualview.options import ADDED_LATER, RunOptions
from dualview.store import cell_key
from dualview.store.cell_key import (
    Fingerprints,
    asked_id,
    auto_kind,
    canonical,
    code_version,
    identify,
    library_hash,
)
from dualview.store.fingerprint import tokenizer_hash
from dualview.store.index import Index
from dualview.tasks.task import list_tasks, load_task
from sweep.study import save_study

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
    "labels": "abstract",
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
    return identify(prepare(RunOptions.make(**{**study, **changed}))).key


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


def tokenizer(folder: Path) -> None:
    """Two words change places that stand in no prompt, but in what calibration asks."""
    path = folder / "model" / "tokenizer.json"
    stated = json.loads(path.read_text())
    words = stated["model"]["vocab"]
    words["N/A"], words["[MASK]"] = words["[MASK]"], words["N/A"]
    path.write_text(json.dumps(stated))


@pytest.mark.parametrize("change", [weights, configuration, train_rows, labels, template, tokenizer])
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
    assert len(canonical(RunOptions.make()).splitlines()) == len(vars(RunOptions.make())) - len(ADDED_LATER)


def test_a_younger_option_at_its_default_is_in_no_key() -> None:
    """Keys of the first stores, from before `labels`: what they hold is still found."""
    assert asked_id(RunOptions.make()) == "35c834cadb22f3820f255675304a2190682dff2df0dd38e720bb3de30200dde6"
    assert asked_id(RunOptions.make(labels="natural")) == asked_id(RunOptions.make())
    natural, abstract = (RunOptions.make(controls="full", labels=labels) for labels in ("natural", "abstract"))
    assert asked_id(natural) != asked_id(abstract) and library_hash(natural) != library_hash(abstract)
    task = load_task("agnews").model_dump_json()
    assert "abstract" not in task and load_task("agnews", labels="abstract").model_dump_json() != task


def test_abstract_words_are_in_the_plan(study: dict[str, Any]) -> None:
    path = Path(study["task"])
    natural, abstract = (RunOptions.make(**study, labels=labels) for labels in ("natural", "abstract"))
    before = [Fingerprints().plan_key(each) for each in (natural, abstract)]
    document = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**document, "abstract_labels": document["abstract_labels"][::-1]}))
    after = [Fingerprints().plan_key(each) for each in (natural, abstract)]
    assert before[0] == after[0] and before[1] != after[1]
    assert identify(prepare(abstract)).key != identify(prepare(natural)).key


def test_versions_are_in_the_key_and_source_text_is_not(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    full = RunOptions.make(**{**base, "controls": "full"})
    before, planned = key(base), Fingerprints().plan_key(full)
    assert code_version().startswith(f"numerics {NUMERICS_VERSION}, torch {torch.__version__.partition('+')[0]}, ")

    def read_no_source(path: Path, *args: Any, **named: Any) -> str:
        assert path.suffix != ".py", f"{path} was read to make a key"
        return read_text(path, *args, **named)

    read_text = Path.read_text
    with monkeypatch.context() as watched:
        watched.setattr(Path, "read_text", read_no_source)
        code_version.cache_clear()
        assert key(base) == before and Fingerprints().plan_key(full) == planned
    try:
        monkeypatch.setattr(cell_key, "NUMERICS_VERSION", NUMERICS_VERSION + 1)
        code_version.cache_clear()
        assert key(base) != before and Fingerprints().plan_key(full) != planned
    finally:
        code_version.cache_clear()


PRINT_KEYS = """
import json, sys
from dualview.options import RunOptions
from dualview.store.cell_key import Fingerprints, code_version, library_hash
options = RunOptions.make(**json.loads(sys.argv[1]), controls="full")
print(Fingerprints().plan_key(options), library_hash(options), code_version())
"""


def test_a_reworded_comment_changes_no_key(base: dict[str, Any], tmp_path: Path) -> None:
    """The same package with another comment in every module, in a process of its own."""
    package = Path(dualview.__file__).parent
    shutil.copytree(package, tmp_path / "dualview", ignore=shutil.ignore_patterns("__pycache__"))
    for module in (tmp_path / "dualview").rglob("*.py"):
        module.write_text(module.read_text(encoding="utf-8") + "# another comment\n", encoding="utf-8")
    given = json.dumps({name: value for name, value in base.items() if name != "controls"})
    found = [apart(PRINT_KEYS, given, PYTHONPATH=str(root)) for root in (package.parent, tmp_path)]
    assert found[0] == found[1] and "numerics" in found[0] and "None" not in found[0]


def test_how_texts_become_tokens_is_in_the_tokenizer_s_hash(base: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    def read(**changed: Any) -> Any:
        return AutoTokenizer.from_pretrained(base["model"], **changed)

    plain = tokenizer_hash(read())
    used = read()
    used(["a b", "a"], padding=False, truncation=True, max_length=1)
    used.chat_template = "{{ messages }}"
    assert tokenizer_hash(used) == plain == tokenizer_hash(read())
    more = read()
    more.add_tokens(["film2"])
    special = read()
    special.add_special_tokens({"pad_token": "film"})
    found = {plain, tokenizer_hash(more), tokenizer_hash(special), tokenizer_hash(read(split_special_tokens=True))}
    assert len(found) == 4


class SlowTokenizer:
    """A tokenizer without a backend that says what it is."""

    all_special_ids: ClassVar[list[int]] = [0]

    def __init__(self, words: dict[str, int], **made: Any) -> None:
        self.words, self.init_kwargs, self.bpe_ranks = words, made, {("a", "b"): 0}

    def __len__(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return self.words


def test_a_tokenizer_written_in_python_has_a_hash() -> None:
    plain = tokenizer_hash(SlowTokenizer({"a": 0, "b": 1}, vocab_file="/here"))
    assert plain == tokenizer_hash(SlowTokenizer({"b": 1, "a": 0}, vocab_file="/there"))
    merged = SlowTokenizer({"a": 0, "b": 1})
    merged.bpe_ranks = {("b", "a"): 0}
    others = [SlowTokenizer({"a": 1, "b": 0}), SlowTokenizer({"a": 0, "b": 1}, do_lower_case=True), merged]
    assert len({plain, *map(tokenizer_hash, others)}) == 4


REMOTE = """
from transformers import LlamaForCausalLM
from .scaling import SCALE

class OwnModel(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits * SCALE
        return found
"""


def test_code_that_comes_with_a_model_is_in_the_key(
    study: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = Path(study["model"])
    stated = json.loads((folder / "config.json").read_text())
    stated["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(stated))
    (folder / "modeling_own.py").write_text(REMOTE)
    (folder / "scaling.py").write_text("SCALE = 1.0\n")
    options = RunOptions.make(**study, trust_remote_code=True)
    first = identify(prepare(options))
    planned = Fingerprints().plan_key(options)
    assert first.remote_code is not None and identify(prepare(options)) == first
    (folder / "scaling.py").write_text("SCALE = 2.0\n")
    second = identify(prepare(options))
    assert second.remote_code != first.remote_code and second.key != first.key
    assert Fingerprints().plan_key(options) != planned
    assert identify(prepare(RunOptions.make(**{**study, "trust_remote_code": False}))).remote_code is None


def test_the_library_s_tasks_are_in_the_key_of_full_controls(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full controls take demonstrations from another task, by its content."""
    quick, full = (RunOptions.make(**{**base, "controls": controls}) for controls in ("quick", "full"))
    planned = [Fingerprints().plan_key(options) for options in (quick, full)]
    assert library_hash(quick) is None and library_hash(full) is not None
    tasks = list_tasks()
    assert {"movie", "source", "product"} <= {task.name for task in tasks}

    def changed(**what: str) -> str:
        monkeypatch.setattr(cell_key, "list_tasks", lambda: [task.model_copy(update=what) for task in tasks])
        cell_key._library_hash.cache_clear()  # pyright: ignore[reportPrivateUsage]
        return str(library_hash(full))

    try:
        before = changed()
        assert changed(notes="Other notes.") == before != changed(template="Text: {text}")
        replanned = [Fingerprints().plan_key(options) for options in (quick, full)]
        assert replanned[0] == planned[0] and replanned[1] != planned[1]
    finally:
        cell_key._library_hash.cache_clear()  # pyright: ignore[reportPrivateUsage]


def test_auto_is_planned_as_what_it_is_here(base: dict[str, Any]) -> None:
    auto = RunOptions.make(**{**base, "device": "auto"})
    keys = {Fingerprints(auto=kind).plan_key(auto) for kind in ("cpu", "cuda")}
    assert len(keys) == 2 and Fingerprints(auto="cpu").plan_key(auto, auto="cuda") in keys
    given = RunOptions.make(**base)
    assert Fingerprints(auto="cpu").plan_key(given) == Fingerprints(auto="cuda").plan_key(given)


def apart(code: str, *args: str, **environment: str) -> str:
    """What a fresh process prints: one in which nothing was imported before."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_planning_waits_for_torch_only_where_a_gpu_may_be() -> None:
    code = (
        "import sys; from dualview.store import cell_key; cell_key._GPU_DEVICES = ({}); print(cell_key.auto_kind()); "
    )
    code += "print('torch' in sys.modules)"
    assert apart(code.format("")).split() == ["cpu", "False"]
    assert apart(code.format("cell_key.Path('/'),")).split()[1] == "True"
    assert auto_kind() == ("cuda" if torch.cuda.is_available() else "cpu")


def in_cache(cache: Path, commit: str) -> None:
    """Let the cache hold a model of the hub at this commit."""
    storage = cache / "models--someone--something"
    (storage / "refs").mkdir(parents=True, exist_ok=True)
    (storage / "refs" / "main").write_text(commit)
    (storage / "snapshots" / commit).mkdir(parents=True)


def test_a_hub_name_is_looked_up_in_a_fresh_process(tmp_path: Path) -> None:
    in_cache(tmp_path, "a" * 40)
    code = "from dualview.store.cell_key import HubName, commit_of; "
    code += "print(commit_of(HubName('someone/something'), 'model'))"
    assert apart(code, HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1") == "a" * 40


def test_a_hash_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, path = Index(None), tmp_path / "weights"
    path.write_bytes(b"one")
    calls: list[Path] = []
    monkeypatch.setattr("dualview.store.index.sha256_of", lambda p: calls.append(p) or f"{len(calls)}")
    assert [index.sha256(path), index.sha256(path)] == ["1", "2"]  # changed this very moment: not trusted yet
    now = [path.stat().st_mtime + 60]
    monkeypatch.setattr("dualview.store.index.time.time", lambda: now[0])
    assert [index.sha256(path), index.sha256(path)] == ["3", "3"]
    times = path.stat()
    path.write_bytes(b"two")  # as long as before, and its times set back
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert index.sha256(path) == "4"


def test_a_hub_name_is_known_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(dualview.io.hub, "_known", {})
    options = RunOptions.make(model="someone/something", task="movie")
    assert Fingerprints().plan_key(options) is None  # nothing is known of it before it is fetched
    found: list[str | None] = []
    for commit in ("a" * 40, "b" * 40):
        in_cache(tmp_path, commit)
        found.append(Fingerprints().plan_key(options))
    assert None not in found and found[0] != found[1]
    pinned = RunOptions.make(model=f"someone/something@{'a' * 40}", task="movie")
    assert Fingerprints().plan_key(pinned) not in (None, *found)

    class Info:
        sha, siblings, id = "fed", (), "someone/something"

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: Info)
    name = HubName("someone/something")
    assert cell_key.commit_of(name, "model") == "fed"

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", unreachable)
    assert cell_key.commit_of(name, "model") == "fed"  # one name, one commit for as long as a process lives
    dualview.io.hub.forget()
    assert cell_key.commit_of(name, "model") == "b" * 40
