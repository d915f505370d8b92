"""What both settings share without being alike: the class's answer, a few directions, zero-shot's scores, rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dualview.analyses.certificate.plants import planted, same_queries
from dualview.metrics.floors.beyond import most_shared
from dualview.metrics.floors.nulls import output_blocks
from dualview.metrics.floors.rotations import crowding
from dualview.metrics.statistics import cosine_above_p
from dualview.metrics.verdict import judge
from dualview.models.head_span import off_span, off_span_and_shared
from dualview.records import Records

SIMILAR = ("representations", "labels")


def supported(found: list[Records]) -> dict[str, int]:
    """How many are supported at each level of similarity."""
    levels = [judge(each, draws=199).levels for each in found]
    return {name: sum(each[name].outcome == "supported" for each in levels) for name in SIMILAR}


def with_answers(seed: int, size: float = 2.0, **options: float) -> Records:
    """Planted records in which both settings write the same vector for each class, and flipped labels its negative."""
    records = planted(seed, predictions=0.9, n=90, classes=3, **options)  # pyright: ignore[reportArgumentType]
    answers = size * np.random.default_rng([seed, 7]).normal(size=(3, 3, 16))
    settings = dict(records.settings)
    for name in (name for name in records.settings if name != "zsl"):
        h = records[name].h
        assert h is not None
        settings[name] = replace(records[name], h=h + (-1 if "flipped" in name else 1) * answers[records.gold])
    return Records(records.gold, settings)


def test_writing_the_same_answer_for_a_class_is_not_similarity_of_queries() -> None:
    assert max(supported([with_answers(seed) for seed in range(20)]).values()) <= 2
    alike = [with_answers(seed, representations=0.6, labels=0.6) for seed in range(6)]
    assert min(supported(alike).values()) == 6


def test_blocks_hold_queries_of_one_class() -> None:
    gold = np.arange(150) % 4
    blocks = output_blocks(150, 0, gold)
    assert sorted(np.concatenate(blocks).tolist()) == list(range(150))
    assert all(np.unique(gold[block]).size == 1 for block in blocks)


def test_the_answer_of_a_class_goes_together_with_the_heads_span() -> None:
    """Taken out after the span, it would leave what lies outside each query's span: alike in both settings."""
    rng = np.random.default_rng(0)
    span, answer = torch.from_numpy(rng.normal(size=(40, 5, 24))), torch.from_numpy(rng.normal(size=(1, 1, 24)))
    shrunk = torch.einsum("sqv,qvd->sqd", torch.from_numpy(rng.normal(size=(2, 40, 5))), span)
    left = off_span_and_shared(shrunk + 100 * answer, span)
    assert left.norm() < 0.01 * off_span(100 * answer.expand(2, 40, 24), span).norm()


def in_few_directions(seed: int, alike: float = 0.0) -> Records:
    """Three kinds of queries, each moved its own way by either setting, and everything in 4 of 32 dimensions."""
    rng = np.random.default_rng([seed, 9])
    records = planted(seed, predictions=0.9, layers=1, d=32)
    n = records.gold.size
    kind, inside = rng.integers(3, size=n), np.linalg.qr(rng.normal(size=(32, 4)))[0].T
    settings, base = dict(records.settings), records["zsl"].h
    assert base is not None
    shared = [rng.normal(size=(n, 1, 4)) + 5 * rng.normal(size=(3, 1, 4))[kind] for _ in range(2)]
    for name in ("icl", "ft"):
        own = [rng.normal(size=(n, 1, 4)) + 5 * rng.normal(size=(3, 1, 4))[kind] for _ in range(2)]
        moved, taught = (alike * a + (1 - alike**2) ** 0.5 * b for a, b in zip(shared, own, strict=True))
        for suffix, sign in (("", 1), ("_flipped_labels", -1)):
            h = base + (moved + 0.5 * sign * taught) @ inside
            settings[name + suffix] = replace(records[name + suffix], h=h)
    return Records(records.gold, settings)


def test_chance_within_a_few_common_directions_is_not_supported() -> None:
    assert max(supported([in_few_directions(seed) for seed in range(40)]).values()) <= 3
    assert min(supported([in_few_directions(seed, alike=1.0) for seed in range(6)]).values()) == 6


