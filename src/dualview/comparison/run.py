"""The comparison: one model, one task, three settings.

task → demonstrations and queries → prompts → zsl, icl, ft → records → metrics → result
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dualview.comparison.assembly import assemble
from dualview.comparison.cache import Recall, afresh
from dualview.comparison.controls.kendall import kendall, taps_of
from dualview.comparison.controls.sensitivity import norm_curve, order_report, overlap_controls, overlap_report
from dualview.comparison.controls.settings import RULE_CONTROLS, control_settings
from dualview.comparison.provenance import provenance
from dualview.comparison.result import AskedPrompts, Result
from dualview.comparison.verdict import judge
from dualview.io.atomic import must_be_writable
from dualview.io.clock import Clock
from dualview.io.errors import UserError
from dualview.io.progress import Advance, Progress, Silent
from dualview.learning.calibration import calibrated_accuracy, calibration_queries
from dualview.learning.finetune import Recipe, Rule, Tuned, finetune, steps_of
from dualview.learning.selection import Trial, best, judge_rates
from dualview.metrics.controls import MetricControls
from dualview.metrics.predictions import accuracy
from dualview.models.loading import LanguageModel, load_model
from dualview.models.scoring import Asked, Plan, ask
from dualview.models.untrained import redrawn
from dualview.options import SEEDS, SELECTION_ROWS, RunOptions
from dualview.records import Records, Setting
from dualview.tasks.prompts import PromptSet, Query, build_prompts, encode_queries, resolve_bos
from dualview.tasks.rows import Row
from dualview.tasks.sampling import read_rows, sample_demos, sample_queries, selection_rows
from dualview.tasks.task import Task, load_task


def compare(
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
    from dualview.report.write_outputs import (
        write,  # it stands on this module; before the work, since an import may fail
    )

    loaded = None if loaded is None else redrawn(loaded, chosen.weights)
    result = run(chosen, lm=loaded, progress=progress or Silent())
    write(result, out=None if out is None else Path(out), json=None if json is None else Path(json))
    return result


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
    recall: Recall = afresh

    @property
    def zero_shot(self) -> Plan:
        bare = self.prompts.zero_prefix
        return Plan(bare, len(bare), at=self.options.at, batch_size=self.options.batch_size)

    @property
    def in_context(self) -> Plan:
        special = len(self.prompts.zero_prefix)
        return Plan(self.prompts.prefix, special, at=self.options.at, batch_size=self.options.batch_size)


def prepare(
    options: RunOptions,
    lm: LanguageModel | None = None,
    progress: Progress | None = None,
    recall: Recall = afresh,
) -> Prepared:
    """Read the task and the model, choose the demonstrations, and make every prompt."""
    progress = progress or Silent()
    task = recall("task", (options.task, options.data), lambda: load_task(options.task, options.data))
    asked = read_rows(task, options.queries) if options.queries else sample_queries(task, options.n_queries)
    given = read_rows(task, options.demos) if options.demos else None
    if given is None and options.seed != "auto":
        given = sample_demos(task, options.seed, options.shots)  # before the model loads: mistakes show at once
    lm = lm or load(options, progress)
    if given is not None:
        seed = None if options.demos else int(options.seed)
        return Prepared(options, lm, task, seed, given, _prompts(options, lm, task, given, asked), recall=recall)
    trials = _seed_trials(options, lm, task, progress, recall)
    seed = SEEDS[best(trials)]
    given = sample_demos(task, seed, options.shots)
    return Prepared(options, lm, task, seed, given, _prompts(options, lm, task, given, asked), trials, recall)


def load(options: RunOptions, progress: Progress) -> LanguageModel:
    """The model that the options name."""
    with progress.part(f"loading {options.model}", 1) as advance:
        lm = load_model(
            options.model,
            dtype=options.dtype,
            device=options.device,
            trust_remote_code=options.trust_remote_code,
        )
        lm = redrawn(lm, options.weights)
        advance(1)
    return lm


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


def _seed_trials(options: RunOptions, lm: LanguageModel, task: Task, progress: Progress, recall: Recall) -> list[Trial]:
    """ICL accuracy of each seed's demonstrations on the selection rows."""
    rows = _fitting(options, lm, task)
    drawn = {seed: _prompts(options, lm, task, sample_demos(task, seed, options.shots), rows) for seed in SEEDS}

    def tried() -> list[Trial]:
        trials: list[Trial] = []
        with progress.part("choosing the seed", len(SEEDS) * len(rows)) as advance:
            for seed, prompts in drawn.items():
                how = Plan(prompts.prefix, len(prompts.zero_prefix), record=False, batch_size=options.batch_size)
                scores = ask(lm, prompts.queries, how, progress=advance).settings[0].log_probs
                gold = np.array([query.gold for query in prompts.queries])
                trials.append(Trial(seed, accuracy(scores, gold), "ok"))
        return trials

    return recall("seed trials", (tuple(drawn.values()), options.batch_size), tried)


