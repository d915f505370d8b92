"""The subspaces of a task's vectors, estimated on selection rows behind draws of demonstrations that are not reported.

task vectors      Hendel et al. 2023 (arXiv 2310.15916): the state after a block at the prompt's last token, with
                  demonstrations less without (what putting it in changes), mean over rows. One vector for each
                  draw; their span, block by block.
function vectors  Todd et al. 2024 (arXiv 2310.15213): the mean in-context outputs of the heads that, put into
                  prompts with shuffled labels, raise the right answer's probability most. The vector is their sum;
                  the subspace is their span, the same for every layer.
zero-shot outputs the rival that knows no task: the main directions of the layer's attention outputs without
                  demonstrations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.anatomy.hooks import hooked
from dualview.comparison.inputs import make_prompts
from dualview.comparison.prepare import Prepared, selection_queries
from dualview.duality.on_model.feed_forward import block_output
from dualview.duality.on_model.query_packing import QueryPack, branched, tree_packs
from dualview.io.errors import UserError
from dualview.metrics.statistics import generator
from dualview.models.language_model import LanguageModel
from dualview.models.packing.rows import grow
from dualview.models.scoring import compute_prefix
from dualview.tasks.prompts import Query

Bases = Float[np.ndarray, "layer d_model rank"]
"""An orthonormal basis for each layer."""
KINDS = ("task vectors", "function vectors")
ZERO_SHOT = "zero-shot outputs"


@dataclass(frozen=True)
class LastTokens:
    """What the queries' last tokens hold."""

    blocks: Float[Tensor, "layer query d_model"]
    """The states after each block."""
    outputs: Float[Tensor, "layer query d_model"]
    """The attention outputs."""
    heads: list[Float[Tensor, "query head d_value"]]
    """Each head's output, before the output projection."""


