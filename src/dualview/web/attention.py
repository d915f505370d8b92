"""Where the query looks, in context and in fine-tuning's dual form, token by token, by layer and head.

In context a token's part is the softmax mass the query's last token puts on it. In fine-tuning it is the token's share
in what the value projections' update does to the query,

    share_t = ⟨e_t, ΔW x⟩ (x_t·x) / ‖ΔW x‖²        signed; over all training tokens they sum to 1

(`demo_tokens`). A head's share is the same over the rows of W_V that make the head's values; heads that share their
values (grouped attention) share it too. The same at a learning rate of 0, with the error signals of the first gradient,
is the control for how far the two rankings agree. Attention mass is not influence, and no share says what would have
happened without a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.anatomy.layers import Layer
from dualview.comparison.finetuning import recipe_of
from dualview.comparison.prepare import Prepared
from dualview.duality.on_model.demo_tokens import DemoTokens, demo_tokens, ft_shares, icl_mass
from dualview.duality.on_model.dual_finetuning import role_factors, trace_for, update_contributions
from dualview.duality.on_model.single_prompt import projected
from dualview.duality.theory.linear import aggregate
from dualview.io.errors import UserError
from dualview.io.progress import Advance
from dualview.learning.recipe import steps_of
from dualview.learning.traces import Factors, TrainingTrace, trace_training
from dualview.metrics.kendall import kendall
from dualview.metrics.summary import plain
from dualview.models.language_model import LanguageModel

MOST_NUMBERS = 1_000_000
"""What a page is sent by head; a large model with a long prompt is shown by layer only."""


@dataclass(frozen=True)
class Parts:
    """One side's part of every token: over the whole model, by layer, and by head (or group of heads)."""

    whole: Float[Tensor, " token"]
    layers: Float[Tensor, "layer token"]
    heads: Float[Tensor, "layer head token"]

    def by_demo(self, shared: DemoTokens) -> Parts:
        """The same summed over each demonstration's tokens."""
        return Parts(*(_summed(x, shared.demo) for x in (self.whole, self.layers, self.heads)))

    def to_json(self) -> dict[str, Any]:
        heads = _listed(self.heads) if self.heads.numel() <= MOST_NUMBERS else None
        return {"whole": _listed(self.whole), "layers": _listed(self.layers), "heads": heads}


RATES = 2
"""Fine-tuning is decomposed at the given rate, and at 0."""


def attention_steps(prepared: Prepared) -> int:
    """How often `attention_json` reports its progress: ICL's pass, and for each rate every step and every layer."""
    steps = len(steps_of(prepared.prompts.training_sequences, recipe_of(prepared)))
    return 1 + RATES * (steps + len(prepared.lm.anatomy.layers))


def attention_json(prepared: Prepared, lr: float, advance: Advance) -> dict[str, Any]:
    """Both sides over the demonstrations' tokens; fine-tuning's is null, with the reason, where it has no dual form.

    `advance` is called often, so that a client that has disconnected is noticed.
    """
    lm, prompts = prepared.lm, prepared.prompts
    shared = demo_tokens(prompts)
    mass = icl_mass(lm, prompts, shared)
    advance(1)
    icl = Parts(mass.nanmean(1).mean(0), mass.nanmean(1), mass)
    found: dict[str, Any] = {
        "tokens": [
            {"text": str(lm.tokenizer.decode([int(token)])), "demo": int(demo), "label": bool(label)}
            for token, demo, label in zip(shared.ids, shared.demo, shared.label, strict=True)
        ],
        "groups": [groups_of(layer, layer.projections["v"][-1].d_out) for layer in lm.anatomy.layers],
        "icl": icl.to_json(),
        "icl_demo": icl.by_demo(shared).to_json(),
        "ft": None,
        "ft_demo": None,
        "tau": None,
        "reason": None,
    }
    try:
        recipe = recipe_of(prepared)
        traces = trace_training(lm, prompts.training_sequences, (lr, 0.0), recipe, progress=advance)
        ft, control = (dual_parts(prepared, trace_for(lm, trace), shared, advance) for trace in traces)
    except UserError as error:
        return {**found, "reason": str(error)}
    sides = {"": ft, "_lr0": control}
    taus = {f"token{name}": tau(icl.whole, side.whole) for name, side in sides.items()}
    owners = shared.demo
    taus |= {f"demo{n}": tau(_summed(icl.whole, owners), _summed(s.whole, owners)) for n, s in sides.items()}
    return {**found, "ft": ft.to_json(), "ft_demo": ft.by_demo(shared).to_json(), "tau": taus}


def dual_parts(prepared: Prepared, trace: TrainingTrace, shared: DemoTokens, advance: Advance) -> Parts:
    """Fine-tuning's shares of the value projections' update, brought from training's tokens to the prompt's."""
    lm, prompts = prepared.lm, prepared.prompts
    ids = [*prompts.zero_prefix, *prompts.queries[0].ids]
    layers = ft_shares(lm, trace, ids)["v"]
    heads = head_shares(lm, trace, ids, advance)
    moved = [shared.from_training(x.movedim(-1, 0), trace.tokens).movedim(0, -1) for x in (layers, heads)]
    whole = shared.from_training(torch.nan_to_num(layers.nanmean(0)), trace.tokens)
    return Parts(whole, moved[0], moved[1])


def head_shares(
    lm: LanguageModel, trace: TrainingTrace, ids: list[int], advance: Advance
) -> Float[Tensor, "layer group training"]:
    """Every group of heads' own shares: those of the rows of W_V that make its values; NaN for groups a layer lacks."""
    factors = role_factors(lm, trace, "v")
    with trace.tuned.patch.applied():
        taps = projected(lm, ids, [each.projection for each in factors])
    counts = [groups_of(layer, f.errors.shape[1]) for layer, f in zip(lm.anatomy.layers, factors, strict=True)]
    found = torch.full((len(factors), max(counts), len(trace.tokens.step)), torch.nan, dtype=torch.float64)
    for into, each, tap, count in zip(found, factors, taps, counts, strict=True):
        for group, errors in enumerate(each.errors.chunk(count, 1)):
            parts = update_contributions(Factors(each.projection, each.inputs, errors), tap.x[0, -1]).double().cpu()
            total = parts.sum()
            into[group] = parts / total if float(total) > 0 else torch.nan
        advance(1)
    return found


def groups_of(layer: Layer, rows: int) -> int:
    """How many groups of heads have values of their own; 1 where the rows of W_V do not divide into heads."""
    groups, rest = divmod(rows, layer.d_head)
    return groups if rest == 0 and groups and layer.heads % groups == 0 else 1


def tau(x: Float[Tensor, " item"], y: Float[Tensor, " item"]) -> float | None:
    """Kendall's tau-b of the two sides; None where either is constant."""
    return plain(float(kendall(*(np.asarray(side)[None, None] for side in (x, y)))[0, 0]))


def _summed(x: Float[Tensor, "*more token"], owner: Int[Tensor, " token"]) -> Float[Tensor, "*more demo"]:
    return aggregate(x.movedim(-1, 0), owner).movedim(0, -1)


def _listed(x: Float[Tensor, "*shape"]) -> Any:
    """Nested lists with null for NaN; six digits are more than a colour or a bar can show."""
    if x.dim() > 1:
        return [_listed(row) for row in x]
    return [None if value != value else float(f"{value:.6g}") for value in x.tolist()]
