"""The certificate: its mixtures by their definition, its counts, and a small one from end to end."""

from __future__ import annotations

import json
from math import comb
from pathlib import Path

import numpy as np
import pytest

import dualview
from dualview.analyses.certificate.calibration import Sizes, calibrate
from dualview.analyses.certificate.certificate import Certificate, NullFamily, Positive, Power
from dualview.analyses.certificate.mixtures import dosed, main_settings, reassigned, rotations, within_classes
from dualview.analyses.certificate.plants import INDEPENDENT, planted, same_queries
from dualview.io.errors import UserError
from dualview.metrics.statistics import clopper_pearson_upper
from dualview.metrics.verdict import judge
from dualview.report.certificate import page, write_certificate

DOCS = Path(__file__).parents[2] / "docs"
SMALL = Sizes(
    plants=5,
    architectures=("llama", "gpt2"),
    untrained=1,
    seeds=2,
    queries=(40,),
    shots=12,
    doses=(0.0, 0.5, 1.0),
    mixtures=2,
    distilled=0,
    compiled=0,
    draws=199,
)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


@pytest.mark.parametrize("dose", [0.0, 0.3, 1.0])
def test_a_dose_is_the_cosine_it_says(dose: float) -> None:
    records, rng = planted(0, n=400, d=64), np.random.default_rng(0)
    order = within_classes(records.gold, rng)
    mixed = dosed(records, dose, rotations(records, rng), order)
    z = records["zsl"].h
    assert z is not None and mixed["ft"].h is not None
    update, before = mixed["ft"].h - z, records["ft"].h - z
    found = cosines(update, records["icl"].h - z)
    assert found.mean() == pytest.approx(dose, abs=0.03)
    taught = mixed["ft"].h - mixed["ft_flipped_labels"].h
    contrast = records["icl"].h - records["icl_flipped_labels"].h
    assert cosines(taught, contrast).mean() == pytest.approx(dose, abs=0.03)
    sizes = np.linalg.norm(update, axis=-1).mean() / np.linalg.norm(before, axis=-1).mean()
    assert sizes == pytest.approx(1.0, abs=0.03), "at FT's own size"
    right = [(mixed[name].log_probs.argmax(1) == records.gold).mean() for name in ("icl", "ft")]
    assert right[1] > 0.8, "FT knows the task at any dose"
    moved = mixed["ft"].log_probs - records["zsl"].log_probs
    change = records["icl"].log_probs - records["zsl"].log_probs
    assert np.allclose(moved, dose * change + (1 - dose**2) ** 0.5 * change[order])


def test_rotations_keep_lengths_and_orders_keep_classes() -> None:
    records, rng = planted(1, n=50), np.random.default_rng(1)
    for turn in rotations(records, rng):
        assert np.allclose(turn @ turn.T, np.eye(len(turn)), atol=1e-5)
    order = within_classes(records.gold, rng)
    assert sorted(order) == list(range(50)) and (records.gold[order] == records.gold).all()
    assert (order != np.arange(50)).any()


def test_reassigned_queries_have_another_one_s_update() -> None:
    records, others = planted(2), planted(3)
    order = np.roll(np.arange(len(records.gold)), 1)
    found = reassigned(records, others, order)
    assert np.allclose(found["ft"].h - records["zsl"].h, (others["ft"].h - others["zsl"].h)[order])
    assert found["icl"] is records["icl"]


def test_draws_of_the_same_queries_share_what_is_kept() -> None:
    for kept, least, most in ((1.0, 0.999, 1.001), (0.8, 0.75, 0.85), (0.0, -0.1, 0.1)):
        one, two = same_queries(3, 2, kept=kept, n=200)
        assert (one.gold == two.gold).all() and (one["zsl"].h == two["zsl"].h).all()
        updates = [each["icl"].h - each["zsl"].h for each in (one, two)]
        assert least < cosines(*updates).mean() < most
        assert judge(one, draws=99).levels["learning"].outcome == "supported"


def test_only_what_decides_is_kept() -> None:
    found = main_settings(planted(0, maps=True), 30)
    assert set(found.settings) == {"zsl", "icl", "ft", "icl_flipped_labels", "ft_flipped_labels"}
    assert len(found.gold) == 30 and found["icl"].m is None


