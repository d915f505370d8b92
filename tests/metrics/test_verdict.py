"""The verdict on planted records: never supported by chance, supported where the updates are the same, and so on."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from dualview.io.errors import UserError
from dualview.metrics.verdict import Verdict, judge
from dualview.records import Records


def scores(rng: np.random.Generator, gold: np.ndarray, right: np.ndarray) -> np.ndarray:
    chosen = np.where(right, gold, 1 - gold)
    return np.where(np.arange(2) == chosen[:, None], -0.3, -1.5) + 0.05 * rng.normal(size=(gold.size, 2))


def planted(
    seed: int,
    *,
    likeness: float = 0.0,
    n: int = 90,
    layers: int = 2,
    d: int = 16,
    common: float = 0.0,
    size: float = 1.0,
    features: int = 0,
    tied: bool = False,
    shrink: bool = False,
    able: bool = True,
    ragged: bool = True,
) -> Records:
    """Records whose ICL and FT updates have the cosine `likeness` and are independent beside it.

    `common`: each setting has its own mean direction, that many times a query's own part. `features`: a query's own
    part is made of that few features, the same for ICL and FT, read out in independent directions; `tied`, in the same
    ones in every layer and head. `shrink`: both settings forget half of the zero-shot vector. `able`: ICL and FT mend
    the same errors; else all settings guess.
    """
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, 2, n)
    zsl_right, mended = rng.random(n) < 0.5, rng.random(n) < 0.6
    right = [zsl_right, np.where(zsl_right, rng.random(n) < 0.97, mended)]
    right.append(np.where(zsl_right, rng.random(n) < 0.97, mended & (rng.random(n) < 0.85)))
    if not able:
        right = list(rng.random((3, n)) < 0.5)
    columns = rng.integers(5, 10, n) if ragged else np.full(n, 9)
    arrays: dict[str, list[np.ndarray]] = {}
    for name, shape in (("h", (layers, d)), ("m", (layers, 2, 9))):
        z, a, e = rng.normal(size=(3, n, *shape))
        if features:
            known = rng.normal(size=(n, features))
            read = [rng.normal(size=(features, *shape)) for _ in range(2)]
            read = [np.broadcast_to(side[..., :1, :], side.shape) for side in read] if tied else read
            read = [np.broadcast_to(side[:, :1], side.shape) for side in read] if tied else read
            a, e = (np.tensordot(known, side, 1) for side in read)
        b = likeness * a + (1 - likeness**2) ** 0.5 * e
        a, b = (size * (side + common * rng.normal(size=shape)) for side in (a, b))
        if shrink:
            a, b = a - z / 2, b - z / 2
        arrays[name] = [z, z + a, z + b]
    maps = [[stack[q, ..., : columns[q]] for q in range(n)] for stack in arrays["m"]]
    return Records.from_arrays(gold, *(scores(rng, gold, r) for r in right), h=arrays["h"], m=maps)


def verdicts(seeds: range, **options: object) -> Counter[str]:
    return Counter(judge(planted(seed, **options), draws=499).overall for seed in seeds)


INDEPENDENT = (
    {},
    {"common": 3.0},
    {"common": 1.0, "size": 10.0},
    {"features": 3},
    {"shrink": True},
    {"features": 2, "shrink": True, "layers": 4},
    {"features": 2, "tied": True, "layers": 8},
    {"features": 2, "common": 2.0, "shrink": True},
)


@pytest.mark.parametrize("options", INDEPENDENT, ids=str)
def test_independent_updates_are_never_called_supported(options: dict[str, object]) -> None:
    """25 seeds for each way of being independent; 5 % false would be allowed."""
    found = verdicts(range(25), **options)
    assert found["supported"] <= 1
    assert found["contradicted"] <= 3


def test_a_similarity_that_no_floor_can_test_is_not_taken_for_tested() -> None:
    """Maps of which no two are equally long cannot be compared between queries: a common pattern is no likeness."""
    rng = np.random.default_rng(0)
    base, n = planted(0, n=90), 90
    columns = rng.permutation(np.arange(5, 5 + n))
    pattern = 2 * rng.normal(size=(2, 2, 5 + n))
    zsl = [rng.normal(size=(2, 2, c)) for c in columns]
    moved = [[z + pattern[..., : z.shape[-1]] + rng.normal(size=z.shape) for z in zsl] for _ in range(2)]
    logs = (base[name].log_probs for name in ("zsl", "icl", "ft"))
    found = judge(Records.from_arrays(base.gold, *logs, m=[zsl, *moved]))
    assert found.overall == "indistinguishable" and "could not be tested" in found.sentence
    assert [c.passed for c in found.conditions if c.metric == "sim_am"] == [None]


@pytest.mark.parametrize("wrong", [{"draws": 0}, {"level": 2}, {"level": 0}, {"seed": -1}, {"alpha": 0}])
def test_arguments_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match="judge takes"):
        judge(planted(0, n=20), **wrong)


@pytest.mark.parametrize(
    "options", [{"likeness": 0.6}, {"likeness": 0.4, "size": 8.0}, {"likeness": 0.6, "ragged": False}]
)
def test_the_same_updates_plus_noise_are_supported(options: dict[str, object]) -> None:
    assert verdicts(range(12), n=150, **options)["supported"] >= 11


def test_reversed_updates_are_contradicted() -> None:
    assert verdicts(range(10), likeness=-0.5) == {"contradicted": 10}


def test_a_model_that_cannot_learn_is_not_supported() -> None:
    assert verdicts(range(15), likeness=0.8, able=False)["supported"] == 0


@pytest.mark.parametrize("others", [0, 1, 3])
def test_one_answer_to_all_queries_is_not_learning(others: int) -> None:
    """Zero-shot prefers a rare label, both others the most frequent, but for some queries whose label they know."""
    like = planted(1, likeness=0.9, n=200)
    gold = np.repeat([0, 1, 2], [40, 100, 60])
    said = [np.full(200, 0), *(np.full(200, 1) for _ in range(2))]
    for answers in said[1:]:
        answers[140 : 140 + others] = 2
    kept = {kind: [getattr(like[name], kind) for name in ("zsl", "icl", "ft")] for kind in ("h", "m")}

    def judged(gold: np.ndarray) -> Verdict:
        return judge(Records.from_arrays(gold, *said, **kept, columns=like.columns), draws=499)

    found = judged(gold)
    assert found.overall == "indistinguishable"
    assert [condition.passed for condition in found.conditions] == [False, False, True, True, True]
    assert found.sentence.count("but does not reliably beat one answer to all queries") == 2
    assert [condition.passed for condition in judged(np.full(200, 1)).conditions][:2] == [
        True,
        True,
    ]  # it is the answer


def test_a_shared_direction_alone_is_not_enough() -> None:
    """Every query gets the same ICL and the same FT update plus noise: likeness, but of the task and not the query."""
    records = planted(0, n=150)
    rng = np.random.default_rng(1)
    h = [records[name].h.copy() for name in ("zsl", "icl", "ft")]
    shared = 4 * rng.normal(size=h[0].shape[1:])
    h[1], h[2] = (h[0] + shared + rng.normal(size=h[0].shape) for _ in range(2))
    logs = (records[name].log_probs for name in ("zsl", "icl", "ft"))
    found = judge(Records.from_arrays(records.gold, *logs, h=h))
    assert found.by_metric["sim_aou"].value > 0.8
    assert found.overall == "indistinguishable" and "shuffled_query" in found.sentence


def test_one_failing_condition_is_named() -> None:
    good = planted(0, likeness=0.6, n=150)
    assert judge(good).overall == "supported"
    guess = np.random.default_rng(0).normal(size=good["ft"].log_probs.shape)
    logs = {"zsl": good["zsl"].log_probs, "icl": good["icl"].log_probs, "ft": guess}
    h, m = ({name: getattr(good[name], what) for name in logs} for what in ("h", "m"))
    bad = judge(Records.from_arrays(good.gold, **logs, h=h, m=m, columns=good.columns))
    assert bad.overall == "indistinguishable"
    assert "FT does not reliably beat zero-shot" in bad.sentence and "raw SimAOU" not in bad.sentence
    failed = {condition.metric for condition in bad.conditions if condition.passed is False}
    assert "accuracy_ft" in failed and "sim_aou" not in failed


def test_a_control_that_does_as_well_takes_the_support_away() -> None:
    good = planted(0, likeness=0.6, n=150)
    rng = np.random.default_rng(1)
    h, m = (good["icl"].h + 0.05 * rng.normal(size=good["icl"].h.shape), good["icl"].m)
    control = {"log_probs": good["icl"].log_probs, "h": h, "m": m}
    with_control = Records(good.gold, {**good.settings, "icl_random_labels": as_setting(control)}, good.columns)
    found = judge(with_control)
    assert found.overall == "indistinguishable" and "icl_random_labels" in found.sentence
    ceiling = Records(good.gold, {**good.settings, "icl_reordered": as_setting(control)}, good.columns)
    found = judge(ceiling)
    assert found.overall == "supported"
    assert 0 < found.by_metric["sim_aou"].position < 1


def as_setting(fields: dict[str, np.ndarray]) -> object:
    from dualview.records import Setting

    return Setting(**fields)


def test_what_was_not_recorded_is_not_tested() -> None:
    good = planted(0, likeness=0.6, n=150)
    logs = [good[name].log_probs for name in ("zsl", "icl", "ft")]
    only_h = judge(Records.from_arrays(good.gold, *logs, h=[good[name].h for name in ("zsl", "icl", "ft")]))
    assert only_h.overall == "supported" and "SimAM-delta was not recorded" in only_h.sentence
    nothing = judge(Records.from_arrays(good.gold, *logs))
    assert nothing.overall == "indistinguishable"


def test_no_change_at_all_is_indistinguishable() -> None:
    good = planted(0, n=20)
    same = [good["zsl"].h] * 3
    found = judge(Records.from_arrays(good.gold, *([good["zsl"].log_probs] * 3), h=same))
    assert found.overall == "indistinguishable"
    assert "raw SimAOU is undefined" in found.sentence and "Rec2FTP is undefined" in found.sentence
    single = judge(Records.from_arrays([0], [[0.0, -1.0]], [[0.0, -1.0]], [[0.0, -1.0]], h=[np.ones((1, 1, 3))] * 3))
    assert single.overall == "indistinguishable"


def test_a_zero_shot_vector_of_zero_is_no_obstacle() -> None:
    good = planted(0, likeness=0.6, n=150)
    logs = [good[name].log_probs for name in ("zsl", "icl", "ft")]
    h = [good[name].h - good["zsl"].h for name in ("zsl", "icl", "ft")]
    assert judge(Records.from_arrays(good.gold, *logs, h=h)).overall == "supported"


def test_identical_calls_give_identical_verdicts_and_plain_json() -> None:
    records = planted(3, likeness=0.4)
    first, second = judge(records, seed=7), judge(records, seed=7)
    assert isinstance(first, Verdict)
    as_text = [json.dumps([v.to_json(), v.controls_json()], allow_nan=False) for v in (first, second)]
    assert as_text[0] == as_text[1]
    verdict, controls = json.loads(as_text[0])
    assert verdict.keys() >= {"overall", "sentence", "by_metric"}
    for metric in ("rec2ftp", "sim_aou", "sim_am"):
        assert controls[metric].keys() >= {"ci", "floors", "ceiling", "p"}
        assert verdict["by_metric"][metric].keys() >= {"value", "ci", "floor", "ceiling", "p", "position"}
    assert judge(records, seed=8).by_metric["sim_aou"].ci != first.by_metric["sim_aou"].ci


def test_mappings_are_judged_and_nonsense_is_refused() -> None:
    records = planted(0, likeness=0.6, n=150)
    mapping: dict[str, object] = {"gold": records.gold, "columns": records.columns}
    for name in ("zsl", "icl", "ft"):
        mapping[name] = {"log_probs": records[name].log_probs, "h": records[name].h, "m": records[name].m}
    assert judge(mapping).sentence == judge(records).sentence
    with pytest.raises(UserError, match="gold is missing"):
        judge({})
