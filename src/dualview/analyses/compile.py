"""`dualview compile`: turn demonstrations into a patch, one change of weights that replaces the prompt, and score it.

`compile_patch` fits `duality.on_model.shared_patch` on rows of the selection split (half to fit, half to choose the
ridge), writes the patch as safetensors, and scores it on the task's queries, which neither half contains, next to
zero-shot, in-context, fine-tuning and a task vector. Its twin replaces the same demonstrations with flipped labels: the
rows and the ridge are the patch's own, so that nothing but the labels makes them differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.table import Table

from dualview.analyses.scores import (
    Scores,
    SettingScore,
    Twin,
    Written,
    ask_all,
    begin,
    score_setting,
    with_flipped_labels,
)
from dualview.comparison.finetuning import fine_tune
from dualview.comparison.prepare import Prepared
from dualview.duality.on_model.block_patches import Aims, BlockPatches
from dualview.duality.on_model.feed_forward import FeedForward, feed_forwards
from dualview.duality.on_model.shared_patch import (
    fit_patch,
    in_context_aims,
    must_be_linear,
    patch_as_adapter,
    save_patch,
)
from dualview.duality.on_model.task_vector import TaskVector, ask_with_vectors
from dualview.io.atomic import must_be_writable
from dualview.io.errors import UserError, one_of
from dualview.io.json_files import Place, check_place, save_json
from dualview.io.progress import Progress, Silent
from dualview.io.saving import save_somewhere
from dualview.learning.adapter_writing import Exported, must_hold_adapter, save_adapter
from dualview.learning.adapters import WEIGHTS
from dualview.learning.recipe import Status, Tuned
from dualview.metrics.predictions import accuracy
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Patch, compute_prefix
from dualview.options import COMPARISON_ONLY, RunOptions, refuse_options
from dualview.tasks.prompts import Query, encode_queries, prompts_hash
from dualview.tasks.sampling import selection_rows

RIDGES = (0.1, 1.0, 10.0, 100.0)
FIT_ROWS = 64


@dataclass(frozen=True)
class RidgeTrial:
    """One ridge on the selection rows it was not fitted on."""

    ridge: float
    divergence: float
    """Mean KL(in-context ‖ patched) over the candidates' normalised probabilities; the least one is chosen."""
    accuracy: float
    agreement: float


@dataclass(frozen=True, kw_only=True)
class Compiled(Written):
    """A patch that was written, and its scores: zsl, icl, patch, and with baselines ft and task_vector."""

    fitted: int
    """Selection rows it was fitted on; as many or fewer chose the ridge."""
    ridge: float
    trials: tuple[RidgeTrial, ...]
    ft_status: Status | None
    """How the fine-tuned baseline went: ok, diverged or collapsed; None without baselines."""
    task_vector_layer: int | None
    bytes: int
    exported: Exported | None
    """As a LoRA adapter, if that is what was written."""

    def to_json(self) -> dict[str, Any]:
        return {
            "patch": str(self.path),
            "bytes": self.bytes,
            **super().to_json(),
            "fitted": self.fitted,
            "ridge": self.ridge,
            "ridges": [vars(trial) for trial in self.trials],
            "ft_status": self.ft_status,
            "task_vector_layer": self.task_vector_layer,
            **({} if self.exported is None else {"adapter": self.exported.to_json()}),
        }

    def table(self) -> Table:
        """Every setting's accuracy on unseen queries, and how often it gives the in-context answer."""
        table = self.scores(f"{self.shots_used} demonstrations as a patch, {self.n_queries} unseen queries", _NAMES)
        table.caption = f"ridge {self.ridge:g}, fitted on {self.fitted} selection rows, {self.bytes / 2**20:.1f} MiB"
        if self.exported is not None:
            table.caption += f"\n{self.exported.line}"
        table.caption += f"\n{self.twin.line}"
        if self.ft_status not in (None, "ok"):
            table.caption += (
                f"\n! fine-tuning at rate {self.lr:g} {self.ft_status}: its row is not a baseline; give a smaller --lr"
            )
        return table


_NAMES = {
    "zsl": "zero-shot",
    "icl": "in-context",
    "ft": "fine-tuned",
    "task_vector": "task vector",
    "patch": "compiled patch",
}


