"""Small trainings that test what the papers claim; each is a command and a function with the same name and arguments.

    dualview lab regression --out out          or          dualview.lab.regression(out="out")

A lab is a folder. A new one, `name`, needs

    lab/name/run.py         its options (a dataclass derived from `settings.LabSettings`) and one function, decorated
                            with `harness.lab`, that does the work and returns `Findings`
    lab/name/report.py      `tables(result)` and `figures(result)`, made from its JSON alone
    lab/name/__init__.py    five lines, as every lab has them, that let the folder be called
    here                    its sentence in `LABS`, its import for type checkers, its name in `__all__`
    docs/lab/name.md        its page; `docs_tables` fills in the tables
    tests/lab/test_name.py

and more modules where its mathematics needs them. The labs share

    harness     settings to result: the job, its units over seeds or draws, tables, JSON, Markdown, figures
    settings    options; several seeds; a comparison as `dualview run` makes it
    units       what a killed training left, and what a finished one found
    training    the loop of the small trainings: Adam, a cosine, resumed where it was killed
    problems    regression problems to be solved in context, and named random generators
    summaries   means, 95 % intervals and curves over seeds
    charts      panels with lines or bars
    gpt         text, small GPTs, their training and their few-shot accuracy

Nothing here imports torch before a lab is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualview.lab.bound.run import bound
    from dualview.lab.classifier.run import classifier
    from dualview.lab.dynamics.run import dynamics
    from dualview.lab.harness import Lab, LabResult
    from dualview.lab.kernel.run import kernel
    from dualview.lab.language.run import language
    from dualview.lab.modifications.run import modifications
    from dualview.lab.regression.run import regression
    from dualview.lab.retrofit.run import retrofit
    from dualview.lab.rivals.run import rivals
    from dualview.lab.sign.run import sign
    from dualview.lab.task_vectors.run import task_vectors
    from dualview.lab.votes.run import votes

__all__ = [
    "LABS",
    "LabResult",
    "bound",
    "classifier",
    "dynamics",
    "find_lab",
    "kernel",
    "language",
    "modifications",
    "regression",
    "retrofit",
    "rivals",
    "sign",
    "task_vectors",
    "votes",
]

LABS: dict[str, str] = {
    "regression": "Train linear self-attention on regression in context and compare it with gradient descent.",
    "rivals": "Train linear attention by depth and condition number: is it gradient descent or something better?",
    "classifier": "Train a small language model to classify in context: is what it finds one gradient step?",
    "modifications": "Train the attentions that the dual view suggests against softmax attention, over seeds.",
    "language": "Train a small GPT with and without each attention variant on plain text.",
    "retrofit": "Add momentum and its controls to a pretrained model, train it further, and compare.",
    "sign": "Sign the values of a trained model's attention: what breaks, and is it the attention sink?",
    "kernel": "Softmax as a kernel model on a model's own heads: features against their number, and its training.",
    "bound": "The dual model's generalisation error over the number of demonstrations, next to theorem 3.2's bound.",
    "dynamics": "Measure how similar in-context learning and fine-tuning are during a training.",
    "task-vectors": "Measure how much of each update lies in the subspace of the task's vectors.",
    "votes": "Let training examples vote by a trained layer's attention to them: do they predict its answer?",
}
"""The labs by name."""


def find_lab(name: str) -> Lab[Any]:
    """A lab with its settings, tables and figures."""
    module = name.replace("-", "_")
    return getattr(import_module(f"{__name__}.{module}.run"), module)


def __getattr__(name: str) -> Any:
    if name == "LabResult":
        return import_module(f"{__name__}.harness").LabResult
    if name.replace("_", "-") in LABS:
        return import_module(f"{__name__}.{name}")  # a package that can be called
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
