"""Made-up records with a known answer: how similar ICL and FT are, level by level, and what else they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.special import log_softmax  # pyright: ignore[reportMissingTypeStubs]

from dualview.records import Records, Setting


def _mixed(rng: np.random.Generator, part: np.ndarray, cosine: float, own: np.ndarray | None = None) -> np.ndarray:
    """Something that has this cosine with `part`, on average."""
    return cosine * part + (1 - cosine**2) ** 0.5 * (rng.normal(size=part.shape) if own is None else own)


@dataclass(frozen=True)
class Plant:
    """What made-up records are like: how similar ICL and FT are, and what else they share."""

    predictions: float = 0.0
    """The cosine of their moves in the log-odds; likewise of their updates and of what labels teach them."""
    representations: float = 0.0
    labels: float = 0.0
    n: int = 120
    classes: int = 2
    layers: int = 3
    d: int = 16
    common: float = 0.0
    """Each setting has its own mean direction, that many times a query's own part."""
    features: int = 0
    """A query's own part is made of that few features, the same for both, read out in independent directions."""
    tied: bool = False
    """They are read out alike in every layer."""
    scored: bool = False
    """They also move the log-odds, each setting's by a reading of its own: agreement or its opposite, by chance."""
    shrink: bool = False
    """Both settings forget half of the zero-shot vector, and of its log-odds."""
    uneven: bool = False
    """Both forget a share of the zero-shot vector that differs by query, and these vectors have a mean."""
    bias: float = 0.0
    """Both push this much towards label 0."""
    shared: float = 0.0
    """All settings have one mean direction in common, that many times a query's own part."""
    taught: float = 0.0
    """The same of the label contrast: what flipping labels changes has a mean direction that both settings share."""
    length: float = 0.0
    """How far a query moves grows with its length, which every setting writes in a direction of its own."""
    easy: float = 0.0
    """How much easier some queries are than others, for both: they are pushed further, and have more of a direction
    that both settings write, next to one for each class."""
    hidden: float = 0.0
    """How easy they are is also written along one more direction, around 0, that many times a query's own part: the
    class's mean does not tell of it."""
    ease_of: int | None = None
    """The seed of how easy each query is; by default the records' own."""
    able: bool = True
    """Both learn the task; else neither moves towards the gold label."""
    sharp: float = 1.0
    """How far beyond doubt: large values are right on every query."""
    flips: bool = True
    """Whether flipped labels change the answers."""
    maps: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.n, self.layers, self.d

    def scores(
        self,
        rng: np.random.Generator,
        gold: Int[np.ndarray, " query"],
        ease: Float[np.ndarray, " query"],
        read: Mapping[str, Float[np.ndarray, "query class"]],
    ) -> dict[str, Float[np.ndarray, "query class"]]:
        """Every setting's scores of the labels; `read` is what it makes of the features."""
        zsl = rng.normal(size=(self.n, self.classes))
        one = np.eye(self.classes)
        toward, away = one[gold], one[(gold + 1) % self.classes]
        moved = rng.normal(size=zsl.shape)
        moves = {"icl": moved, "ft": _mixed(rng, moved, self.predictions)}
        found: dict[str, np.ndarray] = {"zsl": zsl}
        for name, size in (("icl", 4.0), ("ft", 3.0)):
            kept = 0.5 * zsl if self.shrink else zsl
            push = size * self.sharp * ease[:, None] if self.able else 0.0
            base = kept + moves[name] + self.bias * one[0] + read[name]
            found[name] = base + push * toward
            found[f"{name}_flipped_labels"] = base + push * (away if self.flips else toward)
        return found

    def read(
        self, rng: np.random.Generator, known: Float[np.ndarray, "query feature"] | None
    ) -> dict[str, Float[np.ndarray, "query class"]]:
        """What each setting makes of the features in its scores."""
        if known is None:
            return dict.fromkeys(("icl", "ft"), np.zeros((self.n, self.classes)))
        return {name: known @ rng.normal(size=(self.features, self.classes)) for name in ("icl", "ft")}

    def outputs(
        self,
        seed: int,
        rng: np.random.Generator,
        written: Sequence[np.ndarray],
        known: Float[np.ndarray, "query feature"] | None = None,
    ) -> dict[str, Float[np.ndarray, "query layer d"]]:
        """Every setting's h; `written` is what both write of how easy a query is, in h and in the label contrast."""
        z, forgotten = rng.normal(size=self.shape), 0.5 if self.shrink else 0.0
        if self.uneven:
            apart = np.random.default_rng([seed, 2])
            z, forgotten = z + apart.normal(size=z.shape[1:]), apart.uniform(0.2, 0.8, size=(self.n, 1, 1))
        a, t = rng.normal(size=(2, *self.shape))
        own: list[np.ndarray | None] = [None, None]
        if self.features:
            known = rng.normal(size=(self.n, self.features)) if known is None else known
            read = rng.normal(size=(4, self.features, *z.shape[1:]))
            read = np.broadcast_to(read[:, :, :1], read.shape) if self.tied else read
            a, t, own[0], own[1] = (np.tensordot(known, side, 1) for side in read)
        b, k = _mixed(rng, a, self.representations, own[0]), _mixed(rng, t, self.labels, own[1])
        mean = self.taught * np.random.default_rng([seed, 9]).normal(size=z.shape[1:])
        found: dict[str, np.ndarray] = {"zsl": z}
        for name, task, taught in (("icl", a, t), ("ft", b, k)):
            base = z + task + self.common * rng.normal(size=z.shape[1:]) - forgotten * z + written[0]
            taught = taught + written[1]
            found[name], found[f"{name}_flipped_labels"] = base + 0.5 * taught, base - 0.5 * taught - mean
        return found

    def attention(self, rng: np.random.Generator) -> dict[str, Float[np.ndarray, "query layer head column"]]:
        """Every setting's attention maps."""
        m = rng.normal(size=(self.n, self.layers, 2, 6))
        x = rng.normal(size=m.shape)
        stacks = {"zsl": m, "icl": m + x, "ft": m + _mixed(rng, x, self.representations)}
        return stacks | {f"{name}_flipped_labels": stacks[name] for name in ("icl", "ft")}


