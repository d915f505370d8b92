"""The pieces of a comparison, one call each, for notebooks.

    lm, task = load_model("embedded"), load_task("movie")
    prompts = build_prompts(task, lm, shots=8, n_queries=20)
    tuned = finetune(lm, prompts, lr=0.01)
    zsl, icl, ft = ask(lm, prompts, "zsl"), ask(lm, prompts, "icl"), ask(lm, prompts, "zsl", patch=tuned)
    records = gather(prompts, zsl=zsl, icl=icl, ft=ft)
    dualview.metrics(records)

`dualview.run` takes the same steps, chooses the learning rate, and adds controls and the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from dualview.comparison.result import Result
from dualview.io.errors import UserError, one_of
from dualview.io.json_files import Place
from dualview.io.progress import Progress
from dualview.learning.finetune import train
from dualview.learning.recipe import Loss, Params, Rule, Training, TrainingRecipe, Tuned
from dualview.models.language_model import LanguageModel
from dualview.models.packing.rows import At
from dualview.models.scoring import Asked, PassPlan, Patch
from dualview.models.scoring import ask as ask_model
from dualview.records import Records
from dualview.tasks.prompts import BosMode, PromptSet, Query
from dualview.tasks.prompts import build_prompts as encode
from dualview.tasks.rows import Row
from dualview.tasks.sampling import sample_demos, sample_queries
from dualview.tasks.task import Task, load_task

if TYPE_CHECKING:
    from dualview.analyses.finetune import FinetunedAdapter


def build_prompts(
    task: Task | str,
    lm: LanguageModel,
    *,
    shots: int = 32,
    seed: int = 1,
    n_queries: int = 200,
    demos: Sequence[Row] | None = None,
    queries: Sequence[Row] | None = None,
    bos: BosMode = "auto",
    separator: str | None = None,
    max_context: int | None = None,
) -> PromptSet:
    """The demonstrations and queries of a task as token ids, as many demonstrations as fit the context.

    `demos` and `queries` replace the drawn ones; the queries do not depend on `seed`.
    """
    task = load_task(task) if isinstance(task, str) else task
    return encode(
        task,
        lm.tokenizer,
        sample_demos(task, seed, shots) if demos is None else demos,
        sample_queries(task, n_queries) if queries is None else queries,
        bos=bos,
        separator=separator,
        max_context=lm.room(max_context),
    )


def ask(
    lm: LanguageModel,
    prompts: PromptSet,
    setting: Literal["zsl", "icl"] = "icl",
    *,
    patch: Tuned | Patch | None = None,
    at: At = "prompt",
    record: bool = True,
) -> Asked:
    """Score every candidate of every query with (`icl`) or without (`zsl`) the demonstrations before it.

    patch    fine-tuned or compiled weights to use in place of the model's
    at       where to record: at the prompt's last token, or at the first token of the label
    record   keep attention's output, its logits and the mass on demonstrations, not only the scores
    """
    one_of("setting", setting, Literal["zsl", "icl"])
    one_of("at", at, At)
    bare = prompts.zero_prefix
    how = PassPlan(prompts.prefix if setting == "icl" else bare, len(bare), at=at, record=record)
    return ask_model(lm, prompts.queries, how, patch.patch if isinstance(patch, Tuned) else patch)


@overload
def finetune(lm: LanguageModel, prompts: PromptSet, *, lr: float, **options: Any) -> Tuned: ...
@overload
def finetune(*, out: Path | str, **options: Any) -> FinetunedAdapter: ...
def finetune(
    lm: LanguageModel | None = None,
    prompts: PromptSet | None = None,
    *,
    out: Path | str | None = None,
    model: str | LanguageModel = "embedded",
    rank: int | None = None,
    json: Place = None,
    progress: Progress | None = None,
    **options: Any,
) -> Tuned | FinetunedAdapter:
    """Train on the demonstrations, one step each.

    With `lm` and `prompts` (and lr, epochs, loss, params, rule) the update is a patch for `ask`; the model is not
    changed. `rows` is for the rule `distilled`: the queries on which it reproduces the in-context model, none of them
    reported. With `out`, it is written to that folder as a LoRA adapter, as `dualview finetune` does: the options are
    then the fields of `RunOptions`, and `rank` truncates the update, which is exact without.
    """
    if lm is not None and prompts is not None and out is None:
        return _train(lm, prompts, **options)
    if out is None or lm is not None:
        raise UserError(
            "finetune takes a model and its prompts, or out (a folder for an adapter) and the run's options."
        )
    from dualview.analyses.finetune import finetune_adapter

    return finetune_adapter(out=out, model=model, rank=rank, json=json, progress=progress, **options)


def _train(
    lm: LanguageModel,
    prompts: PromptSet,
    *,
    lr: float,
    epochs: int = 1,
    loss: Loss = "all",
    params: Params = "kv",
    rule: Rule = "sgd",
    rows: Sequence[Query] = (),
) -> Tuned:
    for what, given, choices in (("loss", loss, Loss), ("params", params, Params), ("rule", rule, Rule)):
        one_of(what, given, choices)
    recipe = TrainingRecipe(params=params, loss=loss, epochs=epochs, rule=rule, rows=tuple(rows))
    teacher = PassPlan(prompts.prefix, len(prompts.zero_prefix))
    return train(lm, [Training(prompts.training_sequences, lr, teacher)], recipe)[0]


def gather(prompts: PromptSet, *, zsl: Asked, icl: Asked, ft: Asked, **controls: Asked) -> Records:
    """What `ask` recorded in each setting, as the records that every metric reads."""
    asked: Mapping[str, Asked] = {"zsl": zsl, "icl": icl, "ft": ft, **controls}
    return Records(
        gold=np.array([query.gold for query in prompts.queries]),
        settings={name: each.settings[0] for name, each in asked.items()},
        columns=zsl.columns,
    )


def load_result(path: Path | str) -> Result:
    """The result of a run, from its JSON file or the folder it was written to."""
    place = Path(path)
    return Result.load(place / "result.json" if place.is_dir() else place)
