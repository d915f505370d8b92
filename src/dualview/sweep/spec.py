"""A study as a grid: the options of `dualview run`, each a value or a list of values.

    model: [embedded, ./my-model]
    task: [movie, product]
    seeds: 1:5
    lr: [0.003, 0.01, auto]
    controls: full

is 2 × 2 × 5 × 3 cells. `seeds` is short for a list of `seed`; `lr_grid` is one list, or a list of lists. Paths are
relative to the current folder, as for `dualview run`.
"""

from __future__ import annotations

import difflib
import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, cast, get_args, get_type_hints, overload

import yaml
from pydantic import (
    ConfigDict,
    PlainSerializer,
    PrivateAttr,
    RootModel,
    SkipValidation,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from dualview.io.errors import UserError, first_problem
from dualview.io.hashing import digest
from dualview.options import RunOptions, seeds_in, split_list
from dualview.store.cell_key import fragment

T = TypeVar("T")
NAMES = tuple(field.name for field in fields(RunOptions))
_NOT_HERE = {
    "out": "a sweep writes to its store",
    "json": "a sweep writes to its store; `dualview export` makes a file of it",
    "dry_run": "give --dry-run to `dualview sweep`",
}

MODEL_OPTIONS = ("model", "weights", "dtype", "device", "trust_remote_code")
"""What decides which model is loaded."""
# The C loader, where there is one, reads ten thousand seeds ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WHOLE = 1 << 63
_PREFIX_OPTIONS = ("demos", "shots", "seed", "separator")
_TUNING_OPTIONS = ("ft_params", "ft_loss", "ft_rule", "epochs", "lr_grid", "lr")


class Spec(RootModel[dict[str, Annotated[Sequence[Any], SkipValidation, PlainSerializer(tuple)]]]):
    """A grid of runs: for each option that is given, the values it takes. A mistake is a UserError naming its key."""

    model_config = ConfigDict(frozen=True)

    _cells: Sequence[RunOptions] = PrivateAttr(default=())

    @classmethod
    def make(cls, keys: Mapping[str, Any], where: str = "the spec") -> Self:
        """A spec from option names and their values; error messages name `where`."""
        return cls.model_validate(keys, context=where)

    @model_validator(mode="before")
    @classmethod
    def _read_axes(cls, keys: Any, info: ValidationInfo) -> dict[str, Sequence[Any]]:
        where = str(info.context or "the spec")
        return {name: _checked(name, value, where) for name, value in _with_seeds(dict(keys), where).items()}

    @model_validator(mode="after")
    def _check_cells(self, info: ValidationInfo) -> Self:
        self._cells = _product(self.root, self.varied, str(info.context or "the spec"))
        return self

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """A spec from a YAML file."""
        try:
            node = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
            keys = _as_written(node, str(path)) if isinstance(node, yaml.MappingNode) else None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"The spec {path} cannot be read ({error}); check the path.") from error
        except yaml.YAMLError as error:
            raise UserError(
                f"The spec {path} is not valid YAML ({' '.join(str(error).split())}); correct it."
            ) from error
        except RecursionError:
            raise UserError(
                f"The spec {path} is nested without end, or an alias (*) contains itself; "
                "write each option as a value or a list."
            ) from None
        if keys is None:
            raise UserError(f"The spec {path} is not a mapping; write option names, each with a value or a list.")
        return cls.make(keys, str(path))

    @property
    def varied(self) -> tuple[str, ...]:
        """The axes: options with more than one value, in the order in which cells are run."""
        return tuple(name for name in _in_order(self.root) if len(self.root[name]) > 1)

    def cells(self) -> Sequence[RunOptions]:
        """Every combination; neighbours share a model, then the queries, then the demonstrations."""
        return self._cells


