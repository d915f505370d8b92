"""Every identity on random data, and on a model if one is given, as a table; and the misprints, which must fail.

verify(seed=0, model=lm)        → a Check per identity, none failed
verify_wrong(seed=0, model=lm)  → a Check per misprint, none passed

An identity for which an architecture has no place is a Check too: skipped, with the reason.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from dualview.duality.errors import NotApplicable
from dualview.duality.verify import implicit, linear, regression, sign, softmax
from dualview.duality.verify.check import Draws, Formula
from dualview.io.errors import UserError

IDENTITIES: tuple[Formula, ...] = (
    *linear.IDENTITIES,
    *regression.IDENTITIES,
    *softmax.IDENTITIES,
    *sign.IDENTITIES,
    *implicit.IDENTITIES,
)


def misprints_of(identities: Sequence[Formula]) -> tuple[Formula, ...]:
    """The wrong forms of these identities, in their order."""
    return tuple(misprint for identity in identities for misprint in identity.misprints)


MISPRINTS: tuple[Formula, ...] = misprints_of(IDENTITIES)

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    statement: str
    paper: str
    error: float | None
    """None if it was skipped."""
    tolerance: float | None
    """None if nothing could be measured: on a model it depends on what is measured."""
    passed: bool | None
    """None if it was skipped."""
    unpatched: float | None = None
    """For a patch, the difference of the logits without it: what there was to explain."""
    note: str | None = None
    """Why it was skipped, could not be computed, or has a tolerance of its own."""

    @property
    def status(self) -> Status:
        return "skipped" if self.passed is None else "passed" if self.passed else "failed"

    def to_json(self) -> dict[str, Any]:
        """The row of `dualview verify --json`; an error that is no number is null."""
        error = None if self.error is None or not math.isfinite(self.error) else self.error
        return {**vars(self), "error": error, "status": self.status}


def _check(formula: Formula, seed: int, *model: object) -> Check:
    statement, paper = formula.statement, formula.paper
    try:
        found = formula.deviation(Draws(seed, statement), *model)
    except NotApplicable as reason:
        return Check(statement, paper, None, None, passed=None, note=str(reason))
    except UserError as problem:
        return Check(statement, paper, float("nan"), None, passed=False, note=str(problem))
    tolerance = formula.tolerance + found.rounding
    # a NaN passes nothing, because every comparison with it is false
    return Check(statement, paper, found.error, tolerance, found.error <= tolerance, found.unpatched, found.note)


def _on_model(model: object) -> tuple[Formula, ...]:
    # Imported here: the identities on paper need no transformers.
    from dualview.duality.verify.model_setup import require_model
    from dualview.duality.verify.on_model import MODEL_IDENTITIES

    require_model(model)
    return MODEL_IDENTITIES


def verify(
    seed: int = 0,
    model: object | None = None,
    identities: Sequence[Formula] = IDENTITIES,
    model_identities: Sequence[Formula] | None = None,
) -> list[Check]:
    """Run every identity on data drawn from `seed`; with a model, also the identities that need one.

    model             a `LanguageModel`
    model_identities  what to check on it (by default all of `on_model.MODEL_IDENTITIES`)
    """
    asked = () if model is None else _on_model(model) if model_identities is None else model_identities
    return [_check(each, seed) for each in identities] + [_check(each, seed, model) for each in asked]


def verify_wrong(seed: int = 0, model: object | None = None) -> list[Check]:
    """Run the common misprints on data drawn from `seed`, and on a model if one is given: none may pass."""
    return verify(seed, model, MISPRINTS, None if model is None else misprints_of(_on_model(model)))


_VERDICTS: dict[Status, str] = {"passed": "[green]pass[/]", "failed": "[red]FAIL[/]", "skipped": "[yellow]skipped[/]"}


def render(checks: Sequence[Check], title: str | None = None, whose: str = "paper") -> Table:
    """The table as rich prints it: statement, paper (under the heading `whose`), error, tolerance and verdict.

    A patch has another column: what the logits differ by without it. A skipped check says why.
    """
    patched = any(check.unpatched is not None for check in checks)
    table = Table(title=title, expand=False)
    table.add_column("statement", ratio=3)
    table.add_column(whose, ratio=1)
    for name in ("error", *(["unpatched"] if patched else []), "tolerance"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", justify="center", no_wrap=True)
    for check in checks:
        # brackets in a statement are mathematics, not rich's markup
        statement = escape(check.statement) + ("" if check.note is None else f"\n[dim]{escape(check.note)}[/]")
        numbers = ["" if check.error is None else f"{check.error:.1e}"]
        if patched:
            numbers.append("" if check.unpatched is None else f"{check.unpatched:.2g}")
        numbers.append("" if check.tolerance is None else f"{check.tolerance:.1e}")
        table.add_row(statement, check.paper, *numbers, _VERDICTS[check.status])
    return table
