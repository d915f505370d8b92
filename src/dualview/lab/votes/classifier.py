"""A small classifier trained by SGD, and how its training examples vote at test time (Irie et al. 2022).

A trained layer answers W_T x = W_0 x + Σ_t e_t (x_t·x). Two votes by class c of the training examples:

    mass      m_c(x) = Σ_{t∈c} |x_t·x|                              Irie et al.'s; it knows no error signal
    signed    s_c(x) = Σ_{t∈c} ⟨u_c(x), e_t⟩ (x_t·x) = u_cᵀ ΔW_c x     what the examples of c add to logit c

with ΔW_c = Σ_{t∈c} e_t x_tᵀ and u_c the gradient, at the layer's output, of logit c less the mean logit. A ReLU network
is linear between its kinks, so u_c carries the layer's output to the logit exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dualview.duality.theory.linear import DualForm, aggregate
from dualview.duality.theory.recorder import DualRecorder
from dualview.io.errors import UserError
from dualview.metrics.statistics import generator
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import PassPlan, ask
from dualview.tasks.prompts import build_prompts
from dualview.tasks.task import load_task

SHUFFLES = 20
"""Permutations of the classes over which the shuffled controls are averaged."""
SENTENCES = "source"
"""The embedded task whose sentences are classified: which of four collections each comes from."""
RULES = (
    "mass",
    "mass, final weights",
    "mass, untrained weights",
    "mass, shuffled classes",
    "class frequency",
    "signed",
    "signed, shuffled classes",
)


@dataclass(frozen=True)
class Samples:
    """Rows to learn from and their classes."""

    x: Float[Tensor, "row feature"]
    y: Int[Tensor, " row"]
    classes: int


def gaussian(rows: int, seed: int) -> Samples:
    """Ten Gaussian classes in 32 dimensions, equally likely, their centres drawn at random."""
    rng = generator(seed, "gaussian classes")
    centres = 0.55 * rng.standard_normal((10, 32))
    y = rng.integers(0, 10, rows)
    return Samples(torch.tensor(centres[y] + rng.standard_normal((rows, 32))), torch.tensor(y), 10)


def sentences(lm: LanguageModel, rows: int) -> Samples:
    """What the last layer's values read at the end of sentences of four collections; each feature standardised."""
    task = load_task(SENTENCES)
    pool = task.rows("train")
    if len(pool) < rows:
        raise UserError(f"There are {len(pool)} sentences to classify, not {rows}; give fewer rows.")
    prompts = build_prompts(task, lm.tokenizer, pool[:1], pool[:rows], max_context=lm.context)
    value = lm.anatomy.layers[-1].projections["v"][-1]
    bare = prompts.zero_prefix
    x = ask(lm, prompts.queries, PassPlan(bare, len(bare), taps=(value,), detailed=rows)).tapped[0].x
    x = x.astype(np.float64)
    x = (x - x.mean(0)) / x.std(0)
    return Samples(torch.tensor(x), torch.tensor([q.gold for q in prompts.queries]), len(task.labels or ()))


class Classifier(nn.Module):
    """Linear layers with ReLU between them, in double precision."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=torch.float64) for a, b in pairwise(sizes))

    def forward(self, x: Float[Tensor, "row feature"]) -> Float[Tensor, "row class"]:
        return self.layers[-1](self.inputs(x)[-1])

    def inputs(self, x: Float[Tensor, "row feature"]) -> list[Float[Tensor, "row d_in"]]:
        """What each layer reads."""
        found = [x]
        for layer in self.layers[:-1]:
            found.append(torch.relu(layer(found[-1])))
        return found

    def weights(self) -> list[Float[Tensor, "d_out d_in"]]:
        return [layer.get_parameter("weight").detach() for layer in self.layers]

    def directions(self, x: Float[Tensor, "row feature"]) -> list[Float[Tensor, "row class d_out"]]:
        """For each layer, the gradient of every logit (less the mean logit) with respect to its output."""
        read, weights = self.inputs(x), self.weights()
        classes = weights[-1].shape[0]
        first = torch.eye(classes, dtype=x.dtype) - 1 / classes
        found = [first.expand(len(x), -1, -1)]
        for layer in range(len(weights) - 1, 0, -1):
            found.append((found[-1] @ weights[layer]) * (read[layer] > 0)[:, None])
        return found[::-1]


@dataclass(frozen=True)
class Trained:
    """A classifier after its training, with every layer in dual form."""

    model: Classifier
    untrained: Classifier
    forms: list[DualForm]
    residual: float
    """The largest part of a layer's update that its recorded examples do not explain."""
    shown: Int[Tensor, " token"]
    """Which training row each recorded example is."""


