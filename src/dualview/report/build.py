"""`dualview report`: from a result, a folder of one, several seeds, or a store, to a report and its figures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dualview.comparison.result import Result
from dualview.io.atomic import must_be_writable
from dualview.io.errors import UserError
from dualview.records import Records, load_records
from dualview.report.needs import checked, holds_seeds, read_results
from dualview.store.paths import StorePaths

RESULT, SEEDS, RECORDS, REPORT = "result.json", "seeds.json", "records.safetensors", "report.html"


def report(source: Path | str, out: Path | str | None = None, figures: Path | str | None = None) -> list[Path]:
    """Write the report of a run or of many, and with `figures` every figure as PDF, SVG and PNG into that folder.

    source    a result's JSON file, the folder a run wrote (its records are used where they were kept), the JSON of
              several seeds, or a store
    out       the HTML file; by default report.html beside what it reports
    """
    source = Path(source)
    if not source.exists():
        raise UserError(f"There is no {source}; give a result's JSON file, a run's folder or a store.")
    file = _file_of(source)
    where = Path(out) if out is not None else _beside(source, file)
    must_be_writable(where)
    folder = None if figures is None else Path(figures)
    if file is None:
        return _many(_stored(source), where, folder, source.name)
    if holds_seeds(file):
        return _many(read_results(file), where, folder, file.parent.name or "several seeds")
    (result,) = read_results(file)
    return _one(result, _records_of(file, result), where, folder)


def _file_of(source: Path) -> Path | None:
    """The JSON file that is meant; None for a store."""
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


def _beside(source: Path, file: Path | None) -> Path:
    if file is None or file.name in (RESULT, SEEDS):
        return (source if source.is_dir() else source.parent) / REPORT
    return file.with_suffix(".html")


def _records_of(file: Path, result: Result) -> Records | None:
    """What lies beside a result, if it is of the same run."""
    path = file.parent / RECORDS
    if file.name != RESULT or not path.is_file():
        return None
    records = load_records(path)
    same = records.n_queries == len(result.queries)
    if same:
        told = [[np.nan if x is None else x for x in query.zsl] for query in result.queries]
        kept = [row[: len(own)] for row, own in zip(records["zsl"].log_probs, told, strict=True)]
        same = all(np.allclose(a, b, atol=1e-5, equal_nan=True) for a, b in zip(kept, told, strict=True))
    if not same:
        raise UserError(f"{path} is of another run than {file}; move one of them away.")
    return records


def _one(result: Result, records: Records | None, where: Path, figures: Path | None) -> list[Path]:
    from dualview.report.html import write_report

    written = [write_report(result, where, records=records)]
    if figures is not None:
        from dualview.report.figures.run import write_figures

        written += write_figures(result, figures, records)
    return written


def _stored(folder: Path) -> Iterable[Result]:
    from dualview.store.store import Store

    with Store(folder) as store:
        yield from (checked(stored.result, f"{folder}, cell {stored.key[:12]},") for stored in store.results())


def _many(results: Iterable[Result], where: Path, figures: Path | None, title: str) -> list[Path]:
    from dualview.report.overview import Run
    from dualview.report.store_report import store_report, write_store_figures

    runs = [Run.of(result) for result in results]
    written = [store_report(runs, where, title=title)]
    return written if figures is None else [*written, *write_store_figures(runs, figures)]
