"""The same vote on a language model: do the demonstrations that its fine-tuned K and V attend to predict its answer?

Fine-tuning on demonstrations writes ΔW = Σ_t e_t x_tᵀ into every K and V. At a query's last token with input x,
demonstration d gets, layer by layer,

    mass      Σ_{t∈d} |x_t·x|                              the same for K and V, which read the same x
    share     Σ_{t∈d} ⟨e_t, ΔW x⟩ (x_t·x) / ‖ΔW x‖²         signed, of K's or V's update
    softmax   Σ_{t∈d} softmax mass in context, mean over heads; on all its tokens, or on its label's

and votes for its class. Layers are averaged after each is divided by its sum. The raw vote is the class with the
largest sum; it mostly says which class has more or longer demonstrations. The centred vote is the class whose share is
largest compared with its own mean over the queries: what the query itself adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.anatomy.dispatch import AttentionCall, run_forward
from dualview.anatomy.kernels import final_logits
from dualview.anatomy.layers import Role
from dualview.comparison.finetuning import fine_tune, recipe_of
from dualview.comparison.prepare import Prepared
from dualview.duality.on_model.demo_tokens import DemoTokens, demo_tokens
from dualview.duality.on_model.dual_finetuning import role_factors, trace_for, update_contributions
from dualview.duality.on_model.query_packing import tree_packs
from dualview.io.progress import Progress
from dualview.learning.traces import TrainingTrace, trace_training
from dualview.metrics.cosine import ratio
from dualview.metrics.predictions import predictions
from dualview.metrics.statistics import generator
from dualview.models.language_model import LanguageModel
from dualview.models.packing.rows import Pack, grow
from dualview.models.prefix import Prefix
from dualview.models.probe import Packed, Trace
from dualview.models.scoring import ask, compute_prefix
from dualview.tasks.prompts import PromptSet

SHUFFLES = 200
RULES: Mapping[str, str] = {
    "mass": "ft",
    "mass, base weights": "ft",
    "share of V": "ft",
    "share of K": "ft",
    "softmax mass": "icl",
    "softmax mass, labels": "icl",
}
"""Every vote, and the setting that it is to predict."""

ByDemo = Float[np.ndarray, "layer query demo"]


def measure(prepared: Prepared, progress: Progress) -> dict[str, Any]:
    """One draw of demonstrations: every vote on every query, and the answers."""
    lm, prompts = prepared.lm, prepared.prompts
    queries, shared = prompts.queries, demo_tokens(prompts)
    lr, recipe = prepared.options.lr, recipe_of(prepared)
    rate = fine_tune(prepared, progress).tuned.lr if lr == "auto" else lr
    traces = trace_training(lm, prompts.training_sequences, [0.0, rate], recipe)
    base, trace = (trace_for(lm, each) for each in traces)
    found, tuned = _of_training(prepared, trace, shared)
    found["mass, base weights"] = _of_training(prepared, base, shared)[0]["mass"]
    masses, scores = softmax_masses(lm, prompts)
    weights = masses[..., shared.place]
    found["softmax mass"] = _summed(weights, shared, prompts)
    found["softmax mass, labels"] = _summed(weights * shared.label.numpy(), shared, prompts)
    answers = {"ft": predictions(tuned), "icl": predictions(scores)}
    classes = np.array([row.label for row in prepared.demos[: prompts.shots_used]])
    draw = generator(prepared.seed or 0, "shuffled demonstrations")
    shuffled = [draw.permutation(classes) for _ in range(SHUFFLES)]
    count = len(queries[0].candidates)
    often = int(np.bincount(classes, minlength=count).argmax())
    return {
        "seed": prepared.seed,
        "lr": rate,
        "classes": classes.tolist(),
        "gold": [query.gold for query in queries],
        "answers": {name: each.tolist() for name, each in answers.items()},
        "majority": {name: float((each == often).mean()) for name, each in answers.items()},
        "rules": {
            rule: _votes(found[rule], classes, shuffled, count, answers[setting]) for rule, setting in RULES.items()
        },
    }


def _votes(
    by_demo: ByDemo,
    classes: Int[np.ndarray, " demo"],
    shuffled: list[Int[np.ndarray, " demo"]],
    count: int,
    answers: Int[np.ndarray, " query"],
) -> dict[str, Any]:
    by_layer = shares(by_demo)
    centred = by_layer - by_layer.mean(1, keepdims=True)
    vote = votes(centred, classes, count)
    control = np.stack([votes(centred[-1:], each, count)[0] == answers for each in shuffled])
    return {
        "raw": votes(by_layer[-1:], classes, count)[0].tolist(),
        "vote": vote[-1].tolist(),
        "shuffled": control.mean(0).tolist(),
        "layers": [float((each == answers).mean() - by_margins(each, answers).mean()) for each in vote[:-1]],
    }


def shares(by_demo: ByDemo) -> ByDemo:
    """Each layer's numbers divided by their sum over demonstrations, and their mean over layers as one more layer."""
    each = np.nan_to_num(ratio(by_demo, by_demo.sum(-1, keepdims=True)))
    return np.concatenate([each, each.mean(0, keepdims=True)])


