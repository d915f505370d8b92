"""Files written whole: what a path may name besides a file, and what stays as it was."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dualview.io.atomic import must_be_writable, whole, write_json, write_text
from dualview.io.errors import UserError
from dualview.io.json_files import save_json


def read_beside(pipe: Path, write: Callable[[], object]) -> bytes:
    """What another reader of a pipe gets of what is written."""
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write()
    reader.join(20)
    return got[0]


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    file, link, again = tmp_path / "other" / "file", tmp_path / "link", tmp_path / "again"
    file.write_text("before")
    link.symlink_to(Path("other") / "file")
    again.symlink_to("link")
    before = file.stat().st_ino
    must_be_writable(again)
    write_text(again, "after")
    assert link.is_symlink() and again.is_symlink() and file.read_text() == "after"
    assert file.stat().st_ino != before  # replaced, not written over
    with pytest.raises(RuntimeError), whole(again) as temporary:
        temporary.write_text("a part")
        raise RuntimeError
    assert file.read_text() == "after" and [*(tmp_path / "other").iterdir()] == [file]


def test_a_link_to_nothing_yet(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "new" / "file")
    must_be_writable(link)
    write_json(link, [1])
    assert link.is_symlink() and json.loads((tmp_path / "new" / "file").read_text()) == [1]


def test_a_link_to_itself_is_one_sentence(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(UserError, match="link cannot be written"):
        must_be_writable(link)
    with pytest.raises(UserError, match="link cannot be written"):
        write_text(link, "text")
    assert link.is_symlink()


@pytest.mark.parametrize("named", ["pipe", "link"])
def test_a_pipe_is_written_into(named: str, pipe: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(pipe)
    place = tmp_path / named
    must_be_writable(place)  # does not wait for a reader
    assert json.loads(read_beside(pipe, lambda: save_json(place, {"a": 1}))) == {"a": 1}
    assert stat.S_ISFIFO(pipe.stat().st_mode) and (tmp_path / "link").is_symlink()


def test_a_format_that_seeks_goes_through_a_pipe(pipe: Path) -> None:
    from safetensors.numpy import load, save_file

    def write() -> None:
        with whole(pipe) as temporary:
            save_file({"a": np.arange(3)}, temporary)

    assert load(read_beside(pipe, write))["a"].tolist() == [0, 1, 2]


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    null, full = tmp_path / "null", tmp_path / "full"
    try:
        for place, minor in ((null, 3), (full, 7)):
            os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        null.write_text("")
    except PermissionError:
        pytest.skip("making a device is not allowed here")
    for place in (null, full):
        must_be_writable(place)
    write_text(null, "text")
    with pytest.raises(UserError, match=r"full cannot be written \(No space left on device\)"):
        write_text(full, "text")
    assert all(stat.S_ISCHR(place.stat().st_mode) for place in (null, full))
    assert sorted(tmp_path.iterdir()) == [full, null]


def test_a_socket_is_refused_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        with pytest.raises(UserError, match="socket is a socket"):
            must_be_writable(Path("socket"))
        with pytest.raises(UserError, match="socket cannot be written"):
            write_text(Path("socket"), "text")
    assert Path("socket").is_socket()


def test_a_folder_keeps_its_sentence(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for place in (tmp_path, tmp_path / "link"):
        with pytest.raises(UserError, match="is a folder; name a file"):
            must_be_writable(place)
