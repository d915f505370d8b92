"""Softmax attention is one step of gradient descent on a kernel model (Ren & Liu, NeurIPS 2024, arXiv 2310.13220).

Theorem 3.1. Let k_i = W_K x_i d^{−1/4}, v_i = W_V x_i, q = W_Q x d^{−1/4} over demonstrations i ∈ X_D and the query's
own tokens j ∈ X_T, and φ(a)ᵀφ(b) = exp(aᵀb). The dual model f(z) = W φ(z) starts at

    W_0 = (1/D) Σ_{j ∈ X_T} v_j φ(k_j)ᵀ,        D = Σ_{all j} φ(k_j)ᵀ φ(q)   (the softmax's normaliser, per query)

and one step of rate η on  L(W) = −(1/(ηD)) Σ_{i ∈ X_D} v_iᵀ W φ(k_i)  gives

    W_1 = W_0 + (1/D) Σ_{i ∈ X_D} v_i φ(k_i)ᵀ,        W_1 φ(q) = V softmax(Kᵀ q).

η cancels, L is linear in W, and one batch step equals N steps token by token: it is a re-bracketing that holds for any
weights, not a claim that anything was learned. D differs between queries, so the dual models of two queries differ by a
scalar.

The three modifications the paper draws from it are given in their strict form (true gradient descent on the modified
loss) and as on the authors' slides, where the two differ.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualview.duality.theory.features import FeatureMap, gram_features
from dualview.duality.theory.linalg import column_norms
from dualview.duality.theory.toy_attention import attention_weights, soft_attn
from dualview.io.errors import UserError


@dataclass(frozen=True)
class Head:
    """One query of one softmax head: keys and query already scaled by d^{−1/4}, so that weights are softmax(Kᵀ q)."""

    demo_keys: Float[Tensor, "d demo"]
    demo_values: Float[Tensor, "d_v demo"]
    own_keys: Float[Tensor, "d own"]
    own_values: Float[Tensor, "d_v own"]
    query: Float[Tensor, " d"]

    @property
    def keys(self) -> Float[Tensor, "d token"]:
        """[demonstrations, own tokens]."""
        return torch.cat([self.demo_keys, self.own_keys], dim=1)

    @property
    def values(self) -> Float[Tensor, "d_v token"]:
        """[demonstrations, own tokens]."""
        return torch.cat([self.demo_values, self.own_values], dim=1)

    def weights(self) -> Float[Tensor, " token"]:
        """softmax(Kᵀ q)."""
        return attention_weights(self.keys, self.query, scale=1.0)

    def output(self) -> Float[Tensor, " d_v"]:
        """h' = V softmax(Kᵀ q)."""
        return soft_attn(self.keys, self.values, self.query, scale=1.0)


def softmax_head(
    w_k: Float[Tensor, "d_o d"],
    w_q: Float[Tensor, "d_o d"],
    w_v: Float[Tensor, "d_v d"],
    demos: Float[Tensor, "d demo"],
    own: Float[Tensor, "d own"],
    x: Float[Tensor, " d"],
) -> Head:
    """A layer h' = W_V X softmax((W_K X)ᵀ W_Q x / √d_o), X = [X_D, X_T], as a `Head`."""
    scale = w_k.shape[0] ** -0.25
    return Head(
        demo_keys=w_k @ demos * scale,
        demo_values=w_v @ demos,
        own_keys=w_k @ own * scale,
        own_values=w_v @ own,
        query=w_q @ x * scale,
    )


def shortened(head: Head) -> Head:
    """The same attention by shorter vectors: keys less their mean, and as long (at most) as the query.

    softmax(Kᵀq) stays what it is when one vector is taken from every key and when keys are multiplied by what the query
    is divided by. The dual model is another one (φ is of other points, D has another factor), its predictions the same.
    """
    keys = head.keys - head.keys.mean(dim=1, keepdim=True)
    longest, of_query = float(column_norms(keys).max()), float(column_norms(head.query[:, None]))
    scale = math.sqrt(of_query / longest) if longest > 0 and of_query > 0 else 1.0
    n = head.demo_keys.shape[1]
    return replace(head, demo_keys=scale * keys[:, :n], own_keys=scale * keys[:, n:], query=head.query / scale)


