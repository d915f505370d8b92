"""The same architecture without its training, as a control: a similarity that it reaches too is not learnt.

Deutch et al. 2024, section 4: *No Training* (every weight random) and *Trained Embeddings* (random but for the
embeddings and the norms).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dualview.models.language_model import LanguageModel
from dualview.models.loading import adopt
from dualview.models.weights_hash import WeightsHash
from dualview.options import Weights

UNTRAINED_SEED = 0
_THREADS = min(16, os.cpu_count() or 1)


def redrawn(lm: LanguageModel, weights: Weights) -> LanguageModel:
    """The model with the weights that `--weights` asks for."""
    if weights == "trained":
        return lm
    return untrained(lm, keep_embeddings=weights == "trained-embeddings", seed=UNTRAINED_SEED)


def untrained(lm: LanguageModel, *, keep_embeddings: bool, seed: int) -> LanguageModel:
    """A copy with weights drawn as the architecture initialises them, in the same precision and place."""
    # Drawn in float32 and then rounded: an initialiser draws other numbers in another precision. A narrower model
    # leaves no room for that on its GPU.
    where = lm.device if lm.dtype == torch.float32 else torch.device("cpu")
    gpus = [where] if where.type == "cuda" else []
    # With a seed of its own, so that no other draw changes. The weights are the same on every device where initialisers
    # fill tensors with normal or uniform numbers, as all of transformers' do; others draw with the device's generator.
    with torch.random.fork_rng(devices=gpus), where, ThreadPoolExecutor(_THREADS) as pool, _Draws(seed, pool):
        torch.manual_seed(seed)
        config = copy.deepcopy(lm.model.config)
        fresh = type(lm.model)(config)
    fresh.to(lm.device, lm.dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
    made = adopt(fresh, lm.tokenizer, f"{lm.name} (untrained, seed {seed})")
    made = replace(made, commit=lm.commit, code_commits=lm.code_commits)
    return with_trained_embeddings(made, lm) if keep_embeddings else made


def with_trained_embeddings(fresh: LanguageModel, lm: LanguageModel) -> LanguageModel:
    """An untrained model whose embeddings and norms become those of the trained one, in place."""
    with torch.no_grad():
        own = dict(fresh.model.named_parameters())
        for name in _kept(lm.model):
            own[name].copy_(lm.model.get_parameter(name))
    return replace(fresh, name=fresh.name.replace("untrained", "trained embeddings and norms"))


def duplicate(lm: LanguageModel) -> LanguageModel:
    """The same model once more, in memory of its own."""
    model, anatomy = copy.deepcopy((lm.model, lm.anatomy))  # together: the anatomy names modules of the model
    return replace(lm, model=model, anatomy=anatomy, _hash=WeightsHash())


@dataclass(frozen=True)
class _Draw:
    """A tensor to be filled: its number says which numbers it gets."""

    tensor: Tensor
    number: int
    shift: float
    scale: float
    draw: Callable[..., Any]

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for the same numbers in memory."""
        return self.tensor.data_ptr(), self.tensor.shape, self.tensor.stride()


class _Draws(TorchDispatchMode):
    """Draws initial weights with numpy, in blocks on several threads: torch's own draws take a single one.

    Modules draw their weights when they are made and again when the model sets its own distributions. A draw waits
    until something else reads its memory, or until the end, so that one that is drawn over is never made, and the
    threads have the blocks of many tensors at once.
    """

    _BLOCK = 1 << 17
    _TOGETHER = 1 << 26
    """Numbers drawn before they are copied: a large model's do not fit in memory twice."""

    def __init__(self, seed: int, pool: ThreadPoolExecutor):
        super().__init__()
        self._seed, self._pool, self._tensors = seed, pool, 0
        self._waiting: dict[int, _Draw] = {}  # by storage

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if raised[0] is None:
            self._make(list(self._waiting))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.normal_.default:
            mean, deviation = _two(args, kwargs, mean=0.0, std=1.0)
            return self._fill(args[0], mean, deviation, np.random.Generator.standard_normal)
        if func is torch.ops.aten.uniform_.default:
            low, high = _two(args, kwargs, **{"from": 0.0, "to": 1.0})
            return self._fill(args[0], low, high - low, np.random.Generator.random)
        touched = {_storage(x) for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        self._make([storage for storage in touched if storage in self._waiting])
        return func(*args, **kwargs)

    def _fill(self, tensor: Tensor, shift: float, scale: float, draw: Callable[..., Any]) -> Tensor:
        wanted, storage = _Draw(tensor, self._tensors, shift, scale, draw), _storage(tensor)
        self._tensors += 1
        before = self._waiting.get(storage)
        if before is not None and before.place != wanted.place:
            self._make([storage])  # another part of the same memory
        self._waiting[storage] = wanted
        return tensor

    def _make(self, storages: Sequence[int]) -> None:
        """Draw what is waiting for these, and copy it into place."""
        part: list[_Draw] = []
        for storage in storages:
            part.append(self._waiting.pop(storage))
            if sum(each.tensor.numel() for each in part) >= self._TOGETHER:
                self._draw(part)
                part = []
        self._draw(part)

    def _draw(self, part: Sequence[_Draw]) -> None:
        # Drawn on the host and copied once: a copy to a GPU for each block takes longer than drawing it.
        numbers = [np.empty(each.tensor.numel(), np.float32) for each in part]

        def block(at: tuple[int, int]) -> None:
            # Each block has a generator of its own, so that the numbers do not depend on the threads.
            (which, start), each = at, part[at[0]]
            generator = np.random.Generator(np.random.SFC64([self._seed, each.number, start]))
            drawn = numbers[which][start : start + self._BLOCK]
            each.draw(generator, dtype=np.float32, out=drawn)
            drawn *= each.scale
            drawn += each.shift

        starts = ((i, start) for i, drawn in enumerate(numbers) for start in range(0, len(drawn), self._BLOCK))
        list(self._pool.map(block, starts))
        with torch.no_grad():
            for each, drawn in zip(part, numbers, strict=True):
                each.tensor.copy_(torch.from_numpy(drawn).view(each.tensor.shape))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _two(args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: float) -> list[float]:
    """The two numbers of a distribution, given by place or by name."""
    given = dict(zip(defaults, args[1:], strict=False)) | kwargs
    return [float(given.get(name, default)) for name, default in defaults.items()]


def _kept(model: nn.Module) -> list[str]:
    """Embeddings (input, position, output) and norms: everything but matrices between hidden states."""
    kept: list[str] = []
    output = model.get_output_embeddings()  # pyright: ignore
    for path, module in model.named_modules():
        parameters = [name for name, _ in module.named_parameters(recurse=False)]
        # A norm is found by its name and the shape of its weights: architectures have norm classes of their own.
        small = all(p.dim() <= 1 for p in module.parameters(recurse=False))
        norm = small and "norm" in type(module).__name__.lower()
        if isinstance(module, nn.Embedding) or module is output or norm:
            kept += [f"{path}.{name}" if path else name for name in parameters]
    names = {name for name, _ in model.named_parameters()}
    return [name for name in kept if name in names]
