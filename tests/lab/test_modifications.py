"""The modifications lab: the layer against its equation, the test against scipy, and trainings that survive a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import dualview.lab
from close import assert_close
from dualview.io.errors import UserError
from dualview.lab.harness import LabResult
from dualview.lab.modifications.model import Attention, kinds
from dualview.lab.modifications.report import sentence
from dualview.lab.modifications.run import Settings, figures, tables
from dualview.lab.modifications.statistics import compared, differences
from dualview.lab.modifications.training import wanted_kinds
from dualview.lab.problems import LinearTasks, Tasks, named_generator
from dualview.variants import Augmented, Negative, Regularised, Sign, Variant

TINY = {
    "dims": 2,
    "demos": 4,
    "train_tasks": 20,
    "batch_size": 8,
    "test_tasks": 16,
    "epochs": 2,
    "seeds": 2,
    "device": "cpu",
}


def problems(count: int = 5) -> Tasks:
    drawn = LinearTasks(2, 4).draw(named_generator(0, "x"), count)
    return Tasks(drawn.x.double(), drawn.y.double(), drawn.x_query.double(), drawn.y_query.double())


def layer(variant: Variant | None, heads: int = 2) -> Attention:
    return Attention(3, heads, variant, named_generator(0, "w")).double()


# ------------------------------------------------------------------------------------------------------------- model


def by_hand(model: Attention, tasks: Tasks, t: int, change) -> float:
    """One problem; `change(values, keys, weights)` turns a head's values [token, d] and weights into its output."""
    tokens = np.concatenate([tasks.x[t], tasks.y[t][:, None]], 1)
    tokens = np.concatenate([tokens, [[*tasks.x_query[t], 0.0]]])
    w_q, w_k, w_v, w_o = (m.weight.detach().numpy() for m in (model.q_proj, model.k_proj, model.v_proj, model.o_proj))
    heads = []
    for h in range(model.heads):
        rows = slice(3 * h, 3 * h + 3)
        q, keys, values = w_q[rows] @ tokens[-1], tokens @ w_k[rows].T, tokens @ w_v[rows].T
        weights = np.exp(keys @ q / np.sqrt(3))
        heads.append(change(values, keys, weights / weights.sum()))
    return float((w_o @ np.concatenate(heads))[-1])


def negatives(k: int, beta: float):
    def change(values, keys, weights):
        moved = values.copy()
        for i in range(len(values)):
            lowest = sorted(range(i), key=lambda j: keys[i] @ keys[j])[:k]
            moved[i] -= beta / k * sum((values[j] for j in lowest), np.zeros(3))
        return weights @ moved

    return change


EQUATIONS = {
    "softmax": (None, lambda v, k, a: a @ v),
    "regularised": (Regularised(alpha=0.3), lambda v, k, a: a @ v - 0.3 * v[-1]),
    "negative": (Negative(k=2, beta=0.5), negatives(2, 0.5)),
    "sign, constant": (Sign(scale="constant"), lambda v, k, a: a @ np.sign(v)),
    "sign, sequence": (Sign(scale="sequence"), lambda v, k, a: np.abs(v).mean() * (a @ np.sign(v))),
    "sign, token": (Sign(scale="token"), lambda v, k, a: a @ (np.sign(v) * np.abs(v).mean(1, keepdims=True))),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_layer_is_the_equation(name):
    variant, change = EQUATIONS[name]
    model, tasks = layer(variant), problems()
    found = model(tasks).detach().numpy()
    for t in range(len(tasks)):
        assert found[t] == pytest.approx(by_hand(model, tasks, t, change), rel=1e-9)


def test_adapters_start_as_nothing_and_are_trained():
    tasks = problems()
    plain = layer(None)
    for variant, extra in ((Augmented(rank=4, keys=False), 1), (Augmented(rank=4), 2)):
        model = layer(variant)
        assert_close(model(tasks), plain(tasks))
        added = [p for name, p in model.named_parameters() if name.startswith("dualview")]
        assert len(added) == 2 * extra
        model(tasks).sum().backward()
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in added)
    with torch.no_grad():
        for parameter in added:
            parameter.normal_(generator=named_generator(1, "a"))
    assert not torch.allclose(model(tasks), plain(tasks))


