"""`dualview heads`: in-context learning and fine-tuning as updates of the same heads, layer by layer, for one query.

Three comparisons: the exact split of every head's softmax into demonstrations and the
rest; the relaxed linear attention's ΔW_ICL and fine-tuning's ΔW_FT in weight space; the "meta-gradients" W_V x'_i and
fine-tuning's true error signals e_i. Every similarity has a floor, from shuffled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dualview.comparison.single_query import question
from dualview.duality.on_model.demo_tokens import demo_tokens
from dualview.duality.on_model.meta_gradients import MetaGradients, compare_meta_gradients, token_vectors
from dualview.duality.on_model.softmax_split import HeadSplits, record_heads, split_heads
from dualview.duality.on_model.weight_space import WeightSpace, compare_updates, tuned_on_base_states
from dualview.io.errors import UserError
from dualview.io.json_files import Place, check_place, save_json
from dualview.io.progress import Progress, Silent
from dualview.learning.traces import TrainingTrace
from dualview.learning.weight_patches import Deltas
from dualview.models.language_model import LanguageModel
from dualview.tasks.prompts import PromptSet, Query


@dataclass(frozen=True)
class HeadReport:
    """In-context learning and fine-tuning on the same heads, layer by layer."""

    split: HeadSplits
    """Softmax attention as λ · demonstrations + (1 − λ) · the rest: exact."""
    weights: WeightSpace
    """ΔW_ICL and ΔW_FT, both of the relaxed linear attention."""
    meta_gradients: MetaGradients
    """W_V x'_i and fine-tuning's error signals e_i."""

    def to_json(self) -> dict[str, Any]:
        return {
            "split": self.split.to_json(),
            "weights": self.weights.to_json(),
            "meta_gradients": self.meta_gradients.to_json(),
        }

    def table(self) -> RenderableType:
        """Three tables with a line per layer; every similarity has its floor next to it."""
        split, weights, meta = self.split, self.weights, self.meta_gradients
        # Layers may have different numbers of heads; the missing ones are NaN.
        masses = [float(mass) for mass in split.mass.nanmean(1)]
        return Group(
            _table(
                "softmax attention = λ · demonstrations + (1 − λ) · the rest, exactly",
                [("λ, mean over heads", masses, ".3f"), ("error", split.error, ".1e")],
            ),
            _table(
                f"ΔW_ICL and ΔW_FT of the relaxed linear heads (rank {weights.rank}, {weights.shuffles} shuffles)",
                [
                    ("cosine", weights.cosine, "+.3f"),
                    ("floor", weights.cosine_floor, "+.3f"),
                    ("±", weights.cosine_floor_sd, ".3f"),
                    ("value spaces", weights.left_overlap, ".3f"),
                    ("floor", weights.left_floor, ".3f"),
                    ("key spaces", weights.right_overlap, ".3f"),
                    ("floor", weights.right_floor, ".3f"),
                    ("rank ICL", weights.stable_rank_icl, ".2f"),
                    ("rank FT", weights.stable_rank_ft, ".2f"),
                    ("size ICL/FT", weights.norm_ratio, ".3g"),
                ],
            ),
            _table(
                f"“meta-gradients” W_V x and error signals e of the same {meta.tokens} tokens",
                [
                    ("cosine", meta.cosine, "+.3f"),
                    ("floor", meta.cosine_floor, "+.3f"),
                    ("±", meta.cosine_floor_sd, ".3f"),
                    ("CKA", meta.cka, ".3f"),
                    ("floor", meta.cka_floor, ".3f"),
                    ("value spaces", meta.overlap, ".3f"),
                    ("chance", meta.overlap_chance, ".3f"),
                    ("token spaces", meta.token_overlap, ".3f"),
                    ("floor", meta.token_overlap_floor, ".3f"),
                ],
            ),
            Text(_LEGEND),
        )


_LEGEND = (
    "cosine: 1 the same update, 0 unrelated. spaces: mean squared cosine of the principal angles, 1 shared. rank: "
    "stable rank. A similarity means something only above its floor (the same with shuffled tokens) or above chance."
)


def _table(title: str, columns: Sequence[tuple[str, Sequence[float], str]]) -> Group:
    table = Table(box=None)
    table.add_column("layer", justify="right")
    for name, _, _ in columns:
        table.add_column(name, justify="right")
    for layer, row in enumerate(zip(*(values for _, values, _ in columns), strict=True)):
        cells = ("" if math.isnan(x) else format(x, style) for x, (_, _, style) in zip(row, columns, strict=True))
        table.add_row(str(layer), *cells)
    return Group(Text(f"\n{title}", "bold"), table)


def head_report(
    lm: LanguageModel,
    prompts: PromptSet,
    trace: TrainingTrace,
    query: Query | None = None,
    *,
    rank: int = 8,
    shuffles: int = 5,
    seed: int = 0,
) -> HeadReport:
    """Measure all three on one query (the prompts' first, if none is given) and one traced fine-tuning."""
    asked = prompts.queries[0] if query is None else query
    if not isinstance(trace.tuned.patch, Deltas):
        raise UserError("The heads' updates are those of k and v projections: fine-tune with ft_params kv or qkv.")
    patch = trace.tuned.patch.moved_to(lm.anatomy)
    ids = [*prompts.prefix, *asked.ids]
    demos = range(len(prompts.zero_prefix), len(prompts.prefix))
    heads = record_heads(lm, ids)
    tuned = tuned_on_base_states(lm, patch, prompts.zero_prefix, asked.ids, len(prompts.prefix))
    vectors = token_vectors(lm, trace, ids, demo_tokens(prompts))
    return HeadReport(
        split=split_heads(heads, demos),
        weights=compare_updates(heads, demos, tuned, rank, shuffles, seed),
        meta_gradients=compare_meta_gradients(vectors, rank, shuffles, seed),
    )


@dataclass(frozen=True)
class HeadsResult:
    """The query and the report on it."""

    model: str
    task: str
    query: str
    shots_used: int
    lr: float
    report: HeadReport

    def to_json(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name != "report"}
        return own | self.report.to_json()

    def table(self) -> RenderableType:
        """One line for each layer: the split, the two updates, the two vectors of every token."""
        caption = f"{self.shots_used} demonstrations, in context and fine-tuned (rate {self.lr:g}), layer by layer"
        return Group(Text(f"{self.task}: {self.query}", "bold"), Text(caption), self.report.table())


def heads(
    *,
    query: str,
    model: str | LanguageModel = "embedded",
    rank: int = 8,
    shuffles: int = 5,
    json: Place = None,
    progress: Progress | None = None,
    **options: Any,
) -> HeadsResult:
    """Compare what demonstrations and fine-tuning do to every layer's heads, for one query.

    query     the text of the template's field; a JSON object of the fields where there are several (or `choices`)
    rank      leading singular directions whose spaces are compared
    shuffles  random orders of the tokens behind every floor
    json      a file for every layer's numbers, or "-" for standard output
    options   fields of `RunOptions` that apply to one query (task, demos or seed and shots, lr, ft_loss, dtype …)
    """
    for name, value in (("rank", rank), ("shuffles", shuffles)):
        if value < 1:
            raise UserError(f"--{name} must be at least 1, not {value}.")
    check_place(json)
    progress = progress or Silent()
    asked = question("heads", query, model, options, progress)
    lm, prompts = asked.prepared.lm, asked.prepared.prompts
    with progress.part("comparing heads", 1) as advance:
        report = head_report(lm, prompts, asked.trace, rank=rank, shuffles=shuffles)
        advance(1)
    found = HeadsResult(
        model=lm.name,
        task=asked.prepared.task.name,
        query=asked.prepared.task.render(asked.row),
        shots_used=prompts.shots_used,
        lr=asked.trace.tuned.lr,
        report=report,
    )
    save_json(json, found.to_json())
    return found
