"""The verdict on planted records: no by chance, yes where it is so, and "not testable" where nothing can be told."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dualview.analyses.certificate.plants import INDEPENDENT, planted, same_queries
from dualview.io.errors import UserError
from dualview.metrics.agreement import centred_log_odds
from dualview.metrics.floors.controls import FloorResult, MetricControls
from dualview.metrics.levels import NEEDED, Level, similarity_level
from dualview.metrics.statistics import Interval
from dualview.metrics.verdict import LEVELS, Verdict, judge, over_draws, overall_of
from dualview.records import Records, Setting

ALL = {"predictions": 0.7, "representations": 0.6, "labels": 0.6}


def verdicts(seeds: range, **options: object) -> Counter[str]:
    return Counter(judge(planted(seed, **options), draws=499).overall for seed in seeds)


def outcomes(records: object) -> dict[str, str]:
    return {name: level.outcome for name, level in judge(records, draws=499).levels.items()}


@pytest.mark.parametrize("options", INDEPENDENT.values(), ids=INDEPENDENT)
def test_independent_updates_are_never_called_supported(options: dict[str, object]) -> None:
    """25 seeds for each way of being independent; every level says yes at most about as often as its p allows."""
    found = [judge(planted(seed, **options), draws=499) for seed in range(25)]
    assert not any(each.overall == "supported" for each in found)
    assert sum(each.overall == "contradicted" for each in found) <= 3
    # Queries that are easier for both do move alike, and so do those that both read by the same features: predictions
    # are right to say so.
    agree = "easy" in options or "scored" in options
    for level in ("predictions", "representations", "labels")[agree:]:
        assert sum(each.levels[level].outcome == "supported" for each in found) <= 2, level


@pytest.mark.parametrize("options", [{}, {"common": 2.0, "shrink": True}, {"classes": 4}, {"layers": 1}], ids=str)
def test_the_same_updates_plus_noise_are_supported(options: dict[str, object]) -> None:
    assert verdicts(range(12), **{**ALL, "n": 160, **options})["supported"] >= 11


@pytest.mark.parametrize("sharp", [1.0, 30.0])
@pytest.mark.parametrize("layers", [1, 4])
def test_identical_updates_are_supported_at_any_accuracy(sharp: float, layers: int) -> None:
    same = {"predictions": 1.0, "representations": 1.0, "labels": 1.0}
    records = planted(0, **same, sharp=sharp, layers=layers)
    found = judge(records)
    assert found.overall == "supported", found.sentence
    if sharp > 1:
        right = records["icl"].log_probs.argmax(1) == records.gold
        assert right.all() and (found.by_metric["rec2ftp"].p or 0) > 0.5, "Rec2FTP has no power here"


@pytest.mark.parametrize(
    ("missing", "options"),
    [
        ("predictions", {"predictions": 0.0}),
        ("representations", {"representations": 0.0, "labels": 0.0}),  # what labels teach is a part of the update
        ("labels", {"labels": 0.0}),
    ],
)
def test_what_is_missing_makes_it_partial_and_is_named(missing: str, options: dict[str, float]) -> None:
    found = judge(planted(3, **{**ALL, **options}, n=160))
    assert found.overall == "partial" and found.levels[missing].outcome == "not supported"
    assert found.levels[missing].clause in found.sentence and found.sentence.startswith("Partly supported")


def test_without_learning_nothing_else_is_testable_but_draws_are_judged_together_all_the_same() -> None:
    unable = judge(planted(0, **ALL, able=False, n=160), draws=199)
    others = [level for name, level in unable.levels.items() if name != "learning"]
    assert unable.overall == "not testable" and all(level.outcome == "not testable" for level in others)
    found = unable.levels["representations"]
    assert found.by_itself == "supported" and found.clause == unable.levels["learning"].clause
    assert found.value is not None and found.value > 0.3, "the number stays"
    weak = [judge(planted(seed, **ALL, sharp=0.5, n=40), draws=199) for seed in range(8)]
    assert sum(each.overall == "not testable" for each in weak) >= 2
    assert over_draws([each.levels for each in weak]).levels["representations"].outcome == "supported"


def test_queries_of_one_label_tell_nothing() -> None:
    records = planted(0, **ALL, n=160)
    own = records.gold == 1
    settings = {name: Setting(s.log_probs[own], s.h[own]) for name, s in records.settings.items()}  # pyright: ignore
    found = judge(Records(records.gold[own], settings))
    assert found.overall == "not testable" and "same label" in found.sentence


def test_reversed_updates_are_contradicted() -> None:
    assert verdicts(range(8), predictions=0.5, representations=-0.5) == {"contradicted": 8}
    assert verdicts(range(4), **{**ALL, "predictions": -0.8}) == {"contradicted": 4}


def test_where_nothing_is_learnt_nothing_is_tested() -> None:
    found = judge(planted(0, **ALL, able=False))
    assert found.overall == "not testable" and "does not reliably beat zero-shot" in found.sentence


def test_one_answer_to_all_queries_is_not_learning() -> None:
    """Zero-shot prefers a rare label, both others the most frequent one."""
    like = planted(1, **ALL, n=200)
    gold = np.repeat([0, 1], [60, 140])
    one = [np.tile(row, (200, 1)) for row in ([0.0, -3.0], [-3.0, 0.0], [-3.0, 0.0])]
    h = [like[name].h for name in ("zsl", "icl", "ft")]
    found = judge(Records.from_arrays(gold, *one, h=h))
    assert found.overall == "not testable" and "best single answer" in found.sentence


def test_labels_that_change_no_answer_test_nothing() -> None:
    found = judge(planted(0, **ALL, flips=False))
    assert found.levels["labels"].outcome == "not testable" and found.overall == "partial"
    assert "flipping the labels does not change" in found.sentence
    good = planted(0, **ALL)
    without = Records(good.gold, {name: good[name] for name in ("zsl", "icl", "ft")})
    assert judge(without).levels["labels"].clause == "flipped labels were not run"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_few_queries_are_not_testable(n: int) -> None:
    found = judge(planted(0, predictions=1.0, representations=1.0, labels=1.0, n=n))
    assert found.overall == "not testable"
    assert all(found.levels[name].outcome == "not testable" for name in LEVELS[1:])


def test_one_label_missing_is_judged() -> None:
    good = planted(0, **ALL, n=160, classes=3)
    keep = np.flatnonzero(good.gold < 2)
    some = {name: Setting(s.log_probs[keep], s.h[keep]) for name, s in good.settings.items()}
    assert judge(Records(good.gold[keep], some)).levels["predictions"].outcome == "supported"


def test_a_shared_direction_alone_is_not_enough() -> None:
    """Every query gets the same ICL and the same FT update plus noise: similar, but by the task, not by the query."""
    records, rng = planted(0, n=150), np.random.default_rng(1)
    z = records["zsl"].h
    shared = 4 * rng.normal(size=z.shape[1:])
    moved = {name: z + shared + rng.normal(size=z.shape) for name in ("icl", "ft")}
    settings = {name: replace(s, h=moved.get(name, s.h)) for name, s in records.settings.items()}
    found = judge(Records(records.gold, settings))
    assert found.by_metric["sim_aou"].value > 0.8
    assert found.levels["representations"].outcome == "not supported"


def with_control(records: Records, name: str, alike: float, draws: int) -> Records:
    """With a control in ICL's place whose updates have the cosine `alike` with FT's."""
    rng = np.random.default_rng(9)
    z, b = records["zsl"].h, records["ft"].h - records["zsl"].h
    more = {}
    for number in range(draws):
        own = rng.normal(size=b.shape) * np.linalg.norm(b) / b.size**0.5
        control = z + (alike + 0.02 * rng.normal()) * b + (1 - alike**2) ** 0.5 * own
        more[name if number == 0 else f"{name}@{number + 1}"] = replace(records["icl"], h=control)
    return Records(records.gold, {**records.settings, **more})


def test_a_control_decides_by_its_draws() -> None:
    good = planted(0, **ALL, n=160)
    for draws in (1, 5):
        found = judge(with_control(good, "icl_random_labels", 0.9, draws)).levels["representations"]
        assert (found.outcome, found.decided_by) == ("not supported", "icl_random_labels")
        assert (found.p is None) == (draws == 1), "one draw has no spread"
    low = judge(with_control(good, "icl_random_labels", 0.1, 5))
    assert low.overall == "supported"
    assert len(low.by_metric["sim_aou"].floors["icl_random_labels"].draws) == 5
    ceiling = judge(with_control(good, "icl_other_demos", 0.9, 1))
    assert ceiling.overall == "supported", "a ceiling is nothing to exceed"


def test_what_could_have_been_found_is_said() -> None:
    small, large = (judge(planted(0, n=n)) for n in (40, 400))
    for level in ("predictions", "representations", "labels"):
        few, many = small.levels[level].detectable, large.levels[level].detectable
        assert few is not None and many is not None and 0 < many < few


def test_over_draws_the_draw_is_the_unit() -> None:
    found = judge([planted(seed, **ALL) for seed in range(5)], draws=499)
    assert found.overall == "supported" and found.unit == "5 draws" and "over 5 draws" in found.sentence
    unrelated = judge([planted(seed) for seed in range(5)], draws=499)
    assert unrelated.overall in ("not supported", "partial")
    one = judge(planted(0, **ALL), draws=499)
    assert one.unit == "run" and "for this list of demonstrations" in one.sentence
    assert judge([planted(0, **ALL)], draws=499).sentence == one.sentence


def test_identical_updates_are_supported_over_draws_as_well() -> None:
    """Agreement is then exactly 1 in every draw, without a spread."""
    same = {"predictions": 1.0, "representations": 1.0, "labels": 1.0}
    for draws in (2, 3, 8):
        found = judge([planted(seed, **same) for seed in range(draws)], draws=199)
        assert found.overall == "supported", found.sentence


def test_short_updates_about_a_large_mean_do_not_hide_identical_ones() -> None:
    """What is beyond the mean is many times the update of a query that hardly moves, more so in one draw."""
    draws: list[Records] = []
    for seed, least in enumerate((0.3, 0.02, 0.003)):
        known = planted(seed, predictions=1.0, representations=1.0, labels=1.0, n=60, common=0.0, layers=1)
        z, base = known["zsl"].h, known["icl"].h
        assert z is not None and base is not None
        shift = base[0] - z[0]  # the mean update is such that the first query's own is next to nothing
        settings = dict(known.settings)
        for name in settings.keys() - {"zsl"}:
            h = settings[name].h
            settings[name] = replace(settings[name], h=h - (1 - least) * shift)
        draws.append(Records(known.gold, settings))
    each = [judge(one, draws=199).levels["representations"] for one in draws]
    assert all(-1 <= level.floors[name] <= 1 for level in each for name in ("mean_direction", "rotated"))
    assert judge(draws, draws=199).levels["representations"].outcome == "supported"


def test_draws_that_differ_in_sign_support_nothing() -> None:
    mixed = [planted(seed, predictions=0.5, representations=0.4 if seed % 2 else -0.4) for seed in range(8)]
    assert judge(mixed, draws=499).levels["representations"].outcome == "not supported"


def test_over_draws_unrelated_ones_are_rarely_supported() -> None:
    supported = 0
    for start in range(0, 100, 4):
        found = judge([planted(1000 + start + i, features=2, n=60) for i in range(4)], draws=199)
        supported += found.overall == "supported"
    assert supported == 0


def test_what_chance_gives_the_same_queries_in_every_draw_is_not_supported() -> None:
    """The draws agree with one another, since the model moves each query its own way; the queries still are a sample.

    Their own chance lets a level say yes in up to one case of twenty; the draws alone would in one of three.
    """
    found = [judge(same_queries(seed, 4, kept=0.95, n=60, layers=2), draws=199) for seed in range(12)]
    said = Counter(
        each.levels[level].outcome for each in found for level in ("predictions", "representations", "labels")
    )
    assert said["supported"] + said["contradicted"] <= 6 and said.total() == 36
    assert not any(each.overall == "supported" for each in found)
    decided = [
        each.levels["representations"] for each in found if each.levels["representations"].decided_by == "queries"
    ]
    assert decided and all("chance in these queries" in level.clause for level in decided)


def test_similar_updates_of_the_same_queries_are_supported() -> None:
    for seed in range(3):
        found = judge(same_queries(seed, 3, kept=0.9, **ALL), draws=199)
        assert found.overall == "supported", found.sentence


def test_nothing_learnt_is_not_testable_over_draws_of_the_same_queries() -> None:
    found = [judge(same_queries(seed, 3, kept=0.95, able=False, n=60, layers=1), draws=99) for seed in range(8)]
    assert {each.overall for each in found} == {"not testable"}


def test_results_without_p_values_over_queries_are_judged_by_their_draws() -> None:
    """As results of the second edition's first versions are."""
    draws = [judge(planted(seed, **ALL), draws=199).levels for seed in range(3)]
    older = [{name: replace(level, query_p=None, below_p=None) for name, level in each.items()} for each in draws]
    assert over_draws(older).overall == "supported"


