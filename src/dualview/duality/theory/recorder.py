"""Recording a training run so that its layers can be written in dual form (see `linear`).

    with DualRecorder({"fc": model.fc}, optimizer) as recorder:
        for batch in data:
            loss(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    recorder.dual("fc")          # DualForm: W_T x = W_0 x + LinAttn(X, E, x)
    recorder.report()            # how exactly, layer by layer

A forward hook keeps each call's input, a gradient hook on its output keeps the error signal, and the optimiser's own
pre-step hook closes the step with the rate, momentum and decay of that moment. The gradient that is about to be used
must be a scalar times Σ g_t x_tᵀ: that scalar is the clipping, and anything else (a penalty, a tied weight,
element-wise clipping) is an error.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from dualview.duality.theory.coefficients import StepRule, unroll
from dualview.duality.theory.linalg import column_norms, norm
from dualview.duality.theory.linear import DualForm, Residual, TokenIndex, residual
from dualview.io.errors import UserError

ADAM_REASON = (
    "divides every element of the gradient by its own running scale, so its update is not a sum of error signals "
    "times inputs; train with torch.optim.SGD"
)


@dataclass(frozen=True)
class _LayerCall:
    """One call of a layer with the gradient that came back to it; tokens as rows."""

    order: int
    keys: Float[Tensor, "token d_in"]
    grads: Float[Tensor, "token d_out"]
    positions: int
    """Tokens per sequence."""


@dataclass
class _Track:
    """What is kept about one layer while it trains."""

    name: str
    module: nn.Module
    rows: Bool[Tensor, " d_out"] | None
    weight0: Tensor
    bias0: Tensor | None
    pending: list[_LayerCall] = field(default_factory=list[_LayerCall])
    calls: int = 0
    steps: list[list[_LayerCall]] = field(default_factory=list[list[_LayerCall]])
    weight_rules: list[StepRule | None] = field(default_factory=list[StepRule | None])
    bias_rules: list[StepRule | None] = field(default_factory=list[StepRule | None])


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D, whose weight is stored `d_in × d_out`."""
    # Looked up rather than imported: if transformers was never imported, there is no such module to meet.
    home = sys.modules.get("transformers.pytorch_utils")
    return home is not None and isinstance(module, home.Conv1D)


def weight_matrix(module: nn.Module, of: Tensor | None = None) -> Float[Tensor, "d_out d_in"]:
    """The layer's weight (or `of`, a tensor stored like it, such as its gradient) as `d_out × d_in`."""
    stored = of if of is not None else _parameters(module)[0]
    if stored is None:
        raise UserError(f"{type(module).__name__} has no weight.")
    return stored.detach().T if is_conv1d(module) else stored.detach()


