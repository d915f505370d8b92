"""The second edition of the study (`second.yaml`), in pieces.

    python studies/second.py STORE --minutes 9

computes cells in the order of the file, arm by arm, model by model, seed by seed, and stops before a cell that might
not finish in time. The same command continues. `--workers 4` computes in four processes on one store, each with its own
model. `--plan` only says what is done and what is left; `--arms`, `--models`, `--seeds` and `--tasks` choose a part;
`--collect` adds the store's cells to `results/second/*.parquet`. `--file studies/priority.yaml` has the same cells in
the order for a short time on a GPU. Only `--collect` needs DuckDB.

An arm is options of `dualview run`, and of its own `models`, `tasks`, `seeds` (or one `seed`), `match` (see `matches`),
`learnt`: only those of its tasks on which the same options with other controls found that both settings learn, and
`seconds`: what a cell is expected to take before one of its kind was timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from aggregate import RESULTS, result_file
from collect import TABLES, collected, merged
from pieces import ALL_DONE, LEFT, Piece, Stage, together

from dualview.io.assets import named_model
from dualview.io.atomic import whole
from dualview.io.errors import UserError
from dualview.options import RunOptions, seeds_in
from dualview.store import Store
from dualview.sweep.runner import sweep
from dualview.sweep.spec import Spec

FILE = Path(__file__).with_suffix(".yaml")
COLLECTED = RESULTS / "second"


def read_study(path: Path = FILE) -> dict[str, Any]:
    """A study: its models, seeds, tasks and arms."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())}); give a study's YAML file.") from error
    keys = ("models", "seeds", "tasks", "arms")
    if missing := [key for key in keys if not isinstance(found, dict) or key not in found]:
        raise UserError(f"{path} is no study: it lacks {', '.join(missing)}; see {FILE.name}.")
    return found


def stages(study: Mapping[str, Any], chosen: argparse.Namespace) -> Iterator[Stage]:
    """The stages in their order, of the chosen arms, models, seeds and tasks."""
    for arm in _among("arms", chosen.arms, study["arms"]):
        own = dict(study["arms"][arm])
        match, fixed = own.pop("match", None), own.pop("seed", None)
        learnt, only = own.pop("learnt", False), own.pop("tasks", None)
        models, seconds = own.pop("models", study["models"]), own.pop("seconds", None)
        drawn = [fixed] if fixed is not None else seeds_in(str(own.pop("seeds", study["seeds"])))
        seeds = [seed for seed in drawn if not chosen.seeds or fixed is not None or seed in seeds_in(chosen.seeds)]
        for model in (each for each in _among("models", chosen.models, study["models"]) if each in models):
            for seed in seeds:
                made = {**own, "model": model, "seed": seed, "device": chosen.device}
                groups = [{**group, "task": _kept(group["task"], only, chosen.tasks)} for group in study["tasks"]]
                grids = tuple({**made, **group} for group in groups if group["task"])
                yield Stage(arm, model, str(seed), grids, match, learnt, seconds)


