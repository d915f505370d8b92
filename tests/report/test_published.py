"""The papers' numbers were copied right: their averages are the ones the papers print."""

from __future__ import annotations

import pytest

from dualview.report.catalogue import NUMBERS
from dualview.report.published import SIX_TASKS, published, published_values

AVERAGES = [
    ("Dai et al., 1.3B", "rec2ftp.value", 0.8556, 4),
    ("Dai et al., 2.7B", "rec2ftp.value", 0.8939, 4),
    ("Dai et al., 1.3B", "sim_aou.normalised", 0.186, 3),
    ("Dai et al., 2.7B", "sim_aou.normalised", 0.225, 3),
    ("Dai et al., 1.3B", "sim_am.before", 0.338, 3),
    ("Dai et al., 2.7B", "sim_am.before", 0.355, 3),
    ("Dai et al., 1.3B", "sim_am.after", 0.442, 3),
    ("Dai et al., 2.7B", "sim_am.after", 0.434, 3),
    ("Dai et al., 1.3B", "kendall.released.tau_token", 0.193, 3),
    ("Dai et al., 2.7B", "kendall.released.tau_token", 0.214, 3),
    ("Deutch et al., 1.3B", "sim_aou.normalised", 0.187, 3),
    ("Deutch et al., 1.3B", "sim_aou.raw", 0.102, 3),
    ("Deutch et al., 1.3B", "sim_am.after", 0.435, 3),
    ("Deutch et al., 1.3B", "sim_am.delta", 0.267, 3),
    ("Deutch et al., 1.3B, layer-causal", "sim_aou.normalised", 0.279, 3),
    ("Deutch et al., 1.3B, layer-causal", "sim_aou.raw", 0.167, 3),
    ("Deutch et al., 1.3B, layer-causal", "sim_am.after", 0.283, 3),
    ("Deutch et al., 1.3B, layer-causal", "sim_am.delta", 0.336, 3),
]


@pytest.mark.parametrize(("source", "key", "average", "digits"), AVERAGES)
def test_averages_are_those_of_the_papers(source: str, key: str, average: float, digits: int) -> None:
    values = [published(task)[source][key] for task in SIX_TASKS]
    # The papers average before they round; half a unit in the last place of each value, and one in the average's.
    assert sum(values) / 6 == pytest.approx(average, abs=1.01 * 10**-digits)


def test_chance_is_what_the_counts_give() -> None:
    counts = {"sst2": (227, 257), "sst5": (181, 668), "mr": (318, 364), "subj": (435, 548)}
    counts |= {"agnews": (782, 1074), "cb": (22, 35)}
    for task, (right, wrong) in counts.items():
        assert published(task)["Dai et al., 1.3B"]["rec2ftp.chance"] == pytest.approx(right / wrong, abs=6e-4)


def test_every_key_is_one_of_a_result() -> None:
    known = {number.key for number in NUMBERS} | {"rec2ftp.chance"}
    assert {key for task in SIX_TASKS for rows in published(task).values() for key in rows} <= known


def test_other_tasks_have_none() -> None:
    assert published("movie") == {} and published_values("movie", "accuracy.icl") == {}
    assert "sim_aou.raw" not in published("agnews")["Deutch et al., 1.3B, untrained"]  # the paper leaves it out
