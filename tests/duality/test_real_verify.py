"""`verify --model`: the identities hold on real architectures, the misprints do not."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from dualview.duality.model_identities import MODEL_IDENTITIES
from dualview.duality.verify import MISPRINTS, verify, verify_wrong
from dualview.errors import UserError
from dualview.models.loading import adopt
from equivalence.cases import lm as zoo_lm

NAMES = ["llama", "gpt2", "gemma2-softcap", "qwen3-qk-norm", "falcon-groups", "bloom"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 7])
def test_every_identity_holds_in_float64(name, seed):
    said: list[str] = []
    checks = verify(seed, zoo_lm(name), identities=(), skipped=said.append)
    assert len(checks) + len(said) == len(MODEL_IDENTITIES)
    assert len(said) == (1 if name == "gemma2-softcap" else 0)
    assert [check for check in checks if not check.passed] == []


def test_every_identity_holds_in_float32():
    lm = adopt(copy.deepcopy(zoo_lm("llama").model).float(), None, "llama32")
    assert all(check.passed for check in verify(3, lm, identities=()))


@pytest.mark.parametrize("name", NAMES)
def test_every_misprint_fails(name):
    checks = verify_wrong(0, zoo_lm(name))[len(MISPRINTS) :]
    assert len(checks) == 6
    assert all(not check.passed and math.isfinite(check.error) for check in checks)


def test_what_an_architecture_has_no_place_for_is_told():
    said: list[str] = []
    checks = verify(0, zoo_lm("mixtral"), identities=(), skipped=said.append)
    assert len(said) == 4 and all(sentence.startswith("Not checked: model: ") for sentence in said)
    assert len(checks) == len(MODEL_IDENTITIES) - 4 and all(check.passed for check in checks)


def test_only_models_wide_enough_are_checked():
    with pytest.raises(UserError, match="no identities"):
        verify(0, model=object(), identities=())
    with pytest.raises(UserError, match="no identities"):
        verify_wrong(0, model="llama")
    narrow = adopt(copy.deepcopy(zoo_lm("gpt2").model).to(torch.bfloat16), None, "narrow")
    with pytest.raises(UserError, match="float32 or float64"):
        verify(0, narrow, identities=())


@pytest.mark.embedded
def test_the_embedded_model():
    from dualview.duality.context_patch import patch_report
    from dualview.duality.identity import Draws
    from dualview.duality.model_identities import trial
    from dualview.models.loading import load_model

    lm = load_model("embedded")
    quick = [each for each in MODEL_IDENTITIES if "logit difference" not in each.statement]
    assert [check for check in verify(0, lm, (), quick) if not check.passed] == []
    setup = trial(Draws(1, "patch"), lm)
    report = patch_report(lm, setup.prompts.prefix, setup.query.ids, setup.bare)
    assert report.error < 1e-3 and report.unpatched > 1 and report.same_token
