"""Attention on α · sign(V) in a trained model: what breaks, and is it the attention sink?

    y_t = V' softmax(Kᵀ q_t / √d),        v'_i = α s sign(v_i)

Sign gradient descent is not such an attention (see `duality.theory.sign`); the lab asks what it does to a trained
model. The scales: one constant for the whole model, one for each head (both the mean |v| of other text), the running
mean of the sequence, and each token's own mean. Signing loses 1 − 2/π of a Gaussian value's energy at any scale. The
explanation under test says that a constant also inflates the sink's small value. `dualview.lab.sign.explanation` has
what that predicts and how it is tested.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import torch
from annotated_types import Ge
from jaxtyping import Float, Int
from torch import Tensor

from dualview.io.errors import UserError
from dualview.lab.gpt.corpus import read_source
from dualview.lab.gpt.scoring import few_shot, prompts_of
from dualview.lab.gpt.training import token_losses
from dualview.lab.harness import Findings, Job, lab
from dualview.lab.settings import LabSettings, Positive
from dualview.lab.sign.report import figures, summarise, tables
from dualview.lab.sign.values import SINK, Muted, SinkReport, SparingSign, observe_sink, text_rows
from dualview.models.language_model import LanguageModel
from dualview.options import AtLeastOne, option
from dualview.tasks.prompts import PromptSet
from dualview.tasks.task import load_task
from dualview.variants import Sign, Variant, attach, detach, variant_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class SignSettings(LabSettings):
    """Options of `dualview lab sign`."""

    model: str = option("embedded", "embedded, a hub id, a folder, or a .gguf file")
    text: tuple[Path, ...] = option((), "text files (.txt, .xz, .gz) or folders; none: the embedded tasks' sentences")
    max_text: Positive = option(5.0, "use at most this many million characters of the text")
    rows: AtLeastOne = option(16, "pieces of text to measure perplexity on, each from another document if possible")
    length: Annotated[int, Ge(16)] = option(256, "tokens of each")
    calibration: AtLeastOne = option(4, "pieces of other text from which constants and the sink's numbers are taken")
    task: str = option("movie", "a task of the library or a task's YAML file")
    data: Path | None = option(None, "read <task>/{train,validation}.jsonl from this folder")
    shots: AtLeastOne = option(16, "demonstrations, as many as fit")
    n_queries: AtLeastOne = option(50, "queries")
    draws: AtLeastOne = option(2, "draws of demonstrations, from --seed on")
    placebo: Annotated[int, Ge(1)] = option(8, "the token to spare instead of the sink, counted from 0")

    COUNT = "draws"

    def __post_init__(self) -> None:
        if self.placebo >= self.length:
            raise ValueError(f"placebo {self.placebo} must be one of the {self.length} tokens of a piece")


@dataclass(frozen=True)
class SignCondition:
    """One way of changing the values."""

    scale: str
    """none (values as they are), constant, head, sequence or token."""
    spared: str
    """nothing, sink (left as it is), sink zeroed, or another token."""
    variant: Variant | None
    constants: Float[np.ndarray, "layer kv_head"] | None = None
    """α for each head, where the variant has none."""

    @property
    def key(self) -> str:
        return f"{self.scale}/{self.spared}"


def conditions(report: SinkReport, placebo: int) -> list[SignCondition]:
    """The model as it is, and every scale with nothing, the sink, or another token spared."""
    made = [SignCondition("none", "nothing", None), SignCondition("none", "sink zeroed", Muted())]
    one = float(report.size.mean())
    scales: list[tuple[str, dict[str, Any], Any]] = [
        ("constant", {"scale": "constant", "alpha": one}, None),
        ("head", {"scale": "constant", "learnable": True, "per": "head"}, report.size),
        ("sequence", {"scale": "sequence"}, None),
        ("token", {"scale": "token"}, None),
    ]
    for name, how, constants in scales:
        made += [
            SignCondition(name, "nothing", Sign(**how), constants),
            SignCondition(name, "sink", SparingSign(**how, spared=SINK), constants),
            SignCondition(name, "sink zeroed", SparingSign(**how, spared=SINK, muted=True), constants),
            SignCondition(name, "another token", SparingSign(**how, spared=placebo), constants),
        ]
    return made


@contextmanager
def applied(model: PreTrainedModel, condition: SignCondition) -> Generator[None]:
    """The model under a condition, for the length of a block."""
    if condition.variant is None:
        yield
        return
    attach(model, condition.variant)
    try:
        if condition.constants is not None:
            coefficients = list(variant_parameters(model).values())
            with torch.no_grad():
                for parameter, constants in zip(coefficients, condition.constants, strict=True):
                    parameter.copy_(torch.from_numpy(constants))
                    parameter.requires_grad_(False)
        yield
    finally:
        detach(model)


@lab(SignSettings, tables, figures)
def sign(job: Job[SignSettings]) -> Findings:
    """Sign the values of a trained model's attention: perplexity and in-context accuracy at four scales.

    Then test the attention-sink explanation: how large the first token's value is and how much attention it gets, and
    what sparing it (compared with sparing another token) recovers.
    """
    settings = job.settings
    task = load_task(settings.task, settings.data)
    source = read_source(settings.text, settings.max_text)
    lm = job.load_model(settings.model)
    asked = {"shots": settings.shots, "n_queries": settings.n_queries}
    prompts = prompts_of(task, lm.tokenizer, lm.context, **asked, draws=settings.all_seeds)
    rows, other = (
        _rows(lm, [d.text for d in source.documents if d.held_out == held_out], count, settings.length)
        for held_out, count in ((True, settings.rows), (False, settings.calibration))
    )
    with job.progress.part("measuring the sink", 1) as advance:
        report = observe_sink(lm, other)
        advance(1)
    job.clock.lap("prepare")
    found = job.each(
        "signing",
        conditions(report, settings.placebo),
        lambda each: _measure(lm, each, rows, prompts),
        lambda each: {"seed": settings.seed, "text_sha256": source.digest, "condition": each.key},
    )
    job.clock.lap("measure")
    layers = report.to_json()
    results = {
        "text": {**source.about, "sha256": source.digest},
        "conditions": found,
        "sink": layers,
        **summarise(found, layers),
    }
    return Findings(results)


def _rows(lm: LanguageModel, documents: Sequence[str], count: int, length: int) -> Int[Tensor, "row token"]:
    if lm.context is not None and length > lm.context:
        raise UserError(f"--length is {length}, but {lm.name} reads {lm.context} tokens at most; give a smaller one.")
    rows = text_rows(lm, documents, count, length)
    if len(rows) < count:
        raise UserError(
            f"The text gives {len(rows)} pieces of {length} tokens where {count} are needed; give more text, "
            "or smaller --rows, --calibration or --length."
        )
    return rows


def _measure(
    lm: LanguageModel, condition: SignCondition, rows: Int[Tensor, "row token"], prompts: Sequence[PromptSet]
) -> dict[str, Any]:
    """Perplexity on the rows and accuracy on the task, under one condition."""
    with applied(lm.model, condition), torch.no_grad():
        losses = [float(token_losses(cast(Any, lm.model), row[None]).double().mean()) for row in rows]
        # Packing assumes plain softmax attention; with signed values the queries run behind a key-value cache.
        asked = lm if condition.variant is None else replace(lm, slow_because="its values are signed")
        accuracy = few_shot(asked, "", prompts)
    return {
        "scale": condition.scale,
        "spared": condition.spared,
        "loss": statistics.fmean(losses),
        "rows": losses,
        "chance": accuracy.chance,
        "zsl": float(accuracy.zsl.mean()),
        "icl": [float(x) for x in accuracy.icl.mean(1)],
        "right": accuracy.icl.astype(int).tolist(),
        "shots_used": accuracy.shots_used,
        "constant_draws": accuracy.constant,
    }
