"""Published measurements near a job, with the error of their predictions."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log2
from pathlib import Path

from moewright.spec.plan import Plan

_DATA = Path(__file__).parent / "data" / "published_runs.csv"
_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """A published run, measured and predicted by constants fitted without its publisher.

    Speeds are tokens/s a device; `error` is predicted over measured, less 1. `differs` says in what
    it differs from the job that it is shown for, "" where in nothing that is compared.
    """

    id: str
    model: str
    device: str
    devices: int
    precision: str
    layout: str
    measured: float
    predicted: float
    error: float
    differs: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A row of the table with what is compared."""

    run: PublishedRun
    seq_len: int
    degrees: tuple[int, ...]  # tp, cp, pp, ep


@lru_cache(maxsize=1)
def _read_rows() -> tuple[_Row, ...]:
    """Read the table that `make accuracy` writes beside the page on accuracy."""
    rows = []
    with _DATA.open(encoding="utf-8", newline="") as stream:
        for cells in csv.DictReader(stream):
            run = PublishedRun(
                id=cells["id"],
                model=cells["model"],
                device=cells["device"],
                devices=int(cells["devices"]),
                precision=cells["precision"],
                layout=cells["layout"],
                measured=float(cells["measured"]),
                predicted=float(cells["predicted"]),
                error=float(cells["error"]),
            )
            degrees = tuple(int(cells[key] or 1) for key in ("tp", "cp", "pp", "ep"))
            rows.append(_Row(run=run, seq_len=int(cells["seq_len"] or 0), degrees=degrees))
    return tuple(rows)


def find_nearest_runs(plan: Plan) -> tuple[PublishedRun, ...]:
    """Return the published runs that are most like a plan, the nearest first.

    Distance counts model and device most, then precision, factors of two in devices and degrees,
    and the length of the sequence.
    """
    ordered = sorted(_read_rows(), key=lambda row: (_distance(row, plan), row.run.id))
    return tuple(_describe_difference(row, plan) for row in ordered[:_SHOWN])


def _short(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _has_device(row: _Row, plan: Plan) -> bool:
    return row.run.device.lower() in plan.hardware.device.name.lower()


def _distance(row: _Row, plan: Plan) -> float:
    layout = plan.layout
    degrees = (layout.tp, layout.cp, layout.pp, layout.ep)
    distance = 0.0 if _short(row.run.model) == _short(plan.model.name) else 12.0
    distance += 0.0 if _has_device(row, plan) else 8.0
    distance += 0.0 if row.run.precision == plan.workload.precision.value else 3.0
    distance += 0.5 * abs(log2(row.run.devices / layout.world_size))
    pairs = zip(degrees, row.degrees, strict=True)
    distance += sum(0.5 * abs(log2(own / other)) for own, other in pairs)
    if row.seq_len:
        distance += 0.5 * abs(log2(row.seq_len / plan.workload.seq_len))
    return distance


def _describe_difference(row: _Row, plan: Plan) -> PublishedRun:
    run = row.run
    layout = plan.layout
    degrees = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ep": layout.ep}
    differences = []
    if _short(run.model) != _short(plan.model.name):
        differences.append("another model")
    if not _has_device(row, plan):
        differences.append("another device")
    if run.devices != layout.world_size:
        differences.append(f"{run.devices} devices")
    if run.precision != plan.workload.precision.value:
        differences.append(run.precision)
    for (key, own), other in zip(degrees.items(), row.degrees, strict=True):
        if own != other:
            differences.append(f"{key}{other}")
    if row.seq_len != plan.workload.seq_len:
        differences.append(f"sequence {row.seq_len:,}")
    return replace(run, differs=", ".join(differences))
