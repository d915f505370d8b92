"""`dualview report`: the report and figures of a result, a run's folder, several seeds, or a store."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from dualview.comparison.result import SCHEMA, Result
from dualview.comparison.seeds import SCHEMA as SEEDS_SCHEMA
from dualview.io.atomic import must_be_writable
from dualview.io.errors import UserError
from dualview.io.json_files import Place, check_place, save_json
from dualview.records import Records, load_records
from dualview.report.overview import RunGroup, RunSummary, groups_of, ordered
from dualview.store.paths import StorePaths

RESULT, SEEDS, RECORDS, REPORT = "result.json", "seeds.json", "records.safetensors", "report.html"


def report(
    source: Path | str, out: Path | str | None = None, figures: Path | str | None = None, *, json: Place = None
) -> list[Path]:
    """Write the report of a run or of many, and with `figures` every figure as PDF, SVG and PNG into that folder.

    source    a result's JSON file, the folder a run wrote (its records are used where they were kept), the JSON of
              several seeds, or a store
    out       the HTML file; by default report.html next to the source
    json      a file for the names of all files that were written, or "-" for standard output
    """
    check_place(json)
    written = _write(Path(source), out, figures)
    save_json(json, {"written": [str(path) for path in written]})
    return written


def _write(source: Path, out: Path | str | None, figures: Path | str | None) -> list[Path]:
    if not source.exists():
        raise UserError(f"There is no {source}; give a result's JSON file, a run's folder or a store.")
    file = _file_of(source)
    where = Path(out) if out is not None else _default_place(source, file)
    must_be_writable(where)
    folder = None if figures is None else Path(figures)
    if folder is not None:
        must_be_writable(folder / REPORT)  # any file: the report is not written if the figures cannot be
    if file is None:
        return _many(_stored(source), where, folder, source.name)
    content = _content(file)
    if str(content.get("schema", "")).startswith("dualview.seeds/"):
        return _many(_of_seeds(content, file), where, folder, file.parent.name or "several seeds")
    from dualview.report.figures.run import write_figures
    from dualview.report.html.run import write_report

    result = _checked(content, file)
    records = _records_of(file, result)
    written = [write_report(result, where, records=records)]
    return written if folder is None else [*written, *write_figures(result, folder, records)]


def _file_of(source: Path) -> Path | None:
    """The JSON file of a source; None for a store."""
    if source.is_file():
        return source
    found = next((source / name for name in (RESULT, SEEDS) if (source / name).is_file()), None)
    if found is None and not is_store(source):
        raise UserError(
            f"{source} holds neither {RESULT} nor {SEEDS} and is no store; give a result, a run's folder or a store."
        )
    return found


def is_store(folder: Path) -> bool:
    """Whether a folder is a store, whole or without its marker."""
    paths = StorePaths.of(folder)
    return paths.marker.exists() or paths.cells.is_dir()


def _default_place(source: Path, file: Path | None) -> Path:
    if file is None or file.name in (RESULT, SEEDS):
        return (source if source.is_dir() else source.parent) / REPORT
    return file.with_suffix(".html")


def _records_of(file: Path, result: Result) -> Records | None:
    """The records next to a result; they must be of the same run."""
    path = file.parent / RECORDS
    if file.name != RESULT or not path.is_file():
        return None
    records = load_records(path)
    stated = [np.array(query.zsl, dtype=np.float64) for query in result.queries]  # None is NaN
    if records.n_queries != len(stated) or not all(
        np.allclose(kept[: len(scores)], scores, atol=1e-5, equal_nan=True)
        for kept, scores in zip(records["zsl"].log_probs, stated, strict=True)
    ):
        raise UserError(f"{path} is from another run than {file}; move one of them away.")
    return records


def _stored(folder: Path) -> Iterable[Result]:
    from dualview.store.store import Store

    with Store(folder) as store:
        yield from (_coherent(stored.result, f"{folder}, cell {stored.key[:12]},") for stored in store.results())


def run_groups(store: Path | str) -> list[RunGroup]:
    """The runs of a store in groups that differ only in task and seed: what the figures of many runs draw."""
    folder = Path(store)
    if not is_store(folder):
        raise UserError(f"{folder} is not a store: give the folder that `dualview sweep` wrote.")
    return groups_of(ordered([RunSummary.of(result) for result in _stored(folder)]))


def _many(results: Iterable[Result], where: Path, figures: Path | None, title: str) -> list[Path]:
    from dualview.report.html.store import store_report, write_store_figures

    runs = [RunSummary.of(result) for result in results]
    written = [store_report(runs, where, title=title)]
    return written if figures is None else [*written, *write_store_figures(runs, figures)]


# ----------------------------------------------------------------------------------------------------- reading files
# A damaged file is reported in one sentence that names it. Once a result has passed, an error while its report is made
# is dualview's own, and is not presented as the file's.


def _content(file: Path) -> dict[str, Any]:
    try:
        content: Any = jsonlib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error}); give a result's JSON file.") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a dualview result: it holds no object; give a result's JSON file.")
    return content  # pyright: ignore[reportUnknownVariableType]


def _of_seeds(content: dict[str, Any], file: Path) -> list[Result]:
    """The results of several seeds."""
    _of_schema(content, SEEDS_SCHEMA, file)
    results: Any = content.get("results")
    if not isinstance(results, list) or not results:
        raise UserError(f"{file} holds no results; make the run again.")
    parts: list[Any] = results  # pyright: ignore[reportUnknownVariableType]
    return [_checked(part, f"{file}, result {number},") for number, part in enumerate(parts)]


def _checked(content: Any, where: object) -> Result:
    """The result in a file; `where` is what the sentence calls it."""
    if not isinstance(content, dict) or not str(content.get("schema", "")).startswith("dualview.result/"):  # pyright: ignore
        raise UserError(f"{where} is not a dualview result; give a result's JSON file.")
    _of_schema(content, SCHEMA, where)  # pyright: ignore[reportUnknownArgumentType]
    try:
        return _coherent(Result.model_validate(content), where)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        kinds = {"missing": "is missing", "value_error": first["msg"].removeprefix("Value error, ")}
        raise _lacking(where, f"{place} {kinds.get(first['type'], 'has the wrong type')}") from None


def _of_schema(content: dict[str, Any], schema: str, where: object) -> None:
    if content["schema"] != schema:
        given = content["schema"]
        raise UserError(
            f"{where} is of schema {given} and this dualview reads {schema}; use the version that wrote it."
        )


def _coherent(result: Result, where: object) -> Result:
    """Queries with the same number of scores in every setting, and a correct candidate among them."""
    if not result.queries:
        raise _lacking(where, "queries is empty")
    for number, query in enumerate(result.queries):
        own = {len(query.zsl), len(query.icl), len(query.ft)}
        if len(own) != 1 or not 0 <= query.gold < min(own):
            raise _lacking(where, f"queries.{number}: the settings' scores and the correct candidate do not match")
    return result


def _lacking(where: object, problem: str) -> UserError:
    return UserError(f"{where} lacks what a report needs ({problem}); make the run again.")
