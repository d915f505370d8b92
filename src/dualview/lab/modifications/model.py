"""Many small models that learn in context, trained as one: layers of attention with any of `dualview.variants` in them.

    X ← X + W_O · Attn(W_K X, W_V X, W_Q X) in each layer,  X = [demonstrations (x_i, y_i), query (x_q, 0)],  ŷ = X_q,y

Ren & Liu's setting (arXiv 2310.13220, section 2.1 of their dual view): softmax over demonstrations and query, no norm,
no feed-forward. With one layer the residual changes nothing, since the query's y is 0. W_O is added, so that a variant
that loses the scale of its values (sign) can learn it back. Attention is causal, and the last layer is computed for the
query alone.

Models of the same shape are rows of one computation: their heads are heads of one call of the variant's own function,
which takes a coefficient for each head. No row reads another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.lab.modifications.settings import ModificationsSettings
from dualview.lab.problems import named_generator
from dualview.variants.base import Coefficient
from dualview.variants.negative import Negative
from dualview.variants.regularised import Regularised
from dualview.variants.sign import Sign
from dualview.variants.softmax import Call, softmax_attention

Attend = Callable[[Call, Coefficient], Tensor]


@dataclass(frozen=True)
class Modification:
    """One setting of one family. Those with the same `path` are computed together."""

    family: str
    name: str
    path: tuple[str | int, ...]
    """Which function attends, and what of it is no coefficient."""
    coefficient: float = 0.0
    """α or β; 0 is softmax attention."""
    units: tuple[int, int] = (0, 0)
    """Units of the adapters on values (g1) and on keys (g2)."""


SOFTMAX = Modification("softmax", "softmax", ("regularised",))


def modifications_of(settings: ModificationsSettings) -> list[Modification]:
    """Softmax attention, then every setting of the families asked for; α = 0 and β = 0 are softmax attention itself."""
    found = [SOFTMAX]
    found += [Modification("regularised", f"α={a:g}", ("regularised",), a) for a in settings.alphas if a]
    pairs = [(k, b) for k in settings.ks for b in settings.betas if b]
    found += [Modification("negative", f"k={k} β={b:g}", ("negative", k), b) for k, b in pairs]
    sides = {"augmented g1": (1, 0), "augmented g2": (0, 1), "augmented g1, g2": (1, 1)}
    for family, (g1, g2) in sides.items():
        found += [Modification(family, f"rank {r}", ("augmented",), 0, (g1 * r, g2 * r)) for r in settings.ranks]
    scales = ("constant", "sequence", "token")
    found += [Modification("sign", f"{scale} scale", ("sign", scale), 1) for scale in scales]
    return [each for each in found if each.family in ("softmax", *settings.families)]


def attend_of(path: tuple[str | int, ...]) -> Attend:
    """The variant's own function."""
    match path:
        case ("regularised",):
            return Regularised().attend
        case ("negative", int(k)):
            return Negative(k=k).attend
        case ("sign", scale):
            chosen: Any = scale
            return Sign(scale=chosen).attend
        case _:
            return lambda call, _coefficient: softmax_attention(call)


@dataclass(frozen=True)
class Rows:
    """The weights of many models of one shape and path."""

    attend: Attend
    heads: int
    coefficient: Float[Tensor, " row"]
    weights: dict[str, Float[Tensor, "row layer d_out d_in"]]
    """q, k, v, o; down_v, up_v, down_k, up_k of the adapters where there are any."""
    used: dict[str, Float[Tensor, "row rank"]] = field(default_factory=dict[str, Tensor])
    """Which units of the adapters on v and k a row has."""

    @classmethod
    def fresh(
        cls,
        chosen: Sequence[Modification],
        seeds: Sequence[int],
        stage: str,
        layers: int,
        d: int,
        heads: int,
        device: torch.device,
    ) -> Self:
        """Every modification with every seed, seeds fastest; the shared weights of a seed are the same for all."""
        drawn = [_draw(seed, stage, layers, d, heads) for seed in seeds]
        weights = {name: torch.stack([each[name] for each in drawn]) for name in drawn[0]}
        used: dict[str, Tensor] = {}
        rank = max(max(each.units) for each in chosen)
        for at, role in enumerate("vk" if rank else ""):
            downs = [_uniform(seed, f"{stage} {role} adapter", (layers, rank, d)) for seed in seeds]
            weights[f"down_{role}"] = torch.stack(downs)
            weights[f"up_{role}"] = torch.zeros(len(seeds), layers, heads * d, rank)
            units = torch.tensor([each.units[at] for each in chosen for _ in seeds])
            used[role] = (torch.arange(rank) < units[:, None]).float().to(device)
        repeated: dict[str, Tensor] = {
            name: nn.Parameter(weight.repeat(len(chosen), 1, 1, 1).to(device)) for name, weight in weights.items()
        }
        coefficient = torch.tensor([each.coefficient for each in chosen for _ in seeds], device=device)
        return cls(attend_of(chosen[0].path), heads, coefficient, repeated, used)

    def predict(self, tokens: Float[Tensor, "row problem token d"]) -> Float[Tensor, "row problem"]:
        """ŷ of every problem."""
        w, layers = self.weights, self.weights["q"].shape[1]
        for layer in range(layers):
            asking = tokens[:, :, -1:] if layer == layers - 1 else tokens
            query = _apply(asking, w["q"][:, layer])
            key, value = (self._projected(role, tokens, layer) for role in "kv")
            call = Call(self._heads(query), self._heads(key), self._heads(value))
            mixed = self.attend(call, self.coefficient.repeat_interleave(self.heads))
            joined = mixed.unflatten(2, (-1, self.heads)).permute(2, 0, 1, 3, 4).flatten(3)
            tokens = asking + _apply(joined, w["o"][:, layer])
        return tokens[:, :, -1, -1]

    def _projected(self, role: str, tokens: Tensor, layer: int) -> Float[Tensor, "row problem token wide"]:
        """W x, with its adapter: W x + W_2 relu(W_1 x)."""
        plain = _apply(tokens, self.weights[role][:, layer])
        if role not in self.used:
            return plain
        inner = torch.relu(_apply(tokens, self.weights[f"down_{role}"][:, layer])) * self.used[role][:, None, None]
        return plain + _apply(inner, self.weights[f"up_{role}"][:, layer])

    def _heads(self, x: Float[Tensor, "row problem token wide"]) -> Float[Tensor, "problem heads token d"]:
        return x.unflatten(-1, (self.heads, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2)


def _apply(
    x: Float[Tensor, "row problem token d_in"], weight: Float[Tensor, "row d_out d_in"]
) -> Float[Tensor, "row problem token d_out"]:
    return torch.bmm(x.flatten(1, 2), weight.mT).unflatten(1, x.shape[1:3])


def _draw(seed: int, stage: str, layers: int, d: int, heads: int) -> dict[str, Tensor]:
    generator = named_generator(seed, f"{stage} weights")
    shapes = {"q": (heads * d, d), "k": (heads * d, d), "v": (heads * d, d), "o": (d, heads * d)}
    return {name: torch.randn(layers, *shape, generator=generator) * shape[1] ** -0.5 for name, shape in shapes.items()}


def _uniform(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """As the variant draws W_1: uniform in ±1/√d_in."""
    drawn = torch.rand(*shape, generator=named_generator(seed, name))
    return (2 * drawn - 1) * shape[-1] ** -0.5