def test_all_of_the_issue_is_there():
    names = [kind.name for kind in wanted_kinds(Settings.make(), 1)]
    assert names == [
        "softmax",
        "regularised α=0.1",
        "regularised α=0.3",
        "regularised α=0.5",
        "augmented g1",
        "augmented g1, g2",
        "negative k=1 β=0.1",
        "negative k=1 β=0.5",
        "negative k=3 β=0.1",
        "negative k=3 β=0.5",
        "sign, constant scale",
        "sign, sequence scale",
        "sign, token scale",
    ]
    assert Settings.make().seeds >= 5 and Settings.make().epochs == 100
    assert len({kind.name for kind in kinds((0.1,), (1,), (0.1,), 2, 0)}) == 8


def test_0_is_the_softmax_curve_that_is_there_anyway():
    asked = Settings.make(alphas="0,.1,.3,.5", betas="0,.1,.5")
    assert [kind.name for kind in wanted_kinds(asked, 1)] == [kind.name for kind in wanted_kinds(Settings.make(), 1)]


# -------------------------------------------------------------------------------------------------------- statistics


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(0, 10**6))
def test_the_paired_test_is_scipys(n, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=n), rng.normal(size=n)
    found = compared(a.tolist(), b.tolist())
    reference = stats.ttest_rel(a, b)
    assert found["p"] == pytest.approx(reference.pvalue, rel=1e-9)
    interval = reference.confidence_interval(0.95)
    assert found["ci"] == pytest.approx([interval.low, interval.high], rel=1e-9)
    assert found["seeds_lower"] == sum(a < b)


def planted(shifts: dict[str, float], seeds: int = 5) -> dict[str, dict[str, list[float | None]]]:
    rng = np.random.default_rng(0)
    base = 0.3 + 0.05 * rng.normal(size=seeds)  # seeds differ much more than models do
    return {
        name: {
            str(s): [1.0, base[s] + shift + 0.001 * rng.normal(), base[s] + shift + 0.001 * rng.normal()]
            for s in range(seeds)
        }
        for name, shift in shifts.items()
    }


def test_planted_differences_are_found_and_only_those():
    found = differences(planted({"softmax": 0, "better": -0.02, "worse": 0.02, "same": 0, "alike": 0}), "softmax")
    for outcome in ("last", "mean"):
        rows = found[outcome]
        assert rows["better"]["survives"] and rows["better"]["difference"] < 0 and rows["better"]["seeds_lower"] == 5
        assert rows["worse"]["survives"] and rows["worse"]["difference"] > 0
        assert not rows["same"]["survives"] and not rows["alike"]["survives"]


def test_holm_runs_over_both_outcomes():
    found = differences(planted({"softmax": 0, "a": -0.002, "b": 0.001, "c": 0.0005}), "softmax")
    rows = [found[outcome][name] for outcome in ("last", "mean") for name in "abc"]
    running = 0.0
    for rank, row in enumerate(sorted(rows, key=lambda r: r["p"])):
        running = max(running, min(1.0, row["p"] * (6 - rank)))
        assert row["p_holm"] == pytest.approx(running)
        assert row["survives"] == (running < 0.05)


def test_the_family_wise_error_is_kept():
    """With no difference anywhere, a survivor among twelve models turns up in about 5 % of labs, not more."""
    rng, wrong = np.random.default_rng(1), 0
    for _ in range(200):
        curves = {str(m): {str(s): [0.0, float(rng.normal())] for s in range(5)} for m in range(13)}
        wrong += any(row["survives"] for rows in differences(curves, "0").values() for row in rows.values())
    assert wrong / 200 < 0.10


def test_a_diverged_model_is_not_tested():
    curves = planted({"softmax": 0, "lost": 0.1, "fine": -0.02})
    curves["lost"]["2"][-1] = None
    found = differences(curves, "softmax")
    assert found["last"]["lost"]["p_holm"] is None and not found["last"]["lost"]["survives"]
    assert found["last"]["fine"]["survives"]


def test_equal_models_have_no_test():
    curves = planted({"softmax": 0})
    row = differences({**curves, "twin": curves["softmax"]}, "softmax")["last"]["twin"]
    assert row["difference"] == 0 and row["p"] is None and not row["survives"]


