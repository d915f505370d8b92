"""`dualview finetune`: train on demonstrations and write the update as a LoRA adapter, with its scores.

The update of a projection is ΔW = Σ_t e_t x_tᵀ over the training tokens t, so an adapter of that rank is exact; a
smaller `rank` keeps its largest singular values, and what is lost is stated. Its twin is trained in the same way on the
same demonstrations with flipped labels, at the same rate: `dualview run --adapter` asks both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from dualview.analyses.scores import Twin, Written, ask_all, begin, score_setting, with_flipped_labels
from dualview.comparison.finetuning import fine_tune, recipe_of, training_of
from dualview.comparison.prepare import Prepared
from dualview.io.errors import UserError
from dualview.io.json_files import Place, check_place, save_json
from dualview.io.progress import Progress, Silent
from dualview.learning.adapter_writing import Exported, deltas_as_adapter, must_hold_adapter, save_adapter
from dualview.learning.finetune import train
from dualview.models.language_model import LanguageModel
from dualview.options import COMPARISON_ONLY, RunOptions, refuse_options

_NAMES = {"zsl": "zero-shot", "icl": "in-context", "ft": "fine-tuned", "adapter": "adapter as written"}


@dataclass(frozen=True, kw_only=True)
class FinetunedAdapter(Written):
    """An adapter that was written, and its scores: zsl, icl, ft, and the adapter as it was written."""

    exported: Exported
    tokens: int
    """Training tokens of one epoch."""

    def to_json(self) -> dict[str, Any]:
        return {"adapter": str(self.path), **self.exported.to_json(), **super().to_json(), "tokens": self.tokens}

    def table(self) -> Table:
        table = self.scores(f"fine-tuned on {self.shots_used} demonstrations, {self.n_queries} queries", _NAMES)
        table.caption = f"learning rate {self.lr:g}; {self.exported.line}\n{self.twin.line}"
        return table


def finetune_adapter(
    *,
    out: Path | str,
    model: str | LanguageModel = "embedded",
    rank: int | None = None,
    json: Place = None,
    progress: Progress | None = None,
    **options: Any,
) -> FinetunedAdapter:
    """Fine-tune on the demonstrations and write the update to the folder `out` as a LoRA adapter, its twin to
    `flipped_labels` in it.

    rank      keep so many singular values of every update; all of them (exact) if not given
    json      a file for the scores, or "-" for standard output
    options   fields of `RunOptions`, except those of a comparison alone
    """
    progress, place = progress or Silent(), Path(out)
    refuse_options("finetune", options, COMPARISON_ONLY)
    must_hold_adapter(place, rank)
    check_place(json)
    chosen = RunOptions.make(model=model if isinstance(model, str) else model.name, **options)
    if chosen.ft_params == "all" or chosen.ft_rule == "linearised":
        what = "ft_params all" if chosen.ft_params == "all" else "ft_rule linearised"
        raise UserError(f"The option {what} gives no low-rank change of linear maps; a LoRA adapter cannot hold it.")
    prepared, known, clock = begin(chosen, model, progress)
    tuned = fine_tune(prepared, progress).tuned
    if tuned.status == "diverged":
        raise UserError(
            f"Fine-tuning diverged at learning rate {tuned.lr:g}; nothing was written, give a smaller --lr."
        )
    exported, twin = deltas_as_adapter(tuned.patch, rank), _twin(prepared, tuned.lr, rank)
    clock.lap("fine-tuning")
    prompts = prepared.prompts
    bare, queries = prompts.zero_prefix, prompts.queries
    with progress.part("asking: zsl, icl, ft, adapter", 1) as advance:
        asked = {
            "zsl": (bare, None),
            "icl": (prompts.prefix, None),
            "ft": (bare, tuned.patch),
            "adapter": (bare, exported.adapter),
        }
        found = {name: ask_all(prepared, queries, *how) for name, how in asked.items()}
        advance(1)
    clock.lap("asking")
    save_adapter(place, exported.adapter, prepared.lm, None if twin.exported is None else twin.exported.adapter)
    written = FinetunedAdapter.of(
        prepared,
        known,
        clock,
        path=place,
        tokens=sum(len(sequence.ids) for sequence in prompts.training_sequences),
        lr=tuned.lr,
        exported=exported,
        twin=twin,
        settings={name: score_setting(each, found["icl"], queries) for name, each in found.items()},
    )
    save_json(json, written.to_json())
    return written


def _twin(prepared: Prepared, lr: float, rank: int | None) -> Twin:
    """The same fine-tuning on flipped labels, as the control `ft_flipped_labels` of a run."""

    def trained(flipped: Prepared) -> Exported:
        [tuned] = train(flipped.lm, [training_of(flipped, flipped.prompts, lr)], recipe_of(flipped))
        if tuned.status == "diverged":
            raise UserError(f"Fine-tuning on flipped labels diverged at learning rate {lr:g}.")
        return deltas_as_adapter(tuned.patch, rank)

    made, why_not = with_flipped_labels(prepared, trained)
    return Twin(why_not, made)
