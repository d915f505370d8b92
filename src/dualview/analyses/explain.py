"""`dualview explain`: what each demonstration token contributes to an answer, in context and in the dual form.

In context, a token's contribution is the softmax mass that the query's last token puts on it (mean over heads, then
layers). Fine-tuning on the same tokens makes the update ΔW = Σ_t e_t x_tᵀ, so token t's share of its effect is

    share_t = ⟨e_t, ΔW x⟩ (x_t·x) / ‖ΔW x‖²        signed, exact; over all training tokens they sum to 1

for W_V and W_K, mean over layers; x is the projection's input at the query's last token in the tuned model. A fourth
number is the token's effect on the answer: the change in the favoured candidate's lead over the next one, attributed
along the path from the base to the tuned weights (`duality.on_model.dual_finetuning.score_contributions`).

This decomposes one forward pass and one training run. Attention mass is not influence (the first token of a prompt
takes much of it as a sink), a label's last token has no error signal (nothing is predicted after it), and no number
here tells what would happen without a demonstration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from dualview.anatomy.layers import Role
from dualview.comparison.prepare import Prepared
from dualview.comparison.single_query import question
from dualview.duality.on_model.demo_tokens import DemoTokens, demo_tokens, ft_shares, icl_mass
from dualview.duality.on_model.dual_finetuning import ScoreContributions, score_contributions
from dualview.duality.theory.linear import aggregate
from dualview.io.errors import UserError
from dualview.io.json_files import Place, check_place, plain, save_json
from dualview.io.progress import Progress, Silent
from dualview.learning.traces import TrainingTrace
from dualview.metrics.kendall import kendall
from dualview.metrics.predictions import predictions
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import ask
from dualview.tasks.rows import Row


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What one demonstration (or label, or token) contributes to the answer."""

    text: str
    demo: int | None
    """Which demonstration, from 0."""
    label: str | None
    """The demonstration's label; None for a token of its template."""
    icl: float
    """Softmax mass, mean over heads and layers."""
    ft_v: float
    """Share of the value projections' update, mean over layers."""
    ft_k: float | None = None
    """The same of the key projections; None where they were not trained."""
    score: float
    """What its share of the update adds to the favoured candidate's lead."""


@dataclass(frozen=True)
class Explanation:
    """One answer, decomposed."""

    model: str
    task: str
    query: str
    candidates: tuple[str, ...]
    log_probs: Mapping[str, tuple[float, ...]]
    """Mean log-prob of each candidate for zsl, icl and ft."""
    lr: float
    seed: int | None
    """Of the drawn demonstrations; None where they were given."""
    favoured: str
    """The candidate that the fine-tuned model favours."""
    against: str
    """Its next best."""
    lead: Mapping[str, float]
    """score(favoured) − score(against) for zsl and ft."""
    lead_residual: float
    """|Σ of all contributions − (lead in ft − lead in zsl)|: the error of the quadrature."""
    demos: tuple[Contribution, ...]
    labels: tuple[Contribution, ...]
    tokens: tuple[Contribution, ...]
    elsewhere: Mapping[str, float]
    """Of no demonstration token: `icl` (BOS, separators, the query itself), `ft_v`, `ft_k`, `score` (BOS)."""
    tau: Mapping[str, float | None]
    """Kendall's tau-b between ICL's mass and fine-tuning's shares of W_V: over `token`s and over `demo`s."""
    icl_mass: Float[Tensor, "layer head token"] = field(repr=False)
    ft_shares: Mapping[Role, Float[Tensor, "layer token"]] = field(repr=False)

    @property
    def lead_adds_up(self) -> bool:
        """Whether the contributions add up to the change of the lead within 5 %; otherwise they mean nothing."""
        return self.lead_residual <= 0.05 * max(abs(self.lead["ft"] - self.lead["zsl"]), 1e-3)

    def to_json(self) -> dict[str, Any]:
        """Everything but the arrays by head, which are given by layer."""
        own = {name: value for name, value in vars(self).items() if name not in ("icl_mass", "ft_shares")}
        parts = {name: [vars(part) for part in own[name]] for name in ("demos", "labels", "tokens")}
        by_layer = {
            "icl_per_layer": self.icl_mass.nanmean(1).tolist(),
            "ft_per_layer": {role: shares.tolist() for role, shares in self.ft_shares.items()},
        }
        return plain({**own, "lead_adds_up": self.lead_adds_up, **parts, **by_layer})

    def table(self, tokens: int = 12) -> RenderableType:
        """The answers, every demonstration's contribution, and the `tokens` with the largest mass."""
        top = sorted(self.tokens, key=lambda part: -part.icl)[:tokens]
        answers = Table(box=None)
        answers.add_column("")
        for candidate in self.candidates:
            answers.add_column(candidate, justify="right")
        for name, scores in self.log_probs.items():
            answers.add_row(_SETTINGS[name], *(f"{score:.3f}" for score in scores))
        summary = (
            f"Fine-tuning (rate {self.lr:g}) moved the lead of {self.favoured!r} over {self.against!r} from "
            f"{self.lead['zsl']:+.3f} to {self.lead['ft']:+.3f}. Kendall's tau between in-context mass and "
            f"fine-tuning's shares: {_number(self.tau['token'])} over tokens, {_number(self.tau['demo'])} over "
            f"demonstrations. The contributions add up to the change of the lead within {self.lead_residual:.1e}."
        )
        warning = [] if self.lead_adds_up else [Text(f"! {_DOES_NOT_ADD_UP}", "yellow")]
        return Group(
            Text(f"{self.task}: {self.query}", "bold"),
            answers,
            Text(summary),
            *warning,
            _parts("by demonstration, counted from 0", self.demos),
            _parts("by label", self.labels),
            _parts(f"the {len(top)} tokens with most in-context mass", top),
        )