@dataclass(frozen=True)
class FineTuning:
    """The fine-tuned model that is reported, and how its learning rate was come by."""

    tuned: Tuned
    trials: list[Trial]
    grid: Sequence[Tuned] = ()
    """Every rate that was tried."""


def fine_tune(prepared: Prepared, progress: Progress) -> FineTuning:
    """Train at the given rate, or at every rate of the grid and keep the best on the selection rows."""
    options, lm, prompts = prepared.options, prepared.lm, prepared.prompts
    rates = options.lr_grid if options.lr == "auto" else (options.lr,)
    steps = len(steps_of(prompts.training_sequences, recipe_of(options))) * len(rates)
    what = f"fine-tuning ({len(rates)} learning rates)" if len(rates) > 1 else "fine-tuning"
    with progress.part(what, steps) as advance:
        if options.lr != "auto":
            return FineTuning(_train(prepared, [options.lr], options.ft_rule, advance)[0], [])
        tuned = _grid(prepared, options.ft_rule, advance)
    selection = selection_queries(prepared)
    with progress.part("choosing the learning rate", len(selection)) as advance:
        trials = judge_rates(lm, tuned, selection, prepared.zero_shot, advance)
    return FineTuning(tuned[best(trials)], trials, tuned)


def _grid(prepared: Prepared, rule: Rule, advance: Advance | None = None) -> Sequence[Tuned]:
    """A rule at every rate of the grid; trained once for runs that differ in the rule they report."""
    options = prepared.options

    def train() -> Sequence[Tuned]:
        return _train(prepared, options.lr_grid, rule, advance)

    if options.controls != "full":  # no other run asks for it
        return train()
    recipe = replace(recipe_of(options), rule=rule)
    key = (prepared.prompts.training_sequences, options.lr_grid, recipe, options.batch_size)
    return prepared.recall(f"trained by {rule}", key, train)


def _train(prepared: Prepared, rates: Sequence[float], rule: Rule, advance: Advance | None) -> list[Tuned]:
    recipe, sequences = replace(recipe_of(prepared.options), rule=rule), prepared.prompts.training_sequences
    together = prepared.options.batch_size or len(rates)  # rates are rows of a batch, too
    batches = [rates[start : start + together] for start in range(0, len(rates), together)]
    return [tuned for batch in batches for tuned in finetune(prepared.lm, sequences, batch, recipe, advance)]


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
    clock = Clock()
    prepared = prepare(options, lm, progress)
    clock.lap("prepare")
    return measure(prepared, progress=progress, clock=clock)


