"""Meta-gradients against true gradients, over tasks and draws: the most direct test of the thesis.

    python studies/meta_gradients.py --models embedded --seeds 1:3 --data ../shared/data

runs `dualview heads` for every model, task and draw that `results/second/heads.parquet` does not have yet, on the first
query of the task, and adds its layers to the file after each. The page's section is made by `table`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import pandas as pd
from aggregate import EMBEDDED, SIX, TASKS, mean_of, over, result_file
from front import SECOND, SIZES
from layout import OVER_TASKS, grid

import dualview
from dualview.io.atomic import whole
from dualview.io.errors import UserError
from dualview.options import seeds_in
from dualview.tasks.task import load_task

FILE = SECOND / "heads.parquet"
SHOTS, LR = 16, 0.01
COMPARED = {
    "W_V x' and the error signals e, by token": ("meta_gradients", "cosine", "cosine_floor"),
    "… as sets of vectors (CKA)": ("meta_gradients", "cka", "cka_floor"),
    "ΔW_ICL and ΔW_FT of the relaxed heads": ("weights", "cosine", "cosine_floor"),
}


def rows_of(model: Any, name: str, task: str, seed: int, data: str | None) -> pd.DataFrame:
    """One draw: every layer's similarities with their floors."""
    given: dict[str, Any] = {"data": data} if task in SIX else {}
    first = load_task(task, given.get("data")).rows("validation")[0]
    found = dualview.heads(
        model=model, task=task, query=json.dumps(dict(first.fields)), seed=seed, shots=SHOTS, lr=LR, **given
    ).to_json()
    columns = {
        f"{part}_{each}": found[part][each] for part, value, floor in COMPARED.values() for each in (value, floor)
    }
    where = {"model": name, "task": task, "seed": seed, "shots": found["shots_used"], "lr": LR}
    layers = pd.DataFrame({**columns, "mass": found["split"]["mass_per_layer"]}).rename_axis("layer")
    return layers.reset_index().assign(**where)


def run(chosen: argparse.Namespace) -> None:
    for name in chosen.models.split(","):
        model = None
        for task in chosen.tasks.split(","):
            for seed in seeds_in(chosen.seeds):
                before = [result_file(FILE)] if FILE.exists() else []
                known = pd.concat(before) if before else pd.DataFrame({"model": [], "task": [], "seed": []})
                if ((known["model"] == name) & (known["task"] == task) & (known["seed"] == seed)).any():
                    continue
                model = model or dualview.load_model(name, device=chosen.device)
                made = pd.concat([*before, rows_of(model, name, task, int(seed), chosen.data)], ignore_index=True)
                with whole(FILE) as temporary:
                    made.to_parquet(temporary, compression="zstd", index=False)
                print(f"{name}, {task}, seed {seed}", flush=True)


def table() -> str:
    """Each similarity less its floor, by size."""
    found = result_file(FILE)
    rows = []
    for model, size in SIZES.items():
        own = found[found["model"] == model]
        if not len(own):
            continue
        draws = own.groupby(["task", "seed"]).mean(numeric_only=True).reset_index()
        for title, (part, value, floor) in COMPARED.items():
            columns = (draws[f"{part}_{value}"], draws[f"{part}_{floor}"])
            columns = (*columns, columns[0] - columns[1])
            means = [mean_of({task: over(column[draws["task"] == task]) for task in TASKS}) for column in columns]
            rows.append([size, title, *(mean.show() for mean in means), f"{draws['task'].nunique()} × {_draws(draws)}"])
    shown = grid(["size", "compared", "similarity", "shuffled tokens", "difference", "tasks × draws"], rows)
    note = (
        f"Means over layers. {OVER_TASKS} {SHOTS} demonstrations, rate {LR:g}. 1: the thesis as it is written; 0: "
        "unrelated."
    )
    source = "[second/heads.parquet](../studies/results/second/heads.parquet)"
    return f"{shown}\n\n{note}\n\n*From {source}, made by `python studies/meta_gradients.py`.*"


def _draws(draws: pd.DataFrame) -> str:
    counts = draws.groupby("task").size()
    return str(counts.min()) if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="`dualview heads` over tasks and draws.")
    parser.add_argument("--models", default="embedded", help="with commas")
    parser.add_argument("--tasks", default=",".join((*SIX, *EMBEDDED)), help="with commas")
    parser.add_argument("--seeds", default="1:3")
    parser.add_argument("--data", help="a folder with the six tasks' rows; else the hub")
    parser.add_argument("--device", default="auto")
    try:
        run(parser.parse_args(given))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
