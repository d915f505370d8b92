"""What rounding alone can leave of a check on a model: the unit of its precision times the check's conditioning.

A check compares two computations that are equal on paper. On a machine each product of n terms is off by about
0.2 ε √n of its own size when its terms are summed one after another, and by less when they are summed in blocks; which
of these happens depends on the processor, the number of threads and the alignment of the memory. How much of that
reaches the result depends on the model: a patch may be many times larger than the weights it is added to, and the
terms of an update may cancel. So no fixed number is right for every model. A check is asked for

    error ≤ exact + 2 ε √n κ

exact   what the statement leaves without any rounding: 0, or the error of a quadrature
ε, n    the spacing of the numbers at 1, and the longest sum of the model
κ       the check's own conditioning: by how much its result changes, per unit of relative change of every term

For a sum κ is written down: Σ_t ‖term_t‖ / ‖Σ_t term_t‖. For a pass through a whole model it is measured: the outputs
of all maps and norms are disturbed at random, by 1e-4 of their size, and κ is the change of the logits divided by 1e-4.
That step is well above the rounding of float32 and small enough for the response to be linear. 2 √n is ten
times the typical error of a sum. Nothing here looks at the error that was found, so it does not excuse a wrong
statement.

Where 2 ε √n κ exceeds a tenth of what there was to explain, the check shows nothing and is skipped (`require_digits`).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.anatomy.hooks import hooked
from dualview.duality.errors import NotApplicable
from dualview.duality.on_model.single_prompt import last_logits
from dualview.duality.theory.linalg import norm
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Patch

MARGIN = 2.0
_STEP = 1e-4
_DRAWS = 5
_MOST = 0.1


def summed(dtype: torch.dtype, terms: int, conditioning: float) -> float:
    """2 ε √n κ: what rounding can leave of a sum of n terms in this precision."""
    return MARGIN * torch.finfo(dtype).eps * math.sqrt(max(terms, 1)) * conditioning


@dataclass
class Disturbed:
    """A patch, or none, applied to a model in which the output of every map and norm is slightly off."""

    model: nn.Module
    patch: Patch | None
    seed: int
    widest: int = 1
    """The longest sum that was met."""

    rows = 1

    @contextmanager
    def applied(self) -> Generator[None]:
        generator = torch.Generator().manual_seed(self.seed)

        def disturb(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return output
            if inputs and isinstance(inputs[0], Tensor) and inputs[0].is_floating_point():
                self.widest = max(self.widest, inputs[0].shape[-1])
            # Of the vector's size, not each number's own: a sum of large terms that cancel is off by a share of the
            # terms.
            size = output.double().square().mean(-1, keepdim=True).sqrt()
            signs = torch.randint(2, output.shape, generator=generator).to(output.device) * 2 - 1
            return output + (_STEP * size * signs).to(output.dtype)

        leaves = [m for m in self.model.modules() if not list(m.children()) and list(m.parameters(recurse=False))]
        # The patch comes first, so that what it adds is disturbed too.
        patch = nullcontext() if self.patch is None else self.patch.applied()
        with patch, hooked(module.register_forward_hook(disturb) for module in leaves):
            yield


@dataclass(frozen=True)
class PassRounding:
    """What rounding can do to the logits of one pass."""

    largest: float
    """To one logit."""
    length: float
    """To all of them, as the length of the change."""


def pass_rounding(
    lm: LanguageModel, ids: Sequence[int], patch: Patch | None = None, dtype: torch.dtype | None = None
) -> PassRounding:
    """2 ε √n κ of a pass whose logits at the last token are read; `dtype` where the model rounds to a narrower one."""
    plain = last_logits(lm, ids, patch).double()
    changes: list[Float[Tensor, " vocab"]] = []
    widest = len(ids)
    for seed in range(_DRAWS):
        # Several draws: the response to a single one may be small by chance.
        disturbed = Disturbed(lm.model, patch, seed, widest)
        changes.append((last_logits(lm, ids, disturbed).double() - plain) / _STEP)
        widest = disturbed.widest
    unit = summed(dtype or lm.dtype, widest, 1.0)
    # The median: a disturbance may tip a router's choice of experts, and rounding does not.
    largest = median(float(change.abs().max()) for change in changes)
    return PassRounding(unit * largest, unit * median(norm(change) for change in changes))


def require_digits(rounding: float, explained: float, what: str) -> None:
    """Refuse a check if rounding is not small relative to what it is to explain."""
    if not rounding <= _MOST * explained:
        raise NotApplicable(f"{what} by {explained:.0e} only, of which rounding can be {rounding:.0e}; try float64")
