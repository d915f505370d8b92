"""Models by name from a hub: revisions, resumed downloads, offline use, and one sentence for each failure."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load, save
from torch import zeros

from hub.client import Client
from hub.made import data_files, task_file
from hub.server import TOKEN, Hub

Files = dict[str, bytes]
Two = tuple[Files, Files]
CHUNK = 10 * 1024 * 1024
"""The hub's client keeps what it has downloaded in steps of this size."""


def ask(client: Client, model: str, task: Path | str, *more: str, **env: str) -> Any:
    load = ("run", "--dry-run", "--controls", "none", "--device", "cpu")
    return client(*load, "--model", model, "--task", str(task), "--shots", "1", *more, **env)


def loaded(client: Client, model: str, **options: Any) -> tuple[str, str]:
    """The commit and the weights' hash of a model that a process loads."""
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    code = f"import dualview; lm = dualview.load_model({model!r}, device='cpu', {given}); "
    code += "print(lm.commit, lm.weights_hash)"
    commit, weights = client.python(code).fine().split()
    return commit, weights


def without(files: Files, *parts: str) -> Files:
    return {name: data for name, data in files.items() if not any(part in name for part in parts)}


def test_a_run_by_name_as_a_user_would(
    hub: Hub, online: Client, offline: Client, model_files: Two, tmp_path: Path
) -> None:
    """A model and a task by hub id, from a shell; then once more, offline."""
    commit = hub.repo("user/model").commit(model_files[0])
    data = hub.repo("user/reviews", "datasets").commit(data_files())
    train, validation = "hf:user/reviews/plain:train", "hf:user/reviews/plain:test"
    options = ["run", "--model", "user/model", "--task", task_file(tmp_path, train, validation), "--shots", "2"]
    options += ["--n-queries", "4", "--lr", "0.01", "--controls", "none", "--device", "cpu", "--json"]
    first, second = str(tmp_path / "online.json"), str(tmp_path / "offline.json")
    command = [sys.executable, "-m", "dualview", *options, first]
    run = subprocess.run(command, env=online.env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "warn" not in run.stderr.lower() and "hf_token" not in run.stderr.lower()
    asked = len(hub.log)
    offline(*options, second).fine()
    assert len(hub.log) == asked
    results = [json.loads(Path(place).read_text(encoding="utf-8")) for place in (first, second)]
    for result in results:
        assert result["provenance"]["model_commit"] == commit
        assert result["provenance"]["data_commits"] == {train: data, validation: data}
        assert result["provenance"]["code_commits"] == {}
        del result["provenance"]["run"]
    assert results[0] == results[1]


def test_revisions(hub: Hub, online: Client, offline: Client, model_files: Two, tmp_path: Path) -> None:
    repo = hub.repo("user/revised")
    first = repo.commit(model_files[0], "v1", "refs/pr/1")
    second = repo.commit(model_files[1])
    names = ["user/revised@v1", f"user/revised@{first}", "user/revised@refs/pr/1", "user/revised"]
    found = [loaded(online, name) for name in names]
    assert [commit for commit, _ in found] == [first, first, first, second]
    weights = [hashed for _, hashed in found]
    assert weights[0] == weights[1] == weights[2] != weights[3]
    assert [loaded(offline, name) for name in names] == found


def test_a_branch_that_moves(hub: Hub, online: Client, offline: Client, model_files: Two) -> None:
    """A process reads one commit under one name; a new one reads the newest, and offline the one read last."""
    repo = hub.repo("user/moving")
    first = repo.commit(model_files[0])
    assert loaded(online, "user/moving")[0] == first
    second = repo.commit(model_files[1])
    assert loaded(offline, "user/moving")[0] == first
    assert loaded(online, "user/moving")[0] == second == loaded(offline, "user/moving")[0]
    code = "from dualview.io import hub; n = hub.HubName('user/moving'); hub.pin({('model', n): '%s'}); "
    code += "print(hub.resolve(n, 'model').commit)"
    assert online.python(code % first).fine().strip() == first


def test_a_model_in_shards(hub: Hub, online: Client, model_files: Two, local_task: Path) -> None:
    tensors = load(model_files[0]["model.safetensors"])
    shards = {f"model-0000{n + 1}-of-00002.safetensors": dict(list(tensors.items())[n::2]) for n in range(2)}
    index = {"metadata": {}, "weight_map": {key: name for name, part in shards.items() for key in part}}
    files = without(model_files[0], "safetensors") | {"model.safetensors.index.json": json.dumps(index).encode()}
    files |= {name: save(part, {"format": "pt"}) for name, part in shards.items()}
    hub.repo("user/sharded").commit(
        files | {"consolidated.safetensors": b"not needed", "pytorch_model.bin": b"nor this"}
    )
    hub.repo("user/whole").commit(model_files[0])
    assert loaded(online, "user/sharded")[1] == loaded(online, "user/whole")[1]
    assert not hub.downloads("consolidated.safetensors") and not hub.downloads("pytorch_model.bin")
    hub.repo("user/lacking").commit(without(files, "00002-of"))
    assert "lacks model-00002-of-00002.safetensors" in ask(online, "user/lacking", local_task).complaint()


def test_a_connection_that_is_cut_is_resumed(hub: Hub, online: Client, model_files: Two) -> None:
    tensors = load(model_files[0]["model.safetensors"])
    files = model_files[0] | {"model.safetensors": save({**tensors, "unused": zeros(4_000_000)}, {"format": "pt"})}
    commit = hub.repo("user/large").commit(files)
    hub.log.clear()
    hub.cuts["model.safetensors"] = (1, CHUNK + 1000)
    assert loaded(online, "user/large")[0] == commit
    assert hub.downloads("model.safetensors") == [None, f"bytes={CHUNK}-"]


def test_a_connection_that_is_cut_again_and_again(hub: Hub, online: Client, model_files: Two, local_task: Path) -> None:
    hub.repo("user/cut").commit(model_files[0])
    hub.cuts["model.safetensors"] = (1000, 100)
    answer = ask(online, "user/cut", local_task)
    hub.cuts.clear()
    said = answer.complaint()
    assert "download of model.safetensors of user/cut failed" in said and "run the command again" in said
    assert answer.seconds < 30
    ask(online, "user/cut", local_task).fine()


def test_a_prompt_needs_no_weights(
    hub: Hub, online: Client, offline: Client, model_files: Two, local_task: Path
) -> None:
    """It is the prompt of the whole model, online and offline, and the weights are not downloaded."""
    command = ("prompt", "--model", "user/unseen", "--task", str(local_task), "--shots", "1", "--device", "cpu")
    hub.repo("user/unseen").commit(model_files[0])
    hub.log.clear()
    shown = online(*command).fine()
    assert not hub.downloads("model.safetensors")
    assert offline(*command).fine() == shown
    code = f"import dualview; lm = dualview.load_model('user/unseen', device='cpu'); task = {str(local_task)!r}; "
    code += "print([token['id'] for token in dualview.prompt(model=lm, task=task, shots=1).tokens])"
    ids = [int(line.split("\t")[1]) for line in shown.splitlines()]
    assert json.loads(online.python(code).fine()) == ids


def test_a_gated_model(hub: Hub, online: Client, model_files: Two, local_task: Path) -> None:
    repo = hub.repo("user/gated")
    repo.commit(model_files[0])
    repo.gated = True
    said = ask(online, "user/gated", local_task).complaint()
    assert "user/gated is gated" in said and "HF_TOKEN" in said and "hf auth login" in said
    ask(online, "user/gated", local_task, HF_TOKEN=TOKEN).fine()


def test_names_that_the_hub_does_not_have(hub: Hub, online: Client, model_files: Two, local_task: Path) -> None:
    repo = hub.repo("user/private")
    repo.commit(model_files[0])
    repo.private = True
    for name, env in (("user/nothing", {}), ("user/nothing", {"HF_TOKEN": TOKEN}), ("user/private", {})):
        said = ask(online, name, local_task, **env).complaint()
        assert f"no model {name}" in said and "spelling" in said and "private" in said
    ask(online, "user/private", local_task, HF_TOKEN=TOKEN).fine()
    hub.repo("user/there").commit(model_files[0])
    said = ask(online, "user/there@v9", local_task).complaint()
    assert "user/there has no revision 'v9'" in said
    assert "There is no model folder a/b/c" in ask(online, "a/b/c", local_task).complaint()


def test_repositories_that_lack_what_is_needed(hub: Hub, online: Client, model_files: Two, local_task: Path) -> None:
    pickled = without(model_files[0], "safetensors") | {"pytorch_model.bin": b"a pickle"}
    for name, files, words in (
        ("user/pickled", pickled, "no weights in safetensors (only pickled"),
        ("user/bare", without(model_files[0], "safetensors"), "no weights in safetensors (none"),
        ("user/speechless", without(model_files[0], "token"), "no tokenizer files"),
        ("user/no-config", without(model_files[0], "config.json"), "no config.json"),
        ("user/gguf", {"model.gguf": b"GGUF"}, "no config.json; it has GGUF files: download one and give its path"),
    ):
        hub.repo(name).commit(files)
        hub.log.clear()
        said = ask(online, name, local_task).complaint()
        assert name in said and words in said
        assert not any("cdn" in path for _, path, _ in hub.log), "something large was downloaded"


def test_offline_without_the_model(hub: Hub, offline: Client, model_files: Two, local_task: Path) -> None:
    hub.repo("user/elsewhere").commit(model_files[0])
    said = ask(offline, "user/elsewhere", local_task).complaint()
    assert "user/elsewhere is not in the cache and HF_HUB_OFFLINE is set" in said and "load it once" in said


def test_offline_with_a_part_of_the_model(
    hub: Hub, online: Client, offline: Client, model_files: Two, local_task: Path
) -> None:
    hub.repo("user/part").commit(model_files[0])
    hub.cuts["model.safetensors"] = (1000, 0)
    ask(online, "user/part", local_task).complaint()
    hub.cuts.clear()
    said = ask(offline, "user/part", local_task).complaint()
    assert "only a part of the model user/part (model.safetensors of commit" in said


@pytest.mark.parametrize(("how", "on", "off"), [("down", True, False), ("stalled", "/", None)])
def test_a_hub_that_does_not_answer(
    hub: Hub, online: Client, model_files: Two, local_task: Path, how: str, on: Any, off: Any
) -> None:
    """Without a copy one sentence, soon; with one the model is read from the cache, and that is said."""
    commit = hub.repo(f"user/before-{how}").commit(model_files[0])
    ask(online, f"user/before-{how}", local_task).fine()
    setattr(hub, how, on)
    try:
        missing, there = (ask(online, f"user/{name}-{how}", local_task) for name in ("new", "before"))
    finally:
        setattr(hub, how, off)
    assert f"user/new-{how} is not in the cache and the hub at {hub.url} could not be reached" in missing.complaint()
    assert missing.seconds < 15 and there.seconds < 15
    assert there.code == 0 and f"from the cache, commit {commit}." in there.err


def test_a_hub_that_lists_files_and_does_not_send_them(
    hub: Hub, online: Client, model_files: Two, local_task: Path
) -> None:
    hub.repo("user/listed").commit(model_files[0])
    hub.stalled = "/resolve/"
    try:
        answer = ask(online, "user/listed", local_task)
    finally:
        hub.stalled = None
    assert "download of config.json of user/listed failed" in answer.complaint()
    assert answer.seconds < 20


def test_an_address_where_no_hub_is(hub: Hub, online: Client, local_task: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dualview", "prompt", "--model", "user/model", "--task", str(local_task)]
    command += ["--shots", "1"]
    env = {**online.env, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if not line.startswith("loading ")]
    assert done.returncode == 2 and len(said) == 1, done.stderr
    assert "user/model is not in the cache and the hub at http://127.0.0.1:9 could not be reached" in said[0]


def test_a_sweep_plans_by_the_commit(
    hub: Hub, online: Client, model_files: Two, local_task: Path, tmp_path: Path
) -> None:
    repo = hub.repo("user/swept")
    repo.commit(model_files[0], "main", "v1")
    spec = {"model": ["user/swept", "user/swept@v1"], "task": str(local_task), "shots": 2, "n_queries": 4, "lr": 0.01}
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec | {"controls": "none", "device": "cpu"}), encoding="utf-8")
    store = str(tmp_path / "store")

    def swept(*more: str) -> str:
        answer = online("sweep", str(path), "--store", store, *more)
        assert answer.code == 0, answer.err
        return answer.out + answer.err

    assert "2 computed" in swept()
    assert "2 done, 0 to do" in swept("--dry-run")
    repo.commit(model_files[1])
    assert "1 done, 1 to do" in swept("--dry-run")
    assert "1 computed" in swept()