@dataclass(frozen=True)
class KernelModel:
    """Theorem 3.1's dual model of one query, in explicit features."""

    demo_features: Float[Tensor, "feature demo"]
    demo_values: Float[Tensor, "d_v demo"]
    own_features: Float[Tensor, "feature own"]
    own_values: Float[Tensor, "d_v own"]
    query: Float[Tensor, " feature"]

    @property
    def normaliser(self) -> Float[Tensor, ""]:
        """D = Σ_{all j} φ(k_j)ᵀ φ(q)."""
        return self.query @ self.demo_features.sum(dim=1) + self.query @ self.own_features.sum(dim=1)

    def initial(self) -> Float[Tensor, "d_v feature"]:
        """W_0 = (1/D) Σ_{j ∈ X_T} v_j φ(k_j)ᵀ; zero without own tokens."""
        return self.own_values @ self.own_features.T / self.normaliser

    def loss(self, weight: Float[Tensor, "d_v feature"], rate: float) -> Float[Tensor, ""]:
        """L(W) = −(1/(ηD)) Σ_{i ∈ X_D} v_iᵀ W φ(k_i)."""
        return -(self.demo_values * (weight @ self.demo_features)).sum() / (rate * self.normaliser)

    def gradient(self, rate: float) -> Float[Tensor, "d_v feature"]:
        """∇L = −(1/(ηD)) Σ_i v_i φ(k_i)ᵀ, the same at every W."""
        return -self.demo_values @ self.demo_features.T / (rate * self.normaliser)

    def step(self, rate: float, decay: float = 0.0) -> Float[Tensor, "d_v feature"]:
        """W_1 = W_0 − η (∇L + α W_0); `decay` is α of the regularised loss L + (α/2)‖W‖², 0 for the theorem itself."""
        start = self.initial()
        return start - rate * (self.gradient(rate) + decay * start)

    def token_steps(self, rate: float) -> Float[Tensor, "demo d_v feature"]:
        """W after each demonstration token, one step per token; the last one is `step(rate)`."""
        each = torch.einsum("vi,fi->ivf", self.demo_values, self.demo_features) / self.normaliser
        # rate · (1/rate): written out because the theorem has it, and because it cancels
        return self.initial() + rate * torch.cumsum(each / rate, dim=0)

    def predict(self, weight: Float[Tensor, "d_v feature"]) -> Float[Tensor, " d_v"]:
        """f(q) = W φ(q)."""
        return weight @ self.query


def kernel_model(head: Head, features: FeatureMap = gram_features) -> KernelModel:
    """Theorem 3.1 for one head and query, with the given features: exact by default, or Taylor, or random.

    `features` get the keys and, as the last column, the query. Exact features have a domain (norms up to about 26 in
    float64, see `features.gram_features`), and D must be a number above 0; outside, `shortened` may bring a head in.
    """
    phi = features(torch.cat([head.keys, head.query.unsqueeze(1)], dim=1))
    n = head.demo_keys.shape[1]
    model = KernelModel(
        demo_features=phi[:, :n],
        demo_values=head.demo_values,
        own_features=phi[:, n:-1],
        own_values=head.own_values,
        query=phi[:, -1],
    )
    if not 0 < float(model.normaliser) < math.inf:
        raise UserError(
            f"The normaliser D = Σ φ(k)ᵀφ(q) is {float(model.normaliser):g}, which nothing can be divided by: keys and "
            "query are too long for these features (see `kernel.shortened`)."
        )
    return model


def relu_fold(
    w_1: Float[Tensor, "d_ff d_v"],
    b_1: Float[Tensor, " d_ff"],
    w_2: Float[Tensor, "d_out d_ff"],
    b_2: Float[Tensor, " d_out"],
    h: Float[Tensor, " d_v"],
) -> tuple[Float[Tensor, "d_out d_v"], Float[Tensor, " d_out"]]:
    """Fold W_2 relu(W_1 h + b_1) + b_2 into the dual model: its labels become (W_2 S W_1) v_i.

    Returns the matrix W_2 S W_1 and the offset W_2 S b_1 + b_2: FFN(h) = matrix · h + offset.
    S = diag(1[W_1 h + b_1 > 0]) depends on context and query through h. For GELU or SwiGLU there is no such S.
    """
    gated = w_2 * (w_1 @ h + b_1 > 0).to(w_2)
    return gated @ w_1, gated @ b_1 + b_2


