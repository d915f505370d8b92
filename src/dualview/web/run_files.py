"""A state of the page as the files and the command lines that give the same numbers.

The page itself computes from these very files (in a temporary folder), so the commands it shows read what it read.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from dualview.io.errors import UserError
from dualview.options import RunOptions
from dualview.tasks.rows import Row
from dualview.web.state import State, TypedRow

TASK, DEMOS, QUERY = "task.yaml", "demos.jsonl", "query.jsonl"
NAME = "typed"


def row_json(row: Row) -> dict[str, Any]:
    """A row of a task as the page edits it (`TypedRow`)."""
    choices = None if row.choices is None else list(row.choices)
    return {"fields": dict(row.fields), "label": row.label, "choices": choices}


def files(state: State) -> dict[str, str]:
    """The task, the demonstrations and the query, each as the text of a file."""
    task = yaml.safe_dump(state.document(NAME), default_style='"', sort_keys=False, allow_unicode=True, width=math.inf)
    return {TASK: task, DEMOS: _lines(state.demos), QUERY: _lines([state.query])}


def _lines(rows: Sequence[TypedRow]) -> str:
    return "".join(json.dumps(row.to_json(), ensure_ascii=False) + "\n" for row in rows)


@contextmanager
def written(state: State, server: Mapping[str, Any]) -> Generator[RunOptions]:
    """The options of a run on the state's files, in a folder that lasts as long as the block.

    `server`: what the server was started with (dtype, device).
    """
    with TemporaryDirectory(prefix="dualview-") as folder:
        place = Path(folder)
        for name, text in files(state).items():
            (place / name).write_text(text, encoding="utf-8", newline="\n")
        own = {"task": str(place / TASK), "demos": place / DEMOS, "queries": place / QUERY}
        try:
            yield RunOptions.make(**_settings(state), **server, **own, n_queries=1)
        except UserError as error:  # the folder's name says nothing to anybody
            raise UserError(str(error).replace(f"{folder}/", "")) from error


def _settings(state: State) -> dict[str, Any]:
    return {"model": state.model, "lr": state.lr, "epochs": state.epochs, "ft_loss": state.ft_loss}


def commands(state: State, server: Mapping[str, Any], drawn: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """The command lines with the same numbers: what each gives, what writes the files it reads (perhaps nothing), and
    the line.

    `drawn`: the options that draw the state's demonstrations from a task, if they are still as drawn.
    """
    needed = [TASK, DEMOS, QUERY] if drawn is None else []
    own = {"task": TASK, "demos": DEMOS} if drawn is None else drawn
    flags = _flags({**_settings(state), **server, **own})
    asking = shlex.quote(query_text(state))
    return [
        {
            "what": "Probabilities and attention, taken apart by token",
            "files": _here(state, needed),
            "line": f"dualview explain {flags} --query {asking}",
        },
        {
            "what": "Similarity by layer, with floors and a ceiling",
            "files": _here(state, needed or [QUERY]),
            "line": f"dualview run {flags} --queries {QUERY} --json result.json",
        },
    ]


def query_text(state: State) -> str:
    """The query as `explain --query` takes it: plain text, or JSON where plain text would be mistaken."""
    values = list(state.query.fields.values())
    plain = len(values) == 1 and state.labels and not values[0].lstrip().startswith("{")
    if plain:
        return values[0]
    choices = {} if state.query.choices is None else {"choices": state.query.choices}
    return json.dumps({**state.query.fields, **choices}, ensure_ascii=False)


def _flags(options: Mapping[str, Any]) -> str:
    defaults = RunOptions()
    always = ("model", "task", "lr", "seed", "shots")
    given = {k: v for k, v in options.items() if k in always or v != getattr(defaults, k)}
    return " ".join(f"--{name.replace('_', '-')} {shlex.quote(_shown(value))}" for name, value in given.items())


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _here(state: State, needed: Sequence[str]) -> str:
    """Here-documents are taken literally; no line of ours is END alone, since each begins with a quote or a brace."""
    text = files(state)
    return "".join(f"cat > {name} <<'END'\n{text[name]}END\n" for name in needed)