def measure(prepared: Prepared, *, progress: Progress | None = None, clock: Clock | None = None) -> Result:
    """Ask and train the model, and put together what was found."""
    progress, clock = progress or Silent(), clock or Clock()
    options, lm, queries = prepared.options, prepared.lm, prepared.prompts.queries
    known = provenance(prepared)  # first: whatever fails in it must not cost the work

    def asking(name: str, how: Plan, patch: Any = None) -> Asked:
        def ask_all() -> Asked:
            with progress.part(f"{name}: asking {len(queries)} queries", len(queries)) as advance:
                return ask(lm, queries, how, patch, advance)

        found = ask_all() if patch is not None else prepared.recall(name, _pass_key(prepared, how), ask_all)
        clock.lap(name)
        return found

    given_patch = None
    if options.patch is not None:
        from dualview.analyses.compile import load_patch  # it stands on this module

        given_patch = load_patch(options.patch, lm)  # before the work: a file may be unreadable, or of another model
    watched = options.controls != "none"
    bare = replace(prepared.zero_shot, taps=taps_of(lm.anatomy) if watched else ())
    passes = {"zsl": asking("zsl", bare)}
    passes["icl"] = asking("icl", replace(prepared.in_context, demo_logits=watched))
    learnt = fine_tune(prepared, progress)
    clock.lap("fine-tuning")
    passes["ft"] = asking("ft", bare, learnt.tuned.patch)
    if given_patch is not None:
        passes["patch"] = asking("patch", prepared.zero_shot, given_patch)
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
        verdict = replace(verdict, by_metric={**verdict.by_metric, **controlled.judged})
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
    rows = len(selection_queries(prepared)) if "auto" in (options.lr, options.seed) else 0
    result = assemble(prepared, learnt, records, extra, known, clock, selection_rows=rows)
    result._records = records  # pyright: ignore[reportPrivateUsage]
    result._asked = AskedPrompts(prepared.prompts, lm.tokenizer)  # pyright: ignore[reportPrivateUsage]
    return result


def _pass_key(prepared: Prepared, how: Plan) -> Hashable:
    """What decides a pass at the base weights."""
    watched = prepared.options.controls != "none"
    return how.prefix, prepared.prompts.queries, how.at, how.batch_size, watched


@dataclass(frozen=True)
class Controlled:
    """The controls' settings, and what else they found, by the result's key."""

    settings: dict[str, Setting] = field(default_factory=dict[str, Setting])
    report: dict[str, Any] = field(default_factory=dict[str, Any])
    judged: dict[str, MetricControls] = field(default_factory=dict[str, MetricControls])
    """Metrics beside those of the records, with their intervals, floors and ceilings."""


def _controlled(prepared: Prepared, learnt: FineTuning, passes: dict[str, Asked], progress: Progress) -> Controlled:
    full, lr, recipe = prepared.options.controls == "full", learnt.tuned.lr, recipe_of(prepared.options)

    @cache
    def grid(rule: Rule) -> Sequence[Tuned]:
        return learnt.grid if rule == recipe.rule and learnt.grid else _grid(prepared, rule)

    made = control_settings(prepared, lr, recipe, full=full, grid=grid, progress=progress)
    report: dict[str, Any] = {}
    again = made.passes.get("icl_reordered")
    with progress.part("attention to training tokens", 1) as advance:
        ranks = kendall(prepared.lm, prepared.prompts, recipe, lr, passes, again)
        report["kendall"] = None if ranks is None else ranks.to_json()
        advance(1)
    judged = overlap_controls(passes, again) | ({} if ranks is None else ranks.controls())
    report["overlap"] = overlap_report({**passes, **({} if again is None else {"icl_reordered": again})})
    report["controls_skipped"], report["controls_trained"] = made.skipped, made.trained
    if full:
        with progress.part("order sensitivity and step size", 2) as advance:
            report["order_sensitivity"] = order_report(prepared, lr, recipe, passes)
            advance(1)
            rules = [recipe.rule, *(rule for rule in RULE_CONTROLS if rule != recipe.rule and recipe.params != "all")]
            grids = {rule: grid(rule) for rule in rules}
            report["norm_curve"] = norm_curve(prepared, grids, passes["zsl"], passes["icl"])
            advance(1)
    return Controlled(made.settings, report, judged)
