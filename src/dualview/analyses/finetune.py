"""`dualview finetune`: train on demonstrations and write the update as a LoRA adapter, with its scores.

The update of a projection is ΔW = Σ_t e_t x_tᵀ over the training tokens t, so an adapter of that rank is exact; a
smaller `rank` keeps its largest singular values, and what is lost is stated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from dualview.analyses.scores import Written, ask_all, begin, score_setting
from dualview.comparison.finetuning import fine_tune
from dualview.io.errors import UserError
from dualview.io.json_files import Place, check_place, save_json
from dualview.io.progress import Progress, Silent
from dualview.learning.adapter_writing import Exported, deltas_as_adapter, must_hold_adapter, save_adapter
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
        table.caption = f"learning rate {self.lr:g}; {self.exported.line}"
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
    """Fine-tune on the demonstrations and write the update to the folder `out` as a LoRA adapter.

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
    exported = deltas_as_adapter(tuned.patch, rank)
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
    save_adapter(place, exported.adapter, prepared.lm)
    written = FinetunedAdapter.of(
        prepared,
        known,
        clock,
        path=place,
        tokens=sum(len(sequence.ids) for sequence in prompts.training_sequences),
        lr=tuned.lr,
        exported=exported,
        settings={name: score_setting(each, found["icl"], queries) for name, each in found.items()},
    )
    save_json(json, written.to_json())
    return written