def test_agreement_by_length_alone_is_not_supported() -> None:
    """Long queries move further in both settings: that is agreement, and none of it is beyond their length."""
    for seed in range(5):
        known = planted(seed, length=1.0)
        level = judge(known, draws=499).levels["predictions"]
        assert (level.outcome, level.decided_by) == ("not supported", "length")
        assert level.p is not None and level.p >= 0.01 and level.query_p == level.p
        unknown = judge(Records(known.gold, known.settings), draws=499).levels["predictions"]
        assert unknown.outcome == "supported", "lengths that are not recorded cannot be told"
    assert judge(planted(0, **ALL, length=1.0), draws=499).overall == "supported"


def bent(seed: int, opposite: bool = False, **options: float) -> Records:
    """Both settings shrink the zero-shot log-odds by a bend, more so in one class (FT in the other, if `opposite`)."""
    records = planted(seed, n=160, **options)
    zsl = 2 * centred_log_odds(records["zsl"].log_probs)
    settings = {name: replace(each, log_probs=each.log_probs + zsl / 2) for name, each in records.settings.items()}
    for name in ("icl", "ft"):
        strong = records.gold == int(opposite and name == "ft")
        shrunk = np.where(strong[:, None], 1.5, 0.5) * np.tanh(zsl)
        settings[name] = replace(settings[name], log_probs=settings[name].log_probs - shrunk)
    return Records(records.gold, settings)


