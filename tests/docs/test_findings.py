"""The findings are what the result files say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from docs.blocks import ROOT
from dualview.io.errors import UserError

sys.path.insert(0, str(ROOT / "studies"))

import again
import aggregate
import by_layer
import claims
import collect
import findings
import front
import front_prose
import layout
import meta_gradients
import steps


def test_every_table_is_that_of_its_files() -> None:
    pages = [findings.read(page) for page in findings.PAGES]
    assert [findings.filled(text) for text in pages] == pages, "run python studies/findings.py"
    shown = set(re.findall(r"<!-- study: (\w+)", "".join(pages)))
    assert shown == set(findings.PARTS), "a part is not shown, or there is none of that name"


def test_every_claim_has_a_section_and_no_prose_has_a_number_of_ours() -> None:
    """On the front page: what is outside of the marks keeps its truth when cells are added."""
    text = findings.read(findings.PAGES[0])
    anchors = {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in re.findall(r"^## (.+)", text, re.M)}
    assert {claim.anchor for claim in front.CLAIMS} <= anchors and len(front.CLAIMS) <= 10
    asked = set(re.findall(r"<!-- study: claim ([\w-]+) -->", text))
    assert asked == {claim.anchor for claim in front.CLAIMS}
    prose = re.sub(r"<!-- study.*?<!-- end -->", "", text, flags=re.DOTALL)
    prose = re.sub(r"\(2\d{3}\)|\]\([^)]*\)|Rec2FTP|Qwen2\.5", "", prose)  # years, addresses, names
    assert re.findall(r"\d+", prose) == ["4", "0"]  # bits; a learning rate of 0


def test_the_answer_is_what_the_claims_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sentences, whose words follow the table's answers."""
    written = front_prose.answer()
    assert len(re.findall(r"\.(?: |$)", written.replace("**Partly.** ", ""))) == 3
    said = {"predictions": "**yes**", "representations": "**yes**, small", "labels": "**no**", "attention": "**yes**"}
    monkeypatch.setattr(front.Claim, "answer", lambda claim, _model: said.get(claim.level, "**no**"))
    assert front_prose.answer().startswith("**Partly.**") and "an untrained network has more" in front_prose.answer()
    for level in ("representations", "labels"):
        said[level] = "**yes**"
    assert front_prose.answer().startswith("**Yes.**") and "they are alike too" in front_prose.answer()
    said.update(predictions="unclear", representations="**no**", labels="**no**")
    assert front_prose.answer().startswith("**No.**") and "do not clearly change" in front_prose.answer()


def test_what_is_left_counts_the_cells_that_are_there() -> None:
    cells = pd.read_parquet(ROOT / "studies" / "results" / "second" / "cells.parquet")
    own = cells[(cells["model"] == "qwen2.5-coder-1.5b") & (cells["labels"] == "natural")]
    quick = own[(own["controls"] == "quick") & (own["ft_rule"] == "sgd") & (own["lr_asked"] == "auto")]
    assert f"| `draws` | {len(quick)} of 55 |" in front_prose.left()
    versions = cells["code"].str.extract(r"numerics (\d+)")[0].value_counts()
    for version, count in versions.items():
        assert f"{version} ({count})" in front_prose.limits() or f"of version {version}, and" in front_prose.limits()


