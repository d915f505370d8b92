"""The command in a report is the run's: read by the command line, it gives the same options."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.cli.main import app
from dualview.options import PROTOCOLS, RunOptions
from dualview.report.html.repro_command import command_of

TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12)
CHOSEN = st.fixed_dictionaries(
    {},
    optional={
        "model": TEXT,
        "task": TEXT,
        "data": TEXT.map(lambda text: str(Path(f"d{text}"))),
        "shots": st.integers(1, 64),
        "seed": st.integers(-5, 50) | st.just("auto"),
        "lr": st.floats(0, 1) | st.just("auto"),
        "lr_grid": st.lists(st.floats(0, 1), min_size=1, max_size=4).map(tuple),
        "separator": TEXT,
        "calibrate": st.booleans(),
        "at": st.sampled_from(["prompt", "label0"]),
        "bos": st.sampled_from(["auto", "yes", "no"]),
        "protocol": st.sampled_from(sorted(PROTOCOLS)),
        "save_records": st.booleans(),
    },
)


@cache
def run_verb() -> Any:
    from typer.main import get_command

    group: Any = get_command(app)
    return group.commands["run"]


def read_back(command: str) -> RunOptions:
    """The options as `dualview run` would take them from these words."""
    words = shlex.split(command)
    assert words[:2] == ["dualview", "run"]
    taken = run_verb().make_context("run", words[2:]).params
    assert taken["out"] == Path("out")
    return RunOptions.make(**{name: value for name, value in taken.items() if name in RunOptions.__dataclass_fields__})


@settings(max_examples=60, deadline=None)
@given(CHOSEN)
def test_the_command_gives_the_options_back(chosen: dict[str, Any]) -> None:
    options = RunOptions.make(**chosen)
    again = read_back(command_of(options.changed))
    assert {**options.changed, "protocol": None} == {**again.changed, "protocol": None}


def test_a_protocol_is_not_laid_over_what_the_run_had_set() -> None:
    options = RunOptions.make(protocol="dai", seed=1, at="prompt")
    again = read_back(command_of(options.changed))
    assert again.seed == 1 and again.at == "prompt" and again.separator == "eos"


@pytest.mark.parametrize("name", ["my model", "it's", "$(rm -rf x)", "-x", "a;b", "`id`"])
def test_names_are_quoted(name: str) -> None:
    assert read_back(command_of({"model": name})).model == name
