"""Where things are in a store's folder."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from pathlib import Path

KEY, _SHELF = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{2}")
_PACK, _OWN_PACK = re.compile(r"[0-9a-f]{16}"), re.compile(r"\.?[0-9a-f]{16}")
_OWN_UNFINISHED = re.compile(r"[0-9a-f]{64}(\.old)?|probe\.\d+")
_REPLACED = ".old"
_MOUNTS = Path("/proc/self/mountinfo")
_NETWORKS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "panfs", "9p", "fuse.sshfs", "glusterfs")


class StorePaths:
    """The parts of a store's folder.

    SQLite's WAL needs memory that its readers share, which machines on a network file system do not have: there each
    machine has its own index, made from the same cells and packs.
    """

    def __init__(self, root: Path, own: str = "") -> None:
        """`own` is the suffix of this machine's index; empty on a local disk."""
        self.root, self.own = root, own
        self.marker = root / "store.json"
        self.index = root / f"index{own}.sqlite"
        self.packs = root / "packs"
        self.cells = root / "cells"
        self.locks = root / "claims"
        self.unfinished = root / "unfinished"
        self.quarantine = root / "quarantine"
        self.tracked = root / "tracked"

    @classmethod
    def of(cls, root: Path) -> StorePaths:
        return cls(root, f"-{socket.gethostname()}" if _on_network(root) else "")

    def replaced(self, asked: str) -> Path:
        """Where a cell is kept while the same cell with its tensors takes its place."""
        return self.unfinished / f"{asked}{_REPLACED}"

    @staticmethod
    def lock_name(unfinished: Path) -> str:
        """The lock under which an unfinished cell is being written."""
        return unfinished.name.removesuffix(_REPLACED)

    @staticmethod
    def is_replaced(unfinished: Path) -> bool:
        return unfinished.name.endswith(_REPLACED)

    def strangers(self) -> list[Path]:
        """What is among the packs and the unfinished cells and was not made by dualview."""
        own = {self.packs: _OWN_PACK, self.unfinished: _OWN_UNFINISHED}
        found = [path for folder in own if folder.is_dir() for path in folder.iterdir()]
        return sorted(path for path in found if not own[path.parent].fullmatch(path.name))

    def pack_folders(self) -> list[Path]:
        """The packs under their final names."""
        if not self.packs.is_dir():
            return []
        return sorted(path for path in self.packs.iterdir() if _PACK.fullmatch(path.name))

    def cell(self, key: str) -> Path:
        return self.cells / key[:2] / key

    def cell_folders(self) -> tuple[list[str], list[Path]]:
        """The keys of the cells that have folders, in no order, and what is among them and is no cell."""
        keys: list[str] = []
        strangers: list[str] = []
        with suppress(FileNotFoundError), os.scandir(self.cells) as shelves:
            for shelf in shelves:
                if not (_SHELF.fullmatch(shelf.name) and shelf.is_dir()):
                    strangers.append(shelf.path)
                    continue
                with os.scandir(shelf) as cells:
                    for cell in cells:
                        good = KEY.fullmatch(cell.name) and cell.name.startswith(shelf.name) and cell.is_dir()
                        (keys if good else strangers).append(cell.name if good else cell.path)
        return keys, [Path(path) for path in sorted(strangers)]

    def foreign(self) -> list[Path]:
        """What is at the top of the store and is not part of it."""
        own = {
            path.name for path in (self.marker, self.cells, self.locks, self.unfinished, self.quarantine, self.tracked)
        }
        made = re.compile(r"(index.*\.sqlite(-wal|-shm|-journal)?|packs.*|\..*\.lock)")
        return sorted(p for p in self.root.iterdir() if p.name not in own and not made.fullmatch(p.name))


def _on_network(path: Path) -> bool:
    """Whether a folder is on a network file system, as far as /proc knows."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    real, best, kind = path.absolute().resolve(), -1, ""
    for line in lines:
        left, _, right = line.partition(" - ")
        mounted = Path(left.split()[4].replace("\\040", " "))
        if real.is_relative_to(mounted) and len(mounted.parts) >= best:
            best, kind = len(mounted.parts), right.split()[0]
    return kind.startswith(_NETWORKS)
