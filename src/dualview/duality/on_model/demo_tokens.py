"""The tokens that both sides read (each demonstration's template and label), and each token's share in a query.

In context a demonstration is a part of the prefix; in fine-tuning it is a sequence of its own, read once an
epoch. Separators and BOS are left out: training reads no separator, and BOS belongs to no demonstration.
A token's share is that of the softmax in context, and that of the update in fine-tuning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dualview.anatomy.layers import Role
from dualview.duality.on_model.dual_finetuning import role_factors, update_contributions
from dualview.duality.on_model.single_prompt import projected
from dualview.duality.on_model.softmax_split import by_layer, record_heads
from dualview.learning.traces import TrainingTokens, TrainingTrace
from dualview.models.language_model import LanguageModel
from dualview.tasks.prompts import PromptSet


@dataclass(frozen=True)
class Placing:
    """Which training token is which shared token."""

    count: int
    read: Int[Tensor, " kept"]
    """The training tokens that are shared ones."""
    into: Int[Tensor, " kept"]

    def __call__(self, values: Float[Tensor, "training_token ..."]) -> Float[Tensor, "token ..."]:
        out = values.new_zeros(self.count, *values.shape[1:])
        return out.index_add_(0, self.into, values.index_select(0, self.read))


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
        return self.placing(tokens, values.device)(values)

    def placing(self, tokens: TrainingTokens, device: torch.device) -> Placing:
        """How `from_training` does it, for several arrays of values on a device."""
        # A table from (demonstration, position) to the shared token; −1 marks BOS, which no demonstration owns.
        width = int(max(self.position.max(), tokens.position.max())) + 1
        known = torch.full((int(tokens.demo.max()) + 1, width), -1, dtype=torch.long)
        known[self.demo, self.position] = torch.arange(len(self))
        where = known[tokens.demo, tokens.position]
        read = torch.nonzero(where >= 0)[:, 0]
        return Placing(len(self), read.to(device), where[read].to(device))


def demo_tokens(prompts: PromptSet) -> DemoTokens:
    """The shared tokens of a prompt set's demonstrations."""
    first = len(prompts.zero_prefix)
    tokens: list[tuple[int, int, int, bool, int]] = []
    for demo, (pieces, span) in enumerate(zip(prompts.demos, prompts.demo_spans, strict=True)):
        pairs = zip([*span.template, *span.label], [*pieces.template, *pieces.label], strict=True)
        for i, (place, token) in enumerate(pairs):
            tokens.append((demo, place, first + i, i >= len(span.template), token))
    return DemoTokens(*(torch.tensor(column) for column in zip(*tokens, strict=True)))


def icl_mass(lm: LanguageModel, prompts: PromptSet, shared: DemoTokens) -> Float[Tensor, "layer head token"]:
    """The softmax mass of the query's last token on every shared token; NaN for heads a layer does not have."""
    layers = record_heads(lm, [*prompts.prefix, *prompts.queries[0].ids])
    return by_layer([layer.weights()[:, shared.place.to(layer.q.device)] for layer in layers])


def ft_shares(
    lm: LanguageModel, trace: TrainingTrace, ids: Sequence[int]
) -> dict[Role, Float[Tensor, "layer training"]]:
    """⟨e_t, ΔW x⟩ (x_t·x) / ‖ΔW x‖² of every training token, for the roles that were trained.

    x is what the projection reads at the prompt's last token in the tuned model. NaN where a layer's update is zero.
    """
    trained = {factors.projection.name for factors in trace.factors}
    roles: list[Role] = [
        role
        for role in ("v", "k")
        if all(any(p.name in trained for p in layer.projections[role]) for layer in lm.anatomy.layers)
    ]
    found: dict[Role, Tensor] = {}
    for role in roles:
        factors = role_factors(lm, trace, role)
        if any(f.errors.shape[1] == 0 for f in factors):
            continue
        with trace.tuned.patch.applied():
            taps = projected(lm, ids, [f.projection for f in factors])
        rows: list[Tensor] = []
        for f, tap in zip(factors, taps, strict=True):
            each = update_contributions(f, tap.x[0, -1]).double().cpu()
            total = each.sum()
            # Shares of an update of size 0 are undefined, not 0.
            rows.append(each / total if float(total) > 0 else torch.full_like(each, torch.nan))
        found[role] = torch.stack(rows)
    return found
