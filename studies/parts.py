"""The parts of docs/appendix.md, each made by one function from the study's results."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from again import check
from aggregate import TASKS, over, table
from by_layer import layers
from claims import claims
from layout import SEEDS, grid, source
from steps import at_equal_size, at_large_size, by_rate, shots
from tables import (
    accuracy,
    floors,
    kendall,
    layer_causal,
    order,
    overlap,
    rec2ftp,
    redrawn_at_own_rate,
    sim_am,
    sim_aou,
    untrained,
    verdicts,
)


def run() -> str:
    cells, runs = table("cells"), table("runs")
    kinds = {
        "both rules at their chosen rates, full controls": (cells["controls"] == "full")
        & (cells["lr_asked"] == "auto"),
        "both rules at given rates": (cells["controls"] == "none") & (cells["lr_asked"] != "auto"),
        "untrained weights, and all but embeddings and norms": cells["weights"] != "trained",
        "1 to 64 demonstrations": (cells["controls"] == "quick") & (cells["weights"] == "trained"),
    }
    rows = [
        [kind, str(len(part)), _tasks(part)] for kind, part in ((kind, cells[which]) for kind, which in kinds.items())
    ]
    versions = {name: " and ".join(sorted(runs[name].unique())) for name in ("torch", "transformers")}
    (trained,) = cells.loc[cells["weights"] == "trained", "weights_hash"].unique()
    devices = " and ".join(f"{name} ({count})" for name, count in runs["device_name"].value_counts().items())
    codes = ", ".join(f"{code[:8]}… ({count})" for code, count in cells["code"].value_counts().items())
    queries, dates = cells["n_queries_used"], sorted({runs["date"].min()[:10], runs["date"].max()[:10]})
    return "\n\n".join(
        [
            grid(["part", "cells", "seeds of each task"], rows),
            f"{len(cells)} cells on the embedded model (weights {trained[:12]}…), float32, "
            f"{queries.min()} to {queries.max()} queries each, on {devices}, torch {versions['torch']}, "
            f"transformers {versions['transformers']}, {' to '.join(dates)}; by these states of the code: {codes}.",
            source("cells.parquet runs.parquet", "…/…"),
        ]
    )


def _tasks(cells: pd.DataFrame) -> str:
    """Each task with its number of seeds."""
    counts = cells.groupby("task")["seed"].nunique()
    return ", ".join(f"{task} {counts[task]}" for task in TASKS if task in counts.index)


SHOWN = {
    "zsl": "zero-shot",
    "task_vector": "task vector",
    "ft": "fine-tuned",
    "patch": "compiled patch",
    "icl": "prompt",
}


def patch() -> str:
    found, columns = table("patches"), ["accuracy", "agreement", "divergence"]
    rows = [
        [task, title, str(len(own)), *(over(own[column]).show() for column in columns)]
        for task, part in found.groupby("task")
        for setting, title in SHOWN.items()
        for own in [part[part["setting"] == setting]]
    ]
    shown = grid(["task", "", "seeds", "accuracy", "answers as the prompt", "KL from the prompt"], rows)
    each = found.set_index(["task", "seed", "setting"])[columns].astype(float)
    gain = each.xs("patch", level="setting") - each.xs("ft", level="setting")
    more, closer = (int((gain[name] * way > 0).sum()) for name, way in (("agreement", 1), ("divergence", -1)))
    note = (
        f"{found['shots'].iloc[0]} demonstrations, {found['n_queries'].iloc[0]} queries that neither the patch nor its "
        f"ridge has seen. {SEEDS} Against fine-tuning on the same demonstrations, the patch answers as the prompt more "
        f"often in {more} of {len(gain)} draws, and its KL is lower in {closer}."
    )
    devices = " and ".join(sorted(found["device_name"].unique()))
    note += f" On {devices}, torch {' and '.join(sorted(found['torch'].unique()))}."
    command = "dualview compile --task TASK --seed SEED --out patch.safetensors --json TASK-SEED.json"
    return f"{shown}\n\n{note}\n\n*From [patches.parquet](../studies/results/patches.parquet), made by `{command}`.*"


PARTS: dict[str, Callable[[], str]] = {
    part.__name__: part
    for part in (
        *(run, claims, verdicts, accuracy, rec2ftp, sim_aou, floors, sim_am, kendall, layers, layer_causal),
        *(
            by_rate,
            at_equal_size,
            at_large_size,
            untrained,
            redrawn_at_own_rate,
            order,
            overlap,
            shots,
            patch,
            check,
        ),
    )
}
