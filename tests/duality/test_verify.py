import io
import json
import math
import subprocess
import sys
from dataclasses import asdict

import pytest
from rich.console import Console

from dualview.duality.identity import Draws, Identity, ModelIdentity
from dualview.duality.verify import IDENTITIES, render, verify, verify_wrong
from dualview.errors import UserError


@pytest.mark.parametrize("seed", [0, 1, 2, 12345])
def test_every_identity_holds(seed):
    failed = [check for check in verify(seed) if not check.passed]
    assert not failed


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 12345])
def test_every_misprint_fails(seed):
    assert not [check for check in verify_wrong(seed) if check.passed]


def test_misprints_fail_by_far():
    checks = verify_wrong(0)
    assert len(checks) > 40
    assert all(check.error > 1e-4 and math.isfinite(check.error) for check in checks)


def test_statements_are_unique_and_data_are_fresh():
    assert len({identity.statement for identity in IDENTITIES}) == len(IDENTITIES)
    exact = [identity for identity in IDENTITIES if identity.tolerance < 1e-6]
    errors = [[check.error for check in verify(seed, identities=exact)] for seed in (0, 0, 1)]
    assert errors[0] == errors[1] and errors[0] != errors[2]
    shapes = {tuple(Draws(seed, "x").size(2, 9) for _ in range(1)) for seed in range(40)}
    assert len(shapes) > 4


def test_json_has_the_contracts_keys():
    rows = json.loads(json.dumps([asdict(check) for check in verify(0, identities=IDENTITIES[:2])]))
    assert all(set(row) == {"statement", "paper", "error", "tolerance", "passed"} for row in rows)


def test_nan_passes_nothing():
    broken = Identity("0/0", "nobody", lambda draws: float("nan"))
    assert [check.passed for check in verify(0, identities=[broken])] == [False]


def test_identities_on_a_model():
    on_model = ModelIdentity("2 + 2 = 4", "arithmetic", lambda draws, model: abs(model["two"] * 2 - 4.0), 0.0)
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


def test_importing_the_package_does_not_import_torch():
    code = "import sys, dualview.duality; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