def test_the_claims_are_those_of_the_cells() -> None:
    """Two rows and their verdicts again, from the result files alone."""
    folder = ROOT / "studies" / "results" / "second"
    cells, controls = (pd.read_parquet(folder / f"{name}.parquet") for name in ("cells", "controls"))
    own = cells[(cells["model"] == "qwen2.5-coder-1.5b") & (cells["labels"] == "natural") & (cells["ft_loss"] == "all")]
    own = own[(own["controls"] != "none") & (own["ft_rule"] == "sgd") & (own["verdict_learning"] == "supported")]
    own = own.assign(version=own["code"].str.extract(r"numerics (\d+)")[0].astype(int))
    newest = cells["code"].str.extract(r"numerics (\d+)")[0].astype(int).max()
    own = own.assign(old=own["version"] < newest, version=-own["version"]).sort_values(["old", "controls", "version"])
    own = own.drop_duplicates(["task", "seed"])  # each draw once
    claimed = {claim.level: claim for claim in front.CLAIMS if claim.level}
    excess = []
    for row in own.itertuples():
        floors = controls[(controls["key"] == row.key) & (controls["metric"] == "sim_aou")]
        made = ["gaussian", "shuffled_query", "mean_direction", "head_span", "rotated"]  # from every draw's own records
        floors = floors[(floors["kind"] == "floor") & floors["name"].isin(made)]
        excess.append(row.sim_aou_raw - floors["value"].max())
    found = claimed["representations"].mean("qwen2.5-coder-1.5b")
    assert (found.value, found.n) == (pytest.approx(sum(excess) / len(excess)), len(excess))
    assert claimed["predictions"].mean("qwen2.5-coder-1.5b").value == pytest.approx(own["agreement"].mean())
    for level in ("predictions", "representations"):
        supported = [str(outcome) == "supported" for outcome in own[f"verdict_{level}"]]
        assert claimed[level].verdicts("qwen2.5-coder-1.5b") == f"{sum(supported)} of {len(supported)}"
    full = own[own["controls"] == "full"]
    floors = controls[(controls["metric"] == "sim_aou") & (controls["kind"] == "floor")]
    floors = floors[floors["name"] != "zsl_shifted"].groupby("key")["value"].max()
    against = claimed["representations"].against_every_control("qwen2.5-coder-1.5b")
    assert (against.n, against.value) == (
        len(full),
        pytest.approx((full["sim_aou_raw"] - full["key"].map(floors)).mean()),
    )
    answers = {claim.answer(model) for claim in front.CLAIMS for model in front.SIZES}
    no = {"**no**", "**no**, against every control", "unclear, against every control"}
    assert answers <= {"**yes**", "**yes**, small", *no, "unclear", "not testable", "not run"}


def test_the_meta_gradients_are_those_of_their_file() -> None:
    found = pd.read_parquet(ROOT / "studies" / "results" / "second" / "heads.parquet")
    own = found[found["model"] == "embedded"]
    by_task = own.groupby(["task", "seed"])["meta_gradients_cosine"].mean().groupby("task").mean()
    assert f"| 135M | W_V x' and the error signals e, by token | {by_task.mean():.3f} ± " in meta_gradients.table()
    assert own.groupby(["task", "seed"])["layer"].nunique().eq(30).all()


def test_meta_gradients_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def rows(_model: object, name: str, task: str, seed: int, _data: object) -> pd.DataFrame:
        asked.append((task, seed))
        return pd.DataFrame({"model": [name], "task": [task], "seed": [seed], "layer": [0]})

    monkeypatch.setattr(meta_gradients, "FILE", tmp_path / "heads.parquet")
    monkeypatch.setattr(meta_gradients, "rows_of", rows)
    monkeypatch.setattr(meta_gradients.dualview, "load_model", lambda *_, **__: object())
    for seeds in ("1", "1:2"):
        assert meta_gradients.main(["--tasks", "movie,source", "--seeds", seeds]) == 0
    assert asked == [("movie", 1), ("source", 1), ("movie", 2), ("source", 2)]
    assert len(pd.read_parquet(tmp_path / "heads.parquet")) == 4


def test_an_answer_needs_draws_and_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, list[float]] = {}
    monkeypatch.setattr(front, "models", lambda: ["embedded"])
    claim = front.Claim("", "", "", lambda cells: cells["x"])
    monkeypatch.setattr(front.Claim, "cells", lambda *_: pd.DataFrame({"x": values["x"], "controls": "full"}))
    for values["x"], answer in (
        ([0.5, 0.4, 0.6], "**yes**"),
        ([0.03, 0.031, 0.032], "**yes**, small"),
        ([-0.5, -0.4, -0.6], "**no**"),
        ([0.001, 0.002, -0.001], "**no**"),
        ([0.5, -0.4, 0.1], "unclear"),
        ([0.5, 0.5], "not testable"),
        ([], "not testable"),
    ):
        assert claim.answer("embedded") == answer
    assert claim.answer("qwen2.5-coder-0.5b") == "not run"


def test_a_mean_over_seeds_by_hand() -> None:
    found = aggregate.over([0.1, 0.2, 0.6])
    assert found.value == pytest.approx(0.3)
    assert found.half == pytest.approx(4.302653 * 0.2645751 / 3**0.5, rel=1e-5)  # Student's quantile, sample deviation
    assert aggregate.over([0.5, 0.6]).half is None and aggregate.over([]).show() == "–"
    assert aggregate.over([float("nan"), 0.5]).n == 1


