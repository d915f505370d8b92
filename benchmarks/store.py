"""A store that grows to a million finished cells: resuming a sweep over them, one query, one more cell, bytes per cell.

One cell is computed with the embedded model (4 shots, 8 queries). The others are made from it without a model: the
same files, with other keys, options and numbers, as packs, which is how a store keeps finished cells. The commands are
then run as a user runs them, each in a process of its own. Needs about 10 GB of disk for a million cells.

    python benchmarks/store.py [--cells 10000,100000,1000000] [--folder FOLDER] [--plot benchmarks/store.png]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dualview.io.hashing import FileNote, digest, sha256_of
from dualview.store.cell import ROWS, NewCell, read_manifest
from dualview.store.cell_key import CONTENT_OPTIONS, CellIdentity, Fingerprints
from dualview.store.locks import locked
from dualview.store.marker import mark_packed
from dualview.store.packs.compaction import finish_pack
from dualview.store.packs.pack import FILES, FILES_SCHEMA, ROW_GROUP, note_of, read_pack, rows_of
from dualview.store.store import Store
from dualview.store.tables import TABLES
from dualview.sweep import sweep
from dualview.sweep.spec import Grid, Spec

RATES = (0.001, 0.003, 0.01, 0.03)
BASE = {"model": "embedded", "task": "movie", "shots": 4, "n_queries": 8, "controls": "none", "device": "cpu"}
PACK = 8000
QUERY = "SELECT lr, count(*), avg(accuracy_icl), avg(sim_aou_raw) FROM cells WHERE current GROUP BY lr ORDER BY lr"
ONE_MORE = 20
TRIES = 3
RUN = """
import atexit, pathlib, runpy, sys
atexit.register(lambda: print(pathlib.Path("/proc/self/status").read_text(), file=sys.stderr))
runpy.run_module("dualview", run_name="__main__")
"""  # dualview, which says at its end how much memory it took (Linux)
_FRACTION = re.compile(rb"\d\.(\d{4,})")


def spec_of(cells: int, **options: Any) -> dict[str, Any]:
    return {**BASE, "lr": list(RATES), "seeds": f"1:{cells // len(RATES)}", **options}


@dataclass(frozen=True)
class Pattern:
    """A real cell: its manifest and result as texts to fill in, and its rows."""

    manifest: str
    """With %-marks for key, plan, id, seed, rate, and the result's size and sha256."""
    result: np.ndarray
    """The result's bytes."""
    digits: np.ndarray
    """Where the digits after a point are among them."""
    about: dict[str, Any]
    """When, where and how long, as a pack keeps it."""
    tables: dict[str, Any]

    @classmethod
    def of(cls, folder: Path) -> Pattern:
        text = (folder / "result.json").read_bytes()
        digits = np.array([place for found in _FRACTION.finditer(text) for place in range(*found.span(1))])
        tables = {name: pq.read_table(folder / f"{name}.parquet") for name in TABLES}
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8").replace("%", "%%"))
        manifest |= {"key": "%s", "plan": "%s", "asked": "%s"}
        manifest["options"] |= {"seed": "@d", "lr": "@r"}
        manifest["files"]["result.json"] = {"size": "@d", "sha256": "%s"}
        run = manifest["run"]
        about = {"records": False, "date": run["date"], "host": run["host"], "seconds": sum(run["seconds"].values())}
        return cls(
            re.sub(r'"@(.)"', r"%\1", json.dumps(manifest, indent=1)),
            np.frombuffer(text, np.uint8),
            digits,
            about,
            tables,
        )


@dataclass(frozen=True)
class Made:
    """A cell to be made."""

    key: str
    plan: str
    asked: str
    seed: int
    lr: float


def write_pack(pattern: Pattern, cells: list[Made], folder: Path) -> None:
    """A pack of cells with the pattern's rows and texts, each with numbers of its own."""
    draw = np.random.default_rng(int(cells[0].key[:8], 16))
    folder.mkdir(parents=True)
    cells = sorted(cells, key=lambda cell: cell.key)
    for name, table in pattern.tables.items():
        pq.write_table(
            _rows(table, cells, draw), folder / f"{name}.parquet", compression="zstd", row_group_size=122_880
        )
    size = 0
    with pq.ParquetWriter(folder / FILES, FILES_SCHEMA, compression="zstd") as writer:
        for start in range(0, len(cells), ROW_GROUP):
            rows = _texts(pattern, cells[start : start + ROW_GROUP], draw)
            size += sum(len(row["result"]) for row in rows)
            writer.write_table(pa.Table.from_pylist(rows, schema=FILES_SCHEMA), row_group_size=ROW_GROUP)
    names = (FILES, *ROWS)
    notes = {name: FileNote(size=(folder / name).stat().st_size, sha256=sha256_of(folder / name)) for name in names}
    finish_pack(folder, len(cells), size, notes)


