"""The interface to Hugging Face: one attention function, whose behaviour depends on the current pass.

Modern architectures pass their rotated q, k and v to a function that they look up by name in `AttentionInterface`;
`legacy_attention` routes the older ones there. While a pass is `engaged`, that function asks the pass's `Strategy` for
the output. Outside of a pass the model is exactly as Hugging Face made it.
"""

# The name of a model's attention is in a private attribute; there is no other way to change it for one pass.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dualview.anatomy import legacy_attention
from dualview.anatomy.fused_layers import fused_layers
from dualview.anatomy.hooks import hooked
from dualview.anatomy.kernels import Rule
from dualview.anatomy.onednn_products import onednn_products
from dualview.anatomy.split_products import split_products

FAST = "dualview"
"""No mask function is registered under this name, so models build no mask: causality, windows and padding are ours."""


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one layer's attention, as the architecture passed them."""

    module: nn.Module
    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch kv_head key d_head"]
    v: Float[Tensor, "batch kv_head key d_value"]
    rule: Rule
    native: Callable[[], Float[Tensor, "batch query head d_value"]] | None
    """The model's own attention on these tensors, in a pass that keeps it."""
    mask: Tensor | None = None
    """What the model's own attention masks or adds, [batch_or_1, head_or_1, query, key], in such a pass."""
    unknown: tuple[str, ...] = ()
    """Arguments that change the attention in a way `Rule` does not know."""
    guessed: bool = False
    """Whether the rule's window comes from the configuration, because the call does not state one."""


class Strategy(Protocol):
    """What a pass does at each attention; layers come in the order in which the model runs them."""

    def attend(self, layer: int, call: AttentionCall) -> Float[Tensor, "batch query head d_value"]: ...


class Unsupported(Exception):
    """This architecture does not support the attempted pass."""


@dataclass
class _Turn:
    strategy: Strategy
    layer: int = 0


_turn: ContextVar[_Turn | None] = ContextVar("dualview_turn", default=None)


@contextmanager
def engaged(model: PreTrainedModel, strategy: Strategy, *, native: bool = False) -> Generator[_Turn]:
    """Route the model's attention to `strategy`; count the layers that ran."""
    # A model of several parts (text and vision) has a configuration for each, and each decides its own attention.
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    before: dict[int, str | None] = {key: config._attn_implementation for key, config in configs.items()}
    turn = _Turn(strategy)
    # A context variable: the explorer runs passes in threads, and one pass must not see another's strategy.
    token = _turn.set(turn)
    undo = legacy_attention.redirect(model, _watched)
    # A redirected legacy model has no registered function left to watch.
    watching = native and not undo
    try:
        for key, config in configs.items():
            config._attn_implementation_internal = _watching(before[key], undo) if watching else FAST
        yield turn
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        for put_back in undo:
            put_back()
        _turn.reset(token)


def _watching(implementation: str | None, undo: list[Callable[[], None]]) -> str:
    """The name under which a model's own attention is watched, its masks and kernels as they are.

    Where the model looks up its attention, the name stays, because some models (sparse attention) check it; only the
    function behind it is replaced during the pass. `eager` is not looked up and gets a new name.
    """
    own = implementation or "eager"
    if own == "eager":
        if _EAGER not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(_EAGER, _native(None))
            AttentionMaskInterface.register(_EAGER, eager_mask)
        return _EAGER
    before = ALL_ATTENTION_FUNCTIONS[own]
    if not getattr(before, "watches", False):
        AttentionInterface.register(own, _native(before))
        undo.append(lambda: AttentionInterface.register(own, before))
    return own


_EAGER = "dualview_watching_eager"


