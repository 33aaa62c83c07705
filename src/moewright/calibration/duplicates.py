"""Rows that report the same measurement twice, and rows that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from moewright.calibration.columns import OVERLAP_COLUMNS
from moewright.calibration.measured_row import MeasuredRow

CONTRADICTION_RATIO = 1.1  # speeds of one job whose ratio is larger contradict each other
# The columns in which two reports of one measurement agree.
_REPORTED_COLUMNS = (
    "hardware",
    "num_gpus",
    "precision",
    "seq_len",
    "gbs",
    "tp",
    "pp",
    "ep",
    "tflops_per_gpu",
)
# The columns that make two rows the same job.
_JOB_COLUMNS = (
    "hardware",
    "num_gpus",
    "precision",
    "seq_len",
    "gbs",
    "mbs",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "etp",
    "fsdp",
    "recompute_granularity",
    "recompute_modules",
    "offload",
    "cuda_graph",
    "dispatcher",
    *OVERLAP_COLUMNS.values(),
    "force_balance",
    "capacity_factor",
    "pp_layout",
)


def mark_duplicates(rows: Sequence[MeasuredRow]) -> Iterator[MeasuredRow]:
    """Mark rows of other sources that print the same TFLOP/s of the same job as an earlier row."""
    first_report: dict[tuple[str, ...], MeasuredRow] = {}
    for row in rows:
        if row.speed is None or not row.cells["tflops_per_gpu"]:
            yield row
            continue
        report = row.model.name, *(row.cells[column] for column in _REPORTED_COLUMNS)
        earlier = first_report.setdefault(report, row)
        if earlier.cells["source"] == row.cells["source"]:
            yield row
        else:
            yield replace(row, duplicate_of=earlier.id)


def find_contradictions(rows: Sequence[MeasuredRow]) -> Iterator[str]:
    """Describe pairs of rows of the same job whose speeds differ by more than a tenth.

    No model can fit both rows of such a pair.
    """
    rows_of_job: dict[tuple[str, ...], list[MeasuredRow]] = {}
    for row in rows:
        if row.speed and not row.duplicate_of:
            job = (
                row.model.name,
                str(row.model.mtp_layers),
                *(row.cells[column] for column in _JOB_COLUMNS),
            )
            rows_of_job.setdefault(job, []).append(row)
    for same_job in rows_of_job.values():
        for first, second in combinations(same_job, 2):
            ratio = _speed_ratio(first, second)
            if ratio > CONTRADICTION_RATIO:
                yield (
                    f"{first.id} ({first.release_family}) and "
                    f"{second.id} ({second.release_family}): {ratio:.2f} x apart"
                )


def _speed_ratio(first: MeasuredRow, second: MeasuredRow) -> float:
    """Return the larger speed over the smaller one; 1 where one is not known."""
    if first.speed is None or second.speed is None:
        return 1.0
    ratio = first.speed.tokens_per_s_per_device / second.speed.tokens_per_s_per_device
    return max(ratio, 1 / ratio)