# ---------------------------------------------------------------------------------------- code of other repositories

CODE = """
from transformers import LlamaForCausalLM
from .scaling import SCALE

class TheirModel(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits * SCALE
        return found
"""
KEYS = """
import json
from dualview.comparison.prepare import prepare
from dualview.options import RunOptions
from dualview.store.cell_key import Fingerprints, identify
options = RunOptions.make(**json.loads({given!r}))
planned = Fingerprints().plan_key(options)
prepared = prepare(options)
print(json.dumps([planned, identify(prepared).key, dict(prepared.lm.code_commits)]))
"""


def keys(client: Client, task: Path, model: str) -> list[Any]:
    given = {"model": model, "task": str(task), "shots": 1, "n_queries": 2, "device": "cpu", "trust_remote_code": True}
    return json.loads(client.python(KEYS.format(given=json.dumps(given))).fine())


def borrowing(files: Files, other: str) -> Files:
    config = json.loads(files["config.json"])
    config |= {"model_type": "nothing-that-is-known", "auto_map": {}}
    config["auto_map"]["AutoConfig"] = f"{other}--configuring.TheirConfig"
    config["auto_map"]["AutoModelForCausalLM"] = f"{other}--modeling.TheirModel"
    return files | {"config.json": json.dumps(config).encode()}


