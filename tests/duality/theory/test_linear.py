import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from dualview.duality.theory.coefficients import StepRule
from dualview.duality.theory.linear import aggregate
from dualview.duality.theory.recorder import DualRecorder, weight_matrix
from dualview.io.errors import UserError

PROPERTY = settings(max_examples=25, deadline=None)

TIGHT = {torch.float64: 1e-11, torch.float32: 2e-5}


class Net(nn.Module):
    """embed → watched layer → tanh → readout, on batches of sequences."""

    def __init__(self, d_in, d_out, dtype=torch.float64, conv=False, bias=True):
        super().__init__()
        self.below = nn.Linear(d_in, d_in, dtype=dtype)
        self.layer = (Conv1D(d_out, d_in) if conv else nn.Linear(d_in, d_out, bias=bias)).to(dtype)
        self.above = nn.Linear(d_out, 1, dtype=dtype)

    def forward(self, x):
        return self.above(torch.tanh(self.layer(torch.tanh(self.below(x)))))


def run(net, optimizer, steps=4, batch=(2, 3), dtype=torch.float64, before_step=lambda: None, **options):
    torch.manual_seed(1)
    d_in = net.below.in_features
    with DualRecorder(net.layer, optimizer, **options) as recorder:
        for _ in range(steps):
            net(torch.randn(*batch, d_in, dtype=dtype)).square().mean().backward()
            before_step()
            optimizer.step()
            optimizer.zero_grad()
    return recorder


@PROPERTY
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([torch.float64, torch.float32]),
    st.booleans(),
    st.sampled_from([(1,), (4,), (2, 3), (2, 1, 3), ()]),
    st.sampled_from(
        [{}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}, {"weight_decay": 0.1}, {"maximize": True}]
    ),
    st.integers(0, 1000),
)
def test_every_layer_is_rebuilt_from_its_tokens(d_in, d_out, dtype, conv, batch, sgd, seed):
    torch.manual_seed(seed)
    net = Net(d_in, d_out, dtype, conv)
    start = weight_matrix(net.layer).clone()
    if conv and not batch:
        batch = (1,)  # Conv1D takes no bare vector
    recorder = run(net, torch.optim.SGD(net.parameters(), lr=0.1, **sgd), batch=batch, dtype=dtype)
    (residual,) = recorder.report()
    allowed = max(TIGHT[dtype], 50 * residual.rounding)
    assert residual.weight <= allowed
    assert residual.bias is not None
    form = recorder.dual()
    assert torch.equal(form.weight0, start)
    assert form.keys.shape[1] == residual.tokens == 4 * math.prod(batch)
    x = torch.randn(d_in, 5, dtype=dtype)
    expected = weight_matrix(net.layer) @ x + net.layer.bias.detach()[:, None]
    torch.testing.assert_close(form(x), expected, rtol=1e-4, atol=10 * TIGHT[dtype])
    torch.testing.assert_close(form(x[:, 0]), expected[:, 0], rtol=1e-4, atol=10 * TIGHT[dtype])


