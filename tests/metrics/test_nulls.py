"""Each floor against a direct construction of what it stands for."""

from __future__ import annotations

import numpy as np
import pytest

from close import assert_close
from dualview.metrics.cosine import defined_mean, overall_mean, similarity, similarity_table
from dualview.metrics.floors.nulls import map_blocks, output_blocks, record_floors, shuffle_test
from dualview.metrics.sim_aou import noise_floor, relative_update_norm

FORMS = ("update", "normalised", "map")


def outputs(seed: int, n: int = 20, layers: int = 2, d: int = 8) -> list[np.ndarray]:
    z, a, b = np.random.default_rng(seed).normal(size=(3, n, layers, d))
    return [z, z + a, z + 0.5 * a + b]


def maps(seed: int, n: int = 24, layers: int = 2, heads: int = 3, c: int = 6) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    z, a, b = rng.normal(size=(3, n, layers, heads, c))
    columns = rng.integers(3, c + 1, n)
    return [np.where(np.arange(c) < columns[:, None, None, None], v, 0) for v in (z, z + a, z + 0.5 * a + b)], columns


def direct_pairs(form: str, stacks: list[np.ndarray], i: int, j: int, columns: np.ndarray | None) -> np.ndarray:
    """Query i with j's FT update added to its own zsl, compared by the metric itself; [layer]."""
    z, p = stacks[0][[i]], stacks[1][[i]]
    moved = z + (stacks[2][[j]] - stacks[0][[j]])
    own = None if columns is None else columns[[i]]
    return similarity_table(form, z, p, moved, own)[0]


@pytest.mark.parametrize("form", FORMS)
def test_shuffled_query_equals_adding_the_other_update(form: str) -> None:
    stacks = outputs(0)
    found = record_floors(*stacks, [form], seed=3)[form].floors["shuffled_query"]
    block = output_blocks(20, 3)
    assert len(block) == 1
    for i in (0, 7):
        wanted = np.mean([direct_pairs(form, stacks, i, j, None) for j in range(20) if j != i], axis=0)
        np.testing.assert_allclose(found.per_query[i], wanted, atol=1e-10)
        np.testing.assert_allclose(found.per_query[i] + found.excess[i], similarity_table(form, *stacks)[i], atol=1e-10)


@pytest.mark.parametrize("form", ["update", "map"])
def test_maps_are_only_compared_with_maps_of_their_length(form: str) -> None:
    stacks, columns = maps(1)
    found = record_floors(*stacks, [form], columns=columns, seed=0)[form].floors["shuffled_query"]
    for block in map_blocks(columns, 0):
        assert len(set(columns[block].tolist())) == 1
        i = block[0]
        if block.size == 1:
            assert np.isnan(found.per_query[i]).all()
        else:
            wanted = np.mean([direct_pairs(form, stacks, i, j, columns) for j in block[1:]], axis=0)
            np.testing.assert_allclose(found.per_query[i], wanted, atol=1e-10)


def test_blocks_hold_every_query_once() -> None:
    columns = np.random.default_rng(0).integers(2, 9, 333)
    for blocks in (output_blocks(333, 1), map_blocks(columns, 1)):
        assert sorted(np.concatenate(blocks).tolist()) == list(range(333))


