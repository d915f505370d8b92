"""Every verb of the command line as a function, with the verb's name and arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dualview.comparison.result import Result
from dualview.comparison.run import run as run_comparison
from dualview.io.atomic import must_be_writable
from dualview.io.errors import UserError
from dualview.io.progress import Progress, Silent
from dualview.models.language_model import LanguageModel
from dualview.models.untrained import redrawn
from dualview.options import RunOptions
from dualview.report.write_outputs import write


def run(
    *,
    model: str | LanguageModel = "embedded",
    out: Path | str | None = None,
    json: Path | str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Result:
    """Compare zero-shot, in-context and fine-tuned on one task; the options are those of `RunOptions`.

    `model` may be one that is already loaded. With `out`, the result, its report and (`save_records`) the tensors are
    written there; with `json`, the result alone to that file. A report or tensors that cannot be written are a warning.
    """
    loaded = None if isinstance(model, str) else model
    chosen = RunOptions.make(model=model if loaded is None else loaded.name, **options)
    if chosen.save_records and out is None:
        raise UserError("Saved records need a folder to be written to: give out.")
    for place in (json, None if out is None else Path(out) / "result.json"):
        if place is not None:
            must_be_writable(Path(place))
    loaded = None if loaded is None else redrawn(loaded, chosen.weights)
    result = run_comparison(chosen, lm=loaded, progress=progress or Silent())
    write(result, out=None if out is None else Path(out), json=None if json is None else Path(json))
    return result
