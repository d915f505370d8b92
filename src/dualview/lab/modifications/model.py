"""One layer of attention that learns regression in context, with any of `dualview.variants` in it.

    h' = W_O · Attn(W_K X, W_V X, W_Q x_q),    X = [demonstrations (x_i, y_i), query (x_q, 0)],    ŷ = h'_y

Ren & Liu's setting (arXiv 2310.13220, section 2.1 of their dual view): softmax over demonstrations and query, no
residual, no norm, no feed-forward. W_O is added, so that a variant that loses the scale of its values (sign) can learn
it back. The attention itself is the variant's own function on q, k and v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.anatomy.layers import Layer, Projection, Role
from dualview.lab.problems import Tasks
from dualview.variants.augmented import Augmented
from dualview.variants.base import Equipment, Variant
from dualview.variants.negative import Negative
from dualview.variants.regularised import Regularised
from dualview.variants.sign import Sign
from dualview.variants.softmax import Call, softmax_attention


@dataclass(frozen=True)
class AttentionKind:
    """One curve of the figure: its name, its family, and the variant (None: plain softmax attention)."""

    name: str
    family: str
    variant: Variant | None


def kinds(
    alphas: tuple[float, ...], ks: tuple[int, ...], betas: tuple[float, ...], rank: int, seed: int
) -> list[AttentionKind]:
    """Softmax attention, then every modification; adapters are drawn with `seed`.

    α = 0 and β = 0 are softmax attention itself, which is always there.
    """
    found = [AttentionKind("softmax", "softmax", None)]
    found += [AttentionKind(f"regularised α={a:g}", "regularised", Regularised(alpha=a)) for a in alphas if a]
    found += [
        AttentionKind("augmented g1", "augmented", Augmented(rank=rank, keys=False, seed=seed)),
        AttentionKind("augmented g1, g2", "augmented", Augmented(rank=rank, seed=seed)),
    ]
    pairs = [(k, b) for k in ks for b in betas if b]
    found += [AttentionKind(f"negative k={k} β={b:g}", "negative", Negative(k=k, beta=b)) for k, b in pairs]
    scales = ("constant", "sequence", "token")
    return found + [AttentionKind(f"sign, {scale} scale", "sign", Sign(scale=scale)) for scale in scales]


class Attention(nn.Module):
    """The layer; each head is as wide as a token."""

    def __init__(self, d: int, heads: int, variant: Variant | None, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        wide = heads * d
        self.q_proj, self.k_proj, self.v_proj = (_linear(d, wide, generator) for _ in range(3))
        self.o_proj = _linear(wide, d, generator)
        self.dualview: Equipment | None = None if variant is None else variant.equip(self, self._layer(d), 0)

    def _layer(self, d: int) -> Layer:
        """Where its projections are, so that adapters can hook on."""
        maps: dict[Role, nn.Linear] = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}
        projections: dict[Role, tuple[Projection, ...]] = {
            role: (Projection(role, module, None),) for role, module in maps.items()
        }
        return Layer(self, self.o_proj, projections, self.heads, self.heads, d, d)

    def forward(self, tasks: Tasks) -> Float[Tensor, " task"]:
        query = torch.cat([tasks.x_query, tasks.x_query.new_zeros(len(tasks), 1)], -1)[:, None]
        tokens = torch.cat([torch.cat([tasks.x, tasks.y[..., None]], -1), query], 1)
        call = Call(
            self._heads(self.q_proj(query)),
            self._heads(self.k_proj(tokens)),
            self._heads(self.v_proj(tokens)),
            module=self,
        )
        equipment = self.dualview
        mixed = (
            softmax_attention(call) if equipment is None else equipment.variant.attend(call, equipment.coefficient())
        )
        return self.o_proj(mixed.flatten(2))[:, 0, -1]

    def _heads(self, projected: Float[Tensor, "task token wide"]) -> Float[Tensor, "task head token d"]:
        return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def _linear(d_in: int, d_out: int, generator: torch.Generator) -> nn.Linear:
    made = nn.Linear(d_in, d_out, bias=False, device=generator.device)
    with torch.no_grad():
        made.weight.normal_(std=d_in**-0.5, generator=generator)
    return made
