"""What a run leaves in a folder: the result, the tensors if they are to be kept, and the report."""

from __future__ import annotations

from pathlib import Path

from dualview.files import write_json
from dualview.records import save_records
from dualview.report.html import write_report
from dualview.result import Result


def write(result: Result, *, out: Path | None, json: Path | None) -> list[Path]:
    """Write what a run found; the records only if it was told to keep them."""
    written: list[Path] = []
    if out is not None:
        written.append(out / "result.json")
        result.save(written[-1])
        if result.records is not None and result.provenance["options"].get("save_records"):
            written.append(out / "records.safetensors")
            save_records(result.records, written[-1])
        written.append(write_report(result, out / "report.html"))
    if json is not None:
        written.append(json)
        write_json(json, result.to_json())
    return written
