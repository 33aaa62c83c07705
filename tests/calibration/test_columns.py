"""Tables as other people write them read like this project's own."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from moewright.calibration.columns import canonical_cell, canonical_column
from moewright.calibration.table import MeasurementTable, read_table
from moewright.codec import format_layout
from moewright.spec.layout import CudaGraphScope, DispatcherKind
from moewright.spec.workload import Dtype

ROW = {
    "model": "Qwen3-235B-A22B",
    "hardware": "H800",
    "num_gpus": "256",
    "precision": "bf16",
    "time_per_iter_s": "22.42",
}
JOB = {"seq_len": "4096", "gbs": "2048", "mbs": "1", "tp": "2", "pp": "32", "vpp": "3", "ep": "8"}


def read(folder: Path, row: dict[str, str], *, encoding: str = "utf-8") -> MeasurementTable:
    path = folder / "runs.csv"
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    return read_table(path)


@pytest.mark.parametrize(
    ("column", "text", "same"),
    [
        ("num_gpus", "1,024", "1024"),
        ("mbs", "1.0", "1"),
        ("seq_len", "4k", "4096"),
        ("seq_len", "128 K", "131072"),
        ("tflops_per_gpu", "1,234.5", "1234.5"),
        ("ep", "nan", ""),
        ("dispatcher", "N/A", ""),
        ("recompute_granularity", "none", "none"),  # says something
        ("oom", "TRUE", "true"),
        ("sp", "0", "false"),
        ("gbs", "1,2", "1,2"),  # no number of anybody's: refused later, by name
    ],
)
def test_cells(column: str, text: str, same: str) -> None:
    assert canonical_cell(column, text) == same


def test_columns() -> None:
    names = (
        "Micro Batch Size",
        "global-batch-size",
        "num_gpus",
        "Sequence Length",
        "TFLOPs",
        "notes",
    )
    assert [canonical_column(name) for name in names] == [
        "mbs",
        "gbs",
        "num_gpus",
        "seq_len",
        "tflops_per_gpu",
        "notes",
    ]


def test_a_table_of_a_data_frame_is_the_same_run(tmp_path: Path) -> None:
    (plain,) = read(tmp_path, {"id": "a", **ROW, **JOB}).rows
    floats = {name: f"{value}.0" for name, value in JOB.items()}
    (spelt,) = read(
        tmp_path, {"ID": "a", **ROW, **floats, "etp": "nan", "oom": "False"}, encoding="utf-8-sig"
    ).rows
    assert (spelt.layout, spelt.workload, spelt.speed) == (
        plain.layout,
        plain.workload,
        plain.speed,
    )


def test_a_layout_column_fills_what_is_empty(tmp_path: Path) -> None:
    text = "tp2,ep8,pp32,vpp3,mbs1,dispatcher=deepep,graphs=attn,recompute=moe_act"
    (row,) = read(tmp_path, {**ROW, "seq_len": "4096", "gbs": "2048", "layout": text}).rows
    assert row.id == "@line2"
    assert row.layout.dispatcher is DispatcherKind.DEEPEP
    assert row.layout.graphs == (CudaGraphScope.ATTN,)
    assert (
        format_layout(row.layout)
        == "tp2,pp32,vpp3,ep8,mbs1,dispatcher=deepep,recompute=moe_act,graphs=attn"
    )
    for recompute in ("full", "full+loss", "loss", "layernorm+loss"):
        cells = {
            **ROW,
            "seq_len": "4096",
            "gbs": "2048",
            "layout": f"tp2,ep8,pp32,vpp3,mbs1,recompute={recompute}",
        }
        (row,) = read(tmp_path, cells).rows
        assert "+".join(row.layout.recompute) == recompute
    (bad,) = read(tmp_path, {**ROW, "seq_len": "4096", "gbs": "2048", "layout": "tq2"}).skipped
    assert "tq" in bad.reason


def test_an_implied_precision_is_taken_and_listed(tmp_path: Path) -> None:
    """The tables of this page have no precision column; data/sources.toml says what it implies."""
    page = "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md, 25.09 NeMo Container"
    (row,) = read(tmp_path, {**ROW, **JOB, "precision": "", "source": page}).rows
    assert row.workload.precision is Dtype.FP8
    assert "precision" in row.unstated
    (skipped,) = read(tmp_path, {**ROW, **JOB, "precision": ""}).skipped
    assert skipped.reason == "precision: is not stated"
