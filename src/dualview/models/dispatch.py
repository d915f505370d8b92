"""Where dualview meets Hugging Face: one attention function, and what it does decided by the pass under way.

Modern architectures hand their rotated q, k and v to a function looked up by name in `AttentionInterface`; the older
ones are led there by `bypass`. While a pass is `engaged`, that function asks the pass's `Strategy` for the output.
Outside of a pass the model is exactly as Hugging Face made it.
"""

# The name of a model's attention is kept in a private attribute; there is no other way to change it for one pass.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dualview.models import bypass
from dualview.models.attention import Rule

FAST = "dualview"
"""No mask function is registered under this name, so models build no mask: causality, windows and padding are ours."""


@dataclass(frozen=True)
class Call:
    """One layer's attention, as the architecture asked for it."""

    module: nn.Module
    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch kv_head key d_head"]
    v: Float[Tensor, "batch kv_head key d_value"]
    rule: Rule
    native: Callable[[], Float[Tensor, "batch query head d_value"]] | None
    """The model's own attention on these tensors, in a pass that keeps it."""
    unknown: tuple[str, ...] = ()
    """Arguments that change the attention in a way `Rule` does not know."""


class Strategy(Protocol):
    """What a pass does at each attention; layers come in the order in which the model runs them."""

    def attend(self, layer: int, call: Call) -> Float[Tensor, "batch query head d_value"]: ...


class Unsupported(Exception):
    """This architecture cannot take the pass that was tried."""


@dataclass
class _Turn:
    strategy: Strategy
    layer: int = 0


_turn: ContextVar[_Turn | None] = ContextVar("dualview_turn", default=None)


@contextmanager
def engaged(model: PreTrainedModel, strategy: Strategy, *, native: bool = False) -> Generator[_Turn]:
    """Route the model's attention to `strategy`; count the layers that came."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    before: dict[int, str | None] = {key: config._attn_implementation for key, config in configs.items()}
    turn = _Turn(strategy)
    token = _turn.set(turn)
    undo = bypass.redirect(model, _watched)
    try:
        for key, config in configs.items():
            config._attn_implementation_internal = _watching(before[key]) if native and not undo else FAST
        yield turn
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        for put_back in undo:
            put_back()
        _turn.reset(token)


def _watching(implementation: str | None) -> str:
    """The name under which a model's own attention is watched, its masks and kernels as they are."""
    own = implementation or "eager"
    name = f"dualview_watching_{own}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _native(own))
        AttentionMaskInterface.register(name, eager_mask if own == "eager" else ALL_MASK_ATTENTION_FUNCTIONS[own])
    return name


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
    unknown = tuple(name for name in _UNKNOWN if kwargs.get(name) is not None)
    if attention_mask is not None and native is None:
        unknown = (*unknown, "attention_mask")
    call = Call(module, query, key, value, rule, native, unknown)
    out = turn.strategy.attend(turn.layer, call)
    turn.layer += 1
    return out, None


# Named arguments of some attention functions that change which keys are seen or how.
_UNKNOWN = ("position_bias", "indices", "block_indices", "block_mask", "attn_bias", "attention_bias")


def _rule(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> Rule:
    scale = kwargs.get("scaling")
    window = kwargs.get("sliding_window") or None
    chunk = None
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    at = getattr(module, "layer_idx", None)
    kind = kinds[at] if kinds and isinstance(at, int) and at < len(kinds) else None
    untold = "sliding_window" not in kwargs and not kinds  # then a window lives in the model's masks alone
    if window is None and (kind == "sliding_attention" or untold):
        window = getattr(config, "sliding_window", None)
    if kind == "chunked_attention":
        chunk = getattr(config, "attention_chunk_size", None)
    return Rule(
        scale=float(scale) if scale is not None else query.shape[-1] ** -0.5,
        window=window,
        chunk=chunk,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        alibi=kwargs.get("alibi"),
    )


def _native(implementation: str) -> Callable[..., tuple[Tensor, None]]:
    def function(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        def own() -> Tensor:
            if implementation == "eager":
                inner = sys.modules[type(module).__module__].eager_attention_forward
            else:
                inner = ALL_ATTENTION_FUNCTIONS[implementation]
            return inner(module, query, key, value, attention_mask, **kwargs)[0]

        return _watched(module, query, key, value, attention_mask, native=own, **kwargs)

    return function


AttentionInterface.register(FAST, _watched)


def is_spread(model: PreTrainedModel) -> bool:
    """Whether the model's layers lie on several devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


@contextmanager
def _reading(head: nn.Module | None, keep: Tensor | None) -> Generator[None]:
    """Let the unembedding read the positions `keep` alone; a model that lies on several devices would not find them."""
    if head is None or keep is None:
        yield
        return
    hook = head.register_forward_pre_hook(lambda _module, args: (args[0][:, keep.to(args[0].device)], *args[1:]))
    try:
        yield
    finally:
        hook.remove()


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
        # Said outright: without it, a gap in the positions would be read as the start of another sequence.
        arguments["attention_mask"] = torch.ones_like(ids)
    arguments |= bypass.extra_arguments(model)
    head = model.get_output_embeddings() if keep is not None and is_spread(model) else None
    slices = head is not None or (keep is not None and "logits_to_keep" in accepted)
    if slices and head is None:
        arguments["logits_to_keep"] = keep
    with engaged(model, strategy, native=native) as turn, _reading(head, keep):
        logits: Tensor = model(**arguments).logits
        if turn.layer == 0:
            raise Unsupported("the model never called its attention function")
    return logits if keep is None or slices else logits[:, keep]
