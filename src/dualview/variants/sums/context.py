"""Sums over a token's own past that become part of its value, kept with the key-value cache from one call to the next.

`Negative` and `TokenShift` change v_i by something computed from the tokens before i. A key-value cache keeps only the
plain v_i, and in a sliding window it drops the tokens that the oldest values it holds were computed from. So the sums
stay with the layer of the cache that holds their keys: copying or reordering the cache copies or reorders them, and two
caches never mix. They are valid only while that layer holds the same key tensor as when they were computed. After any
other change they are computed again or, where a window has dropped the keys that this needs, refused.

An attention function does not receive the cache, so a hook in front of the attention module looks for it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, cache_utils

from dualview.io.errors import UserError
from dualview.variants.base import Equipment, Variant
from dualview.variants.softmax import Call
from dualview.variants.sums.layout import Layout

_caches = cast(Any, cache_utils)
# Cache layers that are known to return the keys they held in front of the new ones.
_KNOWN = (_caches.DynamicLayer, _caches.DynamicSlidingWindowLayer, _caches.StaticSlidingWindowLayer)
_KEPT, _FOUND = "dualview_kept", "dualview_found"


@dataclass
class _Kept:
    """What the last call left on a layer of a cache: one sum for each key that the layer holds."""

    variant: Variant
    keys: Tensor
    """The layer's own tensor, to recognise it."""
    length: int
    sums: Float[Tensor, "batch kv_head key d_value"]


@dataclass(frozen=True)
class _Found:
    """What a call finds in its cache, looked up before the cache takes in the call's own keys."""

    cache: Cache
    index: int
    empty: bool
    sums: Float[Tensor, "batch kv_head past d_value"] | None
    """Of the keys that the cache will return in front of the new ones."""


class _Carrier(Equipment):
    def hook(self, attention: nn.Module) -> None:
        if not self.handles:
            self.handles.append(attention.register_forward_pre_hook(_look, with_kwargs=True))
            self.handles.append(attention.register_forward_hook(_forget, always_call=True))


class CarryingVariant(Variant):
    """A variant that calls `sums_of_every_key`."""

    equipment: ClassVar[type[Equipment]] = _Carrier


def sums_of_every_key(
    call: Call, of_rows: Callable[[Layout], Float[Tensor, "batch kv_head row d_value"]]
) -> Float[Tensor, "batch kv_head key d_value"]:
    """`of_rows` for each key of the call, where it gives the sums of a layout's rows from the keys before them."""
    found: _Found | None = vars(call.module).get(_FOUND) if call.module is not None else None
    if call.past == 0 or (found is not None and _begins(found, call)):
        sums = of_rows(call.layout)
    elif found is not None and found.sums is not None:
        sums = torch.cat([found.sums, of_rows(call.layout)], 2)
    elif call.hides_past:
        raise UserError(
            "This variant needs what older tokens were computed from, which the sliding window hides, and this cache "
            "does not carry it (the variant was set by name alone, or the cache was filled without it, cropped, "
            "offloaded, used in torch.compile, or serves several layers at once); use attach and decode from the "
            "beginning with one plain cache, or pass use_cache=False."
        )
    else:
        sums = of_rows(call.layout.rows_of_every_key())
    sums = _fill(sums, call.key.shape[2])  # a cache of fixed size ends in blanks
    if found is not None:
        _keep(found, cast(Any, call.module).dualview.variant, sums)
    return sums


def _look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before the attention module runs: leave on it what `sums_of_every_key` needs to know about the cache."""
    cache = next((given for given in (*args, *kwargs.values()) if isinstance(given, Cache)), None)
    if cache is None or torch.compiler.is_compiling():
        return
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        return
    layer: Any = cache.layers[index] if index < len(cache.layers) else None
    if layer is None or not getattr(layer, "is_initialized", True):
        vars(module)[_FOUND] = _Found(cache, index, empty=True, sums=None)
    elif type(layer) in _KNOWN:
        sums = _still_valid(layer, cast(Any, module).dualview.variant)
        vars(module)[_FOUND] = _Found(cache, index, empty=_length(layer) == 0, sums=sums)


def _forget(module: nn.Module, _args: Any, _output: Any) -> None:
    """After it ran, or failed: the model keeps no reference to the cache."""
    vars(module).pop(_FOUND, None)


def _filled_layer(found: _Found) -> Any:
    """The layer of the cache after it took in the call's keys, if it is of a known kind and the call's own."""
    layer: Any = found.cache.layers[found.index] if found.index < len(found.cache.layers) else None
    known = type(layer) in _KNOWN and layer.is_initialized and not getattr(layer, "record_past", False)
    return layer if known else None


def _begins(found: _Found, call: Call) -> bool:
    """The cache was empty before this call; what it returned beyond the call's own keys is blank."""
    layer = _filled_layer(found) if found.empty else None
    return layer is not None and _length(layer) == call.query.shape[2]


def _length(layer: Any) -> int:
    """How many tokens the layer has taken in."""
    return int(layer.get_seq_length())


def _still_valid(layer: Any, variant: Variant) -> Tensor | None:
    """The sums of the keys that the layer will return in front of new ones, if it still holds the same keys."""
    kept: _Kept | None = getattr(layer, _KEPT, None)
    length = _length(layer)
    if kept is None or kept.keys is not layer.keys or kept.length != length or kept.variant != variant:
        return None
    if type(layer) is _caches.StaticSlidingWindowLayer:  # drops its oldest key to make room, once it is full
        return kept.sums[:, :, 1:] if length >= kept.sums.shape[2] else kept.sums[:, :, :length]
    return kept.sums


def _keep(found: _Found, variant: Variant, sums: Float[Tensor, "batch kv_head key d_value"]) -> None:
    """Leave the sums with the cache, whose layer holds the last of the call's keys."""
    layer = _filled_layer(found)
    if layer is None:
        return
    held = layer.keys.shape[2]
    kept = _Kept(variant, layer.keys, _length(layer), _fill(sums, held)[:, :, -held:])
    vars(layer).update({_KEPT: kept, "reorder_cache": _Reorder(layer)})


class _Reorder:
    """`reorder_cache` of a layer that it refers to weakly: a layer that referred to itself would keep its keys and
    values in memory until Python looks for cycles, which the size of tensors does not make it do."""

    def __init__(self, layer: Any) -> None:
        self._layer = weakref.ref(layer)

    def __call__(self, beam_idx: Int[Tensor, " batch"]) -> None:
        reorder_cache(self._layer(), beam_idx)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Reorder:
        return _Reorder(copy.deepcopy(self._layer(), memo))


def reorder_cache(layer: Any, beam_idx: Int[Tensor, " batch"]) -> None:
    """The layer's own `reorder_cache`, for the sums too: beams that are equal in the window may differ before it."""
    kept: _Kept = getattr(layer, _KEPT)
    held = layer.keys
    type(layer).reorder_cache(layer, beam_idx)
    if kept.keys is held:
        sums = kept.sums.index_select(0, beam_idx.to(kept.sums.device))
        setattr(layer, _KEPT, _Kept(kept.variant, layer.keys, kept.length, sums))


def _fill(sums: Float[Tensor, "batch kv_head some d_value"], keys: int) -> Float[Tensor, "batch kv_head key d_value"]:
    """Zeros behind the sums, up to that many keys."""
    return nn.functional.pad(sums, (0, 0, 0, max(0, keys - sums.shape[2])))
