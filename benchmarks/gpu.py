"""On a GPU: a 1.4B model of the papers' shape, bfloat16, 32 shots, 872 queries, against whole prompts in batches.

The baseline is what lm-evaluation-harness's `hf` backend does with such requests: whole prompts sorted by length,
padded to a batch, logits at every position, the best of several batch sizes. Weights are random (speed does not care).
"""

from __future__ import annotations

import numpy as np
import torch
from common import must_agree, report, timed
from transformers import LlamaConfig, LlamaForCausalLM

from dualview.models.loading import adopt
from dualview.models.scoring import PassPlan, ask
from dualview.tasks.prompts import Query

VOCAB, PREFIX, QUERIES = 50_272, 1_000, 872


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=5504,
        max_position_embeddings=2048,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    lm = adopt(model, None, "random 1.4B")
    draw = np.random.default_rng(0)
    prefix = tuple(int(t) for t in draw.integers(3, VOCAB, PREFIX))
    queries = [
        Query(tuple(int(t) for t in draw.integers(3, VOCAB, n)), ((11,), (12,)), 0)
        for n in draw.integers(14, 49, QUERIES)
    ]
    how = PassPlan(prefix, 1, record=False)

    def ours() -> np.ndarray:
        return ask(lm, queries, how).settings[0].log_probs

    def theirs(batch: int) -> np.ndarray:
        order = sorted(range(QUERIES), key=lambda i: -len(queries[i].ids))
        scores = np.zeros((QUERIES, 2))
        with torch.no_grad():
            for start in range(0, QUERIES, batch):
                some = order[start : start + batch]
                longest = max(len(queries[i].ids) for i in some)
                ids = torch.zeros(len(some), PREFIX + longest, dtype=torch.long)
                for row, i in enumerate(some):
                    ids[row, : PREFIX + len(queries[i].ids)] = torch.tensor([*prefix, *queries[i].ids])
                logits = torch.log_softmax(model(input_ids=ids.cuda()).logits, -1)
                for row, i in enumerate(some):
                    scores[i] = logits[row, PREFIX + len(queries[i].ids) - 1, [11, 12]].float().cpu().numpy()
        return scores

    ours(), theirs(8)  # warm
    mine, others = [], {}
    for batch in (8, 16, 32, 64, 128):  # in turn: as many tries for us as for them
        mine.append(timed(ours))
        others[batch] = timed(lambda batch=batch: theirs(batch))
    mine = min(mine, key=lambda one: one.seconds)
    best = min(others, key=lambda batch: others[batch].seconds)
    must_agree("log-probabilities in bfloat16", float(abs(mine.found - others[best].found).max()), 0.5)
    tokens = sum(len(q.ids) for q in queries)
    report(
        "label scoring, 1.4B bfloat16, 872 queries",
        ours_s=mine.seconds,
        theirs_s={batch: round(t.seconds, 3) for batch, t in others.items()},
        largest_difference=float(abs(mine.found - others[best].found).max()),
        parameters=sum(p.numel() for p in model.parameters()),
        ceiling=(QUERIES * PREFIX + tokens) / (PREFIX + tokens),
    )
    print(f"ratio {others[best].seconds / mine.seconds:.1f}")


if __name__ == "__main__":
    main()
