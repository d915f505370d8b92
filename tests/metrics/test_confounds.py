"""What both settings share without being alike: the class's answer, a few directions, zero-shot's scores, rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dualview.analyses.certificate.plants import planted
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
