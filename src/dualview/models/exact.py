"""A language model whose in-context learning is one step of gradient descent, by construction.

It is the known positive of the comparison: a causal LM of two layers with hand-set weights (`SmolLM3ForCausalLM` with
the attention variant `linear`), saved as any other model, and a task of made-up words. `dualview run` must find that
its in-context learning and its fine-tuning do the same.

**The task.** A word w has d features u_w, |u_w|² = ½, which the model knows: they are its embedding. It belongs to one
of k classes. Which label means which class is nowhere in the weights. A demonstration is `word label newline`.

**The model.** A token's residual stream has four blocks: A and B of d numbers each, Y of k numbers, and a constant.

    embedding   word: A = u_w      label y: Y = k e(y), e(y) = onehot(y) − 1/k      every token: the constant, 2²⁰
    layer 0     attends to the token itself and the one before it (a window of 2) with score 1:  B_t += A_t + A_{t−1}
    layer 1     score(t, i) = 2 B_tᵀB_i,      value(i) = (η/k) Y_i into Y and (2 A_i − B_i)/16 into A
    output      logit of label c: Y_c         logit of any other token: −40

Attention is linear: scores weigh the values as they are, without a softmax. No layer uses positions, and the
feed-forward maps are 0. The constant is so much larger than the rest that RMSNorm divides every token by the same
number, 2²⁰/√D, which its weight undoes; with D a power of 4 the norms are the identity to the bit. They compute in
float32, which holds u and k e(y) exactly; η is in W_V.

**In context.** After layer 0 a word's token holds z = (A, B) = (u, u), |z| = 1, and Y = 0; the label's token after it
holds (0, u) and Y = k e(y). With z_i of the demonstrations' words, layer 1 adds to Y at the query's token

    ΔY_ICL = Σ_i score(q, label_i) · η e(y_i) = η Σ_i e(y_i) z_iᵀz_q        since 2 B_qᵀB_i = 2 u_qᵀu_i = z_qᵀz_i

In A the word of a demonstration adds +u_i/16 and its label −u_i/16 with the same score, which cancels. The query's own
token adds u_q/16, so that h is not 0 without demonstrations. Its own Y is 0: all labels are equally likely.

**Fine-tuning** on the label of demonstration i reads one token, the word, which attends to itself with score
|z_i|² = 1. So Y = W z_i, where W = 0 are the rows of W_V that fill Y and the columns that read A and B: a linear
classifier. With cross-entropy L and p = softmax(Y) (all tokens but the labels have less than 1e−14 of it together),

    ∂L/∂Y = p − onehot(y_i) = −e(y_i),    ∂L/∂W = −e(y_i) z_iᵀ    at W = 0

and one step at the rate η on all demonstrations together changes Y at the query's token by

    ΔY_GD = −η Σ_i ∂L_i/∂W z_q = η Σ_i e(y_i) z_iᵀz_q = ΔY_ICL

No other K or V has a gradient there: a score of layer 1 weighs the word's own value in Y, which is 0, and layer 0
writes into B, which W = 0 does not read. So fine-tuning K and V at the rate η is the step that in-context learning is.

**What differs.** `dualview run` takes the demonstrations one after another. Then p moves away from 1/k, and once W is
not 0 the other K and V move too. Both effects are of second order in the rate, so SimAOU tends to 1 as the rate of
fine-tuning goes to 0. The second is also made small: these K and V are 16 times larger, and the Q and O that multiply
them 16 times smaller, which leaves their product as it is and divides what SGD does to it by 16².

Linear attention as a step of gradient descent is von Oswald et al. 2023 (arXiv 2212.07677, Proposition 1), here with
cross-entropy instead of the squared error; a first layer that copies is in their section on token construction.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
import yaml
from jaxtyping import Float, Int
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, SmolLM3Config, SmolLM3ForCausalLM

from dualview.io.atomic import share
from dualview.io.errors import UserError
from dualview.variants.linear import Linear
from dualview.variants.registry import attach

RATE = 0.02
"""η, if none is given."""
SPREAD = 1.2
"""How far words are from their class, if it is not given: after 16 demonstrations, most answers are right, not all."""
ROWS = {"train": 64, "selection": 16, "validation": 64}
"""Of each class."""
SPECIAL = ("<unk>", "</s>", "\n")
"""The first tokens of the vocabulary; labels come next, then words."""
CONSTANT = 2.0**20
"""The last number of every token's residual stream."""
_OTHER = -40.0  # the logit of a token that is no label: together they have less than 1e-14 of the probability
_ECHO = 1 / 16  # of the query's own word in h: small, since h should change by about its own size
_STIFF = 16.0
_MOST_FEATURES = 1024
_FEWEST = 4
"""Classes. Updates have the k − 1 dimensions of e(y): beyond a class's mean and its strength none is left of 2 classes,
one of 3."""
_LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SYLLABLES = [f"{consonant}{vowel}" for consonant, vowel in product("bdfghklmnprstvwz", "aeiou")]


