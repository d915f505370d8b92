"""Explanations of one answer: the parts add up, are those of the slow computation, and print."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch
from rich.console import Console

from dualview.analyses.explain import explain
from dualview.cli import main as cli
from dualview.comparison.single_query import query_row
from dualview.duality.on_model.softmax_split import record_heads
from dualview.io.errors import UserError
from dualview.models.loading import load_model
from dualview.tasks.task import load_task
from equivalence import tiny

QUERY = "the plot was slow and very dull"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explain")
    tiny.save_model(folder / "model")
    tiny.save_task(folder)
    return folder


@pytest.fixture(scope="module")
def lm(place):
    return load_model(str(place / "model"), dtype="float64")


@pytest.fixture(scope="module")
def explanation(place, lm):
    return explain(query=QUERY, model=lm, task=str(place / "tiny.yaml"), shots=4, seed=2, lr=0.05, epochs=2)


def test_the_parts_add_up(explanation):
    e = explanation
    for name in ("icl", "ft_v", "ft_k", "score"):
        by = [sum(getattr(part, name) for part in parts) for parts in (e.tokens, e.demos, e.labels)]
        assert by[0] == pytest.approx(by[1]) == pytest.approx(by[2])
        total = by[0] + e.elsewhere[name]
        if name == "score":
            assert abs(total - (e.lead["ft"] - e.lead["zsl"])) == pytest.approx(e.lead_residual, abs=1e-9)
        else:
            assert total == pytest.approx(1.0, abs=1e-6)
    assert e.lead_residual < 1e-3 * abs(e.lead["ft"] - e.lead["zsl"])
    scores = dict(zip(e.candidates, e.log_probs["ft"], strict=True))
    assert scores[e.favoured] == max(scores.values())
    assert e.lead["ft"] == pytest.approx(scores[e.favoured] - scores[e.against], abs=1e-6)
    before = dict(zip(e.candidates, e.log_probs["zsl"], strict=True))
    assert e.lead["zsl"] == pytest.approx(before[e.favoured] - before[e.against], abs=1e-6)


def test_the_tokens_are_the_demonstrations(explanation, lm):
    assert len(explanation.demos) == 4 and {part.demo for part in explanation.tokens} == {0, 1, 2, 3}
    for number, demo in enumerate(explanation.demos):
        own = [part for part in explanation.tokens if part.demo == number]
        assert " ".join(part.text for part in own) == f"{demo.text} {demo.label}"
        assert [part.text for part in own if part.label is not None] == demo.label.split()
        assert demo.icl == pytest.approx(sum(part.icl for part in own))
    assert explanation.icl_mass.shape == (3, 4, len(explanation.tokens))
    assert explanation.ft_shares["v"].shape == (3, len(explanation.tokens))


def test_the_mass_is_the_softmax_of_the_whole_prompt(explanation, lm):
    words: list[str] = []
    for demo in explanation.demos:
        words += [*demo.text.split(" "), *demo.label.split(" "), "\n"]
    ids = [1, *lm.tokenizer.convert_tokens_to_ids([*words, *explanation.query.split(" ")])]
    slow = torch.stack([layer.weights() for layer in record_heads(lm, ids)]).mean((0, 1))
    places = [i + 1 for i, word in enumerate(words) if word != "\n"]
    assert [part.icl for part in explanation.tokens] == pytest.approx(slow[places].tolist(), abs=1e-9)


def test_it_prints_and_is_json(explanation):
    content = json.loads(json.dumps(explanation.to_json(), allow_nan=False))
    assert set(content["log_probs"]) == {"zsl", "icl", "ft"} and content["lr"] == 0.05
    assert len(content["icl_per_layer"]) == 3 and len(content["tokens"]) == len(explanation.tokens)
    assert set(content["tau"]) == {"token", "demo"}
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(explanation.table(tokens=5))
    text = console.export_text()
    listed = text.partition("by demonstration, counted from 0")[2].splitlines()[2 : 2 + len(explanation.demos)]
    assert [int(line.split()[0]) for line in listed] == [demo.demo for demo in explanation.demos]  # as in the JSON
    assert explanation.demos[0].demo == 0
    assert "by demonstration" in text and explanation.favoured in text and "FT on the lead" in text


def test_values_only_has_no_key_shares(place, lm):
    found = explain(query=QUERY, model=lm, task=str(place / "tiny.yaml"), shots=2, lr=0.01, ft_params="v")
    assert all(part.ft_k is None for part in found.tokens) and "ft_k" not in found.elsewhere
    console = Console(width=140, file=io.StringIO())
    console.print(found.table())


def test_given_demonstrations_and_a_chosen_rate(place, lm):
    demos = tiny.write_rows(place / "demos.jsonl", tiny.rows(3, seed=9))
    found = explain(query=QUERY, model=lm, task=str(place / "tiny.yaml"), demos=demos, lr_grid=(0.01, 0.02))
    assert len(found.demos) == 3 and found.lr in (0.01, 0.02)


def test_queries_of_several_fields_are_json(tmp_path):
    path = tiny.save_task(tmp_path, template="{premise} so {text}", fields={"first": "premise"})
    task = load_task(path)
    assert query_row(task, '{"premise": "a", "text": "b"}').fields == {"premise": "a", "text": "b"}
    assert query_row(task, '{"first": "a", "text": "b"}').fields == {"premise": "a", "text": "b"}
    for wrong in ("plain words", '{"premise": "a"}', '["a"]', '{"premise": 3, "text": "b"}'):
        with pytest.raises(UserError, match="JSON object with premise, text"):
            query_row(task, wrong)


def test_multiple_choice_needs_choices(tmp_path):
    path = tiny.save_task(tmp_path, labels=[], choices="choices")
    task = load_task(path)
    row = query_row(task, '{"text": "b", "choices": ["x", "y"]}')
    assert row.choices == ("x", "y")
    for wrong in ("b", '{"text": "b"}', '{"text": "b", "choices": ["x"]}', '{"text": "b", "choices": "xy"}'):
        with pytest.raises(UserError, match="text, choices"):
            query_row(task, wrong)


def test_a_text_may_begin_with_a_brace(place):
    task = load_task(place / "tiny.yaml")
    assert query_row(task, "{not json").fields == {"text": "{not json"}


def test_what_has_no_dual_form_is_refused(place, lm):
    for options, sentence in (
        ({"ft_params": "all"}, "ft_params all"),
        ({"ft_rule": "linearised"}, "the linearised model has none"),
        ({"lr": 0.0}, "nothing moves"),
        ({"lr_grid": (0.0,)}, "nothing moves"),
        ({"protocol": "dai", "lr": 0.0, "seed": 1}, "nothing moves"),
    ):
        with pytest.raises(UserError, match=sentence):
            explain(query=QUERY, model=lm, task=str(place / "tiny.yaml"), shots=2, **options)


def test_layer_causal_parts_add_up_as_well(place, lm):
    found = explain(query=QUERY, model=lm, task=str(place / "tiny.yaml"), shots=3, lr=0.05, ft_rule="layer-causal")
    total = sum(part.score for part in found.demos) + found.elsewhere["score"]
    assert total == pytest.approx(found.lead["ft"] - found.lead["zsl"], abs=1e-3) and found.lead_adds_up


@pytest.mark.parametrize("name", ["queries", "n_queries", "at", "calibrate", "controls", "patch", "save_records"])
def test_options_that_would_change_nothing_are_refused(place, lm, name, monkeypatch, capsys):
    with pytest.raises(UserError, match=f"does not take the option {name}"):
        explain(query=QUERY, model=lm, task=str(place / "tiny.yaml"), **{name: "x"})
    for verb in ("explain", "heads"):
        code = call(monkeypatch, verb, "--query", QUERY, f"--{name.replace('_', '-')}", "x")
        assert code == 2 and "No such option" in capsys.readouterr().err


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dualview", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


@pytest.mark.parametrize("text", ["", "  \n", '{"text": " "}'])
def test_an_empty_query_is_refused(place, lm, text):
    with pytest.raises(UserError, match="--query is empty"):
        explain(query=text, model=lm, task=str(place / "tiny.yaml"), shots=2, lr=0.01)


def printed(found):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(found.table())
    return console.export_text()


def test_what_the_quadrature_missed_is_printed_and_warned_of(place, lm, explanation):
    text = printed(explanation)
    assert f"within {explanation.lead_residual:.1e}" in text and "!" not in text
    wild = explain(query=QUERY, model=lm, task=str(place / "tiny.yaml"), shots=3, lr=1e9)
    assert not wild.lead_adds_up and wild.to_json()["lead_adds_up"] is False
    assert "! The contributions do not add up to the change of the lead" in printed(wild)