def _rows(table: Any, cells: list[Made], draw: np.random.Generator) -> Any:
    """The rows of one cell for every cell: other keys, options and numbers."""
    many = table.take(pa.array(np.tile(np.arange(len(table)), len(cells))))
    for place, column in enumerate(table.schema):
        values = many.column(place).combine_chunks()
        if column.name == "key":
            values = pa.array([cell.key for cell in cells for _ in range(len(table))], pa.string())
        elif column.name in ("asked", "seed", "lr"):
            values = pa.array([getattr(cell, column.name) for cell in cells], column.type)
        elif column.type == pa.float64():
            values = pa.array(_other(values.to_numpy(zero_copy_only=False), draw), from_pandas=True)
        elif column.type == pa.list_(pa.float64()) and column.name != "lr_grid":
            flat = values.flatten().to_numpy(zero_copy_only=False)
            values = pa.ListArray.from_arrays(values.offsets, pa.array(_other(flat, draw)))
        many = many.set_column(place, column, values)
    return many


def _other(numbers: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    return numbers * draw.uniform(0.5, 1, numbers.shape)


def _texts(pattern: Pattern, cells: list[Made], draw: np.random.Generator) -> list[dict[str, Any]]:
    """The rows of `files.parquet`: the pattern's result with other digits."""
    results = np.tile(pattern.result, (len(cells), 1))
    results[:, pattern.digits] = draw.integers(ord("1"), ord("9") + 1, (len(cells), len(pattern.digits)), np.uint8)
    found: list[dict[str, Any]] = []
    for cell, row in zip(cells, results, strict=True):
        result = row.tobytes()
        about = (cell.key, cell.plan, cell.asked, cell.seed, cell.lr, len(result), hashlib.sha256(result).hexdigest())
        texts = {"manifest": pattern.manifest % about, "result": result.decode()}
        found.append({"key": cell.key, "plan": cell.plan, "asked": cell.asked, **pattern.about, **texts})
    return found


def grow(store: Path, pattern: Pattern, start: int, stop: int, content: str) -> None:
    """Add the cells of the study with `stop` cells that come after the first `start`."""
    grid = Spec.make(spec_of(stop)).cells()
    assert isinstance(grid, Grid)
    (store / "packs").mkdir(exist_ok=True)
    todo = list[Made]()
    with (
        Store(store, create=True) as opened,
        locked(opened.paths.locks, "pack"),  # a sweep that packs meanwhile would remove what is half-written
        ProcessPoolExecutor(os.cpu_count()) as pool,
    ):
        waiting: list[Any] = []

        def flush(cells: list[Made]) -> None:
            name = digest(cells[0].key)[:16]
            waiting.append((name, pool.submit(write_pack, pattern, cells, store / "packs" / f".{name}")))

        def enter(wait_for: int) -> None:
            while len(waiting) > wait_for:
                name, done = waiting.pop(0)
                done.result()
                folder = (store / "packs" / f".{name}").rename(store / "packs" / name)
                opened.index.enter_pack(note_of(folder, read_pack(folder)), list(rows_of(folder)), lambda *_: False)

        for asked, (seed, lr) in grid.asked(("seed", "lr")):
            if seed > start // len(RATES):
                todo.append(Made(digest("cell", asked), digest(asked, content), asked, seed, lr))
            if len(todo) == PACK:
                flush(todo)
                todo = []
                enter(3)
        if todo:
            flush(todo)
        enter(0)
        mark_packed(opened.paths)


@dataclass(frozen=True)
class Ran:
    """What a command took: seconds, those of them on a processor (few where others want it too), peak memory."""

    seconds: float
    cpu: float
    megabytes: float
    text: str


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(*command: str) -> Ran:
    start, cpu = time.perf_counter(), _cpu()
    done = subprocess.run([sys.executable, "-c", RUN, *command], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"dualview {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return Ran(seconds, _cpu() - cpu, int(done.stderr.split("VmHWM:")[1].split()[0]) / 1024, done.stdout)


def best(*command: str) -> Ran:
    """The fastest of some tries."""
    return min((measured(*command) for _ in range(TRIES)), key=lambda tried: tried.seconds)


def seconds_to_write(store: Path, cell: Path) -> float:
    """The median time to store a further cell (like the given one, with other options)."""
    manifest = read_manifest(cell)
    result = json.loads((cell / "result.json").read_text(encoding="utf-8"))
    identity = CellIdentity(**manifest.identity)
    [options] = Spec.make(spec_of(len(RATES), lr=RATES[0])).cells()
    taken: list[float] = []
    with Store(store, create=True) as opened:
        for number in range(ONE_MORE):
            seed = time.time_ns() + number  # in no store yet
            new = replace(identity, settings={**identity.settings, "seed": seed})
            start = time.perf_counter()
            added = opened.put(NewCell(new, None, replace(options, seed=seed), result))
            taken.append(time.perf_counter() - start)
            assert added
    return statistics.median(taken)


def files_below(folder: Path) -> tuple[int, int]:
    """The number of files below a folder, and their size on disk."""
    found = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return len(found), sum(each.st_blocks * 512 for each in found)


def measure(store: Path, cells: int, cell: Path, first: float, *, index_lost: bool) -> dict[str, Any]:
    spec = store.parent / f"study-{cells}.yaml"
    spec.write_text(json.dumps(spec_of(cells)), encoding="utf-8")
    resume = best("sweep", str(spec), "--store", str(store))
    assert f"{cells} done before" in resume.text, resume.text
    query = best("query", QUERY, "--store", str(store), "--json", "-")
    assert sum(row["count_star()"] for row in json.loads(query.text)) >= cells, query.text
    write = seconds_to_write(store, cell)
    files, size = files_below(store)
    index = sum(path.stat().st_size for path in store.glob("index.sqlite*"))
    found: dict[str, Any] = {
        "cells": cells,
        "resume_s": resume.seconds,
        "resume_cpu_s": resume.cpu,
        "resume_MB": resume.megabytes,
        "query_s": query.seconds,
        "query_cpu_s": query.cpu,
        "query_MB": query.megabytes,
        "one_more_ms": 1000 * write,
        "first_ms": 1000 * first,
        "bytes_per_cell": size / cells,
        "index_bytes_per_cell": index / cells,
        "files": files,
    }
    if index_lost:
        for path in store.glob("index.sqlite*"):
            path.unlink()
        again = measured("sweep", str(spec), "--store", str(store))
        found |= {"index_lost_s": again.seconds, "index_lost_cpu_s": again.cpu}
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}))
    return found


