"""`dualview lab kernel`: theorem 3.1 of Ren & Liu (arXiv 2310.13220) on a model's own heads.

Softmax attention is a step of gradient descent on f(z) = W φ(z) with φ(a)ᵀφ(b) = exp(aᵀb). Two questions about real
heads: how many random features stand for φ, and how does the dual model reach h' as it sees one token after another?

A draw has its own demonstrations, query, random directions and random layers; intervals are over draws. The heads of
one model on one prompt are not independent, so their spread is shown as quantiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Lt
from jaxtyping import Float

from dualview.duality.theory.features import random_directions
from dualview.lab.harness import Findings, Job, lab
from dualview.lab.kernel.heads import HeadGroup, HeadSettings, load_draws, model_groups, random_groups
from dualview.lab.kernel.measure import feature_errors, gram_errors, training
from dualview.lab.kernel.report import figures, tables
from dualview.lab.problems import named_generator
from dualview.lab.settings import Positive
from dualview.options import AtLeastOne, option


@dataclass(frozen=True, kw_only=True)
class KernelSettings(HeadSettings):
    """Options of `dualview lab kernel`."""

    features: Annotated[int, Ge(16)] = option(8192, "random features at most; measured at powers of 2 from 16 on")
    directions: Literal["orthogonal", "iid"] = option("orthogonal", "random directions in orthogonal blocks, or not")
    target: Annotated[Positive, Lt(1)] = option(0.1, "relative error that counts as reached")
    layers: AtLeastOne = option(50, "softmax layers with random weights, on regression tokens, for each draw")

    @property
    def sizes(self) -> list[int]:
        """Powers of 2 from 16 to the most."""
        return [2**power for power in range(4, self.features.bit_length())]


@lab(KernelSettings, tables, figures, single_thread=True)
def kernel(job: Job[KernelSettings]) -> Findings:
    """Softmax as a kernel model (Ren & Liu, theorem 3.1) on a model's own heads.

    How many random features a head needs, positive or trigonometric, compared with exact Gram features and with the
    tokens of largest weight; and the distance to the head's output as the dual model is trained token by token.
    """
    settings = job.settings
    lm, draws = load_draws(job, settings)
    job.clock.lap("prepare")
    found = job.each(
        "measuring the heads of each prompt",
        draws,
        lambda draw: {
            "tokens": len(draw.ids),
            "demo_tokens": len(draw.demos),
            "model": _measured(settings, model_groups(lm, draw.ids, draw.demos), draw.seed),
            "random": _measured(settings, random_groups(draw.seed, settings.layers), draw.seed),
        },
        lambda draw: {"seed": draw.seed, "number": draw.number},
    )
    job.clock.lap("measure")
    return Findings(summarise(found, settings.sizes, settings.target))


def _measured(settings: KernelSettings, groups: Sequence[HeadGroup], seed: int) -> dict[str, Any]:
    """Every measurement, head by head."""
    draw, orthogonal = named_generator(seed, "directions"), settings.directions == "orthogonal"
    directions = random_directions(groups[0].keys.shape[0], settings.features, draw, orthogonal)
    shuffling = named_generator(seed, "order")
    by_group = [
        {
            **feature_errors(group, directions, settings.sizes, settings.target),
            "training": training(group, shuffling, settings.target),
            "gram": gram_errors(group),
        }
        for group in groups
    ]
    return _joined(by_group)


def _joined(parts: Sequence[Any]) -> Any:
    """Lists over the heads of each group as one list over all heads, at any depth of names."""
    if isinstance(parts[0], dict):
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}
    return [value for part in parts for value in part]


# ----------------------------------------------------------------------------------------------------------- summaries


def summarise(found: Sequence[dict[str, Any]], sizes: Sequence[int], target: float) -> dict[str, Any]:
    """Every number over heads and draws; of the Gram features the largest error; the m at which a head gets there."""
    kept: dict[str, Any] = {name: [draw[name] for draw in found] for name in ("tokens", "demo_tokens")}
    kept["sizes"] = list(sizes)
    for where in ("model", "random"):
        parts = [dict(draw[where]) for draw in found]
        gram = [error for part in parts for error in part.pop("gram")]
        known = [error for error in gram if error is not None]
        kept[where] = {
            "heads": len(gram) // len(found),
            "gram": {"largest": max(known, default=None), "beyond_float64": len(gram) - len(known)},
            "reached": {
                name: [
                    _reached(curve, sizes, target) for curve in _heads([part["errors"][name] for part in parts], where)
                ]
                for name in parts[0]["errors"]
            },
            **_over(parts, where),
        }
    return kept


def _heads(parts: Sequence[Any], where: str) -> Float[np.ndarray, " head *rest"]:
    """Each head's median over draws; the random layers of two draws have nothing in common and are pooled."""
    values = np.array(parts, dtype=np.float64)  # [draw, head, …]
    return values.reshape(-1, *values.shape[2:]) if where == "random" else np.median(values, axis=0)


def _reached(curve: Float[np.ndarray, " size"], sizes: Sequence[int], target: float) -> int | None:
    """The smallest number from which on the error is at most the target."""
    far = np.flatnonzero(curve > target)
    first = 0 if not len(far) else int(far[-1]) + 1
    return sizes[first] if first < len(sizes) else None


def _over(parts: Sequence[Any], where: str) -> Any:
    """By name: `heads`, quantiles over heads (0, .1, .5, .9, 1); `draws`, each draw's median over heads."""
    if isinstance(parts[0], dict):
        return {name: _over([part[name] for part in parts], where) for name in parts[0]}
    heads = _heads(parts, where)
    kept = {"heads": np.quantile(heads, (0, 0.1, 0.5, 0.9, 1), axis=0), "draws": np.median(np.array(parts), axis=1)}
    if where == "model" and heads.ndim == 1:
        kept["each"] = heads
    return {name: _rounded(array.tolist()) for name, array in kept.items()}


def _rounded(value: Any) -> Any:
    """Five digits: the file stays small."""
    return [_rounded(one) for one in value] if isinstance(value, list) else float(f"{value:.5g}")
