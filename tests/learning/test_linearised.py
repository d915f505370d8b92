"""The linearised model against finite differences of the real one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dualview.anatomy.layers import Role
from dualview.io.errors import UserError
from dualview.learning.finetune import finetune
from dualview.learning.recipe import TrainingRecipe
from dualview.learning.weight_patches import Deltas, Linearised
from dualview.models.scoring import PassPlan, ask
from equivalence import cases

# RMSNorm is float32 inside a float64 model, which finite differences see: those architectures get a looser look.
EXACT, ROUGH = 1e-5, 0.05
NAMES = {"gpt2": EXACT, "opt": EXACT, "gpt_neox": EXACT, "llama": ROUGH, "gpt_oss-sinks": ROUGH}
STEP = 1e-5
HOW = PassPlan(cases.DEMOS, 1)


def scaled(deltas: Deltas, by: float) -> Deltas:
    weights = tuple(by * w for w in deltas.weights)
    return Deltas(deltas.projections, weights, tuple(None if b is None else by * b for b in deltas.biases))


def some_change(name: str, seed: int = 0, roles: tuple[Role, ...] = ("k", "v")) -> Deltas:
    draw = torch.Generator().manual_seed(seed)
    zero = Deltas.zero(cases.lm(name).anatomy.projections(roles), 1, torch.float64)
    for tensor in (*zero.weights, *(b for b in zero.biases if b is not None)):
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=draw, dtype=torch.float64))
    return zero


@pytest.mark.parametrize("name", NAMES)
def test_records_are_the_first_order_expansion(name: str) -> None:
    lm, change = cases.lm(name), some_change(name)
    base = ask(lm, cases.QUERIES, HOW).settings[0]
    linearised = Linearised(change.projections, change.weights, change.biases)
    mine = ask(lm, cases.QUERIES, HOW, linearised).settings[0]
    up, down = (ask(lm, cases.QUERIES, HOW, scaled(change, s * STEP)).settings[0] for s in (1, -1))
    for what in ("h", "m", "demo_mass"):
        slope = (getattr(up, what) - getattr(down, what)) / (2 * STEP)
        found = getattr(mine, what) - getattr(base, what)
        assert np.abs(slope).max() > 1e-3, what
        assert np.abs(found - slope).max() < NAMES[name] * max(1.0, np.abs(slope).max()), what


def test_values_alone_may_change() -> None:
    """In the first layer then only v has a tangent, which the compiled kernels do not take either."""
    lm, change = cases.lm("opt"), some_change("opt", roles=("v",))
    base, mine, up, down = (
        ask(lm, cases.QUERIES, HOW, patch).settings[0].h
        for patch in (None, Linearised(*vars(change).values()), scaled(change, STEP), scaled(change, -STEP))
    )
    assert base is not None and mine is not None and up is not None and down is not None
    slope = (up - down) / (2 * STEP)
    assert np.abs(slope).max() > 1e-3 and np.abs(mine - base - slope).max() < EXACT * max(1.0, np.abs(slope).max())


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_a_second_step_follows_the_linear_model(name: str) -> None:
    """The second loss is that of the expansion, and the second change its gradient, along a random direction."""
    lm, lr, recipe = cases.lm(name), 0.05, TrainingRecipe(rule="linearised")
    first, second = (finetune(lm, cases.SEQUENCES[:n], [lr], recipe)[0] for n in (1, 2))
    assert isinstance(first.patch, Linearised) and isinstance(second.patch, Linearised)
    ids = torch.tensor([cases.SEQUENCES[1].ids])

    def logits(change: Deltas | None, by: float) -> torch.Tensor:
        with torch.no_grad():
            if change is None:
                return lm.model(input_ids=ids, use_cache=False).logits[0, :-1]
            with scaled(change, by).applied():
                return lm.model(input_ids=ids, use_cache=False).logits[0, :-1]

    def slope(change: Deltas) -> torch.Tensor:
        return (logits(change, STEP) - logits(change, -STEP)) / (2 * STEP)

    expanded = (logits(None, 0) + slope(first.patch)).requires_grad_()
    loss = torch.nn.functional.cross_entropy(expanded, ids[0, 1:])
    assert second.losses[1] == pytest.approx(float(loss.detach()), abs=1e-6)
    [pull] = torch.autograd.grad(loss, [expanded])
    direction = some_change(name, seed=1)
    right = -lr * float((pull * slope(direction)).sum())
    moved = zip(second.patch.weights, first.patch.weights, direction.weights, strict=True)
    mine = sum(float(((after - before) * u).sum()) for after, before, u in moved)
    biases = zip(second.patch.biases, first.patch.biases, direction.biases, strict=True)
    mine += sum(float(((a - b) * u).sum()) for a, b, u in biases if a is not None and b is not None and u is not None)
    assert mine == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize("name", ["bloom", "lfm2-hybrid"])
def test_what_has_no_tangents_is_told(name: str) -> None:
    """BLOOM's own GELU, and whatever keeps its own attention kernel."""
    with pytest.raises(UserError, match="linearised fine-tuning cannot follow"):
        finetune(cases.lm(name), cases.SEQUENCES, [0.1], TrainingRecipe(rule="linearised"))
