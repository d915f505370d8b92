"""`dualview lab bound`: theorem 3.2 of Ren & Liu (arXiv 2310.13220) against the measured generalisation error.

The theorem bounds the dual model's expected loss L by its loss on the N demonstrations L̂ plus a term that falls as
1/√N. The lab measures L − L̂ over N, on random layers and on a model's own heads. Control: each token gets another
token's value, so that there is nothing to learn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Lt

from dualview.duality.theory.kernel import Head, generalisation_bound
from dualview.io.errors import UserError
from dualview.lab.bound.report import figures, tables
from dualview.lab.harness import Findings, Job, lab
from dualview.lab.kernel.heads import Draw, HeadGroup, HeadSettings, load_draws, model_groups, random_groups
from dualview.lab.problems import named_generator
from dualview.lab.settings import Positive
from dualview.metrics.summary import plain
from dualview.models.language_model import LanguageModel
from dualview.options import AtLeastOne, option


@dataclass(frozen=True, kw_only=True)
class BoundSettings(HeadSettings):
    """Options of `dualview lab bound`."""

    shots: AtLeastOne = option(16, "demonstrations in a prompt, as many as fit")
    most: Annotated[int, Ge(8)] = option(256, "demonstration tokens at most; measured at powers of 2 from 4 on")
    population: Annotated[int, Ge(8)] = option(2048, "tokens of a random layer; those not sampled are fresh")
    layers: AtLeastOne = option(50, "random layers for each draw")
    draws: Annotated[int, Ge(2)] = option(8, "draws of layers and prompts, from --seed on")
    delta: Annotated[Positive, Lt(1)] = option(0.05, "the bound holds with probability 1 − δ")

    @property
    def sizes(self) -> list[int]:
        """Powers of 2 from 4 to the most."""
        return [2**power for power in range(2, self.most.bit_length())]


@lab(BoundSettings, tables, figures, single_thread=True)
def bound(job: Job[BoundSettings]) -> Findings:
    """Theorem 3.2 of Ren & Liu against the measured generalisation error, over the number of demonstrations.

    The gap between the dual model's expected and empirical loss, its slope in N and that of the bound, on random layers
    and on a model's own heads, with shuffled values as the control.
    """
    settings = job.settings
    lm, draws = load_draws(job, settings)
    tokens = [len(draw.demos) for draw in draws]
    if min(*tokens, settings.population) <= settings.most:
        raise UserError(
            f"--most is {settings.most}, but prompts have {min(tokens)} demonstration tokens and random layers "
            f"{settings.population}, some of which must stay fresh; give more --shots or a smaller --most."
        )
    job.clock.lap("prepare")
    found = job.each(
        "measuring each draw",
        draws,
        lambda draw: _one_draw(settings, lm, draw),
        lambda draw: {"seed": draw.seed, "number": draw.number},
    )
    job.clock.lap("measure")
    results = {"sizes": settings.sizes, "tokens": tokens, "kv_heads": found[0].pop("kv_heads"), **summarise(found)}
    return Findings(results)


def _one_draw(settings: BoundSettings, lm: LanguageModel, draw: Draw) -> dict[str, Any]:
    """Random layers and the prompt's heads, with their values and with shuffled ones."""
    heads = model_groups(lm, draw.ids, draw.demos)
    layers = random_groups(draw.seed, settings.layers, demos=settings.population)
    found: dict[str, Any] = {"kv_heads": len(heads)}
    for where, groups in (("random", layers), ("model", heads)):
        for shuffled in (False, True):
            sample = named_generator(draw.seed, f"{where} sample")
            rows = [measured(g, settings.sizes, sample, settings.delta, shuffled=shuffled) for g in groups]
            values = {name: np.array([row[name] for row in rows]) for name in rows[0]}  # [layer or head, size]
            found[f"{where}, shuffled" if shuffled else where] = _statistics(values, settings.delta)
    return found


def _statistics(values: dict[str, np.ndarray], delta: float) -> dict[str, list[float | None]]:
    """Over the layers or heads of one draw: medians, since exp(‖k‖²) spreads them over orders of magnitude."""
    kept = {name: np.median(array, axis=0) for name, array in values.items()}
    kept["looseness"] = np.median(np.log10(values["slack"] / np.abs(values["gap"])), axis=0)
    kept["violations"] = (values["gap"] > values["slack"]).mean(0)
    kept["high"] = np.quantile(values["gap"], 1 - delta, axis=0)
    return {name: [plain(float(f"{value:.6g}")) for value in array] for name, array in kept.items()}


def summarise(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By setting and number: a row for each draw."""
    settings = ("random", "random, shuffled", "model", "model, shuffled")
    return {where: {name: [draw[where][name] for draw in found] for name in found[0][where]} for where in settings}


def measured(
    group: HeadGroup, sizes: Sequence[int], draw: torch.Generator, delta: float, *, shuffled: bool = False
) -> dict[str, list[float]]:
    """Losses, gap and bound of the first head's dual model, trained on N tokens for every N of `sizes` (nested).

    The sample S is drawn from the group's demonstration tokens; those that no sample has are the fresh ones:

        W = (1/D) Σ_{i ∈ S} v_i φ(k_i)ᵀ,    L̂ = −mean over S of v_iᵀ W φ(k_i),    L = the same over fresh tokens

    `shuffled` gives each token another token's value (the control).
    """
    inside = slice(group.demos.start, group.demos.stop)
    keys, values, query = group.keys[:, inside], group.values[:, inside], group.queries[:, 0]
    if shuffled:
        values = values[:, torch.randperm(values.shape[1], generator=draw)]
    order = torch.randperm(keys.shape[1], generator=draw)
    picked, fresh = order[: max(sizes)], order[max(sizes) :]
    inner, logits = keys[:, picked].T @ keys, keys.T @ query
    top = inner.max()  # exponents are large for long keys; log D is taken from them before exp
    products = (values[:, picked].T @ values) * torch.exp(inner - top)
    found: dict[str, list[float]] = {
        name: [] for name in ("empirical", "expected", "gap", "share", "slack", "complexity")
    }
    for n in sizes:
        s = picked[:n]
        scale = torch.exp(top - torch.logsumexp(logits[s], 0))
        empirical, expected = (-products[:n, at].sum() / len(at) for at in (s, fresh))
        share, empirical, expected = expected / empirical, scale * empirical, scale * expected
        slack, complexity = _slack(Head(keys[:, s], values[:, s], keys[:, :0], values[:, :0], query), delta)
        row = (empirical, expected, expected - empirical, share, slack, complexity)
        for name, value in zip(found, row, strict=True):
            found[name].append(float(value))
    return found


def _slack(head: Head, delta: float) -> tuple[float, float]:
    """What theorem 3.2 adds to L̂, and the part of it that is the complexity term; NaN where it is no number."""
    try:
        bound = generalisation_bound(head, delta)
    except UserError:
        return math.nan, math.nan
    return bound.complexity + bound.confidence, bound.complexity
