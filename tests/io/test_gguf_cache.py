"""GGUF files converted once: the same numbers, found again by content, bounded, and never in the way of loading."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dualview.cli import main as cli
from dualview.io import hashing
from dualview.io.errors import UserError
from dualview.io.gguf import cache as gguf_cache
from dualview.io.gguf.reading import read_gguf
from dualview.models import loading
from dualview.models.language_model import LanguageModel
from dualview.models.loading import DTYPES, load_model
from dualview.models.packing import memory as packing_memory
from dualview.report.html import prompts
from dualview.store import cell_key as identity
from dualview.store.fingerprint import tokenizer_hash
from tiny_gguf import write_tiny_llama


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DUALVIEW_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(gguf_cache.LIMIT_VARIABLE, raising=False)
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was dequantised, in order."""
    done: list[str] = []

    def counted(path: Path, dtype: Any) -> Any:
        done.append(path.name)
        return read_gguf(path, dtype)

    monkeypatch.setattr(gguf_cache, "read_gguf", counted)
    monkeypatch.setattr(loading, "read_gguf", counted)
    return done


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.startswith("."))


def limit(monkeypatch: pytest.MonkeyPatch, size: int, aside: int = 0) -> None:
    """Bound the cache to so many bytes."""
    monkeypatch.setattr(gguf_cache, "_SPACE_MARGIN", aside)
    monkeypatch.setenv(gguf_cache.LIMIT_VARIABLE, f"{size / 1e9:.9f}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("cache")
def test_the_cached_model_is_the_one_in_the_file_bit_by_bit(gguf: Path, dtype: str, reads: list[str]) -> None:
    direct = read_gguf(gguf, DTYPES[dtype])
    first, second = (load_model(str(gguf), dtype=dtype, device="cpu") for _ in range(2))
    assert reads == ["tiny.gguf"], "the second start dequantised nothing"
    wanted = direct.model.state_dict()
    for lm in (first, second):
        found = lm.model.state_dict()
        assert found.keys() == wanted.keys() and lm.dtype == DTYPES[dtype]
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        assert tokenizer_hash(lm.tokenizer) == tokenizer_hash(direct.tokenizer)
    kept = loading.adopt(direct.model, direct.tokenizer, str(gguf))
    assert second.weights_hash == kept.weights_hash
    assert identity._configuration(second) == identity._configuration(kept)  # pyright: ignore[reportPrivateUsage]
    assert second.name == str(gguf)


def test_a_float32_conversion_serves_every_dtype(cache: Path, gguf: Path, reads: list[str]) -> None:
    load_model(str(gguf), device="cpu")
    for dtype in DTYPES:
        lm = load_model(str(gguf), dtype=dtype, device="cpu")
        wanted = read_gguf(gguf, DTYPES[dtype]).model.state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in lm.model.state_dict().items())
    assert reads == ["tiny.gguf"] and len(entries(cache)) == 1


def test_half_precision_is_kept_in_half_the_room(cache: Path, gguf: Path) -> None:
    load_model(str(gguf), dtype="bfloat16", device="cpu")
    [half] = gguf_cache.conversions()
    load_model(str(gguf), dtype="float32", device="cpu")
    sizes = {each.dtype: (each.path / "model.safetensors").stat().st_size for each in gguf_cache.conversions()}
    assert half.dtype == "bfloat16" and len(entries(cache)) == 2 and sizes["bfloat16"] < 0.6 * sizes["float32"]


def test_it_is_found_by_content(cache: Path, gguf: Path, tmp_path: Path, reads: list[str]) -> None:
    load_model(str(gguf), device="cpu")
    moved = tmp_path / "elsewhere" / "renamed.gguf"
    moved.parent.mkdir()
    shutil.copy(gguf, moved)
    load_model(str(moved), device="cpu")
    assert reads == ["tiny.gguf"]
    write_tiny_llama(gguf, seed=1)  # another file under the same name
    lm = load_model(str(gguf), device="cpu")
    assert reads == ["tiny.gguf", "tiny.gguf"] and len(entries(cache)) == 2
    wanted = read_gguf(gguf, torch.float32).model.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in lm.model.state_dict().items())