@pytest.mark.parametrize("form", FORMS)
def test_mean_direction_is_what_mean_removal_takes_away(form: str) -> None:
    z, p, f = outputs(2)
    found = record_floors(z, p, f, [form])[form]
    floor = found.floors["mean_direction"]
    np.testing.assert_allclose(floor.per_query + floor.excess.clip(-1, 1), found.value, atol=1e-12)
    for layer in range(2):
        sides = {
            "update": (p - z, f - z),
            "map": (p, f),
            "normalised": tuple(
                s / np.linalg.norm(s, axis=-1, keepdims=True) - z / np.linalg.norm(z, axis=-1, keepdims=True)
                for s in (p, f)
            ),
        }[form]
        x, y = sides[0][:, layer], sides[1][:, layer]
        rest = ((x - x.mean(axis=0)) * (y - y.mean(axis=0))).sum(axis=-1) * 20 / 19
        wanted = rest / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
        np.testing.assert_allclose(floor.excess[:, layer], wanted, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_zsl_direction_leaves_the_orthogonal_part(form: str) -> None:
    z, p, f = outputs(3)
    floor = record_floors(z, p, f, [form])[form].floors["zsl_direction"]
    unit = z / np.linalg.norm(z, axis=-1, keepdims=True)
    x, y = (p, f) if form == "map" else (p - z, f - z)
    if form == "normalised":
        x, y = (s / np.linalg.norm(s, axis=-1, keepdims=True) - unit for s in (p, f))
    across = [s - (s * unit).sum(axis=-1, keepdims=True) * unit for s in (x, y)]
    wanted = (across[0] * across[1]).sum(axis=-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
    np.testing.assert_allclose(floor.excess, wanted, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_gaussian_equals_drawing_whole_vectors(form: str) -> None:
    """The few components drawn have the distribution of the full d-dimensional draw."""
    z, p, f = (np.repeat(stack, 300, axis=0) for stack in outputs(4, n=3, layers=1, d=5))
    found = record_floors(z, p, f, [form])[form].floors["gaussian"].per_query
    g = np.random.default_rng(9).normal(size=(40, *z.shape))
    g *= np.linalg.norm(f - z, axis=-1, keepdims=True) / np.linalg.norm(g, axis=-1, keepdims=True)
    wanted = np.mean([similarity_table(form, z, p, z + draw) for draw in g], axis=0)
    for start in (0, 300, 600):
        assert found[start : start + 300].mean() == pytest.approx(wanted[start : start + 300].mean(), abs=0.04)


@pytest.mark.parametrize("c", [1, 2, 3])
def test_gaussian_in_very_few_columns(c: int) -> None:
    z, a, b = np.random.default_rng(0).normal(size=(3, 4000, 1, 1, c))
    found = record_floors(z, z + a, z + b, ["update"])["update"].floors["gaussian"].per_query
    assert found.mean() == pytest.approx(0, abs=0.03)
    # the mean of four cosines of uniform directions: variance 1/(4c)
    assert found.std() == pytest.approx((1 / (4 * c)) ** 0.5, rel=0.08)


def test_noise_and_before_floors() -> None:
    z, p, f = outputs(5)
    noise = record_floors(z, p, f, ["normalised"])["normalised"].floors["noise"].per_query
    np.testing.assert_allclose(noise, noise_floor(relative_update_norm(z, p), relative_update_norm(z, f)))
    stacks, columns = maps(5)
    before = record_floors(*stacks, ["map"], columns=columns)["map"].floors["before"].per_query
    np.testing.assert_allclose(before, similarity_table("map", stacks[0], stacks[1], stacks[0], columns))


def test_rotation_deviation_equals_turning_everything() -> None:
    """The closed form against hundreds of actual random rotations, shared by all queries."""
    rng = np.random.default_rng(0)
    n, d = 40, 48  # so many that two of them removed are few
    z, features = rng.normal(size=(n, 1, d)), rng.normal(size=(n, 2))
    a, b = (features @ rng.normal(size=(2, d)) + 0.3 * rng.normal(size=(n, d)) for _ in range(2))
    found = record_floors(z, z + a[:, None], z + b[:, None], ["update"])["update"].rotated
    means = []
    for _ in range(1500):
        q, r = np.linalg.qr(rng.normal(size=(d, d)))
        means.append(
            overall_mean(similarity("update", z, z + a[:, None], z + (b @ (q * np.sign(np.diag(r))))[:, None]))
        )
    assert np.mean(means) == pytest.approx(0, abs=0.02)
    assert found.whole == pytest.approx(np.std(means), rel=0.08)


def test_permutation_p_is_uniform_under_the_null_and_small_under_the_alternative() -> None:
    p = []
    for seed in range(300):
        blocks = [np.random.default_rng([seed, k]).normal(size=(2, 6, 6)) for k in range(3)]
        p.append(shuffle_test(blocks, seed=seed, name="t").p)
    assert np.mean(np.array(p) <= 0.05) == pytest.approx(0.05, abs=0.04)
    strong = [np.random.default_rng(k).normal(size=(2, 6, 6)) + 4 * np.eye(6) for k in range(3)]
    test = shuffle_test(strong, seed=0, name="t")
    assert test.p == 1 / 1000 and (test.p_per_layer == 1 / 1000).all()
    empty = shuffle_test([np.full((2, 3, 3), np.nan)], seed=0, name="t")
    assert empty.p is None and np.isnan(empty.p_per_layer).all()
    assert shuffle_test([], seed=0, name="t").p is None


def test_undefined_and_diverged_queries_do_not_spread() -> None:
    z, p, f = outputs(6)
    f[3], f[4] = z[3], np.inf
    f[5], p[6] = np.nan, z[6]
    found = record_floors(z, p, f, FORMS[:2])["update"]
    for floor in found.floors.values():
        assert np.isnan(floor.excess[3:7]).all()
        assert np.isfinite(np.delete(floor.excess, range(3, 7), axis=0)).all()
    assert found.tests["shuffled_query"].p is not None
    assert np.isfinite(found.rotated.specific)


def test_same_seed_same_floors() -> None:
    stacks, columns = maps(7)
    first, second = (record_floors(*stacks, ["update"], columns=columns, seed=5)["update"] for _ in range(2))
    assert_close(first.floors["gaussian"].per_query, second.floors["gaussian"].per_query)
    assert first.tests["shuffled_query"].p == second.tests["shuffled_query"].p
    assert defined_mean(first.value, axis=0).shape == (2,)


@pytest.mark.parametrize("unequal", [0.0, 1.0])
def test_rotations_are_about_zero_with_a_mean_that_both_share(unequal: float) -> None:
    """Whatever all queries have in common is gone, also where some queries have little besides."""
    scores: list[float] = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        z, a, b = rng.normal(size=(3, 50, 1, 12))
        shared, far = 4 * rng.normal(size=12), np.exp(unequal * rng.normal(size=(50, 1, 1)))
        found = record_floors(z, z + shared + far * a, z + shared + far * b, ["update"])["update"]
        assert found.rotated is not None
        scores.append(float(found.floors["rotated"].excess.mean()) / found.rotated.specific)
    assert abs(np.mean(scores)) < 0.7 and 0.6 < np.std(scores) < 1.5
