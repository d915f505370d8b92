"""Logging finished cells to an experiment tracker: TensorBoard, trackio or Weights & Biases, if asked for.

Each cell is one run there: its options are the run's configuration, the numbers of its row the run's metrics. If a
tracker fails, the sweep goes on and the store is complete.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from dualview.io.errors import UserError
from dualview.io.saving import cause_of
from dualview.store.cell import NewCell
from dualview.store.cell_key import asked_id
from dualview.store.store import Store
from dualview.store.tables import KeyedResult, tables_of

PROJECT = "dualview"


class Tracker(ABC):
    """One tracker for the length of a sweep."""

    name: ClassVar[str]
    module: ClassVar[str]

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        self.folder = store.paths.tracked / self.name
        """Where its files go, if that can be chosen."""
        self.group = store.path.absolute().name
        self._say, self._working = say, True
        try:
            self.library: Any = importlib.import_module(self.module)
        except ImportError as error:
            raise UserError(
                f"--track {self.name} needs a package ({error}); run `pip install 'dualview[track]'`."
            ) from error
        except Exception as error:  # before the first cell, so stopping loses nothing
            raise UserError(
                f"--track {self.name} cannot be used ({cause_of(error)}); leave it out, or install it again."
            ) from error

    def log(self, cell: NewCell) -> None:
        """Log a finished cell; after the first failure, which is reported, the tracker is not used again."""
        if not self._working:
            return
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output is for the sweep itself
                self._log(cell.identity.key, config_of(cell), numbers_of(cell))
        except (Exception, SystemExit) as error:  # a library may exit where it cannot log in
            self._working = False
            self._say(f"{self.name} failed ({cause_of(error)}) and is left out from now on; the store is not affected")

    @abstractmethod
    def _log(self, key: str, config: dict[str, Any], numbers: dict[str, float]) -> None: ...


class TensorBoard(Tracker):
    """`tensorboard --logdir STORE/tracked/tensorboard` shows it."""

    name, module = "tensorboard", "torch.utils.tensorboard"

    def _log(self, key: str, config: dict[str, Any], numbers: dict[str, float]) -> None:
        with self.library.SummaryWriter(str(self.folder / key[:16])) as writer:
            for name, value in numbers.items():
                writer.add_scalar(name, value)
            writer.add_text("options", "\n".join(f"    {name}: {value}" for name, value in config.items()))


class Trackio(Tracker):
    """`trackio show --project dualview` shows it; trackio itself says where it keeps it (TRACKIO_DIR)."""

    name, module = "trackio", "trackio"

    def _log(self, key: str, config: dict[str, Any], numbers: dict[str, float]) -> None:
        self.library.init(project=PROJECT, name=key[:16], group=self.group, config=config)
        self.library.log(numbers)
        self.library.finish()


class WandB(Tracker):
    """Online, or with WANDB_MODE=offline in STORE/tracked/wandb, for `wandb sync`."""

    name, module = "wandb", "wandb"

    def _log(self, key: str, config: dict[str, Any], numbers: dict[str, float]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        run = self.library.init(
            project=PROJECT,
            id=key[:32],
            name=key[:16],
            group=self.group,
            config=config,
            dir=str(self.folder),
            resume="allow",
            reinit="finish_previous",
            settings=self.library.Settings(silent=True),
        )
        run.log(numbers)
        run.finish()


TRACKERS: dict[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, Trackio, WandB)}


def must_be_trackers(names: Sequence[str]) -> None:
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"There is no tracker {name!r}; the trackers are {', '.join(TRACKERS)}.")


def open_trackers(names: Sequence[str], store: Store, say: Callable[[str], None]) -> list[Tracker]:
    """The trackers of these names."""
    return [TRACKERS[name](store, say) for name in dict.fromkeys(names)]


def config_of(cell: NewCell) -> dict[str, Any]:
    given = {name: value for name, value in vars(cell.options).items() if value is not None}
    return {name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in given.items()}


def numbers_of(cell: NewCell) -> dict[str, float]:
    """The numbers of the cell's row that are defined."""
    row = tables_of(KeyedResult("", asked_id(cell.options), "", cell.options, cell.result))["cells"].to_pylist()[0]
    asked = vars(cell.options)
    return {name: value for name, value in row.items() if isinstance(value, float) and name not in asked}