def test_no_more_is_said_than_an_interval_allows() -> None:
    def said(value: float, half: float | None) -> str:
        return claims.says(aggregate.Mean(value, half, 6), "more", "less", "same")

    assert [said(0.2, 0.1), said(-0.2, 0.1), said(0.2, 0.3)] == ["more", "less", "unclear here"]
    assert said(0.004, 0.003) == "same" and said(0.2, None) == "unclear here"


def test_a_curve_is_read_off_between_its_points_alone() -> None:
    points = {"status": ["ok", "ok", "diverged"], "update_norm": [0.1, 1.0, 10.0], "x": [0.0, 1.0, 9.0]}
    curve = pd.DataFrame(points)
    assert aggregate.at_norm(curve, 0.1**0.5, "x") == pytest.approx(0.5)
    assert aggregate.at_norm(curve, 0.05, "x") != aggregate.at_norm(curve, 0.05, "x")  # NaN below the curve
    assert aggregate.at_norm(curve, 5.0, "x") != aggregate.at_norm(curve, 5.0, "x")  # and past what trained well


def test_rules_are_held_against_each_other_at_equal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def cells(rule: str, seed: int, lr: float, size: float, sim: float, status: str = "ok") -> dict[str, object]:
        asked = {"task": "mr", "seed": seed, "ft_rule": rule, "lr": lr, "lr_asked": str(lr), "weights": "trained"}
        found = {"ft_status": status, "update_norm_ft": size, "sim_aou_raw": sim, "sim_am_delta": 0.0}
        return {**asked, **found, "accuracy_ft": 0.5, "accuracy_zsl": 0.25}

    plain = [cells("sgd", seed, lr, lr, 10 * lr) for seed in (1, 2) for lr in (0.01, 0.1)]
    causal = [cells("layer-causal", 1, lr, 10 * lr, lr) for lr in (0.001, 0.01)]
    causal += [cells("layer-causal", 2, 0.001, 0.01, 0.0), cells("layer-causal", 2, 0.1, 9.0, 1.0, "diverged")]
    monkeypatch.setattr(aggregate, "table", lambda name: pd.DataFrame(plain + causal))
    read = steps.at_size(
        steps.curves_of_rates(), 0.1**1.5, "sim_aou_raw"
    )  # half-way in the logarithm; seed 2 does not reach it with both
    assert read.to_dict("records") == [
        {"task": "mr", "seed": 1, "sgd": pytest.approx(0.55), "layer-causal": pytest.approx(0.0055)}
    ]
    assert "| gradient descent | 0.01 | 2 | 0 | 0 | 0.010 | 0.100 | 0.000 | 0.250 |" in steps.by_rate()
    assert "| layer-causal | 0.1 | 1 | 1 | 0 | – | – | – | – |" in steps.by_rate()


def test_models_are_held_against_each_other_at_the_size_of_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    def cell(weights: str, seed: int, lr: str, size: float, sim: float) -> dict[str, object]:
        asked = {"task": "mr", "seed": seed, "ft_rule": "sgd", "lr_asked": lr, "weights": weights, "ft_status": "ok"}
        return {**asked, "update_norm_ft": size, "sim_aou_raw": sim, "accuracy_ft": 0.5}

    trained = [cell("trained", seed, str(size), size, 10 * size) for seed in (1, 2, 3) for size in (0.01, 0.1)]
    drawn = [cell("untrained", 1, "auto", 0.1**1.5, 0.05), cell("untrained", 2, "auto", 0.1, 0.5)]
    drawn += [cell("untrained", 3, "auto", 0.2, 9.0)]  # past the trained model's curve
    monkeypatch.setattr(aggregate, "table", lambda name: pd.DataFrame(trained + drawn))
    others = aggregate.redrawn("untrained")
    all_seeds = pd.DataFrame({"task": ["mr"] * 3, "seed": [1, 2, 3]})
    found = steps.trained_less(others, "sim_aou_raw", all_seeds)["mr"]
    assert (found.value, found.n) == (pytest.approx((0.5 + 0.5) / 2), 2)
    assert steps.trained_less(others, "sim_aou_raw", all_seeds[:1])["mr"].value == pytest.approx(0.55 - 0.05)


