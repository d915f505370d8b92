"""A lab's options: one frozen dataclass defines both its command line and its function's arguments.

Plain dataclasses, so that `--help` imports neither torch nor pydantic; pydantic checks the values later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt

from dualview.io.errors import UserError
from dualview.options import AtLeastOne, RunOptions, option, plain, split_list, validated

if TYPE_CHECKING:
    from dualview.models.language_model import LanguageModel

Seed = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]


@dataclass(frozen=True, kw_only=True)
class LabSettings:
    """The settings of every lab; each lab's own dataclass adds to them. Create one with `make`."""

    seed: Seed = option(1, "draws weights and data; with several seeds, the first of them")
    device: str = option("auto", "cpu, cuda, cuda:1 …; auto takes a GPU if there is one")
    save_every: Positive = option(10.0, "seconds between saved training states (with --out)")

    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ("save_every",)
    """Settings that change no number and so are not part of a result."""
    ACROSS: ClassVar[tuple[str, ...]] = ("seed", "seeds")
    """Settings that choose which trainings there are; they do not change any one of them."""
    COUNT: ClassVar[str | None] = None
    """The setting that says how many seeds there are; None: one."""

    @property
    def all_seeds(self) -> list[int]:
        return list(range(self.seed, self.seed + (1 if self.COUNT is None else getattr(self, self.COUNT))))

    @classmethod
    def make(cls, **given: Any) -> Self:
        """Settings from the given values (None: not given); a mistake becomes a one-sentence error."""
        given = {name: value for name, value in given.items() if value is not None}
        hints = get_type_hints(cls, include_extras=True)
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise UserError(f"There is no setting {unknown[0]}; the settings are {', '.join(sorted(known))}.")
        made = validated(cls, {name: _listed(value, hints[name]) for name, value in given.items()})
        for field in fields(cls):
            _check(f"--{field.name.replace('_', '-')}", getattr(made, field.name))
        return made

    def to_json(self) -> dict[str, Any]:
        """Every setting that decides the numbers, as JSON can hold it."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name not in self.WITHOUT_EFFECT}

    def of_one_training(self) -> dict[str, Any]:
        """Those of them that decide one training's numbers."""
        return {name: value for name, value in self.to_json().items() if name not in self.ACROSS}


@dataclass(frozen=True, kw_only=True)
class SeveralSeeds(LabSettings):
    """Settings of a lab that trains several seeds."""

    seeds: AtLeastOne = option(1, "number of seeds to train, from --seed on")

    COUNT = "seeds"


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(LabSettings):
    """Settings of a lab that prepares prompts and fine-tuning as `dualview run` does."""

    data: Path | None = option(None, "read <task>/{train,validation}.jsonl from this folder")
    shots: AtLeastOne = option(16, "demonstrations, as many as fit")
    n_queries: AtLeastOne = option(30, "queries")
    lr: Positive | Literal["auto"] = option(0.03, "fine-tuning's rate; auto: the best of the grid")

    def run_options(self, lm: LanguageModel, task: str, seed: int) -> RunOptions:
        shared = {name: getattr(self, name) for name in ("data", "shots", "n_queries", "lr")}
        return RunOptions.make(model=lm.name, task=task, seed=seed, device=str(lm.device), **shared)


def _listed(value: Any, hint: Any) -> Any:
    """Split `1,3,5` for a setting that is a list of numbers or names; not a path, which may contain a comma."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(kind) is not tuple:
        return value
    if get_args(kind)[0] is Path:
        return (value,) if isinstance(value, (str, Path)) else tuple(value)
    return split_list(value)


def _check(flag: str, value: Any) -> None:
    """Refuse infinite values, NaN, and the same value twice in a list."""
    parts: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    for number, part in enumerate(parts):
        if isinstance(part, float) and not math.isfinite(part):
            raise UserError(f"Option {flag}: {part} is not a finite number; give one.")
        if part in parts[:number]:
            raise UserError(f"Option {flag}: {part} is given twice; give it once.")
