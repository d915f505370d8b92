"""Every variant, at the settings that the tests of whole models share."""

from __future__ import annotations

from dualview.variants import Alibi, Augmented, Linear, Momentum, Negative, Regularised, Sign, TokenShift

CASES = [
    Momentum(eta=0.7),
    Sign(scale="constant", alpha=0.5),
    Sign(scale="sequence"),
    Sign(scale="token"),
    Regularised(alpha=0.3),
    Regularised(alpha=0.3, form="strict"),
    Augmented(rank=3),
    Negative(beta=0.5, k=2),
    Linear(average=True),
    TokenShift(eta=0.6),
    Alibi(),
]
IDS = [f"{v.name}-{n}" for n, v in enumerate(CASES)]
