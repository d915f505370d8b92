"""Rows of data sets on a hub, with the real `datasets` package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from equivalence import tiny
from hub.client import Answer, Client
from hub.made import card, data_files, parquet, task_file
from hub.server import TOKEN, Hub

READ = """
import json
from pathlib import Path
from dualview.io.errors import UserError
from dualview.tasks.sources import read_source
import sys
commits = {{}}
try:
    rows = read_source({source!r}, Path(), commits)
except UserError as error:
    print(f"dualview: {{error}}", file=sys.stderr)
    sys.exit(2)
print(json.dumps([[row.values["text"] for row in rows], commits[{source!r}]]))
"""


def read(client: Client, source: str, **env: str) -> Answer:
    return client.python(READ.format(source=source), **env)


def rows(client: Client, source: str) -> tuple[list[str], str]:
    texts, commit = json.loads(read(client, source).fine())
    return texts, commit


def texts(seed: int, n: int = 24) -> list[str]:
    return [row["text"] for row in tiny.rows(n, seed)]


def test_revisions_and_offline(hub: Hub, online: Client, offline: Client) -> None:
    """Offline, `datasets` itself would give the rows that were prepared last, whatever revision is asked for."""
    repo = hub.repo("owner/reviews", "datasets")
    first = repo.commit(data_files(seed=1), "v1")
    second = repo.commit(data_files(seed=2))
    wanted: dict[str, tuple[list[str], str]] = {
        "hf:owner/reviews@v1/plain:train": (texts(1), first),
        "hf:owner/reviews/plain:train": (texts(2), second),
        f"hf:owner/reviews@{first}/plain:test": (texts(101, 12), first),
        "hf:owner/reviews:train": (texts(2), second),
        "hf:owner/reviews@v1:train": (texts(1), first),
    }
    for client in (online, offline, online):
        for source, expected in wanted.items():
            assert rows(client, source) == expected, source
    third = repo.commit(data_files(seed=3))
    assert rows(offline, "hf:owner/reviews:train") == (texts(2), second)
    assert rows(online, "hf:owner/reviews:train") == (texts(3), third)
    assert "owner/reviews@v7 is not in the cache" in read(offline, "hf:owner/reviews@v7:train").complaint()


def test_a_data_set_without_an_owner(hub: Hub, online: Client, offline: Client) -> None:
    """Of two names the second may be a data set or a configuration; a card is not needed.

    The hub has moved data sets without an owner to one, and redirects their old names.
    """
    commit = hub.repo("new-owner/simple", "datasets").commit(data_files(config="sst2"))
    hub.moved["datasets", "simple"] = "new-owner/simple"
    assert rows(online, "hf:simple/sst2:train") == (texts(1), commit) == rows(offline, "hf:simple/sst2:train")
    assert rows(online, f"hf:simple@{commit}/sst2:train") == (texts(1), commit)
    files = {"data/train-0.parquet": parquet(tiny.rows(24, 5))}
    commit = hub.repo("owner/cardless", "datasets").commit(files)
    assert rows(online, "hf:owner/cardless:train") == (texts(5), commit) == rows(offline, "hf:owner/cardless:train")


def test_another_configuration_is_not_taken_offline(hub: Hub, online: Client, offline: Client) -> None:
    configs = {"README.md": card(small=("train",), large=("train",))}
    for seed, name in enumerate(("small", "large"), start=1):
        configs[f"{name}/train-0.parquet"] = parquet(tiny.rows(24, seed))
    hub.repo("owner/two", "datasets").commit(configs)
    assert rows(online, "hf:owner/two/large:train")[0] == texts(2)
    said = read(offline, "hf:owner/two/small:train").complaint()
    assert "only a part of the data set owner/two (configuration small" in said
    said = read(online, "hf:owner/two:train").complaint()
    assert "several configurations (small, large)" in said or "several configurations (large, small)" in said
    said = read(online, "hf:owner/two/huge:train").complaint()
    assert "has no configuration 'huge', only" in said and "small" in said and "large" in said
    said = read(online, "hf:owner/two/large:dev").complaint()
    assert "has no split 'dev', only train" in said


def test_failures(hub: Hub, online: Client, offline: Client) -> None:
    gated = hub.repo("owner/gated", "datasets")
    gated.commit(data_files())
    gated.gated = True
    said = read(online, "hf:owner/gated:train").complaint()
    assert "data set owner/gated is gated" in said and "HF_TOKEN" in said and "--data" in said
    bare = hub.repo("owner/gated-bare", "datasets")
    bare.commit({"data/train-0.parquet": parquet(tiny.rows(24, 5))})
    bare.gated = True
    assert "data set owner/gated-bare is gated" in read(online, "hf:owner/gated-bare:train").complaint()
    assert json.loads(read(online, "hf:owner/gated:train", HF_TOKEN=TOKEN).fine())[0] == texts(1)
    assert "no data set owner/none" in read(online, "hf:owner/none:train").complaint()
    assert "owner/none is not in the cache" in read(offline, "hf:owner/none:train").complaint()
    hub.repo("owner/tagged", "datasets").commit(data_files())
    assert "owner/tagged has no revision 'v3'" in read(online, "hf:owner/tagged@v3:train").complaint()
    hub.repo("owner/empty", "datasets").commit({"README.md": b"nothing here\n"})
    assert "owner/empty" in read(online, "hf:owner/empty:train").complaint()


@pytest.mark.parametrize("cuts", [1, 1000])
def test_a_cut_connection(hub: Hub, online: Client, cuts: int) -> None:
    name = f"owner/cut-{cuts}"
    hub.repo(name, "datasets").commit(data_files(seed=40 + cuts))
    hub.cuts["train-0.parquet"] = (cuts, 50)
    answer = read(online, f"hf:{name}:train")
    hub.cuts.clear()
    assert answer.seconds < 60
    if cuts > 1:
        said = answer.complaint()
        assert f"{name}" in said and "download" in said and "run the command again" in said
        answer = read(online, f"hf:{name}:train")
    assert json.loads(answer.fine())[0] == texts(40 + cuts)


def test_files_that_are_broken(hub: Hub, online: Client) -> None:
    """The cause is named, and nothing else is printed: no lines of the libraries, no advice about the name."""
    whole = data_files()
    hub.repo("owner/cut", "datasets").commit({**whole, "plain/train-0.parquet": parquet(tiny.rows(24, 1))[:-20]})
    odd = [{"text": row["text"], "other": 1.5} for row in tiny.rows(12, 7)]
    hub.repo("owner/odd", "datasets").commit({**whole, "plain/test-0.parquet": parquet(odd)})
    for name, cause in (("owner/cut", "Parquet magic bytes not found"), ("owner/odd", "column")):
        said = read(online, f"hf:{name}:train").complaint()
        assert f"the data set {name} could not be read (" in said and cause in said and "check" not in said, said


def test_a_cache_that_cannot_be_written(hub: Hub, tmp_path: Path) -> None:
    hub.repo("owner/kept", "datasets").commit(data_files())
    (tmp_path / "home").write_text("a file")
    client = Client(hub.url, tmp_path / "home")
    try:
        said = read(client, "hf:owner/kept:train").complaint()
    finally:
        client.close()
    assert "set HF_HOME to a folder that can be written" in said and str(tmp_path / "home") in said


def test_another_commit_is_no_answer_to_a_failure(hub: Hub, online: Client) -> None:
    """`datasets` would give the older rows here and say nothing."""
    repo = hub.repo("owner/older", "datasets")
    repo.commit(data_files(seed=50))
    assert rows(online, "hf:owner/older:train")[0] == texts(50)
    repo.commit(data_files(seed=51))
    code = """
