"""A real Ray cluster of two nodes on this machine: started, used, robbed of a worker, and stopped."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from dualview.io.errors import UserError
from dualview.options import RunOptions
from dualview.store.cell_key import CellIdentity, code_version
from dualview.store.store import Store
from dualview.sweep.engine import Failed, Known
from dualview.sweep.engine_ray import RayEngine, _settled
from dualview.sweep.runner import Summary, sweep
from sweep.study import grid, rows_by_query, rows_on_disk

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ray_start(folder: Path, name: str, *options: str) -> subprocess.Popen[bytes]:
    """`ray start --block …`, returning once the node is up."""
    small = ("--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--block")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--node-ip-address=127.0.0.1", *small, *options]
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    end = time.monotonic() + 120
    while "Ray runtime started" not in log.read_text(errors="replace"):
        assert process.poll() is None and time.monotonic() < end, log.read_text(errors="replace")
        time.sleep(0.1)
    return process


@pytest.fixture(scope="module", autouse=True)
def token() -> Generator[None]:
    """Ray asks for a token of our own, which keeps others on this machine out, and out of our home.

    For every test here: Ray keeps what it found when it was first imported, in whichever test that was.
    """
    before = dict(os.environ)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0")
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def cluster(token: None) -> Generator[str]:
    """The address of a cluster of two nodes with one processor each."""
    folder = Path(tempfile.mkdtemp(prefix="dv"))  # Unix sockets need a short path
    address = f"127.0.0.1:{free_port()}"
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        first = (
            "--head",
            f"--port={address.rpartition(':')[2]}",
            "--include-dashboard=false",
            f"--temp-dir={folder}/r",
        )
        nodes.append(ray_start(folder, "head", *first))
        nodes.append(ray_start(folder, "second", f"--address={address}"))
        yield address
    finally:
        for node in reversed(nodes):
            node.terminate()
        for node in nodes:
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def workers() -> dict[int, int]:
    """The processes of our workers, and the node (raylet) each belongs to."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        try:
            name = (folder / "cmdline").read_bytes().split(b"\0")[0]
            if folder.name.isdecimal() and name.startswith(b"ray::RemoteWorker"):
                stat = (folder / "stat").read_text()
                found[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def spec(base: dict[str, Any]) -> dict[str, Any]:
    return grid(base, seed=[1, 2, 3, 4], lr=[0.01, 0.02, 0.03], controls=["none", "quick"])


@pytest.fixture(scope="module")
def undisturbed(spec: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "undisturbed"
    assert sweep(spec, store, threads=1).computed == 24
    return store


class Background:
    """A sweep over Ray in a thread, so that the test can watch it and do it harm."""

    def __init__(self, spec: dict[str, Any], store: Path, address: str, **more: Any) -> None:
        self.summary: Summary | None = None
        self.store = store

        def run() -> None:
            self.summary = sweep(spec, store, engine="ray", address=address, **more)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def wait_for_cells(self, count: int) -> None:
        end = time.monotonic() + 120
        while len(list(self.store.glob("cells/*/*"))) < count:
            assert self.thread.is_alive() and time.monotonic() < end
            time.sleep(0.02)

    def done(self) -> Summary:
        self.thread.join(240)
        assert self.summary is not None
        return self.summary


def test_two_nodes_and_a_killed_worker(cluster: str, spec: dict[str, Any], undisturbed: Path, tmp_path: Path) -> None:
    sweeping = Background(spec, tmp_path / "store", cluster)
    sweeping.wait_for_cells(3)
    victim = sorted(workers())[0]
    nodes = set(workers().values())
    os.kill(victim, signal.SIGKILL)
    while sweeping.thread.is_alive():
        nodes |= set(workers().values())
        time.sleep(0.1)
    summary = sweeping.done()
    assert (summary.computed, summary.failed) == (24, ())
    assert len(nodes) == 2 and workers() == {}  # both had a worker, and none is left
    assert rows_on_disk(tmp_path / "store") == rows_on_disk(undisturbed)
    assert rows_by_query(tmp_path / "store") == rows_by_query(undisturbed)


def test_failures_and_tensors_come_back(cluster: str, base: dict[str, Any], tmp_path: Path) -> None:
    """One worker, which is killed and may not try its cell again, a model that is not there, and records to be kept."""
    both = grid(base, model=["./nowhere", base["model"]], seed=[1, 2, 3, 4, 5, 6, 7, 8], save_records=True)
    sweeping = Background(both, tmp_path / "store", cluster, retries=0, workers=1)
    sweeping.wait_for_cells(2)
    os.kill(next(iter(workers())), signal.SIGKILL)
    summary = sweeping.done()
    reasons = [given_up.reason for given_up in summary.failed]
    lost = [reason for reason in reasons if "Its worker was lost 1 times" in reason]
    absent = [reason for reason in reasons if "There is no model folder ./nowhere" in reason]
    assert len(absent) == 8 and len(lost) <= 1 and len(reasons) == len(absent) + len(lost)
    assert summary.computed == 8 - len(lost)
    with Store(tmp_path / "store") as store:
        for stored in store.results():
            records = store.records(stored.key)
            assert records is not None and records["ft"].h is not None


def test_a_cell_that_fits_no_node_is_refused(cluster: str, base: dict[str, Any], tmp_path: Path) -> None:
    """Two nodes of one processor are two processors, and no place for a cell of two: it would wait for ever."""
    with pytest.raises(UserError, match="No node of the cluster holds one cell of 2 processors and 0 GPUs"):
        sweep(base, tmp_path / "store", engine="ray", address=cluster, cpus=2)


def test_a_worker_with_other_code_is_refused() -> None:
    options = RunOptions.make()

    def found(code: str) -> CellIdentity:
        texts = dict.fromkeys(("model", "weights", "configuration", "dtype", "device", "attention", "prompts"), "")
        return CellIdentity(
            **texts, tokenizer="", remote_code=None, task="", settings={}, patch=None, library=None, code=code
        )

    same, other = found(code_version()), found("numerics 0, torch 1")
    refused = _settled(options, other, lambda *_: True)
    assert (
        isinstance(refused, Failed)
        and "other versions than this process (numerics 0, torch 1; here numerics" in refused.reason
    )
    assert _settled(options, same, lambda *_: False) == same and _settled(options, same, lambda *_: True) == Known(same)

    def unreadable(*_: object) -> bool:
        raise UserError("It is of a later dualview.")

    assert _settled(options, same, unreadable) == Failed("It is of a later dualview.")


class SmallCluster:
    """What the engine asks Ray before it starts anything."""

    exceptions = None

    def __init__(self) -> None:
        self.up = False

    def is_initialized(self) -> bool:
        return self.up

    def init(self, **_: object) -> None:
        self.up = True

    def shutdown(self) -> None:
        self.up = False

    def nodes(self) -> list[dict[str, Any]]:
        """One with two GPUs, one without, and one that has died."""
        return [
            {"Alive": True, "Resources": {"CPU": 3.0, "GPU": 2.0}},
            {"Alive": True, "Resources": {"CPU": 2.0}},
            {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
        ]


@pytest.mark.parametrize(
    ("wanted", "room"),
    [
        ({}, 2),
        ({"gpus": 0}, 5),
        ({"gpus": 0.5}, 3),
        ({"cpus": 0.1, "gpus": 0}, 50),
        ({"cpus": 2, "gpus": 0}, 2),
        ({"cpus": 3}, 1),
        ({"workers": 1}, 1),
        ({"cpus": 0, "gpus": 0, "workers": 3}, 3),
        ({"cpus": 4, "gpus": 0}, None),
        ({"cpus": 8}, None),
        ({"gpus": 3}, None),
    ],
)
def test_as_many_cells_as_fit(wanted: dict[str, Any], room: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SmallCluster()
    monkeypatch.setitem(sys.modules, "ray", ray)
    engine = RayEngine(**wanted)
    if room is None:
        with pytest.raises(UserError, match="No node of the cluster holds one cell"):
            engine.run(iter(()), lambda *_: None, lambda *_: False)
        assert not ray.up  # what was started is stopped
    else:
        assert engine._room() == room


def test_ray_is_optional(base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "ray", None)
        with pytest.raises(UserError, match=r"dualview\[ray\]"):
            sweep(base, tmp_path / "store", engine="ray")

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Could not find any running Ray instance") from OSError("connection refused")

    import ray

    monkeypatch.setattr(ray, "init", unreachable)
    engine = RayEngine(address="10.0.0.1:6379")
    with pytest.raises(UserError, match=r"at 10\.0\.0\.1:6379 \(connection refused\); start one with `ray start"):
        engine.run(iter(()), lambda *_: None, lambda *_: False)
