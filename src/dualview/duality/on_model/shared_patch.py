"""A context as one patch for every query: the rank-1 patches of `context_patch`, fitted by least squares on many.

One query's patch solves D z = z_C − z and ΔW h = δ at its last token. With queries i = 1 … n, ridge μ and tokens as
columns, block by block, each reading the patched states of the block before it (Goldwaser et al. 2026, Alg. 1):

    readers    ΔW = W D,   D = (Z_C − Z)(ZᵀZ + μI)⁻¹ Zᵀ
    carrier    ΔW = Δ (HᵀH + μI)⁻¹ Hᵀ                Δ = (O_C − O)/s
               Δm_j = Σ_i u_ij Δ_ij / (Σ_i u_ij² + μ)      where a norm ends the block (Gemma); its bias: the mean of Δ

For n = 1 and μ → 0 these are the patches of one query, exactly; for n up to the width and μ → 0 the patched zero-shot
model still gives every fitted query its in-context logits (but for Gemma's norms, which have too few numbers). What it
does for queries it has not seen is an empirical question, which `compile` answers. Token-independent patches by least
squares are Mazzawi et al.'s idea (2025, arXiv 2510.08734, "thought matrices"); the one here is a change of weights that
all tokens of a prompt meet, fitted at the prompts' last tokens only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dualview.anatomy.layers import Projection
from dualview.duality.on_model.context_patch import Aims, as_tokens, carried, recorded_aims, unscaled
from dualview.duality.on_model.feed_forward import FeedForward, block_output, feed_forwards, with_states
from dualview.duality.on_model.query_packing import QueryPack, query_pack
from dualview.duality.on_model.single_prompt import hooked
from dualview.duality.theory.linalg import symmetric_eigen
from dualview.io.atomic import whole
from dualview.io.errors import UserError
from dualview.learning.adapter_writing import Exported, truncated
from dualview.learning.adapters import Adapter, LinearChange, random_directions, random_vector
from dualview.models.language_model import LanguageModel
from dualview.models.prefix import Prefix
from dualview.tasks.prompts import Query


@dataclass(frozen=True)
class LowRank:
    """The matrix leftᵀ · right: attention over the fitted queries, keys `right`, values `left`."""

    left: Float[Tensor, "fitted d_out"]
    right: Float[Tensor, "fitted d_in"]

    def __call__(self, x: Float[Tensor, "*token d_in"]) -> Float[Tensor, "*token d_out"]:
        """leftᵀ right x for tokens as rows, in the patch's own precision."""
        return (x.to(self.right.dtype) @ self.right.T) @ self.left


@dataclass(frozen=True)
class ReusableBlock:
    """The patch of one block."""

    readers: LowRank | None
    """D: the readers see z + D z, that is, their weights become W (I + D)."""
    carrier: LowRank | Float[Tensor, " d_model"]
    """ΔW of a linear carrier, else a norm's Δb or Δm."""


@dataclass(frozen=True)
class ReusablePatch:
    """One change of weights for all queries, active within `applied()`, like any patch."""

    places: tuple[FeedForward, ...]
    blocks: tuple[ReusableBlock, ...]

    rows = 1

    def scaled(self, factor: float) -> ReusablePatch:
        return self._changed(lambda low: LowRank(factor * low.left, low.right), lambda vector: factor * vector)

    def in_random_directions(self, generator: torch.Generator) -> ReusablePatch:
        """Another change of the same places, with the same ranks and singular values."""

        def drawn(low: LowRank) -> LowRank:
            left, right = random_directions(low.left.T, low.right, generator)
            return LowRank(left.T.contiguous(), right)

        return self._changed(drawn, lambda vector: random_vector(vector, generator))

    def _changed(self, low: Callable[[LowRank], LowRank], vector: Callable[[Tensor], Tensor]) -> ReusablePatch:
        blocks = tuple(
            ReusableBlock(
                None if block.readers is None else low(block.readers),
                low(block.carrier) if isinstance(block.carrier, LowRank) else vector(block.carrier),
            )
            for block in self.blocks
        )
        return ReusablePatch(self.places, blocks)

    @contextmanager
    def applied(self) -> Generator[None]:
        def reading(delta: LowRank) -> Any:
            def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                return (_plus(inputs[0], delta(inputs[0])), *inputs[1:])

            return hook

        def carrying(place: FeedForward, block: ReusableBlock) -> Any:
            def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
                return _plus(output, carried(place, block.carrier, inputs[0]))

            return hook

        pairs = list(zip(self.places, self.blocks, strict=True))
        before = [(reader, reading(b.readers)) for p, b in pairs if b.readers is not None for reader in p.readers]
        with hooked([(p.carrier, carrying(p, b)) for p, b in pairs], before):
            yield


