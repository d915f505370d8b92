"""The comparison: one model, one task, three settings.

task → demonstrations and queries → prompts → zsl, icl, ft → records → metrics → result
"""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualview.controls.kendall import kendall, taps_of
from dualview.controls.sensitivity import norm_curve, order_report, overlap_report
from dualview.controls.settings import control_settings
from dualview.errors import UserError
from dualview.files import must_be_writable, write_json
from dualview.learning.calibration import calibrated_accuracy, calibration_queries
from dualview.learning.finetune import Recipe, Tuned, finetune, steps_of
from dualview.learning.selection import Trial, best, judge_rates, status_of
from dualview.metrics.prediction import accuracy
from dualview.metrics.summary import compute_metrics, plain
from dualview.models.loading import LanguageModel, load_model
from dualview.models.passes import Asked, Plan, ask
from dualview.options import SEEDS, SELECTION_ROWS, RunOptions
from dualview.progress import Progress, Silent
from dualview.records import Records, Setting, save_records
from dualview.result import Result
from dualview.tasks.prompt import PromptSet, Query, build_prompts, encode_queries, prompts_hash, resolve_bos
from dualview.tasks.rows import Row
from dualview.tasks.sampling import read_rows, sample_demos, sample_queries, selection_rows
from dualview.tasks.task import Task, load_task
from dualview.verdict import judge


