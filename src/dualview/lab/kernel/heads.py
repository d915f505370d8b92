"""The heads that the kernel and bound labs measure: a model's on a prompt, and random layers on regression tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualview.duality.on_model.softmax_split import record_heads
from dualview.duality.theory.kernel import Head, softmax_head
from dualview.io.errors import UserError
from dualview.lab.gpt.scoring import prompts_of
from dualview.lab.harness import Job
from dualview.lab.problems import LinearTasks, named_generator
from dualview.lab.settings import LabSettings
from dualview.models.language_model import LanguageModel
from dualview.options import AtLeastOne, option
from dualview.tasks.task import load_task


@dataclass(frozen=True, kw_only=True)
class HeadSettings(LabSettings):
    """Settings of a lab that measures a model's heads on several prompts."""

    model: str = option("embedded", "embedded, a hub id, a folder, or a .gguf file")
    task: str = option("movie", "a task of the library or a task's YAML file")
    data: Path | None = option(None, "read <task>/{train,validation}.jsonl from this folder")
    shots: AtLeastOne = option(8, "demonstrations, as many as fit")
    draws: AtLeastOne = option(4, "prompts, each with random layers of its own, from --seed on")

    COUNT = "draws"


@dataclass(frozen=True)
class Draw:
    """One prompt of the model."""

    number: int
    seed: int
    ids: list[int]
    demos: range
    """Places of the demonstrations' tokens."""


def load_draws(job: Job[Any], settings: HeadSettings) -> tuple[LanguageModel, list[Draw]]:
    """The model and a prompt for each seed, with the same queries in turn."""
    task = load_task(settings.task, settings.data)
    lm = job.load_model(settings.model)
    asked: Any = {"shots": settings.shots, "n_queries": settings.draws, "draws": settings.all_seeds}
    draws: list[Draw] = []
    for number, prompt in enumerate(prompts_of(task, lm.tokenizer, lm.context, **asked)):
        ids = [*prompt.prefix, *prompt.queries[number % len(prompt.queries)].ids]
        draws.append(Draw(number, settings.all_seeds[number], ids, range(len(prompt.zero_prefix), len(prompt.prefix))))
    return lm, draws


@dataclass(frozen=True)
class HeadGroup:
    """Heads that share keys and values, at one token, in float64; keys and queries scaled so that Kᵀq is the logit."""

    keys: Float[Tensor, "d token"]
    values: Float[Tensor, "d_v token"]
    queries: Float[Tensor, "d head"]
    demos: range
    """Places of the demonstrations' tokens; the others are the query's own."""
    output: Float[Tensor, "d_v head"] | None = None
    """What the model itself computed."""

    def weights(self) -> Float[Tensor, "token head"]:
        """softmax(Kᵀ q)."""
        return torch.softmax(self.keys.T @ self.queries, dim=0)

    def centred(self) -> HeadGroup:
        """The same attention by the keys less their mean."""
        return replace(self, keys=self.keys - self.keys.mean(dim=1, keepdim=True))

    def head(self, index: int) -> Head:
        """One head as theorem 3.1 has it: X_D the demonstrations, X_T the query's own tokens."""
        inside = torch.zeros(self.keys.shape[1], dtype=torch.bool)
        inside[self.demos.start : self.demos.stop] = True
        return Head(
            demo_keys=self.keys[:, inside],
            demo_values=self.values[:, inside],
            own_keys=self.keys[:, ~inside],
            own_values=self.values[:, ~inside],
            query=self.queries[:, index],
        )


def model_groups(lm: LanguageModel, ids: list[int], demos: range) -> list[HeadGroup]:
    """Every layer's key-value heads, in order, with the queries of the prompt's last token after rotary embedding."""
    found: list[HeadGroup] = []
    for layer in record_heads(lm, ids):
        rule = layer.rule
        if any(x is not None for x in (rule.softcap, rule.sinks, rule.alibi)) or rule.visible(layer.at[-1:], layer.at):
            raise UserError(f"{lm.name} adds something to the logits of its softmax; the lab needs plain exp(kᵀq).")
        if not rule.scale > 0:
            raise UserError(f"{lm.name} scales its logits by {rule.scale:g}; the lab needs a scale above 0.")
        root = rule.scale**0.5
        q, k, v, out = (x.double().cpu() for x in (layer.q, layer.k, layer.v, layer.out))
        # A group's query heads are next to each other.
        for own_q, own_k, own_v, own_out in zip(q.chunk(len(k)), k, v, out.chunk(len(k)), strict=True):
            found.append(HeadGroup(root * own_k.T, own_v.T, root * own_q.T, demos, own_out.T))
    return found


def random_groups(seed: int, count: int, dims: int = 10, demos: int = 15) -> list[HeadGroup]:
    """Softmax layers with random weights on regression tokens (x_i, y_i), the query's token (x, 0) as its own."""
    draw = named_generator(seed, "random layers")
    tasks, width = LinearTasks(dims, demos).draw(draw, count), dims + 1
    found: list[HeadGroup] = []
    for context, query in zip(tasks.context.double(), tasks.query.double(), strict=True):
        w_k, w_q, w_v = torch.randn(3, width, width, generator=draw, dtype=torch.float64) / width**0.5
        head = softmax_head(w_k, w_q, w_v, context.T, query.T, query[0])
        found.append(HeadGroup(head.keys, head.values, head.query[:, None], range(demos)))
    return found