def code_files(scale: float) -> Files:
    settings = "from transformers import LlamaConfig\nclass TheirConfig(LlamaConfig):\n"
    settings += "    model_type = 'nothing-that-is-known'\n"
    model = CODE.replace("from .scaling", "from .configuring import TheirConfig\nfrom .scaling")
    model = model.replace("    def forward", "    config_class = TheirConfig\n    def forward")
    files = {"configuring.py": settings, "modeling.py": model, "scaling.py": f"SCALE = {scale}\n"}
    return {name: text.encode() for name, text in files.items()}


@pytest.mark.parametrize("where", ["hub", "folder"])
def test_code_of_another_repository(
    hub: Hub, online: Client, offline: Client, model_files: Two, local_task: Path, tmp_path: Path, where: str
) -> None:
    """It runs only when asked for, its commit is recorded, and a change of it changes both keys."""
    other = f"others/code-{where}"
    files = borrowing(model_files[0], other)
    if where == "hub":
        model = "user/borrower"
        hub.repo(model).commit(files)
    else:
        model = str(tmp_path / "borrower")
        Path(model).mkdir()
        for name, data in files.items():
            (Path(model) / name).write_bytes(data)
    first = hub.repo(other).commit(code_files(1.0))
    hub.log.clear()
    said = ask(online, model, local_task).complaint()
    assert model in said and "not run unasked" in said and "--trust-remote-code" in said
    assert not [path for _, path, _ in hub.log if path.endswith(".py")]
    before = keys(online, local_task, model)
    assert before[2] == {other: first}
    assert keys(online, local_task, model) == before == keys(offline, local_task, model)
    second = hub.repo(other).commit(code_files(2.0))
    after = keys(online, local_task, model)
    assert after[2] == {other: second}
    assert after[0] not in (None, before[0]) and after[1] != before[1]


