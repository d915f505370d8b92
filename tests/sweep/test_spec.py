"""Specs: what a grid expands to, how YAML is read, and what is said about mistakes."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.io.errors import UserError
from dualview.options import RunOptions
from dualview.sweep.plan import part_of
from dualview.sweep.spec import Grid, Spec, _combinations

AXES: dict[str, list[Any]] = {
    "model": ["a", "b", "c"],
    "seed": [1, 2, 3, "auto"],
    "lr": [0.1, 0.2, "auto"],
    "shots": [1, 4],
    "ft_rule": ["sgd", "layer-causal"],
    "max_context": [None, 99],
    "lr_grid": [[0.1, 0.2], [0.3]],
    "protocol": ["modern", "dai"],
}


@settings(deadline=None, max_examples=15)
@given(st.dictionaries(st.sampled_from(sorted(AXES)), st.integers(1, 4), max_size=3))
def test_cells_are_the_product_of_the_axes(chosen: dict[str, int]) -> None:
    axes = {name: AXES[name][:count] for name, count in chosen.items()}
    cells = Spec.make(axes).cells()
    expected = {RunOptions.make(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())}
    assert len(cells) == len(expected) and set(cells) == expected


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(st.sampled_from(sorted(AXES)), st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 7))
def test_shards_together_are_the_whole(chosen: dict[str, int], parts: int) -> None:
    cells = Spec.make({name: AXES[name][:count] for name, count in chosen.items()}).cells()
    shards = [part_of(cells, f"{number}/{parts}") for number in range(1, parts + 1)]
    assert [cell for shard in shards for cell in shard] == list(cells)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_neighbours_share_the_most() -> None:
    cells = Spec.make({"lr": [0.1, 0.2], "seed": [1, 2], "task": ["movie", "tweet"], "model": ["a", "b"]}).cells()
    changes = {"model": 0, "task": 0, "seed": 0, "lr": 0}
    for before, after in itertools.pairwise(cells):
        for name in changes:
            changes[name] += getattr(before, name) != getattr(after, name)
    assert changes == {"model": 1, "task": 3, "seed": 7, "lr": 15}


def test_protocol_presets_stand_under_what_is_given() -> None:
    modern, dai = Spec.make({"protocol": ["modern", "dai"], "n_queries": 5}).cells()
    assert modern == RunOptions.make(n_queries=5) and dai == RunOptions.make(protocol="dai", n_queries=5)
    assert dai.seed == "auto" and dai.separator == "eos" and dai.n_queries == 5


YAML = """
# As people write it, and as YAML 1.1 would misread it.
model: [embedded, ./m]
seeds: 1:3
lr: [1e-3, auto]
bos: yes
lr_grid: [3e-4, 1e-3]
max_context: [null, 512]
separator: "\\n"
save_records: true
"""


def test_yaml_is_read_as_the_command_line_is(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(YAML, encoding="utf-8")
    cells = Spec.read(path).cells()
    assert len(cells) == 2 * 3 * 2 * 2
    assert {cell.seed for cell in cells} == {1, 2, 3} and {cell.lr for cell in cells} == {1e-3, "auto"}
    assert {(c.bos, c.lr_grid, c.separator, c.save_records) for c in cells} == {("yes", (3e-4, 1e-3), "\n", True)}
    assert {cell.max_context for cell in cells} == {None, 512}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lrate: 1", "there is no option lrate (did you mean"),
        ("learning-rate: 1", "there is no option learning-rate"),
        ("lr: []", "lr is an empty list"),
        ("lr: [0.1, 0.10]", "lr holds 0.1 twice"),
        ("lr: -1", "a learning rate is a finite number"),
        ("shots: [4, 0]", "shots: Input should be greater than or equal to 1 (given: '0')"),
        ("shots: {from: 1, to: 3}", "shots: Input should be a valid integer"),
        ("controls: some", "controls: Input should be 'none', 'quick' or 'full'"),
        ("seed: [1, 2]\nseeds: 1:3", "seed and seeds are both given"),
        ("lr: 1\nlr: 2", "lr is given twice"),
        ("out: somewhere", "out does not go in a spec"),
        (
            "ft_params: [kv, all]\nft_rule: [sgd, linearised]",
            "does not go with ft_params all (in the cell ft_params all",
        ),
        ("seeds: many", "seeds takes numbers such as 3, 1:5 or 1,3,7, at most a million of them (given: 'many')"),
        ("seeds: 5:1", "seeds takes numbers"),
        ("seeds: 1:99999999999", "at most a million"),
        ("seeds: 1,1", "seed holds 1 twice"),
        ("seeds: []", "seed is an empty list"),
        ("seeds: 0", "seeds is 0, which is not a draw; write seeds: 1:5 for five draws, or seed: 0"),
        ("seeds: -3", "seeds is -3, which is not a draw"),
        ("seed: 9223372036854775808", "seed: a whole number has at most 64 bits (given: '9223372036854775808')"),
        ("seeds: 99999999999999999999", "seed: a whole number has at most 64 bits"),
        ("model: &a [*a]", "an alias (*) contains itself"),
        ("model: " + "[" * 3000 + "]" * 3000, "is nested without end"),
        ("- model", "is not a mapping"),
        ("", "is not a mapping"),
        ("lr: [", "is not valid YAML"),
        ("lr: !!python/object/apply:os.getcwd []", "lr is an empty list"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_its_key(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        Spec.read(path)
    assert said in str(caught.value) and "\n" not in str(caught.value) and "--seeds" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "seeds"), [("3", [3]), (3, [3]), ("1:3,9", [1, 2, 3, 9]), (["1:2", "7"], [1, 2, 7]), ([4, 5], [4, 5])]
)
def test_seeds_are_short_for_a_list(given: Any, seeds: list[int]) -> None:
    assert [cell.seed for cell in Spec.make({"seeds": given}).cells()] == seeds


def test_an_alias_repeats_a_value(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("lr: &l 0.03\nlr_grid: [*l]", encoding="utf-8")
    [cell] = Spec.read(path).cells()
    assert (cell.lr, cell.lr_grid) == (0.03, (0.03,))


def test_a_default_that_is_also_given_is_one_cell() -> None:
    assert [cell.ft_rule for cell in Spec.make({"ft_rule": [None, "sgd", "linearised"]}).cells()] == [
        "sgd",
        "linearised",
    ]
    cells = Spec.make({"protocol": ["modern", "dai"], "bos": [None, "yes"]}).cells()
    found = sorted((cell.protocol, cell.bos) for cell in cells)
    assert found == [("dai", "yes"), ("modern", "auto"), ("modern", "yes")]


def test_a_long_axis_is_read_in_linear_time() -> None:
    def seconds(count: int) -> float:
        start = time.process_time()
        assert len(Spec.make({"seeds": f"1:{count}"}).cells()) == count
        return time.process_time() - start

    seconds(100)
    assert seconds(20_000) < 4  # it took 18 s


def test_a_spec_is_a_pydantic_model() -> None:
    spec = Spec.model_validate({"lr": [0.1, "auto"], "seed": 3})
    assert spec == Spec.make({"seed": 3, "lr": [0.1, "auto"]})
    assert Spec.model_validate(spec.model_dump()).cells() == spec.cells() and len(spec.cells()) == 2
    drawn = Spec.make({"seeds": "1:3"})
    assert drawn.model_dump() == {"seed": (1, 2, 3)} and drawn.model_dump_json() == '{"seed":[1,2,3]}'
    with pytest.raises(UserError, match="the spec: there is no option lrs"):
        Spec.model_validate({"lrs": 1})


def test_a_missing_spec(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        Spec.read(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/3", ""])
def test_shards_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="--shard takes i/n"):
        part_of([], text)


def test_a_long_range_of_seeds_takes_no_memory() -> None:
    """Resuming a sweep over a million cells: neither its spec nor the ids of its options are lists."""
    Spec.make({"task": "movie", "seeds": "1:5", "lr": [0.01, 0.03]})  # what is imported and remembered once
    tracemalloc.start()
    try:
        cells = Spec.make({"task": "movie", "seeds": "1:50000", "lr": [0.01, 0.03]}).cells()
        assert isinstance(cells, Grid) and sum(1 for _ in cells.asked(("seed",))) == len(cells) == 100_000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("lengths", [(), (1,), (3,), (2, 3), (3, 2), (2, 4, 3), (4, 1, 2), (2, 3, 4)])
def test_combinations_are_those_of_itertools(lengths: tuple[int, ...]) -> None:
    axes = [range(10 * i, 10 * i + n) for i, n in enumerate(lengths)]
    assert list(_combinations(axes)) == list(itertools.product(*axes))


def test_seeds_beyond_64_bits_and_seeds_given_twice_are_still_refused() -> None:
    with pytest.raises(UserError, match="at most 64 bits"):
        Spec.make({"task": "movie", "seeds": f"{(1 << 63) - 1}:{1 << 63}"})
    with pytest.raises(UserError, match="twice"):
        Spec.make({"task": "movie", "seeds": "1:3,2"})
