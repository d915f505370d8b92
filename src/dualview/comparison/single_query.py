"""One typed query, its prompt, and a fine-tuning with its factors: the first step of `explain` and `heads`."""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass, replace
from typing import Any, cast

from dualview.comparison.finetuning import fine_tune, recipe_of
from dualview.comparison.inputs import make_prompts
from dualview.comparison.prepare import Prepared, prepare
from dualview.duality.on_model.dual_finetuning import trace_for
from dualview.io.errors import UserError
from dualview.io.progress import Progress
from dualview.learning.traces import TrainingTrace, trace_training
from dualview.models.language_model import LanguageModel
from dualview.options import COMPARISON_ONLY, QUERIES_ONLY, RunOptions, refuse_options
from dualview.tasks.rows import Row
from dualview.tasks.task import Task, load_task


@dataclass(frozen=True)
class Question:
    """A query, ready to be asked in context and of the fine-tuned model."""

    prepared: Prepared
    row: Row
    trace: TrainingTrace
    """The fine-tuning on the demonstrations, on the model's own modules."""


def question(
    verb: str, query: str, model: str | LanguageModel, options: dict[str, Any], progress: Progress
) -> Question:
    """Read the query, draw the demonstrations, and fine-tune on them keeping every token's factors."""
    refuse_options(verb, options, (*QUERIES_ONLY, *COMPARISON_ONLY))
    _must_not_be_empty(query)
    name, loaded = (model, None) if isinstance(model, str) else (model.name, model)
    chosen = RunOptions.make(**{**options, "model": name, "n_queries": 1})
    _must_have_a_dual_form(verb, chosen)
    row = query_row(load_task(chosen.task, chosen.data), query)  # before the model loads: mistakes show at once
    _must_not_be_empty(*row.fields.values())
    prepared = prepare(chosen, loaded, progress)
    prepared = replace(prepared, prompts=make_prompts(chosen, prepared.lm.reader, prepared.task, prepared.demos, [row]))
    return Question(prepared, row, _trained(verb, prepared, progress))


def _must_have_a_dual_form(verb: str, options: RunOptions) -> None:
    if options.ft_params == "all":
        raise UserError(f"{verb} needs the dual form of projections, so it does not go with ft_params all.")
    if options.ft_rule in ("linearised", "distilled"):
        raise UserError(
            f"{verb} needs the dual form of a fine-tuning, and the {options.ft_rule} model has none; "
            "use --ft-rule sgd or layer-causal."
        )
    _must_move(verb, options.lr)


def _must_move(verb: str, lr: float | str) -> None:
    if lr == 0:
        raise UserError(
            f"At a learning rate of 0 no weight changes, so {verb} has nothing to decompose; give another --lr."
        )


def _must_not_be_empty(*texts: str) -> None:
    if not any(text.strip() for text in texts):
        raise UserError("--query is empty; give the text of the query.")


def query_row(task: Task, text: str) -> Row:
    """A query typed by hand as a row of the task: no label is known, so none is used."""
    fields = task.template_fields
    if len(fields) == 1 and task.choices is None and not text.lstrip().startswith("{"):
        return Row({fields[0]: text}, 0)
    wanted = [*fields, *([] if task.choices is None else ["choices"])]
    hint = UserError(f"Task {task.name} needs --query as a JSON object with {', '.join(wanted)}.")
    try:
        parsed = jsonlib.loads(text)
    except ValueError:
        if len(fields) == 1 and task.choices is None:  # a text that merely begins with a brace
            return Row({fields[0]: text}, 0)
        raise hint from None
    if not isinstance(parsed, dict):
        raise hint
    values = cast("dict[str, Any]", parsed)
    other = {**task.fields, **{new: old for old, new in task.fields.items()}}
    found = {name: values.get(name, values.get(other.get(name, name))) for name in fields}
    choices = values.get("choices") if task.choices is not None else None
    listed = cast("list[Any]", choices) if isinstance(choices, list) else []
    if any(not isinstance(value, str) for value in (*found.values(), *listed)):
        raise hint
    if task.choices is not None and len(listed) < 2:
        raise hint
    return Row(cast("dict[str, str]", found), 0, tuple(str(choice) for choice in listed) or None)


def _trained(verb: str, prepared: Prepared, progress: Progress) -> TrainingTrace:
    lr = prepared.options.lr
    rate = fine_tune(prepared, progress).tuned.lr if lr == "auto" else lr
    _must_move(verb, rate)
    sequences = prepared.prompts.training_sequences
    with progress.part("fine-tuning, with its factors", len(sequences)) as advance:
        (trace,) = trace_training(prepared.lm, sequences, [rate], recipe_of(prepared))
        advance(len(sequences))
    return trace_for(prepared.lm, trace)
