"""Does momentum attention help a model that already learns in context? (Dai et al. 2022, arXiv 2212.10559, section 5)

Small GPTs trained from scratch answer few-shot prompts at chance (`dualview lab language`), so the paper's claim about
in-context learning is not tested there. Here a pretrained model is the start. Each arm adds something to its attention
(`lab.retrofit.arms`) and all weights are trained further: the same text in the same order, the same number of steps.
The control adds nothing. Seeds differ in the order of the text alone.

OUT keeps what every training found, and OUT/retrofit.json is written after each of them: a killed run continues, and a
later one with more arms or seeds adds to it. All arms of a seed come before the next seed, so that a run that ends
early (--minutes) has compared all of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from dualview.io.errors import UserError
from dualview.lab.gpt.corpus import Corpus, prepare
from dualview.lab.gpt.scoring import few_shot, prompts_of
from dualview.lab.gpt.throughput import matrix_rate
from dualview.lab.gpt.training import Blocks, cost_of, perplexities, train
from dualview.lab.harness import Findings, Job, lab
from dualview.lab.language.training import chosen_tasks, curve_of
from dualview.lab.retrofit.arms import coefficients, fitted, starts_as_pretrained
from dualview.lab.retrofit.report import figures, summarise, tables
from dualview.lab.retrofit.settings import RetrofitSettings
from dualview.lab.sign.values import observe_sink
from dualview.lab.units import Unit
from dualview.models.amx_workaround import mind_amx
from dualview.models.language_model import LanguageModel
from dualview.models.loading import load_model
from dualview.options import Labels
from dualview.tasks.prompts import PromptSet

_MEASURED = 3
"""How trainings are measured: raised when that changes, so that an older OUT does not mix with a newer one."""
_CALIBRATION, _ROWS = 4, 32
"""Rows of text for the mean |v| of each head, and rows of a batch when measuring."""


@dataclass(frozen=True)
class _Bench:
    """What all trainings share."""

    settings: RetrofitSettings
    lm: LanguageModel
    corpus: Corpus
    prompts: dict[tuple[str, Labels], list[PromptSet]]
    """By task and label words, for each draw of demonstrations."""
    train: Tensor
    held_out: Tensor
    sizes: Float[Tensor, "layer kv_head"]

    def measure(self, model: PreTrainedModel, lengths: list[int], *, ask: bool = True) -> dict[str, Any]:
        """Perplexity by length and, if asked for, which queries are right on each task."""
        model.eval()
        settings = self.settings
        batch = min(_ROWS, settings.micro_batch or settings.batch)
        losses = perplexities(model, self.held_out, lengths, settings.context, batch, settings.precision)
        found: dict[str, Any] = {"held_out": losses}
        # All arms are asked in one way, behind a key-value cache, as the variants cannot share packed prompts.
        lm = replace(self.lm, model=model, slow_because="it is compared with variants")
        with _fast_products(settings.precision == "bfloat16"):
            tasks = {which: few_shot(lm, which[0], asked) for which, asked in self.prompts.items() if ask}
        found["few_shot"] = [
            {
                **each.to_json(),
                "labels": labels,
                "right": [_digits(draw) for draw in each.icl],
                "right_without": _digits(each.zsl),
            }
            for (_, labels), each in tasks.items()
        ]
        return found


def _digits(right: Bool[np.ndarray, " query"]) -> str:
    """Which queries are right, as 0s and 1s."""
    return "".join(map(str, right.astype(int)))


@contextmanager
def _fast_products(wanted: bool) -> Generator[None]:
    """float32 with products of TF32 on a GPU; bfloat16's logits, 0.1 apart, would tie many labels."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass
class _Limit:
    """Whether another training fits into the time that was given for all of them."""

    minutes: float | None
    begun: float
    took: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of each arm's last training; its first one may have been compiled."""

    def allows(self, arm: str) -> bool:
        """The first training always, so that there is a result; another if the arm's last, or the longest, fits."""
        if self.minutes is None or not self.took:
            return True
        expected = self.took.get(arm, max(self.took.values()))
        return time.monotonic() - self.begun + expected <= 60 * self.minutes

    @contextmanager
    def watched(self, arm: str) -> Generator[None]:
        begun = time.monotonic()
        yield
        self.took[arm] = time.monotonic() - begun


@lab(RetrofitSettings, tables, figures)
def retrofit(job: Job[RetrofitSettings]) -> Findings:
    """Add momentum and other changes to a pretrained model's attention, train it further, and compare with a control.

    Equal text, order and steps for every arm. Perplexity on held-out text at several lengths, in-context accuracy, and
    the training's share of the device's matrix rate.
    """
    settings, limit = job.settings, _Limit(job.settings.minutes, time.monotonic())
    bench = _set_up(job)
    lm = bench.lm
    job.clock.lap("prepare")
    shared = {"text_sha256": bench.corpus.about["sha256"], "weights_hash": lm.weights_hash, "measured": _MEASURED}

    def unit(seed: int, **more: Any) -> Unit:
        # Not one of the job's units, which are removed with the result: a later call may add arms and seeds.
        return Unit.of(job.out, "retrofit", settings, lm.device, seed, **shared, **more)

    starts: dict[str, Any] = {}
    trainings: list[dict[str, Any]] = []
    out_of_time = False
    with job.progress.part("before training", len(settings.only)) as advance:
        for arm in settings.only:
            if arm == "plain" or not starts_as_pretrained(arm):
                starts[arm] = unit(0, start=arm).once(lambda _unit, arm=arm: _start(bench, arm))
            advance(1)
    job.clock.lap("before training")
    for seed in settings.all_seeds:
        for arm in settings.only:
            own = unit(seed, arm=arm)
            out_of_time = out_of_time or (own.finished() is None and not limit.allows(arm))
            if out_of_time and own.finished() is None:
                continue
            with limit.watched(arm) if own.finished() is None else nullcontext():  # reading one takes no time
                trainings.append(own.once(lambda own, a=arm, s=seed: _training(bench, a, s, own, job)))
            if any(each["found"]["arm"] == "plain" for each in trainings):
                job.keep(_findings(bench, starts, trainings))
    return _findings(bench, starts, trainings)


