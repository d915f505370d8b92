"""What the page is told is what the library says: every number against a public function, or a slow computation."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from close import assert_alike
from dualview.analyses.explain import explain
from dualview.cli import main as cli
from dualview.comparison.finetuning import recipe_of
from dualview.comparison.prepare import prepare
from dualview.duality.on_model.demo_tokens import demo_tokens
from dualview.io.errors import UserError
from dualview.learning.finetune import finetune
from dualview.learning.traces import trace_training
from dualview.models.language_model import LanguageModel
from dualview.models.loading import load_model
from dualview.models.scoring import ask
from dualview.records import Records, Setting, load_records
from dualview.verbs import run as compare
from dualview.web.attention import groups_of, head_shares
from dualview.web.experiment import answer
from dualview.web.jobs import Cancelled
from dualview.web.model_cache import ModelCache
from dualview.web.run_files import files, query_text, written
from dualview.web.similarity import contrast_json
from dualview.web.state import DrawQuery, State
from equivalence import tiny
from web.live import cache_of, document, row


def told(model_cache: ModelCache, given: dict[str, Any] | State) -> dict[str, Any]:
    """All events of an answer: by kind, steps and parts in lists, settings by name. Everything is JSON."""
    found: dict[str, Any] = {"step": [], "part": [], "setting": {}}

    def emit(event: dict[str, Any]) -> None:
        event = json.loads(json.dumps(event, allow_nan=False))
        kind = event["event"]
        if kind in ("step", "part"):
            found[kind].append(event)
        elif kind == "setting":
            found[kind][event["setting"]] = event
        else:
            assert kind not in found
            found[kind] = event

    answer(given if isinstance(given, State) else State.model_validate(given), model_cache, emit)
    return found


@pytest.fixture(scope="module")
def model_cache(model: Path) -> ModelCache:
    return cache_of(model)


@pytest.fixture(scope="module")
def lm(model: Path) -> LanguageModel:
    return load_model(str(model), dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def given(model: Path) -> dict[str, Any]:
    return document(model, epochs=2)


@pytest.fixture(scope="module")
def events(model_cache: ModelCache, given: dict[str, Any]) -> dict[str, Any]:
    return told(model_cache, given)


@pytest.fixture(scope="module")
def place(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed")
    for name, text in files(State.model_validate(given)).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def options(place: Path, given: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": str(place / "task.yaml"),
        "demos": place / "demos.jsonl",
        "lr": given["lr"],
        "epochs": given["epochs"],
    }


def test_the_answers_and_the_attention_are_explain_s(
    events: dict[str, Any], given: dict[str, Any], place: Path, lm: LanguageModel
) -> None:
    state = State.model_validate(given)
    e = explain(query=query_text(state), model=lm, **options(place, given))
    for name, scores in e.log_probs.items():
        assert events["setting"][name]["log_probs"] == pytest.approx(scores, abs=1e-12)
        exp = np.exp(np.array(scores))
        assert events["setting"][name]["probs"] == pytest.approx(exp / exp.sum(), abs=1e-12)
        assert events["setting"][name]["predicted"] == int(np.argmax(scores))
    shown, expected = events["attention"], e.to_json()
    assert [t["text"] for t in shown["tokens"]] == [t.text for t in e.tokens]
    assert [t["demo"] for t in shown["tokens"]] == [t.demo for t in e.tokens]
    for got, wanted in (
        (shown["icl"]["whole"], [t.icl for t in e.tokens]),
        (shown["ft"]["whole"], [t.ft_v for t in e.tokens]),
        (shown["icl"]["layers"], expected["icl_per_layer"]),
        (shown["ft"]["layers"], expected["ft_per_layer"]["v"]),
        (shown["icl"]["heads"], e.icl_mass.tolist()),
        (shown["icl_demo"]["whole"], [d.icl for d in e.demos]),
        (shown["ft_demo"]["whole"], [d.ft_v for d in e.demos]),
    ):
        assert np.array(got) == pytest.approx(np.array(wanted), rel=1e-5, abs=1e-9)
    assert_alike([shown["tau"][of] for of in ("token", "demo")], [e.tau[of] for of in ("token", "demo")])
    assert -1 <= shown["tau"]["token_lr0"] <= 1


def test_the_similarities_are_run_s(
    events: dict[str, Any], given: dict[str, Any], place: Path, lm: LanguageModel
) -> None:
    result = compare(model=lm, queries=place / "query.jsonl", **options(place, given))
    content, shown = result.to_json(), events["similarity"]
    for key in ("sim_aou", "sim_am", "update_norm", "demo_mass"):
        assert_alike(shown[key], content[key])
    assert result.ft.final_loss == pytest.approx(events["setting"]["ft"]["losses"][-1], rel=1e-9)
    assert result.ft.status == events["setting"]["ft"]["status"] == "ok"
    for name, bounds in shown["bounds"].items():
        controls = content["controls"][name]
        assert bounds["floor"] and set(bounds["ceiling"]) == {"icl_reordered"}
        for floor, layers in bounds["floor"].items():
            mean = np.mean([value for value in layers if value is not None])
            assert mean == pytest.approx(controls["floors"][floor], abs=1e-12)
        ceiling = np.mean([value for value in bounds["ceiling"]["icl_reordered"] if value is not None])
        assert ceiling == pytest.approx(controls["ceiling"], abs=1e-12)


def test_the_label_contrast_is_that_of_the_records(
    events: dict[str, Any], given: dict[str, Any], place: Path, lm: LanguageModel, tmp_path: Path
) -> None:
    """By hand from the records of `dualview run`, and from prompts whose labels are flipped by hand."""
    shown = events["similarity"]["label_contrast"]
    own = {**options(place, given), "queries": place / "query.jsonl", "out": tmp_path, "save_records": True}
    result = compare(model=lm, **own)
    records = load_records(tmp_path / "records.safetensors")
    h = {name: np.asarray(records[name].h[0], dtype=np.float64) for name in shown["log_odds"]}
    icl, ft = (h[name] - h[f"{name}_flipped_labels"] for name in ("icl", "ft"))
    slow = [float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))) for a, b in zip(icl, ft, strict=True)]
    assert shown["per_layer"] == pytest.approx(slow, abs=1e-9) and shown["reason"] is None
    assert shown["value"] == pytest.approx(np.mean(slow), abs=1e-9)
    for name, change in (("icl", icl), ("ft", ft)):
        sizes = [float(np.linalg.norm(a) / np.linalg.norm(z)) for a, z in zip(change, h["zsl"], strict=True)]
        assert shown["norms"][name] == pytest.approx(sizes, rel=1e-9)
    off = {name: np.asarray(records[name].off_contrast[0], dtype=np.float64) for name in ("icl", "ft")}
    inside = [side - off[name] for name, side in (("icl", icl), ("ft", ft))]
    part = (inside[0] * inside[1]).sum(1) / (np.linalg.norm(icl, axis=1) * np.linalg.norm(ft, axis=1))
    assert shown["bounds"]["floor"]["head_span"] == pytest.approx(part, abs=1e-6)
    floors = result.to_json()["controls"]["label_contrast"]["floors"]
    assert shown["bounds"]["ceiling"] == {} and set(shown["bounds"]["floor"]) == {"gaussian", "head_span"}
    for name, layers in shown["bounds"]["floor"].items():
        assert np.mean(layers) == pytest.approx(floors[name], abs=1e-12)
    for name, odds in shown["log_odds"].items():
        scores = records[name].log_probs[0]
        assert odds == pytest.approx(scores - scores.mean(), abs=1e-9) and sum(odds) == pytest.approx(0, abs=1e-9)
    flipped = {**given, "demos": [{**demo, "label": 1 - demo["label"]} for demo in given["demos"]]}
    other = told(cache_of(given["model"]), flipped)
    for name in ("icl", "ft"):
        scores = np.array(other["setting"][name]["log_probs"])
        assert shown["log_odds"][f"{name}_flipped_labels"] == pytest.approx(scores - scores.mean(), abs=1e-9)
    mirrored = other["similarity"]["label_contrast"]  # both differences change sign
    assert mirrored["per_layer"] == pytest.approx(shown["per_layer"], abs=1e-9)


@pytest.mark.parametrize(
    ("lr", "reason"),
    [
        (0.0, "flipping the labels changes nothing in the fine-tuned model beyond rounding."),
        (1e300, "fine-tuning diverged."),
    ],
)
def test_where_flipping_the_labels_says_nothing(model_cache: ModelCache, model: Path, lr: float, reason: str) -> None:
    state = State.model_validate(document(model)).model_copy(update={"lr": lr})
    shown = told(model_cache, state)["similarity"]["label_contrast"]
    assert shown["reason"] == f"Undefined at every layer: {reason}"
    assert shown["value"] is None and shown["per_layer"] == [None] * 3
    assert all(value > 1e-4 for value in shown["norms"]["icl"])


def test_flipped_labels_that_were_not_run() -> None:
    """The control's own reason is shown; without one, that it was not run."""
    setting = Setting(np.log([[0.5, 0.5]]), np.ones((1, 2, 3)))
    records = Records(np.array([0]), dict.fromkeys(("zsl", "icl", "ft"), setting))
    why = "A task with a single label has no other to flip it to."
    for skipped, reason in (({"ft_flipped_labels": why}, why), ({}, "Flipped labels were not run.")):
        assert contrast_json(records, None, skipped) == {"reason": reason}
    same = {**records.settings, "icl_flipped_labels": setting, "ft_flipped_labels": setting}
    measured = {"value": None, "per_layer": [None, None]}
    shown = contrast_json(replace(records, settings=same), measured, {})
    assert "in the in-context model and the fine-tuned model beyond" in shown["reason"]
    assert shown["norms"] == {"icl": [0.0, 0.0], "ft": [0.0, 0.0]}


