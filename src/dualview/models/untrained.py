"""The same architecture without its training, as a control: a similarity that it reaches too is not learnt.

Deutch et al. 2024, section 4: *No Training* (every weight random) and *Trained Embeddings* (random but for the
embeddings and the norms).
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from dualview.models.language_model import LanguageModel
from dualview.models.loading import adopt
from dualview.options import Weights

UNTRAINED_SEED = 0


def redrawn(lm: LanguageModel, weights: Weights) -> LanguageModel:
    """The model with the weights that `--weights` asks for."""
    if weights == "trained":
        return lm
    return untrained(lm, keep_embeddings=weights == "trained-embeddings", seed=UNTRAINED_SEED)


def untrained(lm: LanguageModel, *, keep_embeddings: bool, seed: int) -> LanguageModel:
    """A copy with weights drawn as the architecture initialises them, in the same precision and place."""
    # On the CPU and with a seed of its own, so that the weights are the same on every device and no other draw changes.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        config = copy.deepcopy(lm.model.config)
        fresh = type(lm.model)(config)
        # Drawn in float32 and then rounded: an initialiser draws other numbers in another precision.
        fresh.to(lm.dtype)  # pyright: ignore[reportArgumentType]
    if keep_embeddings:
        with torch.no_grad():
            own = dict(fresh.named_parameters())
            for name in _kept(lm.model):
                own[name].copy_(lm.model.get_parameter(name))
    name = f"{lm.name} ({'trained embeddings and norms' if keep_embeddings else 'untrained'}, seed {seed})"
    fresh.to(lm.device)  # pyright: ignore[reportArgumentType]
    return replace(adopt(fresh, lm.tokenizer, name), commit=lm.commit, code_commits=lm.code_commits)


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
