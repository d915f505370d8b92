"""Records with known answers: how alike ICL and FT are in predictions, representations and what labels teach."""

from __future__ import annotations

import numpy as np

from dualview.records import Records, Setting


def _mixed(rng: np.random.Generator, part: np.ndarray, alike: float, own: np.ndarray | None = None) -> np.ndarray:
    """Something that has the cosine `alike` with `part`, on average."""
    return alike * part + (1 - alike**2) ** 0.5 * (rng.normal(size=part.shape) if own is None else own)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def planted(
    seed: int,
    *,
    predictions: float = 0.0,
    representations: float = 0.0,
    labels: float = 0.0,
    n: int = 120,
    classes: int = 2,
    layers: int = 3,
    d: int = 16,
    common: float = 0.0,
    features: int = 0,
    tied: bool = False,
    shrink: bool = False,
    bias: float = 0.0,
    able: bool = True,
    sharp: float = 1.0,
    flips: bool = True,
    maps: bool = False,
) -> Records:
    """Records whose ICL and FT updates have the given cosines and are otherwise independent.

    common     each setting has its own mean direction, that many times a query's own part
    features   a query's own part is made of that few features, the same for both, read out in independent directions;
               `tied`: the same ones in every layer
    shrink     both settings forget half of the zero-shot vector, and of its log-odds
    bias       both push this much towards label 0
    able       both learn the task; else neither moves towards the gold label
    sharp      how far beyond doubt: large values are right on every query
    flips      whether flipped labels change the answers
    """
    rng = np.random.default_rng(seed)
    gold = rng.permutation(np.arange(n) % classes)
    zsl = rng.normal(size=(n, classes))
    toward, away = np.eye(classes)[gold], np.eye(classes)[(gold + 1) % classes]
    moved = rng.normal(size=(n, classes))
    moves = {"icl": moved, "ft": _mixed(rng, moved, predictions)}
    scores: dict[str, np.ndarray] = {"zsl": zsl}
    for name, size in (("icl", 4.0), ("ft", 3.0)):
        kept = 0.5 * zsl if shrink else zsl
        push = size * sharp if able else 0.0
        base = kept + moves[name] + bias * np.eye(classes)[0]
        scores[name] = base + push * toward
        scores[f"{name}_flipped_labels"] = base + push * (away if flips else toward)
    h: dict[str, np.ndarray] = {}
    z = rng.normal(size=(n, layers, d))
    a, t = rng.normal(size=(2, n, layers, d))
    own: list[np.ndarray | None] = [None, None]
    if features:
        known = rng.normal(size=(n, features))
        read = rng.normal(size=(4, features, layers, d))
        read = np.broadcast_to(read[:, :, :1], read.shape) if tied else read
        a, t, *own = (np.tensordot(known, side, 1) for side in read)
    b, k = _mixed(rng, a, representations, own[0]), _mixed(rng, t, labels, own[1])
    h["zsl"] = z
    for name, task, taught in (("icl", a, t), ("ft", b, k)):
        base = z + task + common * rng.normal(size=(layers, d)) - (z / 2 if shrink else 0)
        h[name], h[f"{name}_flipped_labels"] = base + 0.5 * taught, base - 0.5 * taught
    settings = {name: Setting(_log_softmax(scores[name]), h[name]) for name in scores}
    if maps:
        m = rng.normal(size=(n, layers, 2, 6))
        x = rng.normal(size=m.shape)
        stacks = {"zsl": m, "icl": m + x, "ft": m + _mixed(rng, x, representations)}
        stacks |= {f"{name}_flipped_labels": stacks[name] for name in ("icl", "ft")}
        settings = {name: Setting(s.log_probs, s.h, stacks[name]) for name, s in settings.items()}
    return Records(gold, settings)