def _plus(x: Tensor, change: Tensor) -> Tensor:
    return x + change.to(x.dtype)


def in_context_aims(
    lm: LanguageModel, places: Sequence[FeedForward], queries: Sequence[Query], demos: Prefix
) -> tuple[Aims, ...]:
    """Run the queries behind the demonstrations and keep every block's states at their last tokens."""
    pack = query_pack(lm, queries, demos)
    return recorded_aims(places, pack.last, lambda: pack.run(lm))


def fit_patch(
    lm: LanguageModel,
    places: Sequence[FeedForward],
    queries: Sequence[Query],
    bare: Sequence[int],
    aims: Sequence[Aims],
    ridge: float,
) -> ReusablePatch:
    """Fit every block in one pass over the queries without demonstrations, each block on patched states.

    `ridge` is μ in units of the mean squared length of what a map reads; `bare` is what comes before a query without
    demonstrations (BOS, or nothing).
    """
    if not ridge >= 0:
        raise UserError(f"A ridge is a number of at least 0, not {ridge}.")
    if not queries:
        raise UserError("A reusable patch is fitted on queries: give at least one.")
    # BOS is put into the queries, since its own states change with every block that is patched.
    pack = query_pack(lm, [replace(q, ids=(*bare, *q.ids)) for q in queries], Prefix(0))
    fit = _Fit(tuple(places), tuple(aims), ridge, pack)
    before = [(reader, fit.read(i)) for i, place in enumerate(places) for reader in place.readers]
    after = [(place.carrier, fit.carry(i)) for i, place in enumerate(places)]
    with hooked([*after, *((place.block, fit.end(i)) for i, place in enumerate(places))], before):
        pack.run(lm)
    return ReusablePatch(fit.places, tuple(fit.blocks))


