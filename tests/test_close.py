"""The comparison that the other tests rely on: a few units in the last place pass, more do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from close import assert_alike, assert_close, assert_same_weights, is_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_few_units_pass_and_more_do_not(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 5, 9, dtype=dtype)
    eps = torch.finfo(dtype).eps
    assert_close(x + 4 * eps, x)
    assert is_close(x + 300 * eps, x) and not is_close(x + 400 * eps, x)
    assert not is_close(x + 300 * eps, x, ulps=16)
    with pytest.raises(AssertionError, match="rounding can be"):
        assert_close(x * (1 + 100 * eps), x)


def test_other_shapes_kinds_and_infinities_differ() -> None:
    x = np.array([1.0, np.nan, -np.inf])
    assert_close(x, x.copy())
    assert not is_close(np.array([1.0, 2.0, -np.inf]), x) and not is_close(x, np.array([1.0, 2.0, -np.inf]))
    assert not is_close(np.array([1.0, np.nan, np.inf]), x)
    for other in (x[:2], x.astype(np.float32)):
        with pytest.raises(AssertionError):
            is_close(other, x)
    with pytest.raises(AssertionError, match="bit by bit"):
        is_close(np.arange(3), np.arange(3))


def test_documents_are_alike_but_for_rounding() -> None:
    wanted = {"a": [1.0, None, {"b": 0.0}], "n": 3, "name": "x"}
    assert_alike({"a": [1.0 + 1e-12, None, {"b": 1e-14}], "n": 3, "name": "x"}, wanted)
    for changed in (
        {**wanted, "n": 4},
        {**wanted, "a": [1.0 + 1e-6, None, {"b": 0.0}]},
        {**wanted, "a": [1.0, 0.0, {"b": 0.0}]},
        {**wanted, "a": [1.0, None]},
        {**wanted, "a": [float("nan"), None, {"b": 0.0}]},
        {"a": wanted["a"]},
    ):
        with pytest.raises(AssertionError):
            assert_alike(changed, wanted)


def test_weights_are_the_same_to_the_bit() -> None:
    one, two = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    two.load_state_dict(one.state_dict())
    assert_same_weights(one, two)
    with torch.no_grad():
        two.weight[0, 0] *= 1 + torch.finfo(torch.float32).eps
    with pytest.raises(AssertionError, match="weight"):
        assert_same_weights(one, two)
    with pytest.raises(AssertionError):
        assert_same_weights(one, torch.nn.Linear(3, 2, bias=False))