def test_a_named_file_is_fetched_by_its_hash(hub: Hub, online: Client, tmp_path: Path) -> None:
    """`dualview assets fetch`, from the hub: continued where it was cut, and refused if the file is another one."""
    content = bytes(range(256)) * 50_000
    hub.repo("user/gguf").commit({"toy.gguf": content})
    code = f"""
from pathlib import Path
from dualview.io.gguf.download import GGUFPin, fetch_gguf
pin = GGUFPin("user/gguf", "toy.gguf", "no-such-part", "1.0", 1, {len(content)}, HASH)
print(fetch_gguf(pin, Path({str(tmp_path)!r}), lambda line: None).read_bytes() == bytes(range(256)) * 50_000)
"""
    good, pip = hashlib.sha256(content).hexdigest(), {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
    hub.log.clear()
    hub.cuts["toy.gguf"] = (1, CHUNK + 1000)
    assert online.python(code.replace("HASH", repr(good)), **pip).fine() == "True\n"
    assert hub.downloads("toy.gguf") == [None, f"bytes={CHUNK}-"]
    (tmp_path / "toy.gguf").unlink()
    hub.cuts["toy.gguf"] = (1000, 100)
    assert "run the same command again" in online.python(code.replace("HASH", repr(good)), **pip).err
    hub.cuts.clear()
    assert "does not have the expected sha256" in online.python(code.replace("HASH", repr("0" * 64)), **pip).err
    assert not list(tmp_path.glob("*.gguf"))
