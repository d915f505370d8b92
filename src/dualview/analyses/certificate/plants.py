"""Made-up records with a known answer: how similar ICL and FT are, level by level, and what else they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import log_softmax  # pyright: ignore[reportMissingTypeStubs]

from dualview.records import Records, Setting


def _mixed(rng: np.random.Generator, part: np.ndarray, cosine: float, own: np.ndarray | None = None) -> np.ndarray:
    """Something that has this cosine with `part`, on average."""
    return cosine * part + (1 - cosine**2) ** 0.5 * (rng.normal(size=part.shape) if own is None else own)


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
    uneven: bool = False,
    bias: float = 0.0,
    shared: float = 0.0,
    length: float = 0.0,
    easy: float = 0.0,
    ease_of: int | None = None,
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
    uneven     both forget a share of the zero-shot vector that differs by query, and these vectors have a mean
    bias       both push this much towards label 0
    shared     all settings have one mean direction in common, that many times a query's own part
    length     how far a query moves grows with its length, which every setting writes in a direction of its own
    easy       how much easier some queries are than others, for both: they are pushed further, and have more of a
               direction that both settings write, next to one for each class
    ease_of    the seed of how easy each query is; by default the records' own
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
    of_query = np.random.default_rng([seed if ease_of is None else ease_of, 3])
    ease, written = _ease(of_query, np.random.default_rng([seed, 4]), gold, easy, (layers, d))
    scores: dict[str, np.ndarray] = {"zsl": zsl}
    for name, size in (("icl", 4.0), ("ft", 3.0)):
        kept = 0.5 * zsl if shrink else zsl
        push = size * sharp * ease[:, None] if able else 0.0
        base = kept + moves[name] + bias * np.eye(classes)[0]
        scores[name] = base + push * toward
        scores[f"{name}_flipped_labels"] = base + push * (away if flips else toward)
    h: dict[str, np.ndarray] = {}
    z, forgotten = rng.normal(size=(n, layers, d)), 0.5 if shrink else 0.0
    if uneven:
        apart = np.random.default_rng([seed, 2])
        z, forgotten = z + apart.normal(size=(layers, d)), apart.uniform(0.2, 0.8, size=(n, 1, 1))
    a, t = rng.normal(size=(2, n, layers, d))
    own: list[np.ndarray | None] = [None, None]
    if features:
        known = rng.normal(size=(n, features))
        read = rng.normal(size=(4, features, layers, d))
        read = np.broadcast_to(read[:, :, :1], read.shape) if tied else read
        a, t, own[0], own[1] = (np.tensordot(known, side, 1) for side in read)
    b, k = _mixed(rng, a, representations, own[0]), _mixed(rng, t, labels, own[1])
    h["zsl"] = z
    for name, task, taught in (("icl", a, t), ("ft", b, k)):
        base = z + task + common * rng.normal(size=(layers, d)) - forgotten * z + written[0]
        taught = taught + written[1]
        h[name], h[f"{name}_flipped_labels"] = base + 0.5 * taught, base - 0.5 * taught
    settings = {name: Setting(log_softmax(scores[name], axis=1), h[name]) for name in scores}
    if maps:
        m = rng.normal(size=(n, layers, 2, 6))
        x = rng.normal(size=m.shape)
        stacks = {"zsl": m, "icl": m + x, "ft": m + _mixed(rng, x, representations)}
        stacks |= {f"{name}_flipped_labels": stacks[name] for name in ("icl", "ft")}
        settings = {name: Setting(s.log_probs, s.h, stacks[name]) for name, s in settings.items()}
    return _stretched(Records(gold, settings), np.random.default_rng([seed, 1]), shared, length)


def _ease(
    of_query: np.random.Generator, rng: np.random.Generator, gold: np.ndarray, easy: float, shape: tuple[int, int]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """How easy each query is, and what both settings write of it in h and in what labels change of h."""
    if not easy:
        return np.ones(len(gold)), [np.zeros(()), np.zeros(())]
    ease = np.empty(len(gold))
    ease[np.argsort(gold, kind="stable")] = 1 + easy * of_query.normal(size=len(gold))  # class by class
    of_class, for_all = rng.normal(size=(2, gold.max() + 1, *shape)), 1.5 * rng.normal(size=(2, *shape))
    return ease, [own[gold] + np.multiply.outer(ease, each) for own, each in zip(of_class, for_all, strict=True)]


def _stretched(records: Records, rng: np.random.Generator, shared: float, length: float) -> Records:
    """Every update longer by `length` for a query of twice the tokens, and a direction of its own for the tokens."""
    z, start = records["zsl"].h, records["zsl"].log_probs
    if z is None or not (shared or length):
        return records
    tokens, both = rng.integers(10, 31, size=len(records.gold)), shared * rng.normal(size=z.shape[1:])
    far, settings = 1 + length * (tokens / 20 - 1), dict(records.settings)
    for name, setting in records.settings.items():
        if name != "zsl" and setting.h is not None:
            own = np.multiply.outer(far - 1, rng.normal(size=z.shape[1:]))
            h = z + far[:, None, None] * (setting.h - z) + own + both
            settings[name] = replace(setting, log_probs=start + far[:, None] * (setting.log_probs - start), h=h)
    return Records(records.gold, settings, tokens if length else None)


def _moves(records: Records, name: str) -> list[np.ndarray]:
    """What a setting changes in the scores and in h."""
    setting, zsl = records[name], records["zsl"]
    assert setting.h is not None and zsl.h is not None
    return [setting.log_probs - zsl.log_probs, setting.h - zsl.h]


def same_queries(seed: int, draws: int, *, kept: float, **options: Any) -> list[Records]:
    """Several draws of demonstrations for one set of queries.

    What a setting does to a query is, to the share `kept` of its variance, the same in every draw: the model's way with
    this query. If ICL's way and FT's are alike by chance, they are so in every draw.
    """
    first = planted(seed, **options)
    z, start, place = first["zsl"].h, first["zsl"].log_probs, np.argsort(np.argsort(first.gold, kind="stable"))
    assert z is not None
    found: list[Records] = []
    for draw in range(draws):
        other = planted(seed + 1_000_003 * (draw + 1), **options, ease_of=seed)
        row = np.argsort(other.gold, kind="stable")[place]  # another query of the same class
        settings = {"zsl": first["zsl"]}
        for name in (name for name in first.settings if name != "zsl"):
            own, fresh = _moves(first, name), [part[row] for part in _moves(other, name)]
            scores, h = (kept**0.5 * a + (1 - kept) ** 0.5 * b for a, b in zip(own, fresh, strict=True))
            settings[name] = Setting(start + scores, z + h)
        found.append(Records(first.gold, settings, first.columns))
    return found


INDEPENDENT: Mapping[str, Mapping[str, Any]] = {
    "nothing shared": {},
    "a mean direction each": {"common": 3.0},
    "one mean direction": {"shared": 3.0},
    "shared features": {"features": 3},
    "shrinkage": {"shrink": True},
    "a label bias": {"bias": 2.0},
    "length": {"length": 1.0},
    "shared features and shrinkage": {"features": 2, "shrink": True, "layers": 4},
    "layers tied by features": {"features": 2, "tied": True, "layers": 8},
    "everything at once": {
        "features": 2,
        "common": 2.0,
        "shrink": True,
        "bias": 1.0,
        "shared": 1.0,
        "length": 1.0,
        "tied": True,
        "layers": 6,
    },
    "four classes": {"classes": 4, "common": 1.0},
    "attention maps": {"maps": True, "common": 1.0},
    "one mean direction and uneven shrinkage": {"shared": 2.0, "uneven": True},
    "some queries easier": {"easy": 0.5, "d": 32},
    "some queries easier, longer and shrunk": {"easy": 0.5, "d": 32, "length": 0.5, "shrink": True, "layers": 6},
    "the same in small classes": {
        "easy": 0.5,
        "d": 32,
        "length": 0.5,
        "bias": 1.0,
        "classes": 6,
        "n": 60,
        "shared": 1.0,
    },
}
"""Ways to share something without being similar query by query: options of `planted`."""
