"""Patches: weights that replace the model's own during a pass and leave no trace.

The base weights are never written to. `Deltas` adds ΔW·x to the output of a projection, with several learning rates
side by side, one for each row of the batch; `Parameters` replaces whole parameters.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers import PreTrainedModel

from dualview.anatomy.hooks import hooked
from dualview.anatomy.layers import Anatomy, Projection
from dualview.anatomy.split_products import own_linear


@dataclass(frozen=True)
class Deltas:
    """A change of weight and bias for each projection, for one or more learning rates ("rate" is the first axis)."""

    projections: tuple[Projection, ...]
    weights: tuple[Float[Tensor, "rate row d_in"], ...]
    biases: tuple[Float[Tensor, "rate row"] | None, ...]

    @classmethod
    def zero(cls, projections: tuple[Projection, ...], rates: int, dtype: torch.dtype) -> Deltas:
        def none(projection: Projection, *shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=projection.weight().device)

        return cls(
            projections,
            tuple(none(p, rates, p.d_out, p.d_in) for p in projections),
            tuple(none(p, rates, p.d_out) if p.biased else None for p in projections),
        )

    @property
    def rows(self) -> int:
        return self.weights[0].shape[0]

    def pick(self, rate: int) -> Deltas:
        """One learning rate alone."""
        return type(self)(
            self.projections,
            tuple(w[rate : rate + 1] for w in self.weights),
            tuple(None if b is None else b[rate : rate + 1] for b in self.biases),
        )

    def copy(self) -> Deltas:
        """The same in memory of its own: what `pick` gives shares that of all learning rates."""
        biases = tuple(None if b is None else b.clone() for b in self.biases)
        return type(self)(self.projections, tuple(w.clone() for w in self.weights), biases)

    def scaled(self, factor: float) -> Deltas:
        """The change multiplied by a number: at first order, the same training at as much a larger rate."""
        biases = tuple(None if b is None else factor * b for b in self.biases)
        return type(self)(self.projections, tuple(factor * w for w in self.weights), biases)

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in self.weights)

    @classmethod
    def side_by_side(cls, several: Sequence[Deltas]) -> Deltas:
        """Changes of the same projections, one for each batch row."""
        if len(several) == 1:
            return several[0]
        return type(several[0])(
            several[0].projections,
            tuple(_joined(weights) for weights in zip(*(d.weights for d in several), strict=True)),
            tuple(
                None if biases[0] is None else _joined([b for b in biases if b is not None])
                for biases in zip(*(d.biases for d in several), strict=True)
            ),
        )

    def moved_to(self, anatomy: Anatomy) -> Deltas:
        """The same change on another copy of the model."""
        # By name: a deep copy has other module objects in the same places.
        own = {p.name: p for p in anatomy.projections(("q", "k", "v"))}
        moved = tuple(Projection(p.name, own[p.name].module, p.rows) for p in self.projections)
        return type(self)(moved, self.weights, self.biases)

    def change(self, index: int, x: Float[Tensor, "rate *token d_in"]) -> Float[Tensor, "rate *token row"]:
        """ΔW x + Δb for one projection, in the deltas' own precision."""
        weight, bias = self.weights[index], self.biases[index]
        # In the change's precision: a small ΔW would vanish in half precision before it is added.
        change = own_linear(x.flatten(1, -2), weight)
        change = change if bias is None else change + bias[:, None]
        return change.view(*x.shape[:-1], weight.shape[1])

    def changed(self, index: int, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """A projection's output under this patch; a forward hook."""
        return added(output, self.change(index, inputs[0]), self.projections[index])

    @contextmanager
    def applied(self) -> Generator[None]:
        with hooked(p.module.register_forward_hook(partial(self.changed, i)) for i, p in enumerate(self.projections)):
            yield


class Linearised(Deltas):
    """The same change at first order: the model's expansion f(W) + ∂f/∂W · ΔW at the base weights.

    Applied as a tangent (forward-mode differentiation): every projection's output keeps its value and carries, as its
    tangent, what ΔW adds to it; the pass then carries the tangent to the logits and the records, and
    `models.probe.first_order` adds the two.
    """

    def changed(self, index: int, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x, value = forward_ad.unpack_dual(inputs[0]).primal, forward_ad.unpack_dual(output)
        before = torch.zeros_like(value.primal) if value.tangent is None else value.tangent
        return forward_ad.make_dual(value.primal, added(before, self.change(index, x), self.projections[index]))

    @contextmanager
    def applied(self) -> Generator[None]:
        with forward_ad.dual_level(), super().applied():
            yield


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """Rows side by side; those of one batch of trainings are so already, and large ones have no room for a copy."""
    first, size = rows[0], rows[0].numel()
    there = first.untyped_storage().data_ptr()
    neighbours = all(
        row.shape == first.shape
        and row.is_contiguous()
        and row.untyped_storage().data_ptr() == there
        and row.storage_offset() == first.storage_offset() + i * size
        for i, row in enumerate(rows)
    )
    if not neighbours or len(first) != 1:
        return torch.cat(list(rows))
    return first.as_strided((len(rows), *first.shape[1:]), (size, *first.stride()[1:]))


def added(output: Tensor, change: Tensor, projection: Projection) -> Tensor:
    """A projection's output with a change added to the rows that are its own."""
    change = change.to(output.dtype)
    if projection.rows is None:
        return output + change
    return output.index_add(-1, projection.rows, change)


@dataclass(frozen=True)
class Parameters:
    """Whole parameters in place of the model's own, by name."""

    model: PreTrainedModel
    values: Mapping[str, Tensor]

    @property
    def rows(self) -> int:
        return 1

    def scaled(self, factor: float) -> Parameters:
        """The base weights with the change multiplied by a number."""
        base = dict(self.model.named_parameters())
        return Parameters(self.model, {name: torch.lerp(base[name], v, factor) for name, v in self.values.items()})

    @contextmanager
    def applied(self) -> Generator[None]:
        # By parameter, not by name: tied weights have one parameter and several names.
        stand_in = {parameter: self.values[name] for name, parameter in self.model.named_parameters()}
        places = [
            (module, name, parameter)
            for module in self.model.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if parameter in stand_in
        ]
        try:
            for module, name, parameter in places:
                # Into the table of parameters itself: a module would refuse a tensor that is not an nn.Parameter.
                module._parameters[name] = stand_in[parameter]  # pyright: ignore
            yield
        finally:
            for module, name, parameter in places:
                module._parameters[name] = parameter  # pyright: ignore