_DOES_NOT_ADD_UP = (
    "The contributions do not add up to the change of the lead (the path from the base to the tuned weights bends too "
    "much, or experts are routed along it): ignore the last column; a smaller --lr may help."
)
_SETTINGS = {"zsl": "zero-shot", "icl": "in-context", "ft": "fine-tuned"}


def _parts(title: str, parts: Sequence[Contribution]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("#", justify="right")
    table.add_column("", max_width=48, no_wrap=True, overflow="ellipsis")
    table.add_column("label")
    for name in ("ICL mass", "FT share V", "FT share K", "FT on the lead"):
        table.add_column(name, justify="right")
    for part in parts:
        table.add_row(
            "" if part.demo is None else str(part.demo),
            Text(part.text.replace("\n", "⏎")),
            Text(part.label or ""),
            f"{part.icl:.4f}",
            f"{part.ft_v:+.4f}",
            "" if part.ft_k is None else f"{part.ft_k:+.4f}",
            f"{part.score:+.4f}",
        )
    return table


def _number(x: float | None) -> str:
    return "undefined" if x is None else f"{x:+.2f}"


def explain(
    *,
    query: str,
    model: str | LanguageModel = "embedded",
    nodes: int = 8,
    json: Place = None,
    progress: Progress | None = None,
    **options: Any,
) -> Explanation:
    """Decompose the answer to one query by demonstration and token, in context and fine-tuned.

    query     the text of the template's field; a JSON object of the fields where there are several (or `choices`)
    nodes     points with which the quadrature for the contributions to the lead begins
    json      a file for the contributions, or "-" for standard output
    options   fields of `RunOptions` that apply to one query (task, demos or seed and shots, lr, ft_loss, dtype …)
    """
    check_place(json)
    progress = progress or Silent()
    asked = question("explain", query, model, options, progress)
    with progress.part("decomposing the answer", 3) as advance:
        found = _explained(asked.prepared, asked.row, asked.trace, nodes, advance)
    save_json(json, found.to_json())
    return found


def _explained(prepared: Prepared, row: Row, trace: TrainingTrace, nodes: int, advance: Any) -> Explanation:
    lm, prompts = prepared.lm, prepared.prompts
    asked, shared = prompts.queries[0], demo_tokens(prompts)
    if asked.summed:
        raise UserError(
            f"Task {prepared.task.name} scores an answer by the sum of its log-probabilities, and explain decomposes "
            "their mean; write the task with scores: mean."
        )
    mass = icl_mass(lm, prompts, shared)
    advance(1)
    shares = ft_shares(lm, trace, [*prompts.zero_prefix, *asked.ids])
    scores = {
        name: ask(lm, prompts.queries, replace(how, record=False), patch).settings[0].log_probs[0]
        for name, how, patch in (
            ("zsl", prepared.zero_shot, None),
            ("icl", prepared.in_context, None),
            ("ft", prepared.zero_shot, trace.tuned.patch),
        )
    }
    advance(1)
    favoured, against = (int(i) for i in np.argsort(-scores["ft"], kind="stable")[:2])
    assert favoured == int(predictions(scores["ft"][None])[0])
    lead = score_contributions(
        lm,
        trace,
        [*prompts.zero_prefix, *asked.ids],
        asked.candidates[favoured],
        asked.candidates[against],
        nodes=nodes,
    )
    advance(1)
    candidates = prepared.task.candidates(row)
    demos, labels, tokens, elsewhere = _contributions(prepared, shared, trace, mass, shares, lead)
    return Explanation(
        model=lm.name,
        task=prepared.task.name,
        query=prepared.task.render(row),
        candidates=candidates,
        log_probs={name: tuple(float(x) for x in each[: len(candidates)]) for name, each in scores.items()},
        lr=trace.tuned.lr,
        seed=prepared.seed,
        favoured=candidates[favoured],
        against=candidates[against],
        lead={"zsl": lead.base, "ft": lead.tuned},
        lead_residual=lead.residual,
        demos=demos,
        labels=labels,
        tokens=tokens,
        elsewhere=elsewhere,
        tau={"token": _tau(tokens), "demo": _tau(demos)},
        icl_mass=mass,
        ft_shares={role: shared.from_training(each.T, trace.tokens).T for role, each in shares.items()},
    )


Columns = Mapping[str, Float[Tensor, " token"]]
"""The contributions of every token, by the names of `Contribution`'s fields; `ft_k` only where it was trained."""


def _grouped(columns: Columns, groups: Tensor, count: int) -> Columns:
    return {name: aggregate(column, groups, count) for name, column in columns.items()}


def _part(columns: Columns, index: int, text: str, demo: int | None, label: str | None) -> Contribution:
    numbers = {name: float(column[index]) for name, column in columns.items()}
    return Contribution(text=text, demo=demo, label=label, **numbers)


def _contributions(
    prepared: Prepared,
    shared: DemoTokens,
    trace: TrainingTrace,
    mass: Float[Tensor, "layer head token"],
    shares: Mapping[Role, Tensor],
    lead: ScoreContributions,
) -> tuple[tuple[Contribution, ...], tuple[Contribution, ...], tuple[Contribution, ...], dict[str, float]]:
    tokenizer, demos = prepared.lm.tokenizer, prepared.prompts.demos
    mean = {role: torch.nan_to_num(each.nanmean(0)) for role, each in shares.items()}
    moved = {role: shared.from_training(each, trace.tokens) for role, each in mean.items()}
    by_token = lead.by_token
    columns = {
        "icl": mass.nanmean(1).mean(0),
        **{f"ft_{role}": share for role, share in moved.items()},
        "score": shared.from_training(by_token, trace.tokens),
    }
    texts = [_text(tokenizer, demo.template) for demo in demos]
    labels = [_text(tokenizer, demo.label).strip() for demo in demos]
    kinds = list(dict.fromkeys(labels))
    by_demo = _grouped(columns, shared.demo, len(demos))
    by_label = _grouped(columns, torch.tensor([kinds.index(label) for label in labels])[shared.demo], len(kinds))
    tokens = tuple(
        _part(columns, i, _text(tokenizer, [int(token)]), int(demo), labels[int(demo)] if is_label else None)
        for i, (token, demo, is_label) in enumerate(zip(shared.ids, shared.demo, shared.label, strict=True))
    )
    elsewhere = {
        "icl": 1.0 - float(columns["icl"].sum()),
        **{f"ft_{role}": float(mean[role].sum() - moved[role].sum()) for role in mean},
        "score": float(by_token.sum() - columns["score"].sum()),
    }
    return (
        tuple(_part(by_demo, i, text, i, labels[i]) for i, text in enumerate(texts)),
        tuple(_part(by_label, i, kind, None, kind) for i, kind in enumerate(kinds)),
        tokens,
        elsewhere,
    )


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids)))


def _tau(parts: Sequence[Contribution]) -> float | None:
    sides = [np.array([[[getattr(part, name) for part in parts]]]) for name in ("icl", "ft_v")]
    found = float(kendall(sides[0], sides[1])[0, 0])
    return None if np.isnan(found) else found
