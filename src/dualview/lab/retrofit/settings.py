"""The retrofit lab's options and presets."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge

from dualview.lab.gpt.training import CorpusRecipe
from dualview.lab.language.settings import LENGTHS
from dualview.lab.retrofit.arms import ARMS, variant_of
from dualview.lab.settings import Positive, SeveralSeeds
from dualview.options import AtLeastOne, Labels, option

PRESETS: dict[str, dict[str, Any]] = {
    "small": {},
    # 64 steps of 32 × 1,024 tokens: 2.1 million, 10 seconds at a quarter of the matrix rate for 135 M parameters.
    # One rate for all arms, chosen before any was trained: a tenth of the highest of the model's pretraining.
    "h200": {
        "only": tuple(arm for arm in ARMS if arm != "momentum_0.5"),
        "seeds": 3,
        "max_text": 20.0,
        "context": 1024,
        "batch": 32,
        "steps": 64,
        "lr": 3e-4,
        "coefficient_lr": 5e-3,
        "warmup": 8,
        "precision": "bfloat16",
        "compile": True,
        "eval_tokens": 65_536,
        "shots": 16,
        "n_queries": 200,
        "draws": 2,
        "save_every": 120.0,
    },
    # Qwen2.5-Coder-0.5B, which does learn from demonstrations: 64 steps of 16 × 1,024 tokens are 1 million, 13 seconds
    # at a third of the matrix rate. The learning rate is one of fine-tuning, so that the control keeps what it can do;
    # it was chosen before any training. 8 rows at once: logits and activations of this vocabulary and width take 20 GB.
    "h200-0.5b": {
        "only": ("plain", "momentum", "momentum_0.1", "sign_token"),
        "seeds": 3,
        "max_text": 20.0,
        "context": 1024,
        "batch": 16,
        "micro_batch": 8,
        "steps": 64,
        "lr": 5e-5,
        "coefficient_lr": 5e-3,
        "warmup": 8,
        "precision": "bfloat16",
        "compile": True,
        "eval_tokens": 65_536,
        "labels": ("natural", "abstract"),
        "shots": 32,
        "n_queries": 200,
        "draws": 2,
        "save_every": 120.0,
    },
}


@dataclass(frozen=True, kw_only=True)
class RetrofitSettings(SeveralSeeds):
    """Options of `dualview lab retrofit`."""

    preset: Literal["small", "h200", "h200-0.5b"] = option(
        "small", "small: ten minutes on 2 cores; h200: seven on a GPU; h200-0.5b: six, for 0.5 billion parameters"
    )
    model: str = option("embedded", "the pretrained model: embedded, a hub id, a folder, or a .gguf file")
    text: tuple[Path, ...] = option((), "text files (.txt, .xz, .gz) or folders; none: the embedded tasks' sentences")
    max_text: Positive = option(5.0, "use at most this many million characters of the text")
    only: tuple[str, ...] = option(
        ("plain", "momentum", "sign"), f"the arms to train, of {', '.join(ARMS)} (momentum_<η> for any η)"
    )
    context: AtLeastOne = option(256, "tokens in a row")
    batch: AtLeastOne = option(1, "rows in a step")
    micro_batch: Annotated[int, Ge(0)] = option(0, "rows of them in memory at once; 0: all")
    steps: AtLeastOne = option(10, "training steps")
    lr: Positive = option(1e-4, "highest learning rate of the weights")
    coefficient_lr: Positive = option(3e-3, "highest learning rate of η, α and σ")
    warmup: AtLeastOne = option(2, "steps over which it rises")
    precision: Literal["float32", "bfloat16"] = option("float32", "of the training's matrix products; weights: float32")
    compile: bool = option(False, "torch.compile the layers; where that fails, train without")
    eval_tokens: AtLeastOne = option(1024, "held-out tokens to measure perplexity on, at most")
    data: Path | None = option(
        None, "folder of <task>/{train,validation}.jsonl: the six tasks in place of the embedded five"
    )
    tasks: tuple[str, ...] = option((), "tasks to ask; none: as above")
    labels: tuple[Labels, ...] = option(("natural",), "label words to ask with: natural, abstract (meaningless words)")
    shots: AtLeastOne = option(8, "demonstrations, as many as fit")
    n_queries: Annotated[int, Ge(0)] = option(10, "queries of each task; 0: no in-context accuracy")
    draws: AtLeastOne = option(1, "draws of demonstrations")
    minutes: Positive | None = option(None, "begin no training that would not end within so many minutes of the start")

    ACROSS = ("seed", "seeds", "only", "preset", "text", "minutes")

    @classmethod
    def make(cls, **given: Any) -> Self:
        """The preset's values, overridden by the given ones."""
        given = {name: value for name, value in given.items() if value is not None}
        return super().make(**{**PRESETS.get(str(given.get("preset", "small")), {}), **given})

    def __post_init__(self) -> None:
        for arm in self.only:
            variant_of(arm)
        if "plain" not in self.only:
            raise ValueError("the arm plain is the control of the others; add it to --only")
        if self.minutes is not None and self.only[0] != "plain":
            raise ValueError("with --minutes the arm plain must come first in --only: the others need their control")
        if self.eval_tokens < self.context:
            raise ValueError(f"--eval-tokens {self.eval_tokens} is less than one row of {self.context} tokens")
        if self.micro_batch and self.batch % self.micro_batch:
            raise ValueError(f"--micro-batch {self.micro_batch} does not divide the {self.batch} rows of a step")
        if self.warmup > self.steps:
            raise ValueError(f"warmup {self.warmup} is longer than the {self.steps} steps of the training")

    @property
    def lengths(self) -> list[int]:
        """The lengths at which perplexity is measured."""
        return [length for length in LENGTHS if self.context % length == 0] or [self.context]

    @property
    def recipe(self) -> CorpusRecipe:
        """The settings that have the same name in a recipe."""
        shared = [field.name for field in fields(CorpusRecipe) if hasattr(self, field.name)]
        return CorpusRecipe(**{name: getattr(self, name) for name in shared})
