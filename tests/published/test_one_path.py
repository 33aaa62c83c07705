"""Every published row through the face that users have: `estimate` says what `validate` says.

A row becomes arguments: its model, layout and hardware, and a job file with what its workload has
that is not the default of jobs. Nothing is said of routing where the row's router decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path

import pytest

import moewright as mw
from moewright.calibration.cross_validate import calibrate_as_shipped
from moewright.calibration.measured_row import MeasuredRow
from moewright.calibration.readings import Reading
from moewright.calibration.score import score_table
from moewright.calibration.table import MeasurementTable, read_table
from moewright.codec import format_layout
from moewright.intake import catalogue
from moewright.spec.workload import Workload

DATA = Path(__file__).parent / "data"
# Sections of a job of their own; rows of published runs say nothing of them.
_SECTIONS = ("data", "checkpoint", "profile")
_HALF = 0.5 - 1e-9


def read_rows(*names: str) -> MeasurementTable:
    return read_table(*(DATA / name for name in names))


def write_job(row: MeasuredRow, workload: Workload, path: Path) -> Path:
    lines = [
        "[model]",
        f'config = "{row.cells["model"]}"',
        "[train]",
        f"seq_len = {workload.seq_len}",
        f"global_batch = {workload.global_batch}",
        *_train_lines(workload, Workload(seq_len=1, global_batch=1)),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _train_lines(record: object, default: object) -> Iterator[str]:
    for field in fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        usual = getattr(default, field.name)
        if field.name in ("seq_len", "global_batch", *_SECTIONS) or value == usual:
            continue
        if is_dataclass(value):
            yield from _train_lines(value, usual)
        else:
            yield f"{field.name} = {_toml(value)}"


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return f'"{value.value}"'
    return repr(value)


def estimate_reading(row: MeasuredRow, reading: Reading, folder: Path) -> float:
    """Return the tokens/s a device that `estimate` says of a row in one reading."""
    job = write_job(row, reading.workload, folder / f"{row.id}.toml")
    layout = format_layout(reading.layout)
    if catalogue.model(row.cells["model"]) == row.model:
        face = mw.estimate(job, layout, on=row.hardware)
    else:  # such as one whose MTP layers were not trained, for which its layout has no place
        bare = Workload(
            seq_len=reading.workload.seq_len,
            global_batch=reading.workload.global_batch,
            precision=reading.workload.precision,
        )
        if bare == reading.workload:
            face = mw.estimate(
                row.model,
                layout,
                on=row.hardware,
                seq_len=bare.seq_len,
                global_batch=bare.global_batch,
                precision=bare.precision,
            )
        else:
            own = mw.estimate(job, "mbs1", on=row.hardware)
            face = mw.estimate(replace(own, model=row.model), layout, on=row.hardware)
    assert face.workload == reading.workload
    return face.estimate.tokens_per_s_per_device


def estimate_row(row: MeasuredRow, folder: Path) -> float:
    """Return the median over the likely readings of a row, as `validate` does."""
    readings = row.readings or (Reading(share=1.0, workload=row.workload, layout=row.layout),)
    speeds = sorted(
        ((estimate_reading(row, reading, folder), reading.share) for reading in readings),
        reverse=True,
    )
    below = 0.0
    for speed, share in speeds:
        below += share
        if below >= _HALF:
            return speed
    return speeds[-1][0]


def check(table: MeasurementTable, ids: list[str], folder: Path) -> None:
    rows = tuple(row for row in table.rows if row.id in ids)
    chosen = replace(table, rows=rows, skipped=(), order=tuple(ids))
    scored = {row.id: row for row in score_table(chosen, calibrate_as_shipped).rows}
    for row in rows:
        expected = scored[row.id].predicted_tokens_per_s_per_gpu
        assert estimate_row(row, folder) == pytest.approx(expected, rel=1e-9), row.id


def list_timed(table: MeasurementTable) -> list[str]:
    return [row.id for row in table.rows if row.speed is not None]


def test_a_sample_of_rows_is_estimated_as_validated(tmp_path: Path) -> None:
    table = read_rows("measurements.csv")
    natural = ["seed000-016", "zoo-008", "mvc-028"]
    check(table, [*natural, *list_timed(table)[::70]], tmp_path)


@pytest.mark.thorough
def test_every_row_is_estimated_as_validated(tmp_path: Path) -> None:
    table = read_rows("measurements.csv", "measurements_more.csv", "blind_runs.csv")
    check(table, list_timed(table), tmp_path)
