"""The comparison: one model, one task, three settings.

task → demonstrations and queries → prompts → zsl, icl, ft → records → metrics → result
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from dualview.comparison.assembly import assemble
from dualview.comparison.controls.kendall import followed_taps, taps_of, token_scores, with_ceiling
from dualview.comparison.controls.learners import (
    Learner,
    adapters_report,
    learner_controls,
    load_learners,
    load_twins,
)
from dualview.comparison.controls.sensitivity import norm_curve, order_report
from dualview.comparison.controls.settings import RULE_CONTROLS, control_settings, control_trainings
from dualview.comparison.controls.training import train_controls_steps, unsteady, update_size
from dualview.comparison.controls.untrained import untrained_models_fit, untrained_runs
from dualview.comparison.finetuning import FineTuning, fine_tune, recipe_of, train_grid_steps, training_of
from dualview.comparison.prepare import Prepared, prepare, selection_queries
from dualview.comparison.provenance import provenance
from dualview.comparison.result import AskedPrompts, Result
from dualview.io.clock import Clock
from dualview.io.progress import Progress, Silent
from dualview.learning.calibration import calibrated_accuracy
from dualview.learning.recipe import Rule, Training, TrainingRecipe, Tuned
from dualview.learning.turns import Run, finished, have_room_together, in_turns
from dualview.metrics import recompute
from dualview.metrics.floors.controls import base_name
from dualview.metrics.floors.covariates import known_numbers
from dualview.metrics.label_contrast import FLIPPED
from dualview.models.head_span import off_spans
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Asked, PassPlan, ask
from dualview.options import RunOptions
from dualview.records import Records, Setting, TokenScores
from dualview.records.setting import is_learner


def run(options: RunOptions, *, lm: LanguageModel | None = None, progress: Progress | None = None) -> Result:
    """One comparison from options to result."""
    clock = Clock()
    prepared = prepare(options, lm, progress)
    clock.lap("prepare")
    return measure(prepared, progress=progress, clock=clock)


def measure(prepared: Prepared, *, progress: Progress | None = None, clock: Clock | None = None) -> Result:
    """Ask and train the model, build the records, and compute every number from them."""
    progress, clock = progress or Silent(), clock or Clock()
    options, lm, queries = prepared.options, prepared.lm, prepared.prompts.queries
    known = provenance(prepared)  # first: a failure here must not cost the work

    def asking(name: str, how: PassPlan, patch: Any = None) -> Asked:
        def ask_all() -> Asked:
            with progress.part(f"{name}: asking {len(queries)} queries", len(queries)) as advance:
                return ask(lm, queries, replace(how, stay=True), patch, advance)

        # A patched pass is never shared: two fine-tunings that are called the same may differ.
        found = ask_all() if patch is not None else prepared.cache(name, _pass_key(prepared, how), ask_all)
        clock.lap(name)
        return found

    learners, twins = load_learners(options, lm), load_twins(options, lm)
    watched = options.controls != "none"
    bare = replace(prepared.zero_shot, taps=taps_of(lm.anatomy) if watched else ())
    passes = {"zsl": asking("zsl", replace(bare, own=watched))}
    passes["icl"] = asking("icl", replace(prepared.in_context, demo_logits=watched))
    learnt = fine_tune(prepared, progress, followed_taps(lm, recipe_of(prepared)) if watched else None)
    clock.lap("fine-tuning")
    passes["ft"] = asking("ft", bare, learnt.tuned.patch)
    if not options.calibrate:
        learnt = learnt.spent()
    for name, given in learners.items():
        passes[name] = asking(name, prepared.zero_shot, given)
    controlled = _controlled(prepared, learnt, learners, twins, passes, progress) if watched else Controlled()
    clock.lap("controls")
    settings = {**{name: asked.settings[0] for name, asked in passes.items()}, **controlled.settings}
    gold = np.array([query.gold for query in queries])
    records = Records(
        gold=gold,
        settings=off_heads(lm, passes["zsl"].own, settings, gold, passes["zsl"].columns),
        columns=passes["zsl"].columns,
        meta={"task": prepared.task.name, "model": lm.name, "controls": options.controls},
        token_scores=controlled.token_scores,
    )
    device = lm.device if lm.device.type == "cuda" else None
    measured = recompute.measure(records, threads=torch.get_num_threads(), device=device)
    clock.lap("metrics")
    found: dict[str, Any] = {**measured.to_json(), **controlled.report}
    found["warnings"] = [*controlled.warnings, *found["warnings"]]
    if options.adapter:
        found["adapters"] = adapters_report(options, learners)
    if options.calibrate:
        found["calibrated"] = {
            "accuracy": calibrated_accuracy(
                prepared.task,
                lm,
                queries,
                records.settings,
                {
                    "zsl": (prepared.zero_shot, None),
                    "icl": (prepared.in_context, None),
                    "ft": (prepared.zero_shot, learnt.tuned.patch),
                    **{name: (prepared.zero_shot, given) for name, given in learners.items()},
                },
            )
        }
    rows = len(selection_queries(prepared)) if "auto" in (options.lr, options.seed) else 0
    result = assemble(prepared, learnt, records, found, known, clock, selection_rows=rows)
    result._records = records  # pyright: ignore[reportPrivateUsage]
    result._asked = AskedPrompts(prepared.prompts, lm.tokenizer)  # pyright: ignore[reportPrivateUsage]
    return result


def off_heads(
    lm: LanguageModel,
    own: Float[np.ndarray, "query layer d_in"] | None,
    settings: Mapping[str, Setting],
    gold: Int[np.ndarray, " query"],
    length: Int[np.ndarray, " query"] | None,
) -> dict[str, Setting]:
    """The settings, those that the verdict compares with what they change outside the heads' own outputs.

    own      what enters each output projection in the zero-shot pass
    gold     the queries' labels: what a class shares is taken out too
    length   their numbers of tokens, where they are recorded
    """
    h = {name: setting.h for name, setting in settings.items() if setting.h is not None}
    if own is None or "zsl" not in h:
        return dict(settings)
    learners = [name for name in settings if is_learner(name)]
    changes = {name: (h[name], h["zsl"]) for name in ("icl", "ft", *learners) if name in h}
    twins = {**FLIPPED, **{name: f"{name}/{FLIPPED['ft']}" for name in learners}}
    flipped = {name: (h[name], h[other]) for name, other in twins.items() if {name, other} <= h.keys()}
    contrasts = {f"{name} contrast": each for name, each in flipped.items()}
    known = known_numbers(settings["zsl"].log_probs, gold, length)
    found = off_spans(lm, own, h["zsl"], {**changes, **contrasts}, gold, known)
    return {
        name: replace(setting, off_span=found.get(name), off_contrast=found.get(f"{name} contrast"))
        for name, setting in settings.items()
    }


def _pass_key(prepared: Prepared, how: PassPlan) -> Hashable:
    """What decides a pass at the base weights."""
    # With controls a pass also keeps taps and logits, so one recorded without them cannot replace it.
    watched = prepared.options.controls != "none"
    return how.prefix, prepared.prompts.queries, how.at, how.batch_size, watched


@dataclass(frozen=True)
class Controlled:
    """The controls' settings, the scores of the training tokens, and reports by the result's key."""

    settings: dict[str, Setting] = field(default_factory=dict[str, Setting])
    report: dict[str, Any] = field(default_factory=dict[str, Any])
    token_scores: TokenScores | None = None
    warnings: list[str] = field(default_factory=list[str])


def _followed(prepared: Prepared, learnt: FineTuning) -> dict[str, Training]:
    """The trainings to trace: at FT's rate, if it was not traced when it was chosen, and at 0."""
    rates = {} if learnt.kept else {"ft": learnt.tuned.lr}
    return {name: training_of(prepared, prepared.prompts, rate) for name, rate in {**rates, "ft_lr0": 0.0}.items()}


