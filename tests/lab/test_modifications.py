"""The modifications lab: the batched models against their equations, the test against scipy, the choice, the lab."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import dualview.lab
from dualview.io.errors import UserError
from dualview.lab.harness import Job, LabResult
from dualview.lab.modifications.model import SOFTMAX, Modification, Rows, modifications_of
from dualview.lab.modifications.report import figures, finding, sentence, tables
from dualview.lab.modifications.run import best, compare, compared, draw, key, losses, train
from dualview.lab.modifications.settings import FAMILIES, ModificationsSettings
from dualview.lab.problems import Tasks, named_generator
from dualview.lab.training import clip_each

TINY = {
    "dims": 2,
    "demos": 4,
    "steps": 2,
    "batch_size": 4,
    "test_tasks": 8,
    "seeds": 2,
    "search_seeds": 2,
    "layers": (1, 2),
    "alphas": (-1, 0.5),
    "ks": (2,),
    "betas": (0.3,),
    "ranks": (2, 3),
    "device": "cpu",
}
CPU = torch.device("cpu")


def drawn(problem: str = "regression", count: int = 3, seed: int = 0) -> Tasks:
    return draw(ModificationsSettings.make(**TINY), problem, named_generator(seed, "x"), count)


def some_rows(chosen: list[Modification], layers: int, seeds: tuple[int, ...] = (3, 4)) -> Rows:
    """In float64, with adapters that do something."""
    rows = Rows.fresh(chosen, seeds, "test", layers, 3, 2, CPU)
    weights = {name: weight.detach().double() for name, weight in rows.weights.items()}
    for name in weights:
        if name.startswith("up"):
            weights[name].normal_(generator=named_generator(0, name))
    used = {name: mask.double() for name, mask in rows.used.items()}
    coefficient = torch.tensor([each.coefficient for each in chosen for _ in seeds], dtype=torch.float64)
    assert coefficient.tolist() == pytest.approx(rows.coefficient.tolist(), rel=1e-6)
    return Rows(rows.attend, rows.heads, coefficient, weights, used)


# ------------------------------------------------------------------------------------------------------------- model


def softmax_of(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def attended(modification: Modification, t: int, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One head's output at token t, from the equations of the variants, with explicit loops."""
    a = softmax_of(keys[: t + 1] @ q / math.sqrt(len(q)))
    c = modification.coefficient
    match modification.path:
        case ("regularised",):
            return a @ values[: t + 1] - c * values[t]
        case ("negative", int(k)):
            moved = values.copy()
            for i in range(t + 1):
                lowest = sorted(range(i), key=lambda j: keys[i] @ keys[j])[:k]
                moved[i] -= c / k * sum((values[j] for j in lowest), np.zeros(len(q)))
            return a @ moved[: t + 1]
        case ("sign", "token"):
            return a @ (np.sign(values) * np.abs(values).mean(1, keepdims=True))[: t + 1]
        case ("sign", "constant"):
            return a @ np.sign(values)[: t + 1]
        case ("sign", _):
            return np.abs(values[: t + 1]).mean() * (a @ np.sign(values)[: t + 1])
        case _:
            return a @ values[: t + 1]


def by_hand(rows: Rows, row: int, modification: Modification, tokens: np.ndarray) -> float:
    w = {name: weight[row].numpy() for name, weight in rows.weights.items()}
    x = tokens.copy()
    for layer in range(len(w["q"])):
        projected = {role: x @ w[role][layer].T for role in "qkv"}
        for role, units in zip("vk", modification.units, strict=True):
            if units:
                inner = np.maximum(x @ w[f"down_{role}"][layer][:units].T, 0)
                projected[role] += inner @ w[f"up_{role}"][layer][:, :units].T
        out = np.zeros((len(x), 6))
        for h in range(2):
            q, keys, values = (projected[role][:, 3 * h : 3 * h + 3] for role in "qkv")
            for t in range(len(x)):
                out[t, 3 * h : 3 * h + 3] = attended(modification, t, q[t], keys, values)
        x = x + out @ w["o"][layer].T
    return float(x[-1, -1])


