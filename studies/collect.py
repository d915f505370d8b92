"""From the stores of a study to the files that its findings are made of.

    python studies/collect.py STORE … PATCH.json …

adds every cell of the stores to `studies/results/*.parquet`; a cell that was asked for before is replaced. Kept are the
tables of `dualview export` (of queries: none, of layers: those of the cells with controls), some of their controls
by layer, the curves of similarity against step size, and where and when each cell was run. What `dualview compile
--json` wrote goes to `patches.parquet`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
from aggregate import RESULTS, of_the_study, result_file

from dualview.io.atomic import whole
from dualview.io.errors import UserError
from dualview.store import Store
from dualview.store.api import query

TABLES = ("cells", "layers", "profiles", "controls", "curves", "runs")
PROFILES = {"floors": ("shuffled_query", "icl_random_labels", "untrained"), "ceilings": ("icl_reordered",)}
"""The controls that are kept layer by layer."""


def collected(path: Path) -> dict[str, pd.DataFrame]:
    """The tables of one store."""
    with Store(path) as store:
        cells = store.to_frame(current=True).drop(columns="current")
        if not len(cells):
            raise UserError(f"The store {path} has no finished cell.")
        stored = {each.key: each.result.to_json() for each in store.results()}
    stored = {key: stored[key] for key in cells["key"]}
    curves = [{"key": key, **point} for key, content in stored.items() for point in content.get("norm_curve") or ()]
    runs = [{"key": key, **_ran(content["provenance"])} for key, content in stored.items()]
    full = list(cells.loc[cells["controls"] != "none", "key"])
    listed = ", ".join(f"'{key}'" for key in full) or "''"
    return {
        "cells": cells,
        "layers": query(f"SELECT * FROM layers WHERE key IN ({listed})", path).to_pandas(),
        "profiles": frame([row for key in full for row in profile(key, stored[key])]),
        "controls": query("SELECT * FROM controls", path).to_pandas(),
        "curves": frame(curves),
        "runs": frame(runs),
    }


def frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """A table that has its key even without rows."""
    return pd.DataFrame(rows) if rows else pd.DataFrame({"key": pd.Series(dtype=str)})


def profile(key: str, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The controls of one cell's two similarities, layer by layer."""
    for metric in ("sim_aou", "sim_am"):
        for kind, names in PROFILES.items():
            for name in names:
                values = content["controls"][metric]["per_layer"][kind].get(name) or ()
                for layer, value in enumerate(values):
                    yield {"key": key, "metric": metric, "kind": kind, "name": name, "layer": layer, "value": value}


def merged(parts: Sequence[dict[str, pd.DataFrame]]) -> dict[str, pd.DataFrame]:
    """One table of each kind: of cells that answer the same options that of the newest version of dualview's numbers,
    of those the last, with the rows of the part it is from. Cells that were not computed again keep their version."""
    cells = pd.concat([part["cells"].assign(part=number) for number, part in enumerate(parts)], ignore_index=True)
    cells = cells.assign(version=numerics(cells)).sort_values(["version", "part"], kind="stable")
    cells = cells.drop_duplicates("asked", keep="last").sort_values("asked")
    tables: dict[str, pd.DataFrame] = {"cells": cells.drop(columns=["part", "version"])}
    for name in TABLES[1:]:
        own = [
            part[name][part[name]["key"].isin(cells.loc[cells["part"] == number, "key"])]
            for number, part in enumerate(parts)
        ]
        tables[name] = pd.concat(own, ignore_index=True).sort_values("key", kind="stable")
    return tables


def numerics(cells: pd.DataFrame) -> pd.Series:
    """The version of dualview's numbers that each cell is of; 0 before there was one."""
    return cells["code"].str.extract(r"^numerics (\d+)", expand=False).fillna("0").astype(int)


def scores_of(path: Path) -> Iterator[dict[str, Any]]:
    """A compiled patch's settings, a row each."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        where = found["provenance"]
        asked = {"task": found["task"]["name"], "seed": where["seeds"]["demos"], "shots": found["task"]["shots"]}
        asked |= {
            name: found[name] for name in ("n_queries", "fitted", "ridge", "lr", "ft_status", "task_vector_layer")
        }
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); name a file of `dualview compile --json`."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not what `dualview compile --json` writes ({error!r}); name such a file."
        ) from error
    for setting, shown in found["settings"].items():
        yield {**asked, "setting": setting, **shown, "weights_hash": where["weights_hash"], **_ran(where)}


def _ran(where: dict[str, Any]) -> dict[str, Any]:
    """When, on what and with what something ran."""
    versions = {name: where["versions"][name] for name in ("python", "dualview", "torch", "transformers")}
    run = {name: where["run"][name] for name in ("date", "device_name")}
    return {**run, "seconds": sum(where["run"]["seconds"].values()), **versions}


def add_patches(paths: Sequence[Path]) -> None:
    """Adds to the patches that are there; of the same task and seed the last is kept."""
    kept = RESULTS / "patches.parquet"
    before = [result_file(kept)] if kept.exists() else []
    rows = pd.concat([*before, *(pd.DataFrame(list(scores_of(path))) for path in paths)], ignore_index=True)
    rows = rows.drop_duplicates(["task", "seed", "setting"], keep="last").sort_values(["task", "seed"], kind="stable")
    with whole(kept) as temporary:
        rows.to_parquet(temporary, compression="zstd", index=False)
    print(f"patches: {len(rows):,} rows")


def must_be_the_study_s(cells: pd.DataFrame) -> None:
    """Other models, tasks or settings would change every mean."""
    foreign = cells[~of_the_study(cells)]
    if len(foreign):
        first = foreign.iloc[0]
        raise UserError(
            f"{len(foreign)} of {len(cells)} cells are not of this study (the first: model {first['model']}, task "
            f"{first['task']}, {first['n_queries']} queries); give a store that the specs in studies/ made."
        )


def main(added: Sequence[dict[str, pd.DataFrame]]) -> None:
    """Adds the stores' tables to those that are there: all of them, or none."""
    for tables in added:
        must_be_the_study_s(tables["cells"])
    before = {name: result_file(RESULTS / f"{name}.parquet") for name in TABLES if (RESULTS / "cells.parquet").exists()}
    tables = merged([part for part in (before, *added) if part])
    with ExitStack() as stack:
        for name, table in tables.items():
            temporary = stack.enter_context(whole(RESULTS / f"{name}.parquet"))
            table.reset_index(drop=True).to_parquet(temporary, compression="zstd", index=False)
    print("\n".join(f"{name}: {len(table):,} rows" for name, table in tables.items()))


def paths_given(paths: Sequence[str]) -> list[Path]:
    """The files and folders that the command line names."""
    if not paths or paths[0].startswith("-"):
        raise UserError(f"Name a store or several: python {sys.argv[0]} STORE …")
    return [Path(path) for path in paths]


if __name__ == "__main__":
    try:
        named = paths_given(sys.argv[1:])
        patches = [path for path in named if path.suffix == ".json"]
        stores = [collected(path) for path in named if path not in patches]
        if stores:
            main(stores)
        if patches:
            add_patches(patches)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
