"""SQL over a store: the right answers, nothing but reading, and ten thousand cells at once."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dualview.io.errors import UserError
from dualview.io.hashing import notes_of, sha256_of
from dualview.store.api import diff, export, load, ls
from dualview.store.api import query as query_of
from dualview.store.cell import FileNote, read_manifest
from dualview.store.cell_key import Fingerprints
from dualview.store.marker import mark_packed
from dualview.store.packs import compaction as packs
from dualview.store.packs.compaction import pack
from dualview.store.packs.pack import FILES, FILES_SCHEMA, ROW_GROUP
from dualview.store.query import VIEWS, query, table
from dualview.store.store import Store
from dualview.store.tables import TABLES, schema
from dualview.sweep.plan import make_plan
from dualview.sweep.runner import sweep
from dualview.sweep.spec import Spec
from sweep.study import grid, rows_by_query


def ask(store: Path, sql: str) -> list[dict[str, Any]]:
    with Store(store) as opened:
        return query(opened, sql).to_pylist()


def test_answers_are_those_of_the_rows(finished: Path) -> None:
    rows = rows_by_query(finished)
    [answer] = ask(finished, "SELECT count(*) AS n, avg(sim_aou_raw) AS mean FROM cells WHERE controls = 'quick'")
    quick = [row["sim_aou_raw"] for row in rows["cells"] if row["controls"] == "quick"]
    assert answer == {"n": 2, "mean": pytest.approx(sum(quick) / 2, rel=1e-12)}
    joined = ask(
        finished,
        "SELECT seed, avg((icl_predicted = gold)::int) AS icl FROM cells JOIN queries USING (key) "
        "WHERE controls = 'none' GROUP BY seed ORDER BY seed",
    )
    plain = [row for row in rows["cells"] if row["controls"] == "none"]
    assert joined == [
        {"seed": row["seed"], "icl": pytest.approx(row["accuracy_icl"])}
        for row in sorted(plain, key=lambda r: r["seed"])
    ]
    [runs] = ask(finished, "SELECT count(*) AS n, min(seconds) > 0 AS took FROM runs")
    assert runs == {"n": 4, "took": True}
    assert {row["name"] for row in ask(finished, "SHOW TABLES")} == set(VIEWS)  # and nothing of our own


@pytest.mark.parametrize(
    "sql",
    [
        "DROP VIEW cells",
        "CREATE TABLE mine AS SELECT 1",
        "COPY cells TO 'stolen.csv'",
        "SELECT 1; SELECT 2",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM '/etc/passwd'",
        "ATTACH 'other.db'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "SELECT * FROM rows",
        "SELECT nothing FROM cells",
        "not SQL",
        "",
    ],
)
def test_a_query_only_reads_the_store(
    sql: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = 3  # a variable of the caller is no table either
    with pytest.raises(UserError) as caught:
        ask(finished, sql)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == [] and rows == 3


def test_packs_change_no_answer(base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "sto're"  # a quote in the path is nothing special
    sweep(grid(base, seed=[1, 2, 3, 4, 5], controls="quick"), store)
    loose = rows_by_query(store)
    monkeypatch.setattr(packs, "AT_MOST", 2)
    with Store(store) as opened:
        assert pack(opened, at_least=6) == 0
        assert pack(opened, at_least=1) == 5
        assert {entry.pack is None for entry in opened.index.entries().values()} == {False}
        assert len(list(opened.paths.packs.iterdir())) == 3
        assert rows_by_query(store) == loose
        assert list(opened.paths.cells.glob("*/*")) == []  # the packs are all there is
    flipped = next(iter(sorted(store.glob("packs/*/cells.parquet"))))
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    with pytest.warns(UserWarning, match=r"cells\.parquet is not what was written .*have folders of their own again"):
        assert len(load(store)) == 5  # a pack that is not what was written is not read: its rows are made again
    assert rows_by_query(store) == loose
    assert 1 <= len(list(store.glob("cells/*/*"))) <= 2
    for path in store.glob("index.sqlite*"):
        path.unlink()
    assert rows_by_query(store) == loose  # the index is made again from packs and folders


def test_a_store_without_cells(tmp_path: Path) -> None:
    with Store(tmp_path / "store", create=True) as store:
        assert len(store.to_frame()) == 0 and list(store.results()) == []
        assert [table(store, name).num_rows for name in VIEWS] == [0] * len(VIEWS)


def test_rows_of_an_older_dualview_lack_columns_and_nothing_else(finished: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(finished, tmp_path / "store"))
    file = next(store.glob("cells/*/*/cells.parquet"))
    old = pq.read_table(file).drop_columns(["weights", "sim_aou_noise_floor"])
    pq.write_table(old, file)
    manifest = read_manifest(file.parent)
    note = FileNote(size=file.stat().st_size, sha256=sha256_of(file))
    written = manifest.model_copy(update={"files": {**manifest.files, file.name: note}})
    (file.parent / "manifest.json").write_text(written.model_dump_json(by_alias=True))
    rows = ask(store, "SELECT key, weights, sim_aou_raw FROM cells")
    assert sorted(str(row["weights"]) for row in rows) == ["None", "trained", "trained", "trained"]
    assert all(isinstance(row["sim_aou_raw"], float) for row in rows)


def test_columns_of_one_name_keep_their_values(finished: Path) -> None:
    [row] = ask(finished, "SELECT 1 AS seed, 2 AS lr, 3 AS seed, 4 AS seed_2, 5 AS seed")
    assert list(row.values()) == [1, 2, 3, 4, 5] and list(row)[:2] == ["seed", "lr"]


def cut(cell: Path) -> str:
    path = cell / "cells.parquet"
    path.write_bytes(path.read_bytes()[:100])
    return "cells.parquet has 100 bytes instead of"


def lose(cell: Path) -> str:
    (cell / "cells.parquet").unlink()
    return "cells.parquet is missing"


def flip(cell: Path) -> str:
    content = bytearray((cell / "cells.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (cell / "cells.parquet").write_bytes(content)
    return "cells.parquet is not what was written"


@pytest.mark.parametrize("damage", [cut, lose, flip])
def test_readers_leave_a_damaged_cell_out_and_name_it(
    damage: Callable[[Path], str], finished: Path, tmp_path: Path
) -> None:
    store = Path(shutil.copytree(finished, tmp_path / "store"))
    cell = sorted(store.glob("cells/*/*"))[0]
    said = damage(cell)
    listed = ls(store)
    assert len(listed.cells) == 3 and len(listed.problems) == 1
    assert cell.name in listed.problems[0] and said in listed.problems[0]
    for read in (
        lambda: len(load(store)),
        lambda: query_of("SELECT count(*) AS n FROM cells", store).to_pylist()[0]["n"],
        lambda: len(pq.read_table(export(tmp_path / "cells.parquet", store))),
        lambda: diff(str(store), str(finished)).same,  # pyright: ignore[reportAttributeAccessIssue]
    ):
        with pytest.warns(UserWarning, match=cell.name):
            assert read() == 3
    with pytest.warns(UserWarning), pytest.raises(UserError, match="cannot be read"):
        diff(cell.name, cell.name, store)
    for table_name in ("layers", "queries"):
        with Store(store) as opened:
            assert cell.name not in table(opened, table_name)["key"].to_pylist()


@pytest.mark.parametrize("suffix", ["csv", "parquet", "json"])
def test_export(suffix: str, finished: Path, tmp_path: Path) -> None:
    import pandas

    rows = rows_by_query(finished)
    for name in TABLES:
        path = export(tmp_path / f"{name}.{suffix}", finished, table=name)
        readers: dict[str, Callable[[], Any]] = {
            "csv": lambda path=path: pandas.read_csv(path),
            "parquet": lambda path=path: pandas.read_parquet(path),
            "json": lambda path=path: pandas.DataFrame(json.loads(path.read_text())),
        }
        read = readers[suffix]()
        assert len(read) == len(rows[name]) and list(read.key) == [row["key"] for row in rows[name]]
        if name == "cells":
            assert list(read.sim_aou_raw) == [row["sim_aou_raw"] for row in rows[name]]
    with pytest.raises(UserError, match=r"must end in \.csv, \.parquet, \.json, \.nc"):
        export(tmp_path / "cells.xlsx", finished)
    named = export(tmp_path / "cells", finished, format=suffix)
    assert named.read_bytes() == (tmp_path / f"cells.{suffix}").read_bytes()
    with pytest.raises(UserError, match="There is no table rows"):
        export(tmp_path / "rows.csv", finished, table="rows")


def test_export_with_named_dimensions(finished: Path, tmp_path: Path) -> None:
    import xarray

    rows = rows_by_query(finished)
    keys = sorted({row["key"] for row in rows["cells"]})
    for name, dims in {"cells": {"key"}, "layers": {"key", "layer"}, "queries": {"key", "query", "candidate"}}.items():
        with xarray.open_dataset(export(tmp_path / f"{name}.nc", finished, table=name)) as read:
            assert set(read.sizes) == dims and sorted(read["key"].values) == keys
            for row in rows[name][::7]:
                at = {dim: row[dim] for dim in dims - {"candidate"}}
                for column in ("sim_aou_raw", "gold", "task", "model"):
                    if column in row:
                        assert read[column].sel(at).item() == row[column]
                if name == "queries":
                    assert list(read["icl_log_probs"].sel(at).values) == row["icl_log_probs"]
    for name in ("controls", "runs", "failures"):
        with xarray.open_dataset(export(tmp_path / f"{name}.nc", finished, table=name)) as read:
            assert set(read.sizes) <= {"row"}


def test_frames_are_read_by_polars(finished: Path, tmp_path: Path) -> None:
    import polars

    with Store(finished) as opened:
        for name in TABLES:
            frame = opened.to_frame(name)
            assert polars.from_pandas(frame).columns == list(frame.columns)
            parquet = polars.read_parquet(export(tmp_path / f"{name}.parquet", finished, table=name))
            assert parquet.shape == frame.shape and parquet["key"].to_list() == list(frame["key"])


@pytest.mark.parametrize("given", [{"format": "xlsx"}, {"run": "out"}, {"store": None}])
def test_export_refuses(given: dict[str, Any], finished: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--format is 'xlsx'|one of --store and --run"):
        export(tmp_path / "cells.csv", **{"store": finished, **given})
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------- ten thousand


@pytest.fixture(scope="module")
def large(base: dict[str, Any], finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten thousand finished cells in a pack: one, again and again."""
    path = tmp_path_factory.mktemp("large") / "store"
    spec = Spec.read(large_spec(base, path.parent))
    with Store(finished) as small, Store(path, create=True) as store:
        template = small.paths.cell(small.keys()[0])
        manifest = read_manifest(template)
        rows = {name: pq.read_table(template / f"{name}.parquet") for name in TABLES}
        planned = make_plan(spec.cells(), store, Fingerprints(store.index.sha256)).todo
        keys = [f"{number:04x}{cell.asked[:60]}" for number, cell in enumerate(planned)]
        (folder := store.paths.packs / ("ab" * 8)).mkdir(parents=True)
        for name, own in rows.items():
            many = pa.concat_tables([own] * len(keys))
            column = pa.array([key for key in keys for _ in range(len(own))], pa.string())
            pq.write_table(many.set_column(0, "key", column).cast(schema(name)), folder / f"{name}.parquet")
        about = {"records": False, "date": manifest.run.date, "host": manifest.run.host, "seconds": 1.0}
        texts = {name: (template / f"{name}.json").read_text() for name in ("manifest", "result")}
        named = zip(keys, planned, strict=True)
        files = [{"key": key, "plan": cell.plan, "asked": cell.asked, **about, **texts} for key, cell in named]
        pq.write_table(pa.Table.from_pylist(files, schema=FILES_SCHEMA), folder / FILES, row_group_size=ROW_GROUP)
        packs.finish_pack(folder, len(keys), 1, notes_of(folder))
        mark_packed(store.paths)
        store.refresh()
        assert not store.problems
    return path


