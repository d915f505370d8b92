"""One answer of the explorer, sent part by part: prompt, three settings, every step, similarity and attention.

All computing is done by the library; this module only decides the order.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from dualview.comparison.controls.settings import control_settings, control_trainings
from dualview.comparison.controls.training import train_controls
from dualview.comparison.finetuning import recipe_of
from dualview.comparison.prepare import Prepared, prepare
from dualview.comparison.run import off_heads
from dualview.io.errors import UserError
from dualview.learning.batch import Step, Watch
from dualview.learning.finetune import finetune
from dualview.learning.recipe import Tuned, steps_of
from dualview.learning.selection import status_of
from dualview.metrics.predictions import candidate_distribution, predictions
from dualview.metrics.summary import plain
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Asked, ask
from dualview.options import RunOptions
from dualview.records import Records
from dualview.tasks.show_prompt import ShownPrompt
from dualview.web.attention import attention_json, attention_steps
from dualview.web.jobs import Emit, JobProgress
from dualview.web.model_cache import ModelCache
from dualview.web.run_files import commands, written
from dualview.web.similarity import similarity_json
from dualview.web.state import MOST_TOKENS, State


def answer(state: State, model_cache: ModelCache, emit: Emit) -> None:
    """Run a state's experiment and send every part of it."""
    began = time.monotonic()
    lm = model_cache.model(state.model, JobProgress(emit))
    with written(state, model_cache.options) as options:
        prepared = _prepared(options, lm)
        _must_be_short(prepared)
        emit(_prompt(prepared, state, model_cache))
        passes = _ask_untrained(prepared, emit)
        tuned = _fine_tune(prepared, emit)
        passes["ft"] = ask(lm, prepared.prompts.queries, prepared.zero_shot, tuned.patch)
        status = status_of(tuned, passes["ft"].settings[0].log_probs)
        losses = [plain(loss) for loss in tuned.losses]
        emit({**_setting("ft", passes["ft"]), "lr": tuned.lr, "losses": losses, "status": status})
        _similarity(prepared, passes, tuned.lr, emit)
        with JobProgress(emit).part("attention, and fine-tuning taken apart", attention_steps(prepared)) as advance:
            attention = attention_json(prepared, tuned.lr, advance)
        emit({"event": "attention", **attention})
    emit({"event": "done", "seconds": round(time.monotonic() - began, 2)})


def _prepared(options: RunOptions, lm: LanguageModel) -> Prepared:
    """The prompts; where they do not fit, the advice is for the page, which has no --max-context."""
    try:
        return prepare(options, lm)
    except UserError as error:
        wrong, advice, _ = str(error).partition("; raise --max-context")
        if not advice:
            raise
        raise UserError(f"{wrong}; shorten it, or take a model with a longer context.") from None


def _must_be_short(prepared: Prepared) -> None:
    prompts = prepared.prompts
    tokens = len(prompts.prefix) + prompts.queries[0].longest
    if tokens > MOST_TOKENS:
        raise UserError(
            f"The prompt has {tokens} tokens and the explorer takes {MOST_TOKENS}; shorten or remove demonstrations."
        )


def _prompt(prepared: Prepared, state: State, model_cache: ModelCache) -> dict[str, Any]:
    prompts = prepared.prompts
    asked = prompts.queries[0]
    return {
        "event": "prompt",
        "candidates": list(state.labels or state.query.choices or []),
        "gold": state.query.label,
        "shots": prompts.shots,
        "shots_used": prompts.shots_used,
        "prefix_tokens": len(prompts.prefix),
        "query_tokens": len(asked.ids),
        "tokens": ShownPrompt(prompts, prepared.lm.tokenizer).tokens,
        "steps": len(steps_of(prompts.training_sequences, recipe_of(prepared))),
        "layers": len(prepared.lm.anatomy.layers),
        "heads": [layer.heads for layer in prepared.lm.anatomy.layers],
        "commands": commands(state, model_cache.options, model_cache.drawn(state)),
    }


def _ask_untrained(prepared: Prepared, emit: Emit) -> dict[str, Asked]:
    """Zero-shot and in-context, which need no training."""
    passes: dict[str, Asked] = {}
    for name, how in (("zsl", replace(prepared.zero_shot, own=True)), ("icl", prepared.in_context)):
        passes[name] = ask(prepared.lm, prepared.prompts.queries, how)
        emit(_setting(name, passes[name]))
    return passes


def _setting(name: str, asked: Asked) -> dict[str, Any]:
    return {"event": "setting", "setting": name, **_scores(asked)}


def _scores(asked: Asked) -> dict[str, Any]:
    """Each candidate's mean log-prob, and these as probabilities over the candidates; null once training diverged."""
    scores = asked.settings[0].log_probs
    with np.errstate(invalid="ignore"):
        shares = candidate_distribution(scores)[0]
    predicted = int(predictions(scores)[0])
    return {
        "log_probs": [plain(score) for score in scores[0]],
        "probs": [plain(share) for share in shares],
        "predicted": None if predicted < 0 else predicted,
    }


def _fine_tune(prepared: Prepared, emit: Emit) -> Tuned:
    """Train, asking the query again after every step."""
    lm, prompts, options = prepared.lm, prepared.prompts, prepared.options
    recipe = recipe_of(prepared)
    total = len(steps_of(prompts.training_sequences, recipe))
    bare = replace(prepared.zero_shot, record=False)

    def on_step(step: Step) -> None:
        done = step.number + 1
        if done < total:  # the weights after the last step are asked with everything else
            asked = ask(lm, prompts.queries, bare, step.deltas.moved_to(lm.anatomy))
            emit({"event": "step", "step": done, "total": total, **_scores(asked)})

    assert not isinstance(options.lr, str)
    emit({"event": "part", "part": "fine-tuning, a step for each demonstration", "done": 0, "total": total})
    return finetune(lm, prompts.training_sequences, [options.lr], recipe, watch=Watch(on_step))[0]


def _similarity(prepared: Prepared, passes: dict[str, Asked], lr: float, emit: Emit) -> None:
    """The similarities with their floors and ceilings."""
    recipe, progress = recipe_of(prepared), JobProgress(emit)
    trained = train_controls(prepared, control_trainings(prepared, lr, full=False), recipe, progress)
    controls = control_settings(prepared, lr, recipe, trained, sizes={"ft": 0.0}, grid=None, progress=progress)
    settings = {**{name: asked.settings[0] for name, asked in passes.items()}, **controls.settings}
    gold = np.array([query.gold for query in prepared.prompts.queries])
    records = Records(
        gold=gold,
        settings=off_heads(prepared.lm, passes["zsl"].own, settings, gold, passes["zsl"].columns),
        columns=passes["zsl"].columns,
    )
    emit({"event": "similarity", **similarity_json(records, controls.skipped)})
