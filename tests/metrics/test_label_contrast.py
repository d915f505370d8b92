"""The label contrast against a slow one, and on data where only labels, or everything but labels, is shared."""

from __future__ import annotations

import numpy as np
import pytest

from dualview.analyses.certificate.plants import planted
from dualview.metrics.cosine import overall_mean
from dualview.metrics.floors.nulls import contrast_floors
from dualview.metrics.label_contrast import label_contrast, specific_contrast
from dualview.metrics.summary import compute_metrics
from dualview.records import Records

NAMES = ("zsl", "icl", "icl_flipped_labels", "ft", "ft_flipped_labels")


def arrays(records: Records) -> list[np.ndarray]:
    return [np.asarray(records[name].h) for name in NAMES]


def test_against_a_slow_one() -> None:
    sides = arrays(planted(0, labels=0.5, n=12))
    found = label_contrast(*sides)
    _, icl, icl_flipped, ft, ft_flipped = sides
    for query in range(12):
        for layer in range(icl.shape[1]):
            a, b = (icl - icl_flipped)[query, layer], (ft - ft_flipped)[query, layer]
            assert found[query, layer] == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), abs=1e-12)


def test_it_sees_labels_and_nothing_else() -> None:
    """Updates that are the same but for what labels teach, and the other way round."""
    apart = overall_mean(label_contrast(*arrays(planted(1, representations=1.0, labels=0.0, common=3.0))))
    alike = overall_mean(label_contrast(*arrays(planted(1, representations=0.0, labels=1.0, shrink=True))))
    assert abs(apart) < 0.05 and alike == pytest.approx(1)


def test_labels_that_change_nothing_have_no_contrast() -> None:
    z, icl, _, ft, ft_flipped = arrays(planted(0, n=6))
    assert np.isnan(label_contrast(z, icl, icl + 1e-6, ft, ft_flipped)).all()


def test_its_floors_are_those_of_the_contrast() -> None:
    records = planted(2, labels=0.6)
    found = contrast_floors(records)
    assert found is not None
    assert np.allclose(found.value, label_contrast(*arrays(records)), atol=1e-9)
    assert found.tests["shuffled_query"].p is not None and found.tests["shuffled_query"].p < 0.01
    bare = Records(records.gold, {name: records[name] for name in ("zsl", "icl", "ft")})
    assert contrast_floors(bare) is None


def test_the_specific_contrast_against_a_slow_one() -> None:
    sides = arrays(planted(3, labels=0.5, n=9))
    z, icl, icl_flipped, ft, ft_flipped = sides
    sizes = np.sqrt((z**2).sum(-1).mean(0))[:, None]
    x, y = (icl - icl_flipped) / sizes, (ft - ft_flipped) / sizes
    for query, found in enumerate(specific_contrast(*sides)):
        a, b = ((side[query] - sum(side) / 9).ravel() for side in (x, y))
        assert found == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), abs=1e-12)


def test_what_all_queries_share_is_not_specific() -> None:
    """One change of all queries in both settings, and in a layer where labels hardly matter noise alone."""
    z, icl, icl_flipped, ft, ft_flipped = arrays(planted(4, labels=0.0, n=200))
    shared = 5 * np.random.default_rng(0).normal(size=z.shape[1:])
    sides = z, icl + shared, icl_flipped, ft + shared, ft_flipped
    assert overall_mean(label_contrast(*sides)) > 0.8 and abs(specific_contrast(*sides).mean()) < 0.05
    z, icl, icl_flipped, ft, ft_flipped = arrays(planted(4, labels=0.9, n=200))
    noise = np.random.default_rng(1).normal(size=(4, *z.shape[:1], z.shape[2]))
    for side, own in zip((icl, icl_flipped, ft, ft_flipped), noise, strict=True):
        side[:, 0] = z[:, 0] + 0.01 * own
    assert specific_contrast(z, icl, icl_flipped, ft, ft_flipped).mean() > 0.85
    assert overall_mean(label_contrast(z, icl, icl_flipped, ft, ft_flipped)) < 0.7


def test_a_diverged_query_has_no_specific_contrast_and_leaves_the_others_theirs() -> None:
    records = planted(5, labels=0.5, n=20)
    sides = arrays(records)
    whole = specific_contrast(*sides)
    sides[3][4] = np.inf
    found = specific_contrast(*sides)
    assert np.isnan(found[4]) and np.isfinite(np.delete(found, 4)).all()
    assert compute_metrics(planted(5, labels=0.5, n=20)).label_specific == pytest.approx(whole.mean())
    assert np.isnan(specific_contrast(*(side[:1] for side in arrays(planted(5, n=3))))).all(), "one query has no others"