def test_cells_are_paired_by_task_and_seed() -> None:
    first = pd.DataFrame({"task": ["mr", "mr", "sst2"], "seed": [1, 2, 1], "x": [1.0, 2.0, 3.0]})
    second = pd.DataFrame({"task": ["mr", "mr", "cb"], "seed": [2, 1, 1], "x": [0.5, 0.25, 7.0]})
    found = claims.paired("x", first, second)
    assert list(found) == ["mr"] and found["mr"].value == pytest.approx((0.75 + 1.5) / 2)  # mr alone has both


def test_cells_where_both_learn_are_those_whose_intervals_are_above_zero() -> None:
    cells = pd.DataFrame({"accuracy_icl_gain_ci_low": [0.1, 0.1, 0.0], "accuracy_ft_gain_ci_low": [0.1, -0.1, 0.1]})
    assert list(aggregate.both_learn(cells)) == [True, False, False]


def test_a_floor_is_passed_at_p_under_one_per_cent(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("a", "gaussian", 0.001), ("a", "rotated", 0.02), ("b", "gaussian", 0.001), ("b", "rotated", 0.002)]
    rows += [("b", "zsl_shifted", 1.0)]
    floors = pd.DataFrame(rows, columns=["key", "name", "p"]).assign(metric="sim_aou", kind="floor")
    floors = pd.concat([floors, floors.assign(metric="sim_am", p=1.0)])
    monkeypatch.setattr(aggregate, "table", lambda name: floors)
    cells = pd.DataFrame({"key": ["a", "b", "unknown"]})
    assert [aggregate.passing(cells, name) for name in ("gaussian", "rotated", None)] == [2, 1, 1]
    assert aggregate.passing(cells, "gaussian", "sim_am") == 0


def test_a_setting_with_one_answer_is_known_by_its_warning() -> None:
    told = [["icl predicts label 3 for all 500 queries."], ["icl_reordered predicts label 3 for all 500 queries."], []]
    cells = pd.DataFrame({"warnings": told})
    assert aggregate.one_answer(cells, "icl") == 1 and aggregate.one_answer(cells, "ft") == 0


def test_films_can_count_as_one_kind() -> None:
    means = {task: aggregate.Mean(number, None, 5) for number, task in enumerate(aggregate.TASKS)}
    films = [0, 1, 2, 6, 7]  # sst2, sst5, mr, movie, movie5
    by_hand = [sum(films) / 5, 3, 4, 5, 8, 9, 10]
    found = aggregate.mean_of_kinds(means)
    assert (found.value, found.n) == (pytest.approx(sum(by_hand) / 7), 7)
    assert found.half == pytest.approx(aggregate.over(by_hand).half)


def test_the_p_of_a_mean_is_student_s() -> None:
    from scipy.stats import ttest_1samp

    draws = [0.1, 0.4, -0.2, 0.5]
    assert aggregate.over(draws).p == pytest.approx(ttest_1samp(draws, 0).pvalue)


def test_fewer_cells_than_a_column_has_are_told() -> None:
    means = {"mr": aggregate.Mean(0.5, None, 2), "cb": aggregate.Mean(0.25, None, 1)}
    assert claims._shown(means, 3) == "0.375" and claims._shown(means, 4) == "0.375 (3 cells)"


def test_patches_are_kept_with_what_made_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(seed: int, accuracy: float) -> Path:
        run = {"date": "2026", "host": "here", "device_name": "a CPU", "seconds": {"fit": 1.0, "showings": 2.0}}
        versions = dict.fromkeys(("python", "dualview", "torch", "transformers", "numpy"), "1")
        where = {"versions": versions, "weights_hash": "abc", "seeds": {"demos": seed}, "run": run}
        settings = {"patch": {"accuracy": accuracy, "agreement": 1.0, "divergence": 0.0}}
        found = {"task": {"name": "movie", "shots": 32, "shots_used": 32}, "n_queries": 200, "fitted": 64, "ridge": 1.0}
        found |= {"lr": 0.1, "ft_status": "ok", "task_vector_layer": 3, "settings": settings, "provenance": where}
        path = tmp_path / f"{seed}-{accuracy}.json"
        path.write_text(json.dumps(found))
        return path

    monkeypatch.setattr(collect, "RESULTS", tmp_path)
    collect.add_patches([written(1, 0.5), written(2, 0.5)])
    collect.add_patches([written(1, 0.75)])
    rows = pd.read_parquet(tmp_path / "patches.parquet")
    assert list(rows[["seed", "accuracy"]].itertuples(index=False, name=None)) == [(1, 0.75), (2, 0.5)]
    assert set(rows["seconds"]) == {3.0} and set(rows["device_name"]) == {"a CPU"} and "host" not in rows


