"""Training at the speed of the device's matrix products: a loss without whole logits, compiled layers, and the rate.

The attention of a training stays one call of a fused kernel. Plain softmax, signed values and a token shift are such a
call on other values. ALiBi is one on two more dimensions (`lab.retrofit.arms`). Momentum attention, (A + M) V with
M_ti = η^{t−i}, is not: the values V + A⁻¹ M V would need the attention matrix. It is the fused call plus M V, a sum in
linear time (`variants.sums.scan`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualview.io.errors import cause_of
from dualview.variants.sums.context import CarryingVariant

LOSS_ROWS = 8192
"""Tokens whose logits are held at once on a GPU: 1.6 GB for 49,152 tokens of vocabulary."""
_GRAPHS = 64
"""Compiled graphs of one layer's code that are kept."""
_SIDE = {"cuda": 8192, "cpu": 1024}
"""The side of the square matrices whose product gives a device's rate."""


# --------------------------------------------------------------------------------------------------------------- loss


class _ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weightᵀ`; both gradients are made on the way forward, some rows at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:  # type: ignore[override]
        to_hidden, count = torch.empty_like(hidden), len(targets)
        wide = torch.promote_types(weight.dtype, torch.float32)
        to_weight = torch.zeros_like(weight, dtype=wide)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        errors = weight.new_empty(min(rows, count), len(weight))
        for at in range(0, count, rows):
            part, own = hidden[at : at + rows], targets[at : at + rows, None]
            # Logits are the bulk of the bytes: as few passes over them as separate kernels allow.
            log_p = torch.log_softmax(part @ weight.T, -1, dtype=wide)
            chosen = log_p.gather(1, own)
            total -= chosen.sum()
            error = torch.exp(log_p, out=errors[: len(part)])
            error.scatter_(1, own, torch.expm1(chosen).to(error.dtype))
            to_hidden[at : at + rows] = error @ weight
            to_weight += error.T @ part
        # The mean's 1 / count is applied to the gradients, which are smaller than the logits.
        ctx.save_for_backward(to_hidden, to_weight.div_(count).to(weight.dtype))
        ctx.count = count
        return total / count

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        to_hidden, to_weight = ctx.saved_tensors
        return gradients[0] / ctx.count * to_hidden, gradients[0] * to_weight, None, None


def chunked_loss(
    hidden: Float[Tensor, "token d_model"],
    weight: Float[Tensor, "vocab d_model"],
    targets: Int[Tensor, " token"],
    rows: int,
) -> Float[Tensor, ""]:
    """The mean of −log softmax(W h)_target, with the logits of `rows` tokens in memory at a time."""
    return cast(Any, _ChunkedLoss).apply(hidden, weight, targets, rows)


def batch_loss(model: PreTrainedModel, precision: str, rows: int) -> Callable[[Int[Tensor, "batch token"]], Tensor]:
    """The training loss of a batch in chunks of `rows`, for a model with `has_plain_head`."""
    half = precision == "bfloat16"

    def loss(tokens: Int[Tensor, "batch token"]) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=half):
            hidden: Tensor = cast(Any, model).base_model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        weight: Tensor = cast(Any, model).get_output_embeddings().weight
        if half:
            hidden, weight = hidden.bfloat16(), weight.bfloat16()
        return chunked_loss(hidden.flatten(0, 1), weight, tokens[:, 1:].flatten(), rows)

    return loss


@torch.no_grad()
def has_plain_head(model: PreTrainedModel, tokens: Int[Tensor, " token"]) -> bool:
    """Whether the logits are one matrix times the last hidden state: no bias, soft-cap or scale."""
    head = cast(Any, model).get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        return False
    ids = tokens[None, :8].long()
    whole = cast(Any, model)(input_ids=ids, use_cache=False).logits
    return torch.allclose(
        head(cast(Any, model).base_model(input_ids=ids, use_cache=False).last_hidden_state), whole, 1e-4, 1e-4
    )


# ------------------------------------------------------------------------------------------------------------ compiling


@contextmanager
def compiled_layers(
    model: PreTrainedModel, wanted: bool, trial: Callable[[], object], backend: str = "inductor"
) -> Generator[bool]:
    """The model with each of its layers compiled, for the length of a block; yields whether it is.

    The layers share one compiled graph, and the causal mask, which transformers writes out inside a compiled model,
    stays implicit. Where `trial` (a forward and backward pass) fails, a warning says so and nothing is compiled.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == _depth(model)] if wanted else []
    # Their hooks only look for a cache, and have a number of their own on each layer, which would compile each apart.
    carriers = [m for m in model.modules() if wanted and isinstance(_variant(m), CarryingVariant)]
    try:
        for module in carriers:
            cast(Any, module).dualview.remove()
        for layer in layers[0] if layers else ():
            cast(Any, layer).compile(dynamic=False, backend=backend)
        # All models share the layer's code, which keeps one graph for each kind of model: a later training of the same
        # kind finds its own. The compiler's own limit is eight.
        with _many_graphs() if layers else nullcontext():
            yield bool(layers) and _works(model, trial, layers[0])
    finally:
        _plain_again(layers[0] if layers else ())
        for module in carriers:
            cast(Any, module).dualview.hook(module)


def _many_graphs() -> AbstractContextManager[object]:
    from torch._dynamo import config  # imported here: it takes seconds, and most trainings compile nothing

    return cast(Any, config).patch(recompile_limit=_GRAPHS)


def _variant(module: nn.Module) -> Any:
    return getattr(getattr(module, "dualview", None), "variant", None)


def _works(model: PreTrainedModel, trial: Callable[[], object], layers: nn.ModuleList) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own, about tensors it looks at
            trial()
        return True
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler fails in many ways
        warnings.warn(f"torch.compile failed, training without it: {cause_of(error)}", stacklevel=4)
        _plain_again(layers)
        return False
    finally:
        model.zero_grad(set_to_none=True)


def _plain_again(layers: Any) -> None:
    for layer in layers:
        layer._compiled_call_impl = None


def _depth(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


# ----------------------------------------------------------------------------------------------------------------- rate


def flops_per_token(model: PreTrainedModel, context: int) -> float:
    """Floating-point operations of a training step for each token, as the field counts them: 6 P + 6 L d T.

    P: parameters that multiply (all but an input embedding of its own); the second term is causal attention over T
    tokens, L layers and d = heads · d_head. What a variant adds is not counted, so that rates can be compared.
    """
    config: Any = model.config.get_text_config()
    embedding, head = cast(Any, model).get_input_embeddings().weight, cast(Any, model).get_output_embeddings().weight
    parameters = sum(p.numel() for p in model.parameters()) - (embedding.numel() if embedding is not head else 0)
    heads = config.num_attention_heads
    d_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 6.0 * parameters + 6.0 * _depth(model) * heads * d_head * context


@cache
def matrix_rate(device: torch.device, precision: str) -> float:
    """Operations a second of a product of two large square matrices, the best of twenty."""
    side, kind = _SIDE.get(device.type, 1024), torch.bfloat16 if precision == "bfloat16" else torch.float32
    draw = torch.Generator(device).manual_seed(0)  # not the global one: measuring must not change a training
    a, b = (torch.randn(side, side, device=device, generator=draw).to(kind) for _ in range(2))
    best = float("inf")
    for _ in range(21):  # the first ones warm up: an idle GPU's clock rises within milliseconds
        begun = time.perf_counter()
        c = a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
        del c
    return 2.0 * side**3 / best


def throughput(
    model: PreTrainedModel, precision: str, batch: int, context: int, seconds_per_step: float | None
) -> dict[str, float | None]:
    """Tokens and model operations a second, and their share of the device's own matrix rate."""
    rate, pace = matrix_rate(model.device, precision), seconds_per_step
    tokens = None if pace is None else batch * context / pace
    flops = None if tokens is None else tokens * flops_per_token(model, context)
    share = None if flops is None else flops / rate
    return {"tokens_per_second": tokens, "flops_per_second": flops, "matrix_rate": rate, "matrix_share": share}
