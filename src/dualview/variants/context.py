"""Sums over a token's own past that become part of its value, carried from one decoding step to the next.

`Negative` and `TokenShift` change v_i by something computed from the tokens before i. A key-value cache keeps only the
plain v_i, and in a sliding window it drops the tokens that the oldest values it holds were computed from. So the
sums of the last call stay with the attention module, and the next call takes them over if, and only if, its cached
keys and values are the very ones the last call ended with. Otherwise they are computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.errors import UserError
from dualview.variants.layout import Layout
from dualview.variants.softmax import Call

_ATTRIBUTE = "dualview_carried"


@dataclass(frozen=True)
class _Carried:
    key: Tensor
    value: Tensor
    sums: Tensor


def sums_of_every_key(
    call: Call, of_rows: Callable[[Layout], Float[Tensor, "batch kv_head row d_value"]]
) -> Float[Tensor, "batch kv_head key d_value"]:
    """`of_rows` for each key of the call, where it gives the sums of a layout's rows from the keys before them."""
    carried = _take(call)
    if call.past == 0:
        sums = of_rows(call.layout)
    elif carried is not None:
        sums = torch.cat([carried, of_rows(call.layout)], 2)
    elif call.hides_past:
        raise UserError(
            "This variant needs what older tokens were computed from, and the sliding window hides it from this cache; "
            "decode from the beginning in one go, or pass use_cache=False."
        )
    else:
        sums = of_rows(call.layout.rows_of_every_key())
    if call.continues and call.module is not None:
        object.__setattr__(call.module, _ATTRIBUTE, _Carried(call.key, call.value, sums))
    return sums


def forget(module: torch.nn.Module) -> None:
    """Drop what the last call left on the module."""
    vars(module).pop(_ATTRIBUTE, None)


def _take(call: Call) -> Tensor | None:
    """The sums of the cached keys, if the last call on this module left them."""
    past = call.past
    last = getattr(call.module, _ATTRIBUTE, None) if call.module is not None else None
    if last is None or past == 0 or not call.continues or last.key.shape[2] < past:
        return None
    pairs = ((last.key[:, :, -past:], call.key[:, :, :past]), (last.value[:, :, -past:], call.value[:, :, :past]))
    same = all(a.device == b.device and torch.equal(a, b) for a, b in pairs)
    return last.sums[:, :, -past:] if same else None
