"""Loading without the garbage collector leaves it as it was."""

from __future__ import annotations

import contextlib
import gc

from dualview.io.collector import collector_paused


def test_the_collector_is_off_inside_and_as_before_afterwards() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "an inner pause must not end the outer one"
    assert gc.isenabled()


def test_a_failure_turns_it_on_again() -> None:
    with contextlib.suppress(RuntimeError), collector_paused():
        raise RuntimeError
    assert gc.isenabled()