def _grids(prepared: Prepared, recipe: TrainingRecipe, learnt: FineTuning) -> dict[Rule, Run[Sequence[Tuned]]]:
    """FT's rule and those that the controls compare it with, each at every rate of its grid."""
    others = () if recipe.params == "all" else RULE_CONTROLS
    # FT itself is distilled once and at one rate.
    own = () if recipe.rule == "distilled" else (recipe.rule,)
    found: dict[Rule, Run[Sequence[Tuned]]] = {rule: Run(train_grid_steps(prepared, rule)) for rule in own}
    found |= {rule: Run(train_grid_steps(prepared, rule)) for rule in others if rule != recipe.rule}
    if learnt.grid:
        found[recipe.rule] = finished(learnt.grid)
    return found


def _controlled(
    prepared: Prepared,
    learnt: FineTuning,
    learners: Mapping[str, Learner],
    twins: Mapping[str, Learner],
    passes: dict[str, Asked],
    progress: Progress,
) -> Controlled:
    lr, recipe = learnt.tuned.lr, recipe_of(prepared)
    full = prepared.options.controls == "full"
    # Similarity grows with the size of an update, so trained controls are compared at FT's size.
    size = update_size(passes["zsl"].settings[0], passes["ft"].settings[0])
    wanted = control_trainings(prepared, lr, full=full)
    sized = [name for name in wanted if base_name(name) in ("ft_random_labels", "ft_other_task")]
    taps = followed_taps(prepared.lm, recipe)
    training = Run(
        train_controls_steps(
            prepared,
            wanted,
            recipe,
            progress,
            sized=sized,
            size=size,
            followed=_followed(prepared, learnt) if taps is not None else {},
            taps=taps or (),
        )
    )
    grids = _grids(prepared, recipe, learnt) if full else {}
    together = full and untrained_models_fit(prepared.lm)
    untrained = untrained_runs(prepared, lr, recipe, size, together=together) if full else {}
    if full and have_room_together(prepared.lm):
        in_turns([*grids.values(), training, *(untrained.values() if together else ())])
    trained = training.result()
    del training  # it has the traces
    tokens, warnings = None, list[str]()
    if taps is not None:
        if recipe.loss == "all":
            warnings = unsteady({"ft": learnt.tuned, **trained.tuned}, trained.traces["ft_lr0"].tuned)
        with progress.part("attention to training tokens", 1) as advance:
            traces = [*(learnt.kept or [trained.traces["ft"]]), trained.traces["ft_lr0"]]
            tokens = token_scores(prepared.lm, prepared.prompts, recipe, traces, passes)
            learnt.kept.clear()
            trained, traces = replace(trained, traces={}), []  # no pass needs them, and they are large
            advance(1)
    sizes = {name: update_size(passes["zsl"].settings[0], passes[name].settings[0]) for name in ("ft", *learners)}
    made = control_settings(
        prepared,
        lr,
        recipe,
        trained,
        sizes=sizes,
        grid=(lambda rule: grids[rule].result()) if full else None,
        progress=progress,
        zsl=passes["zsl"],
        untrained=untrained,
    )
    untrained.clear()
    made.settings.update(learner_controls(prepared, learners, twins, passes, trained, progress))
    report: dict[str, Any] = {}
    again = made.passes.get("icl_reordered")
    if tokens is not None and again is not None:
        tokens = with_ceiling(tokens, prepared.prompts, again)
    report["controls_skipped"], report["controls_trained"] = made.skipped, made.trained
    if full:
        report |= _sensitivity(prepared, trained.tuned, grids, passes, progress)
    return Controlled(made.settings, report, tokens, warnings)


def _sensitivity(
    prepared: Prepared,
    tuned: Mapping[str, Tuned],
    grids: Mapping[Rule, Run[Sequence[Tuned]]],
    passes: Mapping[str, Asked],
    progress: Progress,
) -> dict[str, Any]:
    with progress.part("order sensitivity and step size", 2) as advance:
        orders = order_report(prepared, tuned, passes)
        advance(1)
        curves = {rule: run.result() for rule, run in grids.items() if rule != "distilled"}  # it has one rate
        curve = norm_curve(prepared, curves, passes["zsl"], passes["icl"])
        advance(1)
    return {"order_sensitivity": orders, "norm_curve": curve}
