"""Tables of measured runs, as CSV files whose columns docs/tables.md describes.

A row that cannot be scored is skipped with its reason.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from moewright.calibration.columns import (
    COLUMNS,
    NEEDED_COLUMNS,
    OVERLAP_COLUMNS,
    canonical_cell,
    canonical_column,
    fill_from_layout,
)
from moewright.calibration.measured_row import MeasuredRow, parse_row
from moewright.codec.foreign import budget, read_apart
from moewright.spec.errors import BadInput, Reason, escape_controls
from moewright.spec.hardware import Hardware

# Rows that report the same measurement twice, and rows that contradict each other.

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


def find_lone_devices(rows: Sequence[MeasuredRow]) -> Iterator[str]:
    """Describe rows that state more devices of a node or domain than their hardware joins.

    Without a network a part has its data sheet's: a GH200 is a server of its own.
    """
    lone: dict[tuple[str, int, int], list[str]] = {}
    for row in rows:
        texts = [row.cells.get(column, "") for column in ("gpus_per_node", "nvlink_domain")]
        stated = max((int(text) for text in texts if text.isdecimal()), default=1)
        joined = row.hardware.fabric.domain_size
        if joined < min(stated, row.hardware.count) and not row.cells.get("network"):
            lone.setdefault((row.hardware.device.name, stated, joined), []).append(row.id)
    for (device, stated, joined), ids in lone.items():
        among = f"{ids[0]} and {len(ids) - 1} more" if len(ids) > 1 else ids[0]
        yield (
            f"{among}: {stated} {device} of a node are stated, and fast links join {joined} of"
            " them, as no network is named; the column network names what joins them"
        )


def _speed_ratio(first: MeasuredRow, second: MeasuredRow) -> float:
    """Return the larger speed over the smaller one; 1 where one is not known."""
    if first.speed is None or second.speed is None:
        return 1.0
    ratio = first.speed.tokens_per_s_per_device / second.speed.tokens_per_s_per_device
    return max(ratio, 1 / ratio)


_FIRST_LINE = 2  # of the rows; the header is line 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedRow:
    """A row that is left out, with the reason."""

    id: str
    cells: Mapping[str, str]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementTable:
    """The rows of a table, in the order of the file.

    `order` holds all ids, made unique by their line where the file repeats one; `contradictions`
    describes pairs of rows that state the same job and differ, `lone_devices` those whose hardware
    joins fewer devices than they state.
    """

    order: tuple[str, ...]
    rows: tuple[MeasuredRow, ...]
    skipped: tuple[SkippedRow, ...]
    contradictions: tuple[str, ...]
    lone_devices: tuple[str, ...] = ()


def read_table(*paths: Path, user_hardware: Sequence[Hardware] = ()) -> MeasurementTable:
    """Read the rows of tables, one after another; a bad row is skipped, not raised.

    `user_hardware` are parts besides the catalogue's that the hardware column may name.

    Raises:
        BadInput: a file is no such table.
    """
    rows: list[MeasuredRow] = []
    skipped: list[SkippedRow] = []
    order: dict[str, None] = {}
    for number, cells in _read_cells(paths):
        cells["id"] = escape_controls(cells["id"])
        if not cells["id"] or cells["id"] in order:
            cells["id"] = f"{cells['id']}@line{number}"
        order[cells["id"]] = None
        try:
            cells = fill_from_layout(cells)
            rows.append(parse_row(cells, user_hardware))
        except BadInput as error:
            skipped.append(SkippedRow(id=cells["id"], cells=cells, reason=str(error)))
    marked = tuple(mark_duplicates(rows))
    return MeasurementTable(
        order=tuple(order),
        rows=marked,
        skipped=tuple(skipped),
        contradictions=tuple(find_contradictions(marked)),
        lone_devices=tuple(find_lone_devices(marked)),
    )


def _read_cells(paths: Sequence[Path]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the cells of every line of the tables, with its number in its file."""
    for path in paths:
        lines = _read_lines(path)
        titles = {title: canonical_column(title) for title in next(iter(lines), ()) if title}
        _require_columns(set(titles.values()), path)
        for number, line in enumerate(lines, _FIRST_LINE):
            yield number, _canonical_cells(line, titles)


@read_apart
def _read_lines(path: Path) -> list[dict[str, str]]:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise _table_error(path, "is not a regular file")
    try:
        with (
            # Spreadsheets begin a file with a byte-order mark; csv reads line ends itself.
            path.open(encoding="utf-8-sig", newline="") as file,
            budget(str(path), file_bytes=path.stat().st_size),
        ):
            return list(csv.DictReader(file))
    except OSError as error:
        raise _table_error(path, error.strerror or "cannot be read") from None
    except (UnicodeDecodeError, csv.Error):
        raise _table_error(path, "is no CSV text in UTF-8") from None


def _require_columns(columns: Collection[str], path: Path) -> None:
    missing = [column for column in NEEDED_COLUMNS if column not in columns]
    if missing:
        needed = ", ".join(NEEDED_COLUMNS)
        rule = f"needs rows under a header with {needed}; missing: {', '.join(missing)}"
        raise _table_error(path, rule)


def _table_error(path: Path, rule: str) -> BadInput:
    return BadInput(Reason(field="table", value=str(path), rule=rule))


def _canonical_cells(line: Mapping[str, str], titles: Mapping[str, str]) -> dict[str, str]:
    """Return the cells of a line by column, "" for what the line does not state.

    A column that stands under its own name is not overruled by one under another name.
    """
    cells = dict.fromkeys(COLUMNS, "")
    own_names_last = sorted(titles.items(), key=lambda pair: pair[0] == pair[1])
    for title, column in own_names_last:
        cells[column] = canonical_cell(column, line[title] or "") or cells.get(column, "")
    return cells
