"""The common misprints of these dualities, written down as they are printed: every one must fail.

`verify --wrong` runs them, so that a reader sees that the checks can fail. Each function returns the distance between
the misprinted formula and the true quantity, on the same kind of random data as the identity it distorts.
`paper` names where the slip was found (the note, the review, the slides), or else the result that it distorts.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dualview.duality.theory.coefficients import constant_rate
from dualview.duality.theory.icl_as_update import softmax_split
from dualview.duality.theory.kernel import kernel_model, negative, regularised_slide, relu_fold
from dualview.duality.theory.learners import delta_rule, exponential_kernel, functional_descent, kernel_attention
from dualview.duality.theory.linalg import solve_right
from dualview.duality.theory.regression import (
    gaussian_optimum,
    gd_layer,
    gd_plus_plus,
    gd_plus_plus_layer,
    regression_tokens,
    run_layers,
    uniform_optimum,
)
from dualview.duality.theory.sign import batch_sign, signed_values
from dualview.duality.theory.toy_attention import lin_attn, relative_error, soft_attn
from dualview.duality.verify.check import Draws, Identity
from dualview.duality.verify.linear import fine_tuned, in_context, linear_head, softmax_in_context, train
from dualview.duality.verify.regression import autograd_step, memory, regression_task, ridge_gradient
from dualview.duality.verify.softmax import (
    autograd_minus,
    feed_forward,
    negative_step,
    negatives_of,
    regularised_step,
    sign_problem,
    softmax_layer,
)

NOTE = "note on ICL and FT"
REVIEW = "literature review"
SLIDES = "Ren & Liu, slides"


@dataclass(frozen=True)
class Sequential:
    """A square layer trained by SGD on ½‖Wx_t − y_t‖², one sample a step, with its error signals and those of W_0."""

    keys: Float[Tensor, "d token"]
    errors: Float[Tensor, "d token"]
    errors_at_start: Float[Tensor, "d token"]
    change: Float[Tensor, " d"]
    """(W_T − W_0) x."""
    x: Float[Tensor, " d"]


def sequential(draws: Draws, adam: bool = False) -> Sequential:
    """Five to nine steps of rate .1; with `adam`, the same error signals as Adam met them."""
    d, n, lr = draws.size(3, 8), draws.size(5, 9), 0.1
    keys, targets, start, x = draws.normal(d, n), draws.normal(d, n), draws.matrix(d, d), draws.normal(d)
    weight = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=lr) if adam else torch.optim.SGD([weight], lr=lr)
    errors: list[Tensor] = []
    for t in range(n):
        residual = weight @ keys[:, t] - targets[:, t]
        errors.append(-lr * residual.detach())
        weight.grad = torch.outer(residual.detach(), keys[:, t])
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
    return Sequential(
        keys=keys,
        errors=torch.stack(errors, dim=1),
        errors_at_start=-lr * (start @ keys - targets),
        change=(weight.detach() - start) @ x,
        x=x,
    )


def _no_rate(draws: Draws) -> float:
    run = train(draws)
    return relative_error(lin_attn(run.form.keys, run.form.grads, run.x), run.output_change)


def _no_minus(draws: Draws) -> float:
    run = sequential(draws)
    return relative_error(lin_attn(run.keys, -run.errors, run.x), run.change)


def _errors_of_start(draws: Draws) -> float:
    run = sequential(draws)
    return relative_error(lin_attn(run.keys, run.errors_at_start, run.x), run.change)


def _swapped(draws: Draws) -> float:
    run = sequential(draws)
    return relative_error(lin_attn(run.errors, run.keys, run.x), run.change)


def _adam(draws: Draws) -> float:
    run = sequential(draws, adam=True)
    return relative_error(lin_attn(run.keys, run.errors, run.x), run.change)


def _momentum_forgotten(draws: Draws) -> float:
    run = train(draws, momentum=0.9)
    return relative_error(lin_attn(run.form.keys, -run.lr * run.form.grads, run.x), run.output_change)


def _coupled_as_decoupled(draws: Draws) -> float:
    decay, momentum = 0.5, 0.9
    run = train(draws, momentum=momentum, weight_decay=decay)
    decoupled = constant_rate(run.steps, run.lr, momentum, decay)
    errors = run.form.grads * torch.tensor(decoupled.steps, dtype=torch.float64)[run.form.index.step]
    found = decoupled.initial * run.before @ run.x + lin_attn(run.form.keys, errors, run.x)
    return relative_error(found, run.after @ run.x)


def _w_without_transpose(draws: Draws) -> float:
    h = linear_head(draws)
    printed = h.w_v @ h.own @ h.own.T @ h.w_k + h.w_v @ h.demos @ h.demos.T @ h.w_k
    return relative_error(printed @ h.query, in_context(h))


def _tuned_without_transpose(draws: Draws) -> float:
    h = linear_head(draws)
    printed = (h.w_v + h.delta_v) @ h.own @ h.own.T @ (h.w_k + h.delta_k)
    return relative_error(printed @ h.query, fine_tuned(h))


def _terms_without_transpose(draws: Draws) -> float:
    h = linear_head(draws)
    gram = h.own @ h.own.T
    base = h.w_v @ gram @ h.w_k.T
    printed = base + h.w_v @ gram @ h.delta_k + h.delta_v @ gram @ h.w_k + h.delta_v @ gram @ h.delta_k
    return relative_error(printed @ h.query, fine_tuned(h))


def _stacked(draws: Draws) -> float:
    h = linear_head(draws)
    n = min(h.demos.shape[1], h.own.shape[1])  # a vertical stack exists only for equal lengths
    h = replace(h, demos=h.demos[:, :n], own=h.own[:, :n])
    keys, values = (torch.cat([w, w], dim=1) @ torch.cat([h.demos, h.own]) for w in (h.w_k, h.w_v))
    return relative_error(lin_attn(keys, values, h.query), in_context(h))


def _transposed_attention(draws: Draws) -> float:
    h = linear_head(draws)
    both = torch.cat([h.demos, h.own], dim=1)
    return relative_error((h.w_k @ both) @ (h.w_v @ both).T @ h.query, in_context(h))


def _softmax_as_sum(draws: Draws) -> float:
    h = linear_head(draws)
    split = softmax_split(h.w_k @ h.demos, h.w_v @ h.demos, h.w_k @ h.own, h.w_v @ h.own, h.query)
    return relative_error(split.demos + split.own, softmax_in_context(h))


def _softmax_by_count(draws: Draws) -> float:
    h = linear_head(draws)
    split = softmax_split(h.w_k @ h.demos, h.w_v @ h.demos, h.w_k @ h.own, h.w_v @ h.own, h.query)
    share = h.demos.shape[1] / (h.demos.shape[1] + h.own.shape[1])
    return relative_error(share * split.demos + (1 - share) * split.own, softmax_in_context(h))


def _softmax_as_linear(draws: Draws) -> float:
    return relative_error(in_context(h := linear_head(draws)), softmax_in_context(h))


def _labelled_query(draws: Draws) -> float:
    task = regression_task(draws)
    tokens = regression_tokens(task.x, task.y, task.x_query, task.weight0)
    label = draws.normal(task.y.shape[0], task.x_query.shape[1])
    tokens = replace(tokens, query=torch.cat([task.x_query, label]))
    after = run_layers(tokens, [gd_layer(task.weight0, task.rate, task.n_demos)])
    return relative_error(after.prediction, autograd_step(task, task.weight0) @ task.x_query)


def _plus_readout(draws: Draws) -> float:
    task = regression_task(draws)
    tokens = regression_tokens(task.x, task.y, task.x_query, task.weight0)
    after = run_layers(tokens, [gd_layer(task.weight0, task.rate, task.n_demos)])
    return relative_error(-after.prediction, autograd_step(task, task.weight0) @ task.x_query)


def _softmax_layer(draws: Draws) -> float:
    task = regression_task(draws)
    layer = gd_layer(task.weight0, task.rate, task.n_demos)
    tokens = regression_tokens(task.x, task.y, task.x_query, task.weight0)
    context, query = tokens.context, tokens.query
    moved = query + layer.p @ soft_attn(layer.w_k @ context, layer.w_v @ context, layer.w_q @ query)
    return relative_error(-moved[task.x.shape[0] :], autograd_step(task, task.weight0) @ task.x_query)


def _query_as_key(draws: Draws) -> float:
    task = regression_task(draws)
    layer = gd_layer(task.weight0, task.rate, task.n_demos)
    tokens = regression_tokens(task.x, task.y, task.x_query, task.weight0)
    moved = layer(tokens.query, torch.cat([tokens.context, tokens.query], dim=1))
    return relative_error(-moved[task.x.shape[0] :], autograd_step(task, task.weight0) @ task.x_query)


def _gd_plus_plus_sign(draws: Draws) -> float:
    task, gamma = regression_task(draws), 0.02
    layer = gd_plus_plus_layer(task.x.shape[0], task.y.shape[0], task.rate, -gamma, task.n_demos, task.x)
    found = run_layers(regression_tokens(task.x, task.y, task.x_query), [layer] * 2).prediction
    return relative_error(found, gd_plus_plus(task.x, task.y, task.x_query, task.rate, gamma, 2))


def _gaussian_for_uniform(draws: Draws) -> float:
    d, n = draws.size(8, 12), draws.size(8, 12)
    return abs(gaussian_optimum(d, n, 1 / 12).loss / uniform_optimum(d, n).loss - 1)


def _no_erasing(draws: Draws) -> float:
    keys, values, rates = draws.normal(4, 6), draws.normal(3, 6), draws.uniform(6)
    return relative_error((values * rates) @ keys.T, delta_rule(keys, values, rates))


def _mesa_strength(draws: Draws) -> float:
    problem = memory(draws)
    gram = problem.keys @ problem.keys.T + problem.strength * torch.eye(problem.keys.shape[0]).to(problem.keys)
    return ridge_gradient(problem, solve_right(problem.values @ problem.keys.T, gram))


def _kernel_readout(draws: Draws) -> float:
    task = regression_task(draws)
    arguments = (exponential_kernel, 0.3 * task.x, task.y, 0.3 * task.x_query, 0.01, 3)
    return relative_error(-kernel_attention(*arguments), functional_descent(*arguments))


def _no_scale(draws: Draws) -> float:
    layer = softmax_layer(draws)
    both = torch.cat([layer.demos, layer.own], dim=1)
    found = soft_attn(layer.w_k @ both, layer.w_v @ both, layer.w_q @ layer.x, scale=1.0)
    return relative_error(found, layer.output())


def _constant_normaliser(draws: Draws) -> float:
    layer = softmax_layer(draws)
    head = layer.head
    other = torch.exp(head.keys.T @ draws.normal(head.query.shape[0])).sum()
    return relative_error(head.values @ torch.exp(head.keys.T @ head.query) / other, layer.output())


def _no_start(draws: Draws) -> float:
    layer = softmax_layer(draws)
    model = kernel_model(layer.head)
    return relative_error(model.predict(model.step(1.0) - model.initial()), layer.output())


def _slide_regularised(draws: Draws) -> float:
    layer, rate, alpha = softmax_layer(draws), 1.0, 0.3
    return relative_error(
        regularised_slide(layer.head, alpha, layer.w_v @ layer.x),
        regularised_step(kernel_model(layer.head), rate, alpha),
    )


def _slide_negative(draws: Draws) -> float:
    layer, beta, alpha = softmax_layer(draws), 0.5, 0.3
    printed = negative(layer.head, negatives_of(layer, 1), beta).output() - alpha * layer.w_v @ layer.x
    return relative_error(printed, negative_step(layer, 1.0, 1, beta))


def _negatives_as_keys(draws: Draws) -> float:
    layer, beta = softmax_layer(draws), 0.5
    model = kernel_model(layer.head)
    # each token's negative is the next one: were negatives mutual, both sides would give the same sum
    negatives = torch.arange(layer.demos.shape[1]).roll(-1).unsqueeze(0)
    leaf = model.initial().requires_grad_()
    against = model.demo_features[:, negatives].mean(dim=1)  # the negatives' keys with i's value: the wrong side
    loss = -(model.demo_values * (leaf @ (model.demo_features - beta * against))).sum() / model.normaliser
    printed = model.predict(autograd_minus(model.initial(), 1.0, loss, leaf))
    return relative_error(printed, negative(layer.head, negatives, beta).output())


def _fold_without_context(draws: Draws) -> float:
    layer = softmax_layer(draws)
    ffn = feed_forward(draws, layer.w_v.shape[0], 400)  # wide, so that some unit surely switches
    alone = soft_attn(layer.w_k @ layer.own, layer.w_v @ layer.own, layer.w_q @ layer.x)
    fold = relu_fold(ffn.w_1, ffn.b_1, ffn.w_2, ffn.b_2, alone)
    expected = ffn.w_2 @ torch.relu(ffn.w_1 @ layer.output() + ffn.b_1) + ffn.b_2
    return relative_error(fold.matrix @ layer.output() + fold.offset, expected)


def _fold_gelu(draws: Draws) -> float:
    layer = softmax_layer(draws)
    ffn = feed_forward(draws, layer.w_v.shape[0])
    fold = relu_fold(ffn.w_1, ffn.b_1, ffn.w_2, ffn.b_2, layer.output())
    expected = ffn.w_2 @ F.gelu(ffn.w_1 @ layer.output() + ffn.b_1) + ffn.b_2
    return relative_error(fold.matrix @ layer.output() + fold.offset, expected)


def _signed_values_as_sign_descent(draws: Draws) -> float:
    p = sign_problem(draws)
    return relative_error(
        signed_values(p.keys, p.values, p.query, p.alpha), batch_sign(p.keys, p.values, p.query, p.alpha)
    )


def _sign_ascent(draws: Draws) -> float:
    p = sign_problem(draws)
    gradient = -p.values @ p.keys.T
    return relative_error(p.alpha * torch.sign(gradient) @ p.query, batch_sign(p.keys, p.values, p.query, p.alpha))


def _constant_alpha(draws: Draws) -> float:
    weight, keys = draws.normal(1, 3), draws.normal(3, 50_000)
    alpha = math.sqrt(math.pi / 2) / keys.shape[1]  # right for ‖w‖ = 1 only
    scale = draws.number(2.0, 4.0) / float(weight.square().sum().sqrt())
    return relative_error(alpha * torch.sign(weight @ keys) @ keys.T, scale * weight)


MISPRINTS = (
    Identity("Wx = W₀x + Attn(X, L′(X), x)  [no −η]", NOTE, _no_rate, 1e-10),
    Identity("W_T x = W₀x + LinAttn(X, +η ∂L/∂(Wx_t), x)  [no minus]", NOTE, _no_minus, 1e-10),
    Identity("W_T x = W₀x + LinAttn(X, E, x) with every e_t at W₀  [not at W_{t−1}]", NOTE, _errors_of_start, 1e-10),
    Identity("W_T x = W₀x + LinAttn(E, X, x)  [keys and values swapped]", REVIEW, _swapped, 1e-10),
    Identity("W_T x = W₀x + LinAttn(X, E, x) after Adam", "Irie et al. 2022, code", _adam, 1e-10),
    Identity("e_t = −η ∂L/∂(Wx_t) with momentum  [no c_s]", "Irie et al. 2022", _momentum_forgotten, 1e-10),
    Identity("torch's weight_decay treated as decoupled", "Irie et al. 2022", _coupled_as_decoupled, 1e-10),
    Identity("w(D) = W_V D Dᵀ W_K  [no transpose]", NOTE, _w_without_transpose, 1e-10),
    Identity("(W_V+ΔV) X Xᵀ (W_K+ΔK) q  [no transpose]", NOTE, _tuned_without_transpose, 1e-10),
    Identity("w(X) + W_V G ΔK + ΔV G W_K + ΔV G ΔK  [no transposes]", NOTE, _terms_without_transpose, 1e-10),
    Identity("LinAttn over [X′; X]  [stacked, not side by side]", NOTE, _stacked, 1e-10),
    Identity("LinAttn(K, V, q) = K Vᵀ q", REVIEW, _transposed_attention, 1e-10),
    Identity("softmax: y = y_X′ + y_X  [no masses]", NOTE, _softmax_as_sum, 1e-10),
    Identity("softmax: λ = the share of tokens  [not of mass]", NOTE, _softmax_by_count, 1e-10),
    Identity("softmax: y = (w(X) + w(X′)) q", NOTE, _softmax_as_linear, 1e-10),
    Identity("query token (x_q, y_q) with its label", REVIEW, _labelled_query, 1e-10),
    Identity("prediction = +y_q", REVIEW, _plus_readout, 1e-10),
    Identity("von Oswald's weights under a softmax", REVIEW, _softmax_layer, 1e-10),
    Identity("the query among keys and values (W₀ ≠ 0)", REVIEW, _query_as_key, 1e-10),
    Identity("GD++ with x ← x + γXXᵀx", "von Oswald et al. 2023", _gd_plus_plus_sign, 1e-10),
    Identity("the Gaussian optimum for uniform inputs", "Ahn, Zhang et al. 2023", _gaussian_for_uniform, 0.03),
    Identity("DeltaNet as Σ β v kᵀ  [nothing erased]", "Yang et al. 2024", _no_erasing, 1e-10),
    Identity("mesa layer VKᵀ(KKᵀ + λI)⁻¹ for strength λ", "von Oswald et al. 2023b", _mesa_strength, 1e-10),
    Identity("kernel attention read out as +y_q", "Cheng et al. 2024", _kernel_readout, 1e-10),
    Identity("φ(Wx) without d^(−¼)", SLIDES, _no_scale, 1e-10),
    Identity("D a constant  [another query's]", SLIDES, _constant_normaliser, 1e-10),
    Identity("W₀ = 0 although X_T is attended to", SLIDES, _no_start, 1e-10),
    Identity("regularised: h′ − αW_Vx_q with constant α", SLIDES, _slide_regularised, 1e-10),
    Identity("negative model with −αI", SLIDES, _slide_negative, 1e-10),
    Identity("negative loss with v_iᵀWφ(k_j)  [negatives as keys]", SLIDES, _negatives_as_keys, 1e-10),
    Identity("ReLU fold with S of the zero-shot h", SLIDES, _fold_without_context, 1e-10),
    Identity("ReLU fold for a GELU layer", SLIDES, _fold_gelu, 1e-10),
    Identity("sign descent = Attn(K, α sign V, q)", NOTE, _signed_values_as_sign_descent, 1e-10),
    Identity("x ← x + α sign(∇f)  [ascent]", NOTE, _sign_ascent, 1e-10),
    Identity("signed values with a constant α for every ‖w‖", NOTE, _constant_alpha, 0.03),
)
