"""LoRA adapters: low-rank changes of linear maps (`adapter_reading` and `adapter_writing` are for PEFT's files).

An adapter changes linear maps by ΔW = (α/r) B A, and what it adds to a map's output is (α/r) B (A x): a forward hook on
the map, whatever it makes (fused q, k and v included), and no base weight is written. An embedding is a linear map too:
A x is the column of A that belongs to the token. Parameters that were trained as a whole (biases, `modules_to_save`)
take the place of the model's own during a pass.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.anatomy.hooks import hooked

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TWIN = "flipped_labels"
"""Where the twin of given weights is, which learnt from the same demonstrations with flipped labels: a folder in that
of an adapter, the first part of a tensor's name in a patch's file."""
PREFIX = "base_model.model."


@dataclass(frozen=True)
class LinearChange:
    """The change of one linear map: ΔW = b a and Δbias, the scale α/r included in `b` and `bias`."""

    name: str
    module: nn.Module
    a: Float[Tensor, "rank d_in"]
    b: Float[Tensor, "d_out rank"]
    bias: Float[Tensor, " d_out"] | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def norm(self) -> float:
        """‖b a‖, without the product: √Σ (bᵀb)∘(aaᵀ)."""
        a, b = self.a.double(), self.b.double()
        return math.sqrt(max(0.0, float(((b.T @ b) * (a @ a.T)).sum())))

    def changed(self, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The map's output with the change; a forward hook."""
        output = output + (self._seen(inputs[0]) @ self.b.T).to(output.dtype)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _seen(self, x: Tensor) -> Float[Tensor, "*token rank"]:
        """A x; of tokens where the map is an embedding, scaled as some models scale theirs (Gemma)."""
        if not isinstance(self.module, nn.Embedding):
            return x.to(self.a.dtype) @ self.a.T
        columns = nn.functional.embedding(x, self.a.T)
        scale = getattr(self.module, "embed_scale", None)
        return columns if scale is None else columns * scale


@dataclass(frozen=True)
class Replacement:
    """A parameter of one module that was trained as a whole; where weights are tied, the other module keeps its own."""

    name: str
    module: nn.Module
    part: Literal["weight", "bias"]
    own: nn.Parameter
    value: Tensor

    @property
    def delta(self) -> Tensor:
        return self.value - self.own.detach()

    def changed_by(self, delta: Tensor) -> Replacement:
        return replace(self, value=self.own.detach() + delta)

    def put(self, value: Tensor) -> None:
        # Into the table of parameters itself: a module would refuse a tensor that is not an nn.Parameter.
        self.module._parameters[self.part] = value  # pyright: ignore


@dataclass(frozen=True)
class Adapter:
    """Low-rank changes of linear maps and whole parameters, active within `applied()`, like any patch."""

    changes: tuple[LinearChange, ...]
    replaced: tuple[Replacement, ...] = ()

    rows = 1

    @contextmanager
    def applied(self) -> Generator[None]:
        try:
            for each in self.replaced:
                each.put(each.value)
            with hooked(each.module.register_forward_hook(each.changed) for each in self.changes):
                yield
        finally:
            for each in self.replaced:
                each.put(each.own)

    def scaled(self, factor: float) -> Adapter:
        changes = (
            replace(each, b=factor * each.b, bias=None if each.bias is None else factor * each.bias)
            for each in self.changes
        )
        return Adapter(tuple(changes), tuple(each.changed_by(factor * each.delta) for each in self.replaced))

    def in_random_directions(self, generator: torch.Generator) -> Adapter:
        """Other changes of the same maps, with the same ranks and singular values."""

        def drawn(change: LinearChange) -> LinearChange:
            b, a = random_directions(change.b, change.a, generator)
            bias = None if change.bias is None else random_vector(change.bias, generator)
            return replace(change, a=a, b=b, bias=bias)

        def other(each: Replacement) -> Replacement:
            delta = each.delta
            if delta.dim() < 2:
                return each.changed_by(random_vector(delta, generator))
            b, a = random_directions(delta, torch.eye(delta.shape[1]).to(delta), generator)
            return each.changed_by(b @ a)

        return Adapter(tuple(map(drawn, self.changes)), tuple(map(other, self.replaced)))

    def summary(self) -> dict[str, Any]:
        """What the result says of an adapter: its maps, the rank of the low-rank ones, and its size without biases."""
        whole = [each for each in self.replaced if each.part == "weight"]
        weights = {each.name: each.module.weight for each in (*self.changes, *whole)}
        own = math.hypot(*(each.norm for each in self.changes), *(float(each.delta.double().norm()) for each in whole))
        base = math.hypot(*(float(cast("Tensor", weight).double().norm()) for weight in weights.values()))
        names = {each.name for each in (*self.changes, *self.replaced)}
        return {
            "modules": len(names),
            "targets": sorted({name.rpartition(".")[2] for name in names}),
            "rank": max((each.rank for each in self.changes), default=0),
            "norm": own,
            "relative_norm": own / base if base else None,
        }


def random_directions(
    b: Float[Tensor, "d_out rank"], a: Float[Tensor, "rank d_in"], generator: torch.Generator
) -> tuple[Float[Tensor, "d_out rank"], Float[Tensor, "rank d_in"]]:
    """Factors of a matrix with the singular values of b a, between random directions."""

    def rotated(columns: Float[Tensor, "width rank"]) -> Tensor:
        """The columns with the same lengths and angles, anywhere."""
        inner = torch.linalg.qr(columns.double().cpu()).R
        drawn = torch.randn(columns.shape[0], inner.shape[0], generator=generator, dtype=torch.float64)
        return (torch.linalg.qr(drawn).Q @ inner).to(columns)

    return rotated(b), rotated(a.T).T.contiguous()


def random_vector(x: Float[Tensor, " width"], generator: torch.Generator) -> Float[Tensor, " width"]:
    """A vector of the same length, in a random direction."""
    drawn = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return (drawn * (float(x.double().norm()) / float(drawn.norm()))).to(x)