class Grid(Sequence[RunOptions]):
    """The cells of a study, each made when it is asked for: a million of them take no memory."""

    def __init__(self, axes: Mapping[str, Sequence[Any]], span: range | None = None) -> None:
        self._names = tuple(axes)
        self._axes = tuple(values if isinstance(values, range) else tuple(values) for values in axes.values())
        protocols = axes.get("protocol", ("modern",))
        self._bases = {name or "modern": vars(RunOptions.make(protocol=name)) for name in protocols}
        self._span = range(math.prod(map(len, self._axes))) if span is None else span

    def __len__(self) -> int:
        return len(self._span)

    @overload
    def __getitem__(self, index: int) -> RunOptions: ...
    @overload
    def __getitem__(self, index: slice) -> Grid: ...
    def __getitem__(self, index: int | slice) -> RunOptions | Grid:
        if isinstance(index, slice):
            return Grid(dict(zip(self._names, self._axes, strict=True)), self._span[index])
        left, values = self._span[index], list[Any]()
        for axis in reversed(self._axes):  # the last axis varies fastest
            left, place = divmod(left, len(axis))
            values.append(axis[place])
        return self.cell(dict(zip(self._names, reversed(values), strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    def cell(self, given: Mapping[str, Any]) -> RunOptions:
        """The options of a run; null means an option's default."""
        stated = {name: value for name, value in given.items() if value is not None}
        return RunOptions(**{**self._bases[stated.get("protocol", "modern")], **stated})

    def asked(self, shared: Sequence[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The id of each cell's options (`asked_id`), without making it, and what it has of the options in `shared`.

        Of the latter only those that vary. The text that is hashed is put together from one part for each value.
        """
        axes = dict(zip(self._names, self._axes, strict=True))
        varied = [name for name in self._names if len(axes[name]) > 1]
        fixed = {name: axes[name][0] for name in self._names if name not in varied and axes[name][0] is not None}
        parts = [_Texts(name, axes[name]) for name in varied]
        bases = {
            protocol: [_text_of(name, fixed.get(name, value)) for name, value in base.items()]
            for protocol, base in self._bases.items()
        }
        base = bases[fixed.get("protocol", "modern")] if "protocol" not in varied else []
        places = [NAMES.index(name) for name in varied]
        wanted = [number for number, name in enumerate(varied) if name in shared]
        chosen = itertools.islice(_combinations(parts), self._span.start, self._span.stop, self._span.step)
        for combination in chosen:
            text = base or bases[combination[varied.index("protocol")][0]]
            text = text.copy()
            for place, (_, part) in zip(places, combination, strict=True):
                text[place] = part
            yield digest("\n".join(text)), tuple(combination[number][0] for number in wanted) if wanted else ()


class _Texts(Sequence[tuple[Any, str]]):
    """An axis' values, each with the text that is hashed, made when it is asked for."""

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        self._name, self._values = name, values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index], _text_of(self._name, self._values[index])

    def __iter__(self) -> Iterator[tuple[Any, str]]:
        return ((value, _text_of(self._name, value)) for value in self._values)


def _combinations(axes: Sequence[Sequence[T]]) -> Iterator[tuple[T, ...]]:
    """`itertools.product`, which does not copy the longest axis: it may be a million seeds."""
    if not axes:
        yield ()
        return
    longest = max(range(len(axes)), key=lambda i: len(axes[i]))
    after = list(itertools.product(*axes[longest + 1 :]))
    for before in itertools.product(*axes[:longest]):
        for value in axes[longest]:
            for rest in after:
                yield (*before, value, *rest)


def _text_of(name: str, value: Any) -> str:
    """`fragment`, which need not remember a million seeds."""
    return f"{name}={value}" if type(value) is int else fragment(name, value)


def _product(axes: Mapping[str, Sequence[Any]], varied: Sequence[str], where: str) -> Sequence[RunOptions]:
    """Every cell of a grid, once: null means an option's default, which may also be among its values."""
    grid = Grid({name: axes[name] for name in _in_order(axes)})
    # Whether options go together does not depend on which whole number one of them is (a seed), so one is tried.
    kinds: dict[str, list[Any]] = {}
    for name in _in_order(axes):
        first = {int if type(value) is int else (type(value), value): value for value in reversed(axes[name])}
        kinds[name] = list(first.values())[::-1]
    for combination in itertools.product(*kinds.values()):
        given = {name: value for name, value in zip(kinds, combination, strict=True) if value is not None}
        try:
            grid.cell(given)
        except ValueError as error:
            raise UserError(f"{where}: {error}{_place(given, varied)}.") from error
    may_repeat = any(None in axes[name] for name in varied)
    return list(dict.fromkeys(grid)) if may_repeat else grid


def _as_written(node: Any, where: str) -> Any:
    """A YAML value with its scalars as written, so that options read them as on the command line.

    YAML itself reads the seeds 1:5 as 65, the bos yes as true, and the rate 1e-3 as text.
    """
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == "tag:yaml.org,2002:null" else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_as_written(each, where) for each in node.value]
    assert isinstance(node, yaml.MappingNode)
    found: dict[str, Any] = {}
    for name, value in node.value:
        key = str(_as_written(name, where))
        if key in found:
            raise UserError(f"{where}: {key} is given twice; give it once, as a list.")
        found[key] = _as_written(value, where)
    return found


def _in_order(names: Iterable[str]) -> list[str]:
    """Options that decide the model first, those that decide only the fine-tuning last."""

    def rank(name: str) -> int:
        return 0 if name in MODEL_OPTIONS else 2 if name in _PREFIX_OPTIONS else 3 if name in _TUNING_OPTIONS else 1

    return sorted(names, key=lambda name: (rank(name), NAMES.index(name)))


def _with_seeds(given: dict[str, Any], where: str) -> dict[str, Any]:
    """`seeds` as a list of `seed`."""
    if "seeds" not in given:
        return given
    if "seed" in given:
        raise UserError(f"{where}: seed and seeds are both given; give one of them.")
    seeds = given.pop("seeds")
    if re.fullmatch(r"\s*(-\s*\d+|[+-]?0+)\s*", str(seeds)):
        raise UserError(
            f"{where}: seeds is {seeds}, which is not a draw; write seeds: 1:5 for five draws, or seed: {seeds} for "
            "the draw of that number."
        )
    if not isinstance(seeds, list | tuple):
        return {**given, "seed": _seeds(seeds, where)}
    return {**given, "seed": [seed for part in cast("Sequence[Any]", seeds) for seed in _seeds(part, where)]}


def _seeds(value: Any, where: str) -> Sequence[Any]:
    """`3`, `1:5` (both ends counted), `1,3,7`, or a mix of both."""
    if not isinstance(value, str):
        return (value,)
    found = seeds_in(value)
    if not found:
        raise UserError(
            f"{where}: seeds takes numbers such as 3, 1:5 or 1,3,7, at most a million of them (given: {value!r})."
        )
    return found


def _checked(name: str, value: Any, where: str) -> Sequence[Any]:
    """An option's values, each validated as `dualview run` would."""
    if name in _NOT_HERE:
        raise UserError(f"{where}: {name} does not go in a spec: {_NOT_HERE[name]}.")
    if name not in NAMES:
        near = difflib.get_close_matches(name.replace("-", "_"), NAMES, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"{where}: there is no option {name}{hint}; the keys are the options of `dualview run --help`.")
    if isinstance(value, range) and all(_one(name, end, where) == end for end in (value[0], value[-1])):
        return value  # perhaps a million seeds, all of one kind and none twice
    values = _values(name, value)
    if not values:
        raise UserError(f"{where}: {name} is an empty list; give at least one value.")
    checked = tuple(_one(name, each, where) for each in values)
    seen: set[tuple[type, Any]] = set()
    for each in checked:
        if (type(each), each) in seen:
            raise UserError(f"{where}: {name} holds {each!r} twice; give every value once.")
        seen.add((type(each), each))
    return checked


def _values(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        return (value,)
    items = cast("Sequence[Any]", value)
    # A rate grid is itself a list: several of them are a list of lists, or of texts with commas.
    several = any(isinstance(item, list | tuple) or "," in str(item) for item in items)
    return (items,) if name == "lr_grid" and items and not several else items


def _one(name: str, value: Any, where: str) -> Any:
    if value is None or (name == "seed" and type(value) is int and -_WHOLE <= value < _WHOLE):  # of perhaps a million
        return value
    if isinstance(value, bool) and {"yes", "no"} <= set(get_args(_kind(name))):
        value = "yes" if value else "no"
    if name == "lr_grid" and isinstance(value, str | list | tuple):
        value = split_list(value)
    if name == "adapter" and isinstance(value, str):  # a list in a spec: one adapter after another
        value = (value,)
    try:
        read = _adapter(name).validate_python(value)
        if isinstance(read, int) and not -_WHOLE <= read < _WHOLE:  # no column of a table holds it
            raise UserError(f"{where}: {name}: a whole number has at most 64 bits (given: {value!r}).")
        return read
    except ValidationError as error:
        raise UserError(f"{where}: {name}: {first_problem(error)[1]} (given: {value!r}).") from error


def _kind(name: str) -> Any:
    return get_type_hints(RunOptions, include_extras=True)[name]


@lru_cache(maxsize=len(NAMES))
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_kind(name))


def _place(given: Mapping[str, Any], varied: Sequence[str]) -> str:
    """Which cell of the grid is meant."""
    return f" (in the cell {', '.join(f'{name} {given.get(name)}' for name in varied)})" if varied else ""
