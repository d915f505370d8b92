"""Attention variants the gradient-descent view inspires, as plug-ins for any Hugging Face model that dispatches its
attention through `AttentionInterface`.

    from dualview.variants import Momentum, attach

    attach(model, Momentum(eta=0.5, learnable=True))     # sets attn_implementation, adds the parameters

or, with each variant's default setting and no parameters, `register()` once and then
`AutoModelForCausalLM.from_pretrained(name, attn_implementation="dualview_momentum")`.

Nothing here imports torch before a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualview.variants.alibi import Alibi
    from dualview.variants.augmented import Augmented
    from dualview.variants.base import Variant
    from dualview.variants.linear import Linear
    from dualview.variants.momentum import Momentum
    from dualview.variants.negative import Negative
    from dualview.variants.registry import VARIANTS, apply, attach, detach, implementation, register, variant_parameters
    from dualview.variants.regularised import Regularised, demonstrations
    from dualview.variants.sign import Sign
    from dualview.variants.storage import load
    from dualview.variants.token_shift import TokenShift

__all__ = [
    "VARIANTS",
    "Alibi",
    "Augmented",
    "Linear",
    "Momentum",
    "Negative",
    "Regularised",
    "Sign",
    "TokenShift",
    "Variant",
    "apply",
    "attach",
    "demonstrations",
    "detach",
    "implementation",
    "load",
    "register",
    "variant_parameters",
]

_HOME = {
    "Alibi": "alibi",
    "Augmented": "augmented",
    "Linear": "linear",
    "Momentum": "momentum",
    "Negative": "negative",
    "Regularised": "regularised",
    "demonstrations": "regularised",
    "Sign": "sign",
    "TokenShift": "token_shift",
    "Variant": "base",
    "load": "storage",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'registry')}"), name)
