"""Where things lie in a store's folder."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

KEY, _SHELF = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{2}")
_OWN_PACK = re.compile(r"\.?[0-9a-f]{16}")
_OWN_UNFINISHED = re.compile(r"[0-9a-f]{64}(\.old)?|probe\.\d+")
_REPLACED = ".old"
_MOUNTS = Path("/proc/self/mountinfo")
_NETWORKS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "panfs", "9p", "fuse.sshfs", "glusterfs")


@dataclass(frozen=True)
class Listing:
    """The keys of the cells' folders, in no order, and what lies among them and is none."""

    keys: list[str]
    strangers: list[Path]


@dataclass(frozen=True)
class Places:
    """The parts of a store.

    SQLite's WAL needs memory shared between its readers, which machines on a network file system do not have: there
    each has an index and packs of its own, made from the same cells.
    """

    root: Path
    own: str = ""
    """What sets this machine's index and packs apart; nothing on a local disk."""

    @classmethod
    def of(cls, root: Path) -> Places:
        return cls(root, f"-{socket.gethostname()}" if _on_network(root) else "")

    @property
    def marker(self) -> Path:
        return self.root / "store.json"

    @property
    def index(self) -> Path:
        return self.root / f"index{self.own}.sqlite"

    @property
    def packs(self) -> Path:
        return self.root / f"packs{self.own}"

    @property
    def cells(self) -> Path:
        return self.root / "cells"

    @property
    def claims(self) -> Path:
        return self.root / "claims"

    @property
    def unfinished(self) -> Path:
        return self.root / "unfinished"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def tracked(self) -> Path:
        return self.root / "tracked"

    def replaced(self, asked: str) -> Path:
        """Where a cell lies while one with its tensors takes its place."""
        return self.unfinished / f"{asked}{_REPLACED}"

    @staticmethod
    def claimed(unfinished: Path) -> str:
        """The claim under which something unfinished is being written."""
        return unfinished.name.removesuffix(_REPLACED)

    @staticmethod
    def is_replaced(unfinished: Path) -> bool:
        return unfinished.name.endswith(_REPLACED)

    def strangers(self) -> list[Path]:
        """What lies among the packs and what is unfinished, and was not made there by dualview."""
        own = {self.packs: _OWN_PACK, self.unfinished: _OWN_UNFINISHED}
        found = [path for folder in own if folder.is_dir() for path in folder.iterdir()]
        return sorted(path for path in found if not own[path.parent].fullmatch(path.name))

    def cell(self, key: str) -> Path:
        return self.cells / key[:2] / key

    def listing(self) -> Listing:
        """What lies among the cells."""
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
        return Listing(keys, [Path(path) for path in sorted(strangers)])

    def foreign(self) -> list[Path]:
        """What lies at the top of the store and is no part of it."""
        own = ("store.json", "cells", "claims", "unfinished", "quarantine", "tracked")
        made = re.compile(r"(index.*\.sqlite(-wal|-shm|-journal)?|packs.*|\..*\.lock)")
        return sorted(p for p in self.root.iterdir() if p.name not in own and not made.fullmatch(p.name))


def _on_network(path: Path) -> bool:
    """Whether a folder is on a network file system, as far as the system says."""
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
