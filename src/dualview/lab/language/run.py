"""Does momentum attention help a language model, and is it the momentum? (Dai et al. 2022, arXiv 2212.10559, section 5)

The paper trains a GPT with and without momentum attention, once each, and takes the lower perplexity as support for
reading attention as gradient descent. Here small GPTs are trained with every variant on the same text, in the same
order, from the same seeds and with the same number of parameters, and with the two controls the paper lacks: the same
moving sum as a plain token shift, and ALiBi's preference for recent tokens. If a control gains as much, the gain is no
evidence for that reading.

A training is one variant with one seed. Processes that share --out share its trainings: give each its own --only (or
--seed); each of them writes the table of all finished trainings.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from filelock import FileLock

from dualview.io.errors import UserError
from dualview.lab.gpt.model import NAMES
from dualview.lab.harness import Findings, Job, LabResult, command_line, lab
from dualview.lab.language.report import figures, summarise, tables
from dualview.lab.language.settings import LanguageSettings
from dualview.lab.language.training import Bench, missing_checkpoints, run_training, set_up
from dualview.lab.units import Unit


@lab(LanguageSettings, tables, figures)
def language(job: Job[LanguageSettings]) -> Findings:
    """Train a small GPT with and without each attention variant on plain text, and compare them.

    Same text in the same order, same seeds, equal numbers of parameters. Perplexity on held-out documents read 256, 512
    and 1024 tokens at a time, few-shot accuracy, time and memory.
    """
    settings, folder = job.settings, job.out
    bench = set_up(settings, folder, job.progress)
    _must_match(folder, bench)
    job.clock.lap("text")
    done: dict[str, dict[str, Any]] = {}
    for name, seed in settings.trainings:
        if _complete(_known(folder).get(f"{name}/{seed}"), settings, folder):
            continue
        unit = Unit(folder, {**bench.decides, "variant": name, "seed": seed}, settings.save_every)
        job.units.append(unit)
        found = unit.finished()
        if not _complete(found, settings, folder):
            found = unit.finish(run_training(bench, name, seed, unit, folder, job.progress))
        done[f"{name}/{seed}"] = found
        job.clock.lap("training")
    # Another process may have finished other trainings meanwhile; none may write between this read and our write.
    if folder is not None:
        job.until_written.enter_context(FileLock(folder / ".language.lock"))
    return _findings(bench, {**_known(folder), **done})


def _complete(
    training: dict[str, Any] | None, settings: LanguageSettings, out: Path | None
) -> TypeGuard[dict[str, Any]]:
    """Whether a training is finished and all its models to keep are there."""
    if training is None:
        return False
    found = training["found"]
    if out is None or found["status"] == "diverged":
        return True
    # A training that the time limit stopped has its last model where it stopped, and none after that.
    wanted = {min(step, found["steps"]) for step in settings.keep_at}
    return not missing_checkpoints(out, found["variant"], found["seed"], wanted)


def _before(out: Path | None) -> LabResult | None:
    """What OUT/language.json holds."""
    path = None if out is None else out / "language.json"
    return LabResult.load(path) if path is not None and path.is_file() else None


def _known(out: Path | None) -> dict[str, dict[str, Any]]:
    """The trainings in OUT/language.json."""
    if (result := _before(out)) is None:
        return {}
    costs = result.provenance["run"]["cost"]
    keys = [(f"{t['variant']}/{t['seed']}", t) for t in result.results["trainings"]]
    return {key: {"found": found, "cost": costs[key]} for key, found in keys}


def _must_match(out: Path | None, bench: Bench) -> None:
    """Refuse to mix trainings that cannot be compared."""
    if out is None or (result := _before(out)) is None:
        return
    before, now = result.results.get("decides", {}), {**bench.decides, "torch": torch.__version__}
    if other := sorted(key for key in now if before.get(key) != now[key]):
        raise UserError(
            f"{out / 'language.json'} holds trainings with another {', '.join(other)}; choose another --out, or remove "
            "that one."
        )


def _findings(bench: Bench, done: dict[str, dict[str, Any]]) -> Findings:
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
    keys = [f"{training['variant']}/{training['seed']}" for training in trainings]
    facts: dict[str, Any] = {}
    if {tuple(key.split("/")) for key in keys} != {(name, str(seed)) for name, seed in settings.trainings}:
        facts["command"] = f"{command_line('language', settings)}  # and others: trainings of several commands"
    costs = {"cost": {key: done[key]["cost"] for key in keys}}
    return Findings(results, facts, costs, bench.device, settings, seeds)
