"""Every number that records determine: what `dualview run` reports and `dualview metrics` recomputes, by one path."""

from __future__ import annotations

from dataclasses import replace

from dualview.io.json_files import Place, check_place, save_json
from dualview.metrics._blas import one_thread_each
from dualview.metrics.agreement import Agreement
from dualview.metrics.arrays import Backend
from dualview.metrics.floors.controls import ControlOptions, MetricControls, record_tables
from dualview.metrics.floors.tables import RecordTables
from dualview.metrics.kendall import Kendall
from dualview.metrics.measured import Measured
from dualview.metrics.overlap import overlap_controls, overlap_report
from dualview.metrics.summary import NOT_RECORDED, compute_metrics, plain_tables
from dualview.metrics.verdict import ALPHA, judge_one
from dualview.records import Records, as_records


def recompute(records: object, *, json: Place = None) -> Measured:
    """Every metric from records, with controls and the verdict where the run had controls.

    records   a records.safetensors file, `Records`, a result with its records in memory, or a mapping of arrays
    json      a file for the numbers, or "-" for standard output
    """
    check_place(json)
    measured = measure(as_records(records))
    save_json(json, measured.to_json())
    return measured


def measure(records: Records, *, threads: int = 1, device: object = None) -> Measured:
    """Every metric; with its controls and the verdict where control settings were run.

    device   torch's device to compute on, in double precision; None for numpy on the CPU
    """
    with one_thread_each():
        return _measured(records, threads, device)


def _measured(records: Records, threads: int, device: object) -> Measured:
    backend, controlled = Backend(device), has_controls(records)
    tables = record_tables(records, backend) if controlled else plain_tables(records, backend)
    metrics = compute_metrics(records, tables)
    found = metrics.to_json()
    if controlled:
        found |= _with_controls(records, tables, metrics.agreement, threads, backend)
    if records.learners:
        views = {name: records.judged_as_ft(name) for name in records.learners}
        found["learners"] = {name: _measured(view, threads, device) for name, view in views.items()}
    return Measured.model_validate(found)


def has_controls(records: Records) -> bool:
    """Whether the run asked for controls; records that do not say so have them if they hold any other setting."""
    asked = records.meta.get("controls")
    return bool(records.controls) if asked is None else asked != "none"


def _with_controls(
    records: Records, tables: RecordTables, agreed: Agreement, threads: int, backend: Backend
) -> dict[str, object]:
    extra = overlap_controls(records)
    ranks = None if records.token_scores is None else Kendall.of(records.token_scores, threads, backend)
    if ranks is not None:
        extra |= ranks.controls()
    elif not extra:  # records of an earlier version, or built from arrays
        missing = ("token_overlap", "kendall_dual_v")
        extra = {name: MetricControls(name, None, reason=NOT_RECORDED) for name in missing}
    verdict = judge_one(records, ControlOptions(backend=backend), ALPHA, tables, agreed)
    verdict = replace(verdict, by_metric={**verdict.by_metric, **extra})
    return {
        "kendall": None if ranks is None else ranks.to_json(),
        "overlap": overlap_report(records),
        "controls": verdict.controls_json(),
        "verdict": verdict.to_json(),
    }
