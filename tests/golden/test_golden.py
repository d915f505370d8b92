"""Numbers that move need a new NUMERICS_VERSION, or stored cells would mix two kinds of numbers under one key."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from dualview.comparison.numerics import NUMERICS_VERSION
from golden.compute import RTOL, compute, moved, read

WRITE = "run `python tests/golden/write.py` to write the new numbers"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return compute()


def test_the_golden_numbers_belong_to_this_version() -> None:
    stored = read()["numerics_version"]
    assert stored == NUMERICS_VERSION, (
        f"numbers.json belongs to NUMERICS_VERSION {stored}, the code has {NUMERICS_VERSION}; {WRITE}."
    )


def test_the_numbers_have_not_moved(found: dict[str, Any]) -> None:
    lines = moved(read()["numbers"], found["numbers"])
    assert not lines, (
        f"{len(lines)} numbers moved. If this is meant, raise NUMERICS_VERSION in src/dualview/comparison/numerics.py "
        f"and {WRITE}. The first of them:\n" + "\n".join(lines[:20])
    )


def test_every_number_is_stored(found: dict[str, Any]) -> None:
    new = moved(found["numbers"], read()["numbers"])
    assert not new, f"numbers.json lacks numbers that a run gives now; {WRITE}:\n" + "\n".join(new[:20])


def test_a_small_move_is_seen_and_rounding_is_not() -> None:
    stored = read()["numbers"]
    paths = ("accuracy.icl", "sim_aou.raw", "sim_am.after", "kendall.value", "rec2ftp.value", "verdict.overall")
    assert set(paths) <= stored["full controls"].keys()
    for name, path in (("full controls", "sim_aou.raw"), ("linearised", "sim_am.after")):
        for change, seen in ((1e-10, 0), (5 * RTOL, 1)):
            changed = deepcopy(stored)
            changed[name][path] *= 1 + change
            assert len(moved(stored, changed)) == seen
    changed = deepcopy(stored)
    changed["full controls"]["verdict.overall"] = "another"
    assert len(moved(stored, changed)) == 1
