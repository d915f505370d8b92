"""What a comparison is asked: the task's rows, and their token ids. Needs no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualview.comparison.cache import PassCache, no_cache
from dualview.io.errors import UserError
from dualview.models.reader import Reader
from dualview.options import RunOptions
from dualview.tasks.prompts import PromptSet, Query, build_prompts, encode_queries
from dualview.tasks.rows import Row
from dualview.tasks.sampling import read_rows, sample_demos, sample_queries
from dualview.tasks.task import Task, load_task


@dataclass(frozen=True)
class Inputs:
    """The rows that the options name or draw."""

    task: Task
    demos: Sequence[Row] | None
    """None where the model chooses the seed that draws them."""
    queries: Sequence[Row]


def read_inputs(options: RunOptions, cache: PassCache = no_cache) -> Inputs:
    """Read the task and choose its rows. Every file that the options name must be there: a model may take minutes to
    load, and nothing is wrong with it."""
    named = (options.task, options.data, options.labels)
    task = cache("task", named, lambda: load_task(*named))
    queries = read_rows(task, options.queries) if options.queries else sample_queries(task, options.n_queries)
    demos = read_rows(task, options.demos, "train") if options.demos else None
    if demos is None and options.seed != "auto":
        demos = sample_demos(task, options.seed, options.shots)
    _must_be_readable(options)
    return Inputs(task, demos, queries)


def _must_be_readable(options: RunOptions) -> None:
    for name, value in vars(options).items():
        given: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)  # pyright: ignore[reportUnknownVariableType]
        for path in given:
            if isinstance(path, Path) and not path.exists():
                raise UserError(f"Option --{name.replace('_', '-')}: there is no {path}; check the path.")
    if options.patch is not None or options.adapter:
        from dualview.duality.on_model.shared_patch import read_metadata  # here: they import all that a model needs
        from dualview.learning.adapter_reading import read_config, twin_folder

        for folder in options.adapter:
            read_config(folder)
            twin = twin_folder(folder)
            if twin is not None and options.controls != "none":
                read_config(twin)
        if options.patch is not None:
            read_metadata(options.patch)


def encode(options: RunOptions, reader: Reader, task: Task, demos: Sequence[Row], queries: Sequence[Row]) -> PromptSet:
    """Rows as token ids, with space for all that a run asks after the same demonstrations."""
    return make_prompts(options, reader, task, demos, queries, _content_free(options, reader, task, queries))


def make_prompts(
    options: RunOptions,
    reader: Reader,
    task: Task,
    demos: Sequence[Row],
    queries: Sequence[Row],
    room_for: Sequence[Query] = (),
) -> PromptSet:
    """Rows as token ids, by the options; `room_for` as in `build_prompts`."""
    return build_prompts(
        task,
        reader.tokenizer,
        demos,
        queries,
        bos=options.bos,
        separator=options.separator,
        max_context=reader.room(options.max_context),
        room_for=room_for,
    )


def _content_free(options: RunOptions, reader: Reader, task: Task, rows: Sequence[Row]) -> tuple[Query, ...]:
    """The queries that calibration asks after the same demonstrations."""
    if not options.calibrate:
        return ()
    from dualview.learning.calibration import calibration_queries  # here: it imports all that a model needs

    return calibration_queries(task, reader.tokenizer, encode_queries(task, reader.tokenizer, rows))
