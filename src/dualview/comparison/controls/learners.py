"""Patches and adapters as learners: given weights, compared with ICL as fine-tuning is.

What ICL is compared with does not depend on them. Their own controls are as large as they are, since similarity grows
with the size of an update: the same weights in random directions, and with `--controls full` the learner with its sign
flipped and the fine-tunings on random labels, on another task and of untrained models, scaled to its size. The twin
that learnt from flipped labels, where there is one, is asked as it is: its size is part of what the labels teach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from dualview.comparison.controls.settings import DRAWS, drawn
from dualview.comparison.controls.training import Scalable, TrainedControls, as_large, update_size
from dualview.comparison.prepare import Prepared
from dualview.duality.on_model.shared_patch import load_patch, load_twin
from dualview.io.progress import Progress
from dualview.learning.adapter_reading import adapter_names, load_adapter, twin_folder
from dualview.learning.adapters import Adapter
from dualview.metrics.floors.controls import base_name
from dualview.metrics.label_contrast import FLIPPED
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Asked, ask
from dualview.options import RunOptions
from dualview.records import Setting

SIZED = ("ft_random_labels", "ft_other_task")
"""Controls of fine-tuning that are read at the learner's size."""
AS_THEY_ARE = (FLIPPED["ft"], "ft_sign_flipped")
"""Controls of the learner's own that are never scaled."""


class Learner(Scalable, Protocol):
    """Given weights: a compiled patch or an adapter."""

    def in_random_directions(self, generator: torch.Generator) -> Any: ...


def load_learners(options: RunOptions, lm: LanguageModel) -> dict[str, Learner]:
    """The patch and the adapters that a run is given, by setting; before the work, since a file may be wrong."""
    found: dict[str, Learner] = {}
    if options.patch is not None:
        found["patch"] = load_patch(options.patch, lm)
    names: Mapping[str, Path] = adapter_names(options.adapter) if options.adapter else {}
    return {**found, **{name: load_adapter(folder, lm) for name, folder in names.items()}}


def load_twins(options: RunOptions, lm: LanguageModel) -> dict[str, Learner]:
    """The twins that learnt from flipped labels, by the setting of the learner whose they are.

    A twin is only a control: without controls none is read.
    """
    if options.controls == "none":
        return {}
    names: Mapping[str, Path] = adapter_names(options.adapter) if options.adapter else {}
    folders = {name: twin for name, folder in names.items() if (twin := twin_folder(folder)) is not None}
    found: dict[str, Learner] = {name: load_adapter(folder, lm) for name, folder in folders.items()}
    patch = None if options.patch is None else load_twin(options.patch, lm)
    return found if patch is None else {"patch": patch, **found}


def adapters_report(options: RunOptions, learners: Mapping[str, Learner]) -> dict[str, dict[str, Any]]:
    """The result's `adapters`: where each is from, its maps, ranks and size."""
    names = adapter_names(options.adapter) if options.adapter else {}
    adapters = {name: learner for name, learner in learners.items() if isinstance(learner, Adapter)}
    return {name: {"path": str(names[name]), **adapter.summary()} for name, adapter in adapters.items()}


def learner_controls(
    prepared: Prepared,
    learners: Mapping[str, Learner],
    twins: Mapping[str, Learner],
    passes: Mapping[str, Asked],
    trained: TrainedControls,
    progress: Progress,
) -> dict[str, Setting]:
    """Every learner's own controls, as `<learner>/<control>`; those of untrained models are made with the models."""
    lm, zsl, found = prepared.lm, passes["zsl"].settings[0], dict[str, Setting]()
    for name, learner in learners.items():
        size = update_size(zsl, passes[name].settings[0])
        for control, patch in _controls(prepared, learner, twins.get(name), trained):
            with progress.part(f"control {name}/{control}", 1) as advance:
                sized = patch if control in AS_THEY_ARE else as_large(prepared, lm, zsl, patch, size)
                asked = ask(lm, prepared.prompts.queries, replace(prepared.zero_shot, stay=True), sized)
                found[f"{name}/{control}"] = asked.settings[0]
                advance(1)
    return found


def _controls(
    prepared: Prepared, learner: Learner, twin: Learner | None, trained: TrainedControls
) -> Iterator[tuple[str, Scalable]]:
    full = prepared.options.controls == "full"
    if twin is not None:
        yield FLIPPED["ft"], twin
    for number in range(DRAWS if full else 1):
        generator = torch.Generator().manual_seed(1000 * (prepared.seed or 0) + number)
        yield drawn("ft_random_directions", number), learner.in_random_directions(generator)
    if full:
        yield "ft_sign_flipped", learner.scaled(-1.0)
        for control, tuned in trained.tuned.items():
            if base_name(control) in SIZED:
                yield control, cast("Scalable", tuned.patch)