@dataclass(frozen=True)
class ExactModel:
    """What `exact` wrote."""

    folder: Path
    """The model and its tokenizer."""
    task: Path
    """The YAML file of the task."""
    rate: float
    """η: the rate at which fine-tuning makes the step that in-context learning is."""

    @property
    def command(self) -> str:
        """The comparison to try."""
        model, task = (shlex.quote(str(path)) for path in (self.folder, self.task))
        return f"dualview run --model {model} --task {task} --ft-loss label --lr {self.rate:g}"


@dataclass(frozen=True)
class MadeUp:
    """A task of made-up words that belong to classes."""

    labels: list[str]
    words: list[str]
    """Those of all splits, one after another."""
    gold: dict[str, Int[np.ndarray, " row"]]
    """The class of each word, by split."""
    known: Float[np.ndarray, "word feature"]
    """u of every word."""

    @classmethod
    def draw(cls, features: int, classes: int, spread: float, seed: int) -> MadeUp:
        rng = np.random.default_rng(seed)
        gold = {split: np.tile(np.arange(classes), each) for split, each in ROWS.items()}
        count = sum(map(len, gold.values()))
        words = ["".join(_SYLLABLES[i] for i in divmod(int(at), len(_SYLLABLES))) for at in _distinct(count, rng)]
        known = _features(np.concatenate(list(gold.values())), features, classes, spread, rng)
        return cls(list(_LABELS[:classes]), words, gold, known)

    @property
    def label_tokens(self) -> slice:
        return slice(len(SPECIAL), len(SPECIAL) + len(self.labels))

    def save(self, folder: Path, model: SmolLM3ForCausalLM, name: str) -> Path:
        """Write the model, its tokenizer and the task, and return the task's file."""
        transformers.logging.disable_progress_bar()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            task = _save_task(folder, name, self)
            _tokenizer([*SPECIAL, *self.labels, *self.words]).save_pretrained(folder)
            model.save_pretrained(folder)
            share(folder / "model.safetensors")
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror or error}); choose another place.") from error
        return task


def exact(
    folder: str | Path,
    *,
    features: int = 16,
    classes: int = 4,
    rate: float = RATE,
    seed: int = 0,
    spread: float = SPREAD,
) -> ExactModel:
    """Write a model whose in-context learning is one gradient step, and its task, to a new folder.

    features  d, the numbers that describe a word
    classes   k, the labels; which one means which class only the demonstrations say
    rate      η, the size of the step; the smaller, the closer is SGD, one demonstration after another, to one step
    seed      draws the words, their features and their classes
    spread    how far words are from the centre of their class, which has length 1
    """
    folder = Path(folder)
    _check(folder, features, classes, rate, seed, spread)
    made = MadeUp.draw(features, classes, spread, seed)
    model = skeleton(made)
    # Weights are set in float64, so that η is not rounded before it is saved.
    _set_weights(model.double(), made, rate)
    attach(model, Linear())
    return ExactModel(folder, made.save(folder, model, "exact"), rate)


def _check(folder: Path, features: int, classes: int, rate: float, seed: int, spread: float) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already and not an empty folder; choose another place.")
    if not _FEWEST <= classes <= len(_LABELS):
        raise UserError(
            f"The exact model takes {_FEWEST} to {len(_LABELS)} classes, not {classes}: with fewer, the updates of a "
            "class differ in too few directions to tell them from chance."
        )
    if not classes <= features <= _MOST_FEATURES:
        raise UserError(
            f"The exact model with {classes} classes takes {classes} to {_MOST_FEATURES} features, not {features}."
        )
    if not (math.isfinite(rate) and rate > 0):
        raise UserError(f"The rate of the exact model is a number above 0, not {rate}.")
    if not (math.isfinite(spread) and spread >= 0):
        raise UserError(f"The spread of the exact model is a number from 0 on, not {spread}.")
    if seed < 0:
        raise UserError(f"The seed of the exact model is at least 0, not {seed}.")


def _distinct(count: int, draw: np.random.Generator) -> Int[np.ndarray, " word"]:
    return draw.permutation(len(_SYLLABLES) ** 2)[:count]


def _features(
    gold: Int[np.ndarray, " word"], features: int, classes: int, spread: float, draw: np.random.Generator
) -> Float[np.ndarray, "word feature"]:
    """u of every word: the direction of its class, orthogonal to the others, and a spread; |u|² = ½."""
    centres = np.linalg.qr(draw.normal(size=(features, classes))).Q.T
    near = centres[gold] + spread * draw.normal(size=(len(gold), features)) / math.sqrt(features)
    return near / np.linalg.norm(near, axis=1, keepdims=True) * math.sqrt(0.5)


