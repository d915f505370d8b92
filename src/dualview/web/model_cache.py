"""Models and tasks the server was started with, each read once and kept.

Models belong to the thread that computes. Tasks may be read by two threads: at worst both read the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualview.io.assets import about_model, embedded_model
from dualview.io.errors import UserError
from dualview.io.progress import Progress
from dualview.models.language_model import LanguageModel
from dualview.models.loading import load_model
from dualview.tasks.sampling import sample_demos, sample_queries
from dualview.tasks.task import Task, list_tasks, load_task
from dualview.web.run_files import row_json
from dualview.web.state import DrawQuery, State


class ModelCache:
    """What the page can choose by name, and nothing else."""

    def __init__(self, models: Sequence[str], *, data: Path | None = None, dtype: str, device: str) -> None:
        self.models = tuple(dict.fromkeys(models))
        self._data, self.options = data, {"dtype": dtype, "device": device}
        self._loaded: dict[str, LanguageModel] = {}
        self._tasks: dict[str, Task] = {}
        self._names = {task.name for task in list_tasks()}

    def model(self, name: str, progress: Progress) -> LanguageModel:
        """A model by name, loaded on first use."""
        self.check_model(name)
        if name not in self._loaded:
            if name == "embedded":  # fetched and converted on its first use, which the page shows

                def say(message: str) -> None:
                    with progress.part(message, 1):
                        pass

                embedded_model(say)
            with progress.part(f"loading {name}", 1) as advance:
                self._loaded[name] = load_model(name, dtype=self.options["dtype"], device=self.options["device"])
                advance(1)
        return self._loaded[name]

    def about_model(self, name: str, progress: Progress) -> dict[str, Any]:
        """A model's facts, once it is loaded."""
        lm = self.model(name, progress)
        return {
            "model": name,
            "note": about_model(name),
            "architecture": type(lm.model).__name__,
            "parameters": sum(p.numel() for p in lm.model.parameters()),
            "layers": len(lm.anatomy.layers),
            "heads": max(layer.heads for layer in lm.anatomy.layers),
            "context": lm.context,
            "dtype": str(lm.dtype).removeprefix("torch."),
            "device": str(lm.device),
            "slow_because": lm.whole_because,
        }

    def check_model(self, name: str) -> None:
        if name not in self.models:
            raise UserError(
                f"The model {name!r} is not one this server was started with ({', '.join(self.models)}); "
                "start it with --model to add one."
            )

    def task(self, name: str) -> Task:
        """A task of the library, its rows kept once read."""
        if name not in self._names:
            raise UserError(f"There is no task {name!r} in the library; the page lists those there are.")
        if name not in self._tasks:
            self._tasks[name] = load_task(name, self._data_of(name))
        return self._tasks[name]

    def on_hub(self, name: str) -> bool:
        """Whether a task's rows must still be fetched from the hub, which may be slow or fail."""
        return name in self._names and name not in self._tasks and self._where(load_task(name)) == "hub"

    def draw(self, wanted: DrawQuery) -> dict[str, Any]:
        """Demonstrations and one query of a task, as the page edits them."""
        task = self.task(wanted.task)
        queries = sample_queries(task, wanted.query + 1)
        return {
            "demos": [row_json(row) for row in sample_demos(task, wanted.seed, wanted.shots)],
            "query": row_json(queries[wanted.query % len(queries)]),
        }

    def drawn(self, state: State) -> dict[str, Any] | None:
        """The options that draw a state's demonstrations, if they are still exactly what its task gives.

        A task on the hub is not fetched to find out.
        """
        wanted = state.drawn
        if wanted is None or wanted.task not in self._names:
            return None
        if self.on_hub(wanted.task):
            return None
        task = self.task(wanted.task)
        if (state.template, tuple(state.labels), state.separator) != (task.template, task.labels, task.separator):
            return None
        try:
            rows = [row_json(row) for row in sample_demos(task, wanted.seed, wanted.shots)]
        except UserError:  # more shots than the task has rows
            return None
        if rows != [row.model_dump() for row in state.demos]:
            return None
        return {**wanted.model_dump(), "data": self._data_of(wanted.task)}

    def about_tasks(self) -> list[dict[str, Any]]:
        """Every task of the library as the page's list needs it; no rows are read."""
        return [self._about(task) for task in list_tasks()]

    def _about(self, task: Task) -> dict[str, Any]:
        return {
            "name": task.name,
            "template": task.template,
            "fields": list(task.template_fields),
            "labels": list(task.labels),
            "separator": task.separator,
            "where": self._where(task),
            "notes": task.notes,
        }

    def _where(self, task: Task) -> str:
        if self._data_of(task.name) is not None:
            return "folder"
        return "embedded" if task.train.startswith("embedded:") else "hub"

    def _data_of(self, name: str) -> Path | None:
        """The folder the server was given, for the tasks it holds."""
        return self._data if self._data is not None and (self._data / name).is_dir() else None