@pytest.mark.parametrize(("k", "n"), [(0, 1), (0, 80), (3, 40), (39, 40), (40, 40), (0, 0)])
def test_the_upper_bound_by_its_definition(k: int, n: int) -> None:
    """The largest rate at which k or fewer successes still have a probability of 2.5 %."""
    found = clopper_pearson_upper(k, n)
    if k == n:
        assert found == 1.0
        return
    tail = sum(comb(n, i) * found**i * (1 - found) ** (n - i) for i in range(k + 1))
    assert tail == pytest.approx(0.025, rel=1e-6)


def test_counts_of_planted_nulls_and_positives() -> None:
    nulls = [judge(planted(seed, **INDEPENDENT["shrinkage"]), draws=199) for seed in range(5)]
    family = NullFamily.of("shrinkage", "", nulls)
    assert (family.judged, family.supported) == (5, 0) and family.upper == pytest.approx(1 - 0.025 ** (1 / 5))
    same = judge(planted(0, predictions=1.0, representations=1.0, labels=1.0), draws=199)
    positive = Positive.of("same", "", same)
    assert positive.overall == "supported" and positive.values["representations"] == pytest.approx(1.0)
    wrong = NullFamily.of("not a null", "", [same])
    assert wrong.supported == 1 and wrong.upper == 1.0


def certificate(nulls: int, overall: str) -> Certificate:
    family = NullFamily("n", "m", 200, nulls, dict.fromkeys(("predictions", "representations", "labels"), 0))
    power = [
        Power("overall", dose, 50, 1, 10, hits) for dose, hits in ((0.0, 0), (0.1, 9), (0.2, 7), (0.4, 8), (1.0, 10))
    ]
    return Certificate("model", "task", 0, {}, [family], [Positive("p", "m", overall, "s", {})], power)


def test_it_is_passed_only_with_few_false_and_all_true() -> None:
    assert certificate(0, "supported").passed
    assert not certificate(0, "partial").passed
    assert not certificate(12, "supported").passed
    assert certificate(0, "supported").smallest_dose("overall", 50, 1) == 0.4, "0.1 was found by luck: 0.2 was not"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate from runs of the exact model: seconds, not minutes."""
    made = dualview.exact(tmp_path_factory.mktemp("exact") / "model")
    return calibrate(model=str(made.folder), task=str(made.task), ft_loss="label", lr=made.rate, sizes=SMALL)


def test_a_small_certificate(small: Certificate) -> None:
    assert small.all_nulls.judged >= 40 + 2 and small.all_nulls.supported <= 0.05 * small.all_nulls.judged
    assert {f.name for f in small.nulls} >= {
        "untrained",
        "reassigned",
        "dose 0",
        "planted: shared features",
        "planted, over draws",
        "planted, over draws of the same queries",
    }
    assert [p.overall for p in small.positives] == ["supported", "supported"]
    assert (small.positives[0].values["representations"] or 0) > 0.99
    full = [p for p in small.power if p.dose == 1.0 and p.queries == 40 and p.draws == 1]
    assert {p.level: p.power for p in full} == dict.fromkeys(
        ("predictions", "representations", "labels", "overall"), 1.0
    )
    assert small.smallest_dose("overall", 40, 1) in (0.5, 1.0)


def test_its_files(small: Certificate, tmp_path: Path) -> None:
    written = write_certificate(small, tmp_path)
    assert [path.name for path in written] == ["calibration.json", "calibration.md", "calibration.png"]
    again = Certificate.from_json(json.loads(written[0].read_text()))
    assert again.to_json() == json.loads(json.dumps(small.to_json()))
    assert page(again) == written[1].read_text(encoding="utf-8") and "# Calibration" in page(again)


def test_the_page_of_the_docs_comes_from_its_file() -> None:
    found = Certificate.from_json(json.loads((DOCS / "calibration.json").read_text()))
    assert page(found) == (DOCS / "calibration.md").read_text(encoding="utf-8")
    assert found.passed


def test_bad_input_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 0"):
        dualview.calibrate(seed=-1)
    with pytest.raises(UserError, match="not in the library"):
        calibrate(task="nosuch", sizes=SMALL)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError):
        dualview.calibrate(out=tmp_path / "file")
