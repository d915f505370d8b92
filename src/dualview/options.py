"""Every option of a run: the command line, `dualview.run` and sweeps all read this list.

A plain dataclass, so that `--help` does not wait for pydantic, which checks the values when a run begins.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, MinLen

from dualview.io.errors import UserError, first_problem

Protocol = Literal["modern", "dai", "deutch"]
T = TypeVar("T")
Labels = Literal["natural", "abstract"]
Weights = Literal["trained", "untrained", "trained-embeddings"]

GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SEEDS = (1, 2, 3, 4, 5, 6, 7)
SELECTION_ROWS = 64
_MOST_SEEDS = 1_000_000

# The two papers' settings where they differ from the defaults. The papers chose seed and learning rate on the reported
# queries; here both are chosen on the selection split, from the papers' own candidates.
_DAI: dict[str, Any] = {
    "at": "label0",
    "separator": "eos",
    "bos": "yes",
    "seed": "auto",
    "n_queries": 2000,
    "lr_grid": tuple(m * 10.0**-e for e in (4, 3, 2, 1) for m in range(1, 10)),
}
PROTOCOLS: dict[str, dict[str, Any]] = {"modern": {}, "dai": _DAI, "deutch": {**_DAI, "ft_rule": "layer-causal"}}


def option(default: Any, help: str) -> Any:
    """A field of `RunOptions` with the sentence that explains it."""
    return field(default=default, metadata={"help": help})


AtLeastOne = Annotated[int, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """One comparison of zero-shot, in-context and fine-tuned. Make them with `make`, which checks them."""

    model: str = option(
        "embedded", "embedded, a name of `dualview assets`, owner/name@revision on the hub, a folder, a .gguf"
    )
    task: str = option("movie", "a task of the library (see `dualview tasks`) or a task's YAML file")
    data: Path | None = option(None, "read <task>/{train,validation}.jsonl from this folder, not the hub")
    labels: Labels = option("natural", "the task's label words, or abstract: meaningless words in their place")
    demos: Path | None = option(None, "jsonl: exactly these demonstrations, in this order")
    queries: Path | None = option(None, "jsonl: exactly these queries, in this order")
    shots: AtLeastOne = option(32, "demonstrations in the prompt")
    seed: int | Literal["auto"] = option(1, "draws the demonstrations; auto: the best of 1 to 7 for ICL")
    n_queries: AtLeastOne = option(200, "how many queries to ask")
    lr: float | Literal["auto"] = option("auto", "fine-tuning's rate; auto: the best of the grid")
    lr_grid: Annotated[tuple[float, ...], MinLen(1)] = option(GRID, "the rates that auto chooses from")
    epochs: AtLeastOne = option(1, "passes over the demonstrations")
    ft_loss: Literal["all", "label"] = option("all", "loss on all tokens, or on the label's")
    ft_params: Literal["kv", "qkv", "v", "all"] = option("kv", "which weights are trained")
    ft_rule: Literal["sgd", "layer-causal", "linearised", "distilled"] = option(
        "sgd", "gradient of the model, layer by layer, of its first-order expansion; or ICL distilled into the weights"
    )
    ft_precision: Literal["model", "float32"] = option(
        "model", "differentiate through a half-precision model itself, or through a float32 copy of it"
    )
    at: Literal["prompt", "label0"] = option("prompt", "record at the last prompt token, or at label 0")
    bos: Literal["auto", "yes", "no"] = option("auto", "begin with BOS; auto: if the tokenizer does")
    separator: str | None = option(None, "between demonstrations: text, or eos; the task's by default")
    calibrate: bool = option(False, "add contextual calibration of the label prior")
    controls: Literal["none", "quick", "full"] = option("quick", "floors, ceilings and the verdict: how many controls")
    protocol: Protocol = option("modern", "presets: modern (these defaults), dai, deutch")
    weights: Weights = option("trained", "trained, or drawn at random: all of them, or all but embeddings and norms")
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = option("float32", "of the model")
    device: str = option("auto", "cpu, cuda, cuda:1 …; auto: a GPU if there is one; balanced: layers spread over all")
    batch_size: AtLeastOne | None = option(None, "queries per forward pass; chosen by size if not given")
    max_context: AtLeastOne | None = option(None, "use at most this many positions")
    trust_remote_code: bool = option(False, "let a hub model run its own Python code")
    patch: Path | None = option(None, "a patch that `dualview compile` wrote, judged like fine-tuning")
    adapter: tuple[Path, ...] = option((), "a folder with a LoRA adapter of the model, judged like it; repeatable")
    save_records: bool = option(False, "keep h, m and λ of every query (safetensors)")

    @classmethod
    def make(cls, **given: Any) -> RunOptions:
        """Options from what was given, the protocol's presets under it; mistakes become one sentence."""
        # An option that may be repeated is () on the command line where it is not given.
        given = {name: value for name, value in given.items() if value is not None and value != ()}
        unknown = sorted(set(given) - {f.name for f in fields(cls)})
        if unknown:
            raise UserError(f"There is no option {unknown[0]}; the options are those of `dualview run --help`.")
        presets = PROTOCOLS.get(str(given.get("protocol", "modern")), {})
        both = {**presets, **given}
        if isinstance(both.get("lr_grid"), str | list | tuple):
            both["lr_grid"] = split_list(both["lr_grid"])
            if not both["lr_grid"]:
                raise UserError("Option --lr-grid is empty; give rates such as 0.001,0.01.")
        return validated(cls, both)

    def __post_init__(self) -> None:
        for flag, rates in (("--lr-grid", self.lr_grid), ("--lr", (self.lr,))):
            for rate in rates:
                if isinstance(rate, float) and not (math.isfinite(rate) and rate >= 0):
                    raise ValueError(f"option {flag}: a learning rate is a finite number of at least 0, not {rate}")
        if self.seed == "auto" and self.demos is not None:
            raise ValueError("seed auto chooses among drawn demonstrations, so it does not go with demos")
        if self.ft_rule != "sgd" and self.ft_params == "all":
            raise ValueError(f"{self.ft_rule} trains projections, so it does not go with ft_params all")
        if self.ft_rule == "distilled" and self.ft_loss != "all":
            raise ValueError("distilled has a loss of its own, so it does not go with ft_loss")

    @property
    def changed(self) -> dict[str, Any]:
        """The options that differ from the defaults, as JSON: enough to repeat the run."""
        own = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return {name: plain(value) for name, (value, default) in own.items() if value != default}