class _Fit:
    """The fit under way: each block's patch is made and applied as the pass reaches it."""

    def __init__(self, places: tuple[FeedForward, ...], aims: tuple[Aims, ...], ridge: float, pack: QueryPack):
        self.places, self.aims, self.ridge, self.pack = places, aims, ridge, pack
        self.readers: dict[int, LowRank] = {}
        self.inputs: dict[int, Tensor] = {}
        self.blocks: list[ReusableBlock] = []

    def read(self, index: int) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if index not in self.readers:  # gate and up read the same z
                z, aim = as_tokens(inputs[0])[0, self.pack.last], self.aims[index].read
                assert aim is not None
                self.readers[index] = ridge_map(z, aim - z, self.ridge)
            return (_plus(inputs[0], self.readers[index](inputs[0])), *inputs[1:])

        return hook

    def carry(self, index: int) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
            self.inputs[index] = as_tokens(inputs[0])

        return hook

    def end(self, index: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            place, states, x = self.places[index], block_output(output), self.inputs.pop(index)
            change = (self.aims[index].out - states[0, self.pack.last]) / place.scale
            delta = _carrier_patch(place, x[0, self.pack.last], change, self.ridge)
            self.blocks.append(ReusableBlock(self.readers.get(index), delta))
            return with_states(output, _plus(states, place.scale * carried(place, delta, x)))

        return hook


def _carrier_patch(place: FeedForward, x: Tensor, change: Tensor, ridge: float) -> LowRank | Tensor:
    if _is_linear(place.carrier):
        return ridge_map(x, change, ridge)
    if place.kind == "bias":
        return change.mean(0)
    u = unscaled(place.carrier, x)
    power = u.square()
    return (u * change).sum(0) / (power.sum(0) + ridge * power.mean())


def ridge_map(x: Float[Tensor, "fitted d_in"], y: Float[Tensor, "fitted d_out"], ridge: float) -> LowRank:
    """The matrix M that minimises Σ_i ‖y_i − M x_i‖² + μ‖M‖², μ = ridge · mean ‖x_i‖², as attention over the i.

    M = Yᵀ(XXᵀ + μI)⁻¹X with the x_i and y_i as rows; the least of all solutions where ridge is 0.
    """
    wide_x, wide_y = x.double(), y.double()
    values, vectors = symmetric_eigen(wide_x @ wide_x.T)
    values = values.clamp(min=0)
    shrunk = values + ridge * values.sum() / len(values)
    usable = shrunk > len(values) * torch.finfo(torch.float64).eps * shrunk.max()
    inverse = torch.where(usable, 1 / torch.where(usable, shrunk, 1.0), 0.0)
    left = vectors @ (inverse[:, None] * (vectors.T @ wide_y))
    kept = x.dtype if x.dtype == torch.float64 else torch.float32
    return LowRank(left.to(kept), x.to(kept).clone())


def patch_as_adapter(patch: ReusablePatch, lm: LanguageModel, rank: int | None) -> Exported:
    """A patch as a LoRA adapter: the readers' W D and the carriers' ΔW, of at most as many ranks as fitted rows."""
    must_be_linear(patch.places, lm)
    names = {module: name for name, module in lm.model.named_modules()}
    changes: list[LinearChange] = []
    for place, block in zip(patch.places, patch.blocks, strict=True):
        if block.readers is not None:
            for reader in place.readers:
                weight = Projection("", reader, None).weight().to(block.readers.left)
                made = (block.readers.right, weight @ block.readers.left.T)
                changes.append(LinearChange(names[reader], reader, *made))
        carrier = block.carrier
        assert isinstance(carrier, LowRank)
        changes.append(LinearChange(names[place.carrier], place.carrier, carrier.right, carrier.left.T.contiguous()))
    return truncated(Adapter(tuple(changes)), rank)


def must_be_linear(places: Sequence[FeedForward], lm: LanguageModel) -> None:
    """Refuse places whose patch is no change of linear maps: LoRA cannot hold it."""
    if not all(_is_linear(module) for place in places for module in (place.carrier, *place.readers)):
        raise UserError(f"A patch of {lm.name} also changes norms, which LoRA cannot hold; use --format patch.")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


SCHEMA = "dualview.patch/1"


def save_patch(path: Path, patch: ReusablePatch, lm: LanguageModel, metadata: Mapping[str, Any]) -> Path:
    """Write a patch as safetensors, whole or not at all; the metadata records what it was made from."""
    from safetensors.torch import save_file

    names = {module: name for name, module in lm.model.named_modules()}
    tensors: dict[str, Tensor] = {}
    for index, block in enumerate(patch.blocks):
        parts: dict[str, LowRank | Tensor | None] = {"readers": block.readers, "carrier": block.carrier}
        for part, delta in parts.items():
            if isinstance(delta, LowRank):
                tensors[f"{index}.{part}.left"], tensors[f"{index}.{part}.right"] = delta.left, delta.right
            elif delta is not None:
                tensors[f"{index}.{part}.vector"] = delta
    header = {"schema": SCHEMA, "carriers": [names[place.carrier] for place in patch.places], **metadata}
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with whole(path) as temporary:
        save_file(kept, temporary, {"dualview": json.dumps(header)})
    return path


def read_metadata(path: Path | str) -> dict[str, Any]:
    """The metadata of a patch file, without its tensors."""
    return _open(Path(path))[0]


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UserError(f"There is no patch file {path}; `dualview compile` writes one.")
    try:
        with cast("Any", safe_open(path, framework="pt")) as file:
            header = json.loads((cast("dict[str, str]", file.metadata() or {})).get("dualview", "{}"))
            tensors = {name: cast("Tensor", file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable patch file ({error}); compile it again.") from None
    if not isinstance(header, dict) or cast("dict[str, Any]", header).get("schema") != SCHEMA:
        raise UserError(f"{path} is not a patch of schema {SCHEMA}; `dualview compile` writes one.")
    return cast("dict[str, Any]", header), tensors


def load_patch(path: Path | str, lm: LanguageModel) -> ReusablePatch:
    """A compiled patch, ready for the model it was made for; any other model is refused."""
    path = Path(path)
    header, tensors = _open(path)
    if header["weights_hash"] != lm.weights_hash:
        dtype = header.get("options", {}).get("dtype", "float32")
        raise UserError(
            f"The patch {path} was made for the weights of {header['model']} in {dtype}, and {lm.name} has others; "
            "compile it again for this model and dtype."
        )
    places = feed_forwards(lm)
    names = {module: name for name, module in lm.model.named_modules()}
    if [names[place.carrier] for place in places] != header["carriers"]:
        raise UserError(f"The patch {path} was made for other modules than {lm.name} has; compile it again.")
    blocks: list[ReusableBlock] = []
    for index, place in enumerate(places):
        readers, carrier = (_part(tensors, f"{index}.{part}", lm) for part in ("readers", "carrier"))
        if carrier is None or isinstance(readers, Tensor) or (readers is None) != (not place.readers):
            raise UserError(f"The patch {path} lacks a part of block {index}; compile it again.")
        blocks.append(ReusableBlock(readers, carrier))
    return ReusablePatch(places, tuple(blocks))


def _part(tensors: Mapping[str, Tensor], name: str, lm: LanguageModel) -> LowRank | Tensor | None:
    if f"{name}.vector" in tensors:
        return tensors[f"{name}.vector"].to(lm.device)
    left, right = tensors.get(f"{name}.left"), tensors.get(f"{name}.right")
    return None if left is None or right is None else LowRank(left.to(lm.device), right.to(lm.device))
