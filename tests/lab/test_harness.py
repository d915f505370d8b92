"""The labs' harness: settings, resumable states, complete results."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.io.errors import UserError
from dualview.lab.docs_tables import drawn, filled
from dualview.lab.harness import (
    Clock,
    Findings,
    Job,
    LabResult,
    Table,
    command_line,
    finish,
    lab,
    markdown,
    provenance,
)
from dualview.lab.settings import LabSettings
from dualview.lab.units import TrainingState, Unit, capture, restore
from dualview.options import AtLeastOne, option


@dataclass(frozen=True, kw_only=True)
class Some(LabSettings):
    steps: AtLeastOne = option(5, "of training")
    rates: tuple[float, ...] = option((0.1, 0.2), "tried")
    places: tuple[Path, ...] = option((), "to read")
    kind: Literal["a", "b"] = option("a", "which")
    loud: bool = option(True, "or not")
    seeds: AtLeastOne = option(1, "how many")


# ---------------------------------------------------------------------------------------------------------- settings


def test_settings_from_words():
    made = Some.make(steps="7", rates=["1,2", "0.5"], places=["a,b", "c"], loud=None)
    assert made.steps == 7 and made.rates == (1.0, 2.0, 0.5) and made.loud is True
    assert made.places == (Path("a,b"), Path("c"))
    assert made.to_json()["places"] == ["a,b", "c"] and "save_every" not in made.to_json()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"steps": 0}, "--steps"),
        ({"steps": "many"}, "--steps"),
        ({"kind": "c"}, "--kind"),
        ({"rates": "0.1,x"}, "--rates"),
        ({"save_every": -1}, "--save-every"),
        ({"seed": -3}, "--seed"),
        ({"save_every": "inf"}, "--save-every: inf is not a finite number"),
        ({"rates": (0.1, float("nan"))}, "--rates: nan is not a finite number"),
        ({"rates": "0.1,0.10"}, "--rates: 0.1 is given twice"),
        ({"tempo": 3}, "tempo"),
    ],
)
def test_a_bad_setting_is_one_sentence(given, named):
    with pytest.raises(UserError) as error:
        Some.make(**given)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_the_command_line_says_what_differs():
    made = Some.make(steps=7, rates=(3.0,), loud=False, seed=4, save_every=1)
    assert command_line("some", made) == "dualview lab some --seed 4 --steps 7 --rates 3.0 --no-loud"


def test_places_are_checked_before_the_work(tmp_path):
    (tmp_path / "file").write_text("in the way")

    def work(job: Job[Some]) -> Findings:
        pytest.fail("it began")

    some = lab(Some, lambda _result: [], lambda _result: {})(work)
    with pytest.raises(UserError, match="cannot be written"):
        some(out=tmp_path / "file" / "out")


# ------------------------------------------------------------------------------------------------------------- units


CPU, GPU = torch.device("cpu"), torch.device("cuda:1")


def key(out: Path, device: torch.device = CPU, **given: object) -> str:
    made = Some.make(**given)
    folder = Unit.of(out, "some", made, device, made.seed).folder
    assert folder is not None
    return folder.name


def test_only_the_same_training_has_the_same_key(tmp_path):
    plain = key(tmp_path)
    for other in ({"steps": 6}, {"rates": "0.1"}, {"kind": "b"}, {"seed": 2}, {"device": GPU}):
        assert key(tmp_path, **other) != plain
    assert key(tmp_path, seeds=9, save_every=3) == plain
    assert key(tmp_path, GPU) == key(tmp_path, torch.device("cuda:0"))
    made = Some.make()
    assert Unit.of(tmp_path, "some", made, CPU, 1, kind="x").folder != Unit.of(tmp_path, "some", made, CPU, 1).folder
    assert Unit.of(tmp_path, "other", made, CPU, 1).folder != Unit.of(tmp_path, "some", made, CPU, 1).folder


class Lesson:
    """A small training with everything that has a state."""

    def __init__(self, kind: str, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(generator=self.generator)
        made = {
            "adam": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        }
        self.optimiser = made[kind](self.model.parameters())

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimiser.param_groups[0]["lr"] *= 0.9
            self.optimiser.zero_grad()
            self.model(torch.randn(4, 3, generator=self.generator)).square().sum().backward()
            self.optimiser.step()


@settings(max_examples=12, deadline=None)
@given(kind=st.sampled_from(["adam", "momentum", "sgd"]), before=st.integers(0, 5), after=st.integers(1, 5))
def test_resumed_is_uninterrupted_to_the_bit(tmp_path_factory, kind, before, after):
    whole = Lesson(kind, 3)
    whole.steps(before + after)
    first = Lesson(kind, 3)
    first.steps(before)
    out = tmp_path_factory.mktemp("out")
    unit = Unit(out, {"x": 1})
    unit.save(lambda: capture(first.model, first.optimiser, {"g": first.generator}, step=before), now=True)
    second = Lesson(kind, 99)
    state = Unit(out, {"x": 1}).load()
    assert state is not None
    info = restore(state, second.model, second.optimiser, {"g": second.generator})
    assert info == {"step": before}
    second.steps(after)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(whole.generator.get_state(), second.generator.get_state())
    assert whole.optimiser.param_groups[0]["lr"] == second.optimiser.param_groups[0]["lr"]


def a_state() -> TrainingState:
    return TrainingState({"a": torch.arange(3.0)}, {"step": 1})


def test_states_are_written_only_so_often(tmp_path):
    unit = Unit(tmp_path, {"x": 1}, every=1000)
    unit.save(lambda: pytest.fail("too early"))
    unit.save(a_state, now=True)
    assert unit.load() is not None
    eager = Unit(tmp_path, {"x": 2}, every=1e-9)
    eager.save(a_state)
    assert eager.load() is not None


def test_a_damaged_state_is_no_state(tmp_path):
    unit = Unit(tmp_path, {"x": 1})
    unit.save(a_state, now=True)
    path = next(tmp_path.glob(".state-*/state.safetensors"))
    path.write_bytes(path.read_bytes()[:20])
    assert unit.load() is None and not unit.resumed


def test_what_is_finished_is_not_done_again(tmp_path):
    unit = Unit(tmp_path, {"x": 1})
    assert unit.finished() is None
    unit.save(a_state, now=True)
    unit.finish({"loss": 0.1})
    again = Unit(tmp_path, {"x": 1})
    assert again.finished() == {"loss": 0.1} and again.load() is None
    assert Unit(tmp_path, {"x": 2}).finished() is None
    again.remove()
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_nothing_is_kept():
    unit = Unit(None, {"x": 1})
    unit.save(lambda: pytest.fail("nowhere to go"), now=True)
    assert unit.load() is None and unit.finish({"a": 1}) == {"a": 1} and unit.finished() is None
    unit.remove()


# ------------------------------------------------------------------------------------------------------------ result


def a_result() -> LabResult:
    made = Some.make()
    clock = Clock()
    clock.lap("work")
    return LabResult(
        lab="some",
        settings=made.to_json(),
        seeds=[1],
        results={"x": 1.5},
        provenance=provenance("some", made, clock, "cpu", text_hash="abc"),
    )


TABLE = Table("A table", ["what", "how much"], [["a|b", "1"], ["c", "2"]], "A note.")


def test_finish_writes_all_and_forgets_the_states(tmp_path):
    from dualview.report.figures.curves import Curve, curves

    out, file = tmp_path / "new" / "out", tmp_path / "r.json"
    unit = Unit(out, {"x": 1})
    unit.finish({"a": 1})
    result = finish(
        a_result(),
        out=out,
        json=file,
        tables=lambda _result: [TABLE],
        figures=lambda _result: {"fig": curves({"a": Curve([1, 2], [1.0, 2.0])}, "t", "x", "y", "n")},
        units=[unit],
    )
    assert {path.name for path in out.iterdir()} == {"some.json", "some.md", "fig.png", "fig.pdf", "fig.svg"}
    assert set(result.written) == {file, *out.iterdir()}
    content = json.loads(file.read_text())
    assert content == json.loads((out / "some.json").read_text())
    assert set(content) == {"lab", "settings", "seeds", "results", "provenance"}
    assert set(content["provenance"]["run"]) == {"date", "host", "seconds"}
    assert content["provenance"]["text_hash"] == "abc"
    assert LabResult.load(file).to_json() == content


def test_a_result_is_all_that_documents_need():
    shown = markdown(a_result(), [TABLE])
    assert "dualview lab some --seed 1" in shown and "| a\\|b | 1 |" in shown and "A note." in shown


PAGES = sorted((Path(__file__).parents[2] / "docs" / "lab").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_in_documents_are_those_of_the_files(page):
    assert filled(page) == page.read_text(encoding="utf-8"), f"run python -m dualview.lab.docs_tables {page}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "more"], ids=lambda page: page.stem)
def test_a_page_has_one_question_one_table_one_figure_and_a_finding(page):
    text = page.read_text(encoding="utf-8")
    files, images = re.findall(r"<!-- lab: (\S+)", text), re.findall(r"!\[[^]]+\]\((\S+)\)", text)
    assert re.match(r"# Lab: [^\n]+\?\n", text) and text.count("\n# ") == 0
    assert len(re.findall(r"^\| ?---", text, re.MULTILINE)) == len(files) == len(images) == 1
    assert text.count("\n**Found:** ") == 1
    assert images[0].startswith(files[0].removesuffix(".json")) and (page.parent / images[0]).is_file()


def test_the_figures_of_a_page_are_drawn_from_its_files(tmp_path):
    page = tmp_path / "page.md"
    shutil.copy(PAGES[0].parent / "bound.json", tmp_path / "bound_2.json")
    page.write_text("<!-- lab: bound_2.json -->\n<!-- end -->\n\n![Gap](bound_2.png)\n")
    assert list(drawn(page)) == ["bound_2"]
    page.write_text("<!-- lab: bound_2.json -->\n<!-- end -->\n\n![Gap](bound_3.png)\n")
    with pytest.raises(UserError, match="no file of the page has the figure bound_3"):
        drawn(page)


def test_a_page_is_filled_from_its_file(tmp_path):
    import dualview.lab

    tiny = {"dims": 2, "demos": 3, "steps": 1, "batch_size": 4, "eval_tasks": 20, "device": "cpu"}
    dualview.lab.regression(**tiny, json=tmp_path / "r.json")
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- lab: r.json -->\nold\n<!-- end -->\n\nAfter.\n")
    subprocess.run([sys.executable, "-m", "dualview.lab.docs_tables", str(page)], check=True)
    text = page.read_text()
    assert text.startswith("Before.") and text.endswith("After.\n") and "old" not in text
    assert "dualview lab regression --seed 1 --device cpu --dims 2" in text and "| gradient descent |" in text
    assert filled(page) == text
    page.write_text("<!-- lab: r.json Away -->\n<!-- end -->\n")
    assert "**Away from the training's problems**" in filled(page) and "in context: loss**" not in filled(page)
    page.write_text("<!-- lab: r.json none such -->\n<!-- end -->\n")
    with pytest.raises(UserError, match="no table with 'none such' in its title"):
        filled(page)
    page.write_text(text)
    (tmp_path / "r.json").write_text(a_result().model_dump_json())
    with pytest.raises(UserError, match="no known lab"):
        filled(page)


def test_a_file_that_is_no_result(tmp_path):
    (tmp_path / "r.json").write_text('{"lab": "x"}')
    with pytest.raises(UserError, match="not a lab's result"):
        LabResult.load(tmp_path / "r.json")
    with pytest.raises(UserError, match="cannot be read"):
        LabResult.load(tmp_path / "none.json")


# ------------------------------------------------------------------------------------------------------------- names


def test_a_lab_is_a_function_also_after_its_module_was_imported():
    code = (
        "import sys, dualview.lab as lab; assert not {'torch', 'pydantic'} & set(sys.modules)\n"
        "import dualview.cli.lab; assert not {'torch', 'pydantic'} & set(sys.modules)\n"
        "from dualview.lab.regression.run import regression; assert 'torch' not in sys.modules\n"
        "assert callable(lab.regression) and callable(lab.sign)\n"
        "from dualview.lab import modifications; assert callable(modifications)\n"
        "assert lab.LabResult.__name__ == 'LabResult'\n"
        "try: lab.nothing\nexcept AttributeError as e: assert 'nothing' in str(e)\nelse: raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
