"""The heads' verb: the report a reader of the library can make, with the options of `explain`."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console

from close import assert_alike
from dualview.analyses.heads import head_report, heads
from dualview.cli import main as cli
from dualview.comparison.single_query import question
from dualview.io.errors import UserError
from dualview.io.progress import Silent
from dualview.models.loading import load_model
from dualview.options import RunOptions
from equivalence import tiny

QUERY = "the plot was slow and very dull"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    tiny.save_model(folder / "model")
    tiny.save_task(folder)
    return folder


@pytest.fixture(scope="module")
def lm(place):
    return load_model(str(place / "model"), dtype="float64")


def test_it_is_the_report_of_the_library(place, lm):
    options = {"task": str(place / "tiny.yaml"), "shots": 4, "seed": 2, "lr": 0.05}
    found = heads(query=QUERY, model=lm, rank=3, shuffles=2, **options)
    asked = question("heads", QUERY, lm, options, Silent())
    again = head_report(lm, asked.prepared.prompts, asked.trace, rank=3, shuffles=2)
    content = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert_alike(content["weights"], again.weights.to_json())
    assert_alike(content["meta_gradients"], again.meta_gradients.to_json())
    assert_alike(content["split"], again.split.to_json())
    assert content["lr"] == 0.05 and content["shots_used"] == 4 and QUERY in content["query"]
    assert max(content["split"]["error_per_layer"]) < 1e-12 and len(content["weights"]["cosine"]) == 3


def test_the_verb_prints_and_writes(place, monkeypatch, capsys):
    file = place / "heads.json"
    given = (
        "--model",
        place / "model",
        "--task",
        place / "tiny.yaml",
        "--shots",
        3,
        "--lr",
        0.05,
        "--dtype",
        "float64",
    )
    arguments = ["dualview", "heads", "--query", QUERY, *map(str, given), "--rank", "2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    text, content = capsys.readouterr().out, json.loads(file.read_text())
    for words in (
        "ΔW_ICL and ΔW_FT",
        "error signals",
        "λ, mean over heads",
        "floor",
        f"{content['weights']['cosine'][1]:+.3f}",
    ):
        assert words in text
    assert content["weights"]["rank"] == 2 and content["model"] == str(place / "model")


def test_values_alone_have_no_part_of_the_keys(place, lm):
    found = heads(query=QUERY, model=lm, task=str(place / "tiny.yaml"), shots=2, lr=0.05, ft_params="v", shuffles=1)
    assert found.report.weights.from_key == pytest.approx((0.0,) * 3) and found.report.weights.from_value[0] > 0.5
    Console(file=io.StringIO()).print(found.table())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rank": 0}, "--rank must be at least 1"),
        ({"shuffles": 0}, "--shuffles must be at least 1"),
        ({"ft_params": "all"}, "heads needs the dual form"),
        ({"ft_rule": "linearised"}, "heads needs the dual form"),
        ({"lr": 0.0}, "heads has nothing"),
        ({"n_queries": 3}, "heads does not take the option n_queries"),
        ({"query": " "}, "--query is empty"),
    ],
)
def test_mistakes_are_told(place, lm, options, sentence):
    with pytest.raises(UserError, match=sentence):
        heads(**{"query": QUERY, "model": lm, "task": str(place / "tiny.yaml"), "shots": 2, "lr": 0.05, **options})


def test_every_option_is_taken_or_refused():
    """No option is left that a verb takes without heeding."""
    from dualview.options import COMPARISON_ONLY, QUERIES_ONLY

    known = set(RunOptions.__dataclass_fields__)
    assert set(COMPARISON_ONLY) <= known and set(QUERIES_ONLY) <= known