def test_agreement_by_zero_shot_alone_is_not_supported() -> None:
    """A straight line in the zero-shot log-odds, the same for all classes, leaves what both bend alike."""
    found = [judge(bent(seed), draws=499).levels["predictions"] for seed in range(10)]
    assert sum(level.outcome == "supported" for level in found) <= 1
    assert sum(level.decided_by == "zero-shot" and "log-odds explain" in level.clause for level in found) >= 8
    against = [judge(bent(seed, opposite=True), draws=499).levels["predictions"] for seed in range(10)]
    assert sum(level.outcome == "contradicted" for level in against) <= 1
    assert judge(bent(0, **ALL), draws=499).levels["predictions"].outcome == "supported"


def test_what_zero_shot_explains_without_a_rest_is_not_supported() -> None:
    rng, gold = np.random.default_rng(0), np.arange(160) % 2
    zsl = rng.normal(size=(160, 2))
    # Each class is shrunk by a factor of its own, to the last digit.
    icl, ft = (zsl * (1 - np.array(by)[gold])[:, None] for by in ((0.2, 0.7), (0.3, 0.6)))
    records = {"gold": gold, "zsl": {"log_probs": zsl}, "icl": {"log_probs": icl}, "ft": {"log_probs": ft}}
    level = judge(records, draws=499).levels["predictions"]
    assert (level.by_itself, level.decided_by, level.p) == ("not supported", "zero-shot", 1.0)


