"""Attention variants that follow from the gradient-descent view, for any Hugging Face model that dispatches its
attention through `AttentionInterface`.

    from dualview.variants import Momentum, attach

    attach(model, Momentum(eta=0.5, learnable=True))     # sets attn_implementation, adds the parameters

or, with each variant's default setting and no parameters, call `register()` once and then
`AutoModelForCausalLM.from_pretrained(name, attn_implementation="dualview_momentum")`.

A new variant is a file with one frozen dataclass, a `Variant` whose `attend(call, coefficient)` is the equation of the
docstring; add it to `VARIANTS` in `registry` and to the names below. State or hooks of its own go in an `Equipment`.

Nothing here imports torch before a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualview.io.callable_package import lazy_names

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

__getattr__ = lazy_names(
    __name__,
    {
        **{kind.lower(): [kind] for kind in ("Alibi", "Augmented", "Linear", "Momentum", "Negative", "Sign")},
        "base": ["Variant"],
        "registry": ["VARIANTS", "apply", "attach", "detach", "implementation", "register", "variant_parameters"],
        "regularised": ["Regularised", "demonstrations"],
        "storage": ["load"],
        "token_shift": ["TokenShift"],
    },
)