def regularised_attention(head: Head, rate: float, decay: float) -> Float[Tensor, " d_v"]:
    """Strict: one step on L + (α/2)‖W‖² is h' − ηα Σ_{j ∈ X_T} a_j v_j, a the softmax weights. Only W_0 decays."""
    # The demonstrations' part is the update itself, which the penalty at W_0 does not reach.
    own = head.weights()[head.demo_keys.shape[1] :]
    return head.output() - rate * decay * head.own_values @ own


def regularised_slide(head: Head, alpha: float, query_value: Float[Tensor, " d_v"]) -> Float[Tensor, " d_v"]:
    """As on the slides (A − αI): h' − α W_V x_query.

    It is the strict form only when X_T is the query alone and α = η · decay · a_self (`slide_alpha`); since a_self
    differs between queries, a constant α is another model.
    """
    return head.output() - alpha * query_value


def slide_alpha(head: Head, rate: float, decay: float) -> float:
    """The α for which the slides' regularised attention is the strict one, for this query only: η · decay · a_self."""
    if head.own_keys.shape[1] != 1:
        raise UserError(
            "The slides' regularised form can match the strict one only if the query is its only own token."
        )
    return rate * decay * float(head.weights()[-1])


def augmented(
    head: Head, on_values: Callable[[Tensor], Tensor] | None = None, on_keys: Callable[[Tensor], Tensor] | None = None
) -> Head:
    """v_i → g₁(v_i), k_i → g₂(k_i) for every token, the query untouched: attention and dual model change together."""
    if on_values is not None:
        head = replace(head, demo_values=on_values(head.demo_values), own_values=on_values(head.own_values))
    if on_keys is not None:
        head = replace(head, demo_keys=on_keys(head.demo_keys), own_keys=on_keys(head.own_keys))
    return head


def parallel_adapter(
    weight: Float[Tensor, "d_out d"],
    down: Float[Tensor, "r d"],
    up: Float[Tensor, "d_out r"],
    scale: float,
    x: Float[Tensor, "d token"],
) -> Float[Tensor, "d_out token"]:
    """The slides' augmentation g(Wx) = Wx + c W_2 σ(W_1 x) (He et al. 2022), σ = ReLU: it reads x, not Wx."""
    return weight @ x + scale * up @ torch.relu(down @ x)


def lowest_attention(logits: Float[Tensor, "demo demo"], count: int) -> Int[Tensor, "count demo"]:
    """N(i): for each token i (a column of logits over j), the `count` other tokens j it attends to least."""
    if not 0 < count < logits.shape[0]:
        raise UserError(f"Negatives per token must be between 1 and {logits.shape[0] - 1}, got {count}.")
    # A token is not its own negative.
    others = logits.clone().fill_diagonal_(math.inf)
    return torch.topk(others, count, dim=0, largest=False).indices


def negative_values(
    values: Float[Tensor, "d_v demo"], negatives: Int[Tensor, "count demo"], beta: float
) -> Float[Tensor, "d_v demo"]:
    """ṽ_i = v_i − (β/k) Σ_{j ∈ N(i)} v_j: the values of x̃_i = x_i − (β/k) Σ_j x_j."""
    return values - beta * values[:, negatives].mean(dim=1)


def negative(head: Head, negatives: Int[Tensor, "count demo"], beta: float) -> Head:
    """Strict negative attention: values of the demonstrations x̃, keys unchanged (the slides' extra −αI is a slip)."""
    return replace(head, demo_values=negative_values(head.demo_values, negatives, beta))


