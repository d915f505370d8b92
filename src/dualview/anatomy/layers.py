"""Where things are in a model: its attention layers, their output projections, and what makes their q, k and v.

Found by watching, not by names. One pass over a few tokens shows, in order, every linear map and every attention; the
gradient of an attention's k with respect to a map's output says which of the map's rows make k. So fused matrices,
in any layout (GPT-2's thirds, GPT-NeoX's interleaving, Falcon's groups), need no table of architectures.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dualview.anatomy.dispatch import AttentionCall, run_forward
from dualview.anatomy.hooks import hooked
from dualview.anatomy.kernels import attend
from dualview.io.errors import UserError

Role = Literal["q", "k", "v"]
ROLES: tuple[Role, ...] = ("q", "k", "v")


@dataclass(frozen=True)
class Projection:
    """Rows of a linear map (`nn.Linear` or GPT-2's `Conv1D`) that make q, k or v; `rows` None means all."""

    name: str
    module: nn.Module
    rows: Int[Tensor, " row"] | None

    @property
    def d_in(self) -> int:
        weight: Tensor = self.module.weight  # pyright: ignore
        return weight.shape[0] if isinstance(self.module, Conv1D) else weight.shape[1]

    @property
    def d_out(self) -> int:
        return self.weight().shape[0]

    @property
    def biased(self) -> bool:
        return getattr(self.module, "bias", None) is not None

    def weight(self) -> Float[Tensor, "row d_in"]:
        weight: Tensor = self.module.weight.detach()  # pyright: ignore
        weight = weight.T if isinstance(self.module, Conv1D) else weight
        return weight if self.rows is None else weight[self.rows]


@dataclass(frozen=True)
class Layer:
    """One attention: its module, the linear map after it, and the projections before it."""

    module: nn.Module
    output: nn.Module
    projections: dict[Role, tuple[Projection, ...]]
    heads: int
    kv_heads: int
    d_head: int
    d_model: int
    d_value: int | None = None
    """The width of a head's output, where it is known: heads · d_value numbers enter the output map head by head."""

    @property
    def d_in(self) -> int:
        """How many numbers enter the output map."""
        return Projection("", self.output, None).d_in

    def output_by_head(self) -> Float[Tensor, "d_model head d_value"] | None:
        """The output map's weight, head by head; None where what enters it is not the heads' outputs side by side."""
        weight = Projection("", self.output, None).weight()
        if weight.is_meta or self.d_value is None or weight.shape[1] != self.heads * self.d_value:
            return None
        return weight.unflatten(1, (self.heads, self.d_value))


@dataclass(frozen=True)
class Anatomy:
    layers: tuple[Layer, ...]
    blocks: tuple[nn.Module, ...]
    """The residual blocks, in order: attention, feed-forward and what joins them."""
    final: nn.Module
    """The first module to run after the last block: the final norm, or the unembedding where there is none."""

    def projections(self, roles: Sequence[Role]) -> tuple[Projection, ...]:
        """The maps that make any of `roles`, each once, with the union of the rows."""
        found: dict[nn.Module, list[Projection]] = {}
        for layer in self.layers:
            for role in roles:
                for projection in layer.projections[role]:
                    found.setdefault(projection.module, []).append(projection)
        return tuple(_union(parts) for parts in found.values())


def _union(parts: list[Projection]) -> Projection:
    whole = [part for part in parts if part.rows is None]
    if whole:
        return whole[0]
    # A fused matrix gives q, k and v different rows of one module; training some roles must train each row once.
    rows = torch.cat([part.rows for part in parts if part.rows is not None]).unique()
    first = parts[0]
    return Projection(first.name, first.module, None if len(rows) == _width(first.module) else rows)


@dataclass
class _Seen:
    """One event of the watched pass: a linear map's output, or an attention's inputs."""

    module: nn.Module
    tensors: tuple[Tensor, ...]
    is_attention: bool = False


def dissect(model: PreTrainedModel) -> Anatomy:
    """Run a few tokens and find the model's parts."""
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    blocks = _blocks(model)
    events, final = _watch(model, blocks)
    width = int(model.config.get_text_config().hidden_size)
    layers: list[Layer] = []
    for at, event in enumerate(events):
        if not event.is_attention:
            continue
        inside = set(event.module.modules())
        before = [e for e in events[:at] if not e.is_attention and e.module in inside]
        q, k, v = event.tensors
        projections: dict[Role, tuple[Projection, ...]] = {
            role: _sources(tensor, before, names) for role, tensor in zip(ROLES, (q, k, v), strict=True)
        }
        output = _output(events, at, inside, width)
        sizes = q.shape[1], k.shape[1], q.shape[-1], _width(output), v.shape[-1]
        layers.append(Layer(event.module, output, projections, *sizes))
    return Anatomy(tuple(layers), blocks, final)


def _blocks(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """The elements of the largest list of modules that all have children: every decoder stores its blocks this way."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    # Lists inside blocks (the experts of a mixture) can be longer than the list of blocks.
    outermost = [m for m in lists if not any(m is not other and m in set(other.modules()) for other in lists)]
    if not outermost:
        raise UserError("dualview found no list of blocks in this model; it cannot follow the architecture.")
    return tuple(max(outermost, key=lambda m: sum(p.numel() for p in m.parameters())))


def _watch(model: PreTrainedModel, blocks: tuple[nn.Module, ...]) -> tuple[list[_Seen], nn.Module]:
    events: list[_Seen] = []
    after: list[nn.Module] = []
    last = False

    def left_last(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        nonlocal last
        last = True

    def came_after(module: nn.Module, _inputs: Any) -> None:
        if last:
            after.append(module)

    class Inspect:
        def attend(self, layer: int, call: AttentionCall) -> Tensor:
            events.append(_Seen(call.module, (call.q, call.k, call.v), is_attention=True))
            if call.native is not None:
                return call.native()
            at = torch.arange(call.k.shape[2], device=call.k.device)
            return attend(call.q, call.k, call.v, call.rule, causal=True, key_at=at).out.transpose(1, 2)

    def leaf(module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):  # for example a router: not part of attention
            return output
        cut = (output.detach() * 1e-3).requires_grad_()  # small, so that no clamp (clip_qkv) blocks a row's gradient
        events.append(_Seen(module, (cut,)))
        return cut.clone()  # some architectures then change it in place

    maps: list[nn.Module] = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D)]
    hooks = [m.register_forward_hook(leaf) for m in maps]
    hooks += [blocks[-1].register_forward_hook(left_last)]
    hooks += [m.register_forward_pre_hook(came_after) for m in model.modules()]
    # Different tokens, so that no two positions agree by accident; several, so that attention has something to mix.
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    with hooked(hooks), torch.enable_grad(), _unweighted(maps):
        run_forward(model, Inspect(), ids, torch.arange(8, device=model.device)[None], None, native=True)
    if not after:
        raise UserError("dualview found nothing that runs after the last block; it cannot follow the architecture.")
    return events, after[0]


@contextmanager
def _unweighted(maps: Sequence[nn.Module]) -> Generator[None]:
    """Let each linear map answer with random numbers of the right shape.

    Which map feeds which head does not depend on the weights, and reading all of them is most of a pass over a few
    tokens. A map with a `forward` of its own (layers spread over devices move their inputs there) or of its class (some
    routers are linear maps and more) keeps it.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(width: int, x: Tensor) -> Tensor:
        return torch.randn((*x.shape[:-1], width), generator=generator).to(x)

    plain = (nn.Linear.forward, Conv1D.forward)
    replaced = [module for module in maps if "forward" not in vars(module) and type(module).forward in plain]
    for module in replaced:
        module.forward = partial(drawn, _width(module))
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def _sources(made: Tensor, maps: list[_Seen], names: dict[nn.Module, str]) -> tuple[Projection, ...]:
    """The rows of each map's output on which `made` depends, by a gradient along a random direction."""
    leaves = [e.tensors[0] for e in maps]
    if not made.requires_grad or not leaves:
        return ()
    generator = torch.Generator().manual_seed(0)
    # Along a random direction no two dependencies cancel, as they could in a plain sum.
    direction = torch.randn(made.shape, generator=generator, dtype=torch.float64).to(made)
    gradients = torch.autograd.grad(made, leaves, direction, materialize_grads=True, retain_graph=True)
    found: list[Projection] = []
    for event, gradient in zip(maps, gradients, strict=True):
        rows = gradient.flatten(0, -2).abs().amax(0).nonzero().flatten()
        if len(rows):
            everything = len(rows) == _width(event.module)
            found.append(Projection(names[event.module], event.module, None if everything else rows))
    return tuple(found)


def _output(events: list[_Seen], at: int, inside: set[nn.Module], width: int) -> nn.Module:
    """The last linear map of the attention module after its attention, or else the next one to run."""
    after: list[nn.Module] = []
    for event in events[at + 1 :]:
        if event.is_attention:
            break
        after.append(event.module)
    within = [module for module in after if module in inside]
    if not after:
        raise UserError("dualview found no output projection after an attention; it cannot record this architecture.")
    # Some attentions have a gate before the output projection, so it is the last map, not the
    # first.
    output = within[-1] if within else after[0]
    if _width(output) != width:  # for example a router, where the output projection is not a plain linear map
        raise UserError(
            f"dualview found no linear output projection in {type(events[at].module).__name__}; "
            "it cannot record this architecture."
        )
    return output


def _width(module: nn.Module) -> int:
    weight: Tensor = module.weight  # pyright: ignore
    return weight.shape[1] if isinstance(module, Conv1D) else weight.shape[0]
