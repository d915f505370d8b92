"""The outcome of the packing check, kept next to a cached conversion so that the next start does not repeat it.

A conversion is named by its content, so the same check gives the same outcome as long as the check, torch,
transformers, the dtype and the kind of device are the same.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
import transformers
from pydantic import BaseModel, ConfigDict, ValidationError

from dualview.io.atomic import write_text
from dualview.io.errors import UserError
from dualview.models.language_model import LanguageModel
from dualview.models.packing.check import CHECK_VERSION


class Outcome(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    conditions: str
    slow_because: str | None


def recall(folder: Path, lm: LanguageModel) -> Outcome | None:
    """What the check of this conversion found before, under the same conditions; None if it must be run."""
    try:
        found = Outcome.model_validate_json(_note(folder, lm).read_bytes())
    except (OSError, ValidationError):
        return None
    return found if found.conditions == _conditions() else None


def remember(folder: Path, lm: LanguageModel) -> None:
    with suppress(UserError):  # a read-only cache
        outcome = Outcome(conditions=_conditions(), slow_because=lm.slow_because)
        write_text(_note(folder, lm), outcome.model_dump_json())


def _conditions() -> str:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"check {CHECK_VERSION}, {versions}"


def _note(folder: Path, lm: LanguageModel) -> Path:
    # One file for each dtype and kind of device: their outcomes differ, and both may be in use.
    return folder / f"packing-{str(lm.dtype).removeprefix('torch.')}-{lm.device.type}.json"
