"""Equal but for rounding: what may be asked of two computations of the same numbers.

The same product of the same numbers is rounded differently on another processor, with another number of threads, or
where its operands lie at another address. So weights, files and whatever else is only copied are compared bit by bit,
and whatever comes out of a product with these functions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn


def assert_close(found: Any, wanted: Any, ulps: float = 64) -> None:
    """Two tensors or arrays of one shape and dtype, no number further off than `ulps` units of the largest one."""
    gap, allowed = _gap(found, wanted, ulps)
    assert gap <= allowed, f"{gap:.2e} apart, where rounding can be {allowed:.2e}"


def is_close(found: Any, wanted: Any, ulps: float = 64) -> bool:
    """The same as a truth value."""
    gap, allowed = _gap(found, wanted, ulps)
    return gap <= allowed


def _gap(found: Any, wanted: Any, ulps: float) -> tuple[float, float]:
    a, b = (x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (found, wanted))
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    assert np.issubdtype(a.dtype, np.floating), f"{a.dtype} has no rounding: compare it bit by bit"
    finite = np.isfinite(b)
    # A NaN or an infinity must be the same on both sides.
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return np.inf, 0.0
    gap = np.abs(a[finite] - b[finite]).max(initial=0.0)
    return float(gap), ulps * float(np.finfo(a.dtype).eps) * float(np.abs(b[finite]).max(initial=0.0))


def assert_alike(found: Any, wanted: Any, rel: float = 1e-9, absolute: float = 1e-12, at: str = "") -> None:
    """Two JSON documents of float64 results: numbers but for rounding, everything else exactly."""
    if isinstance(wanted, dict):
        assert isinstance(found, dict) and found.keys() == wanted.keys(), at
        for key in wanted:
            assert_alike(found[key], wanted[key], rel, absolute, f"{at}.{key}")
    elif isinstance(wanted, list | tuple):
        assert isinstance(found, list | tuple) and len(found) == len(wanted), at
        for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert_alike(a, b, rel, absolute, f"{at}[{index}]")
    elif isinstance(wanted, float):
        close = isinstance(found, float) and math.isclose(found, wanted, rel_tol=rel, abs_tol=absolute)
        assert close, (at, found, wanted)
    else:
        assert found == wanted, (at, found, wanted)


def assert_same_weights(found: nn.Module, wanted: nn.Module) -> None:
    """Every parameter and buffer, bit by bit."""
    a, b = found.state_dict(), wanted.state_dict()
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    differ = [name for name in a if not torch.equal(a[name], b[name])]
    assert not differ, differ


def assert_same_json(got: Any, wanted: Any, where: str = "") -> None:
    """Equal JSON: numbers to the rounding of double precision, p-values (which count draws) and the rest exactly."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_same_json(got[key], value, f"{where}/{key}")
    elif isinstance(wanted, list):
        assert len(got) == len(wanted), where
        for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert_same_json(a, b, f"{where}/{index}")
    elif isinstance(wanted, float):
        assert math.isclose(got, wanted, rel_tol=1e-9, abs_tol=1e-11) or (math.isnan(got) and math.isnan(wanted)), where
    else:
        assert got == wanted, where
