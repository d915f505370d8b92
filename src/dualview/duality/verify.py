"""Every identity on fresh random data, and on a model if one is given, as a table; and the misprints, which must fail.

verify(seed=0, model=lm)        → a Check per identity, all passed
verify_wrong(seed=0, model=lm)  → a Check per misprint, none passed
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from dualview.duality import (
    identities_implicit,
    identities_linear,
    identities_regression,
    identities_softmax,
    misprints,
    misprints_implicit,
)
from dualview.duality.identity import Draws, Identity, ModelIdentity
from dualview.errors import UserError

IDENTITIES: tuple[Identity, ...] = (
    *identities_linear.IDENTITIES,
    *identities_regression.IDENTITIES,
    *identities_softmax.IDENTITIES,
    *identities_implicit.IDENTITIES,
)

MISPRINTS: tuple[Identity, ...] = (*misprints.MISPRINTS, *misprints_implicit.MISPRINTS)


@dataclass(frozen=True)
class Check:
    """One row of the table; its fields are the keys of `dualview verify --json`."""

    statement: str
    paper: str
    error: float
    tolerance: float
    passed: bool


def _check(identity: Identity | ModelIdentity, error: float) -> Check:
    # a NaN passes nothing, because every comparison with it is false
    return Check(identity.statement, identity.paper, error, identity.tolerance, passed=error <= identity.tolerance)


def verify(
    seed: int = 0,
    model: object | None = None,
    identities: Sequence[Identity] = IDENTITIES,
    model_identities: Sequence[ModelIdentity] | None = None,
    skipped: Callable[[str], None] | None = None,
) -> list[Check]:
    """Run every identity on data drawn from `seed`; with a model, also the identities that need one.

    model             a `LanguageModel`
    model_identities  what to check on it (by default all of `model_identities.MODEL_IDENTITIES`)
    skipped           told, in one sentence each, which of them this architecture has no place for
    """
    if model is not None and model_identities is None:
        # Imported here: the identities on paper need no transformers.
        from dualview.duality.model_identities import MODEL_IDENTITIES, require_model

        require_model(model)
        model_identities = MODEL_IDENTITIES
    checks = [_check(identity, identity.error(Draws(seed, identity.statement))) for identity in identities]
    if model is None:
        return checks
    for each in model_identities or ():
        try:
            checks.append(_check(each, each.error(Draws(seed, each.statement), model)))
        except UserError as reason:
            if skipped is not None:
                skipped(f"Not checked: {each.statement} ({str(reason).rstrip('.')}).")
    return checks


def verify_wrong(
    seed: int = 0, model: object | None = None, skipped: Callable[[str], None] | None = None
) -> list[Check]:
    """Run the common misprints on data drawn from `seed`, and on a model if one is given: none may pass."""
    if model is None:
        return verify(seed, identities=MISPRINTS)
    from dualview.duality.model_identities import require_model
    from dualview.duality.model_misprints import MODEL_MISPRINTS

    require_model(model)
    return verify(seed, model, MISPRINTS, MODEL_MISPRINTS, skipped)


def render(checks: Sequence[Check], title: str | None = None) -> Table:
    """The table as rich prints it: statement, paper, error found, tolerance, pass or fail."""
    table = Table(title=title, expand=False)
    table.add_column("statement", ratio=3)
    table.add_column("paper", ratio=1)
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("tolerance", justify="right", no_wrap=True)
    table.add_column("", justify="center", no_wrap=True)
    for check in checks:
        verdict = "[green]pass[/]" if check.passed else "[red]FAIL[/]"
        # brackets in a statement are mathematics, not rich's markup
        statement = check.statement.replace("[", "\\[")
        table.add_row(statement, check.paper, f"{check.error:.1e}", f"{check.tolerance:g}", verdict)
    return table
