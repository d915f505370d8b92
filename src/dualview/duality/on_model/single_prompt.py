"""Running one whole prompt through a model as a single row."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.anatomy.dispatch import Strategy, run_forward
from dualview.anatomy.layers import Projection
from dualview.models.language_model import LanguageModel
from dualview.models.prefix import Causal, as_row
from dualview.models.probe import Tap, Whole, tapping
from dualview.models.scoring import Patch


def forward_row(
    lm: LanguageModel,
    ids: Sequence[int],
    *,
    strategy: Strategy | None = None,
    positions: Sequence[int] | None = None,
    rows: int = 1,
    keep: Sequence[int] = (-1,),
) -> Float[Tensor, "batch kept vocab"]:
    """Logits of one prompt at the tokens `keep`; the same prompt in every row of the batch."""
    tokens = as_row(ids, lm.device, rows)
    at = torch.tensor(list(range(len(ids)) if positions is None else positions), device=lm.device)
    wanted = torch.tensor([index % len(ids) for index in keep], device=lm.device)
    how = whole_row(lm, at) if strategy is None else strategy
    return run_forward(lm.model, how, tokens, at[None].expand(rows, -1), wanted, native=not lm.fast)


def whole_row(lm: LanguageModel, at: Tensor) -> Strategy:
    """Plain causal attention over a row: dualview's own where the architecture allows it, else the model's."""
    return Causal(at) if lm.fast else Whole(at, range(len(at)), 0, None)


def last_logits(lm: LanguageModel, ids: Sequence[int], patch: Patch | None = None) -> Float[Tensor, " vocab"]:
    """The logits after a prompt, with a patch applied or without."""
    with torch.no_grad(), nullcontext() if patch is None else patch.applied():
        return forward_row(lm, ids)[0, 0]


def projected(lm: LanguageModel, ids: Sequence[int], projections: Sequence[Projection]) -> list[Tap]:
    """The input and output of each projection at every token of a prompt, in the order given."""
    taps: list[Tap] = []
    with torch.no_grad(), tapping(projections, taps):
        forward_row(lm, ids)
    # Hooks fire in the order of the model, not of the list.
    return [next(tap for tap in taps if tap.projection is projection) for projection in projections]