def votes(shares: ByDemo, classes: Int[np.ndarray, " demo"], count: int) -> Int[np.ndarray, "layer query"]:
    """The class with the most at each layer."""
    return (shares @ np.eye(count)[classes]).argmax(-1)


def by_margins(vote: Int[np.ndarray, " query"], answers: Int[np.ndarray, " query"]) -> Float[np.ndarray, " query"]:
    """How often the vote of a query drawn at random would be this query's answer."""
    return (vote[None, :] == answers[:, None]).mean(1)


def _of_training(prepared: Prepared, trace: TrainingTrace, shared: DemoTokens) -> tuple[dict[str, ByDemo], np.ndarray]:
    """Each demonstration's mass and shares at every query's last token, and the tuned model's scores."""
    lm, queries = prepared.lm, prepared.prompts.queries
    roles: tuple[Role, ...] = ("v", "k")
    factors = {role: role_factors(lm, trace, role) for role in roles}
    taps = tuple(f.projection for each in factors.values() for f in each)
    asked = ask(lm, queries, replace(prepared.zero_shot, taps=taps, detailed=len(queries)), trace.tuned.patch)
    read = {tap.name: torch.from_numpy(kept.x) for tap, kept in zip(taps, asked.tapped, strict=True)}

    def by_demo(values: Float[Tensor, "query training_token"]) -> np.ndarray:
        tokens = shared.from_training(values.T.double().cpu(), trace.tokens)
        return _summed(tokens.T.numpy(), shared, prepared.prompts)

    found = {"mass": np.stack([by_demo((read[f.projection.name] @ f.inputs.cpu().T).abs()) for f in factors["v"]])}
    for role, each in factors.items():
        signed = (update_contributions(f, read[f.projection.name].to(f.errors.device)) for f in each)
        found[f"share of {role.upper()}"] = np.stack([by_demo(values) for values in signed])
    return found, asked.settings[0].log_probs


def _summed(values: Float[np.ndarray, "*rest token"], shared: DemoTokens, prompts: PromptSet) -> np.ndarray:
    """Sums over each demonstration's tokens."""
    return values @ np.eye(prompts.shots_used)[shared.demo.numpy()]


class _Watching(Packed):
    """Packed attention that keeps the softmax mass of each query's last token on every token of the prefix."""

    def __init__(self, pack: Pack, prefix: Prefix) -> None:
        super().__init__(pack, prefix, trace=cast("Trace", ()))  # it says only that there is something to record
        self.layers: list[Float[Tensor, "query token"]] = []

    def _record(self, trace: Trace, layer: int, call: AttentionCall, lse: Tensor, shared: Tensor | None) -> None:
        rule, at, last = call.rule, self.prefix_at, self.pack.record
        q, keys = call.q[0, :, last], self.prefix.keys[layer][0]
        logits = (q.unflatten(0, (len(keys), -1)) @ keys[:, None].mT).flatten(0, 1) * rule.scale
        logits = final_logits(logits[None], rule, at)[0]
        seen = rule.visible(self.positions[last], at)
        logits = logits if seen is None else logits.masked_fill(~seen, -torch.inf)
        self.layers.append((logits - lse[0, :, last, None]).exp().mean(0))


def softmax_masses(
    lm: LanguageModel, prompts: PromptSet
) -> tuple[Float[np.ndarray, "layer query token"], Float[np.ndarray, "query candidate"]]:
    """In context: the mass of every query's last token on each token of the prefix, mean over heads; and the scores."""
    queries = prompts.queries
    mass = np.zeros((len(lm.anatomy.layers), len(queries), len(prompts.prefix)))
    scores = np.zeros((len(queries), max(len(query.candidates) for query in queries)))
    with torch.no_grad():
        prefix = compute_prefix(lm, prompts.prefix, len(prompts.zero_prefix))
        for pack in tree_packs(lm, [grow(query) for query in queries], prefix):
            watching, members = _Watching(pack.pack, prefix), list(pack.pack.members)
            at = watching.positions[None]
            logits = run_forward(lm.model, watching, pack.pack.ids[None], at, pack.pack.read)[0]
            mass[:, members] = torch.stack(watching.layers).double().cpu().numpy()
            scores[members] = pack.log_probs(logits)
    return mass, scores
