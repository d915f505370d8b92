"""The numbers of a result that are shown: their order, names, formats, limits and meanings.

The terminal, the HTML report and the notebook all use this one list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dualview.comparison.result import AdapterPart, Result
from dualview.io.assets import about_model
from dualview.metrics.measured import CONTROL_OF, Measured, limits_of
from dualview.metrics.statistics import wilson_interval

SETTING_NAMES = {"zsl": "zero-shot", "icl": "in-context", "ft": "fine-tuned", "patch": "patched"}
SIMILARITIES = {
    "sim_aou.raw": "SimAOU, raw",
    "sim_aou.normalised": "SimAOU, normalised",
    "sim_am.delta": "SimAM, delta",
    "sim_am.after": "SimAM, after",
}
"""The similarities that have a value for each layer: their keys in the result file and their titles."""


@dataclass(frozen=True)
class Number:
    """One number of a result."""

    key: str
    """Its dotted key in the result file."""
    name: str
    meaning: str

    @property
    def style(self) -> str:
        """Its format specification: with a sign where it can be negative."""
        return "+.3f" if limits_of(self.key)[0] < 0 else ".3f"

    @property
    def control(self) -> str | None:
        """The name of its entry in the result's controls."""
        return CONTROL_OF.get(self.key)


NUMBERS = (
    Number("accuracy.zsl", "accuracy, zero-shot", "share of the queries answered correctly without demonstrations"),
    Number("accuracy.icl", "accuracy, in-context", "the same with the demonstrations in the prompt"),
    Number("accuracy.ft", "accuracy, fine-tuned", "the same after training on the demonstrations"),
    Number(
        "rec2ftp.value",
        "Rec2FTP",
        "of the queries that fine-tuning fixed, the share that ICL fixed too; compare it with chance, never with 0: an "
        "accurate ICL fixes a large share of any set",
    ),
    Number(
        "agreement.value",
        "agreement",
        "correlation of the changes in label log-odds that ICL and fine-tuning make, query by query within a class; 1 "
        "the same queries move alike, 0 unrelated",
    ),
    Number(
        "label_contrast.value",
        "label contrast",
        "cosine of what flipping the demonstrations' labels changes in attention's output, ICL's with fine-tuning's",
    ),
    Number(
        "label_contrast.specific",
        "label contrast beyond the mean",
        "the same beyond what flipping changes in all queries alike, layers weighing as much as it changes them",
    ),
    Number(
        "label_contrast.log_odds.value",
        "label contrast of log-odds",
        "the same of the label log-odds, query by query within a class",
    ),
    Number(
        "sim_aou.raw",
        "SimAOU raw",
        "cosine of the changes that ICL and fine-tuning make to attention's output; 1 the same direction, 0 unrelated",
    ),
    Number(
        "sim_aou.normalised",
        "SimAOU normalised",
        "the same after outputs are scaled to length 1, as in the first paper; large updates alone raise it, to the "
        "value of noise alone",
    ),
    Number("sim_am.before", "SimAM before", "cosine of ICL's attention logits with zero-shot's"),
    Number(
        "sim_am.after",
        "SimAM after",
        "cosine of ICL's attention logits with the fine-tuned ones; only its difference from SimAM before is evidence",
    ),
    Number(
        "sim_am.delta",
        "SimAM delta",
        "cosine of the two changes of the attention logits; 1 the same change, 0 unrelated",
    ),
    Number(
        "kendall.dual_v.tau_token",
        "Kendall, dual form of W_V",
        "tau-b between ICL's attention to the training tokens and their shares in fine-tuning's update; 1 the same "
        "order, 0 unrelated; compare it with the same at a learning rate of 0",
    ),
    Number(
        "kendall.released.tau_token",
        "Kendall, as released",
        "the same with q·q in place of the shares, as in the first paper's code; it hardly depends on training",
    ),
    Number(
        "overlap.ft.token_overlap",
        "top-10 tokens shared, ICL and FT",
        "share of the ten most likely next tokens that ICL and fine-tuning have in common",
    ),
    Number(
        "update_norm.icl",
        "update norm, in-context",
        "size of ICL's change to attention's output, relative to the output",
    ),
    Number("update_norm.ft", "update norm, fine-tuned", "the same of fine-tuning's change"),
)