def compile_patch(
    *,
    out: Path | str,
    model: str | LanguageModel = "embedded",
    format: Literal["patch", "peft"] = "patch",
    rank: int | None = None,
    fit_rows: int = FIT_ROWS,
    ridges: Sequence[float] = RIDGES,
    baselines: bool = True,
    json: Place = None,
    progress: Progress | None = None,
    **options: Any,
) -> Compiled:
    """Fit a patch that replaces the demonstrations, write it to `out`, and score it on queries it has not seen.

    The twin for `dualview run`, fitted with flipped labels, is written with it: to the same file, or for peft to the
    folder `flipped_labels` in that of the adapter.

    format      patch: a safetensors file for `--patch`; peft: a folder with a LoRA adapter, for `--adapter` and PEFT
    rank        of the adapter: truncates it by its singular values; exact without
    fit_rows    selection rows to fit on; as many more choose the ridge
    ridges      candidates, in units of the mean squared length of a map's input
    baselines   also fine-tune, and find a task vector, on the same demonstrations
    json        a file for the scores, or "-" for standard output
    options     fields of `RunOptions`, except those of a comparison alone (task, demos or seed and shots, lr, dtype …)
    """
    progress = progress or Silent()
    refuse_options("compile", options, COMPARISON_ONLY)
    _check(Path(out), format, rank, fit_rows, ridges, json)
    chosen = RunOptions.make(model=model if isinstance(model, str) else model.name, **options)
    prepared, known, clock = begin(chosen, model, progress)
    if format == "peft":
        must_be_linear(feed_forwards(prepared.lm), prepared.lm)
    work = _Work(prepared, fit_rows, progress)
    trials, trial, patch = work.fit(ridges)
    flipped, why_not = with_flipped_labels(prepared, lambda twin: work.patch(twin, trial.ridge))
    clock.lap("fit")
    exported, twin = (
        patch_as_adapter(each, prepared.lm, rank) if format == "peft" and each is not None else None
        for each in (patch, flipped)
    )
    settings, tuned, layer = work.score(patch if exported is None else exported.adapter, baselines)
    clock.lap("showings")
    # Written last, so that there is no patch without its scores.
    metadata = _metadata(prepared, trial, len(work.fitted), why_not)
    if exported is None:
        (path,) = save_somewhere([Path(out)], lambda place: save_patch(place, patch, prepared.lm, metadata, flipped))
    else:
        adapters = exported.adapter, prepared.lm, None if twin is None else twin.adapter
        (path,) = save_somewhere([Path(out)], lambda place: save_adapter(place, *adapters))
    compiled = Compiled.of(
        prepared,
        known,
        clock,
        path=path,
        fitted=len(work.fitted),
        ridge=trial.ridge,
        trials=trials,
        settings=settings,
        lr=None if tuned is None else tuned.lr,
        ft_status=None if tuned is None else tuned.status,
        task_vector_layer=layer,
        bytes=(path if exported is None else path / WEIGHTS).stat().st_size,
        exported=exported,
        twin=Twin(why_not, twin),
    )
    save_json(json, compiled.to_json())
    return compiled


def best_patch(prepared: Prepared, progress: Progress | None = None) -> BlockPatches:
    """The patch that replaces the demonstrations, with the default candidates."""
    return _Work(prepared, FIT_ROWS, progress or Silent()).fit(RIDGES)[2]


def _check(out: Path, format: str, rank: int | None, fit_rows: int, ridges: Sequence[float], json: Place) -> None:
    """Refuse, before the work, what cannot be fitted or written."""
    if fit_rows < 1:
        raise UserError(f"fit_rows is {fit_rows}; a patch is fitted on at least one row.")
    if not ridges or not all(np.isfinite(ridge) and ridge >= 0 for ridge in ridges):
        raise UserError("The ridges to choose from are finite numbers of at least 0; give at least one.")
    one_of("format", format, Literal["patch", "peft"])
    if format == "peft":
        must_hold_adapter(out, rank)
    elif rank is not None:
        raise UserError("--rank is of a LoRA adapter; give --format peft with it.")
    else:
        must_be_writable(out)
    check_place(json)
    if json is not None and Path(json).resolve() == out.resolve():
        raise UserError(f"--out and --json both name {out}; give each its own file.")