def test_a_hash_is_remembered_until_the_file_changes(cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    hashed: list[str] = []

    def spy(path: Path) -> str:
        hashed.append(path.name)
        return real(path)

    real = gguf_cache.sha256_of
    monkeypatch.setattr(gguf_cache, "sha256_of", spy)
    first = gguf_cache._content(gguf)  # pyright: ignore[reportPrivateUsage]
    assert gguf_cache._content(gguf) == first and len(hashed) == 2, "too fresh to be remembered"  # pyright: ignore
    monkeypatch.setattr(gguf_cache, "_SETTLED", -1.0)
    assert [gguf_cache._content(gguf) for _ in range(3)] == [first] * 3 and len(hashed) == 3  # pyright: ignore
    times = gguf.stat()
    content = bytearray(gguf.read_bytes())
    content[-1] ^= 1
    gguf.write_bytes(content)
    os.utime(gguf, ns=(times.st_atime_ns, times.st_mtime_ns))  # the same size and modification time
    assert gguf_cache._content(gguf) == real(gguf) != first  # pyright: ignore[reportPrivateUsage]


@pytest.mark.usefixtures("cache")
def test_another_converter_converts_again(gguf: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    load_model(str(gguf), device="cpu")
    monkeypatch.setattr(gguf_cache, "CONVERTER", gguf_cache.CONVERTER + 1)
    load_model(str(gguf), device="cpu")
    monkeypatch.setattr(gguf_cache, "version", lambda package: f"{package} of another day")
    load_model(str(gguf), device="cpu")
    assert reads == ["tiny.gguf"] * 3


_START = """
import sys
from pathlib import Path
from dualview.io.gguf import cache as gguf_cache
from dualview.io.gguf.reading import read_gguf
from dualview.models.loading import load_model

path, log = Path(sys.argv[1]), Path(sys.argv[2])

def counted(*args):
    with log.open("a") as file:
        file.write("read\\n")
    return read_gguf(*args)

gguf_cache.read_gguf = counted
print("ready", flush=True)
sys.stdin.readline()
print(load_model(str(path), device="cpu").weights_hash)
"""


def test_two_processes_convert_once(cache: Path, gguf: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", _START, str(gguf), str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for start in starts:  # both have their imports behind them before either begins
        assert start.stdout is not None and start.stdout.readline() == "ready\n"
    for start in starts:
        assert start.stdin is not None
        start.stdin.write("go\n")
        start.stdin.flush()
    said = [start.communicate()[0].strip() for start in starts]
    assert [start.returncode for start in starts] == [0, 0]
    assert said[0] == said[1] and len(said[0]) == 64
    assert log.read_text() == "read\n" and len(entries(cache)) == 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "manifest", "manifest gone"])
def test_a_damaged_entry_is_made_again(
    cache: Path, gguf: Path, reads: list[str], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = load_model(str(gguf), device="cpu").weights_hash
    folder = cache / entries(cache)[0]
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "cut":
        weights.write_bytes(content[:-100])
    elif damage == "flipped":
        content[-100] ^= 1
        weights.write_bytes(content)
        os.utime(weights, ns=(1, 1))
    elif damage == "missing":
        (folder / "config.json").unlink()
    elif damage == "manifest":
        (folder / "manifest.json").write_text("{}")
    else:
        (folder / "manifest.json").unlink()
    again = load_model(str(gguf), device="cpu")
    assert reads == ["tiny.gguf"] * 2 and again.weights_hash == whole
    assert "tiny.gguf is damaged" in caplog.text and "it is made again" in caplog.text
    load_model(str(gguf), device="cpu")
    assert reads == ["tiny.gguf"] * 2, "and then it is whole"


def test_a_copied_cache_is_hashed_and_used(
    cache: Path, gguf: Path, tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stamp differs in a copy, so its files are hashed once; after that they are known again."""
    load_model(str(gguf), device="cpu")
    shutil.copytree(cache.parent, tmp_path / "copy")
    monkeypatch.setenv("DUALVIEW_CACHE", str(tmp_path / "copy"))
    hashed: list[str] = []

    def spy(path: Path) -> str:
        hashed.append(path.name)
        return real(path)

    real = gguf_cache.sha256_of
    for module in (gguf_cache, hashing):
        monkeypatch.setattr(module, "sha256_of", spy)
    load_model(str(gguf), device="cpu")
    assert "model.safetensors" in hashed
    hashed.clear()
    load_model(str(gguf), device="cpu")
    assert hashed == ["tiny.gguf"] and reads == ["tiny.gguf"]


def test_an_entry_that_does_not_load_is_removed(
    cache: Path, gguf: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole by its hashes, and yet of no use: the file is read directly."""
    load_model(str(gguf), device="cpu")
    folder = cache / entries(cache)[0]
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 2}))
    monkeypatch.setattr(gguf_cache, "_problem", lambda folder: None)
    assert load_model(str(gguf), device="cpu").weights_hash
    assert "could not be loaded and is removed" in caplog.text and reads == ["tiny.gguf"] * 2 and not entries(cache)


def test_the_least_recently_used_go_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = [tmp_path / f"{name}.gguf" for name in "abc"]
    for seed, path in enumerate(files):
        write_tiny_llama(path, seed=seed)
    for age, path in enumerate(files[:2]):
        load_model(str(path), device="cpu")
        [entry] = [each for each in gguf_cache.conversions() if each.source == path.name]
        os.utime(entry.path / "manifest.json", (1000 + age, 1000 + age))
    size = gguf_cache.conversions()[0].size
    load_model(str(files[0]), device="cpu")  # used again: b is the older one now
    limit(monkeypatch, int(2.5 * size))
    load_model(str(files[2]), device="cpu")
    assert {each.source for each in gguf_cache.conversions()} == {"a.gguf", "c.gguf"} and len(entries(cache)) == 2
    assert "Removed the cached conversion of b.gguf" in caplog.text and gguf_cache.LIMIT_VARIABLE in caplog.text
    assert sum(each.size for each in gguf_cache.conversions()) <= 2.5 * size


