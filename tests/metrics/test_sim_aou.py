"""SimAOU's bounds and its noise floor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from close import assert_close
from dualview.metrics.sim_am import sim_am
from dualview.metrics.sim_aou import noise_floor, relative_update_norm, sim_aou, sim_aou_normalised


@pytest.mark.parametrize(("s", "floor"), [(0.3, 0.02), (0.5, 0.05), (1, 0.15), (3**0.5, 0.25), (3, 0.34), (5, 0.40)])
def test_noise_floor_table(s: float, floor: float) -> None:
    """comparison.md, section 4.1."""
    assert float(noise_floor(np.array(float(s)), np.array(float(s)))) == pytest.approx(floor, abs=0.005)


@pytest.mark.parametrize(("s", "t"), [(0.3, 0.3), (1.0, 3.0), (3**0.5, 3**0.5)])
def test_noise_floor_is_what_independent_updates_give(s: float, t: float) -> None:
    rng = np.random.default_rng(0)
    z, a, b = rng.normal(size=(3, 60, 1, 2048))
    z, a, b = (v / np.linalg.norm(v, axis=-1, keepdims=True) for v in (z, a, b))
    found = sim_aou_normalised(z, z + s * a, z + t * b).mean()
    assert found == pytest.approx(float(noise_floor(np.array(s), np.array(t))), abs=0.01)
    assert sim_aou(z, z + s * a, z + t * b).mean() == pytest.approx(0, abs=0.01)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 10), st.floats(0.01, 10))
def test_raw_sim_aou_ignores_the_size_of_updates(seed: int, s: float, t: float) -> None:
    rng = np.random.default_rng(seed)
    z, a, b = rng.normal(size=(3, 4, 2, 5))
    base = sim_aou(z, z + a, z + b)
    np.testing.assert_allclose(sim_aou(z, z + s * a, z + t * b), base, atol=1e-9)
    np.testing.assert_allclose(sim_aou(z, z + s * a, z + t * a), 1.0, atol=1e-9)
    np.testing.assert_allclose(sim_aou(z, z + s * a, z - t * b), -base, atol=1e-9)
    np.testing.assert_allclose(sim_aou(z, z + b, z + a), base, atol=1e-12)
    np.testing.assert_allclose(relative_update_norm(z, z + s * z), s, rtol=1e-9)


def test_columns_beyond_a_query_do_not_count() -> None:
    rng = np.random.default_rng(0)
    maps, columns = rng.normal(size=(3, 4, 2, 3, 6)), np.array([1, 3, 6, 4])
    cut = maps.copy()
    for q, c in enumerate(columns):
        cut[:, q, ..., c:] = np.nan
    for name in ("before", "after", "delta"):
        assert_close(getattr(sim_am(*maps, columns), name), getattr(sim_am(*cut, columns), name))
    assert np.abs(sim_am(*maps, columns).delta[0]) == pytest.approx(1.0)  # one column has only a sign
