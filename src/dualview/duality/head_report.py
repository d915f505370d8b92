"""What the note claims about a model's heads, for one prompt and one fine-tuning: split, updates, meta-gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dualview.duality.demo_tokens import demo_tokens
from dualview.duality.heads import HeadSplits, record_heads, split_heads
from dualview.duality.meta_gradients import MetaGradients, compare_meta_gradients, token_vectors
from dualview.duality.weight_space import WeightSpace, compare_updates, tuned_on_base_states
from dualview.errors import UserError
from dualview.learning.factors import TrainingTrace
from dualview.learning.update import Deltas
from dualview.models.loading import LanguageModel
from dualview.tasks.prompt import PromptSet, Query


@dataclass(frozen=True)
class HeadReport:
    """In-context learning and fine-tuning on the same heads, layer by layer."""

    split: HeadSplits
    """Softmax attention as λ · demonstrations + (1 − λ) · the rest: exact."""
    weights: WeightSpace
    """ΔW_ICL beside ΔW_FT, both of the relaxed linear attention."""
    meta_gradients: MetaGradients
    """W_V x'_i beside fine-tuning's error signals e_i."""

    def to_json(self) -> dict[str, Any]:
        return {
            "split": self.split.to_json(),
            "weights": self.weights.to_json(),
            "meta_gradients": self.meta_gradients.to_json(),
        }


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
