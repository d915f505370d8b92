"""The variants by name, their registration with transformers, and `attach`, which puts one on a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, masking_utils

from dualview.errors import UserError
from dualview.models.anatomy import dissect
from dualview.variants.alibi import Alibi
from dualview.variants.augmented import Augmented
from dualview.variants.base import Coefficient, Equipment, Variant
from dualview.variants.context import forget
from dualview.variants.linear import Linear
from dualview.variants.momentum import Momentum
from dualview.variants.negative import Negative
from dualview.variants.regularised import Regularised
from dualview.variants.sign import Sign
from dualview.variants.softmax import Call, receive
from dualview.variants.token_shift import TokenShift

VARIANTS: dict[str, type[Variant]] = {
    kind.name: kind for kind in (Momentum, Sign, Regularised, Augmented, Negative, Linear, TokenShift, Alibi)
}


def implementation(variant: Variant | type[Variant]) -> str:
    """The name to pass as `attn_implementation`.

    >>> implementation(Momentum)
    'dualview_momentum'
    """
    return f"dualview_{variant.name}"


def register() -> None:
    """Make every variant known to transformers, as `attn_implementation="dualview_<name>"`, with `sdpa`'s masks.

    By name alone a variant has its default setting; `attach` sets others. Calling it again changes nothing.
    """
    functions, masks = cast(Any, AttentionInterface), cast(Any, masking_utils)
    for kind in VARIANTS.values():
        functions.register(implementation(kind), _attention_function(kind))
        masks.AttentionMaskInterface.register(implementation(kind), masks.sdpa_mask)


def apply(
    variant: Variant,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_value"],
    *,
    mask: Tensor | None = None,
    scaling: float | None = None,
    coefficient: Coefficient | None = None,
) -> Float[Tensor, "batch query head d_value"]:
    """A variant on bare tensors, without a model: the queries are the last of the keys, or as `mask` says.

    `coefficient` stands in for the variant's own, for example a tensor that wants a gradient.
    """
    call = Call(query, key, value, mask, scaling)
    return variant.attend(call, variant.value() if coefficient is None else coefficient)


def attach(model: PreTrainedModel, variant: Variant) -> None:
    """Give every attention layer of a causal language model this variant, in place of whatever it had.

    Learnable coefficients and adapters become parameters under `<attention>.dualview`, in the model's state dict and
    for its optimiser. The setting is written to `model.config.dualview`; `load` reads both back.
    """
    attentions = _attentions(model)
    detach(model)
    needs_layers = variant.needs_layer or (variant.learnable and variant.per == "head")
    layers = {layer.module: layer for layer in dissect(model).layers} if needs_layers else {}
    register()
    for index, attention in enumerate(attentions):
        equipment = variant.equip(attention, layers.get(attention), index)
        equipment.previous = _config(attention)._attn_implementation
        equipment.train(model.training)
        attention.dualview = equipment
    _use(model, implementation(variant))
    cast(Any, model.config).dualview = variant.to_dict()
    if any(_config(attention)._attn_implementation != implementation(variant) for attention in attentions):
        detach(model)
        raise UserError(f"{type(model).__name__} did not take attn_implementation={implementation(variant)!r}.")


def detach(model: PreTrainedModel) -> None:
    """Take a variant off again: parameters, hooks and all. Does nothing to a model without one."""
    previous: str | None = None
    for module in model.modules():
        equipment = vars(module).get("_modules", {}).get("dualview")
        if isinstance(equipment, Equipment):
            equipment.remove()
            previous = equipment.previous
            del module.dualview
            forget(module)
    if previous is not None:
        _use(model, previous)
    vars(model.config).pop("dualview", None)


def variant_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What the variant added to the model, by name: learnable coefficients and adapters."""
    return {name: p for name, p in model.named_parameters() if ".dualview." in f".{name}"}


def _attention_function(kind: type[Variant]) -> Callable[..., tuple[Tensor, None]]:
    default = kind()

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        call = receive(module, query, key, value, attention_mask, **options)
        equipment = getattr(module, "dualview", None)
        if not isinstance(equipment, Equipment):
            return default.attend(call, default.value()), None
        if equipment.variant.name != kind.name:
            raise UserError(
                f"The model carries the variant {equipment.variant.name!r} but its attention implementation was set to "
                f"{implementation(kind)!r}; use attach to change variants."
            )
        return equipment.variant.attend(call, equipment.coefficient()), None

    return attention


def _attentions(model: PreTrainedModel) -> list[nn.Module]:
    """The attention modules that look their function up in `AttentionInterface`; refuses a model without."""
    if not isinstance(model, PreTrainedModel):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(f"attach needs a Hugging Face model, not {type(model).__name__}.")
    found = [m for m in model.modules() if not isinstance(m, PreTrainedModel) and _looks_up(type(m))]
    if not found or not cast(Any, model)._can_set_attn_implementation():
        raise UserError(
            f"{type(model).__name__} computes its attention inline, not through transformers' AttentionInterface, so "
            "no variant can take its place; use another architecture (Llama, GPT-2, GPT-NeoX, Qwen, Mistral, …)."
        )
    for module in found:
        if getattr(module, "is_causal", True) is False:
            raise UserError(
                f"{type(model).__name__} has attention that is not causal ({type(module).__name__}); the variants are "
                "for causal language models."
            )
    return found


def _looks_up(kind: type[nn.Module]) -> bool:
    """Whether a method of the class itself refers to the table of attention functions."""
    methods = (getattr(member, "__code__", None) for base in kind.__mro__ for member in vars(base).values())
    return any(code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names for code in methods)


def _use(model: PreTrainedModel, name: str) -> None:
    cast(Any, model).set_attn_implementation(name)


def _config(attention: nn.Module) -> Any:
    return attention.config
