"""Architectures that compute attention inline instead of looking up a function.

For each, the smallest part of the module that contains the softmax is replaced during a pass by one that computes q, k
and v with the module's own weights and passes them on. Everything else of the model is Hugging Face's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Attend = Callable[..., tuple[Tensor, None]]
"""(module, q, k, v, mask, scaling=, sliding_window=, alibi=) -> (output [batch, query, head, d_value], None)"""


def redirect(model: PreTrainedModel, attend: Attend) -> list[Callable[[], None]]:
    """Route every inline attention of the model to `attend`; the returned calls undo it."""
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        detour = _DETOURS.get(type(module).__name__)
        if detour is not None:
            method, replacement = detour
            setattr(module, method, partial(replacement, module, attend))
            # The replacement lives on the instance, so deleting it brings the class's own method back.
            undo.append(partial(delattr, module, method))
    return undo


def extra_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """Further arguments of a forward pass: MPT requires a mask, which its detour then ignores."""
    if type(model).__name__ == "MptForCausalLM":
        return {"attention_mask": torch.ones(1, 1, 1, 1, device=model.device)}
    return {}


def _xglm(self: Any, attend: Attend, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    q, k, v = (_heads(f(hidden_states), self.num_heads) for f in (self.q_proj, self.k_proj, self.v_proj))
    out, _none = attend(self, q, k, v, None, scaling=self.scaling)
    return self.out_proj(out.flatten(2)), None


def _bloom(self: Any, attend: Attend, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any):
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    out, _none = attend(self, q, k, v, None, scaling=self.inv_norm_factor, alibi=partial(_alibi_table, self, 1.0))
    return residual + self.dense(out.flatten(2)), None


def _falcon(
    self: Any,
    attend: Attend,
    hidden_states: Tensor,
    *_: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    q, k, v = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    alibi = None
    if self.config.alibi:
        alibi = partial(_alibi_table, self, self.inv_norm_factor)
    else:
        assert position_embeddings is not None
        q, k = _home(self).apply_rotary_pos_emb(q, k, *position_embeddings)
    out, _none = attend(self, q, k, v, None, scaling=self.inv_norm_factor, alibi=alibi)
    return self.dense(out.flatten(2)), None


def _mpt(self: Any, attend: Attend, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    q, k, v = (_heads(x, self.n_heads) for x in qkv.chunk(3, dim=2))
    # Its table holds slope · (position − last): the slopes are what it holds one step before the last, negated.
    slopes = -_home(self).build_mpt_alibi_tensor(self.n_heads, 2, device=q.device)[:, 0, 0]

    def alibi(at: Tensor) -> Tensor:
        return slopes.view(-1, *(1 for _ in at.shape)) * at

    out, _none = attend(self, q, k, v, None, scaling=self.softmax_scale, alibi=alibi)
    return self.out_proj(out.flatten(2)), None


def _gpt_neo(self: Any, attend: Attend, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, None]:
    # GPT-Neo was trained without the usual 1/√d, so its scale is 1.
    window = self.config.window_size if self.attention_type == "local" else None
    return attend(self, q, k, v, None, scaling=1.0, sliding_window=window)[0].transpose(1, 2), None


def _gptj(self: Any, attend: Attend, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, None]:
    q, k = q.to(v.dtype), k.to(v.dtype)  # CodeGen rotates in single precision
    return attend(self, q, k, v, None, scaling=1.0 / float(self.scale_attn))[0].transpose(1, 2), None


_DETOURS: dict[str, tuple[str, Callable[..., Any]]] = {
    "XGLMAttention": ("forward", _xglm),
    "BloomAttention": ("forward", _bloom),
    "FalconAttention": ("forward", _falcon),
    "FalconFlashAttention2": ("forward", _falcon),
    "MptAttention": ("forward", _mpt),
    "GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "GPTJAttention": ("_attn", _gptj),
    "GPTJFlashAttention2": ("_attn", _gptj),
    "CodeGenAttention": ("_attn", _gptj),
}


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _home(module: nn.Module) -> Any:
    return sys.modules[type(module).__module__]


def _alibi_table(self: Any, factor: float, at: Tensor) -> Tensor:
    """ALiBi as Bloom and Falcon build it, looked up by position (both round it to their own dtype)."""
    dtype = self.dense.weight.dtype
    seen = torch.ones(1, int(at.max()) + 1, dtype=torch.long, device=at.device)
    table = _home(self).build_alibi_tensor(seen, self.num_heads, dtype=dtype).view(self.num_heads, -1)
    return table[:, at] * factor