def _watched(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    native: Callable[[], Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function the architectures call."""
    turn = _turn.get()
    if turn is None:
        raise RuntimeError(f"attention implementation {FAST!r} works only inside a dualview pass")
    rule = _rule(module, query, kwargs)
    unknown = tuple(name for name in ("position_bias", *FOREIGN) if kwargs.get(name) is not None)
    # Under FAST models build no mask, so one that still arrives comes from the architecture itself and hides something.
    if attention_mask is not None and native is None:
        unknown = (*unknown, "attention_mask")
    mask = attention_mask if native is not None and attention_mask is not None and attention_mask.dim() == 4 else None
    guessed = rule.window is not None and window_is_unstated(getattr(module, "config", None), kwargs)
    call = AttentionCall(module, query, key, value, rule, native, mask, unknown, guessed)
    out = turn.strategy.attend(turn.layer, call)
    turn.layer += 1
    return out, None


FOREIGN = ("indices", "block_indices", "block_mask", "attn_bias", "attention_bias")
"""Named arguments of some attention functions that change which keys are seen or how."""


def window_is_unstated(config: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a model does not pass its window to the attention: if it has one, only its masks contain it."""
    return "sliding_window" not in kwargs and not getattr(config, "layer_types", None)


def stated_reach(module: nn.Module, kwargs: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The window and the chunk of a layer, as its call states them or its configuration's types of layers."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    # Read only where it matters: compiled layers that differ in a number they read are compiled one by one.
    at = getattr(module, "layer_idx", None) if kinds else None
    kind = kinds[at] if kinds and isinstance(at, int) and at < len(kinds) else None
    own = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    return kwargs.get("sliding_window") or own, chunk


def _rule(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> Rule:
    scale = kwargs.get("scaling")
    window, chunk = stated_reach(module, kwargs)
    config = getattr(module, "config", None)
    if window is None and window_is_unstated(config, kwargs):
        window = getattr(config, "sliding_window", None)
    return Rule(
        scale=float(scale) if scale is not None else query.shape[-1] ** -0.5,
        window=window,
        chunk=chunk,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        alibi=kwargs.get("alibi"),
    )


def _native(inner: Callable[..., Any] | None) -> Callable[..., Any]:
    """An attention function that reports to the current pass; None means the architecture's eager one."""

    def function(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        # Every modelling file has its own eager function, and none is registered.
        used: Callable[..., Any] = inner or sys.modules[type(module).__module__].eager_attention_forward
        if _turn.get() is None:  # another thread's model, outside of any pass
            return used(module, query, key, value, attention_mask, **kwargs)

        def own() -> Tensor:
            return used(module, query, key, value, attention_mask, **kwargs)[0]

        return _watched(module, query, key, value, attention_mask, native=own, **kwargs)

    function.watches = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


AttentionInterface.register(FAST, _watched)


def is_spread(model: PreTrainedModel) -> bool:
    """Whether the model's layers are on several devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


@contextmanager
def _reading(head: nn.Module | None, keep: Tensor | None) -> Generator[None]:
    """Let the unembedding read only the positions `keep`; `logits_to_keep` fails with layers on several devices."""
    if head is None or keep is None:
        yield
        return
    read = head.register_forward_pre_hook(lambda _module, args: (args[0][:, keep.to(args[0].device)], *args[1:]))
    with hooked([read]):
        yield


@contextmanager
def _without_cudnn(unwanted: bool) -> Generator[None]:
    """Keep cuDNN's attention out: it takes seconds to set up, and plans again for every length of prompt."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and not unwanted)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def run_forward(
    model: PreTrainedModel,
    strategy: Strategy,
    ids: Tensor,
    positions: Tensor | None,
    keep: Tensor | None,
    *,
    native: bool = False,
) -> Float[Tensor, "batch kept vocab"]:
    """One forward pass under `strategy`: logits at the positions `keep` (all of them if None), no cache."""
    accepted = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if "position_ids" in accepted:
        arguments["position_ids"] = positions
    if native and "attention_mask" in accepted:
        # Explicit: without a mask, a gap in the positions would mean the start of another sequence.
        arguments["attention_mask"] = torch.ones_like(ids)
    arguments |= legacy_attention.extra_arguments(model)
    head = model.get_output_embeddings() if keep is not None and is_spread(model) else None
    # The logits of all positions would take most of a pass's memory where the vocabulary is large.
    slices = head is not None or (keep is not None and "logits_to_keep" in accepted)
    if slices and head is None:
        arguments["logits_to_keep"] = keep
    faster = onednn_products if ids.device.type == "cpu" else split_products
    with (
        engaged(model, strategy, native=native) as turn,
        _reading(head, keep),
        faster(model, model.dtype, ids.device),
        fused_layers(model, ids.device),
        _without_cudnn(native and ids.is_cuda),
    ):
        logits: Tensor = model(**arguments).logits
        # Otherwise an architecture that does not look up its attention would run unwatched, without an error.
        if turn.layer == 0:
            raise Unsupported("the model never called its attention function")
    return logits if keep is None or slices else logits[:, keep]
