import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualview.duality.theory.coefficients import StepRule, constant_rate, unroll
from dualview.io.errors import UserError

PROPERTY = settings(max_examples=25, deadline=None)

rates = st.floats(0.001, 0.5)
rules = st.builds(
    StepRule,
    lr=rates,
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    dampening=st.sampled_from([0.0, 0.3]),
    coupled_decay=st.sampled_from([0.0, 0.1]),
    clip=st.floats(0.1, 2.0),
)


def torch_weight(schedule, gradients, start):
    """The slow way: let torch.optim.SGD do it, on one number."""
    weight = torch.tensor([start], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for rule, gradient in zip(schedule, gradients, strict=True):
        group = optimizer.param_groups[0]
        weight.grad = None
        if rule is not None:
            group |= {
                "lr": rule.lr,
                "momentum": rule.momentum,
                "dampening": rule.dampening,
                "nesterov": rule.nesterov,
                "weight_decay": rule.coupled_decay,
            }
            with torch.no_grad():
                weight.mul_(1 - rule.lr * rule.decoupled_decay)
            weight.grad = torch.tensor([gradient * rule.clip], dtype=torch.float64)
        optimizer.step()
    return float(weight.detach())


@PROPERTY
@given(st.lists(st.one_of(st.none(), rules), max_size=12), st.integers(0, 2**31), st.floats(-3, 3))
def test_unroll_is_torch_sgd_whatever_changes_between_steps(schedule, seed, start):
    gradients = np.random.default_rng(seed).normal(size=len(schedule))
    found = unroll(schedule)
    predicted = found.initial * start + np.dot(found.steps, gradients)
    assert predicted == pytest.approx(torch_weight(schedule, gradients, start), rel=1e-10, abs=1e-10)


@PROPERTY
@given(st.integers(0, 10), rates, st.floats(0.1, 0.95), st.floats(0, 1), st.integers(0, 2**31))
def test_nesterov_with_either_decay(steps, lr, momentum, decay, seed):
    gradients = np.random.default_rng(seed).normal(size=steps)
    for kind in ("coupled_decay", "decoupled_decay"):
        schedule = [StepRule(lr=lr, momentum=momentum, nesterov=True, **{kind: decay})] * steps
        found = unroll(schedule)
        predicted = found.initial * 1.5 + np.dot(found.steps, gradients)
        assert predicted == pytest.approx(torch_weight(schedule, gradients, 1.5), rel=1e-10, abs=1e-10)


@PROPERTY
@given(st.integers(0, 15), rates, st.sampled_from([0.0, 0.3, 0.9]), st.floats(0, 1))
def test_constant_rate_is_the_printed_closed_form(steps, lr, momentum, decay):
    found = unroll([StepRule(lr=lr, momentum=momentum, decoupled_decay=decay)] * steps)
    printed = constant_rate(steps, lr, momentum, decay)
    assert found.initial == pytest.approx(printed.initial, rel=1e-12)
    assert found.steps == pytest.approx(printed.steps, rel=1e-11)


def test_plain_sgd_is_minus_the_rate():
    assert constant_rate(3, 0.1).steps == pytest.approx((-0.1, -0.1, -0.1))
    assert constant_rate(3, 0.1).initial == 1


def test_both_decays_at_once_are_refused():
    with pytest.raises(UserError, match="both coupled and decoupled"):
        StepRule(lr=0.1, coupled_decay=0.1, decoupled_decay=0.1)