def test_crowding_is_all_dimensions_over_those_written_in() -> None:
    rng = np.random.default_rng(0)
    free, few = rng.normal(size=(2, 1, 64, 1, 32)), rng.normal(size=(2, 1, 64, 1, 32)) * (np.arange(32) < 4)
    dims = np.full(64, 32)

    def of(both: np.ndarray) -> float:
        x, y = both / np.linalg.norm(both, axis=-1, keepdims=True)
        return float(crowding(x, y, dims)[0])

    assert of(free) == pytest.approx(1, abs=0.1) and of(few) == pytest.approx(8, rel=0.1)
    assert float(crowding(few[0], few[1], np.arange(64) % 2 + 31)[0]) == 1, "maps of several lengths"


@pytest.mark.parametrize("dimensions", [2, 3, 8])
def test_the_tail_of_a_cosine_is_that_of_random_directions(dimensions: int) -> None:
    drawn = np.random.default_rng(0).normal(size=(200_000, dimensions))
    cosines = drawn[:, 0] / np.linalg.norm(drawn, axis=1)
    for at in (-0.5, 0.3, 0.9):
        assert cosine_above_p(at, dimensions**-0.5) == pytest.approx(float((cosines > at).mean()), abs=0.005)


def test_the_tail_of_a_cosine_at_its_ends() -> None:
    assert cosine_above_p(1.0, 1.0) == 0.5, "in one dimension two directions agree half of the time"
    assert cosine_above_p(1.0, 0.7) < 1e-6
    assert cosine_above_p(0.0233, 0.01) == pytest.approx(0.0099, abs=1e-3), "many dimensions: the normal tail"


def by_label_mass(seed: int, classes: int) -> Records:
    """Both settings move a query by the same bent function of its zero-shot scores, which log-odds do not hold."""
    records, rng = planted(seed, n=160, classes=classes), np.random.default_rng([seed, 3])
    zsl = records["zsl"].log_probs + rng.normal(size=(160, 1))
    shift = zsl - records["zsl"].log_probs + 1.5 * np.tanh(2 * zsl)
    moved = {name: replace(s, log_probs=s.log_probs + shift) for name, s in records.settings.items() if name != "zsl"}
    return Records(records.gold, {"zsl": replace(records["zsl"], log_probs=zsl), **moved})


@pytest.mark.parametrize("classes", [2, 4])
def test_agreement_by_zero_shot_scores_alone_is_not_supported(classes: int) -> None:
    found = [judge(by_label_mass(seed, classes), draws=199).levels["predictions"] for seed in range(20)]
    assert sum(each.outcome == "supported" for each in found) <= 2


def test_what_rounding_leaves_of_zero_shot_is_no_direction_of_the_span() -> None:
    """Without a bias h_zsl is the sum of the heads' outputs, but for a rest that every machine rounds otherwise."""
    rng = np.random.default_rng(0)
    heads, h = torch.from_numpy(rng.normal(size=(30, 4, 12))), torch.from_numpy(rng.normal(size=(2, 30, 12)))
    rounded = [heads.sum(1) + 1e-7 * torch.from_numpy(rng.normal(size=(30, 12))) for _ in range(2)]
    first, second = (off_span_and_shared(h, torch.cat([heads, zsl[:, None]], 1)) for zsl in rounded)
    wanted = off_span_and_shared(h, heads)
    for found in (first, second):
        assert (found - wanted).norm() < 1e-3 * wanted.norm()


def with_hidden_number(seed: int, kinds: int, own: float = 1.0, **options: object) -> Records:
    """Both settings write a number of the query that nobody knows, or one of a few topics, next to a large mean."""
    records, rng = planted(seed, predictions=0.9, **options), np.random.default_rng([seed, 11])
    n, *rest = records["zsl"].h.shape  # pyright: ignore
    number = np.eye(kinds)[rng.integers(kinds, size=n)] if kinds > 1 else 1 + 0.5 * rng.normal(size=(n, 1))
    written, taught = (np.tensordot(number, side, 1) for side in rng.normal(size=(2, kinds, *rest)))
    settings = dict(records.settings)
    for name in ("icl", "ft"):
        mean, mean_taught = 3 * rng.normal(size=(2, *rest))
        for suffix, sign in (("", 0.5), ("_flipped_labels", -0.5)):
            h = records[name + suffix].h
            assert h is not None
            moved = own * (h - records["zsl"].h) + written + mean + sign * (taught + mean_taught)
            settings[name + suffix] = replace(records[name + suffix], h=records["zsl"].h + moved)
    return Records(records.gold, settings)