def test_every_step_is_training_cut_short(events: dict[str, Any], given: dict[str, Any], lm: LanguageModel) -> None:
    state = State.model_validate(given)
    with written(state, {"dtype": "float64", "device": "cpu"}) as made:
        prepared = prepare(made, lm)
    one = recipe_of(prepared)
    twice = prepared.prompts.training_sequences * 2
    once = type(one)(one.params, one.loss, 1, one.rule)
    assert [event["step"] for event in events["step"]] == [1, 2, 3, 4, 5]
    for event in events["step"]:
        tuned = finetune(lm, twice[: event["step"]], [state.lr], once)[0]
        scores = ask(lm, prepared.prompts.queries, prepared.zero_shot, tuned.patch).settings[0].log_probs[0]
        assert event["log_probs"] == pytest.approx(scores, abs=1e-9)
        assert event["total"] == 6


def test_a_head_s_share_is_that_of_its_own_rows(
    events: dict[str, Any], given: dict[str, Any], lm: LanguageModel
) -> None:
    """ΔW whole from the patch, one head's rows of it, every token's part by its definition."""
    state = State.model_validate(given)
    with written(state, {"dtype": "float64", "device": "cpu"}) as made:
        prepared = prepare(made, lm)
    (trace,) = trace_training(lm, prepared.prompts.training_sequences, [state.lr], recipe_of(prepared))
    ids = [*prepared.prompts.zero_prefix, *prepared.prompts.queries[0].ids]
    seen: dict[str, torch.Tensor] = {}
    modules = {f"model.layers.{n}.self_attn.v_proj" for n in range(3)}
    hooks = [
        module.register_forward_hook(lambda _m, x, _y, name=name: seen.__setitem__(name, x[0][0, -1]))
        for name, module in lm.model.named_modules()
        if name in modules
    ]
    with torch.no_grad(), trace.tuned.patch.applied():
        lm.model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    patch: Any = trace.tuned.patch
    deltas = {p.name: w[0] for p, w in zip(patch.projections, patch.weights, strict=True)}
    shares = head_shares(lm, trace, ids, lambda _steps: None)
    assert shares.shape[:2] == (3, 2) and events["attention"]["groups"] == [2, 2, 2]
    shared = demo_tokens(prepared.prompts)
    for layer in range(3):
        factors = next(f for f in trace.factors if f.projection.name == f"model.layers.{layer}.self_attn.v_proj")
        x = seen[factors.projection.name]
        for group in range(2):
            own = slice(8 * group, 8 * group + 8)
            update = deltas[factors.projection.name][own] @ x
            slow = [
                float((e[own] @ update) * (xt @ x) / (update @ update))
                for e, xt in zip(factors.errors, factors.inputs, strict=True)
            ]
            assert shares[layer, group].tolist() == pytest.approx(slow, rel=1e-6, abs=1e-9)
            assert sum(slow) == pytest.approx(1.0)
            moved = shared.from_training(torch.tensor(slow), trace.tokens)
            assert events["attention"]["ft"]["heads"][layer][group] == pytest.approx(moved.tolist(), rel=1e-5, abs=1e-9)