def setting_title(setting: str) -> str:
    """A setting's name for readers.

    >>> setting_title("icl"), setting_title("adapter"), setting_title("adapter:mine")
    ('in-context', 'adapter', 'adapter mine')
    """
    return SETTING_NAMES.get(setting, setting.replace(":", " ", 1))


def given_weights(measured: Measured) -> list[str]:
    """The patch and the adapters of a run, by setting."""
    patch = [] if measured.accuracy.patch is None else ["patch"]  # results of earlier versions do not judge it
    return list(dict.fromkeys([*patch, *measured.learners]))


def learner_numbers(measured: Measured, title: str) -> list[Number]:
    """The numbers of a learner that is judged as ft is, named after it; those that are not its own are left out."""
    shared = ("accuracy.zsl", "accuracy.icl", "accuracy.ft", "sim_am.before", "update_norm.icl")  # shown with the run

    def named(text: str) -> str:
        return re.sub(r"\b(fine-tuned|fine-tuning|FT)\b", title, text)

    return [
        replace(number, name=named(number.name), meaning=named(number.meaning))
        for number in present(measured)
        if number.key not in shared
    ]


def accuracy_interval(measured: Measured, setting: str, value: float) -> tuple[float, float] | None:
    """The 95 % interval of one of its accuracies, Wilson over queries; None where the number of queries is unknown."""
    if measured.accuracy_ci is not None:
        return measured.accuracy_ci.get(setting)
    if not isinstance(measured, Result):
        return None
    n = measured.task.n_queries
    found = wilson_interval(round(value * n), n)
    return None if found is None else (found.low, found.high)


def shown(value: float | None, style: str = ".3f") -> str:
    """A number as text, `undefined` where there is none; very large ones (of a diverged run) in powers of ten."""
    return "undefined" if value is None else format(value, style if abs(value) < 1e6 else ".3g")


def present(measured: Measured) -> list[Number]:
    """The numbers that were measured, including those that came out undefined."""
    found = [number for number in NUMBERS if getattr(measured, number.key.split(".")[0]) is not None]
    meaning = "the same with these weights added, without demonstrations"
    more = [Number(f"accuracy.{n}", f"accuracy, {setting_title(n)}", meaning) for n in given_weights(measured)]
    return [*found[:3], *more, *found[3:]]  # after the three other accuracies


def run_title(result: Result) -> str:
    return f"{result.provenance.model} on {result.task.name}"


def what_ran(result: Result) -> str:
    """Demonstrations, seed, queries, precision, and the words that stand for labels if they are abstract."""
    task, provenance = result.task, result.provenance
    shots = f"{task.shots_used}" if task.shots_used == task.shots else f"{task.shots_used} of {task.shots}"
    drawn = "given" if provenance.seeds.demos is None else f"seed {provenance.seeds.demos}"
    weights = provenance.options.get("weights", "trained")
    redrawn = "" if weights == "trained" else f", weights {weights}"
    abstract = provenance.options.get("labels") == "abstract"
    labels = f", abstract labels {' '.join(task.labels or ())}" if abstract else ""
    return f"{shots} demonstrations ({drawn}), {task.n_queries} queries, {provenance.dtype}{redrawn}{labels}"


def how_tuned(result: Result) -> str:
    ft = result.ft
    rule = "" if ft.rule == "sgd" else f", {ft.rule}"
    return f"{ft.params} at lr {ft.lr:g}{rule}, {ft.steps} steps, {ft.status}"


def adapter_line(about: AdapterPart) -> str:
    """Where an adapter is from, what it changes and by how much."""
    size = "" if about.relative_norm is None else f", {about.relative_norm:.2g} of the size of their weights"
    return f"{about.path}: rank {about.rank} on {about.modules} modules ({', '.join(about.targets)}){size}"


def run_lines(result: Result) -> list[str]:
    """The lines under a run's title."""
    lines = [what_ran(result), f"fine-tuning: {how_tuned(result)}"]
    lines += [f"{setting_title(name)}: {adapter_line(about)}" for name, about in (result.adapters or {}).items()]
    about = about_model(result.provenance.model)
    return lines if about is None else [*lines, about]


def caption(result: Result) -> str:
    """The caption of every figure: model, task, demonstrations, seed, n, precision, fine-tuning."""
    text = "; ".join([run_title(result), what_ran(result), f"fine-tuning: {how_tuned(result)}."])
    about = about_model(result.provenance.model)
    return text if about is None else f"{text} {about[0].upper()}{about[1:]}."