def plot(found: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "seconds": {
            "resume": "resume_s",
            "resume, on a processor": "resume_cpu_s",
            "query": "query_s",
            "query, on a processor": "query_cpu_s",
        },
        "peak memory (MB)": {"resume": "resume_MB", "query": "query_MB"},
        "one more cell (ms)": {"written": "one_more_ms", "first of a store": "first_ms"},
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(10, 3), layout="constrained")
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for label, name in lines.items():
            axis.plot([each["cells"] for each in found], [each[name] for each in found], "o-", label=label)
        axis.set(xscale="log", xlabel="finished cells", title=title)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=80)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="10000,100000,1000000", help="how many, growing")
    parser.add_argument("--folder", type=Path, default=None, help="where; a temporary folder, removed at the end")
    parser.add_argument("--keep-index", action="store_true", help="do not measure how long making the index takes")
    parser.add_argument("--plot", type=Path, default=None, help="a PNG of the growth")
    asked = parser.parse_args(given)
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="dualview-store-"))
    try:
        one = folder / "one"
        if not one.is_dir():
            sweep(spec_of(len(RATES), lr=RATES[0]), one)  # the one real cell
        [cell] = one.glob("cells/*/*")
        pattern = Pattern.of(cell)
        first = seconds_to_write(folder / "empty", cell)
        grid = Spec.make(spec_of(len(RATES))).cells()
        content = Fingerprints().content(grid[0])
        assert content is not None and set(spec_of(4)) - {"seeds", "lr"} <= {*CONTENT_OPTIONS, *asdict(grid[0])}
        store, found = folder / "store", list[dict[str, Any]]()
        with Store(store, create=True) as opened:
            before = sum(note.cells for note in opened.index.packs())
        for cells in map(int, asked.cells.split(",")):
            if cells > before:
                start = time.perf_counter()
                grow(store, pattern, before, cells, content)
                print(f"made {cells - before} cells in {time.perf_counter() - start:.0f} s", flush=True)
            found.append(measure(store, cells, cell, first, index_lost=not asked.keep_index))
            before = max(before, cells)
        if asked.plot is not None:
            plot(found, asked.plot)
        last = found[-1]
        print(
            f"{last['cells']} cells: resume {last['resume_s']:.1f} s ({last['resume_cpu_s']:.1f} s on a processor) in "
            f"{last['resume_MB']:.0f} MB, query {last['query_s']:.2f} s ({last['query_cpu_s']:.2f} s) in "
            f"{last['query_MB']:.0f} MB, one more cell {last['one_more_ms']:.1f} ms "
            f"(first {last['first_ms']:.1f} ms), {last['bytes_per_cell']:.0f} bytes per cell in {last['files']} files"
        )
    finally:
        if asked.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
