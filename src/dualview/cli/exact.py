"""`dualview exact`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def exact(
    folder: Annotated[Path, typer.Argument(help="a new folder for the model, its tokenizer and its task")],
    features: Annotated[int, typer.Option(help="numbers that describe a word")] = 16,
    classes: Annotated[int, typer.Option(help="labels of the task")] = 4,
    rate: Annotated[float, typer.Option(help="size of the step that in-context learning is")] = 0.02,
    seed: Annotated[int, typer.Option(help="draws the words, their features and classes")] = 0,
    spread: Annotated[float, typer.Option(help="how far words are from the centre of their class")] = 1.2,
) -> None:
    """Write a model whose in-context learning is one gradient step.

    It is the known positive: fine-tuning it at its rate gives the same as the demonstrations. Prints what to run.
    """
    from dualview.models.exact import exact as write

    made = write(folder, features=features, classes=classes, rate=rate, seed=seed, spread=spread)
    print(f"wrote {made.folder}; compare its in-context learning with its fine-tuning:\n{made.command}")