def test_over_draws_agreement_is_compared_with_zero() -> None:
    """All its tests have the floor 0: none of them is what the agreement does not exceed."""
    for options in ({}, ALL):
        found = judge([planted(seed, **options, length=1.0) for seed in range(3)], draws=199)
        level = found.levels["predictions"]
        assert set(level.floors) > {"length", "permuted"} and level.decided_by in ("permuted", "queries")
        assert "above 0 (" in level.clause or "chance in these queries" in level.clause


def test_answers_without_scores_are_said_to_be_so() -> None:
    good = planted(0, **ALL)
    answers = {name: each.log_probs.argmax(1) for name, each in good.settings.items()}
    level = judge({"gold": good.gold, **answers}, draws=199).levels["predictions"]
    assert level.outcome == "not testable"
    assert level.clause == "agreement is undefined: only the answers are known, not the candidates' scores"


@pytest.mark.parametrize("floor", ["rotated", "untrained"])
def test_a_value_at_a_floor_is_not_above_it_whatever_its_test_says(floor: str) -> None:
    floors = {name: FloorResult(0.1, 0.001) for name in NEEDED} | {floor: FloorResult(0.942, 1e-9)}
    metric = MetricControls("sim_aou", 0.935, Interval(0.9, 0.95, 0.95), floors)
    level = similarity_level(metric, 0.01)
    assert (level.outcome, level.decided_by, level.p) == ("not supported", floor, None)
    assert "not above its floor" in level.clause
    fine = similarity_level(replace(metric, floors=floors | {floor: FloorResult(0.5, 1e-9)}), 0.01)
    assert fine.outcome == "supported"


