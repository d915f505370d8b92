"""The trained sibling of the exact model: the same architecture, its weights learnt instead of set.

Words are described by their features u, as in the exact model; the constant, the norms and the feed-forward maps (0)
stay as they are there. W_Q, W_K, W_V and W_O of both layers, the embeddings of labels and newline and the labels' rows
of the output start at random and are trained. The exact model's weights are one point of this space.

A training problem has its own classes: k orthogonal centres in random directions and words around them, so that what a
label means only the demonstrations say. The loss is the cross-entropy of every word's label, given the words and labels
before it. The words of the saved task are in no training problem.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import SmolLM3ForCausalLM

from dualview.io.errors import UserError
from dualview.io.progress import Advance
from dualview.lab.problems import named_generator
from dualview.lab.training import Schedule, training_steps
from dualview.models.exact import CONSTANT, SPECIAL, MadeUp, skeleton
from dualview.variants.linear import Linear
from dualview.variants.registry import attach

AttentionName = Literal["linear", "softmax"]
ATTENTIONS: tuple[AttentionName, ...] = get_args(AttentionName)
_LABEL_SPREAD = 0.3  # of the labels' first embeddings: with 1 the search for the copying layer takes twice as long
WARM_UP = 50
"""Steps over which the learning rate rises."""


@dataclass(frozen=True)
class Problems:
    """Classification problems: words with their features, and the class of each."""

    u: Float[Tensor, "problem word feature"]
    y: Int[Tensor, "problem word"]

    def __getitem__(self, some: slice) -> Problems:
        return Problems(self.u[some], self.y[some])


@dataclass(frozen=True)
class ProblemShape:
    """Where problems come from: as the task of the exact model, with new centres for each problem."""

    features: int
    classes: int
    spread: float
    words: int

    def draw(self, generator: torch.Generator, count: int) -> Problems:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        centres = torch.linalg.qr(normal(count, self.features, self.classes)).Q.mT
        # LAPACK fixes the signs of Q, which would tell the classes apart without any demonstration.
        centres = centres * (2 * torch.randint(2, (count, self.classes, 1), generator=generator) - 1)
        y = torch.randint(self.classes, (count, self.words), generator=generator)
        near = centres.gather(1, y[..., None].expand(-1, -1, self.features))
        near = near + self.spread * normal(count, self.words, self.features) / math.sqrt(self.features)
        return Problems(near / near.norm(dim=-1, keepdim=True) * math.sqrt(0.5), y)


def predict(model: SmolLM3ForCausalLM, problems: Problems, classes: int) -> Float[Tensor, "problem word class"]:
    """The labels' logits at every word, after the demonstrations before it: `word label newline word label …`."""
    inner, output = cast(Any, model.model), cast(Any, model.lm_head).weight
    token, newline = inner.embed_tokens.weight, SPECIAL.index("\n")
    labels = slice(len(SPECIAL), len(SPECIAL) + classes)
    (count, words, d), width = problems.u.shape, token.shape[1]
    known = nn.functional.pad(problems.u.to(token.dtype), (0, width - d))
    word = known + nn.functional.pad(token.new_full((1,), CONSTANT), (width - 1, 0))
    rows = torch.stack([word, token[labels][problems.y], token[newline].expand(count, words, -1)], 2)
    read = rows.flatten(1, 2)[:, :-2]  # nothing after the last word
    return inner(inputs_embeds=read, use_cache=False).last_hidden_state[:, ::3] @ output[labels].T


def fresh_model(made: MadeUp, attention: AttentionName, seed: int) -> SmolLM3ForCausalLM:
    """The model before its training, with what is to be trained marked as such."""
    model = skeleton(made)
    if attention == "linear":
        attach(model, Linear())
    draw = named_generator(seed, "weights")
    inner, output = cast(Any, model.model), cast(Any, model.lm_head).weight
    projections = [f"{role}_proj" for role in "qkvo"]
    trained = [getattr(layer.self_attn, name).weight for layer in inner.layers for name in projections]
    with torch.no_grad():
        for weight in trained:
            weight.normal_(std=weight.shape[1] ** -0.5, generator=draw)
        token, labels = inner.embed_tokens.weight, made.label_tokens
        token[SPECIAL.index("\n") : labels.stop, :-1].normal_(std=_LABEL_SPREAD, generator=draw)
        output[labels].normal_(std=output.shape[1] ** -0.5, generator=draw)
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is each for each in (*trained, token, output)))
    return model


def train(
    model: SmolLM3ForCausalLM, shape: ProblemShape, schedule: Schedule, seed: int, advance: Advance
) -> SmolLM3ForCausalLM:
    """Train in place on new problems at every step.

    Rows of the embedding and of the output that no problem reads have no gradient, so Adam leaves them as they are.
    """
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    draw = named_generator(seed, "problems")
    for step in training_steps(model, schedule, advance):
        problems = shape.draw(draw, schedule.batch_size)
        predicted = predict(model, problems, shape.classes)
        nn.functional.cross_entropy(predicted.flatten(0, 1), problems.y.flatten()).backward()
        if not math.isfinite(float(nn.utils.clip_grad_norm_(weights, schedule.clip))):
            raise UserError(f"The training diverged at step {step + 1}; give a lower --train-lr.")
    return model