def estimate(several: Sequence[Prepared], rank: int, rows: int) -> dict[str, Bases]:
    """Every subspace of one task; `several` are draws of demonstrations, one vector of `task vectors` each."""
    first = several[0]
    lm = first.lm
    queries = selection_queries(first)[:rows]
    if len(queries) < rank:
        raise UserError(f"Task {first.task.name} has {len(queries)} selection rows; a rank of {rank} needs as many.")
    bare = last_tokens(lm, queries, first.prompts.zero_prefix, 0)
    behind = [last_tokens(lm, queries, each.prompts.prefix, len(each.prompts.zero_prefix)) for each in several]
    vectors = torch.stack([(each.blocks - bare.blocks).mean(1) for each in behind], 1)  # [layer, draw, d_model]
    means = [torch.stack([each.heads[layer].mean(0) for each in behind]).mean(0) for layer in range(len(bare.heads))]
    effects = np.mean([head_effects(lm, queries[: rows // 2], _corrupted(each), means) for each in several[:2]], axis=0)
    written = _written(lm, means)
    chosen = torch.stack([written[i] for i in np.argsort(-effects, kind="stable")[:rank]])
    return {
        "task vectors": basis(vectors, rank),
        "function vectors": basis(chosen.expand(len(vectors), -1, -1), rank),
        ZERO_SHOT: basis(bare.outputs, rank),
    }


def basis(vectors: Float[Tensor, "layer vector d_model"], rank: int) -> Bases:
    """The `rank` main directions of each layer's vectors (not centred)."""
    *_, right = torch.linalg.svd(vectors.double().cpu(), full_matrices=False)
    return right[:, :rank].mT.numpy()


def random_bases(layers: int, width: int, rank: int, name: str) -> Bases:
    """Subspaces in uniformly random directions."""
    drawn = generator(0, name).standard_normal((layers, width, rank))
    return np.linalg.qr(drawn)[0]


def last_tokens(lm: LanguageModel, queries: Sequence[Query], prefix: Sequence[int], special: int) -> LastTokens:
    """Run the queries behind a prefix and keep states, attention outputs and heads at their last tokens."""
    layers = lm.anatomy.layers
    if len(lm.anatomy.blocks) != len(layers) or any(layer.output_by_head() is None for layer in layers):
        raise UserError(f"{lm.name} has blocks without one attention of heads side by side, so it has no task vectors.")
    kept: list[list[Tensor]] = [[torch.empty(0)] * len(queries) for _ in range(3 * len(layers))]

    def keep(slot: int, pack: QueryPack, read: bool) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
            states = (inputs[0] if read else block_output(output))[0, pack.last]
            for member, state in zip(pack.pack.members, states, strict=True):
                kept[slot][member] = state

        return hook

    with torch.no_grad():
        start = compute_prefix(lm, prefix, special or len(prefix))
        for pack in tree_packs(lm, [grow(query) for query in queries], start):
            n = len(layers)
            places = [*lm.anatomy.blocks, *(layer.output for layer in layers), *(layer.output for layer in layers)]
            kept_at = [keep(slot, pack, slot >= 2 * n) for slot in range(len(places))]
            with hooked(p.register_forward_hook(hook) for p, hook in zip(places, kept_at, strict=True)):
                pack.run(lm)
    states = [torch.stack(each) for each in kept]
    heads = [x.unflatten(-1, (layer.heads, -1)) for x, layer in zip(states[2 * len(layers) :], layers, strict=True)]
    return LastTokens(torch.stack(states[: len(layers)]), torch.stack(states[len(layers) : 2 * len(layers)]), heads)


def _written(lm: LanguageModel, means: Sequence[Float[Tensor, "head d_value"]]) -> list[Float[Tensor, " d_model"]]:
    """What each head's mean output writes into the residual stream, head by head through all layers."""
    found: list[Tensor] = []
    for layer, mean in zip(lm.anatomy.layers, means, strict=True):
        weight = layer.output_by_head()
        assert weight is not None
        found += list(torch.einsum("mhd,hd->hm", weight.to(mean), mean))
    return found


def _corrupted(prepared: Prepared) -> tuple[int, ...]:
    """The prefix with the demonstrations' labels shuffled among them."""
    used = prepared.demos[: prepared.prompts.shots_used]
    order = generator(prepared.seed or 0, "shuffled labels").permutation(len(used))
    demos = [replace(row, label=used[i].label) for row, i in zip(used, order, strict=True)]
    queries = [prepared.demos[0]]  # a prompt set needs one; only the prefix is used
    return make_prompts(prepared.options, prepared.lm.reader, prepared.task, demos, queries).prefix


def head_effects(
    lm: LanguageModel,
    queries: Sequence[Query],
    prefix: Sequence[int],
    means: Sequence[Float[Tensor, "head d_value"]],
) -> Float[np.ndarray, " head"]:
    """By how much each head's given output, put in at the last token, changes the right candidate's probability.

    Every head has a copy of the last token to itself, and one copy is left as it is (see `query_packing.branched`).
    """
    counts = [len(mean) for mean in means]
    first = np.cumsum([0, *counts])
    copies = int(first[-1]) + 1
    changed = np.zeros((len(queries), copies))
    with torch.no_grad():
        start = compute_prefix(lm, prefix, len(prefix))
        for pack in tree_packs(lm, [branched(query, copies) for query in queries], start):
            members = [queries[i] for i in pack.pack.members]

            def put_in(layer: int, pack: QueryPack = pack, members: Sequence[Query] = members) -> Any:
                def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                    x = inputs[0].clone()
                    each = x.unflatten(-1, (counts[layer], -1))
                    for i, query in enumerate(members):
                        at = pack.pack.slots[i, len(query.ids) - 1 + torch.arange(first[layer], first[layer + 1])]
                        each[0, at, torch.arange(counts[layer])] = means[layer].to(x)
                    return (x, *inputs[1:])

                return hook

            outputs = [layer.output for layer in lm.anatomy.layers]
            with hooked(m.register_forward_pre_hook(put_in(i)) for i, m in enumerate(outputs)):
                scores = pack.log_probs(pack.run(lm))
            for index, query, row in zip(pack.pack.members, members, scores, strict=True):
                own = row[: copies * len(query.candidates)].reshape(copies, -1)
                p = np.exp(own - own.max(1, keepdims=True))
                changed[index] = (p / p.sum(1, keepdims=True))[:, query.gold]
    return (changed[:, :-1] - changed[:, -1:]).mean(0)


def inside_and_outside(
    icl: Float[np.ndarray, "query layer d_model"], ft: Float[np.ndarray, "query layer d_model"], bases: Bases
) -> Mapping[str, Float[np.ndarray, "query layer"]]:
    """Shares ‖PΔ‖²/‖Δ‖² of both updates, and their cosine inside (PΔ) and outside (Δ − PΔ) the subspace."""
    inner = [np.einsum("qld,ldr->qlr", update, bases) for update in (icl, ft)]
    outer = [update - np.einsum("qlr,ldr->qld", part, bases) for update, part in zip((icl, ft), inner, strict=True)]

    def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a * b).sum(-1)

    with np.errstate(invalid="ignore", divide="ignore"):
        share_icl, share_ft = (dot(p, p) / dot(u, u) for p, u in zip(inner, (icl, ft), strict=True))
        inside, outside = (dot(a, b) / np.sqrt(dot(a, a) * dot(b, b)) for a, b in (inner, outer))
    return {"icl": share_icl, "ft": share_ft, "inside": inside, "outside": outside}