def test_cells_that_were_asked_again_replace_the_old() -> None:
    def part(key: str, asked: str, value: float, code: str = "numerics 9, torch") -> dict[str, pd.DataFrame]:
        cells = pd.DataFrame({"key": [key], "asked": [asked], "value": [value], "code": [code]})
        return {name: cells if name == "cells" else cells[["key", "value"]] for name in collect.TABLES}

    none = pd.DataFrame({"key": pd.Series(dtype=str)})  # a store whose cells have no such rows
    assert collect.frame([]).equals(none)
    parts_ = [part("old", "a", 1.0), part("other", "b", 2.0), part("new", "a", 3.0), part("other", "b", 2.1)]
    parts_ += [part("older", "a", 4.0, "numerics 7, torch"), part("hashed", "b", 5.0, "0123abcd")]
    merged = collect.merged(parts_)
    assert list(merged["cells"]["key"]) == ["new", "other"]
    for name in collect.TABLES:  # the same cell from another machine has the same key and other last digits
        assert list(zip(merged[name]["key"], merged[name]["value"], strict=True)) == [("new", 3.0), ("other", 2.1)]


def test_our_rows_stand_under_the_papers_and_other_tasks_beneath() -> None:
    means = {task: aggregate.Mean(number / 8, None, 5) for number, task in enumerate(aggregate.TASKS)}
    lines = layout.against_papers("kendall", {"ours": means}, "A note.").splitlines()
    assert "| *Dai et al., 1.3B* | 0.192 | 0.151 | 0.173 | 0.181 | 0.190 | 0.274 | 0.194 |" in lines
    assert any(line.startswith("| ours | 0.000 | 0.125 | 0.250 | 0.375 | 0.500 | 0.625 | 0.312 ± ") for line in lines)
    (rest,) = [line for line in lines if line.startswith("| ours | 0.750")]
    assert rest.startswith("| ours | 0.750 | 0.875 | 1.000 | 1.125 | 1.250 | 0.625 ± ")  # the last: the mean of all


def test_the_figure_draws_means_over_tasks_by_layer() -> None:
    cells = aggregate.comparison()
    rows = aggregate.table("layers")
    tasks = [rows[(rows["layer"] == 7) & rows["key"].isin(own)] for own in cells.groupby("task")["key"].agg(list)]
    by_hand = sum(task["sim_aou_raw"].mean() for task in tasks) / len(tasks)
    assert by_layer.curves("sim_aou")["gradient descent"][7].value == pytest.approx(by_hand)
    for axes, metric in zip(by_layer.figure().axes, by_layer.PANELS, strict=True):
        drawn = {str(line.get_label()): line.get_ydata() for line in axes.lines}
        for title, means in by_layer.curves(metric).items():
            assert drawn[title] == pytest.approx([mean.value for mean in means], nan_ok=True)


def test_controls_by_layer_are_those_of_the_result() -> None:
    floors = {"shuffled_query": [0.1, None], "gaussian": [0.0, 0.0]}
    controls = {"per_layer": {"floors": floors, "ceilings": {"icl_reordered": [0.9, 0.8]}}}
    rows = list(collect.profile("k", {"controls": {"sim_aou": controls, "sim_am": controls}}))
    kept = [(row["name"], row["layer"], row["value"]) for row in rows if row["metric"] == "sim_am"]
    assert kept == [
        *(("shuffled_query", 0, 0.1), ("shuffled_query", 1, None)),
        *(("icl_reordered", 0, 0.9), ("icl_reordered", 1, 0.8)),
    ]


@pytest.mark.parametrize("name", collect.TABLES)
def test_results_are_small_and_belong_together(name: str) -> None:
    path: Path = collect.RESULTS / f"{name}.parquet"
    assert path.stat().st_size < 2 << 20
    assert set(pd.read_parquet(path)["key"]) <= set(pd.read_parquet(collect.RESULTS / "cells.parquet")["key"])


