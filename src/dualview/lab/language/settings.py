"""The language lab's options and presets."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge

from dualview.lab.gpt.corpus import TokenizerKind
from dualview.lab.gpt.model import MAIN, NAMES
from dualview.lab.gpt.training import CorpusRecipe
from dualview.lab.settings import Positive, SeveralSeeds
from dualview.options import AtLeastOne, option

LENGTHS = (256, 512, 1024)

PRESETS: dict[str, dict[str, Any]] = {
    "small": {},
    # 35.7 million parameters. 1,000 steps of 32 × 1,024 tokens are 33 million, about one pass over 130 million
    # characters; at half a million to a million tokens a second in bfloat16, 35 to 65 seconds.
    "h200": {
        "only": NAMES,
        "seeds": 3,
        "max_text": 1000.0,
        "vocab": 8192,
        "d_model": 512,
        "layers": 10,
        "heads": 8,
        "batch": 32,
        "steps": 1000,
        "lr": 1.5e-3,
        "warmup": 100,
        "precision": "bfloat16",
        "eval_tokens": 262_144,
        "n_queries": 200,
        "draws": 5,
        "shots": 32,
        "keep_checkpoints": 0,
        "time_limit": 240.0,
        "save_every": 120.0,
    },
}


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(SeveralSeeds):
    """Options of `dualview lab language`."""

    preset: Literal["small", "h200"] = option("small", "small: ten minutes on 2 cores; h200: 36 M parameters on a GPU")
    text: tuple[Path, ...] = option((), "text files (.txt, .xz, .gz) or folders; none: the embedded tasks' sentences")
    max_text: Positive = option(5.0, "use at most this many million characters of the text")
    tokenizer: TokenizerKind = option("trained", "trained: BPE trained on the text; embedded: the embedded model's")
    vocab: AtLeastOne = option(1024, "tokens of a trained tokenizer")
    only: tuple[str, ...] = option(MAIN, f"the variants to train, of {', '.join(NAMES)}")
    seeds: AtLeastOne = option(1, f"seeds, from --seed on, for {', '.join(MAIN)}; the others have one")
    d_model: AtLeastOne = option(64, "width of the model")
    layers: AtLeastOne = option(4, "layers")
    heads: AtLeastOne = option(4, "attention heads")
    context: AtLeastOne = option(1024, "tokens the model reads")
    batch: AtLeastOne = option(1, "rows of --context tokens in a step")
    steps: AtLeastOne = option(800, "training steps")
    lr: Positive = option(4e-3, "highest learning rate")
    warmup: AtLeastOne = option(80, "steps over which it rises")
    precision: Literal["float32", "bfloat16"] = option("float32", "of the training's matrix products; weights: float32")
    compile: bool = option(False, "torch.compile the model")
    time_limit: Positive | None = option(None, "stop a training after this many seconds; the result says so")
    eta: Annotated[float, Ge(0)] = option(0.5, "η of momentum and token shift")
    learnable: bool = option(False, "learn η, one for each layer, from there")
    eval_tokens: AtLeastOne = option(65_536, "held-out tokens to measure perplexity on, at most")
    data: Path | None = option(
        None, "folder of <task>/{train,validation}.jsonl: those of the six tasks it holds are evaluated too"
    )
    tasks: tuple[str, ...] = option((), "few-shot tasks, hub tasks (imdb, arc_easy, piqa) among them; none: as above")
    shots: AtLeastOne = option(16, "demonstrations, as many as fit")
    n_queries: Annotated[int, Ge(0)] = option(60, "queries of each task; 0: no few-shot accuracy")
    draws: AtLeastOne = option(2, "draws of demonstrations")
    keep_checkpoints: Annotated[int, Ge(0)] = option(1, "models to keep of each training (with --out); 1: the last")

    ACROSS = ("seed", "seeds", "only", "keep_checkpoints", "preset", "text")
    """Which trainings there are, which models are kept, and names of what is recorded elsewhere."""

    @classmethod
    def make(cls, **given: Any) -> Self:
        """The preset's values, overridden by the given ones."""
        given = {name: value for name, value in given.items() if value is not None}
        return super().make(**{**PRESETS.get(str(given.get("preset", "small")), {}), **given})

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in NAMES:
                raise ValueError(f"there is no variant {name}; choose from {', '.join(NAMES)}")
        if self.d_model % (2 * self.heads):
            raise ValueError(f"d_model {self.d_model} must be an even multiple of heads {self.heads}")
        if not self.eta < 1:
            raise ValueError(f"eta must lie in [0, 1), not {self.eta}")
        if self.learnable and self.eta == 0:
            raise ValueError("a learnable eta must start above 0")
        if self.eval_tokens < self.context:
            raise ValueError(
                f"--eval-tokens {self.eval_tokens} is less than one block of --context {self.context} tokens; "
                "give at least that many"
            )
        if self.warmup > self.steps:
            raise ValueError(f"warmup {self.warmup} is longer than the {self.steps} steps of the training")

    @property
    def lengths(self) -> list[int]:
        """The lengths at which perplexity is measured."""
        return [length for length in LENGTHS if self.context % length == 0] or [self.context]

    @property
    def trainings(self) -> list[tuple[str, int]]:
        """(variant, seed), all variants of a seed before the next seed."""
        return [(name, seed) for seed in self.all_seeds for name in self.only if name in MAIN or seed == self.seed]

    @property
    def recipe(self) -> CorpusRecipe:
        """The settings that have the same name in a recipe."""
        shared = [field.name for field in fields(CorpusRecipe) if hasattr(self, field.name)]
        return CorpusRecipe(**{name: getattr(self, name) for name in shared})

    @property
    def keep_at(self) -> list[int]:
        """The steps after which a model is kept: the last, 0, and others in between at growing distances."""
        if self.keep_checkpoints < 2:
            return [self.steps] * self.keep_checkpoints
        rest = self.keep_checkpoints - 1
        later = [round(self.steps * 100 ** -(i / max(1, rest - 1))) for i in range(rest)]
        return sorted({0, *(max(1, step) for step in later)})