def test_a_model_beyond_the_bound_is_used_without_caching(
    cache: Path, gguf: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit(monkeypatch, 1000)
    for _ in range(2):
        assert load_model(str(gguf), device="cpu").fast
    assert reads == ["tiny.gguf"] * 2 and not entries(cache)
    assert "tiny.gguf is used without caching" in caplog.text and gguf_cache.LIMIT_VARIABLE in caplog.text


def test_a_full_disk_is_no_hindrance(
    cache: Path, gguf: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9 - 5000, 5000))
    assert load_model(str(gguf), device="cpu").fast
    assert reads == ["tiny.gguf"] and not entries(cache)
    assert "without caching" in caplog.text and "are free in" in caplog.text


def test_a_disk_that_fills_up_midway_leaves_nothing(
    cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_read: Any, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("I/O error: No space left on device")

    monkeypatch.setattr(gguf_cache, "save_gguf", fail)
    assert load_model(str(gguf), device="cpu").fast
    assert "No space left" in caplog.text and [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_no_cache_is_kept_if_none_is_wanted(
    cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(gguf_cache.LIMIT_VARIABLE, "0")
    assert load_model(str(gguf), device="cpu").fast
    assert not cache.exists() and not caplog.text
    for wrong in ("many", "-1", "inf", "nan"):
        monkeypatch.setenv(gguf_cache.LIMIT_VARIABLE, wrong)
        with pytest.raises(UserError, match=f"{gguf_cache.LIMIT_VARIABLE} is '{wrong}'; give a number of gigabytes"):
            load_model(str(gguf), device="cpu")


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("DUALVIEW_CACHE", str(blocked))
    assert load_model(str(gguf), device="cpu").fast
    assert "tiny.gguf is used without caching" in caplog.text


def test_a_cache_that_can_only_be_read_is_used(
    cache: Path, gguf: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load_model(str(gguf), device="cpu")
    (cache / entries(cache)[0] / "stamps.json").unlink()  # as in a copy: they would be written again

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert load_model(str(gguf), device="cpu").fast
    assert reads == ["tiny.gguf"] and not caplog.text


def test_a_broken_file_is_the_files_fault(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 40)
    with pytest.raises(UserError, match=r"broken\.gguf could not be read"):
        load_model(str(path), device="cpu")
    assert not caplog.text and not entries(cache)


def test_what_a_killed_process_left_is_swept_up(cache: Path, gguf: Path) -> None:
    for name in (".making-1", ".removing-2"):
        (cache / name).mkdir(parents=True)
        (cache / name / "model.safetensors").write_bytes(b"half")
    load_model(str(gguf), device="cpu")
    assert [path.name for path in cache.iterdir() if path.is_dir()] == entries(cache)


def test_assets_lists_and_clears(
    cache: Path, gguf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["dualview", "assets", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert not left.value.code
        return capsys.readouterr().out

    load_model(str(gguf), device="cpu")
    assert "tiny.gguf" in said() and "float32" in said()
    (cache / ".making-killed").mkdir()
    assert "removed 1 cached" in said("clear") and not entries(cache)
    assert not (cache / ".making-killed").exists()
    assert "tiny.gguf" not in said()


def test_a_conversion_that_was_checked_is_not_checked_again(
    cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[torch.dtype] = []

    def spy(lm: LanguageModel) -> str | None:
        checked.append(lm.dtype)
        return real(lm)

    real = loading.slow_because
    monkeypatch.setattr(loading, "slow_because", spy)
    assert [load_model(str(gguf), device="cpu").slow_because for _ in range(3)] == [None] * 3
    assert checked == [torch.float32]
    load_model(str(gguf), dtype="bfloat16", device="cpu")
    assert checked == [torch.float32, torch.bfloat16], "another dtype is another check"
    monkeypatch.setattr(packing_memory, "transformers", SimpleNamespace(__version__="another"))
    load_model(str(gguf), device="cpu")
    assert len(checked) == 3, "and so is another transformers"
    notes = list(cache.glob("*/packing-float32-cpu.json"))
    kept = json.loads(notes[0].read_text())
    notes[0].write_text(json.dumps({**kept, "slow_because": "the note says so"}))
    assert load_model(str(gguf), device="cpu").slow_because == "the note says so"
    notes[0].write_text("{")
    assert load_model(str(gguf), device="cpu").slow_because is None and len(checked) == 4


def test_a_report_reads_the_tokenizer_of_the_conversion(
    cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = tokenizer_hash(prompts._tokenizer(str(gguf)))  # pyright: ignore[reportPrivateUsage]
    assert not cache.exists(), "a report converts nothing"
    load_model(str(gguf), device="cpu")
    assert tokenizer_hash(prompts._tokenizer(str(gguf))) == direct  # pyright: ignore[reportPrivateUsage]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="dualview")


def test_a_conversion_is_readable_by_whoever_may_read_new_files(cache: Path, gguf: Path) -> None:
    before = os.umask(0o022)
    try:
        load_model(str(gguf))
    finally:
        os.umask(before)
    files = [file for file in cache.rglob("*.safetensors") if file.is_file()]
    assert files and all(file.stat().st_mode & 0o777 == 0o644 for file in files)
