"""Task vectors (Hendel, Geva & Globerson 2023, arXiv 2310.15916): a context as one state at one layer.

The residual state θ after block l at the last token of in-context prompts, put in place of the zero-shot state at the
same block and token of another query. θ is the mean over some queries' prompts (Hendel et al. use one dummy query; the
mean does not depend on which). The layer is chosen where the answers on held-out queries are best.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dualview.duality.feed_forward import block_output
from dualview.duality.packs import query_packs
from dualview.models.loading import LanguageModel
from dualview.models.passes import compute_prefix
from dualview.tasks.prompt import Query


@dataclass(frozen=True)
class TaskVector:
    """θ and the block after which it is put in."""

    layer: int
    state: Float[Tensor, " d_model"]

    @contextmanager
    def put_at(self, block: nn.Module, last: Int[Tensor, " query"]) -> Generator[None]:
        """Replace the block's output at the tokens `last` of the row."""

        def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            states = block_output(output).index_copy(
                1, last, self.state.to(block_output(output)).expand(1, len(last), -1)
            )
            return (states, *output[1:]) if isinstance(output, tuple) else states

        handle = block.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


def ask_with_vector(
    lm: LanguageModel, queries: Sequence[Query], bare: Sequence[int], vector: TaskVector
) -> Float[np.ndarray, "query candidate"]:
    """Every candidate's mean log-prob, zero-shot but for the state put in at each query's last prompt token."""
    widest = max((len(query.candidates) for query in queries), default=0)
    found = np.full((len(queries), widest), -np.inf)
    with torch.no_grad():
        prefix = compute_prefix(lm, bare, len(bare))
    for pack in query_packs(lm, queries, prefix):
        with vector.put_at(lm.anatomy.blocks[vector.layer], pack.last):
            found[list(pack.pack.members)] = pack.log_probs(pack.run(lm))
    return found
