"""Does momentum attention help a language model, and is it the momentum? (Dai et al. 2022, arXiv 2212.10559, section 5)

The paper trains a GPT with and without momentum attention, once each, and takes the lower perplexity as support for
reading attention as gradient descent. Here small GPTs are trained with every variant on the same text, in the same
order, from the same seeds and at the same number of parameters, beside the two controls the paper lacks: the same
moving sum as a plain token shift, and ALiBi's preference for recent tokens. If a control gains as much, the gain is no
evidence for the reading.

A training is one variant with one seed. Processes that share --out share its trainings: give each its own --only (or
--seed), and every one of them writes the table of all that is done.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from filelock import FileLock

from dualview.io.clock import Clock
from dualview.io.errors import UserError
from dualview.io.progress import Progress, Silent
from dualview.lab.gpt.model import NAMES
from dualview.lab.harness import LabResult, Unit, begin, finish, provenance
from dualview.lab.language.report import figures, summarise, tables
from dualview.lab.language.settings import Settings
from dualview.lab.language.training import Bench, missing_checkpoints, run_training, set_up

__all__ = ["Settings", "figures", "language", "tables"]


def language(
    *,
    out: Path | str | None = None,
    json: Path | str | None = None,
    progress: Progress | None = None,
    **given: Any,
) -> LabResult:
    """Train a small GPT with and without each attention variant on plain text, and compare them.

    Same text in the same order, same seeds, equal numbers of parameters. Perplexity on held-out documents read 256, 512
    and 1024 tokens at a time, few-shot accuracy, time and memory.
    """
    settings, clock = begin(Settings, given, out, json, "language")
    progress, folder = progress or Silent(), None if out is None else Path(out)
    bench = set_up(settings, folder, progress)
    _must_match(folder, bench)
    clock.lap("text")
    done: dict[str, dict[str, Any]] = {}
    units: list[Unit] = []
    for name, seed in settings.trainings:
        if _complete(_known(folder).get(f"{name}/{seed}"), settings, folder):
            continue
        unit = Unit(folder, {**bench.decides, "variant": name, "seed": seed}, settings.save_every)
        found = unit.finished()
        if not _complete(found, settings, folder):
            found = unit.finish(run_training(bench, name, seed, unit, folder, progress))
        done[f"{name}/{seed}"] = found
        units.append(unit)
        clock.lap("training")
    # Another process may have finished others meanwhile; none may write between reading and writing.
    locked: AbstractContextManager[Any] = nullcontext() if folder is None else FileLock(folder / ".language.lock")
    with locked:
        result = _result(bench, {**_known(folder), **done}, clock)
        return finish(result, out=out, json=json, tables=tables, figures=figures, units=units)


def _complete(training: dict[str, Any] | None, settings: Settings, out: Path | None) -> TypeGuard[dict[str, Any]]:
    """Whether a training was done and every model that is to be kept of it is there."""
    if training is None:
        return False
    found = training["found"]
    if out is None or found["status"] == "diverged":
        return True
    # A training that the time limit stopped has its last model where it stopped, and none after that.
    wanted = {min(step, found["steps"]) for step in settings.keep_at}
    return not missing_checkpoints(out, found["variant"], found["seed"], wanted)


def _known(out: Path | None) -> dict[str, dict[str, Any]]:
    """The trainings that OUT/language.json tells of."""
    path = None if out is None else out / "language.json"
    if path is None or not path.is_file():
        return {}
    result = LabResult.load(path)
    costs = result.provenance["run"]["cost"]
    keys = [(f"{t['variant']}/{t['seed']}", t) for t in result.results["trainings"]]
    return {key: {"found": found, "cost": costs[key]} for key, found in keys}


def _must_match(out: Path | None, bench: Bench) -> None:
    """Refuse to mix trainings that cannot be compared."""
    path = None if out is None else out / "language.json"
    if path is None or not path.is_file():
        return
    result = LabResult.load(path)
    before, now = result.results.get("decides", {}), {**bench.decides, "torch": torch.__version__}
    if other := sorted(key for key in now if before.get(key) != now[key]):
        raise UserError(
            f"{path} holds trainings with another {', '.join(other)}; choose another --out, or remove that one."
        )


def _result(bench: Bench, done: dict[str, dict[str, Any]], clock: Clock) -> LabResult:
    """All trainings of OUT together, as if one command had run them."""
    order = sorted(done.values(), key=lambda d: (NAMES.index(d["found"]["variant"]), d["found"]["seed"]))
    trainings = [each["found"] for each in order]
    seeds = sorted({training["seed"] for training in trainings})
    names = [name for name in NAMES if any(training["variant"] == name for training in trainings)]
    settings = replace(bench.settings, seed=seeds[0], seeds=len(seeds), only=tuple(names))
    results = {
        "decides": {**bench.decides, "torch": torch.__version__},
        "text": bench.corpus.about,
        "lengths": settings.lengths,
        "held_out_tokens": int((len(bench.held_out) - 1) // settings.context * settings.context),
        **summarise(trainings, settings.lengths),
        "trainings": trainings,
    }
    where = provenance("language", settings, clock, bench.device)
    keys = [f"{training['variant']}/{training['seed']}" for training in trainings]
    where["run"]["cost"] = {key: done[key]["cost"] for key in keys}
    if {tuple(key.split("/")) for key in keys} != {(name, str(seed)) for name, seed in settings.trainings}:
        where["command"] += "  # and others: the trainings of several commands are put together here"
    return LabResult(lab="language", settings=settings.to_json(), seeds=seeds, results=results, provenance=where)
