"""SQL over a store: the views `cells`, `layers`, `queries`, `controls`, `runs` and `failures`, by DuckDB.

The database is in memory, accepts only a SELECT, and can open no file but the store's own rows.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]

from dualview.io.errors import UserError
from dualview.options import ADDED_LATER, RunOptions
from dualview.store.compaction import check_packs, damaged_loose, files_of, pack, quoted, read_files
from dualview.store.folder import StoreFolder
from dualview.store.tables import TABLES, TableName, schema

VIEWS = (*TABLES, "runs", "failures")
_FILES_ENOUGH = 128
"""More files than this are packed before they are read."""
_DEFAULTS = ", ".join(f"coalesce({name}, '{getattr(RunOptions, name)}') AS {name}" for name in ADDED_LATER)
"""A cell that is older than an option was run with the option's default."""
_ORDER = "model, task, shots, seed, ft_rule, lr, key"


def table(store: StoreFolder, name: str, *, current: bool = False) -> Any:
    """A whole view as a pyarrow table, in a fixed order."""
    if name not in VIEWS:
        raise UserError(f"There is no table {name}; the tables are {', '.join(VIEWS)}.")
    if name == "failures":
        return query(store, "SELECT * FROM failures ORDER BY asked")
    if name == "cells":
        return query(store, f"SELECT * FROM cells {'WHERE current' if current else ''} ORDER BY {_ORDER}")
    further = {"layers": ", layer", "queries": ", query", "controls": ", metric, kind, name", "runs": ""}[name]
    kept = "WHERE key IN (SELECT key FROM cells WHERE current)" if current else ""
    return query(store, f"SELECT * FROM {name} {kept} ORDER BY key{further}")


def query(store: StoreFolder, sql: str) -> Any:
    """The answer to a SELECT as a pyarrow table."""
    duckdb: Any = importlib.import_module("duckdb")
    connection = duckdb.connect(":memory:")
    try:
        _must_only_read(connection, sql)
        # Making a view opens its files, so only the named ones are made; a query that names none may list them all.
        named: list[TableName] = [name for name in TABLES if re.search(rf"\b{name}\b", sql, re.IGNORECASE)]
        _make_views(connection, store, named or TABLES)
        answer = connection.sql(sql).to_arrow_table()
        return answer.rename_columns(distinct(answer.column_names))
    except duckdb.Error as error:
        message = " ".join(str(error).split())
        if ".parquet" in message:
            message += "; run the sweep again, which repairs the store"
        raise UserError(f"The query failed: {message}.") from error
    finally:
        connection.close()


def distinct(names: Sequence[str]) -> list[str]:
    """Column names made unique, so that a row as a mapping keeps all its values.

    >>> distinct(["seed", "lr", "seed", "seed_2", "seed"])
    ['seed', 'lr', 'seed_3', 'seed_2', 'seed_4']
    """
    taken, found = set(names), list[str]()
    for name in names:
        number = 2
        unique = name
        while unique in found or (unique != name and unique in taken):
            unique = f"{name}_{number}"
            number += 1
        found.append(unique)
    return found


def _must_only_read(connection: Any, sql: str) -> None:
    kinds = [str(statement.type).rpartition(".")[2] for statement in connection.extract_statements(sql)]
    if kinds not in (["SELECT"], ["EXPLAIN"]):
        raise UserError("A query is one SELECT; it cannot change a store.")


def _make_views(connection: Any, store: StoreFolder, names: Sequence[TableName]) -> None:
    check_packs(store)
    if len(files_of(store, "cells")) > _FILES_ENOUGH:
        pack(store)
    damaged = damaged_loose(store)
    files = {name: files_of(store, name, but=damaged) for name in names}
    allowed = ", ".join(quoted(path) for paths in files.values() for path in paths)
    connection.execute(f"SET allowed_paths = [{allowed}]")
    for setting in ("python_enable_replacements", "enable_progress_bar", "enable_external_access"):
        connection.execute(f"SET {setting} = false")
    connection.execute("CREATE SCHEMA own")  # the tables below the views, hidden from SHOW TABLES
    answering = pa.array(sorted(store.index.current().values()), pa.string())
    _make_table(connection, "own.now", pa.table({"key": answering}))
    _make_table(connection, "runs", _runs(store))
    _make_table(connection, "failures", _failures(store))
    for name in names:
        # The empty table brings all columns: files of an older dualview may lack some.
        _make_table(connection, f"own.{name}", schema(name).empty_table())
        rows = f"UNION ALL BY NAME SELECT * FROM {read_files(files[name])}" if files[name] else ""
        columns = f"* REPLACE ({_DEFAULTS}), key IN (SELECT key FROM own.now) AS current" if name == "cells" else "*"
        connection.execute(f"CREATE VIEW {name} AS SELECT {columns} FROM (SELECT * FROM own.{name} {rows})")
    connection.execute("SET lock_configuration = true")


def _make_table(connection: Any, name: str, rows: Any) -> None:
    connection.register("given", rows)
    connection.execute(f"CREATE TABLE {name} AS SELECT * FROM given")
    connection.unregister("given")


def _runs(store: StoreFolder) -> Any:
    text = pa.string()
    types = {"key": text, "date": text, "host": text, "seconds": pa.float64(), "records": pa.bool_()}
    entries = store.index.entries().values()
    return pa.table({name: pa.array([getattr(e, name) for e in entries], kind) for name, kind in types.items()})


def _failures(store: StoreFolder) -> Any:
    names = ("asked", "reason", "model", "task", "options", "run")
    rows = [{**json.loads(failure.options), **vars(failure)} for failure in store.failures()]
    return pa.table({name: pa.array([str(row[name]) for row in rows], pa.string()) for name in names})