@pytest.mark.parametrize("wrong", [{"draws": 0}, {"level": 2}, {"level": 0}, {"seed": -1}, {"alpha": 0}])
def test_arguments_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match="judge takes"):
        judge(planted(0, n=20), **wrong)


def test_an_empty_list_and_nonsense_are_refused() -> None:
    with pytest.raises(UserError, match="empty list"):
        judge([])
    with pytest.raises(UserError, match="gold is missing"):
        judge({})


def test_no_change_at_all_is_not_testable() -> None:
    good = planted(0, n=20)
    found = judge(Records.from_arrays(good.gold, *([good["zsl"].log_probs] * 3), h=[good["zsl"].h] * 3))
    assert found.overall == "not testable"
    assert found.levels["representations"].outcome == "not testable"
    assert found.levels["representations"].clause == "raw SimAOU is undefined for every query"
    single = judge(Records.from_arrays([0], [[0.0, -1.0]], [[0.0, -1.0]], [[0.0, -1.0]], h=[np.ones((1, 1, 3))] * 3))
    assert single.overall == "not testable"


def test_a_zero_shot_vector_of_zero_is_no_obstacle() -> None:
    good = planted(0, **ALL, n=160)
    moved = {name: replace(s, h=s.h - good["zsl"].h) for name, s in good.settings.items()}
    assert outcomes(Records(good.gold, moved))["representations"] == "supported"


def test_attention_is_reported_and_decides_nothing() -> None:
    found = judge(planted(0, **ALL, maps=True, n=160))
    assert found.levels["attention"].outcome == "supported" and found.overall == "supported"
    without = judge(planted(0, **ALL, n=160))
    assert without.levels["attention"].outcome == "not testable" and without.overall == "supported"


def test_identical_calls_give_identical_verdicts_and_plain_json() -> None:
    records = planted(3, **ALL, maps=True)
    first, second = judge(records, seed=7), judge(records, seed=7)
    assert isinstance(first, Verdict)
    as_text = [json.dumps([v.to_json(), v.controls_json()], allow_nan=False) for v in (first, second)]
    assert as_text[0] == as_text[1]
    verdict, controls = json.loads(as_text[0])
    assert verdict.keys() >= {"overall", "sentence", "unit", "levels", "by_metric"}
    wanted = {"outcome", "value", "interval", "floor", "decided_by", "p", "detectable"}
    assert set(verdict["levels"]) == set(LEVELS)
    assert all(level.keys() >= wanted for level in verdict["levels"].values())
    for metric in ("rec2ftp", "sim_aou", "sim_am", "agreement", "label_contrast"):
        assert controls[metric].keys() >= {"ci", "floors", "ceiling", "p"}
        assert verdict["by_metric"][metric].keys() >= {"value", "ci", "floor", "ceiling", "p", "position"}
    assert judge(records, seed=8).by_metric["sim_aou"].ci != first.by_metric["sim_aou"].ci


