"""SQL over a store: the views `cells`, `layers`, `queries`, `controls`, `runs` and `failures`, by DuckDB.

The database is in memory, accepts only a SELECT, and can open no file but the store's own rows.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]

from dualview.io.errors import UserError
from dualview.options import RunOptions
from dualview.store.folder import StoreFolder
from dualview.store.index import PackNote
from dualview.store.packs.compaction import damaged_loose, pack, packed, quoted, sources, union
from dualview.store.packs.pack import FILES
from dualview.store.repair import check_packs
from dualview.store.tables import TABLES, TableName, schema

VIEWS = (*TABLES, "runs", "failures")
_FILES_ENOUGH = 128
"""More files than this are packed before they are read."""
_DEFAULTS = ", ".join(f"coalesce({name}, '{getattr(RunOptions, name)}') AS {name}" for name in ("labels",))
"""A cell that is older than an option was run with the option's default."""
_SQL_TYPES = {"string": "VARCHAR", "double": "DOUBLE", "int64": "BIGINT", "int32": "INTEGER", "bool": "BOOLEAN"}
_TRIES = 5
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
    for attempt in range(_TRIES):
        connection = duckdb.connect(":memory:")
        before = _state(store)
        try:
            _must_only_read(connection, sql)
            # Making a view opens its files, so only the named ones are made; a query that names none may list them all.
            named = [name for name in VIEWS if re.search(rf"\b{name}\b", sql, re.IGNORECASE)]
            _make_views(connection, store, named or VIEWS)
            answer = connection.sql(sql).to_arrow_table()
            return answer.rename_columns(distinct(answer.column_names))
        except duckdb.Error as error:
            message = " ".join(str(error).split())
            if ".parquet" in message:
                if attempt + 1 < _TRIES and _state(store) != before:  # another process packed these files meanwhile
                    continue
                message += "; run the sweep again, which repairs the store"
            raise UserError(f"The query failed: {message}.") from error
        finally:
            connection.close()
    raise AssertionError


def _state(store: StoreFolder) -> tuple[Any, ...]:
    return store.index.packs(), store.index.loose()


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


def _make_views(connection: Any, store: StoreFolder, names: Sequence[str]) -> None:
    packs = check_packs(store)
    if len(store.index.loose()) > _FILES_ENOUGH and pack(store):
        packs = check_packs(store)
    damaged = damaged_loose(store)
    tables: list[TableName] = [name for name in TABLES if name in names]
    found = {name: sources(store, name, but=damaged, packs=packs) for name in tables}
    texts = [store.paths.packs / note.pack / FILES for note in packs] if "runs" in names else []
    allowed = [*texts, *(path for whole, partly in found.values() for path in (*whole, *partly))]
    connection.execute(f"SET allowed_paths = [{', '.join(map(quoted, allowed))}]")
    for setting in ("python_enable_replacements", "enable_progress_bar", "enable_external_access"):
        connection.execute(f"SET {setting} = false")
    connection.execute("CREATE SCHEMA own")  # the tables below the views, hidden from SHOW TABLES
    text = pa.string()
    _make_table(connection, "own.superseded", {"key": text}, [store.index.superseded()])
    named = ("asked", "reason", "model", "task", "options", "run")
    failed = [{**json.loads(failure.options), **vars(failure)} for failure in store.failures()]
    columns = [[str(row[name]) for row in failed] for name in named]
    _make_table(connection, "failures", dict.fromkeys(named, text), columns)
    for name in tables:
        # The empty table brings all columns: files of an older dualview may lack some.
        _make_table(connection, f"own.{name}", {column.name: column.type for column in schema(name)})
        whole, partly = found[name]
        rows = f"UNION ALL BY NAME {union(whole, partly)}" if whole or partly else ""
        current = "key NOT IN (SELECT key FROM own.superseded) AS current"
        columns = f"* REPLACE ({_DEFAULTS}), {current}" if name == "cells" else "*"
        connection.execute(f"CREATE VIEW {name} AS SELECT {columns} FROM (SELECT * FROM own.{name} {rows})")
    if "runs" in names:
        _make_runs(connection, store, packs)
    connection.execute("SET lock_configuration = true")


def _make_table(connection: Any, name: str, types: Mapping[str, Any], columns: Sequence[Sequence[Any]] = ()) -> None:
    """A table with columns of these Arrow types, and the rows of which the columns are given."""
    # Not from an Arrow table: to make one, or to hand one over, imports pandas, which takes longer than a query.
    described = ", ".join(f'"{column}" {_sql_type(kind)}' for column, kind in types.items())
    connection.execute(f"CREATE TABLE {name} ({described})")
    if columns and columns[0]:
        connection.execute(f"INSERT INTO {name} SELECT {', '.join('unnest(?)' for _ in columns)}", list(columns))


def _sql_type(kind: Any) -> str:
    """The same type in SQL.

    >>> _sql_type(pa.list_(pa.float64()))
    'DOUBLE[]'
    """
    return f"{_sql_type(kind.value_type)}[]" if pa.types.is_list(kind) else _SQL_TYPES[str(kind)]


def _make_runs(connection: Any, store: StoreFolder, packs: Sequence[PackNote]) -> None:
    """`runs`: of loose cells from the index, of packed ones from the packs."""
    text = pa.string()
    types = {"key": text, "date": text, "host": text, "seconds": pa.float64(), "records": pa.bool_()}
    entries = store.index.entries("pack IS NULL").values()
    _make_table(connection, "own.runs", types, [[getattr(entry, name) for entry in entries] for name in types])
    whole, partly = packed(store, [note.pack for note in packs], FILES)
    rows = f" UNION ALL SELECT {', '.join(types)} FROM ({union(whole, partly)})" if packs else ""
    connection.execute(f"CREATE VIEW runs AS SELECT * FROM own.runs{rows}")
