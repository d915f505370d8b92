"""Small trainings that test what the papers claim; each is a command and a function with the same name and arguments.

    dualview lab regression --out out          or          dualview.lab.regression(out="out")

Nothing here imports torch before a lab is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualview.lab.dynamics.run import dynamics
    from dualview.lab.harness import Lab, LabResult
    from dualview.lab.language.run import language
    from dualview.lab.modifications.run import modifications
    from dualview.lab.regression.run import regression
    from dualview.lab.retrofit.run import retrofit
    from dualview.lab.sign.run import sign

__all__ = ["LABS", "LabResult", "dynamics", "find_lab", "language", "modifications", "regression", "retrofit", "sign"]

LABS: dict[str, str] = {
    "regression": "Train linear self-attention on regression in context and compare it with gradient descent.",
    "modifications": "Train the attentions that the dual view suggests against softmax attention, over seeds.",
    "language": "Train a small GPT with and without each attention variant on plain text.",
    "retrofit": "Add momentum and its controls to a pretrained model, train it further, and compare.",
    "sign": "Sign the values of a trained model's attention: what breaks, and is it the attention sink?",
    "dynamics": "Measure how similar in-context learning and fine-tuning are during a training.",
}
"""The labs by name."""


def find_lab(name: str) -> Lab[Any]:
    """A lab with its settings, tables and figures."""
    return getattr(import_module(f"{__name__}.{name}.run"), name)


def __getattr__(name: str) -> Any:
    if name == "LabResult":
        return import_module(f"{__name__}.harness").LabResult
    if name in LABS:
        return import_module(f"{__name__}.{name}")  # a package that can be called
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
