"""When in training, if ever, does in-context learning become similar to fine-tuning?

Every checkpoint of a training goes through the whole comparison (`dualview run`): zero-shot, in-context and fine-tuned
on one task, with controls, over several draws of demonstrations. Step 0 is the untrained model, the main control of
Deutch et al. (arXiv 2311.07772): a similarity that exists before training is no sign of learning. Without given
checkpoints the lab first trains the language lab's small plain model.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dualview.comparison.result import Result
from dualview.comparison.seeds import compare_seeds
from dualview.io.errors import UserError
from dualview.io.progress import Progress
from dualview.lab.dynamics.report import figures, summarise, tables
from dualview.lab.gpt.model import NAMES
from dualview.lab.harness import Findings, Job, lab
from dualview.lab.language.run import language
from dualview.lab.settings import ComparisonSettings, Positive
from dualview.lab.summaries import mean
from dualview.models.language_model import LanguageModel
from dualview.models.loading import load_model
from dualview.options import AtLeastOne, option
from dualview.tasks.task import load_task


@dataclass(frozen=True, kw_only=True)
class DynamicsSettings(ComparisonSettings):
    """Options of `dualview lab dynamics`."""

    checkpoints: Path | None = option(None, "output folder of `lab language --keep-checkpoints N`; none: train first")
    points: AtLeastOne = option(8, "models to keep of the training, if there is one")
    steps: AtLeastOne = option(800, "its steps")
    variant: str = option("plain", "its attention")
    text: tuple[Path, ...] = option((), "its text; none: the embedded tasks' sentences")
    max_text: Positive = option(5.0, "use at most this many million characters of the text")
    task: str = option("movie", "a task of the library or a task's YAML file")
    n_queries: AtLeastOne = option(100, "queries")
    draws: AtLeastOne = option(3, "draws of demonstrations, from --seed on")
    lr: Positive | Literal["auto"] = option(
        "auto", "fine-tuning's rate; auto: the best of the grid, at every checkpoint"
    )

    COUNT = "draws"

    def __post_init__(self) -> None:
        if self.variant not in NAMES:
            raise ValueError(f"there is no variant {self.variant}; choose from {', '.join(NAMES)}")


@dataclass(frozen=True)
class Checkpoint:
    """One saved model of one training."""

    training: str
    step: int
    folder: Path


@lab(DynamicsSettings, tables, figures)
def dynamics(job: Job[DynamicsSettings]) -> Findings:
    """Compare in-context learning with fine-tuning at every checkpoint of a training.

    SimAOU with its floors and interval, accuracy and Rec2FTP over the steps, on the checkpoints of
    `dualview lab language --keep-checkpoints N`, or on those of a small model that is trained first.
    """
    settings = job.settings
    load_task(settings.task, settings.data)  # so that a mistake in it shows before the training
    scratch = Path(job.until_written.enter_context(tempfile.TemporaryDirectory(prefix="dualview-")))
    found = find_checkpoints(settings.checkpoints or _trained(settings, job.out or scratch, job.progress))
    job.clock.lap("training")
    points: list[dict[str, Any]] = []
    with job.progress.part("comparing at every checkpoint", len(found)) as advance:
        for checkpoint in found:
            lm = load_model(str(checkpoint.folder), device=settings.device)
            decides = {"training": checkpoint.training, "step": checkpoint.step, "weights": lm.weights_hash}
            unit = job.unit(settings.seed, lm.device, **decides)
            points.append(unit.once(lambda _unit, a=(lm, checkpoint): _measure(settings, *a)))
            advance(1)
    job.clock.lap("comparing")
    return Findings({"task": settings.task, "points": points, **summarise(points)})


def _trained(settings: DynamicsSettings, out: Path, progress: Progress) -> Path:
    """Train the language lab's small model and keep it at several steps; one that was trained before is reused."""
    folder = out / "training"
    language(
        out=folder,
        progress=progress,
        seed=settings.seed,
        device=settings.device,
        save_every=settings.save_every,
        only=(settings.variant,),
        steps=settings.steps,
        warmup=max(1, settings.steps // 10),
        text=settings.text,
        max_text=settings.max_text,
        keep_checkpoints=settings.points,
        n_queries=0,
    )
    return folder


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """The saved models under a language lab's --out, its `checkpoints`, or the folder of one training."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}; name the --out of `lab language --keep-checkpoints N`.")
    levels = ("step-*", "*/step-*", "checkpoints/*/step-*")
    saved = sorted({path for level in levels for path in folder.glob(level) if (path / "config.json").is_file()})
    found = [
        Checkpoint(path.absolute().parent.name, int(match[1]), path)
        for path in saved
        if (match := re.fullmatch(r"step-(\d+)", path.name))
    ]
    if not found:
        raise UserError(f"{folder} holds no checkpoints (step-…); run `lab language --keep-checkpoints 8 --out DIR`.")
    return sorted(found, key=lambda each: (each.training, each.step))


def _measure(settings: DynamicsSettings, lm: LanguageModel, checkpoint: Checkpoint) -> dict[str, Any]:
    """The comparison at one checkpoint, over all draws."""
    options = settings.run_options(lm, settings.task, settings.seed)
    several = compare_seeds(options, settings.all_seeds, lm=lm)
    numbers = {
        key: {"mean": over.mean, "ci": None if over.ci is None else list(over.ci), "values": over.values}
        for key, over in several.summary.items()
    }
    return {
        "training": checkpoint.training,
        "step": checkpoint.step,
        "weights_hash": lm.weights_hash,
        "rule": options.ft_rule,
        "numbers": numbers,
        "floors": _floors(several.results),
        "draws": [_draw(seed, result) for seed, result in zip(settings.all_seeds, several.results, strict=True)],
        "verdicts": several.verdicts,
    }


def _floors(results: Sequence[Result]) -> dict[str, dict[str, float | None]]:
    """By metric and by name: each floor's mean over the draws."""
    found: dict[str, dict[str, float | None]] = {}
    for metric in ("sim_aou", "sim_am"):
        floors = [(result.controls or {})[metric].floors for result in results]
        found[metric] = {name: mean([each.get(name) for each in floors]) for name in floors[0]}
    return found


def _draw(seed: int, result: Result) -> dict[str, Any]:
    """One draw's numbers, as its own result file would hold them."""
    controls, verdict = result.controls, result.verdict
    assert controls is not None and verdict is not None  # the lab runs with controls

    def standing(metric: str) -> dict[str, Any]:
        return {"ci": controls[metric].ci, "above_every_floor": verdict.by_metric[metric].passed}

    return {
        "seed": seed,
        "shots_used": result.task.shots_used,
        "accuracy": result.accuracy.model_dump(exclude_unset=True),
        "sim_aou": {"raw": result.sim_aou.raw, **standing("sim_aou")},
        "sim_am": {"delta": result.sim_am.delta, **standing("sim_am")},
        "rec2ftp": result.rec2ftp.model_dump(exclude_unset=True),
        "update_norm": result.update_norm.model_dump(exclude_unset=True),
        "lr": result.ft.lr,
        "status": result.ft.status,
        "verdict": verdict.overall,
    }