import datasets, sys
from dualview.tasks import hub
real = datasets.load.HubDatasetModuleFactory.get_module
def broken(self): raise ConnectionError("gone")
datasets.load.HubDatasetModuleFactory.get_module = broken
try:
    hub.read_hub("hf:owner/older:train")
except Exception as error:
    print(error)
datasets.load.HubDatasetModuleFactory.get_module = real
"""
    assert "could not be read in full, and the cache has only another one" in online.python(code).fine()


def test_a_data_set_that_is_still_a_script(hub: Hub, online: Client, offline: Client) -> None:
    repo = hub.repo("owner/scripted", "datasets")
    script = repo.commit({"scripted.py": b"raise SystemExit('never run')\n", "README.md": b"a script\n"})
    converted = repo.commit(data_files(seed=7, config="default"), "refs/convert/parquet")
    assert rows(online, "hf:owner/scripted:train") == (texts(7), converted)
    assert rows(offline, "hf:owner/scripted:train") == (texts(7), converted)
    assert rows(online, "hf:owner/scripted@refs/convert/parquet:train") == (texts(7), converted)
    said = read(online, f"hf:owner/scripted@{script}:train").complaint()
    assert "is a Python script at revision" in said


def test_rows_by_the_command_line(hub: Hub, online: Client, tmp_path: Path) -> None:
    hub.repo("owner/asked", "datasets").commit(data_files(), "main", "v1")
    task = task_file(tmp_path, "hf:owner/asked@v1:train", "hf:owner/asked@v1:test")
    assert "tiny" in online("tasks", task).fine()
    task = task_file(tmp_path, "hf:owner/asked@v2:train", "hf:owner/asked@v1:test")
    assert "owner/asked has no revision 'v2'" in online("tasks", task).complaint()
    missing: dict[str, Any] = {"train": "hf:owner/asked@v1", "validation": "hf:owner/asked@v1:test"}
    assert "write hf:dataset/config:split" in online("tasks", task_file(tmp_path, **missing)).complaint()
