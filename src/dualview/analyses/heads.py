"""In-context learning and fine-tuning as updates of the same heads, layer by layer, for one query.

Three comparisons (`duality.head_report`): the exact split of every head's softmax into demonstrations and the rest, the
relaxed linear attention's ΔW_ICL beside fine-tuning's ΔW_FT in weight space, and the "meta-gradients" W_V x'_i beside
fine-tuning's true error signals e_i. Every likeness stands beside its floor, from shuffled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from dualview.comparison.single_query import question
from dualview.duality.on_model.head_report import HeadReport, head_report
from dualview.io.errors import UserError
from dualview.io.progress import Progress, Silent
from dualview.models.language_model import LanguageModel


@dataclass(frozen=True)
class HeadsResult:
    """What was asked, and the report on it."""

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
        """One line a layer: the split, the two updates, the two vectors of every token."""
        said = f"{self.shots_used} demonstrations, in context and fine-tuned (rate {self.lr:g}), layer by layer"
        return Group(Text(f"{self.task}: {self.query}", "bold"), Text(said), self.report.table())


def heads(
    *,
    query: str,
    model: str | LanguageModel = "embedded",
    rank: int = 8,
    shuffles: int = 5,
    progress: Progress | None = None,
    **options: Any,
) -> HeadsResult:
    """Compare what demonstrations and fine-tuning do to every layer's heads, for one query.

    query     the text of the template's field; a JSON object of the fields where there are several (or `choices`)
    rank      leading singular directions whose spaces are compared
    shuffles  random orders of the tokens behind every floor
    options   those of `RunOptions` that a single query leaves (task, demos or seed and shots, lr, ft_loss, dtype …)
    """
    for name, value in (("rank", rank), ("shuffles", shuffles)):
        if value < 1:
            raise UserError(f"--{name} must be at least 1, not {value}.")
    progress = progress or Silent()
    asked = question("heads", query, model, options, progress)
    lm, prompts = asked.prepared.lm, asked.prepared.prompts
    with progress.part("comparing heads", 1) as advance:
        report = head_report(lm, prompts, asked.trace, rank=rank, shuffles=shuffles)
        advance(1)
    return HeadsResult(
        model=lm.name,
        task=asked.prepared.task.name,
        query=asked.prepared.task.render(asked.row),
        shots_used=prompts.shots_used,
        lr=asked.trace.tuned.lr,
        report=report,
    )
