"""A lab's options: one frozen dataclass defines both its command line and its function's arguments.

Plain dataclasses, so that `--help` imports neither torch nor pydantic; pydantic checks the values later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt

from dualview.io.errors import UserError
from dualview.options import option

Seed = Annotated[int, Ge(0)]
AtLeastOne = Annotated[int, Ge(1)]
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

    @property
    def all_seeds(self) -> list[int]:
        return [self.seed]

    @classmethod
    def make(cls, **given: Any) -> Self:
        """Settings from the given values (None: not given); a mistake becomes a one-sentence error."""
        from pydantic import TypeAdapter, ValidationError

        given = {name: value for name, value in given.items() if value is not None}
        hints = get_type_hints(cls, include_extras=True)
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise UserError(f"There is no setting {unknown[0]}; the settings are {', '.join(sorted(known))}.")
        listed = {name: _listed(value, hints[name]) for name, value in given.items()}
        try:
            made = TypeAdapter(cls).validate_python(listed)
        except ValidationError as error:
            first = error.errors()[0]
            message = first["msg"].removeprefix("Value error, ")
            if not first["loc"]:
                raise UserError(f"{message[0].upper()}{message[1:]}.") from error
            name = str(first["loc"][0])
            raise UserError(f"Option --{name.replace('_', '-')}: {message} (given: {given.get(name)!r}).") from error
        for field in fields(cls):
            _check(f"--{field.name.replace('_', '-')}", getattr(made, field.name))
        return made

    def to_json(self) -> dict[str, Any]:
        """Every setting that decides the numbers, as JSON can hold it."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name not in self.WITHOUT_EFFECT}

    def of_one_training(self) -> dict[str, Any]:
        """Those of them that decide one training's numbers."""
        return {name: value for name, value in self.to_json().items() if name not in self.ACROSS}


@dataclass(frozen=True, kw_only=True)
class SeveralSeeds(LabSettings):
    """Settings of a lab that trains several seeds."""

    seeds: AtLeastOne = option(1, "number of seeds to train, from --seed on")

    @property
    def all_seeds(self) -> list[int]:
        return list(range(self.seed, self.seed + self.seeds))


def element_of(hint: Any) -> Any:
    """The type of a `tuple[X, ...]`'s elements, behind `Annotated`; None for anything else."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return get_args(hint)[0] if get_origin(hint) is tuple else None


def _listed(value: Any, hint: Any) -> Any:
    """Split `1,3,5` for a setting that is a list of numbers or names; not a path, which may contain a comma."""
    element = element_of(hint)
    if element is None:
        return value
    given: list[Any] = [value] if isinstance(value, (str, Path)) else list(value)
    if element is Path:
        return tuple(given)
    parts = (part.split(",") if isinstance(part, str) else [part] for part in given)
    return tuple(part.strip() if isinstance(part, str) else part for piece in parts for part in piece if part != "")


def _check(flag: str, value: Any) -> None:
    """Refuse infinite values, NaN, and the same value twice in a list."""
    parts: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    for number, part in enumerate(parts):
        if isinstance(part, float) and not math.isfinite(part):
            raise UserError(f"Option {flag}: {part} is not a finite number; give one.")
        if part in parts[:number]:
            raise UserError(f"Option {flag}: {part} is given twice; give it once.")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]  # pyright: ignore[reportUnknownVariableType]
    return str(value) if isinstance(value, Path) else value
