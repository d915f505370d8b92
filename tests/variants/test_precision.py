"""Every variant in half precision, and what the float64 tests rest on."""

from __future__ import annotations

import pytest
import torch

from dualview.variants import (
    Momentum,
    apply,
    attach,
)
from variants.cases import CASES, IDS

BARE = [(v, i) for v, i in zip(CASES, IDS, strict=True) if v.name != "augmented"]
CLOSE = {torch.bfloat16: 0.02, torch.float16: 0.003}
WHOLE = {torch.bfloat16: 0.05, torch.float16: 0.01}


def off(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize("variant", [v for v, _ in BARE], ids=[i for _, i in BARE])
def test_one_call_in_half_precision(kit, variant, dtype):
    """From the same half-precision queries, keys and values as in float32; padded, windowed, with grouped heads."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 12, 8, generator=draw).to(dtype) for heads in (4, 2, 2))
    real = torch.ones(2, 12, dtype=torch.bool)
    real[0, :3] = False
    for mask in (None, kit.causal_mask(real), kit.causal_mask(real, 5)):
        rows = torch.ones_like(real) if mask is None else real
        out = apply(variant, query, key, value, mask=mask)
        assert out.dtype == dtype
        wide = apply(variant, query.float(), key.float(), value.float(), mask=mask)
        assert off(out[rows], wide[rows]) < CLOSE[dtype]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", list(WHOLE), ids=str)
@pytest.mark.parametrize("variant", CASES, ids=IDS)
def test_a_model_in_half_precision(kit, kind, variant, dtype):
    """Close to the model in float32, and decoding with a cache close to the full pass; left-padded."""
    ids = torch.randint(2, 40, (2, 13), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"attention_mask": mask, "position_ids": kit.positions(mask), "use_cache": False}
    model = kit.equipped(kind, variant).float()
    with torch.no_grad():
        wide = model(ids, **given).logits
        half = model.to(dtype)(ids, **given).logits
        steps = kit.decoded(model, ids, mask, None, [5, 8, 9, 10])
    real = mask.bool()
    assert half.dtype == dtype
    assert off(steps[real], half[real]) < WHOLE[dtype]
    # A sign jumps where a value rounds through 0, so that two precisions of a whole model need not be close.
    if variant.name != "sign" or dtype == torch.float16:
        assert off(half[real], wide[real]) < WHOLE[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_learnt_eta_never_leaves_the_interval(kit, dtype):
    model = kit.model("gpt2").to(dtype)
    attach(model, Momentum(eta=0.25, learnable=True))
    equipment = model.transformer.h[0].attn.dualview
    torch.testing.assert_close(equipment.coefficient(), torch.tensor(0.25, dtype=dtype))
    for logit in (-500.0, 40.0, 500.0):
        with torch.no_grad():
            equipment.eta_logit.fill_(logit)
            assert 0 <= float(equipment.coefficient()) < 1
            assert model(torch.arange(2, 11)[None]).logits.isfinite().all()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "olmo3", "llama4", "phi3"])
def test_the_norms_of_the_test_models_do_not_round(kit, kind):
    """The float64 tests compare to 1e-11, which means something only if no step between is taken in float32."""
    model = kit.model(kind, "eager")
    wanted = set(kit.norms[kind].split())
    norms = [m for m in model.modules() if type(m).__name__.endswith(("RMSNorm", "L2Norm"))]
    assert {type(m).__name__ for m in norms} <= wanted and norms
    for norm in norms:
        width = norm.weight.shape[0] if hasattr(norm, "weight") else 4
        x = torch.randn(3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            exact, rounded = norm(x), norm(x.float())
        torch.testing.assert_close(exact.float(), rounded.float(), rtol=1e-5, atol=1e-6)
        assert not torch.equal(exact, exact.float().double())
