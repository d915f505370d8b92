"""`dualview lab …` as a person types it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dualview.cli.lab import add, lab_app
from dualview.io.errors import UserError
from dualview.lab import LABS, find_lab


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    made.callback()(lambda: None)
    add(made)
    return made


def call(app: typer.Typer, *words: object):
    return CliRunner().invoke(app, ["lab", *map(str, words)])


SMALL = ("--dims", 2, "--demos", 4, "--steps", 3, "--batch-size", 8, "--eval-tasks", 50, "--device", "cpu")


def test_every_lab_is_listed(app):
    said = call(app, "--help")
    assert said.exit_code == 0
    assert all(name in said.output for name in LABS)


@pytest.mark.parametrize("name", ["regression", "modifications"])
def test_help_names_every_setting(app, name):
    said = call(app, name, "--help")
    assert said.exit_code == 0
    from dataclasses import fields

    for field in fields(find_lab(name).settings):
        assert f"--{field.name.replace('_', '-')}" in said.output
    assert "--out" in said.output and "--json" in said.output


def test_help_says_what_an_option_takes_and_its_default(app):
    said = " ".join(call(app, "regression", "--help").output.split())
    for words in ("--seed <int>", "--noise <float>", "--lr <float>", "--steps <int>", "--task linear|sine"):
        assert words in said
    assert "one set of weights for all layers [default: recurrent]" in said and "[default: shifts]" in said
    assert "--lr <float>|auto" in call(app, "dynamics", "--help").output
    said = call(app, "modifications", "--help").output
    assert "--alphas <float>" in said and "--ks <int>" in said and "--only <str>" in said


@pytest.mark.parametrize("name", LABS)
def test_no_number_is_shown_as_text(app, name):
    from dataclasses import fields

    said = call(app, name, "--help").output
    for field in fields(find_lab(name).settings):
        if isinstance(field.default, (int, float)):
            assert f"--{field.name.replace('_', '-')} <str>" not in said


def test_regression_prints_and_writes(app, tmp_path):
    out, file = tmp_path / "out", tmp_path / "r.json"
    said = call(app, "regression", *SMALL, "--seed", 3, "--no-shifts", "--out", out, "--json", file)
    assert said.exit_code == 0, said.output
    assert "gradient descent" in said.output and f"wrote {out / 'regression.json'}" in said.output
    content = json.loads(file.read_text())
    assert content["lab"] == "regression" and content["seeds"] == [3]
    assert content["settings"]["dims"] == 2 and content["settings"]["shifts"] is False
    assert not list(out.glob(".state-*"))


def test_the_recorded_command_repeats_the_run(app, tmp_path):
    first, again = tmp_path / "a.json", tmp_path / "b.json"
    assert call(app, "regression", *SMALL, "--seed", 5, "--json", first).exit_code == 0
    content = json.loads(first.read_text())
    words = shlex.split(content["provenance"]["command"])
    assert words[:3] == ["dualview", "lab", "regression"]
    assert call(app, *words[2:], "--json", again).exit_code == 0
    repeated = json.loads(again.read_text())
    for part in (content, repeated):
        part["provenance"].pop("run")
    assert content == repeated


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--layers", 0), "--layers"),
        (("--task", "cosine"), "--task"),
        (("--noise", "-1"), "--noise"),
        (("--device", "abacus"), "abacus"),
        (("--seed", "one"), "--seed"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(app, tmp_path, words, named):
    said = call(app, "regression", *SMALL, *words, "--out", tmp_path / "out")
    assert isinstance(said.exception, UserError) and named in str(said.exception)
    assert not (tmp_path / "out").exists()


def test_an_unknown_option_is_refused(app):
    said = call(app, "regression", "--colour", "red")
    assert said.exit_code == 2 and "--colour" in said.output


def test_a_blocked_place_is_told_first(app, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    said = call(app, "regression", *SMALL, "--out", blocked / "out")
    assert isinstance(said.exception, UserError) and "cannot be written" in str(said.exception)


def test_lists_may_be_repeated_or_joined(tmp_path: Path):
    words = ["--alphas", "0.1,0.2", "--alphas", "0.4", "--only", "regularised", "--seeds", "2", "--steps", "1"]
    words += ["--layers", "1", "--test-tasks", "4", "--batch-size", "4", "--dims", "2", "--demos", "3"]
    said = CliRunner().invoke(lab_app("modifications"), [*words, "--json", str(tmp_path / "r.json")])
    assert said.exit_code == 0, said.output
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["settings"]["alphas"] == [0.1, 0.2, 0.4]
    assert [m["name"] for m in content["results"]["settings"]][1:] == [f"α={a}" for a in (0.1, 0.2, 0.4)]