def _rows(prepared: Prepared, fit_rows: int) -> tuple[tuple[Query, ...], tuple[Query, ...]]:
    """Selection rows to fit on and others to choose on, in the split's order, without those too long behind the
    demonstrations or behind those with flipped labels: the patch and its twin are fitted on the same rows."""
    rows = encode_queries(prepared.task, prepared.lm.tokenizer, selection_rows(prepared.task, 2 * fit_rows))
    room = prepared.lm.room(prepared.options.max_context)
    if room is not None:
        flipped, _ = with_flipped_labels(prepared, lambda twin: len(twin.prompts.prefix))
        longest = max(len(prepared.prompts.prefix), flipped or 0)
        rows = tuple(q for q in rows if longest + q.longest <= room)
    half = min(fit_rows, len(rows) // 2)
    if half < 1:
        raise UserError(
            f"Task {prepared.task.name} has {len(rows)} selection rows that fit behind the demonstrations; a patch "
            "needs at least two: one to fit on and one to choose the ridge on."
        )
    return rows[:half], rows[half : 2 * half]


class _Work:
    """The passes of a compilation, each run once."""

    def __init__(self, prepared: Prepared, fit_rows: int, progress: Progress) -> None:
        self.prepared, self.lm, self.progress = prepared, prepared.lm, progress
        self.fitted, self.held_out = _rows(prepared, fit_rows)
        self.bare = prepared.prompts.zero_prefix
        self.places: tuple[FeedForward, ...] = feed_forwards(self.lm)
        self.aims = self.read(prepared)

    def read(self, prepared: Prepared) -> tuple[Aims, ...]:
        """What every block holds at the last tokens of the rows to fit on, behind these demonstrations."""
        with self.progress.part("reading in-context states", len(self.fitted)) as advance, torch.no_grad():
            prefix = compute_prefix(self.lm, prepared.prompts.prefix, len(self.bare))
            found = in_context_aims(self.lm, self.places, self.fitted, prefix)
            advance(len(self.fitted))
        return found

    def patch(self, prepared: Prepared, ridge: float) -> BlockPatches:
        """The patch that replaces other demonstrations, on the same rows."""
        return fit_patch(self.lm, self.places, self.fitted, self.bare, self.read(prepared), ridge)

    def fit(self, ridges: Sequence[float]) -> tuple[tuple[RidgeTrial, ...], RidgeTrial, BlockPatches]:
        """Each ridge on the held-out selection rows; the best of them, and its patch."""
        aim = ask_all(self.prepared, self.held_out, self.prepared.prompts.prefix)
        trials: list[RidgeTrial] = []
        patches: list[BlockPatches] = []
        with self.progress.part(f"fitting the patch ({len(ridges)} ridges)", len(ridges)) as advance:
            for ridge in ridges:
                patches.append(fit_patch(self.lm, self.places, self.fitted, self.bare, self.aims, ridge))
                found = score_setting(ask_all(self.prepared, self.held_out, self.bare, patches[-1]), aim, self.held_out)
                trials.append(RidgeTrial(ridge, found.divergence, found.accuracy, found.agreement))
                advance(1)
        best = min(range(len(trials)), key=lambda i: (trials[i].divergence, -trials[i].ridge))
        return tuple(trials), trials[best], patches[best]

    def score(self, patch: Patch, baselines: bool) -> tuple[dict[str, SettingScore], Tuned | None, int | None]:
        """Every setting on the task's queries, the fine-tuned baseline, and the task vector's layer."""
        prompts = self.prepared.prompts
        queries = prompts.queries
        scores: dict[str, Scores] = {}
        with self.progress.part("asking: zsl, icl, patch", 3 * len(queries)) as advance:
            for name, prefix, applied in (
                ("zsl", self.bare, None),
                ("icl", prompts.prefix, None),
                ("patch", self.bare, patch),
            ):
                scores[name] = ask_all(self.prepared, queries, prefix, applied)
                advance(len(queries))
        tuned = layer = None
        if baselines:
            tuned, vector = fine_tune(self.prepared, self.progress).tuned, self.task_vector()
            layer = vector.layer
            scores["ft"] = ask_all(self.prepared, queries, self.bare, tuned.patch)
            scores["task_vector"] = ask_with_vectors(self.lm, queries, self.bare, [vector])[0]
        order = [name for name in _NAMES if name in scores]
        return {name: score_setting(scores[name], scores["icl"], queries) for name in order}, tuned, layer

    def task_vector(self) -> TaskVector:
        """The mean in-context state of one layer: the one that answers best on the held-out selection rows."""
        vectors = [TaskVector(layer, aim.out.mean(0)) for layer, aim in enumerate(self.aims)]
        gold = np.array([query.gold for query in self.held_out])
        with self.progress.part("choosing the task vector's layer", len(self.held_out)) as advance:
            scores = ask_with_vectors(self.lm, self.held_out, self.bare, vectors)
            advance(len(self.held_out))
        found = [accuracy(each, gold) for each in scores]
        return vectors[int(np.argmax(found))]


def _metadata(prepared: Prepared, trial: RidgeTrial, fitted: int, no_twin: str | None) -> dict[str, Any]:
    prompts, lm = prepared.prompts, prepared.lm
    return {
        "weights_hash": lm.weights_hash,
        "model": lm.name,
        "architecture": type(lm.model).__name__,
        "task": prepared.task.name,
        "demos_hash": prompts_hash(prompts.with_queries(())),
        "shots": prompts.shots,
        "shots_used": prompts.shots_used,
        "seed": prepared.seed,
        "bos": prompts.bos,
        "ridge": trial.ridge,
        "fitted": fitted,
        "no_twin": no_twin,
        "options": prepared.options.changed,
    }