def _parameters(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias; None for one that the layer does not have."""
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    return weight if isinstance(weight, Tensor) else None, bias if isinstance(bias, Tensor) else None


def refuse_unless_sgd(optimizer: Optimizer) -> None:
    """Only SGD has a dual form; every other optimiser is refused with the reason."""
    if type(optimizer) is SGD:
        return
    name = type(optimizer).__name__
    reason = (
        ADAM_REASON
        if "Adam" in name
        else "is not torch.optim.SGD, the only one whose update is known to be linear in the gradients"
    )
    raise UserError(f"The dual form does not hold for the optimizer {name}: it {reason}.")


class DualRecorder:
    """Records every training token of the given linear layers; a context manager around the training loop.

    layers           nn.Linear or transformers' Conv1D modules by name (or one module, named "layer")
    optimizer        torch.optim.SGD; without it, call `step(rule)` yourself just before each update
    decoupled_decay  λ, if the loop multiplies the weights by 1 − lr·λ before each step (torch's SGD never does), even
                     one that brings a layer no gradient
    rows             per layer, which output features train (fused matrices): the others' error signals are set to 0
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module] | nn.Module,
        optimizer: Optimizer | None = None,
        *,
        decoupled_decay: float = 0.0,
        rows: Mapping[str, Bool[Tensor, " d_out"]] | None = None,
    ) -> None:
        named = {"layer": layers} if isinstance(layers, nn.Module) else dict(layers)
        for name, module in named.items():
            if not (isinstance(module, nn.Linear) or is_conv1d(module)):
                raise UserError(
                    f"Layer {name!r} is a {type(module).__name__}: only nn.Linear and Conv1D have a dual form."
                )
        if optimizer is not None:
            refuse_unless_sgd(optimizer)
        self._layers = named
        self._optimizer = optimizer
        self._decoupled_decay = decoupled_decay
        self._rows = dict(rows or {})
        self._tracks: dict[str, _Track] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "DualRecorder":
        if self._optimizer is not None:
            self._refuse_used(self._optimizer)
        for name, module in self._layers.items():
            weight0, bias0 = (None if p is None else p.detach().clone() for p in _parameters(module))
            self._tracks[name] = _Track(name, module, self._rows.get(name), weight_matrix(module, weight0), bias0)
        for track in self._tracks.values():
            self._handles.append(track.module.register_forward_hook(self._forward_hook(track), with_kwargs=True))
        if self._optimizer is not None:
            self._handles.append(self._optimizer.register_step_pre_hook(self._before_step))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _refuse_used(self, optimizer: Optimizer) -> None:
        for name, module in self._layers.items():
            parameters = [p for p in _parameters(module) if p is not None]
            if all(_group_of(optimizer, p) is None for p in parameters):
                raise UserError(f"Layer {name!r} has no parameter in the optimizer: leave it out or train it.")
            # A buffer from before the recording holds gradients that were not seen.
            if any(optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in parameters):
                raise UserError(f"The optimizer already holds momentum for layer {name!r}: record from its first step.")

    def _forward_hook(self, track: _Track) -> Any:
        def keep_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if not output.requires_grad:
                return  # evaluation, or the first pass of activation checkpointing
            given: Tensor = args[0] if args else next(iter(kwargs.values()))
            order, x = track.calls, given.detach()
            track.calls += 1

            def keep_error(grad: Tensor) -> None:
                track.pending.append(self._call(track, order, x, grad))

            # A hook on the output, not on the module: it gets the gradient of this call, however often the module runs.
            output.register_hook(keep_error)  # pyright: ignore[reportUnknownMemberType]

        return keep_input

    def _call(self, track: _Track, order: int, x: Tensor, grad: Tensor) -> _LayerCall:
        keys, grads = x.reshape(-1, x.shape[-1]), grad.detach().reshape(-1, grad.shape[-1])
        if track.rows is not None:
            grads = grads * track.rows.to(grads)
        positions = x.shape[-2] if x.ndim > 2 else 1
        # copies: the caller may reuse these buffers after the backward pass
        return _LayerCall(order, keys.clone(), grads.clone(), max(positions, 1))

    def _before_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if any(callable(a) for a in args[1:]) or kwargs.get("closure") is not None:
            raise UserError("optimizer.step(closure) computes gradients after the recorder has read them: call step().")
        for track in self._tracks.values():
            self._close(track, *(self._rule(optimizer, parameter) for parameter in _parameters(track.module)))

    def _rule(self, optimizer: Optimizer, parameter: Tensor | None) -> StepRule | None:
        group = None if parameter is None else _group_of(optimizer, parameter)
        if parameter is None or group is None:
            return None
        if parameter.grad is None:  # torch leaves it alone, but the loop's own decay does not
            decay = self._decoupled_decay
            return StepRule(lr=float(group["lr"]), decoupled_decay=decay, clip=0.0) if decay else None
        return StepRule(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            coupled_decay=float(group["weight_decay"]),
            decoupled_decay=self._decoupled_decay,
            clip=-1.0 if group["maximize"] else 1.0,
        )

    def step(self, rule: StepRule, bias_rule: StepRule | None = None) -> None:
        """Close one step of a hand-written loop, just before its update; the bias follows `rule` unless given its own.

        If `.grad` is set it is compared with what was recorded, and clipping is found from it; otherwise `rule.clip`
        is used.
        """
        for track in self._tracks.values():
            pairs = zip(_parameters(track.module), (rule, bias_rule or rule), strict=True)
            self._close(track, *(own if p is not None and p.requires_grad else None for p, own in pairs))

    def discard(self) -> None:
        """Forget what was recorded since the last step (a backward pass whose gradient was thrown away)."""
        for track in self._tracks.values():
            track.pending.clear()

    def _close(self, track: _Track, weight_rule: StepRule | None, bias_rule: StepRule | None) -> None:
        # Backward passes run in reverse, and the tokens are wanted in the order in which they were read.
        calls = sorted(track.pending, key=lambda call: call.order)
        track.pending, track.calls = [], 0
        weight, bias = _parameters(track.module)
        if weight_rule is not None and weight is not None and weight.grad is not None:
            found = gradient_scale(track.name, weight_matrix(track.module, weight.grad), calls)
            weight_rule = replace(weight_rule, clip=weight_rule.clip * found)
        if bias_rule is not None and bias is not None and bias.grad is not None:
            # A bias is a weight that reads 1 at every token.
            ones = [replace(call, keys=call.keys.new_ones(call.keys.shape[0], 1)) for call in calls]
            found = gradient_scale(track.name, bias.grad.unsqueeze(1), ones)
            bias_rule = replace(bias_rule, clip=bias_rule.clip * found)
        track.steps.append(calls)
        track.weight_rules.append(weight_rule)
        track.bias_rules.append(bias_rule)

    def dual(self, name: str = "layer") -> DualForm:
        """The dual form of one layer, over every step recorded so far."""
        if name not in self._tracks:
            raise UserError(f"No layer {name!r} was recorded; recorded: {', '.join(self._tracks) or 'none'}.")
        return _dual_form(self._tracks[name])

    def report(self) -> list[Residual]:
        """For every layer, how exactly its present weight and bias are rebuilt from the recorded tokens."""
        found: list[Residual] = []
        for track in self._tracks.values():
            weight, (_, bias) = weight_matrix(track.module), _parameters(track.module)
            bias_change = None if bias is None or track.bias0 is None else bias - track.bias0
            change = weight - track.weight0
            found.append(residual(track.name, _dual_form(track), change, bias_change, len(track.steps)))
        return found