@pytest.mark.parametrize("layers", [1, 3])
def test_every_row_is_its_equation(layers):
    tasks = drawn()
    tokens = torch.cat([tasks.context, tasks.query], 1).double()
    every = modifications_of(ModificationsSettings.make(**TINY))
    assert {each.family for each in every} == {"softmax", *FAMILIES}
    for path in dict.fromkeys(each.path for each in every):
        together = [each for each in every if each.path == path]
        rows = some_rows(together, layers)
        found = rows.predict(tokens.expand(2 * len(together), -1, -1, -1))
        for row in range(2 * len(together)):
            for t in range(len(tasks)):
                expected = by_hand(rows, row, together[row // 2], tokens[t].numpy())
                assert float(found[row, t]) == pytest.approx(expected, rel=1e-8, abs=1e-10)


def test_all_models_of_a_seed_start_alike():
    """Adapters add nothing yet, and α = 0 is softmax attention: the same predictions at the start."""
    tasks = drawn()
    tokens = torch.cat([tasks.context, tasks.query], 1)
    every = modifications_of(ModificationsSettings.make(**TINY))
    augmented = [each for each in every if each.path == ("augmented",)]
    plain = Rows.fresh([SOFTMAX], [3, 4], "test", 2, 3, 2, CPU).predict(tokens.expand(2, -1, -1, -1))
    found = Rows.fresh(augmented, [3, 4], "test", 2, 3, 2, CPU).predict(tokens.expand(2 * len(augmented), -1, -1, -1))
    for at in range(len(augmented)):
        assert found[2 * at : 2 * at + 2].flatten().tolist() == pytest.approx(plain.flatten().tolist(), abs=1e-5)
    assert not torch.allclose(plain[0], plain[1])


def test_losses_are_the_mean_over_problems():
    rows = some_rows([SOFTMAX], 1, (3,))
    for problem in ("regression", "classification"):
        tasks = drawn(problem)
        tasks = Tasks(*(part.double() for part in (tasks.x, tasks.y, tasks.x_query, tasks.y_query)))
        said = rows.predict(torch.cat([tasks.context, tasks.query], 1)[None])[0]
        pairs = list(zip(said.tolist(), tasks.y_query.tolist(), strict=True))
        if problem == "regression":
            expected = sum((a - b) ** 2 / 2 for a, b in pairs) / 3
        else:
            assert {abs(b) for _, b in pairs} == {1.0} and set(tasks.y.abs().flatten().tolist()) == {1.0}
            expected = sum(math.log1p(math.exp(-a * b)) for a, b in pairs) / 3
        assert float(losses(rows, [tasks], problem, 1)) == pytest.approx(expected)


def test_rows_are_trained_independently():
    """A setting's loss does not depend on what is trained with it, nor a seed's on the other seeds."""
    chosen = ModificationsSettings.make(**{**TINY, "steps": 5})
    job = Job("modifications", chosen, None, None)
    alphas = [each for each in modifications_of(chosen) if each.path == ("regularised",)]
    together = train(job, alphas, [1, 2], "search", "regression", 2)
    alone = train(job, alphas[-1:], [2], "search", "regression", 2)
    assert together[-1][1] == pytest.approx(alone[0][0], rel=1e-4)
    assert together[-1][0] != together[-1][1]
    other = train(job, alphas[-1:], [2], "confirm", "regression", 2)
    assert other[0][0] != pytest.approx(alone[0][0], rel=1e-4)


def test_training_lowers_the_loss():
    short, long = (
        ModificationsSettings.make(**{**TINY, "steps": n, "batch_size": 16, "test_tasks": 256}) for n in (1, 150)
    )
    for problem in ("regression", "classification"):
        first, last = (
            train(Job("x", s, None, None), [SOFTMAX], [1, 2], "search", problem, 1)[0] for s in (short, long)
        )
        assert sum(last) < 0.9 * sum(first)  # pyright: ignore


def test_gradients_are_clipped_row_by_row():
    weight = torch.zeros(2, 1, 1, 2, requires_grad=True)
    weight.grad = torch.tensor([[3.0, 4.0], [0.3, 0.4]]).reshape(2, 1, 1, 2)
    clip_each([weight], 1.0)
    assert weight.grad.flatten().tolist() == pytest.approx([0.6, 0.8, 0.3, 0.4])


# ------------------------------------------------------------------------------------------------------------ choice


def test_the_best_of_each_family_is_chosen():
    a, b, c, d = (
        Modification(family, name, ("x",)) for family, name in (("p", "1"), ("p", "2"), ("q", "1"), ("q", "2"))
    )
    losses: dict[str, list[float | None]] = {
        "p/1": [0.2, 0.4],
        "p/2": [0.25, 0.3],
        "q/1": [0.1, None],
        "q/2": [0.9, 0.9],
    }
    assert best([SOFTMAX, a, b, c, d], {**losses, key(SOFTMAX): [0.0, 0.0]}) == [b, d]
    assert best([c], {"q/1": [None, None]}) == [c]


def test_the_range_includes_both_signs_and_g2_alone():
    chosen = ModificationsSettings.make()
    for values in (chosen.alphas, chosen.betas):
        assert min(values) < 0 < max(values)
    assert chosen.layers == (1, 2, 3) and chosen.seeds >= 5
    by_family = {each.family: each for each in modifications_of(chosen)}
    assert set(by_family) == {"softmax", *FAMILIES} and by_family["augmented g2"].units[0] == 0
    only = ModificationsSettings.make(only="aug")
    assert {each.family for each in modifications_of(only)} == {"softmax", *(f for f in FAMILIES if "aug" in f)}
    zeros = ModificationsSettings.make(alphas="0,.1", betas="0,.5", ks="1", only="reg,neg")
    assert [key(each) for each in modifications_of(zeros)] == [
        "softmax/softmax",
        "regularised/α=0.1",
        "negative/k=1 β=0.5",
    ]


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


def planted(shifts: dict[str, float], seeds: int = 6) -> dict[str, dict[str, list[float | None]]]:
    rng = np.random.default_rng(0)
    found: dict[str, dict[str, list[float | None]]] = {}
    for cell in ("regression, 1", "regression, 2"):
        base = 0.3 + 0.05 * rng.normal(size=seeds)  # seeds differ much more than models do
        found[cell] = {
            name: [float(base[s] + shift + 0.001 * rng.normal()) for s in range(seeds)]
            for name, shift in shifts.items()
        }
    return found


def test_planted_differences_are_found_and_only_those():
    found = compare(planted({"softmax/softmax": 0, "p/better": -0.02, "q/worse": 0.02, "r/same": 0}))
    for rows in found.values():
        assert {name: finding(row) for name, row in rows.items()} == {
            "p/better": "helps",
            "q/worse": "hurts",
            "r/same": "no difference",
        }
        assert rows["p/better"]["seeds_lower"] == 6


def test_holm_runs_over_all_cells():
    found = compare(planted({"softmax/softmax": 0, "p/a": -0.002, "q/b": 0.001, "r/c": 0.0005}))
    running = 0.0
    rows = sorted((row for rows in found.values() for row in rows.values()), key=lambda row: row["p"])
    for rank, row in enumerate(rows):
        running = max(running, min(1.0, row["p"] * (6 - rank)))
        assert row["p_holm"] == pytest.approx(running) and row["survives"] == (running < 0.05)


def test_a_diverged_model_is_not_tested():
    losses = planted({"softmax/softmax": 0, "p/lost": 0.1, "q/fine": -0.02})
    losses["regression, 1"]["p/lost"][2] = None
    found = compare(losses)["regression, 1"]
    assert found["p/lost"]["p_holm"] is None and finding(found["p/lost"]) == "diverged"
    assert finding(found["q/fine"]) == "helps"


# --------------------------------------------------------------------------------------------------------------- lab


def test_the_lab_and_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dualview.lab.harness._write_figures", lambda figures, folder: [])
    result = dualview.lab.modifications(**TINY, seed=3, out=tmp_path)
    assert result.results == dualview.lab.modifications(**TINY, seed=3).results  # bit for bit
    assert result.seeds == [3, 4] and not list(tmp_path.glob(".state-*"))
    read = LabResult.model_validate(json.loads((tmp_path / "modifications.json").read_text()))
    [table] = tables(read)
    assert len(table.rows) == 4 and table.columns[3:] == list(FAMILIES) and sentence(read) in table.note
    for cell, chosen in read.results["confirm"].items():
        assert [name.split("/")[0] for name in chosen] == ["softmax", *FAMILIES]
        assert set(chosen) <= set(read.results["search"][cell])
    assert set(figures(read)) == {"modifications"}


def test_finished_trainings_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run that fails in its last training resumes with the others done."""
    from dualview.lab.modifications import run as training

    small = {**TINY, "only": "regularised", "layers": (1,), "problems": ("regression",)}
    whole = dualview.lab.modifications(**small).results
    calls: list[str] = []
    real = training.train

    def failing(job, chosen, seeds, stage, problem, layers):
        calls.append(stage)
        if calls == ["search", "confirm"]:
            raise KeyboardInterrupt
        return real(job, chosen, seeds, stage, problem, layers)

    monkeypatch.setattr(training, "train", failing)
    with pytest.raises(KeyboardInterrupt):
        dualview.lab.modifications(**small, out=tmp_path)
    monkeypatch.setattr("dualview.lab.harness._write_figures", lambda figures, folder: [])
    assert dualview.lab.modifications(**small, out=tmp_path).results == whole
    assert calls == ["search", "confirm", "confirm"]


@pytest.mark.parametrize(
    ("given_", "named"),
    [
        ({"only": "negtive"}, "negtive"),
        ({"only": "regularised", "alphas": "0"}, "nothing to compare with softmax attention"),
        ({"only": "negative", "betas": "0"}, "nothing to compare with softmax attention"),
        ({"problems": "sums"}, "'sums'"),
        ({"layers": ()}, "nothing to train"),
        ({"alphas": "0.1,0.10"}, "--alphas: 0.1 is given twice"),
        ({"alphas": "inf"}, "--alphas: inf is not a finite number"),
        ({"seeds": 1}, "--seeds"),
        ({"ks": "0"}, "--ks"),
        ({"only": "negative", "ks": "1,100"}, "--ks: 100 tokens before the query are asked for"),
        ({"lr": 0}, "--lr"),
    ],
)
def test_mistakes(given_, named):
    with pytest.raises(UserError, match=named):
        dualview.lab.modifications(**{**TINY, **given_})


def test_a_diverged_training_is_reported_as_that():
    result = dualview.lab.modifications(
        **{**TINY, "only": "regularised", "alphas": "1e30", "layers": (1,), "problems": ("regression",)}
    )
    assert all(None in values for values in ([*losses.values()][1] for losses in result.results["confirm"].values()))
    assert "diverged in regression, 1 layer (α=1e+30)" in tables(result)[0].note
