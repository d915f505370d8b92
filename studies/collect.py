"""From the stores of a study to the files that its findings are made of.

    python studies/collect.py STORE …

adds every cell of the stores to `studies/results/*.parquet`; a cell that was asked for before is replaced. Kept are the
tables of `dualview export` (of queries: none, of layers: those of the cells with full controls), some of their controls
by layer, the curves of similarity against step size, and where and when each cell was run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dualview.errors import UserError
from dualview.files import whole
from dualview.runs import Store
from dualview.runs.reading import query

RESULTS = Path(__file__).parent / "results"
TABLES = ("cells", "layers", "profiles", "controls", "curves", "runs")
PROFILES = {"floors": ("shuffled_query", "icl_random_labels", "untrained"), "ceilings": ("icl_reordered",)}
"""The controls that are kept layer by layer."""


def collected(path: Path) -> dict[str, pd.DataFrame]:
    """The tables of one store."""
    with Store(path) as store:
        cells = store.frame(current=True).drop(columns="current")
        stored = {each.key: each.result.to_json() for each in store.results()}
    stored = {key: stored[key] for key in cells["key"]}
    curves = [{"key": key, **point} for key, content in stored.items() for point in content.get("norm_curve") or ()]
    runs = []
    for key, content in stored.items():
        where = content["provenance"]
        versions = {name: where["versions"][name] for name in ("python", "dualview", "torch", "transformers")}
        seconds = sum(where["run"]["seconds"].values())
        run = {name: where["run"][name] for name in ("date", "device_name")}
        runs.append({"key": key, **run, "seconds": seconds, **versions})
    full = list(cells.loc[cells["controls"] == "full", "key"])
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
    """One table of each kind: of cells that answer the same options the last, with the rows of the part it is from."""
    cells = pd.concat([part["cells"].assign(part=number) for number, part in enumerate(parts)], ignore_index=True)
    cells = cells.drop_duplicates("asked", keep="last").sort_values("asked")
    tables: dict[str, pd.DataFrame] = {"cells": cells.drop(columns="part")}
    for name in TABLES[1:]:
        own = [
            part[name][part[name]["key"].isin(cells.loc[cells["part"] == number, "key"])]
            for number, part in enumerate(parts)
        ]
        tables[name] = pd.concat(own, ignore_index=True).sort_values("key", kind="stable")
    return tables


def stores_asked_for() -> list[dict[str, pd.DataFrame]]:
    """The tables of the stores that the command line names; the program ends with one sentence if there are none."""
    try:
        if len(sys.argv) < 2:
            raise UserError(f"Name a store or several: python {sys.argv[0]} STORE …")
        return [collected(Path(store)) for store in sys.argv[1:]]
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def main(added: Sequence[dict[str, pd.DataFrame]]) -> None:
    before = {
        name: pd.read_parquet(RESULTS / f"{name}.parquet") for name in TABLES if (RESULTS / "cells.parquet").exists()
    }
    tables = merged([part for part in (before, *added) if part])
    for name, table in tables.items():
        with whole(RESULTS / f"{name}.parquet") as temporary:
            table.reset_index(drop=True).to_parquet(temporary, compression="zstd", index=False)
        print(f"{name}: {len(table):,} rows")


if __name__ == "__main__":
    main(stores_asked_for())
