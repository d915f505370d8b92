"""Task vectors (Hendel, Geva & Globerson 2023, arXiv 2310.15916): a context as one state at one layer.

The residual state θ after block l at the last token of in-context prompts, put in place of the zero-shot state at the
same block and token of another query. θ is the mean over some queries' prompts (Hendel et al. use one dummy query; the
mean does not depend on which). The layer is chosen where the answers on held-out queries are best.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.anatomy.hooks import hooked
from dualview.duality.on_model.feed_forward import block_output, with_states
from dualview.duality.on_model.query_packing import QueryPack, branched, tree_packs
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import compute_prefix
from dualview.tasks.prompts import Query


@dataclass(frozen=True)
class TaskVector:
    """θ and the block after which it is put in."""

    layer: int
    state: Float[Tensor, " d_model"]


def ask_with_vectors(
    lm: LanguageModel, queries: Sequence[Query], bare: Sequence[int], vectors: Sequence[TaskVector]
) -> Float[np.ndarray, "vector query candidate"]:
    """Every candidate's mean log-prob, zero-shot but for a state put in at each query's last prompt token.

    All vectors are tried at once: each has a copy of that token to itself, behind the same earlier tokens, which no
    vector can reach.
    """
    widest = max((len(query.candidates) for query in queries), default=0)
    found = np.full((len(vectors), len(queries), widest), -np.inf)
    with torch.no_grad():
        prefix = compute_prefix(lm, bare, len(bare))
    for pack in tree_packs(lm, [branched(query, len(vectors)) for query in queries], prefix):
        members = [queries[index] for index in pack.pack.members]
        with _put_in(lm, vectors, members, pack):
            scores = pack.log_probs(pack.run(lm))
        for index, query, row in zip(pack.pack.members, members, scores, strict=True):
            count = len(query.candidates)
            found[:, index, :count] = row[: len(vectors) * count].reshape(len(vectors), count)
    return found


@contextmanager
def _put_in(
    lm: LanguageModel, vectors: Sequence[TaskVector], members: Sequence[Query], pack: QueryPack
) -> Generator[None]:
    """Replace each vector's block's output at its own copy of every query's last token."""

    def put(copy: int, vector: TaskVector, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        at = torch.stack([pack.pack.slots[i, len(query.ids) - 1 + copy] for i, query in enumerate(members)])
        states = block_output(output)
        return with_states(output, states.index_copy(1, at, vector.state.to(states).expand(1, len(at), -1)))

    blocks = lm.anatomy.blocks
    with hooked(blocks[v.layer].register_forward_hook(partial(put, copy, v)) for copy, v in enumerate(vectors)):
        yield
