"""`dualview calibrate`: known things under the verdict, from made-up records to whole runs of a model.

Nulls, of which the verdict may support at most 5 %:
    planted      made-up records that share everything but what is claimed (`plants.INDEPENDENT`), alone and by fives,
                 of other queries and of the same ones
    untrained    small models of several architectures with random weights, each a whole run
    other task   FT on another task's demonstrations
    reassigned   FT of another list of demonstrations, every query with what happened to another one of its class
    dose 0       FT's own update, rotated
Positives, all of which it must support:
    exact        a model whose in-context learning is one gradient step, by construction
    distilled    K and V trained to reproduce the in-context model, on rows that are not reported
    compiled     the demonstrations as a change of the MLPs' weights (`dualview compile`), fitted on such rows
Power: how often each level finds a known dose of the in-context update in FT's (`mixtures.dosed`).
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dualview.analyses.certificate.architectures import ARCHITECTURES, random_model
from dualview.analyses.certificate.certificate import Certificate, NullFamily, Positive, Power
from dualview.analyses.certificate.mixtures import dosed, main_settings, reassigned, rotations, within_classes
from dualview.analyses.certificate.plants import INDEPENDENT, planted, same_queries
from dualview.analyses.compile import best_patch
from dualview.comparison.controls.settings import flipped, flipped_labels, other_demos, rebuilt
from dualview.comparison.finetuning import recipe_of, training_of
from dualview.comparison.prepare import Prepared, prepare
from dualview.comparison.result import Result
from dualview.comparison.run import measure, off_heads, run
from dualview.io.errors import UserError
from dualview.io.progress import Progress, Silent
from dualview.io.versions import versions
from dualview.learning.finetune import train
from dualview.metrics.statistics import generator
from dualview.metrics.verdict import DECIDING, Verdict, judge, over_draws
from dualview.models.exact import exact
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Patch, ask
from dualview.options import RunOptions
from dualview.records import Records, Setting

_FEW = 5
"""Made-up records that are judged together, as those of as many seeds would be."""
_KEPT = 0.9
"""How much of what a setting does to a query is the same in all draws, in made-up records of the same queries."""
_SAME_QUERIES = f"{_FEW} records judged together, in which the model moves a query alike in all"
_EASIER = "made-up records; ICL and FT do better on the same queries, so predictions agree as they should, and no more"
_ANOTHER_TASK = "FT on another task's demonstrations"
_REASSIGNED = "FT of another list of demonstrations, each query with another query's, of its class; also over draws"
_DOSE_0 = "FT's own update, rotated at random; its scores change as ICL changes those of another query of the class"


@dataclass(frozen=True)
class Sizes:
    """How much is judged."""

    plants: int = 80
    """Made-up records of each kind."""
    architectures: tuple[str, ...] = tuple(ARCHITECTURES)
    untrained: int = 3
    """Draws of weights of each architecture."""
    seeds: int = 3
    """Lists of demonstrations."""
    queries: tuple[int, ...] = (50, 100)
    """Queries of each judged case; the largest are asked."""
    shots: int = 32
    doses: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
    mixtures: int = 5
    """Random draws of each dose, for each list of demonstrations."""
    distilled: int = 1
    """Lists of demonstrations that are distilled."""
    compiled: int = 1
    """Lists of demonstrations that are compiled."""
    draws: int = 499
    """Permutations and rotations of each test."""


FULL = Sizes(plants=400, untrained=10, seeds=5, queries=(50, 100, 200, 400), mixtures=20, distilled=5, draws=999)


def calibrate(
    *,
    model: str | LanguageModel = "embedded",
    task: str = "movie",
    full: bool = False,
    seed: int = 0,
    sizes: Sizes | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Certificate:
    """Judge known cases, and count how often the verdict is right.

    model, task   whose runs the real records come from
    full          more of everything: about an hour on two cores
    seed          of every random draw: another seed is another certificate
    options       other fields of `RunOptions` for the real runs (dtype, device, data …)
    """
    if seed < 0:
        raise UserError(f"--seed must be at least 0, not {seed}.")
    sizes, progress = sizes or (FULL if full else Sizes()), progress or Silent()
    name = model if isinstance(model, str) else model.name
    given = {"shots": sizes.shots, "n_queries": max(sizes.queries), **options}
    chosen = RunOptions.make(model=name, task=task, controls="quick", **given)
    lm = None if isinstance(model, str) else model
    work = _Work(sizes, seed, progress)
    runs = work.real_runs(chosen, lm)  # first: a mistake in the options shows at once
    lm = runs[0].prepared.lm
    nulls = [*work.planted_families()]
    nulls += [work.untrained(chosen, lm), work.other_task(runs), work.reassigned(runs)]
    power, at_zero = work.power(runs)
    nulls.append(NullFamily.of("dose 0", _DOSE_0, at_zero))
    positives = [*work.exact(), *work.distilled(chosen, lm), *work.compiled(runs)]
    named = {"--model": name, "--task": task, "--seed": str(seed)}
    command = shlex.join(["dualview", "calibrate", *(part for pair in named.items() for part in pair)])
    known = {
        "command": f"{command} --full" if full else command,
        "versions": versions(),
        "weights_hash": lm.weights_hash,
        "options": chosen.changed,
    }
    judged = [family for family in nulls if family.judged]
    return Certificate(lm.name, Path(task).stem, seed, asdict(sizes), judged, positives, power, known)


@dataclass(frozen=True)
class RealRun:
    """A comparison of the model with one list of demonstrations."""

    prepared: Prepared
    records: Records
    heads: Float[np.ndarray, "query layer d_in"] | None
    """The heads' own outputs in the zero-shot pass."""

    def first(self, queries: int) -> RealRun:
        heads = None if self.heads is None else self.heads[:queries]
        return replace(self, records=main_settings(self.records, queries), heads=heads)

    def with_ft(self, ft: Setting, flipped: Setting) -> Records:
        """The records with something else in FT's place."""
        own = {"ft": ft, "ft_flipped_labels": flipped}
        return self.with_off_span(replace(self.records, settings={**self.records.settings, **own}))

    def with_patches(self, patches: Sequence[Patch]) -> Records:
        """The records with weights in FT's place: those learnt from true labels, then those from flipped ones."""
        lm, asked, plan = self.prepared.lm, self.prepared.prompts.queries, self.prepared.zero_shot
        true, flipped = (ask(lm, asked, plan, patch).settings[0] for patch in patches)
        return self.with_ft(true, flipped)

    def with_off_span(self, records: Records) -> Records:
        main = main_settings(records)
        settings = off_heads(self.prepared.lm, self.heads, main.settings, main.gold, main.columns)
        return replace(main, settings=settings)