# --------------------------------------------------------------------------------------------------------------- lab


def test_the_lab_and_its_tables():
    result = dualview.lab.modifications(**TINY, seed=3)
    assert result.results == dualview.lab.modifications(**TINY, seed=3).results  # bit for bit
    assert result.seeds == [3, 4] and result.results["steps_per_epoch"] == 3
    losses = result.results["test_loss"]
    assert len(losses) == 13 and all(len(curve) == 3 for seeds in losses.values() for curve in seeds.values())
    for seed in ("3", "4"):  # the same start for all: adapters add nothing yet
        assert losses["augmented g1"][seed][0] == pytest.approx(losses["softmax"][seed][0], rel=1e-5)
    assert losses["softmax"]["3"] != losses["softmax"]["4"]
    read = LabResult.model_validate_json(result.model_dump_json())
    last, mean, findings = tables(read)
    assert len(last.rows) == len(mean.rows) == 13 and len(findings.rows) == 12
    assert set(figures(read)) == {f"modifications_{f}" for f in ("regularised", "augmented", "negative", "sign")}


def test_sentences_say_which_way():
    def said(last, mean):
        row = {"difference": -0.01, "survives": True}
        rows = {"last": {**row, **last}, "mean": {**row, **mean}}
        found = {k: {"m": v, "softmax": {"mean": 0.2}} for k, v in rows.items()}
        return sentence(LabResult(lab="x", settings={}, seeds=[1], results={"differences": found}, provenance={}), "m")

    assert said({}, {}) == "Its test loss is lower by 5.0% at the end and lower by 5.0% over all epochs."
    assert "higher by 10.0% at the end" in said({"difference": 0.02}, {"survives": False})
    assert said({"survives": False}, {"survives": False}) == "No difference from softmax attention survives."
    assert "diverged" in said({"difference": None}, {})


@pytest.mark.parametrize(
    ("given_", "named"),
    [
        ({"only": "negtive"}, "negtive"),
        ({"only": "regularised", "alphas": "0"}, "nothing to compare with softmax attention"),
        ({"only": "negative", "betas": "0"}, "nothing to compare with softmax attention"),
        ({"only": ""}, "nothing to compare with softmax attention"),
        ({"alphas": "0.1,0.10"}, "--alphas: 0.1 is given twice"),
        ({"only": "sign,sign"}, "--only: sign is given twice"),
        ({"alphas": "inf"}, "--alphas: inf is not a finite number"),
        ({"seeds": 1}, "--seeds"),
        ({"ks": "0"}, "--ks"),
        ({"lr": 0}, "--lr"),
    ],
)
def test_mistakes(given_, named):
    with pytest.raises(UserError, match=named):
        dualview.lab.modifications(**{**TINY, **given_})


def test_a_diverged_training_is_reported_as_that():
    result = dualview.lab.modifications(**{**TINY, "only": "regularised", "alphas": "1e200", "epochs": 1})
    assert any(None in curve for curve in result.results["test_loss"]["regularised α=1e+200"].values())
    assert "diverged" in tables(result)[-1].rows[0][1]


def test_killed_and_resumed_is_uninterrupted_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "dualview.lab.harness._write_figures", lambda figures, folder: []
    )  # seconds, and tested elsewhere
    given = {**TINY, "only": "negative", "ks": (1,), "betas": (0.5,), "epochs": 80}
    out = tmp_path / "out"
    code = f"import dualview.lab; dualview.lab.modifications(out={str(out)!r}, save_every=0.05, **{given!r})"
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 90
    try:  # one training finished, and another under way
        while not (list(out.glob(".state-*/finished.json")) and list(out.glob(".state-*/state.safetensors"))):
            assert child.poll() is None and time.monotonic() < until, "it ended before it could be killed"
            time.sleep(0.005)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert not (out / "modifications.json").exists()
    dualview.lab.modifications(out=out, **given)
    dualview.lab.modifications(json=tmp_path / "whole.json", **given)
    resumed, whole = (json.loads(p.read_text()) for p in (out / "modifications.json", tmp_path / "whole.json"))
    for content in (resumed, whole):
        content["provenance"].pop("run")
    assert resumed == whole
    assert not list(out.glob(".state-*"))
