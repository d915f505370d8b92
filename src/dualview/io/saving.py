"""Saves what was computed: the result first, and a failure of something optional never loses it.

A run succeeds once its result is written. Records, report, figures and the table on the terminal are extras: one that
fails is a warning that names it and says where the result is. A result that cannot be written goes to a temporary
folder.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from dualview.io.errors import UserError, cause_of

T = TypeVar("T")


class ExtraFailed(UserWarning):
    """Something optional failed after the result was written; the command line prints it as a sentence."""


def warn_extra(sentence: str) -> None:
    """A warning that the command line prints as a sentence."""
    warnings.warn(sentence, ExtraFailed, stacklevel=4)


def save_somewhere(places: Sequence[Path], save: Callable[[Path], object]) -> list[Path]:
    """Save the same thing in every place; if none can be written, in a temporary folder that a UserError names."""
    written: list[Path] = []
    failed: list[tuple[Path, Exception]] = []
    for place in places:
        try:
            save(place)
            written.append(place)
        except Exception as error:
            failed.append((place, error))
    if failed and not written:
        place, error = failed[0]
        raise UserError(
            f"{place} cannot be written ({cause_of(error)}); {save_to_temporary(place.name, save)}."
        ) from error
    for place, error in failed:
        warn_extra(f"{place} was not written ({cause_of(error)}); the result is in {written[0]}.")
    return written


def save_to_temporary(name: str, save: Callable[[Path], object]) -> str:
    """Save in a new temporary folder; a clause that says so, or why not."""
    try:
        place = Path(tempfile.mkdtemp(prefix="dualview-")) / name
        save(place)
    except Exception as error:
        return f"a temporary folder cannot be written either ({cause_of(error)}), so what was computed is lost"
    return f"what was computed is kept in {place}, move it from there"


def extra(what: str, work: Callable[[], T], kept: Path | str) -> T | None:
    """Do something optional; None and a warning if it fails. `kept`: where the result is."""
    try:
        return work()
    except Exception as error:
        warn_extra(f"{what} failed ({cause_of(error)}); the result is not affected, it is in {kept}.")
        return None