def compare(
    *,
    model: str | LanguageModel = "embedded",
    out: Path | str | None = None,
    json: Path | str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Result:
    """Compare zero-shot, in-context and fine-tuned on one task; the options are those of `RunOptions`.

    `model` may be one that is already loaded. With `out`, the result and (`save_records`) the tensors are written
    there; with `json`, the result alone to that file.
    """
    loaded = None if isinstance(model, str) else model
    chosen = RunOptions.make(model=model if loaded is None else loaded.name, **options)
    if chosen.save_records and out is None:
        raise UserError("Saved records need a folder to be written to: give out.")
    for place in (json, None if out is None else Path(out) / "result.json"):
        if place is not None:
            must_be_writable(Path(place))
    result = run(chosen, lm=loaded, progress=progress or Silent())
    write(result, out=None if out is None else Path(out), json=None if json is None else Path(json))
    return result


def write(result: Result, *, out: Path | None, json: Path | None) -> list[Path]:
    """Write what a run found; the records only if it was told to keep them."""
    written: list[Path] = []
    if out is not None:
        written.append(out / "result.json")
        result.save(written[-1])
        if result.records is not None and result.provenance["options"].get("save_records"):
            written.append(out / "records.safetensors")
            save_records(result.records, written[-1])
    if json is not None:
        written.append(json)
        write_json(json, result.to_json())
    return written


@dataclass(frozen=True)
class Prepared:
    """Everything decided before the model is asked anything that is reported."""

    options: RunOptions
    lm: LanguageModel
    task: Task
    seed: int | None
    demos: Sequence[Row]
    """All demonstrations asked for; the prompts hold those that fit."""
    prompts: PromptSet
    seed_trials: list[Trial] = field(default_factory=list[Trial])

    @property
    def zero_shot(self) -> Plan:
        bare = self.prompts.zero_prefix
        return Plan(bare, len(bare), at=self.options.at, batch_size=self.options.batch_size)

    @property
    def in_context(self) -> Plan:
        special = len(self.prompts.zero_prefix)
        return Plan(self.prompts.prefix, special, at=self.options.at, batch_size=self.options.batch_size)


def prepare(options: RunOptions, lm: LanguageModel | None = None, progress: Progress | None = None) -> Prepared:
    """Read the task and the model, choose the demonstrations, and make every prompt."""
    progress = progress or Silent()
    task = load_task(options.task, options.data)
    asked = read_rows(task, options.queries) if options.queries else sample_queries(task, options.n_queries)
    given = read_rows(task, options.demos) if options.demos else None
    if given is None and options.seed != "auto":
        given = sample_demos(task, options.seed, options.shots)  # before the model loads: mistakes show at once
    if lm is None:
        with progress.part(f"loading {options.model}", 1) as advance:
            lm = load_model(
                options.model,
                dtype=options.dtype,
                device=options.device,
                trust_remote_code=options.trust_remote_code,
            )
            advance(1)
    if given is not None:
        seed = None if options.demos else int(options.seed)
        return Prepared(options, lm, task, seed, given, _prompts(options, lm, task, given, asked))
    trials = _seed_trials(options, lm, task, progress)
    seed = SEEDS[best(trials)]
    given = sample_demos(task, seed, options.shots)
    return Prepared(options, lm, task, seed, given, _prompts(options, lm, task, given, asked), trials)


def _prompts(
    options: RunOptions, lm: LanguageModel, task: Task, demos: Sequence[Row], queries: Sequence[Row]
) -> PromptSet:
    return build_prompts(
        task,
        lm.tokenizer,
        demos,
        queries,
        bos=options.bos,
        separator=options.separator,
        max_context=_context(options, lm),
        room_for=_content_free(options, lm, task, queries),
    )


def _content_free(options: RunOptions, lm: LanguageModel, task: Task, rows: Sequence[Row]) -> tuple[Query, ...]:
    """What calibration will ask behind the same demonstrations."""
    if not options.calibrate:
        return ()
    return calibration_queries(task, lm, encode_queries(task, lm.tokenizer, rows))


def _seed_trials(options: RunOptions, lm: LanguageModel, task: Task, progress: Progress) -> list[Trial]:
    """ICL accuracy of each seed's demonstrations on the selection rows."""
    rows = _fitting(options, lm, task)
    trials: list[Trial] = []
    with progress.part("choosing the seed", len(SEEDS) * len(rows)) as advance:
        for seed in SEEDS:
            prompts = _prompts(options, lm, task, sample_demos(task, seed, options.shots), rows)
            how = Plan(prompts.prefix, len(prompts.zero_prefix), record=False, batch_size=options.batch_size)
            scores = ask(lm, prompts.queries, how, progress=advance).settings[0].log_probs
            gold = np.array([query.gold for query in prompts.queries])
            trials.append(Trial(seed, accuracy(scores, gold), "ok"))
    return trials


@dataclass(frozen=True)
class FineTuning:
    """The fine-tuned model that is reported, and how its learning rate was come by."""

    tuned: Tuned
    trials: list[Trial]


def fine_tune(prepared: Prepared, progress: Progress) -> FineTuning:
    """Train at the given rate, or at every rate of the grid and keep the best on the selection rows."""
    options, lm, prompts = prepared.options, prepared.lm, prepared.prompts
    recipe = recipe_of(options)
    rates = options.lr_grid if options.lr == "auto" else (options.lr,)
    steps = len(steps_of(prompts.training_sequences, recipe)) * len(rates)
    what = f"fine-tuning ({len(rates)} learning rates)" if len(rates) > 1 else "fine-tuning"
    selection = selection_queries(prepared) if options.lr == "auto" else ()
    with progress.part(what, steps) as advance:
        tuned = finetune(lm, prompts.training_sequences, rates, recipe, advance)
    if options.lr != "auto":
        return FineTuning(tuned[0], [])
    with progress.part("choosing the learning rate", len(selection)) as advance:
        trials = judge_rates(lm, tuned, selection, prepared.zero_shot, advance)
    return FineTuning(tuned[best(trials)], trials)


def selection_queries(prepared: Prepared) -> tuple[Query, ...]:
    """The selection rows as queries, without those too long for the context."""
    return encode_queries(prepared.task, prepared.lm.tokenizer, _fitting(prepared.options, prepared.lm, prepared.task))


def _fitting(options: RunOptions, lm: LanguageModel, task: Task) -> list[Row]:
    """The selection rows that fit the context; whatever may be reported, or is shown, chooses nothing."""
    given = [row for path in (options.queries, options.demos) if path is not None for row in read_rows(task, path)]
    known = {task.render(row) for row in (*given, *task.rows("validation"))}
    rows = [row for row in selection_rows(task, SELECTION_ROWS) if task.render(row) not in known]
    limit, special = _context(options, lm), int(resolve_bos(lm.tokenizer, options.bos) is not None)
    queries = encode_queries(task, lm.tokenizer, rows)
    fitting = [r for r, q in zip(rows, queries, strict=True) if limit is None or special + q.longest <= limit]
    if not fitting:
        raise UserError(
            f"Task {task.name} has no selection row that fits the context and is neither asked nor shown; "
            "give --lr and --seed as numbers."
        )
    return fitting


def _context(options: RunOptions, lm: LanguageModel) -> int | None:
    """How many positions may be used."""
    return min((limit for limit in (lm.context, options.max_context) if limit is not None), default=None)


def recipe_of(options: RunOptions) -> Recipe:
    return Recipe(options.ft_params, options.ft_loss, options.epochs, options.ft_rule)


def run(options: RunOptions, *, lm: LanguageModel | None = None, progress: Progress | None = None) -> Result:
    """One comparison from options to result."""
    progress = progress or Silent()
    clock = _Clock()
    prepared = prepare(options, lm, progress)
    lm, queries = prepared.lm, prepared.prompts.queries
    clock.lap("prepare")

    def asking(name: str, how: Plan, patch: Any = None) -> Asked:
        with progress.part(f"{name}: asking {len(queries)} queries", len(queries)) as advance:
            found = ask(lm, queries, how, patch, advance)
        clock.lap(name)
        return found

    watched = options.controls != "none"
    bare = replace(prepared.zero_shot, taps=taps_of(lm.anatomy) if watched else ())
    passes = {"zsl": asking("zsl", bare)}
    passes["icl"] = asking("icl", replace(prepared.in_context, demo_logits=watched))
    learnt = fine_tune(prepared, progress)
    clock.lap("fine-tuning")
    passes["ft"] = asking("ft", bare, learnt.tuned.patch)
    if options.patch is not None:
        from dualview.compile import load_patch  # it stands on this module

        passes["patch"] = asking("patch", prepared.zero_shot, load_patch(options.patch, lm))
    controlled = _controlled(prepared, learnt, passes, progress) if watched else Controlled()
    clock.lap("controls")
    records = Records(
        gold=np.array([query.gold for query in queries]),
        settings={**{name: asked.settings[0] for name, asked in passes.items()}, **controlled.settings},
        columns=passes["zsl"].columns,
        meta={"task": prepared.task.name, "model": lm.name},
    )
    extra: dict[str, Any] = dict(controlled.report)
    if watched:
        verdict = judge(records)
        extra |= {"controls": verdict.controls_json(), "verdict": verdict.to_json()}
        clock.lap("verdict")
    if options.calibrate:
        extra["calibrated"] = {
            "accuracy": calibrated_accuracy(
                prepared.task,
                lm,
                queries,
                records.settings,
                {
                    "zsl": (prepared.zero_shot, None),
                    "icl": (prepared.in_context, None),
                    "ft": (prepared.zero_shot, learnt.tuned.patch),
                },
            )
        }
    result = _result(prepared, learnt, records, extra, clock)
    result._records = records  # pyright: ignore[reportPrivateUsage]
    return result


@dataclass(frozen=True)
class Controlled:
    """The controls' settings, and what else they found, by the result's key."""

    settings: dict[str, Setting] = field(default_factory=dict[str, Setting])
    report: dict[str, Any] = field(default_factory=dict[str, Any])


def _controlled(prepared: Prepared, learnt: FineTuning, passes: dict[str, Asked], progress: Progress) -> Controlled:
    full, lr, recipe = prepared.options.controls == "full", learnt.tuned.lr, recipe_of(prepared.options)
    settings, made, skipped = control_settings(prepared, lr, recipe, full=full, progress=progress)
    report: dict[str, Any] = {}
    with progress.part("attention to training tokens", 1) as advance:
        ranks = kendall(prepared.lm, prepared.prompts, recipe, lr, passes["icl"], passes["ft"], passes["zsl"])
        report["kendall"] = None if ranks is None else ranks.to_json()
        advance(1)
    report["overlap"] = overlap_report({**passes, "icl_reordered": made["icl_reordered"]})
    report["controls_skipped"] = skipped
    if full:
        with progress.part("order sensitivity and step size", 3) as advance:
            report["order_sensitivity"] = order_report(prepared, lr, recipe)
            advance(1)
            report["norm_curve"] = norm_curve(prepared, recipe, passes["zsl"], passes["icl"])
            advance(1)
            if recipe.params != "all" and recipe.rule == "sgd":
                causal = replace(recipe, rule="layer-causal")
                report["norm_curve"] += norm_curve(prepared, causal, passes["zsl"], passes["icl"])
            advance(1)
    return Controlled(settings, report)


def _result(prepared: Prepared, learnt: FineTuning, records: Records, extra: dict[str, Any], clock: _Clock) -> Result:
    options, prompts = prepared.options, prepared.prompts
    measured = compute_metrics(records).to_json()
    ft = _ft_part(prepared, learnt, records["ft"])
    warnings = [*_run_warnings(prepared, ft), *measured.pop("warnings")]  # pyright: ignore
    clock.lap("metrics")
    return Result.model_validate(
        {
            "provenance": _provenance(prepared, clock),
            "task": {
                "name": prepared.task.name,
                "shots": prompts.shots,
                "shots_used": prompts.shots_used,
                "n_queries": len(prompts.queries),
                "labels": list(prepared.task.labels),
            },
            **measured,
            **extra,
            "ft": ft,
            "selection": {
                "rows": len(selection_queries(prepared)) if "auto" in (options.lr, options.seed) else 0,
                "lr": [vars(trial) for trial in learnt.trials],
                "seed": [vars(trial) for trial in prepared.seed_trials],
            },
            "warnings": warnings,
            "queries": _queries(records, prompts.queries),
        }
    )


def _ft_part(prepared: Prepared, learnt: FineTuning, setting: Setting) -> dict[str, Any]:
    options, tuned = prepared.options, learnt.tuned
    chosen = next((trial for trial in learnt.trials if trial.value == tuned.lr), None)
    final = tuned.losses[-1]
    return {
        "rule": options.ft_rule,
        "lr": tuned.lr,
        "loss": options.ft_loss,
        "params": options.ft_params,
        "epochs": options.epochs,
        "steps": len(tuned.losses),
        "final_loss": final if np.isfinite(final) else None,
        "losses": [loss if np.isfinite(loss) else None for loss in tuned.losses],
        "status": chosen.status if chosen is not None else status_of(tuned, setting.log_probs),
    }


def _run_warnings(prepared: Prepared, ft: dict[str, Any]) -> list[str]:
    warnings: list[str] = []
    prompts, lm = prepared.prompts, prepared.lm
    if prompts.shots_used < prompts.shots:
        warnings.append(
            f"truncation: {prompts.shots_used} of {prompts.shots} demonstrations fit the context; "
            "in-context learning and fine-tuning both use those."
        )
    if ft["status"] != "ok":
        warnings.append(f"fine-tuning {ft['status']} at learning rate {ft['lr']:g}.")
    if lm.fast and not lm.shares_prefix(len(prompts.prefix), max(query.longest for query in prompts.queries)):
        warnings.append("slow path: rotary positions are scaled by length here; every in-context prompt was run whole.")
    if lm.slow_because is not None:
        warnings.append(f"slow path: {lm.slow_because}; every prompt was run whole.")
    return warnings


def _queries(records: Records, queries: Sequence[Query]) -> list[dict[str, Any]]:
    return [
        {
            "gold": query.gold,
            **{
                name: [plain(score) for score in setting.log_probs[i, : len(query.candidates)]]
                for name, setting in records.settings.items()
            },
        }
        for i, query in enumerate(queries)
    ]


def _provenance(prepared: Prepared, clock: _Clock) -> dict[str, Any]:
    lm, options = prepared.lm, prepared.options
    packages = ("dualview", "torch", "transformers", "tokenizers", "numpy", "scipy", "safetensors")
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "model": lm.name,
        "architecture": type(lm.model).__name__,
        "weights_hash": lm.weights_hash,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": str(lm.device),
        "threads": torch.get_num_threads(),
        "attention": "shared prefix, packed queries" if lm.fast else f"whole prompts: {lm.slow_because}",
        "seeds": {"demos": prepared.seed},
        "prompts_hash": prompts_hash(prepared.prompts),
        "options": options.changed,
        "run": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "seconds": {name: round(seconds, 3) for name, seconds in clock.laps.items()},
        },
    }


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._since
        self._since = now
