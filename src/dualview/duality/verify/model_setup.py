"""What the checks on a model share: a small comparison of its own, a fine-tuning that moves the logits, the judging.

Every check uses three demonstrations, one query and a few steps of SGD, so each is independent. Each is allowed what
rounding can make of it, from the model's precision and the conditioning of the check (`rounding`). In a model whose
attention hardly moves its logits (small random weights) a small update is lost in rounding; there the rate is raised
until the logits move (`ModelSetup.move`), so that the identity is checked and not the rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.errors import NotApplicable
from dualview.duality.on_model.context_patch import PatchReport
from dualview.duality.on_model.dual_finetuning import trace_for
from dualview.duality.on_model.feed_forward import FeedForward, feed_forwards
from dualview.duality.on_model.rounding import PassRounding, pass_rounding, require_digits
from dualview.duality.on_model.single_prompt import last_logits
from dualview.duality.theory.linalg import norm
from dualview.duality.verify.check import Deviation, Draws
from dualview.io.errors import UserError
from dualview.learning.recipe import TrainingRecipe
from dualview.learning.traces import TrainingTrace, trace_training
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Patch
from dualview.tasks.prompts import Demo, PromptSet, Query, resolve_bos

_TEXTS = (
    ("The soup was cold and the waiter never came back.", "bad"),
    ("We laughed until the lights went on.", "good"),
    ("Two hours of my life that I would like to have again.", "bad"),
    ("A small, warm, clever book.", "good"),
    ("The room smelled of smoke and the bed was broken.", "bad"),
    ("Everything worked on the first try.", "good"),
    ("It rained, the train was late, and nobody told us.", "bad"),
    ("The best bread in the whole town.", "good"),
)
_RATE = 3e-3
_MOST_POWERS = 9


@dataclass(frozen=True)
class ModelSetup:
    """A model, three demonstrations and two queries."""

    lm: LanguageModel
    prompts: PromptSet

    @property
    def query(self) -> Query:
        return self.prompts.queries[0]

    @property
    def bare(self) -> tuple[int, ...]:
        return self.prompts.zero_prefix

    @property
    def demo_places(self) -> range:
        return range(len(self.bare), len(self.prompts.prefix))

    @property
    def in_context_ids(self) -> list[int]:
        return [*self.prompts.prefix, *self.query.ids]

    @property
    def zero_shot_ids(self) -> list[int]:
        return [*self.bare, *self.query.ids]

    def train(self, rate: float = _RATE, epochs: int = 1) -> TrainingTrace:
        """Fine-tune K and V on the demonstrations, keeping the factors."""
        (trace,) = trace_training(self.lm, self.prompts.training_sequences, [rate], TrainingRecipe(epochs=epochs))
        return trace_for(self.lm, trace)

    def move(self, share: float = 1e-2, epochs: int = 1) -> Moved:
        """Fine-tune at the smallest rate of 0.003 · 10ⁿ that changes the query's logits by `share` of their spread."""
        base = last_logits(self.lm, self.zero_shot_ids)
        enough = share * norm(base - base.mean())
        # The smallest rate that moves the logits: a larger one would only add to the higher orders.
        for power in range(_MOST_POWERS):
            try:
                trace = self.train(_RATE * 10**power, epochs)
            except UserError:  # it diverged
                break
            tuned = last_logits(self.lm, self.zero_shot_ids, trace.tuned.patch)
            if norm(tuned - base) >= enough:
                return Moved(trace, base, tuned)
        raise NotApplicable("no learning rate changes its logits and leaves them finite")


@dataclass(frozen=True)
class Moved:
    """A fine-tuning that changed the query's logits, before and after."""

    trace: TrainingTrace
    base: Float[Tensor, " vocab"]
    tuned: Float[Tensor, " vocab"]

    def miss(self, found: Float[Tensor, " vocab"]) -> float:
        """‖found − tuned‖ / ‖tuned − base‖: 0 is the fine-tuned model, 1 the base, 2 the opposite update."""
        return norm(found - self.tuned) / norm(self.tuned - self.base)