def _power_of_4(least: int) -> int:
    """The smallest power of 4 that is at least this: its root is a power of 2, so scaling by it does not round."""
    return 4 ** math.ceil(math.log(least, 4))


def skeleton(made: MadeUp) -> SmolLM3ForCausalLM:
    """The model without what it does: words, the constant, norms that undo it; all else is 0, attention softmax."""
    (words, d), classes = made.known.shape, len(made.labels)
    config = cast(Any, SmolLM3Config)(
        vocab_size=len(SPECIAL) + classes + words,
        hidden_size=_power_of_4(2 * d + classes + 1),
        intermediate_size=1,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=_power_of_4(d + classes),
        max_position_embeddings=4096,
        layer_types=["sliding_attention", "full_attention"],
        use_sliding_window=True,
        sliding_window=2,
        no_rope_layers=[0, 0],
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("</s>"),
        pad_token_id=None,
    )
    model = SmolLM3ForCausalLM(config)
    with torch.no_grad():
        _set_skeleton(model, made)
    return model


def _set_skeleton(model: SmolLM3ForCausalLM, made: MadeUp) -> None:
    # Whatever is not set must be exactly 0: a random remainder would break the identity.
    for parameter in model.parameters():
        parameter.zero_()
    inner, output, labels = cast(Any, model.model), cast(Any, model.lm_head), made.label_tokens
    width, constant = inner.embed_tokens.embedding_dim, inner.embed_tokens.embedding_dim - 1
    token = inner.embed_tokens.weight
    token[labels.stop :, : made.known.shape[1]] = torch.from_numpy(made.known.astype(np.float32))
    token[:, constant] = CONSTANT
    # The constant dominates the mean square, so RMSNorm divides every token by this number.
    undo = CONSTANT / width**0.5
    read_as_1 = width**-0.5
    for layer in inner.layers:
        layer.input_layernorm.weight[:-1] = undo
        layer.post_attention_layernorm.weight[:-1] = undo
    inner.norm.weight[:-1] = undo
    inner.norm.weight[constant] = read_as_1
    inner.layers[0].input_layernorm.weight[constant] = read_as_1
    output.weight[:, constant] = _OTHER
    output.weight[labels, constant] = 0


@torch.no_grad()
def _set_weights(model: SmolLM3ForCausalLM, made: MadeUp, rate: float) -> None:
    inner, output, labels = cast(Any, model.model), cast(Any, model.lm_head), made.label_tokens
    d, classes = made.known.shape[1], len(made.labels)
    a, b, y, constant = slice(0, d), slice(d, 2 * d), slice(2 * d, 2 * d + classes), -1
    inner.embed_tokens.weight[labels, y] = classes * torch.eye(classes, dtype=torch.float64) - 1

    copying, learning = inner.layers
    one, head = torch.eye(d), copying.self_attn.head_dim
    attention = copying.self_attn
    attention.k_proj.weight[0, constant] = _STIFF
    attention.q_proj.weight[0, constant] = head**0.5 / _STIFF  # the module divides scores by √head
    attention.v_proj.weight[:d, a] = _STIFF * one
    attention.o_proj.weight[b, :d] = one / _STIFF

    attention = learning.self_attn
    attention.k_proj.weight[:d, b] = _STIFF * one
    attention.q_proj.weight[:d, b] = 2 * head**0.5 / _STIFF * one
    attention.v_proj.weight[:d, a] = 2 * _ECHO * one
    attention.v_proj.weight[:d, b] = -_ECHO * one
    attention.o_proj.weight[a, :d] = one
    attention.v_proj.weight[d : d + classes, y] = rate / classes * torch.eye(classes, dtype=torch.float64)
    attention.o_proj.weight[y, d : d + classes] = torch.eye(classes)

    output.weight[labels, y] = torch.eye(classes, dtype=torch.float64)


def _tokenizer(vocabulary: list[str]) -> PreTrainedTokenizerFast:
    """Words between spaces and newlines, each a token; no BOS."""
    raw = Tokenizer(models.WordLevel({word: at for at, word in enumerate(vocabulary)}, unk_token="<unk>"))
    split = [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    raw.pre_tokenizer = cast(Any, pre_tokenizers.Sequence(split))
    # Unknown words are no special token here: `--bos auto` would take it for a BOS that begins every text.
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")


def _save_task(folder: Path, name: str, made: MadeUp) -> Path:
    left = iter(made.words)
    for split, of_split in made.gold.items():
        rows = [json.dumps({"text": next(left), "label": int(label)}) + "\n" for label in of_split]
        (folder / f"{split}.jsonl").write_text("".join(rows), encoding="utf-8")
    files = {split: f"{split}.jsonl" for split in made.gold}
    document = {"name": name, "template": "{text}", "labels": made.labels, **files}
    path = folder / "task.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path