def train(x: Tensor, y: Tensor, sizes: Sequence[int], steps: int, batch: int, rate: float, seed: int) -> Trained:
    """SGD on cross-entropy with every layer recorded; rows in a new random order in each pass over them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, untrained = Classifier(sizes), Classifier(sizes)
        untrained.load_state_dict(model.state_dict())
        passes = -(-steps * batch // len(x))
        shown = torch.cat([torch.randperm(len(x)) for _ in range(passes)])[: steps * batch]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    names = {str(i): layer for i, layer in enumerate(model.layers)}
    with DualRecorder(names, optimizer) as recorder:
        for rows in shown.split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    forms = [recorder.dual(name) for name in names]
    return Trained(model, untrained, forms, max(each.weight for each in recorder.report()), shown)


def class_updates(form: DualForm, groups: Int[Tensor, " token"], classes: int) -> Float[Tensor, "class d_out d_in"]:
    """ΔW_c = Σ_{t∈c} e_t x_tᵀ: the part of the layer's update that each class's examples wrote."""
    errors, keys = form.errors, form.keys
    return torch.stack([errors[:, groups == c] @ keys[:, groups == c].T for c in range(classes)])


def masses(
    keys: Float[Tensor, "d_in token"], shown: Int[Tensor, " token"], rows: int, x: Float[Tensor, "query d_in"]
) -> Float[Tensor, "row query"]:
    """Σ |x_t·x| of every training row, over all the times it was shown."""
    found = x.new_zeros(rows, len(x))
    for part in torch.arange(keys.shape[1]).split(4096):  # all tokens × queries at once would be hundreds of MB
        found.index_add_(0, shown[part], (keys[:, part].T @ x.T).abs())
    return found


def measure(samples: Samples, trained_rows: int, width: int, seed: int, **how: Any) -> dict[str, Any]:
    """Train one classifier and take every vote on the rows it was not trained on, layer by layer."""
    rng = generator(seed, "votes")
    order = torch.from_numpy(rng.permutation(len(samples.x)))
    own, other = order[:trained_rows], order[trained_rows:]
    x, y, test, target = samples.x[own], samples.y[own], samples.x[other], samples.y[other]
    trained = train(x, y, (x.shape[1], width, width, samples.classes), seed=seed, **how)
    shuffled = [y[torch.from_numpy(rng.permutation(len(y)))] for _ in range(SHUFFLES)]
    with torch.no_grad():
        output = trained.model(test).argmax(1)
        votes = _votes(trained, x, y, test, shuffled, samples.classes)
    return {
        "accuracy": float((output == target).double().mean()),
        "tested": len(test),
        "wrong": int((output != target).sum()),
        "residual": trained.residual,
        "layers": [{rule: agreement(each, target, output) for rule, each in layer.items()} for layer in votes],
    }


def _votes(
    trained: Trained, x: Tensor, y: Tensor, test: Tensor, shuffled: Sequence[Tensor], classes: int
) -> list[dict[str, Int[Tensor, "shuffle query"]]]:
    shown, model = trained.shown, trained.model
    often = torch.bincount(y[shown], minlength=classes).argmax().expand(1, len(test))
    found: list[dict[str, Tensor]] = []
    parts = zip(trained.forms, model.inputs(test), model.directions(test), strict=True)
    times = torch.bincount(shown, minlength=len(x))[:, None]
    for layer, (form, read, towards) in enumerate(parts):
        mass = masses(form.keys, shown, len(x), read)
        final, untrained = (
            times * (net.inputs(x)[layer] @ net.inputs(test)[layer].T).abs() for net in (model, trained.untrained)
        )

        def by_mass(mass: Tensor, *groups: Tensor) -> Tensor:
            return torch.stack([aggregate(mass, each, classes).argmax(0) for each in groups])

        def signed(*groups: Tensor, form: DualForm = form, read: Tensor = read, towards: Tensor = towards) -> Tensor:
            updates = (class_updates(form, each[shown], classes) for each in groups)
            return torch.stack([torch.einsum("nci,cij,nj->nc", towards, dw, read).argmax(1) for dw in updates])

        every = (
            by_mass(mass, y),
            by_mass(final, y),
            by_mass(untrained, y),
            by_mass(mass, *shuffled),
            often,
            signed(y),
            signed(*shuffled),
        )
        found.append(dict(zip(RULES, every, strict=True)))
    return found


def agreement(
    votes: Int[Tensor, "shuffle query"], target: Int[Tensor, " query"], output: Int[Tensor, " query"]
) -> dict[str, float | None]:
    """How often votes are the target or the output: on all queries, on those answered rightly, on the others."""
    right = output == target

    def rate(of: Tensor, where: Bool[Tensor, " query"]) -> float | None:
        return float((votes == of)[:, where].double().mean()) if bool(where.any()) else None

    return {
        "output": rate(output, torch.ones_like(right)),
        "right": rate(output, right),
        "wrong, target": rate(target, ~right),
        "wrong, output": rate(output, ~right),
    }
