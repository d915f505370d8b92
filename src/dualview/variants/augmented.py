"""Augmented attention (Ren & Liu 2024, arXiv 2310.13220; the talk's "augmented model").

Self-supervised learning augments both sides of its pairs; in their dual loss these are v_i and φ(k_i):

    y_t = g1(W_V X) softmax(g2(W_K X)ᵀ q_t / √d),        g(Wx) = Wx + c W_2 σ(W_1 x)

g1 and g2 are parallel adapters (He et al. 2022, arXiv 2110.04366) with a bottleneck of `rank` units, one pair per
layer, without biases. W_2 starts at zero, so training starts from the model as it is. c = 0 is softmax attention, to
the bit that of `sdpa`, for any adapters.

The adapters read the projections' input and act before rotation, key norms and the cache, none of which an attention
function sees: `attach` hooks them onto the projections themselves, separate or fused, whose weights and names stay as
they were. The attention proper is the model's softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.anatomy.layers import Layer, Projection, Role
from dualview.io.errors import UserError
from dualview.variants.base import AtLeastOne, Coefficient, Equipment, Variant
from dualview.variants.softmax import Call, softmax_attention

_ACTIVATIONS = {"relu": torch.relu, "gelu": nn.functional.gelu, "silu": nn.functional.silu, "tanh": torch.tanh}


class _Adapters(Equipment):
    """g1 and g2 of one layer, hooked onto its projections."""

    variant: Augmented

    def __init__(self, variant: Augmented, attention: nn.Module, layer: Layer | None, index: int) -> None:
        super().__init__(variant, attention, layer, index)
        if layer is None:
            raise UserError(
                "augmented: the projections of this model are not known; use attach(model, Augmented(...))."
            )
        self.kv_heads = layer.kv_heads
        sides: dict[str, Role] = {"g1": "v", "g2": "k"}
        used = {"g1": variant.values, "g2": variant.keys}
        wanted: dict[str, Role] = {name: role for name, role in sides.items() if used[name]}
        self.projections = {name: _only(layer.projections[role], name, attention) for name, role in wanted.items()}
        for name, projection in self.projections.items():
            draw = torch.Generator().manual_seed(variant.seed * 1_000_003 + 2 * index + list(sides).index(name))
            self.add_module(name, _bottleneck(projection, variant.rank, draw))
            # Not saved: the rows follow from the architecture.
            self.register_buffer(f"{name}_rows", projection.rows, persistent=False)

    def hook(self, attention: nn.Module) -> None:
        if not self.handles:
            for name, projection in self.projections.items():
                self.handles.append(projection.module.register_forward_hook(partial(self._augment, name)))

    def _augment(self, name: str, _projection: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        down, up = self.get_submodule(name).children()
        rows: Tensor | None = getattr(self, f"{name}_rows")
        c = self.coefficient()
        added = up(_ACTIVATIONS[self.variant.activation](down(inputs[0])))
        if isinstance(c, Tensor) and c.ndim:
            c = c.repeat_interleave(added.shape[-1] // self.kv_heads)
        added = (c * added).to(output.dtype)
        return output + added if rows is None else output.index_add(-1, rows, added)


@dataclass(frozen=True)
class Augmented(Variant):
    """Parallel adapters on values (g1), keys (g2) or both. They are trained; c is fixed unless `learnable`."""

    c: float = 1.0
    rank: AtLeastOne = 8
    values: bool = True
    """Use g1."""
    keys: bool = True
    """Use g2."""
    activation: Literal["relu", "gelu", "silu", "tanh"] = "relu"
    seed: int = 0
    """Of W_1, which is drawn uniformly from ±1/√d_in."""

    name: ClassVar[str] = "augmented"
    symbol: ClassVar[str] = "c"
    needs_layer: ClassVar[bool] = True
    equipment: ClassVar[type[Equipment]] = _Adapters

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.values or self.keys):
            raise UserError("augmented: neither values nor keys are to be augmented; set one of them to True.")

    def attend(self, call: Call, coefficient: Coefficient) -> Float[Tensor, "batch query head d_value"]:
        if not isinstance(getattr(call.module, "dualview", None), _Adapters):
            raise UserError(
                "dualview_augmented has no adapters on this model; use dualview.variants.attach(model, Augmented(...)) "
                "instead of the name alone."
            )
        return softmax_attention(call)


def _only(projections: tuple[Projection, ...], name: str, attention: nn.Module) -> Projection:
    if len(projections) != 1:
        raise UserError(
            f"augmented: {name} is added to one linear map, and {type(attention).__name__} uses "
            f"{len(projections)} there; use a model with plain key and value projections."
        )
    return projections[0]


def _bottleneck(projection: Projection, rank: int, draw: torch.Generator) -> nn.Module:
    like = projection.weight()
    d_in, d_out = projection.d_in, projection.d_out
    down, up = nn.Linear(d_in, rank, bias=False), nn.Linear(rank, d_out, bias=False)
    with torch.no_grad():
        down.weight.uniform_(-(d_in**-0.5), d_in**-0.5, generator=draw)
        up.weight.zero_()
    return nn.ModuleDict({"down": down, "up": up}).to(device=like.device, dtype=like.dtype)
