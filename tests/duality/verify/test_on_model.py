"""`verify --model`: the identities hold on real architectures, the misprints do not."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import zoo
from dualview.duality.errors import NotApplicable
from dualview.duality.on_model.context_patch import PatchReport
from dualview.duality.on_model.dual_finetuning import DualPatch
from dualview.duality.on_model.rounding import PassRounding
from dualview.duality.on_model.single_prompt import last_logits
from dualview.duality.verify import on_model as model_identities
from dualview.duality.verify.check import Draws
from dualview.duality.verify.model_setup import judged, trial
from dualview.duality.verify.on_model import MODEL_IDENTITIES
from dualview.duality.verify.run import MISPRINTS, verify, verify_wrong
from dualview.io.errors import UserError
from dualview.models.loading import adopt, load_model
from equivalence import tiny
from equivalence.cases import lm as zoo_lm

NAMES = ["llama", "gpt2", "gemma2-softcap", "qwen3-qk-norm", "falcon-groups", "bloom"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 7])
def test_every_identity_holds_in_float64(name, seed):
    checks = verify(seed, zoo_lm(name), identities=())
    assert len(checks) == len(MODEL_IDENTITIES)
    assert [check for check in checks if check.status == "failed"] == []
    assert [check.status for check in checks].count("skipped") == (1 if name == "gemma2-softcap" else 0)
    for check in checks:
        narrow = name == "gemma2-softcap" and check.unpatched is not None  # its norms put out float32 numbers
        most = 6e-3 if "quadrature" in check.statement else 0.1 * check.unpatched if narrow else 1e-9
        assert check.tolerance is None or check.tolerance < most, check


def test_every_identity_holds_in_float32():
    lm = adopt(copy.deepcopy(zoo_lm("llama").model).float(), None, "llama32")
    assert all(check.passed for check in verify(3, lm, identities=()))


def fresh(name, dtype=torch.float32):
    """A model as its configuration draws it: matrices of 0.02, whose updates are below the rounding of its logits."""
    kind, shape = zoo.ZOO[name]
    torch.manual_seed(5)
    return adopt(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape), dtype=dtype).eval(), None, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["llama", "gemma2-softcap", "gpt2", "opt"])
def test_a_model_that_hardly_moves_is_checked_and_not_divided_by_zero(name, dtype):
    lm = fresh(name, dtype)
    checks = verify(0, lm, identities=())
    assert [check for check in checks if check.status == "failed"] == []
    assert all(check.error is None or math.isfinite(check.error) for check in checks)
    wrong = verify_wrong(0, lm)[len(MISPRINTS) :]
    assert [check for check in wrong if check.status == "passed"] == []


def test_the_checks_of_a_model_that_hardly_moves_can_fail(monkeypatch):
    """Errors a hundredth too large in the dual form, and in the contributions: both fail, although ‖ΔW x‖ is tiny."""
    right = model_identities.role_factors

    def wrong(*given):
        return tuple(replace(f, errors=1.01 * f.errors) for f in right(*given))

    monkeypatch.setattr(model_identities, "role_factors", wrong)
    dual = model_identities.dual_patch
    monkeypatch.setattr(
        model_identities,
        "dual_patch",
        lambda *given: DualPatch(tuple(replace(f, errors=1.01 * f.errors) for f in dual(*given).factors)),
    )
    checks = verify(0, fresh("llama"), identities=())
    failed = {check.statement for check in checks if check.status == "failed"}
    assert len(failed) == 2 and all("LinAttn" in one or "‖ΔW_V x‖" in one for one in failed)


def test_a_patch_is_judged_by_what_there_was_to_explain():
    report = PatchReport(error=5e-4, unpatched=6e-4, relative=0.8, same_token=True, gap=5e-3)
    setup = trial(Draws(0, "x"), fresh("llama"))
    rounding = PassRounding(largest=1e-6, length=1e-5)
    measured = judged(setup, report, rounding)
    assert measured.error == 0.8 and measured.unpatched == 6e-4 and measured.rounding == 1e-5 / 5e-3
    wide = replace(report, error=2.0, unpatched=20.0, gap=100.0)
    assert judged(setup, wide, rounding).error == 2.0
    assert judged(setup, wide, rounding).rounding == 1e-6
    with pytest.raises(NotApplicable, match="rounding"):
        judged(setup, replace(report, gap=9e-5), rounding)
    checks = verify(0, setup.lm, identities=())
    patched = [check for check in checks if check.unpatched is not None]
    assert len(patched) == 3 and all(check.unpatched > 1e-3 for check in patched)


def test_words_that_a_vocabulary_lacks_are_not_one_candidate(tmp_path):
    tiny.save_model(tmp_path)
    lm = load_model(str(tmp_path), dtype="float64")
    good, bad = trial(Draws(0, "x"), lm).query.candidates
    assert good != bad and good and bad


def test_experts_are_loaded_in_float64(tmp_path):
    tiny.save_model(tmp_path)
    words = len(AutoTokenizer.from_pretrained(tmp_path))
    kind, shape = zoo.ZOO["mixtral"]
    config = AutoConfig.for_model(kind, **{**shape, "vocab_size": words})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    lm = load_model(str(tmp_path), dtype="float64")
    assert last_logits(lm, [1, 4, 5]).dtype == torch.float64


@pytest.mark.parametrize("name", NAMES)
def test_every_misprint_fails(name):
    checks = verify_wrong(0, zoo_lm(name))[len(MISPRINTS) :]
    assert len(checks) == 6
    assert all(check.status == "failed" and math.isfinite(check.error) for check in checks)


def test_what_an_architecture_has_no_place_for_is_skipped():
    checks = verify(0, zoo_lm("mixtral"), identities=())
    skipped = [check for check in checks if check.status == "skipped"]
    assert len(checks) == len(MODEL_IDENTITIES) and len(skipped) == 4
    assert all(check.note for check in skipped) and any("experts" in str(check.note) for check in skipped)
    assert all(check.passed for check in checks if check not in skipped)


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
    from dualview.duality.on_model.context_patch import patch_report

    lm = load_model("embedded")
    quick = [each for each in MODEL_IDENTITIES if "logit difference" not in each.statement]
    assert [check for check in verify(0, lm, (), quick) if not check.passed] == []
    setup = trial(Draws(1, "patch"), lm)
    report = patch_report(lm, setup.prompts.prefix, setup.query.ids, setup.bare)
    assert report.error < 1e-3 and report.unpatched > 1 and report.same_token