def _findings(bench: _Bench, starts: dict[str, Any], trainings: list[dict[str, Any]]) -> Findings:
    """What these trainings found; those that are missing are named in `left_out`."""
    settings, lm, found = bench.settings, bench.lm, [each["found"] for each in trainings]
    done = {(each["arm"], each["seed"]) for each in found}
    left_out = [f"{arm}/{seed}" for seed in settings.all_seeds for arm in settings.only if (arm, seed) not in done]
    results = {
        "text": bench.corpus.about,
        "lengths": settings.lengths,
        "held_out_tokens": int((len(bench.held_out) - 1) // settings.context * settings.context),
        "starts": starts,
        **summarise(found, starts, settings.lengths),
        "trainings": found,
        "left_out": left_out,
    }
    facts = {"model": lm.name, "model_commit": lm.commit, "weights_hash": lm.weights_hash}
    costs = {f"{each['found']['arm']}/{each['found']['seed']}": each["cost"] for each in trainings}
    return Findings(results, facts, {"cost": costs}, lm.device)


def _set_up(job: Job[RetrofitSettings]) -> _Bench:
    """Model, text, tasks and prompts, so that mistakes in them show before any training."""
    settings = job.settings
    tasks = chosen_tasks(settings.data, settings.tasks, settings.n_queries, both=False)
    if job.device.type == "cpu" and settings.precision == "bfloat16":
        mind_amx()
    with job.progress.part("loading the model and the text", 3) as advance:
        lm = load_model(settings.model, device=settings.device)
        if lm.context is not None and settings.context > lm.context:
            raise UserError(f"--context is {settings.context}, but {lm.name} reads {lm.context} tokens at most.")
        advance(1)
        least, most = settings.context + 1, settings.eval_tokens + 1
        corpus = prepare(settings.text, job.out, max_text=settings.max_text, least=least, given=lm.tokenizer)
        advance(1)
        matrix_rate(lm.device, settings.precision)  # measured here, before anything else warms the device up
        advance(1)
    train, held_out = (
        torch.from_numpy(np.asarray(side, dtype=np.int32)).to(lm.device)
        for side in (corpus.train, corpus.held_out[:most])
    )
    asked: Any = {"shots": settings.shots, "n_queries": settings.n_queries, "draws": range(1, settings.draws + 1)}
    prompts: dict[tuple[str, Labels], list[PromptSet]] = {
        (task.name, labels): prompts_of(task.relabelled(labels), lm.tokenizer, lm.context, **asked)
        for labels in settings.labels
        for task in tasks
    }
    count = min(_CALIBRATION, len(train) // least)
    sizes = observe_sink(lm, train[: count * least].view(count, least).long()).size if "sign" in settings.only else 0.0
    return _Bench(settings, lm, corpus, prompts, train, held_out, torch.as_tensor(sizes, device=lm.device))


def _free(device: torch.device) -> None:
    """Give back the memory of the model before this one."""
    gc.collect()  # a model and what was compiled for it may refer to each other, and they fill a GPU
    if device.type == "cuda":
        torch.cuda.empty_cache()  # measuring leaves blocks of other sizes than training needs


def _start(bench: _Bench, arm: str) -> dict[str, Any]:
    """An arm before its training; the control's is the pretrained model, which is also asked."""
    ask, lengths = arm == "plain", bench.settings.lengths
    _free(bench.lm.device)
    return bench.measure(fitted(bench.lm.model, arm, bench.sizes), lengths, ask=ask)


def _training(bench: _Bench, arm: str, seed: int, unit: Unit, job: Job[RetrofitSettings]) -> dict[str, Any]:
    """Train one arm and measure it: `found` is the same on every run, `cost` depends on the machine."""
    settings, title = bench.settings, f"{arm}, seed {seed}"
    _free(bench.lm.device)
    with job.progress.part(title, settings.steps) as advance:
        model = fitted(bench.lm.model, arm, bench.sizes)
        blocks = Blocks(bench.train, settings.context, settings.batch, seed)
        trained = train(model, blocks, settings.recipe, unit, advance=advance)
    job.clock.lap("training")
    cost = cost_of(model, trained, settings.recipe)
    model.zero_grad(set_to_none=True)  # as large as the model, and of no more use
    measured: dict[str, Any] = {"held_out": None, "few_shot": []}
    if trained.status != "diverged":
        with job.progress.part(f"{title}: {_pace(cost)}; measuring", 1) as advance:
            measured = bench.measure(model, settings.lengths)
            advance(1)
    job.clock.lap("measuring")
    found = {
        "arm": arm,
        "seed": seed,
        "status": trained.status,
        "steps": trained.steps,
        "tokens": trained.steps * settings.batch * settings.context,
        "curve": curve_of(trained.losses),
        "learnt": coefficients(model),
        **measured,
    }
    return {"found": found, "cost": cost}


def _pace(cost: dict[str, Any]) -> str:
    """How fast a training was, for the progress."""
    if cost["matrix_share"] is None:
        return "too few steps to time"
    rates = f"{cost['flops_per_second'] / 1e12:.3g} of {cost['matrix_rate'] / 1e12:.3g} TFLOP/s"
    return f"{cost['tokens_per_second']:,.0f} tokens/s, {rates} ({cost['matrix_share']:.0%})"