def _among(what: str, chosen: str | None, known: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """The chosen names in the order of the file."""
    wanted = chosen.split(",") if chosen else list(known)
    for name in wanted:
        if name not in known:
            raise UserError(f"The study has no {name!r} among its {what}: {', '.join(known)}.")
    return [name for name in known if name in wanted]


def _kept(tasks: Sequence[str], only: Sequence[str] | None, chosen: str | None) -> list[str]:
    """The arm's tasks that are chosen, in the arm's order."""
    arms = tasks if only is None else [task for task in only if task in tasks]
    return [task for task in arms if chosen is None or task in chosen.split(",")]


def grids_of(stage: Stage, store: Path) -> Iterator[dict[str, Any]]:
    """What to sweep: the stage's grids, or those of their tasks that earlier cells choose, as far as these are done."""
    if stage.match is None and not stage.learnt:
        yield from stage.grids
        return
    cells = finished(store)
    if not len(cells):
        return
    cells = cells[(cells["model"] == stage.model) & (cells["seed"].astype(str) == stage.seed)]
    for grid in stage.grids:
        asked = {Path(task).stem: task for task in grid["task"]}  # a task may also be named by its file
        own = cells[cells["task"].isin(asked)]
        if stage.match is None:
            if tasks := [task for name, task in asked.items() if name in where_both_learn(own, grid)]:
                yield {**grid, "task": tasks}
            continue
        plain = own[(own["controls"] == "none") & (own["ft_rule"] == "sgd")]
        for row in matches(plain, stage.match).to_dict("records"):
            same = {name: row[name] for name in ("labels", "ft_loss", "lr", "epochs")}
            yield {**grid, **same, "task": asked[row["task"]]}


def finished(store: Path) -> pd.DataFrame:
    """The store's cells: their options, accuracies and whether both settings learn. Empty where there is no store."""
    if not store.exists():
        return pd.DataFrame()
    with Store(store) as opened:
        stored = [(opened.manifest(each.key).options, each.result.to_json()) for each in opened.results()]
    return pd.DataFrame(
        {
            **options,
            "task": found["task"]["name"],
            "ft_status": found["ft"]["status"],
            **{f"accuracy_{name}": found["accuracy"][name] for name in ("icl", "ft")},
            "learning": ((found.get("verdict") or {}).get("levels") or {}).get("learning", {}).get("outcome"),
        }
        for options, found in stored
    )


def where_both_learn(cells: pd.DataFrame, grid: Mapping[str, Any]) -> list[str]:
    """The tasks with a cell of the grid's options, its controls apart, in which both settings learn."""
    found = cells[cells["learning"] == "supported"]
    for name in ("labels", "ft_loss", "ft_rule", "epochs"):
        found = found[found[name] == grid.get(name, getattr(RunOptions, name))]
    return list(found["task"])


def matches(cells: pd.DataFrame, within: float) -> pd.DataFrame:
    """Of each task, labels and loss: the cell with ICL's accuracy, fewest epochs first, then nearest, smallest rate."""
    near = cells.assign(apart=(cells["accuracy_ft"] - cells["accuracy_icl"]).abs())
    near = near[(near["apart"] <= within + 1e-9) & (near["ft_status"] == "ok")]
    return near.sort_values(["epochs", "apart", "lr"]).drop_duplicates(["task", "labels", "ft_loss"])


def run(study: Mapping[str, Any], store: Path, chosen: argparse.Namespace) -> bool:
    """Compute until the time is over; whether everything is done."""
    missing = missing_models(study, chosen)
    asked = [stage for stage in stages(study, chosen) if stage.model not in missing]
    deadline = time.monotonic() + chosen.until - time.time()
    return Piece(store, grids_of, deadline, chosen.threads).compute(asked)


def missing_models(study: Mapping[str, Any], chosen: argparse.Namespace) -> dict[str, str]:
    """The chosen models that have to be fetched by name and are not here, each with a sentence."""
    missing: dict[str, str] = {}
    for model in dict.fromkeys(stage.model for stage in stages(study, chosen)):
        try:
            named_model(model)
        except UserError as error:
            missing[model] = str(error)
    return missing


def plan(study: Mapping[str, Any], store: Path, chosen: argparse.Namespace) -> str:
    """Cells, finished cells and seconds of a cell, by arm and model."""
    counts: dict[tuple[str, str], list[int]] = {}
    missing = missing_models(study, chosen)
    for stage in stages(study, chosen):
        count = counts.setdefault((stage.arm, stage.model), [0, 0])
        for grid in grids_of(stage, store):
            count[0] += len(Spec.make(grid).cells())
            known = store.exists() and stage.model not in missing
            count[1] += sweep(grid, store, dry_run=True).done_before if known else 0
    lines = [f"{'arm':<16}{'model':<22}{'cells':>6}{'done':>6}"]
    lines += [f"{arm:<16}{model:<22}{cells:>6}{done:>6}" for (arm, model), (cells, done) in counts.items()]
    total, done = (sum(count[at] for count in counts.values()) for at in (0, 1))
    return "\n".join(
        [
            *lines,
            f"{'':<38}{total:>6}{done:>6}",
            "an arm with `match` or `learnt` has a cell where earlier cells say so",
        ]
    )


def collect(study: Mapping[str, Any], store: Path) -> None:
    """Add the store's tables to those that are there: all of them, or none."""
    found = collected(store)
    tasks = {Path(task).stem for group in study["tasks"] for task in group["task"]}
    foreign = found["cells"][~(found["cells"]["model"].isin(study["models"]) & found["cells"]["task"].isin(tasks))]
    if len(foreign):
        raise UserError(
            f"{len(foreign)} of {len(found['cells'])} cells in {store} are not of this study (the first: model "
            f"{foreign.iloc[0]['model']}, task {foreign.iloc[0]['task']}); give the store that second.py wrote."
        )
    COLLECTED.mkdir(parents=True, exist_ok=True)
    there = (COLLECTED / "cells.parquet").exists()
    before = {name: result_file(COLLECTED / f"{name}.parquet") for name in TABLES} if there else {}
    tables = merged([part for part in (before, found) if part])
    with ExitStack() as stack:
        for name, table in tables.items():
            temporary = stack.enter_context(whole(COLLECTED / f"{name}.parquet"))
            table.reset_index(drop=True).to_parquet(temporary, compression="zstd", index=False)
    print("\n".join(f"{name}: {len(table):,} rows" for name, table in tables.items()))


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The second edition of the study, in pieces.")
    parser.add_argument("store", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0, help="of this piece")
    parser.add_argument("--file", type=Path, default=FILE, help="another study of the same form")
    parser.add_argument("--device", default="auto")
    for name in ("arms", "models", "seeds", "tasks"):
        parser.add_argument(f"--{name}", help="only these, with commas" + (" or 1:5" if name == "seeds" else ""))
    parser.add_argument("--workers", type=int, default=1, help="processes that compute at the same time")
    parser.add_argument("--threads", type=int, help="processor threads of each; by default shared out among workers")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # of a worker: when the piece ends
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--collect", action="store_true")
    chosen = parser.parse_args(given)
    try:
        study = read_study(chosen.file)
        if chosen.plan:
            print(plan(study, chosen.store, chosen))
        elif chosen.collect:
            collect(study, chosen.store)
        else:
            return piece(study, chosen, sys.argv[1:] if given is None else given)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def piece(study: Mapping[str, Any], chosen: argparse.Namespace, given: Sequence[str]) -> int:
    """Compute what fits the time, here or in several processes; the exit status."""
    if chosen.until is not None:
        return ALL_DONE if run(study, chosen.store, chosen) else LEFT
    chosen.until = time.time() + 60 * chosen.minutes
    missing = missing_models(study, chosen)
    if chosen.workers > 1:
        done = together(given, chosen.store, chosen.workers, chosen.until, chosen.threads)
    else:
        done = run(study, chosen.store, chosen)
    print("all done" if done and not missing else "not all is done: the same command continues", flush=True)
    for sentence in missing.values():  # last: what could be computed was
        print(sentence, file=sys.stderr)
    return 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