def test_errors_are_minus_the_rate_times_the_gradient_of_that_step():
    """Against autograd on the outputs themselves, kept with retain_grad and not by a hook."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    keys, errors = [], []
    with DualRecorder({"a": layer}, optimizer) as recorder:
        for _ in range(3):
            x = torch.randn(4, 3, dtype=torch.float64)
            out = layer(x)
            out.retain_grad()
            out.pow(3).sum().backward()
            keys.append(x)
            errors.append(-0.05 * out.grad)
            optimizer.step()
            optimizer.zero_grad()
    form = recorder.dual("a")
    torch.testing.assert_close(form.keys, torch.cat(keys).T)
    torch.testing.assert_close(form.errors, torch.cat(errors).T)
    torch.testing.assert_close(form.bias_errors, torch.cat(errors).T)


def test_index_says_where_each_token_came_from():
    net = Net(3, 2)
    index = run(net, torch.optim.SGD(net.parameters(), lr=0.1), steps=2, batch=(2, 3)).dual().index
    assert index.step.tolist() == [0] * 6 + [1] * 6
    assert index.sequence.tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert index.position.tolist() == [0, 1, 2] * 4
    assert set(index.call.tolist()) == {0}


def test_contributions_are_signed_and_sum_to_the_change():
    net = Net(4, 3)
    start = net.layer.weight.detach().clone()
    bias_start = net.layer.bias.detach().clone()
    form = run(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)).dual()
    x, u = torch.randn(4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    slow = np.array([float(u @ form.errors[:, t]) * float(form.keys[:, t] @ x) for t in range(form.keys.shape[1])])
    found = form.contributions(x, u)
    np.testing.assert_allclose(found.numpy(), slow, rtol=1e-12)
    assert (found < 0).any() and (found > 0).any()
    change = u @ (net.layer.weight.detach() - start) @ x
    torch.testing.assert_close(found.sum(), change)
    torch.testing.assert_close(u @ form.bias_errors.sum(1), u @ (net.layer.bias.detach() - bias_start))
    many = form.contributions(torch.stack([x, -x], dim=1), u)
    torch.testing.assert_close(many, torch.stack([found, -found], dim=1))


@PROPERTY
@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 1000))
def test_aggregate_is_a_grouped_sum(tokens, groups, seed):
    generator = np.random.default_rng(seed)
    values, ids = generator.normal(size=(tokens, 2)), generator.integers(0, groups, size=tokens)
    slow = np.stack([values[ids == g].sum(axis=0) for g in range(groups)])
    found = aggregate(torch.from_numpy(values), torch.from_numpy(ids), groups)
    np.testing.assert_allclose(found.numpy(), slow, atol=1e-12)
    assert aggregate(torch.from_numpy(values), torch.from_numpy(ids)).shape[0] == ids.max() + 1


def test_clipping_is_found_as_a_scalar():
    net = Net(4, 3)
    clip = lambda: nn.utils.clip_grad_norm_(net.parameters(), 0.01)  # noqa: E731
    recorder = run(net, torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9), before_step=clip)
    (residual,) = recorder.report()
    assert residual.weight < 1e-11 and residual.bias < 1e-11
    assert recorder.dual().weight_coef.abs().max() < 1  # lr 1 times clip: clearly below the rate


def test_element_wise_clipping_is_refused():
    net = Net(4, 3)
    clip = lambda: nn.utils.clip_grad_value_(net.parameters(), 1e-3)  # noqa: E731
    with pytest.raises(UserError, match="not a scalar times"):
        run(net, torch.optim.SGD(net.parameters(), lr=0.1), before_step=clip)


def test_a_penalty_on_the_weights_is_refused():
    net = Net(4, 3)
    add = lambda: net.layer.weight.grad.add_(net.layer.weight.detach())  # noqa: E731
    with pytest.raises(UserError, match="'layer'"):
        run(net, torch.optim.SGD(net.parameters(), lr=0.1), before_step=add)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_other_optimizers_are_refused_with_the_reason(optimizer):
    layer = nn.Linear(2, 2)
    reason = "running scale" if "Adam" in optimizer.__name__ else "only one"
    with pytest.raises(UserError, match=f"{optimizer.__name__}.*{reason}"):
        DualRecorder(layer, optimizer(layer.parameters()))


def test_adam_really_violates_the_dual_form():
    """The refusal is not pedantry: taking Adam's steps for SGD's misses most of the update."""
    net = Net(4, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    torch.manual_seed(0)
    with DualRecorder(net.layer) as recorder:
        for _ in range(5):
            net(torch.randn(6, 4, dtype=torch.float64)).square().mean().backward()
            recorder.step(StepRule(lr=0.01))
            optimizer.step()
            optimizer.zero_grad()
    (residual,) = recorder.report()
    assert residual.weight > 0.1


def test_hand_written_loop_with_decoupled_decay():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, dtype=torch.float64)
    with DualRecorder(layer) as recorder:
        for t in range(4):
            lr = 0.1 / (t + 1)
            grads = torch.autograd.grad(
                layer(torch.randn(5, 3, dtype=torch.float64)).pow(4).mean(), list(layer.parameters())
            )
            recorder.step(StepRule(lr=lr, decoupled_decay=0.3, clip=0.5))
            with torch.no_grad():
                for parameter, grad in zip(layer.parameters(), grads, strict=True):
                    parameter.mul_(1 - lr * 0.3).sub_(lr * 0.5 * grad)
    (residual,) = recorder.report()
    assert residual.weight < 1e-12 and residual.bias < 1e-12
    assert recorder.dual().weight_shrink < 1


def test_recorder_takes_decoupled_decay_and_rates_of_the_moment():
    net = Net(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)

    def decay_and_change_rate():
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(1 - optimizer.param_groups[0]["lr"] * 0.2)

    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    torch.manual_seed(1)
    with DualRecorder(net.layer, optimizer, decoupled_decay=0.2) as recorder:
        for _ in range(4):
            net(torch.randn(6, 4, dtype=torch.float64)).square().mean().backward()
            decay_and_change_rate()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    (residual,) = recorder.report()
    assert residual.weight < 1e-11 and residual.bias < 1e-11


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_a_step_without_gradient_still_decays(momentum):
    net = Net(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
    torch.manual_seed(1)
    with DualRecorder(net.layer, optimizer, decoupled_decay=0.5) as recorder:
        for step in range(5):
            net(torch.randn(6, 4, dtype=torch.float64)).square().mean().backward()
            if step in (0, 2):
                net.layer.weight.grad = None
            if step == 2:
                net.layer.bias.grad = None
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(1 - 0.1 * 0.5)
            optimizer.step()
            optimizer.zero_grad()
    (residual,) = recorder.report()
    assert residual.weight < 1e-11 and residual.bias < 1e-11
    assert recorder.dual().weight_shrink == pytest.approx(0.95**5)


def test_bias_in_its_own_group_has_its_own_coefficients():
    net = Net(4, 3)
    groups = [
        {"params": [net.layer.weight], "lr": 0.1, "weight_decay": 0.2},
        {"params": [net.layer.bias], "lr": 0.3, "momentum": 0.9},
    ]
    recorder = run(net, torch.optim.SGD(groups, lr=0.1))
    (residual,) = recorder.report()
    assert residual.weight < 1e-11 and residual.bias < 1e-11
    form = recorder.dual()
    assert form.bias_shrink == 1 and form.weight_shrink < 1


def test_frozen_bias_and_missing_bias():
    net = Net(4, 3)
    net.layer.bias.requires_grad_(False)
    form = run(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)).dual()
    torch.testing.assert_close(form.bias(), net.layer.bias)
    bare = Net(4, 3, bias=False)
    recorder = run(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    assert recorder.dual().bias() is None and recorder.report()[0].bias is None
    assert recorder.report()[0].weight < 1e-11


def test_accumulated_gradients_and_shared_layers_count_every_call():
    torch.manual_seed(0)
    layer = nn.Linear(3, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with DualRecorder(layer, optimizer) as recorder:
        for _ in range(2):
            for _ in range(2):
                x = torch.randn(4, 3, dtype=torch.float64)
                layer(torch.tanh(layer(x))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    form = recorder.dual()
    assert recorder.report()[0].weight < 1e-12
    assert form.index.call.tolist() == [c for _ in range(2) for c in range(4) for _ in range(4)]


def test_only_the_named_rows_of_a_fused_matrix_train():
    net = Net(4, 6)
    rows = torch.tensor([False, False, True, True, True, True])

    def mask():
        net.layer.weight.grad[~rows] = 0
        net.layer.bias.grad[~rows] = 0

    recorder = run(net, torch.optim.SGD(net.parameters(), lr=0.1), before_step=mask, rows={"layer": rows})
    assert recorder.report()[0].weight < 1e-11
    assert recorder.dual().errors[:2].abs().max() == 0
    with pytest.raises(UserError, match="rows"):
        run(net, torch.optim.SGD(net.parameters(), lr=0.1), before_step=mask)


def test_discarded_backward_passes():
    net = Net(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(5, 4, dtype=torch.float64)
    with DualRecorder(net.layer, optimizer) as recorder:
        net(x).square().mean().backward()
        optimizer.zero_grad()
        recorder.discard()
        net(x).mean().backward()
        optimizer.step()
    assert recorder.dual().keys.shape[1] == 5
    assert recorder.report()[0].weight < 1e-11


def test_evaluation_is_not_recorded_and_checkpointing_is_recorded_once():
    net = Net(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(5, 4, dtype=torch.float64)
    with DualRecorder(net.layer, optimizer) as recorder:
        with torch.no_grad():
            net(x)
        checkpoint(net, x, use_reentrant=False).square().mean().backward()
        optimizer.step()
    assert recorder.dual().keys.shape[1] == 5
    assert recorder.report()[0].weight < 1e-11


def test_hooks_are_gone_afterwards_even_after_an_error():
    net = Net(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError), DualRecorder(net.layer, optimizer):
        raise ZeroDivisionError
    assert not net.layer._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_no_steps_at_all_is_the_layer_itself():
    net = Net(4, 3)
    with DualRecorder(net.layer, torch.optim.SGD(net.parameters(), lr=0.1)) as recorder:
        pass
    torch.testing.assert_close(recorder.dual().weight(), net.layer.weight.detach())
    assert recorder.report()[0].weight == 0


def test_user_mistakes():
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(UserError, match="'x' is a ReLU"):
        DualRecorder({"x": nn.ReLU()})
    with (
        pytest.raises(UserError, match="no parameter in the optimizer"),
        DualRecorder(layer, torch.optim.SGD(other.parameters(), lr=1)),
    ):
        pass
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(UserError, match="already holds momentum"), DualRecorder(layer, optimizer):
        pass
    fresh = torch.optim.SGD(layer.parameters(), lr=0.1)
    with DualRecorder(layer, fresh) as recorder, pytest.raises(UserError, match="closure"):
        fresh.step(lambda: layer(torch.ones(1, 2)).sum())
    with pytest.raises(UserError, match="No layer 'y'"):
        recorder.dual("y")


def test_tied_weights_are_refused():
    layer = nn.Linear(3, 3, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with DualRecorder(layer, optimizer), pytest.raises(UserError, match="tied"):
        x = torch.randn(4, 3, dtype=torch.float64)
        (layer(x) @ layer.weight).square().mean().backward()
        optimizer.step()