def _group_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any] | None:
    return next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)


def gradient_scale(name: str, grad: Float[Tensor, "d_out d_in"], calls: Sequence[_LayerCall]) -> float:
    """The scalar c with grad = c Σ_t g_t x_tᵀ (1, or what clipping made of it); an error if there is none."""
    expected, size = torch.zeros_like(grad), 0.0
    for call in calls:
        expected += (call.grads.T @ call.keys).to(expected)
        size += float((column_norms(call.grads.T) * column_norms(call.keys.T)).sum())
    wide, want = grad.double(), expected.double()
    # The least-squares factor; with clipping it is the factor that the gradient was multiplied by.
    power = float((want * want).sum())
    scale = float((wide * want).sum()) / power if power > 0 else 1.0
    remainder = norm(wide - scale * want)
    eps = torch.finfo(grad.dtype).eps
    # Rounding leaves ε times the summed token norms, however much the tokens cancel; a foreign term leaves far more.
    if remainder > math.sqrt(eps) * norm(wide) + 100 * eps * size:
        raise UserError(
            f"The gradient of layer {name!r} is not a scalar times its recorded error signals (a penalty, a tied or "
            "masked weight, element-wise clipping, or a discarded backward pass): see `rows` and `discard()`."
        )
    return scale


def _dual_form(track: _Track) -> DualForm:
    # Apart, because optimisers may treat them differently: often only the weight decays.
    weight_coefs, bias_coefs = unroll(track.weight_rules), unroll(track.bias_rules)
    like = track.weight0
    # empty beginnings, so that a run of no steps has a dual form too
    keys, grads = [like.new_zeros(0, like.shape[1])], [like.new_zeros(0, like.shape[0])]
    places = [torch.zeros(4, 0, dtype=torch.long)]
    for s, calls in enumerate(track.steps):
        for c, call in enumerate(calls):
            n = call.keys.shape[0]
            keys.append(call.keys.to(like))
            grads.append(call.grads.to(like))
            at = torch.arange(n)
            places.append(
                torch.stack([torch.full((n,), s), torch.full((n,), c), at // call.positions, at % call.positions])
            )
    step, call_number, sequence, position = torch.cat(places, dim=1)
    return DualForm(
        weight0=like,
        bias0=track.bias0,
        keys=torch.cat(keys).T,
        grads=torch.cat(grads).T,
        weight_coef=torch.tensor(weight_coefs.steps, dtype=torch.float64)[step].to(like),
        bias_coef=torch.tensor(bias_coefs.steps, dtype=torch.float64)[step].to(like),
        weight_shrink=weight_coefs.initial,
        bias_shrink=bias_coefs.initial,
        index=TokenIndex(step=step, call=call_number, sequence=sequence, position=position),
    )