def require_model(model: object) -> LanguageModel:
    """The model itself; an error for anything that is not a model of enough precision."""
    if not isinstance(model, LanguageModel):
        raise UserError(f"There are no identities to check on a {type(model).__name__}; give a LanguageModel.")
    if model.dtype not in (torch.float32, torch.float64):
        raise UserError(f"The identities are checked in float32 or float64, not in {model.dtype}; load the model so.")
    return model


def trial(draws: Draws, model: object) -> ModelSetup:
    """Demonstrations and queries in an order that the draws decide: text, or random tokens without a tokenizer."""
    lm = require_model(model)
    order = torch.randperm(len(_TEXTS), generator=draws.generator).tolist()
    tokenizer = lm.tokenizer

    def ids(text: str, count: int) -> tuple[int, ...]:
        if tokenizer is not None:
            return tuple(int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"])
        # A model in memory may come without a tokenizer.
        return tuple(torch.randint(lm.vocab, (count,), generator=draws.generator).tolist())

    labels = {label: ids(f" {label}", 1) for label in ("bad", "good")}
    if not all(labels.values()) or labels["bad"] == labels["good"]:  # no words of this vocabulary: any two tokens
        first, second = torch.randperm(lm.vocab, generator=draws.generator)[:2].tolist()
        labels = {"bad": (first,), "good": (second,)}
    between = ids("\n", 1)
    pairs = [_TEXTS[index] for index in order]
    demos = tuple(Demo(ids(f"Text: {text} It is", 7), labels[label], between) for text, label in pairs[:3])
    candidates = tuple(labels.values())
    queries = tuple(Query(ids(f"Text: {text} It is", 6), candidates, 0) for text, _ in pairs[3:5])
    bos = None if tokenizer is None else resolve_bos(tokenizer, "auto")
    return ModelSetup(lm, PromptSet(bos, demos, queries, len(demos)))


def missed(setup: ModelSetup, moved: Moved, found: Patch, right: Patch) -> Deviation:
    """By how much the logits under `found` miss the fine-tuned ones; the rounding is that under the right patch."""
    rounding = pass_rounding(setup.lm, setup.zero_shot_ids, right)
    gap = norm(moved.tuned - moved.base)
    require_digits(rounding.length, gap, "fine-tuning changes its logits")
    return Deviation(moved.miss(last_logits(setup.lm, setup.zero_shot_ids, found)), rounding=rounding.length / gap)


def judged(setup: ModelSetup, report: PatchReport, rounding: PassRounding) -> Deviation:
    """The largest difference of the logits, or the patched difference relative to the unpatched, whichever is larger.

    The first alone would pass any patch of a model whose logits hardly differ; the second alone, a coarse one where
    they differ much. `rounding` is that of the pass under the right patch.
    """
    require_digits(rounding.length, report.gap, "the demonstrations change its logits")
    note = "the norms at the end of its blocks round float64 to float32" if _narrowed(setup.lm) else None
    error = max(report.error, report.relative)
    return Deviation(error, report.unpatched, max(rounding.largest, rounding.length / report.gap), note)


def patched_rounding(setup: ModelSetup, query: Query, patch: Patch) -> PassRounding:
    """What rounding can do to the zero-shot logits of a query under a patch."""
    narrow = torch.float32 if _narrowed(setup.lm) else None
    return pass_rounding(setup.lm, [*setup.bare, *query.ids], patch, narrow)


def _narrowed(lm: LanguageModel) -> bool:
    return lm.dtype == torch.float64 and any(_rounds(place) for place in feed_forwards(lm))


def _rounds(place: FeedForward) -> bool:
    """Whether a block ends in a norm that returns numbers of single precision in a float64 model (Gemma's).

    The sums of such numbers lie on the edge between two of them so often that a difference of 1e-16 before the next
    norm becomes one of 1e-7 after it.
    """
    if place.kind != "scale":
        return False
    weight = cast(Tensor, place.carrier.weight)
    # Values that float32 cannot hold exactly, so that rounding to it shows.
    x = torch.linspace(-1.3, 1.7, weight.shape[0], dtype=torch.float64, device=weight.device)[None]
    with torch.no_grad():
        y = place.carrier.forward(x)
    return bool(torch.equal(y, y.float().double()))
