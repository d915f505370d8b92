"""The files of a run: the result, the records if they are kept, and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from dualview.comparison.result import Result
from dualview.comparison.seeds import SeedsResult
from dualview.io.saving import extra, save_somewhere, save_to_temporary, warn_extra
from dualview.records import save_records
from dualview.report.build import report
from dualview.report.html.run import write_report


def write(result: Result, *, out: Path | None, json: Path | None) -> list[Path]:
    """Write what a run found: the result first, then the extras (records if they are kept, the report)."""
    written = save_somewhere(_places(out, "result.json", json), result.save)
    if out is not None:
        written += _write_records(result, out, written[0])
        page = out / "report.html"
        written += _extra(page, lambda: [write_report(result, page)], written[0])
    return written


def write_seed(seed: int, result: Result, *, out: Path) -> list[Path]:
    """Write one of several seeds as soon as it is computed: a later seed that fails, or is interrupted, costs none."""
    folder = out / f"seed-{seed}"
    written = save_somewhere([folder / "result.json"], result.save)
    return written + _write_records(result, folder, written[0])


def rescue_seeds(finished: Mapping[int, Result]) -> None:
    """Keep the seeds that were finished before one failed, where no folder was given for them."""
    for seed, result in finished.items():
        warn_extra(f"seed {seed} was finished; {save_to_temporary(f'seed-{seed}.json', result.save)}.")


def write_seeds(several: SeedsResult, *, out: Path | None, json: Path | None) -> list[Path]:
    """Write what several seeds found together, with one report; `write_seed` has written each of them."""
    written = save_somewhere(_places(out, "seeds.json", json), several.save)
    if out is not None:
        page, source = out / "report.html", written[0]
        written += _extra(page, lambda: report(source, page), source)
    return written


def _places(out: Path | None, name: str, json: Path | None) -> list[Path]:
    return [place for place in (out and out / name, json) if place is not None]


def _write_records(result: Result, folder: Path, kept: Path) -> list[Path]:
    path = folder / "records.safetensors"
    # Asked for only if they are written: they may have to be fetched from a GPU.
    records = result.records if result.provenance.options.get("save_records") else None
    if records is None:
        return []
    return _extra(path, lambda: [save_records(records, path)], kept)


def _extra(path: Path, work: Callable[[], list[Path]], kept: Path) -> list[Path]:
    return extra(f"Writing {path}", work, kept) or []