@pytest.mark.parametrize("d", [32, 256])
@pytest.mark.parametrize("kinds", [1, 3])
def test_a_hidden_number_of_the_query_is_not_similarity(kinds: int, d: int) -> None:
    """One that the strength along a large mean does not tell; also in more dimensions than there are queries."""
    found = [with_hidden_number(seed, kinds, d=d, n=160) for seed in range(10)]
    assert max(supported(found).values()) <= 2
    alike = [with_hidden_number(seed, kinds, d=d, n=160, representations=0.6, labels=0.6) for seed in range(3)]
    assert min(supported(alike).values()) == 3


def test_easy_queries_next_to_a_large_mean_are_not_supported() -> None:
    options = {"easy": 0.5, "d": 32, "shared": 3.0, "taught": 3.0}
    found = [judge(planted(seed, **options), draws=199) for seed in range(12)]
    assert not any(each.overall == "supported" for each in found)
    over = [judge(same_queries(seed, 3, kept=0.9, **options), draws=199) for seed in range(4)]
    assert not any(each.overall == "supported" for each in over)


@pytest.mark.parametrize("rank", [3, 6])
def test_identical_updates_of_low_rank_are_supported(rank: int) -> None:
    records, rng = planted(0, predictions=1.0, layers=2, d=32), np.random.default_rng(5)
    settings, z = dict(records.settings), records["zsl"].h
    assert z is not None
    moved, taught = (np.tensordot(rng.normal(size=(len(z), rank)), rng.normal(size=(rank, 2, 32)), 1) for _ in "ab")
    for name in ("icl", "ft"):
        for suffix, sign in (("", 0.5), ("_flipped_labels", -0.5)):
            settings[name + suffix] = replace(records[name + suffix], h=z + moved + sign * taught)
    assert supported([Records(records.gold, settings)]) == dict.fromkeys(SIMILAR, 1)


@pytest.mark.parametrize("d", [5, 40, 200])
def test_the_most_shared_directions_are_eigenvectors(d: int) -> None:
    """Of ½ (XᵀY + YᵀX) by dense matrices, whatever the number of dimensions; the same with torch."""
    x, y = np.random.default_rng(d).normal(size=(2, 3, 20, d))
    y = y - 2 * x * (np.arange(d) < 2)
    product = x.swapaxes(1, 2) @ y
    values, vectors = np.linalg.eigh((product + product.swapaxes(1, 2)) / 2)
    largest = np.argsort(abs(values), axis=1)[:, -2:]
    found = most_shared(x, y, 2)
    other = most_shared(torch.from_numpy(x), torch.from_numpy(y), 2)  # pyright: ignore
    for layer in range(3):
        wanted = vectors[layer][:, largest[layer]]
        for directions in (found[layer], np.asarray(other[layer])):
            np.testing.assert_allclose(directions.T @ directions, wanted @ wanted.T, atol=1e-8)


def test_there_are_no_more_shared_directions_than_there_is_to_share() -> None:
    one = np.random.default_rng(0).normal(size=(12, 1)) * np.eye(6)[0]
    found = most_shared(one, one, 2)
    np.testing.assert_allclose(abs(found), [np.zeros(6), np.eye(6)[0]], atol=1e-9)
    assert not most_shared(0 * one, 0 * one, 2).any()


def test_what_a_query_has_of_its_own_does_not_choose_what_is_removed() -> None:
    """Unrelated updates are left above 0 as often as below: the directions come from other queries."""
    left = [judge(planted(seed, d=16, n=100), draws=99).by_metric["sim_aou"].floors["rotated"].p for seed in range(80)]
    assert 0.3 < np.mean(np.array(left, dtype=float) < 0.5) < 0.7 and np.mean(np.array(left, dtype=float) < 0.05) < 0.15