@dataclass(frozen=True)
class _Work:
    sizes: Sizes
    seed: int
    progress: Progress

    def judge(self, records: Records | Sequence[Records]) -> Verdict:
        return judge(records, draws=self.sizes.draws, seed=self.seed)

    def rng(self, name: str) -> np.random.Generator:
        return generator(self.seed, f"calibrate/{name}")

    def planted_families(self) -> Iterator[NullFamily]:
        together: list[Verdict] = []
        same: list[Verdict] = []
        groups = -(-self.sizes.plants // (2 * _FEW))
        with self.progress.part("made-up records", len(INDEPENDENT) * (self.sizes.plants + groups * _FEW)) as advance:
            for number, (name, options) in enumerate(INDEPENDENT.items()):
                verdicts: list[Verdict] = []
                for plant in range(self.sizes.plants):
                    own = np.random.SeedSequence([self.seed, number, plant]).generate_state(1)[0]
                    verdicts.append(self.judge(planted(int(own), **options)))
                    advance(1)
                yield NullFamily.of(f"planted: {name}", _EASIER if "easy" in options else "made-up records", verdicts)
                levels = [verdict.levels for verdict in verdicts]
                together += [over_draws(levels[i : i + _FEW]) for i in range(0, len(levels) - _FEW + 1, _FEW)]
                for group in range(groups):
                    own = np.random.SeedSequence([self.seed, number, group, 1]).generate_state(1)[0]
                    same.append(self.judge(same_queries(int(own), _FEW, kept=_KEPT, **options)))
                    advance(_FEW)
        yield NullFamily.of("planted, over draws", f"each kind's records, {_FEW} judged together", together)
        yield NullFamily.of("planted, over draws of the same queries", _SAME_QUERIES, same)

    def real_runs(self, options: RunOptions, lm: LanguageModel | None) -> list[RealRun]:
        """The comparison with each list of demonstrations."""
        found: list[RealRun] = []
        for number in range(self.sizes.seeds):
            prepared = prepare(replace(options, seed=1 + 100 * self.seed + number), lm, self.progress)
            lm = prepared.lm
            result = measure(prepared, progress=self.progress)
            # A rate that is chosen once serves all lists: the certificate is not about the choice.
            options = replace(options, lr=result.ft.lr)
            prepared = replace(prepared, options=replace(prepared.options, lr=options.lr))
            heads = ask(lm, prepared.prompts.queries, replace(prepared.zero_shot, own=True)).own
            found.append(RealRun(prepared, main_settings(_records(result)), heads))
        return found

    def untrained(self, options: RunOptions, lm: LanguageModel) -> NullFamily:
        verdicts: list[Verdict] = []
        small = replace(options, shots=min(8, options.shots), n_queries=min(60, options.n_queries), lr="auto")
        with self.progress.part("untrained models", len(self.sizes.architectures) * self.sizes.untrained) as advance:
            for name in self.sizes.architectures:
                for number in range(self.sizes.untrained):
                    drawn = random_model(name, lm.tokenizer, seed=1000 * self.seed + number)
                    verdicts.append(self.judge(_records(run(replace(small, seed=1 + number), lm=drawn))))
                    advance(1)
        shapes = ", ".join(self.sizes.architectures)
        return NullFamily.of("untrained", f"whole runs of models with random weights ({shapes})", verdicts)

    def other_task(self, runs: Sequence[RealRun]) -> NullFamily:
        verdicts: list[Verdict] = []
        with self.progress.part("fine-tuning on another task", len(runs)) as advance:
            for each in runs:
                prepared, lr = each.prepared, each.prepared.options.lr
                other, rows = other_demos(prepared)
                assert not isinstance(lr, str)
                try:
                    prompts = [rebuilt(prepared, shown, other) for shown in (rows, flipped(other, rows))]
                except UserError:  # a tokenizer of few words does not know the other task's labels
                    break
                tuned = train(prepared.lm, [training_of(prepared, p, lr) for p in prompts], recipe_of(prepared))
                verdicts.append(self.judge(each.with_patches([t.patch for t in tuned])))
                advance(1)
        return NullFamily.of("other task", _ANOTHER_TASK, verdicts)

    def reassigned(self, runs: Sequence[RealRun]) -> NullFamily:
        rng, verdicts = self.rng("reassigned"), list[Verdict]()
        shifts = [shift for _ in range(self.sizes.mixtures) for shift in range(1, len(runs))] or [0]
        with self.progress.part("fine-tuning of other queries", len(shifts) * len(runs)) as advance:
            for shift in shifts:
                order = within_classes(runs[0].records.gold, rng)  # one for all lists: they ask the same queries
                judged: list[Verdict] = []
                for own, others in zip(runs, [*runs[shift:], *runs[:shift]], strict=True):
                    judged.append(self.judge(own.with_off_span(reassigned(own.records, others.records, order))))
                    advance(1)
                verdicts += [*judged, over_draws([each.levels for each in judged])] if shift else judged
        return NullFamily.of("reassigned", _REASSIGNED, verdicts)

    def power(self, runs: Sequence[RealRun]) -> tuple[list[Power], list[Verdict]]:
        """Every level's power at every dose, for one run and for all lists together; and the verdicts at dose 0."""
        sizes, found, at_zero = self.sizes, list[Power](), list[Verdict]()
        counts = [n for n in sizes.queries if n <= len(runs[0].records.gold)]
        total = len(counts) * len(sizes.doses) * sizes.mixtures * len(runs)
        verdicts: dict[tuple[int, float], list[list[Verdict]]] = {}
        with self.progress.part("doses", total) as advance:
            for number in range(sizes.mixtures):
                rng = self.rng(f"doses/{number}")
                turned = [rotations(each.records, rng) for each in runs]
                for n in counts:
                    some = [each.first(n) for each in runs]
                    orders = [within_classes(each.records.gold, rng) for each in some]
                    for dose in sizes.doses:
                        judged: list[Verdict] = []
                        for each, turn, order in zip(some, turned, orders, strict=True):
                            judged.append(self.judge(each.with_off_span(dosed(each.records, dose, turn, order))))
                            advance(1)
                        verdicts.setdefault((n, dose), []).append(judged)
        for (n, dose), mixtures in verdicts.items():
            alone = [verdict for draw in mixtures for verdict in draw]
            together = [over_draws([each.levels for each in draw]) for draw in mixtures] if len(runs) > 1 else []
            for draws, those in ((1, alone), (len(runs), together)):
                found += _power(those, dose, n, draws) if those else []
            at_zero += [*alone, *together] if dose == 0 else []
        return found, at_zero

    def exact(self) -> Iterator[Positive]:
        meaning = "a model whose in-context learning is one gradient step, by construction"
        verdicts: list[Verdict] = []
        with tempfile.TemporaryDirectory() as folder:
            made = exact(Path(folder) / "exact", seed=self.seed)
            for number in range(self.sizes.seeds):
                options = RunOptions.make(
                    model=str(made.folder),
                    task=str(made.task),
                    ft_loss="label",
                    lr=made.rate,
                    seed=1 + number,
                    n_queries=max(self.sizes.queries),
                )
                verdicts.append(self.judge(_records(run(options))))
        yield Positive.of("exact", meaning, verdicts[0])
        if len(verdicts) > 1:
            yield Positive.of("exact, over draws", meaning, over_draws([each.levels for each in verdicts]))

    def distilled(self, options: RunOptions, lm: LanguageModel) -> Iterator[Positive]:
        meaning = "K and V trained to reproduce the in-context model, on rows that are not reported"
        verdicts: list[Verdict] = []
        for number in range(self.sizes.distilled):
            own = replace(options, seed=1 + 100 * self.seed + number, lr="auto", ft_rule="distilled")
            verdicts.append(self.judge(_records(run(own, lm=lm, progress=self.progress))))
            if number == 0:
                yield Positive.of("distilled", meaning, verdicts[0])
        if len(verdicts) > 1:
            yield Positive.of("distilled, over draws", meaning, over_draws([each.levels for each in verdicts]))

    def compiled(self, runs: Sequence[RealRun]) -> Iterator[Positive]:
        meaning = "the demonstrations as a change of the MLPs' weights, fitted on rows that are not reported"
        for each in runs[: self.sizes.compiled]:
            prepared = each.prepared
            twins = (prepared, replace(prepared, prompts=flipped_labels(prepared)))
            records = each.with_patches([best_patch(twin, self.progress) for twin in twins])
            yield Positive.of("compiled", meaning, self.judge(records))


def _records(result: Result) -> Records:
    assert result.records is not None
    return result.records


def _power(verdicts: Sequence[Verdict], dose: float, queries: int, draws: int) -> list[Power]:
    counts = {level: sum(each.levels[level].by_itself == "supported" for each in verdicts) for level in DECIDING} | {
        "overall": sum(each.overall == "supported" for each in verdicts)
    }
    return [Power(level, dose, queries, draws, len(verdicts), count) for level, count in counts.items()]
