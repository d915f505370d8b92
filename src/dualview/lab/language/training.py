"""One training of the language lab: what all trainings share, the model, and its measurements."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualview.io.errors import UserError
from dualview.io.progress import Progress
from dualview.lab.gpt.corpus import Corpus, prepare
from dualview.lab.gpt.model import (
    Shape,
    build,
    matched,
    parameters_of,
    save_model,
    usual_width,
    variant_of,
)
from dualview.lab.gpt.scoring import few_shot, prompts_of
from dualview.lab.gpt.training import Blocks, cost_of, perplexities, saved_bytes, train
from dualview.lab.language.settings import LanguageSettings
from dualview.lab.units import Unit, decides
from dualview.models.amx_workaround import mind_amx
from dualview.models.devices import pick_device
from dualview.models.loading import adopt
from dualview.tasks.prompts import PromptSet
from dualview.tasks.task import Task, load_task
from dualview.variants.base import Equipment

EMBEDDED_TASKS = ("movie", "movie5", "tweet", "product", "source")
SIX_TASKS = ("sst2", "sst5", "mr", "subj", "agnews", "cb")


@dataclass(frozen=True)
class Bench:
    """What all trainings share."""

    settings: LanguageSettings
    corpus: Corpus
    prompts: dict[str, list[PromptSet]]
    """By task, for each draw of demonstrations."""
    device: torch.device
    train: Tensor
    held_out: Tensor
    decides: dict[str, Any]
    """Everything but variant and seed that decides a training's numbers."""

    @property
    def shape(self) -> Shape:
        s = self.settings
        return Shape(self.corpus.vocab, s.d_model, s.layers, s.heads, s.context, usual_width(s.d_model))


def set_up(settings: LanguageSettings, out: Path | None, progress: Progress) -> Bench:
    """Read the text and the tasks and build every prompt, so that mistakes in them show before any training."""
    device = pick_device(settings.device)
    if device.type == "cpu" and settings.precision == "bfloat16":
        mind_amx()
    tasks = chosen_tasks(settings.data, settings.tasks, settings.n_queries)
    with progress.part("reading and tokenising the text", 1) as advance:
        corpus = prepare(
            settings.text,
            out,
            kind=settings.tokenizer,
            vocab=settings.vocab,
            max_text=settings.max_text,
            least=settings.context + 1,
        )
        advance(1)
    train, held_out = (
        torch.from_numpy(np.asarray(side, dtype=np.int32)).to(device)
        for side in (corpus.train, corpus.held_out[: settings.eval_tokens + 1])
    )
    prompts = {task.name: _prompts(settings, task, corpus) for task in tasks}
    shared = decides("language", settings, device, text_sha256=corpus.about["sha256"])
    return Bench(settings, corpus, prompts, device, train, held_out, shared)


def chosen_tasks(data: Path | None, named: Sequence[str], n_queries: int, *, both: bool = True) -> list[Task]:
    """The tasks to evaluate: those named, or the embedded ones with (not `both`: else) those of the six in `data`."""
    if data is not None and not data.is_dir():
        raise UserError(f"There is no folder {data}; --data needs <task>/train.jsonl and validation.jsonl in it.")
    here = [name for name in SIX_TASKS if data is not None and (data / name).is_dir()]
    if data is not None and not here and not named:
        raise UserError(f"{data} has none of the folders {', '.join(SIX_TASKS)}; check --data.")
    usual = (*EMBEDDED_TASKS, *here) if both or not here else here
    return [
        load_task(name, data if data is not None and (data / name).is_dir() else None)
        for name in (named or usual if n_queries else ())
    ]


def _prompts(settings: LanguageSettings, task: Task, corpus: Corpus) -> list[PromptSet]:
    draws = range(1, settings.draws + 1)
    asked = {"shots": settings.shots, "n_queries": settings.n_queries}
    try:
        return prompts_of(task, corpus.tokenizer, settings.context, **asked, draws=draws)
    except UserError as error:
        why = str(error).split(";")[0]
        raise UserError(f"Task {task.name}: {why}; give a larger --context or --vocab, or other --tasks.") from error


