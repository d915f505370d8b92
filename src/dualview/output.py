"""What a run leaves in a folder: the result, the tensors if they are to be kept, and the report."""

from __future__ import annotations

from pathlib import Path

from dualview.files import write_json
from dualview.records import save_records
from dualview.report.build import report
from dualview.report.html import write_report
from dualview.result import Result
from dualview.seeds import SeedsResult


def write(result: Result, *, out: Path | None, json: Path | None) -> list[Path]:
    """Write what a run found; the records only if it was told to keep them."""
    written: list[Path] = []
    if out is not None:
        written.append(out / "result.json")
        result.save(written[-1])
        written += _records(result, out)
        written.append(write_report(result, out / "report.html"))
    if json is not None:
        written.append(json)
        write_json(json, result.to_json())
    return written


def write_seeds(several: SeedsResult, *, out: Path | None, json: Path | None) -> list[Path]:
    """Write what several seeds found, with one report; each seed's records in a folder of its own, if to be kept."""
    written: list[Path] = []
    for path in (json, None if out is None else out / "seeds.json"):
        if path is not None:
            several.save(path)
            written.append(path)
    if out is not None:
        for seed, result in zip(several.seeds, several.results, strict=True):
            written += _records(result, out / f"seed-{seed}")
        written += report(out / "seeds.json")
    return written


def _records(result: Result, folder: Path) -> list[Path]:
    if result.records is None or not result.provenance["options"].get("save_records"):
        return []
    return [save_records(result.records, folder / "records.safetensors")]