def large_spec(base: dict[str, Any], folder: Path) -> Path:
    """A study of ten thousand cells, written down."""
    path = folder / "study.yaml"
    axes = grid(base, seed=list(range(1000)), lr=[round(0.001 * rate, 3) for rate in range(1, 11)])
    path.write_text(yaml.safe_dump(axes), encoding="utf-8")
    return path


def quickest(work: Callable[[], Any]) -> float:
    """Processor seconds, the best of three: how busy the machine is otherwise is not what is asked."""
    taken: list[float] = []
    for _ in range(3):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken)


def test_ten_thousand_finished_cells_are_skipped_within_a_second(large: Path, base: dict[str, Any]) -> None:
    """From the file that says what to compute to the summary that says it is all there."""
    spec = large_spec(base, large.parent)

    def resume() -> None:
        summary = sweep(spec, large)
        assert (summary.cells, summary.done_before, summary.problems) == (10_000, 10_000, ())

    assert quickest(resume) < 1


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT lr, avg(sim_aou_raw), avg(accuracy_icl) FROM cells WHERE current GROUP BY lr",
        "SELECT layer, avg(sim_aou_raw) FROM layers GROUP BY layer",
        "SELECT lr, avg((icl_predicted = gold)::int) FROM cells JOIN queries USING (key) GROUP BY lr",
    ],
)
def test_ten_thousand_cells_are_queried_within_a_second(sql: str, large: Path) -> None:
    assert ask(large, "SELECT count(*) AS n FROM cells") == [{"n": 10_000}]
    assert quickest(lambda: ask(large, sql)) < 1
