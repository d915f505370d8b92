import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from dualview.duality.errors import NotApplicable
from dualview.duality.verify import linear as identities_linear
from dualview.duality.verify.check import Deviation, Draws, Formula, worst_of
from dualview.duality.verify.run import IDENTITIES, MISPRINTS, render, verify, verify_wrong
from dualview.io.errors import UserError


def named(formulas):
    return [pytest.param(formula, id=formula.statement) for formula in formulas]


@pytest.mark.parametrize("seed", [0, 1, 2, 12345])
@pytest.mark.parametrize("identity", named(IDENTITIES))
def test_an_identity_holds(identity, seed):
    (check,) = verify(seed, identities=[identity])
    assert check.passed, check


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 12345])
@pytest.mark.parametrize("misprint", named(MISPRINTS))
def test_a_misprint_fails_by_far(misprint, seed):
    (check,) = verify(seed, identities=[misprint])
    assert check.status == "failed" and math.isfinite(check.error)
    assert seed or check.error > 1e-4


def test_every_misprint_belongs_to_an_identity():
    """`verify --wrong` runs over the registry of `verify`: 46 misprints, each next to the identity that it distorts."""
    assert [check.statement for check in verify_wrong(0)] == [misprint.statement for misprint in MISPRINTS]
    assert len(MISPRINTS) == 46 and len(IDENTITIES) == 45
    statements = [formula.statement for formula in (*IDENTITIES, *MISPRINTS)]
    assert len(set(statements)) == len(statements)


def test_data_are_fresh():
    exact = [identity for identity in IDENTITIES if identity.tolerance < 1e-6]
    errors = [[check.error for check in verify(seed, identities=exact)] for seed in (0, 0, 1)]
    assert errors[0] == errors[1] and errors[0] != errors[2]
    shapes = {tuple(Draws(seed, "x").size(2, 9) for _ in range(1)) for seed in range(40)}
    assert len(shapes) > 4


KEYS = {"statement", "paper", "error", "tolerance", "passed", "status", "unpatched", "note"}


def test_json_has_the_contracts_keys():
    rows = json.loads(json.dumps([check.to_json() for check in verify(0, identities=IDENTITIES[:2])]))
    assert all(set(row) == KEYS and row["passed"] is True and row["status"] == "passed" for row in rows)


def refuse(kind, sentence):
    def error(_draws, _model):
        raise kind(sentence)

    return Formula(f"raises {kind.__name__}", "nobody", error)


def test_only_what_has_no_place_is_skipped():
    """Any other mistake is a failure: it must not look as if the architecture had no place for the identity."""
    asked = [refuse(NotApplicable, "no such layer"), refuse(UserError, "it diverged")]
    skipped, failed = verify(0, {}, identities=(), model_identities=asked)
    assert (skipped.status, skipped.passed, skipped.error, skipped.note) == ("skipped", None, None, "no such layer")
    assert failed.status == "failed" and failed.passed is False and failed.note == "it diverged"
    rows = json.loads(json.dumps([skipped.to_json(), failed.to_json()], allow_nan=False))
    assert [row["status"] for row in rows] == ["skipped", "failed"] and [row["error"] for row in rows] == [None, None]
    assert rows[0]["note"] == "no such layer" and set(rows[0]) == KEYS


def test_a_tolerance_is_what_the_statement_leaves_and_what_rounding_can_add():
    cases = [
        (Deviation(1e-6, 2.5, rounding=1e-7), 0.0),
        (Deviation(1e-6, 2.5, rounding=1e-5), 0.0),
        (Deviation(1e-6, rounding=1e-7), 1e-3),
        (1e-6, 0.0),
    ]
    asked = [Formula("x", "nobody", lambda *_, found=found: found, exact) for found, exact in cases]
    checks = verify(0, {}, identities=(), model_identities=asked)
    assert [check.passed for check in checks] == [False, True, True, False]
    assert [check.tolerance for check in checks] == [1e-7, 1e-5, 1e-3 + 1e-7, 0.0] and checks[0].unpatched == 2.5


def test_the_worst_is_judged_by_its_own_rounding():
    small, large = Deviation(1e-6, rounding=1e-7), Deviation(1e-3, rounding=1e-2)
    assert worst_of([large, small, Deviation(0.0)]) is small
    broken = Deviation(float("nan"), rounding=1.0)
    assert worst_of([small, broken, large]) is broken
    assert worst_of([small, Deviation(1e-12), large]).error == 1e-12  # nothing was allowed here


def test_the_table_shows_what_was_skipped_and_what_there_was_to_explain():
    patched = Formula("a patch", "nobody", lambda draws, model: Deviation(1e-6, unpatched=2.5, rounding=1e-5))
    checks = verify(0, {}, identities=(), model_identities=[patched, refuse(NotApplicable, "no such [layer]")])
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(checks))
    text = console.export_text()
    assert "skipped" in text and "no such [layer]" in text and "unpatched" in text and "2.5" in text
    console.print(render(verify(0, identities=IDENTITIES[:1])))
    assert "unpatched" not in console.export_text()


def test_nan_passes_nothing():
    broken = Formula("0/0", "nobody", lambda draws: float("nan"))
    assert [check.passed for check in verify(0, identities=[broken])] == [False]


def test_identities_on_a_model():
    on_model = Formula("2 + 2 = 4", "arithmetic", lambda draws, model: abs(model["two"] * 2 - 4.0))
    checks = verify(0, {"two": 2}, identities=(), model_identities=[on_model])
    assert [check.passed for check in checks] == [True]
    assert not verify(0, {"two": 3}, identities=(), model_identities=[on_model])[0].passed
    assert verify(0, identities=(), model_identities=[on_model]) == []
    with pytest.raises(UserError, match="no identities"):
        verify(0, model=object())


def test_table_prints_brackets_and_verdicts():
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(verify_wrong(0)[:1] + verify(0, identities=IDENTITIES[5:6]), title="checks"))
    text = console.export_text()
    assert "[no −η]" in text and "FAIL" in text and "pass" in text and "W_K[X′,X]" in text


def test_the_sum_of_outer_products_can_fail(monkeypatch):
    """Each of the three functions is compared with sums that use none of them."""
    identity = next(each for each in IDENTITIES if each.statement.startswith("ΔW_ICL"))
    assert identity.error(Draws(3, "x")) < 1e-12
    for name in ("outer_products", "state_weights", "linear_weights"):
        with monkeypatch.context() as patch:
            right = getattr(identities_linear, name)
            patch.setattr(identities_linear, name, lambda *given, right=right: 1.01 * right(*given))
            assert identity.error(Draws(3, "x")) > 1e-3
    with monkeypatch.context() as patch:  # a mistake in what two of them share
        patch.setattr("dualview.duality.theory.icl_as_update.state_weights", lambda keys, values: keys @ values.mT)
        assert identity.error(Draws(3, "x")) > 1e-3


def test_importing_the_package_does_not_import_torch():
    code = "import sys, dualview.duality; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_reference_lists_every_module():
    root = Path(__file__).parents[3]
    files = (root / "src/dualview/duality").rglob("*.py")
    modules = {".".join(file.relative_to(root / "src").with_suffix("").parts) for file in files}
    modules = {name for name in modules if not name.endswith("__init__")}
    page = (root / "docs/reference/duality.md").read_text(encoding="utf-8")
    assert {line.removeprefix("::: ") for line in page.splitlines() if line.startswith("::: ")} == {
        *modules,
        "dualview.duality",
    }