def test_opposite_updates_are_contradicted_and_unrelated_ones_are_not() -> None:
    against = judge(planted(0, predictions=0.9, representations=-0.6, labels=0.6), draws=199)
    assert against.levels["representations"].outcome == "contradicted"
    found = [judge(planted(seed, features=3), draws=199) for seed in range(25)]
    assert (
        sum(each.levels[name].outcome == "contradicted" for each in found for name in ("representations", "labels"))
        <= 2
    )


def test_broken_zero_shot_scores_are_refused_and_broken_queries_are_counted() -> None:
    records = planted(0, predictions=0.9, representations=0.6, labels=0.6)
    scores = records["zsl"].log_probs.copy()
    scores[3] = np.nan
    broken = {**records.settings, "zsl": replace(records["zsl"], log_probs=scores)}
    with pytest.raises(UserError, match="zero-shot scores"):
        judge(replace(records, settings=broken))
    h = records["ft"].h
    assert h is not None
    h = h.copy()
    h[:30] = np.nan
    found = judge(replace(records, settings={**records.settings, "ft": replace(records["ft"], h=h)}), draws=199)
    assert "30 of 120 queries are not finite" in found.sentence and "30 of 120" in found.levels["labels"].clause


def test_draws_that_are_each_supported_are_supported_together_whatever_their_floors() -> None:
    draws = [
        {name: Level("supported", "", 1.0, floors={"rotated": floor}, p=0.002, query_p=0.002) for name in LEVELS}
        for floor in (0.05, 0.9)
    ]
    assert over_draws(draws).overall == "supported"
    draws[1]["labels"] = replace(draws[1]["labels"], outcome="not supported", p=0.2)
    assert over_draws(draws).levels["labels"].outcome == "not supported"


def test_what_was_not_tried_is_said() -> None:
    same = planted(0, predictions=1.0, representations=1.0, labels=1.0, n=160)
    plain = judge(same, draws=499)
    assert plain.overall == "supported"
    assert "not tried: random labels, another task's demonstrations, untrained weights (--controls f" in plain.sentence
    assert plain.sentence.endswith("not tried: heads that both settings shrink (without off_span in the records).")
    unrelated = {"ft_random_labels": planted(1, n=160)["ft"], "icl_other_task": planted(2, n=160)["icl"]}
    more = judge(Records(same.gold, {**same.settings, **unrelated}), draws=499)
    assert more.overall == "supported" and "not tried: untrained weights (--controls full)" in more.sentence
    h = same["zsl"].h
    assert h is not None
    off = {name: replace(same[name], off_span=same[name].h - h) for name in ("icl", "ft")}
    assert "heads" not in judge(Records(same.gold, {**same.settings, **off}), draws=499).sentence


def test_over_draws_half_of_them_must_be_testable() -> None:
    good = [judge(planted(seed, **ALL), draws=499).levels for seed in range(4)]
    blind = [{**each, "labels": Level("not testable", "nothing flips")} for each in good]
    half = over_draws([*good[:2], *blind[2:]])
    assert half.levels["labels"].outcome == "supported" and "2 of 4 draws" in half.levels["labels"].clause
    few = over_draws([*good[:2], *blind[2:], *blind[2:]])
    assert few.levels["labels"].outcome == "not testable" and few.overall == "partial"


def test_predictions_alone_contradict_only_where_nothing_else_was_tested() -> None:
    against = Level("contradicted", "against each other")
    nothing, unknown = Level("not supported", "no more than its floor"), Level("not testable", "not recorded")
    yes = Level("supported", "yes")

    def overall(representations: Level, labels: Level) -> str:
        levels = {"learning": yes, "predictions": against, "representations": representations, "labels": labels}
        return overall_of({**levels, "attention": unknown})

    assert overall(nothing, nothing) == overall(nothing, unknown) == "not supported"
    assert overall(unknown, unknown) == overall(yes, yes) == overall(yes, nothing) == "contradicted"
    assert overall(against, nothing) == "contradicted"