def test_a_cpu_finds_what_the_gpu_found() -> None:
    here, controls = (pd.read_parquet(collect.RESULTS / f"{name}.parquet") for name in ("check", "check_controls"))
    both = again.both_cells(here)
    assert set(both["ft_rule"]) == set(aggregate.RULES) and (both["lr_again"] == both["lr_study"]).all()
    for name in again.CHECKED:
        tolerance = 0.01 if name.startswith("accuracy") else 1e-3
        assert (both[f"{name}_again"] - both[f"{name}_study"]).abs().max() < tolerance, name
    found = again.both_controls(both, controls)
    assert len(found) > 150 and set(found["ft_rule"]) == set(aggregate.RULES)
    for name, value, kept in zip(found["name"], found["value_again"], found["value_study"], strict=True):
        assert value == pytest.approx(kept, abs=1e-3, nan_ok=True), name
    assert again.compared(here, controls)[1]


def test_cells_run_again_are_held_against_the_same_of_the_study() -> None:
    cells, controls = aggregate.table("cells"), aggregate.table("controls")
    one = cells[(cells["task"] == "mr") & (cells["seed"] == 2) & (cells["controls"] == "full")].head(1)
    changed = one.assign(sim_aou_raw=one["sim_aou_raw"] + 0.25, rec2ftp_value=float("nan"), key="again", seed="2")
    own = controls[controls["key"].isin(one["key"])].assign(key="again")
    own = own.assign(value=own["value"] + 0.5 * (own["metric"] == "sim_am"))
    told, agree = again.compared(changed, own)
    assert not agree and "| sim_aou_raw | 2.5e-01 | 0.001 |" in told and "| sim_am_after | 0.0e+00 | 0.001 |" in told
    assert "| rec2ftp_value | – | 0.001 |" in told
    assert "| controls of sim_am | 5.0e-01 | 0.001 |" in told and "| controls of sim_aou | 0.0e+00 | 0.001 |" in told
    assert "1 of 1 cells are the study's (mr seed 2 32 shots " in told
    assert told.endswith("Too far apart: rec2ftp_value, sim_aou_raw, controls of sim_am.")
    kept = controls[controls["key"].isin(one["key"])]
    assert again.compared(one, kept)[1] and again.compared(one, kept)[0].endswith("They agree.")
    told, agree = again.compared(one.assign(lr=0.5), kept)
    assert not agree and told.endswith("the same learning rate in 0, which are compared. None is.")
    for other in ({"task": "mine"}, {"model": "./tiny"}, {"prompts_hash": "other"}, {"epochs": 2}):
        told, agree = again.compared(one.assign(**other), kept)
        assert not agree and told.startswith("None of these cells")


def test_cells_of_another_study_are_refused() -> None:
    cells = aggregate.table("cells").head(3)
    collect.must_be_the_study_s(cells)
    for other in ({"task": "mine"}, {"model": "./tiny"}, {"n_queries": 10}):
        mixed = pd.concat([cells, cells.head(1).assign(**other)])
        with pytest.raises(UserError, match="1 of 4 cells are not of this study"):
            collect.must_be_the_study_s(mixed)


@pytest.mark.parametrize(("script", "given"), [("collect", []), ("again", ["--help"]), ("again", ["nowhere"])])
def test_a_wrong_call_ends_with_one_sentence(script: str, given: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "studies" / f"{script}.py"), *given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "studies" / "results").glob("*.parquet"))


@pytest.mark.parametrize("lost", [FILES[-1], Path("docs/findings.md"), Path("studies/second.yaml")], ids=str)
def test_a_missing_file_is_one_sentence(lost: Path, tmp_path: Path) -> None:
    """In a copy of what the findings are made from, without one of the files."""
    for folder in ("studies", "docs/lab"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for page in findings.PAGES:
        shutil.copy(page, tmp_path / "docs")
    (tmp_path / "docs" / "images").mkdir()
    (tmp_path / lost).unlink()
    command = [sys.executable, "studies/findings.py"]
    there = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=there, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert lost.name in done.stderr and "cannot be read" in done.stderr
    assert not list((tmp_path / "docs" / "images").iterdir())  # nothing is half-written


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "cells.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"cells\.parquet cannot be read \(.*studies/README\.md says how"):
        aggregate.result_file(tmp_path / "cells.parquet")
    (tmp_path / "patch.json").write_text("{}")
    with pytest.raises(UserError, match="is not what `dualview compile --json` writes"):
        list(collect.scores_of(tmp_path / "patch.json"))
    with pytest.raises(UserError, match=r"none\.json cannot be read"):
        list(collect.scores_of(tmp_path / "none.json"))