ADDED_LATER = ("labels", "adapter")
"""Options younger than the first stores: at its default, such an option is not part of any key."""


def keyed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that enter a key: all but the young ones at their defaults."""
    young = {f.name: f.default for f in fields(RunOptions) if f.name in ADDED_LATER}
    return {name: value for name, value in options.items() if name not in young or value != young[name]}


COMPARISON_ONLY = ("at", "calibrate", "controls", "patch", "adapter", "save_records")
"""Options that only a whole comparison uses: no other verb takes them."""
QUERIES_ONLY = ("queries", "n_queries")
"""Options that a verb with a single, given query does not take either."""


def refuse_options(verb: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse options that would change nothing in this verb."""
    for name in names:
        if given.get(name) is not None:
            raise UserError(f"{verb} does not take the option {name}: it would change nothing; leave it out.")


def validated(kind: type[T], given: Mapping[str, Any]) -> T:
    """A settings class from the given values; the first mistake in them becomes a one-sentence error."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        place, problem = first_problem(error)
        if not place:
            raise UserError(f"{problem[0].upper()}{problem[1:]}.") from error
        name = place.split(".")[0]
        raise UserError(f"Option --{name.replace('_', '-')}: {problem} (given: {given.get(name)!r}).") from error


def split_list(given: Any) -> tuple[Any, ...]:
    """The parts of a list, of `1,3,5`, or of a list of such texts.

    >>> split_list("a, b"), split_list(["1,2", 3])
    (('a', 'b'), ('1', '2', 3))
    """
    texts: Sequence[Any] = [given] if isinstance(given, str) else given
    pieces = (each.split(",") if isinstance(each, str) else [each] for each in texts)
    return tuple(part.strip() if isinstance(part, str) else part for piece in pieces for part in piece if part != "")


def plain(value: Any) -> Any:
    """A setting as JSON can hold it."""
    if isinstance(value, tuple):
        return [plain(part) for part in value]  # pyright: ignore[reportUnknownVariableType]
    return str(value) if isinstance(value, Path) else value


def seeds_in(text: str) -> Sequence[int]:
    """The seeds of `3`, `1:5` (both ends counted), `1,3,7` or a mix; none where the text is not that, or too long.

    >>> seeds_in("1:3,9"), seeds_in("3:1"), seeds_in("a")
    ([1, 2, 3, 9], [], [])
    """
    ranges: list[range] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([+-]?\d{1,30})\s*(?::\s*([+-]?\d{1,30})\s*)?", part)
        ends = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        ranges.append(range(ends[0], ends[1] + 1))
    counts = [each.stop - each.start for each in ranges]
    if not all(0 < count <= _MOST_SEEDS for count in counts):
        return []
    return ranges[0] if len(ranges) == 1 else [seed for each in ranges for seed in each]
