"""The variants by name, their registration with transformers, and `attach`, which puts one on a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel, masking_utils

from dualview.anatomy.layers import Layer, dissect
from dualview.io.errors import UserError
from dualview.variants.alibi import Alibi
from dualview.variants.augmented import Augmented
from dualview.variants.base import Coefficient, Equipment, Variant
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

    `coefficient` replaces the variant's own, for example by a tensor that requires a gradient.
    """
    _check_variant(variant, "apply")
    if coefficient is not None:
        variant.check(coefficient)
    call = Call(query, key, value, mask, scaling)
    return variant.attend(call, variant.value() if coefficient is None else coefficient)


def attach(model: PreTrainedModel, variant: Variant) -> None:
    """Give every attention layer of a causal language model this variant, in place of the one it had.

    Learnable coefficients and adapters become parameters under `<attention>.dualview`, in the model's state dict and
    for its optimiser. The setting is written to `model.config.dualview`; `load` reads both back. The model gets a copy
    of its config, since other models may have been built on the same one.

    All or nothing: where it fails, the model is left as it was, with the variant it had.
    """
    _check_variant(variant, "attach")
    attentions = _attentions(model)
    register()
    _own_config(model)
    had = _take_off(model)
    made: dict[nn.Module, Equipment] = {}
    try:
        layers = _layers(model, variant)
        for index, attention in enumerate(attentions):
            made[attention] = equipment = variant.equip(attention, layers.get(attention), index)
            equipment.previous = _config(attention)._attn_implementation
            equipment.train(model.training)
        _put_on(model, variant, made)
    except BaseException:
        for equipment in made.values():
            equipment.remove()
        _take_off(model)
        if had:
            _put_on(model, next(iter(had.values())).variant, had)
        raise


def detach(model: PreTrainedModel) -> None:
    """Take a variant off again: parameters, hooks and all. Does nothing to a model without one."""
    _check_model(model, "detach")
    if any(isinstance(module, Equipment) for module in model.modules()):
        _own_config(model)
        _take_off(model)


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


def _check_variant(variant: object, asks: str) -> None:
    if not isinstance(variant, Variant):
        given = f"the class {variant.__name__}" if isinstance(variant, type) else repr(variant)
        raise UserError(f"{asks} needs a variant with its setting, such as Momentum(eta=0.5), not {given}.")


def _check_model(model: object, asks: str) -> None:
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"{asks} needs a Hugging Face model, not {type(model).__name__}.")


def _put_on(model: PreTrainedModel, variant: Variant, equipment: dict[nn.Module, Equipment]) -> None:
    """Make this the variant of a model that has none."""
    name = implementation(variant)
    for attention, each in equipment.items():
        attention.dualview = each
        each.hook(attention)
    cast(Any, model).set_attn_implementation(name)
    cast(Any, model.config).dualview = variant.to_dict()
    if any(_config(attention)._attn_implementation != name for attention in equipment):
        raise UserError(f"{type(model).__name__} did not take attn_implementation={name!r}; use another architecture.")


def _take_off(model: PreTrainedModel) -> dict[nn.Module, Equipment]:
    """The model without its variant; what it had, for `_put_on`."""
    had: dict[nn.Module, Equipment] = {}
    for module in model.modules():
        equipment = vars(module).get("_modules", {}).get("dualview")
        if isinstance(equipment, Equipment):
            had[module] = equipment
    for module, equipment in had.items():
        equipment.remove()
        del module.dualview
    if had:
        cast(Any, model).set_attn_implementation(str(next(iter(had.values())).previous))
        vars(model.config).pop("dualview", None)
    return had


def _own_config(model: PreTrainedModel) -> None:
    """Give the model, and all its modules that hold one, copies of their configs: two models can share one."""
    copies: dict[int, Any] = {}  # deepcopy's memory: the same config, and a config inside another, is copied once
    for module in model.modules():
        for name, held in list(vars(module).items()):
            if isinstance(held, PretrainedConfig):
                setattr(module, name, copy.deepcopy(held, copies))


def _layers(model: PreTrainedModel, variant: Variant) -> dict[nn.Module, Layer]:
    """The projections and head counts of each attention module, if the variant needs them."""
    adds = variant.needs_layer or variant.learnable
    if adds and torch.is_inference_mode_enabled():
        raise UserError(
            f"{variant.name}: the parameters it adds could never be trained if made inside torch.inference_mode(); "
            "attach before entering it."
        )
    if not (variant.needs_layer or variant.per == "head"):
        return {}
    if model.get_output_embeddings() is None:
        raise UserError(
            f"{type(model).__name__} has no language-model head, without which its projections cannot be found for "
            f"{variant.name} as set here; use the …ForCausalLM class."
        )
    return {layer.module: layer for layer in dissect(model).layers}


def _attentions(model: PreTrainedModel) -> list[nn.Module]:
    """The attention modules that look their function up in `AttentionInterface`; refuses a model without."""
    _check_model(model, "attach")
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


def _config(attention: nn.Module) -> Any:
    return attention.config