def negative_loss(
    model: KernelModel,
    weight: Float[Tensor, "d_v feature"],
    rate: float,
    negatives: Int[Tensor, "count demo"],
    beta: float,
) -> Float[Tensor, ""]:
    """−(1/(ηD)) Σ_i [v_iᵀ W φ(k_i) − (β/k) Σ_{j ∈ N(i)} v_jᵀ W φ(k_i)]: negatives on the VALUE side, keys of i."""
    values = negative_values(model.demo_values, negatives, beta)
    return -(values * (weight @ model.demo_features)).sum() / (rate * model.normaliser)


@dataclass(frozen=True)
class GeneralisationBound:
    """Theorem 3.2 for one demonstration set: loss ≤ empirical + complexity + confidence, with probability 1 − δ.

    The loss is −vᵀ W φ(k), averaged over demonstrations. w and ρ are read off the sample (the theorem fixes them
    beforehand), and demonstrations are taken as independent: a number to compare demonstration sets by, not a guarantee
    for a prompt.
    """

    empirical: float
    """−(1/N) Σ v_iᵀ W φ(k_i)."""
    norm: float
    """w = ‖W‖_F."""
    radius: float
    """ρ = max over demonstrations of ‖v_i‖ and ‖W φ(k_i)‖."""
    complexity: float
    """2 w √(Σ ‖v_i‖² K_ii) / N: twice the empirical Rademacher complexity's bound, constants included."""
    confidence: float
    """6 ρ² √(log(2/δ) / 2N)."""
    complexity_order: float
    """w ρ d_o √(tr K_S) / N, as printed, inside an O(·) of unknown constant; d_o is the width of the layer's output,
    d_v here (`softmax_head`'s key width, which the paper also writes d_o, enters only the scale of the logits)."""
    confidence_order: float
    """√(log(1/δ) / N), as printed."""

    @property
    def bound(self) -> float:
        """empirical + complexity + confidence."""
        return self.empirical + self.complexity + self.confidence


def generalisation_bound(head: Head, delta: float = 0.05) -> GeneralisationBound:
    """Ren & Liu's Theorem 3.2 for W_1 of one head and query, by kernel values only (no features needed).

    The printed bound is an order; the one with constants follows from |vᵀ W φ| ≤ ρ² and, for ‖W‖_F ≤ w,
    E sup_W (1/N) Σ σ_i v_iᵀ W φ(k_i) = (w/N) E ‖Σ σ_i v_i φ(k_i)ᵀ‖ ≤ (w/N) √(Σ ‖v_i‖² K_ii)  (Mohri et al. 2018, Thm
    3.3). It needs no d_o. Tr K_S = Σ exp(‖k_i‖²), so the rate is 1/√N for bounded keys; for keys so long that this is
    no number of their dtype there is no bound, which is an error.
    """
    n = head.demo_keys.shape[1]
    if n == 0 or not 0 < delta < 1:
        raise UserError("The generalisation bound needs at least one demonstration and 0 < delta < 1.")
    d_v = head.values.shape[0]
    # Exponents are taken less log D before they are exponentiated: W φ may be moderate where D alone is no number.
    products, log_d = head.keys.T @ head.keys, torch.logsumexp(head.keys.T @ head.query, 0)
    predicted = head.values @ torch.exp(products[:, :n] - log_d)
    squares = head.demo_values.square().sum(dim=0)
    diagonal = torch.exp(torch.diagonal(products)[:n])
    norm = float((torch.exp(products - 2 * log_d) * (head.values.T @ head.values)).sum().clamp(min=0).sqrt())
    radius = float(torch.maximum(squares.sqrt().max(), column_norms(predicted).max()))
    found = GeneralisationBound(
        empirical=-float((head.demo_values * predicted).sum()) / n,
        norm=norm,
        radius=radius,
        complexity=2 * norm * float((squares * diagonal).sum().sqrt()) / n,
        confidence=6 * radius**2 * math.sqrt(math.log(2 / delta) / (2 * n)),
        complexity_order=norm * radius * d_v * float(diagonal.sum().sqrt()) / n,
        confidence_order=math.sqrt(math.log(1 / delta) / n),
    )
    if not all(math.isfinite(value) for value in vars(found).values()):
        raise UserError(
            f"The bound is no number for keys of norm {float(column_norms(head.keys).max()):.3g}: it grows as "
            "exp(‖k‖²/2); give shorter keys (`shortened`), or float64."
        )
    return found