def planted(seed: int, **options: Any) -> Records:
    """Records whose ICL and FT updates have the given cosines and are otherwise independent; options are `Plant`'s."""
    plant, rng = Plant(**options), np.random.default_rng(seed)
    gold = rng.permutation(np.arange(plant.n) % plant.classes)
    of_query = np.random.default_rng([seed if plant.ease_of is None else plant.ease_of, 3])
    ease, written = _ease(of_query, np.random.default_rng([seed, 4]), gold, plant)
    of_features = np.random.default_rng([seed, 5])
    known = of_features.normal(size=(plant.n, plant.features)) if plant.scored else None
    scores = plant.scores(rng, gold, ease, plant.read(of_features, known))
    h = plant.outputs(seed, rng, written, known)
    settings = {name: Setting(log_softmax(scores[name], axis=1), h[name]) for name in scores}
    if plant.maps:
        m = plant.attention(rng)
        settings = {name: Setting(s.log_probs, s.h, m[name]) for name, s in settings.items()}
    return _stretched(Records(gold, settings), np.random.default_rng([seed, 1]), plant.shared, plant.length)


def _ease(
    of_query: np.random.Generator, rng: np.random.Generator, gold: np.ndarray, plant: Plant
) -> tuple[np.ndarray, list[np.ndarray]]:
    """How easy each query is, and what both settings write of it in h and in what labels change of h."""
    if not plant.easy:
        return np.ones(len(gold)), [np.zeros(()), np.zeros(())]
    ease, shape = np.empty(len(gold)), (plant.layers, plant.d)
    ease[np.argsort(gold, kind="stable")] = 1 + plant.easy * of_query.normal(size=len(gold))  # class by class
    of_class, for_all = rng.normal(size=(2, gold.max() + 1, *shape)), 1.5 * rng.normal(size=(2, *shape))
    hidden = plant.hidden * rng.normal(size=(2, *shape)) if plant.hidden else np.zeros((2, *shape))
    both = zip(of_class, for_all, hidden, strict=True)
    return ease, [
        own[gold] + np.multiply.outer(ease, each) + np.multiply.outer((ease - 1) / plant.easy, apart)
        for own, each, apart in both
    ]


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
    "shared features that move the scores": {"features": 3, "scored": True, "d": 32},
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
    "some queries easier and one mean direction": {"easy": 0.5, "d": 32, "shared": 3.0, "taught": 3.0},
    "the same with each its own": {"easy": 0.5, "d": 32, "common": 3.0, "taught": 3.0},
    "some queries easier, which the mean hides": {"easy": 0.5, "d": 48, "hidden": 6.0, "shared": 12.0, "taught": 12.0},
}
"""Ways to share something without being similar query by query: options of `Plant`."""