def checkpoint_folder(out: Path, name: str, seed: int, step: int) -> Path:
    """Where a model of a training is kept."""
    return out / "checkpoints" / f"{name}-seed{seed}" / f"step-{step:06d}"


def missing_checkpoints(out: Path, name: str, seed: int, steps: Iterable[int]) -> list[int]:
    """The steps without a stored model."""
    return [step for step in steps if not checkpoint_folder(out, name, seed, step).is_dir()]


def forget_if_past(unit: Unit, steps: Sequence[int]) -> bool:
    """Remove a saved state that is past one of these steps, as their models are wanted; whether it was removed."""
    state = unit.load()
    if state is None or all(step > state.info["info"]["step"] for step in steps):
        return False
    unit.remove()
    return True


def run_training(
    bench: Bench, name: str, seed: int, unit: Unit, out: Path | None, progress: Progress
) -> dict[str, Any]:
    """Train one model and measure it: `found` is the same on every run, `cost` depends on the machine.

    A saved state past a step with a missing model to keep is not resumed: the training starts again.
    """
    settings, recipe = bench.settings, bench.settings.recipe
    variant = variant_of(name, settings.eta, settings.learnable)
    shape = matched(bench.shape, bench.corpus.separator, variant)
    model = build(shape, bench.corpus.separator, variant, seed).to(bench.device)  # pyright: ignore
    blocks = Blocks(bench.train, settings.context, settings.batch, seed)
    memory = saved_bytes(model, blocks.take(0), settings.precision)

    def keep(step: int) -> None:
        save_model(model, bench.corpus.tokenizer, checkpoint_folder(out or Path(), name, seed, step))

    wanted = settings.keep_at if out is not None else []
    again = forget_if_past(unit, missing_checkpoints(out or Path(), name, seed, wanted))
    title = f"{name}, seed {seed}: training" + (" again, to keep models of steps it had passed" if again else "")
    with progress.part(title, settings.steps) as advance:
        trained = train(model, blocks, recipe, unit, advance=advance, keep=keep, keep_at=wanted)
    found: dict[str, Any] = {
        "variant": name,
        "seed": seed,
        "setting": None if variant is None else variant.to_dict(),
        "parameters": parameters_of(model),
        "d_ff": shape.d_ff,
        "status": trained.status,
        "steps": trained.steps,
        "tokens": trained.steps * settings.batch * settings.context,
        "curve": curve_of(trained.losses),
        "saved_bytes": memory,
        "learnt": _learnt(model),
    }
    with progress.part(f"{name}, seed {seed}: measuring", len(bench.prompts) + 1) as advance:
        diverged, tokens = trained.status == "diverged", bench.held_out
        batch = settings.batch
        found["held_out"] = None if diverged else perplexities(model, tokens, settings.lengths, settings.context, batch)
        advance(1)
        found["few_shot"] = []
        lm = adopt(model, bench.corpus.tokenizer, name)
        for task, prompts in bench.prompts.items() if trained.status != "diverged" else ():
            found["few_shot"].append(few_shot(lm, task, prompts).to_json())
            advance(1)
    return {"found": found, "cost": cost_of(model, trained, recipe)}


def _learnt(model: nn.Module) -> list[float] | None:
    """The coefficient (η) of each layer after training, where it is learnt."""
    equipped = [module for module in model.modules() if isinstance(module, Equipment) and module.variant.learnable]
    return [float(torch.as_tensor(each.coefficient()).detach()) for each in equipped] or None


def curve_of(losses: Sequence[float], points: int = 100) -> dict[str, list[float]]:
    """The training loss, averaged over equal stretches of steps; stretches that are not finite are left out.

    >>> curve_of([4.0, 2.0, 1.0, 1.0], points=2)
    {'step': [2, 4], 'loss': [3.0, 1.0]}
    """
    edges = sorted({round(i * len(losses) / points) for i in range(points + 1)})
    stretches = [losses[a:b] for a, b in itertools.pairwise(edges)]
    kept = [(b, float(np.mean(s))) for b, s in zip(edges[1:], stretches, strict=True) if np.isfinite(s).all()]
    return {"step": [step for step, _ in kept], "loss": [loss for _, loss in kept]}
