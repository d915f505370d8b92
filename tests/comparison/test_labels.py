"""`--labels abstract`: the numbers of a task rewritten by hand, and where a reader sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

import dualview
from dualview.report.catalogue import what_ran
from dualview.store.query import query
from dualview.store.store import Store
from dualview.sweep.runner import sweep
from dualview.sweep.spec import Spec
from equivalence import tiny

SMALL: dict[str, Any] = {"shots": 3, "n_queries": 6, "lr": 0.03, "controls": "quick", "device": "cpu"}
TEMPLATE = "Review: {text} the film was"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("labels")
    task = tiny.save_task(folder / "task", abstract_template=TEMPLATE)
    return {**SMALL, "model": str(tiny.save_model(folder / "model")), "task": str(task)}


def numbers(result: dualview.Result) -> dict[str, Any]:
    return {name: value for name, value in result.to_json().items() if name != "provenance"}


def test_a_run_is_that_of_the_task_with_those_words(base: dict[str, Any], tmp_path: Path) -> None:
    document = yaml.safe_load(Path(base["task"]).read_text())
    by_hand = {name: value for name, value in document.items() if not name.startswith("abstract")}
    by_hand |= {"labels": tiny.ABSTRACT, "template": TEMPLATE}
    by_hand |= {
        split: str(Path(base["task"]).parent / f"{split}.jsonl") for split in ("train", "selection", "validation")
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(by_hand))
    abstract = dualview.run(**base, labels="abstract")
    rewritten = dualview.run(**{**base, "task": str(tmp_path / "tiny.yaml")})
    natural = dualview.run(**base)
    assert numbers(abstract) == numbers(rewritten) != numbers(natural)
    assert abstract.provenance.prompts_hash == rewritten.provenance.prompts_hash != natural.provenance.prompts_hash
    assert [query.gold for query in abstract.queries] == [query.gold for query in natural.queries]
    assert abstract.task.labels == tiny.ABSTRACT and abstract.provenance.options["labels"] == "abstract"
    assert what_ran(abstract).endswith(f", abstract labels {' '.join(tiny.ABSTRACT)}")
    assert what_ran(natural) == what_ran(rewritten) and "labels" not in natural.provenance.options


def test_the_prompt_shows_the_words(base: dict[str, Any]) -> None:
    shown = dualview.prompt(model=base["model"], task=base["task"], shots=3, labels="abstract").tokens
    labels = [token["text"] for token in shown if token["span"] == "label"]
    assert len(labels) == 3 and set(labels) <= set(tiny.ABSTRACT)
    assert [token["text"] for token in shown if token["span"] == "candidate"] == tiny.ABSTRACT
    with pytest.raises(dualview.UserError, match=r"--labels: Input should be 'natural' or 'abstract'"):
        dualview.run(**base, labels="foo,bar")


def test_a_sweep_has_both_and_a_store_shows_them(base: dict[str, Any], tmp_path: Path) -> None:
    spec = Spec.make({**base, "controls": "none", "labels": ["natural", "abstract"], "seeds": "1:2"})
    assert (sweep(spec, tmp_path).computed, sweep(spec, tmp_path).computed) == (4, 0)
    asked = "SELECT labels, count(*) AS n, count(DISTINCT prompts_hash) AS prompts FROM cells GROUP BY 1 ORDER BY 1"
    with Store(tmp_path) as store:
        found = query(store, asked).to_pylist()
    assert found == [{"labels": "abstract", "n": 2, "prompts": 2}, {"labels": "natural", "n": 2, "prompts": 2}]


def test_cells_older_than_the_option_are_natural(base: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    sweep(Spec.make({**base, "controls": "none"}), tmp_path)
    with Store(tmp_path) as store:
        (file,) = tmp_path.rglob("cells.parquet")
        old = tmp_path.parent / "old.parquet"
        pq.write_table(pq.read_table(file).drop_columns("labels"), old)
        monkeypatch.setattr("dualview.store.query.sources", lambda *_, **__: ([old], {}))
        assert query(store, "SELECT labels FROM cells").to_pylist() == [{"labels": "natural"}]