def test_too_many_heads_for_a_page_are_left_out(
    model_cache: ModelCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualview.web.attention.MOST_NUMBERS", 100)
    shown = told(model_cache, document(model))["attention"]
    assert shown["icl"]["heads"] is None and shown["ft"]["heads"] is None
    assert shown["icl"]["layers"] and shown["icl_demo"]["heads"]


def test_groups_where_rows_do_not_divide(lm: LanguageModel) -> None:
    layer = lm.anatomy.layers[0]
    assert groups_of(layer, 16) == 2 and groups_of(layer, 32) == 4
    assert groups_of(layer, 12) == 1 and groups_of(layer, 24) == 1 and groups_of(layer, 4) == 1


def test_the_prompt_is_told(events: dict[str, Any], given: dict[str, Any]) -> None:
    prompt = events["prompt"]
    assert prompt["candidates"] == given["labels"] and prompt["gold"] == 0
    assert prompt["shots"] == prompt["shots_used"] == 3 and prompt["steps"] == 6
    text = " ".join(token["text"] for token in prompt["tokens"] if token["span"] == "query")
    assert text == "Review: the plot was slow and very dull Sentiment:"
    assert prompt["layers"] == 3 and prompt["heads"] == [4, 4, 4]


@pytest.mark.parametrize("changed", [{}, {"epochs": 2, "ft_loss": "label"}])
def test_the_commands_give_the_same_numbers(
    model_cache: ModelCache, model: Path, changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shown text goes through a real shell, whose `dualview` writes down its arguments for the real one."""
    query = row('it\'s "quite" $HOME `dull` \\ {scene}\n-- the end', 1)
    given = document(model, query=query, labels=["Negative", "Positive"], **changed)
    events = told(model_cache, given)
    monkeypatch.chdir(tmp_path)
    for command in events["prompt"]["commands"]:
        script = 'dualview() { printf "%s\\0" "$@" > arguments; }\n' + command["files"] + command["line"]
        subprocess.run(["bash", "-c", script], check=True, cwd=tmp_path)
        arguments = (tmp_path / "arguments").read_text(encoding="utf-8").split("\0")[:-1]
        if arguments[0] == "explain":
            arguments += ["--json", "explained.json"]
        monkeypatch.setattr(sys, "argv", ["dualview", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert not left.value.code
    explained = json.loads((tmp_path / "explained.json").read_text())
    result = json.loads((tmp_path / "result.json").read_text())
    for name in ("zsl", "icl", "ft"):
        shown = events["setting"][name]["log_probs"]
        assert explained["log_probs"][name] == pytest.approx(shown, abs=1e-12)
        assert result["queries"][0][name] == pytest.approx(shown, abs=1e-12)
    assert result["queries"][0]["gold"] == 1
    assert result["sim_aou"] == events["similarity"]["sim_aou"]
    assert result["sim_am"] == events["similarity"]["sim_am"]
    assert [token["icl"] for token in explained["tokens"]] == pytest.approx(
        events["attention"]["icl"]["whole"], rel=1e-5, abs=1e-9
    )


def test_untouched_draws_have_a_short_command(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "sst2"
    folder.mkdir(parents=True)
    for name, seed in (("train", 1), ("validation", 2)):
        rows = [{**made, "label": made["label"] % 2} for made in tiny.rows(12, seed)]
        tiny.write_rows(folder / f"{name}.jsonl", rows)
    model_cache = cache_of(model, data=tmp_path / "data")
    drawn = {"task": "sst2", "seed": 3, "shots": 4}
    found = model_cache.draw(DrawQuery(**drawn, query=2))
    task = model_cache.task("sst2")
    given = document(
        model,
        template=task.template,
        labels=list(task.labels),
        separator=task.separator,
        demos=found["demos"],
        query=found["query"],
        drawn=drawn,
    )
    state = State.model_validate(given)
    options = model_cache.drawn(state)
    assert options == {**drawn, "data": tmp_path / "data"}
    first = told(model_cache, given)["prompt"]["commands"][0]
    assert first["files"] == "" and f"--data {shlex.quote(str(tmp_path / 'data'))}" in first["line"]
    assert "--seed 3 --shots 4" in first["line"] and "demos.jsonl" not in first["line"]
    for change in (
        {"demos": found["demos"][::-1]},
        {"demos": [{**found["demos"][0], "label": 1 - found["demos"][0]["label"]}, *found["demos"][1:]]},
        {"labels": ["Bad", "Good"]},
        {"template": f"{task.template} Well?"},
        {"separator": "\n\n"},
        {"drawn": None},
        {"drawn": {**drawn, "seed": 4}},
        {"drawn": {**drawn, "shots": 64}},
        {"drawn": {**drawn, "task": "nothing-like-it"}},
    ):
        assert model_cache.drawn(State.model_validate({**given, **change})) is None
    restarted = cache_of(model, data=tmp_path / "data")
    assert restarted.drawn(state) == options


def test_a_hub_task_is_not_fetched_to_shorten_a_command(model: Path) -> None:
    model_cache = cache_of(model)
    state = State.model_validate(document(model, drawn={"task": "sst2", "seed": 1, "shots": 3}))
    assert model_cache.drawn(state) is None
    where = {task["name"]: task["where"] for task in model_cache.about_tasks()}
    assert where["movie"] == "embedded" and where["sst2"] == "hub"


def test_several_fields_and_multiple_choice(model_cache: ModelCache, model: Path) -> None:
    def pair(a: str, b: str, label: int) -> dict[str, Any]:
        return {"fields": {"first": a, "second": b}, "label": label, "choices": None}

    two = told(
        model_cache,
        document(
            model,
            template="{first} and {second} Sentiment:",
            demos=[pair("film", "warm", 1), pair("plot", "dull", 0)],
            query=pair("scene", "slow", 0),
        ),
    )
    assert two["prompt"]["shots_used"] == 2 and two["done"]

    def own(text: str, label: int, *choices: str) -> dict[str, Any]:
        return {"fields": {"text": text}, "label": label, "choices": list(choices)}

    choice = told(
        model_cache,
        document(
            model,
            labels=[],
            demos=[own("the film", 1, "dull", "warm", "slow"), own("a plot", 0, "cold", "fine")],
            query=own("the story", 2, "awful", "lovely", "the"),
        ),
    )
    assert choice["prompt"]["candidates"] == ["awful", "lovely", "the"]
    assert len(choice["setting"]["ft"]["probs"]) == 3 and choice["done"]


def test_training_that_diverges_is_told(model_cache: ModelCache, model: Path) -> None:
    """At a rate that the page would not take, past the check."""
    events = told(model_cache, State.model_validate(document(model)).model_copy(update={"lr": 1e300}))
    ft = events["setting"]["ft"]
    assert ft["status"] == "diverged" and ft["predicted"] is None and None in ft["probs"]
    assert events["attention"]["ft"] is None and "diverged" in events["attention"]["reason"]
    assert events["attention"]["icl"]["whole"] and events["done"]
    assert events["similarity"]["sim_aou"]["raw"] is None


def test_a_rate_of_zero_changes_nothing(model_cache: ModelCache, model: Path) -> None:
    events = told(model_cache, document(model, lr=0))
    assert events["setting"]["ft"]["log_probs"] == pytest.approx(events["setting"]["zsl"]["log_probs"], abs=1e-12)
    assert events["similarity"]["sim_aou"]["raw"] is None
    assert events["attention"]["ft"]["whole"] is not None


def test_too_many_tokens_and_too_little_context(
    model_cache: ModelCache, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = row("very " * 70, 0)
    cut = told(model_cache, document(model, demos=[long] * 6))["prompt"]
    assert cut["shots"] == 6 and cut["shots_used"] == 3
    monkeypatch.setattr("dualview.web.experiment.MOST_TOKENS", 100)
    with pytest.raises(UserError, match="tokens and the explorer takes 100"):
        told(model_cache, document(model, demos=[long] * 2))
    with pytest.raises(UserError, match="same tokens"):
        told(model_cache, document(model, labels=["unheard", "unknown"]))


def test_only_models_it_was_started_with(model_cache: ModelCache, model: Path) -> None:
    for name in ("embedded", "gpt2", "../model", f"{model}/", str(model.parent), ""):
        with pytest.raises(UserError, match="not one this server was started with"):
            told(model_cache, document(name))


def test_narrow_models_step_too(model: Path) -> None:
    """A half-precision model is trained as a copy; each step's query must be asked of the change all the same."""
    events = told(cache_of(model, dtype="bfloat16"), document(model))
    first, last = events["setting"]["zsl"]["log_probs"], events["step"][-1]["log_probs"]
    assert events["step"] and last != first


def test_attention_tells_of_every_step_and_layer_and_can_be_left(
    model_cache: ModelCache, given: dict[str, Any]
) -> None:
    parts: list[dict[str, Any]] = []

    def emit(event: dict[str, Any]) -> None:
        if event.get("part", "").startswith("attention"):
            parts.append(event)
            if event["done"] == leave:
                raise Cancelled

    leave = -1
    answer(State.model_validate(given), model_cache, emit)
    steps, layers, rates = 6, 3, 2
    assert parts[-1]["done"] == parts[-1]["total"] == 1 + rates * (steps + layers)
    assert len(parts) == 2 + rates * (steps + layers)
    for leave in (1, 5, 14):
        parts.clear()
        with pytest.raises(Cancelled):
            answer(State.model_validate(given), model_cache, emit)
        assert parts[-1]["done"] == leave


def test_advice_is_what_the_page_can_do(model: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualview.models.reader.Reader.context", 12)
    with pytest.raises(UserError) as error:
        told(cache_of(model), given)
    assert "--max-context" not in str(error.value) and "shorten" in str(error.value)
