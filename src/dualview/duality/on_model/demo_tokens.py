"""The tokens that both sides read: each demonstration's template and label, in the prompt and in training.

In context a demonstration stands somewhere in the prefix; in fine-tuning it is a sequence of its own, read once an
epoch. Separators and BOS are left out: training reads no separator, and BOS belongs to no demonstration.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dualview.learning.traces import TrainingTokens
from dualview.tasks.prompts import PromptSet


@dataclass(frozen=True)
class DemoTokens:
    """One entry per shared token, demonstration by demonstration."""

    demo: Int[Tensor, " token"]
    place: Int[Tensor, " token"]
    """In the prefix."""
    position: Int[Tensor, " token"]
    """In the demonstration's training sequence, BOS included."""
    label: Bool[Tensor, " token"]
    """Whether it belongs to the label."""
    ids: Int[Tensor, " token"]

    def __len__(self) -> int:
        return len(self.demo)

    def from_training(
        self, values: Float[Tensor, "training_token ..."], tokens: TrainingTokens
    ) -> Float[Tensor, "token ..."]:
        """Values per training token brought to these tokens, summed over epochs; BOS falls away."""
        width = int(max(self.position.max(), tokens.position.max())) + 1
        known = torch.full((int(tokens.demo.max()) + 1, width), -1, dtype=torch.long)
        known[self.demo, self.position] = torch.arange(len(self))
        where = known[tokens.demo, tokens.position]
        shared = where >= 0
        out = values.new_zeros(len(self), *values.shape[1:])
        return out.index_add_(0, where[shared].to(values.device), values[shared.to(values.device)])


def demo_tokens(prompts: PromptSet) -> DemoTokens:
    """The shared tokens of a prompt set's demonstrations."""
    first = len(prompts.zero_prefix)
    demo: list[int] = []
    place: list[int] = []
    position: list[int] = []
    label: list[bool] = []
    ids: list[int] = []
    for number, (pieces, span) in enumerate(zip(prompts.demos, prompts.demo_spans, strict=True)):
        both = [*span.template, *span.label]
        demo += [number] * len(both)
        place += both
        position += range(first, first + len(both))
        label += [False] * len(span.template) + [True] * len(span.label)
        ids += [*pieces.template, *pieces.label]
    return DemoTokens(*(torch.tensor(x) for x in (demo, place, position, label, ids)))
