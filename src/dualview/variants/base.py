"""The base of every variant: a frozen setting, one coefficient (fixed or learnable), and a rule for one call."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, Self, get_type_hints

import torch
from annotated_types import Ge
from jaxtyping import Float
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualview.anatomy.layers import Layer
from dualview.io.errors import UserError
from dualview.variants.softmax import Call

AtLeastOne = Annotated[int, Ge(1)]
_ANY_TYPE = ConfigDict(arbitrary_types_allowed=True)
Coefficient = float | Tensor
"""η, α, β or c: a number, or a tensor of shape [] (one per layer) or [kv_head] (one per key/value head)."""


class Equipment(nn.Module):
    """The state of a variant on one attention module: its setting, and the learnable coefficient if there is one.

    A fixed coefficient adds nothing to the model's state dict.
    """

    def __init__(self, variant: Variant, attention: nn.Module, layer: Layer | None, index: int) -> None:
        super().__init__()
        self.variant = variant
        self.previous: str | None = None
        """The attention implementation to go back to."""
        self.handles: list[RemovableHandle] = []
        self.parameter_name: str | None = None
        if variant.learnable:
            start = variant.value()
            self.parameter_name = f"{variant.symbol}_logit" if variant.bounded else variant.symbol
            like = next(attention.parameters())
            shape = () if variant.per == "layer" or layer is None else (layer.kv_heads,)
            raw = math.log(start / (1 - start)) if variant.bounded else start
            self.register_parameter(
                self.parameter_name, nn.Parameter(torch.full(shape, raw, dtype=like.dtype, device=like.device))
            )

    def coefficient(self) -> Coefficient:
        if self.parameter_name is None:
            return self.variant.value()
        raw: Tensor = getattr(self, self.parameter_name)
        if not self.variant.bounded:
            return raw
        # A large logit rounds to 1, which is outside the interval: clamp to the largest number below it.
        return torch.sigmoid(raw).clamp(max=1 - torch.finfo(raw.dtype).eps / 2)

    def hook(self, attention: nn.Module) -> None:
        """Register the hooks on the attention module and its parts, unless they are registered."""

    def remove(self) -> None:
        """Remove the hooks."""
        while self.handles:
            self.handles.pop().remove()


@dataclass(frozen=True, kw_only=True)
class Variant(ABC):
    """A way of doing attention with one scalar coefficient, named by `symbol`, whose 0 means plain softmax attention
    (except in `Sign` and `Linear`, which have no such value)."""

    learnable: bool = False
    """Make the coefficient a parameter of every layer's attention module; otherwise it is the number given."""
    per: Literal["layer", "head"] = "layer"
    """One learnable coefficient per layer, or one per key/value head of the layer."""

    name: ClassVar[str]
    symbol: ClassVar[str]
    bounded: ClassVar[bool] = False
    """The coefficient is in [0, 1): learnt as its logit, so that no step of an optimiser leaves the interval."""
    needs_layer: ClassVar[bool] = False
    """`attach` must find the layer's projections first."""
    equipment: ClassVar[type[Equipment]] = Equipment
    """What it keeps on an attention module: `Equipment`, or one with more state or hooks."""

    def __post_init__(self) -> None:
        self.check(getattr(self, self.symbol))
        self._check_types()
        if self.bounded and self.learnable and self.value() == 0:
            raise UserError(f"{self.name}: a learnable {self.symbol} must start inside (0, 1), for example at 0.5.")
        if self.per == "head" and not self.learnable:
            raise UserError(f"{self.name}: per='head' is for a coefficient that is learnt; add learnable=True.")

    def _check_types(self) -> None:
        try:
            hints = get_type_hints(type(self), include_extras=True)
        except NameError:  # a class whose module cannot be found again, as after `exec`
            return
        for field in fields(self):
            given = getattr(self, field.name)
            try:
                TypeAdapter(hints[field.name], config=_ANY_TYPE).validate_python(given, strict=True)
            except ValidationError as error:
                problem = error.errors()[0]["msg"].replace("Input should be", "must be")
                raise UserError(f"{self.name}: {field.name} {problem}, not {given!r}.") from None

    def check(self, coefficient: object) -> None:
        """Refuse a number that cannot be the coefficient. Tensors are not checked: a GPU would have to wait."""
        if isinstance(coefficient, Tensor):
            return
        if isinstance(coefficient, bool) or not isinstance(coefficient, (int, float)) or not math.isfinite(coefficient):
            raise UserError(f"{self.name}: {self.symbol} must be a finite number, not {coefficient!r}.")
        if self.bounded and not 0 <= coefficient < 1:
            raise UserError(
                f"{self.name}: {self.symbol} must lie in [0, 1), not {coefficient}; the sum diverges outside."
            )

    @abstractmethod
    def attend(self, call: Call, coefficient: Coefficient) -> Float[Tensor, "batch query head d_value"]:
        """The attention output of one call."""

    def equip(self, attention: nn.Module, layer: Layer | None, index: int) -> Equipment:
        """What `attach` adds to the `index`-th attention module, as its child `dualview`, with its hooks."""
        equipment = self.equipment(self, attention, layer, index)
        equipment.hook(attention)
        return equipment

    def value(self) -> float:
        return float(getattr(self, self.symbol))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, kept in the model's config so that a saved model knows its variant."""
        return {"name": self.name, **asdict(self)}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        given = {key: value for key, value in settings.items() if key != "name"}
        if unknown := sorted(given.keys() - known):
            raise UserError(f"{cls.name} has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
        return cls(**given)


def over_heads(coefficient: Coefficient) -> Coefficient:
    """The coefficient in a shape that multiplies [batch, kv_head, token, d_value]."""
    return coefficient.reshape(1, -1, 1, 1) if isinstance(coefficient, Tensor) else coefficient


def to_query_heads(x: Float[Tensor, "batch kv_head query d_value"], heads: int) -> Float[Tensor, "batch query head d"]:
    """Repeat each key/value head for the query heads of its group, in the order the attention functions return."""
    return x.repeat_interleave(heads // x.shape[1], dim=1).transpose(1, 2)
