"""`dualview heads`: in-context learning and fine-tuning as updates of the same heads, layer by layer, for one query.

Three comparisons (`duality.on_model.head_report`): the exact split of every head's softmax into demonstrations and the
rest; the relaxed linear attention's ΔW_ICL and fine-tuning's ΔW_FT in weight space; the "meta-gradients" W_V x'_i and
fine-tuning's true error signals e_i. Every similarity has a floor, from shuffled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from dualview.comparison.single_query import question
from dualview.duality.on_model.head_report import HeadReport, head_report
from dualview.io.errors import UserError
from dualview.io.json_files import Place, check_place, save_json
from dualview.io.progress import Progress, Silent
from dualview.models.language_model import LanguageModel


@dataclass(frozen=True)
class HeadsResult:
    """The query and the report on it."""

    model: str
    task: str
    query: str
    shots_used: int
    lr: float
    report: HeadReport

    def to_json(self) -> dict[str, Any]:
        own = {
            "model": self.model,
            "task": self.task,
            "query": self.query,
            "shots_used": self.shots_used,
            "lr": self.lr,
        }
        return own | self.report.to_json()

    def table(self) -> RenderableType:
        """One line for each layer: the split, the two updates, the two vectors of every token."""
        caption = f"{self.shots_used} demonstrations, in context and fine-tuned (rate {self.lr:g}), layer by layer"
        return Group(Text(f"{self.task}: {self.query}", "bold"), Text(caption), self.report.table())


def heads(
    *,
    query: str,
    model: str | LanguageModel = "embedded",
    rank: int = 8,
    shuffles: int = 5,
    json: Place = None,
    progress: Progress | None = None,
    **options: Any,
) -> HeadsResult:
    """Compare what demonstrations and fine-tuning do to every layer's heads, for one query.

    query     the text of the template's field; a JSON object of the fields where there are several (or `choices`)
    rank      leading singular directions whose spaces are compared
    shuffles  random orders of the tokens behind every floor
    json      a file for every layer's numbers, or "-" for standard output
    options   fields of `RunOptions` that apply to one query (task, demos or seed and shots, lr, ft_loss, dtype …)
    """
    for name, value in (("rank", rank), ("shuffles", shuffles)):
        if value < 1:
            raise UserError(f"--{name} must be at least 1, not {value}.")
    check_place(json)
    progress = progress or Silent()
    asked = question("heads", query, model, options, progress)
    lm, prompts = asked.prepared.lm, asked.prepared.prompts
    with progress.part("comparing heads", 1) as advance:
        report = head_report(lm, prompts, asked.trace, rank=rank, shuffles=shuffles)
        advance(1)
    found = HeadsResult(
        model=lm.name,
        task=asked.prepared.task.name,
        query=asked.prepared.task.render(asked.row),
        shots_used=prompts.shots_used,
        lr=asked.trace.tuned.lr,
        report=report,
    )
    save_json(json, found.to_json())
    return found
