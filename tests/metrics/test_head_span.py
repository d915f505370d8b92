"""Shrinking heads, each by its own share, is no similarity; what lies outside their span is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dualview.analyses.certificate.plants import planted
from dualview.metrics.floors.nulls import record_floors
from dualview.metrics.verdict import judge
from dualview.models.head_span import off_span_and_shared
from dualview.records import Records, load_records, save_records

PLANTS, HEADS, D = 60, 5, 32


def shrunk(seed: int, *, same: float, recorded: bool = True, shared: float = 0.0) -> Records:
    """ICL and FT (and what labels change of them) shrink the same heads by the same unequal shares.

    same     the cosine of what they do otherwise
    shared   how much of a direction that all queries share both add, some queries more of it than others
    """
    rng = np.random.default_rng(seed + 1000)
    plain = planted(seed, predictions=0.9, representations=same, labels=same, n=96, layers=2, d=D)
    heads = rng.normal(size=(96, 2, HEADS, D))
    share = rng.uniform(0, 1, (2, HEADS)) * np.linspace(0, 2, HEADS)
    labels = rng.normal(size=(2, HEADS))
    common = shared * rng.normal(size=(2, 2, D)) * np.exp(0.5 * rng.normal(size=(96, 1, 1, 1)))
    settings, base = {}, heads.sum(2)
    for name, setting in plain.settings.items():
        zsl = plain["zsl"].h
        assert setting.h is not None and zsl is not None
        taken = np.zeros_like(share) if name == "zsl" else share + labels * (0.3 if "flipped" in name else -0.3)
        added = 0.0 if name == "zsl" else common[:, 0] + common[:, 1] * (-1.0 if "flipped" in name else 1.0)
        h = base + (setting.h - zsl) - 2 * np.einsum("lh,qlhd->qld", taken, heads) + added
        settings[name] = replace(setting, h=h)
    for name in ("icl", "ft") if recorded else ():
        own, flipped = settings[name], settings[f"{name}_flipped_labels"]
        changes = torch.from_numpy(np.stack([own.h - base, own.h - flipped.h]))
        spans = [torch.from_numpy(np.concatenate([heads[:, at], base[:, None, at]], 1)) for at in range(2)]
        off = np.stack([off_span_and_shared(changes[:, :, at], spans[at]).numpy() for at in range(2)], 2)
        settings[name] = replace(own, off_span=off[0], off_contrast=off[1])
    return Records(plain.gold, settings)


def rates(**how: object) -> dict[str, float]:
    found = [judge(shrunk(seed, **how), draws=199) for seed in range(PLANTS)]  # pyright: ignore[reportArgumentType]
    named = ("representations", "labels")
    return {name: float(np.mean([v.levels[name].outcome == "supported" for v in found])) for name in named}


def test_heads_that_shrink_alike_are_not_supported() -> None:
    assert max(rates(same=0.0).values()) <= 0.05


def test_heads_that_shrink_alike_and_a_shared_direction_are_not_supported() -> None:
    assert max(rates(same=0.0, shared=2.0).values()) <= 0.05
    assert min(rates(same=0.8, shared=2.0).values()) >= 0.95


def test_the_zsl_direction_alone_would_be_taken_in() -> None:
    assert rates(same=0.0, recorded=False)["representations"] > 0.5


def test_the_same_update_with_noise_is_supported() -> None:
    assert min(rates(same=0.8).values()) >= 0.95


@pytest.mark.parametrize("form", ["update", "normalised"])
def test_the_floor_is_what_the_span_gives(form: str) -> None:
    records = shrunk(0, same=0.5)
    z, p, f, *off = (
        records["zsl"].h,
        *(records[s].h for s in ("icl", "ft")),
        *(records[s].off_span for s in ("icl", "ft")),
    )
    floor = record_floors(z, p, f, [form], off=off)[form].floors["head_span"]  # pyright: ignore
    length = lambda a: np.linalg.norm(a, axis=-1, keepdims=True)  # noqa: E731
    x, y = (p - z, f - z) if form == "update" else (p / length(p) - z / length(z), f / length(f) - z / length(z))
    outside = off if form == "update" else [off[0] / length(p), off[1] / length(f)]
    wanted = (outside[0] * outside[1]).sum(-1) / (length(x) * length(y))[..., 0]
    np.testing.assert_allclose(floor.excess, wanted, atol=1e-10)
    np.testing.assert_allclose(floor.per_query + floor.excess, (x * y).sum(-1) / (length(x) * length(y))[..., 0])


def test_the_output_names_what_was_removed(tmp_path: Path) -> None:
    found = load_records(save_records(shrunk(0, same=0.5), tmp_path / "records"))
    assert found["icl"].off_span is not None and found["zsl"].off_span is None
    for metric in ("sim_aou", "sim_aou_normalised", "label_contrast"):
        assert "head_span" in judge(found).by_metric[metric].floors
        assert "zsl_direction" not in judge(found).by_metric[metric].floors
    old = judge(shrunk(0, same=0.5, recorded=False)).by_metric["sim_aou"].floors
    assert "zsl_direction" in old and "head_span" not in old


def test_updates_inside_the_span_leave_nothing_to_test() -> None:
    records = shrunk(0, same=0.5)
    settings = dict(records.settings)
    for name in ("icl", "ft"):
        assert records[name].off_span is not None
        settings[name] = replace(records[name], off_span=1e-9 * records[name].off_span)  # pyright: ignore
    level = judge(Records(records.gold, settings)).levels["representations"]
    assert level.outcome == "not testable" and "rotated" in level.clause


def test_without_a_zero_shot_output_labels_are_tested_all_the_same() -> None:
    plain = planted(0, predictions=1.0, representations=1.0, labels=1.0, layers=2)
    base = plain["zsl"].h
    moved = {name: replace(setting, h=setting.h - base) for name, setting in plain.settings.items()}
    assert judge(Records(plain.gold, moved)).levels["labels"].outcome == "supported"
