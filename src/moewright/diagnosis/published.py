"""Published measurements near a job, with the error of their predictions."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from math import log2
from pathlib import Path

from moewright.rules.shapes.flops import model_flops_per_token
from moewright.spec.plan import Plan
from moewright.spec.units import plural
from moewright.spec.workload import Routing

_DATA = Path(__file__).parent / "data" / "published_runs.csv"
_SHOWN = 3  # of which the first is nearest
# What counts for the distance of two jobs: factors of two in devices, degrees and lengths by half.
_OTHER_MODEL = 6.0  # and a factor of two in the FLOPs of a token by 2, up to _FARTHEST_SIZE
_FARTHEST_SIZE = 6.0
_OTHER_KIND = 4.0  # experts in one of the two
_OTHER_DEVICE = 8.0
_OTHER_PRECISION = 3.0
_HALF = 0.5


class Nearness(StrEnum):
    """How much of a job a published run shares."""

    SAME = "the same job"
    NEAR = "near"  # the model and the device
    RELATED = "related"  # the model or the device
    FAR = "far"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """A published run, measured and predicted by constants fitted without its publisher.

    Speeds are tokens/s a device; `error` is predicted over measured, less 1. `mfu` is of the bf16
    peak by our count of model FLOPs, 0 where it is not known. `differs` says in what it differs
    from the job that it is shown for, "" where in nothing that is compared.
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
    mfu: float = 0.0
    source: str = ""
    is_balanced: bool = False  # the load of the experts was forced to be even
    nearness: Nearness = Nearness.FAR


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A row of the table with what is compared."""

    run: PublishedRun
    seq_len: int
    degrees: tuple[int, ...]  # tp, cp, pp, ep
    flops_per_token: float  # 0: not known
    has_experts: bool


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
                mfu=float(cells["mfu"] or 0),
                source=cells["source"],
                is_balanced=cells["load"] == Routing.BALANCED,
            )
            rows.append(
                _Row(
                    run=run,
                    seq_len=int(cells["seq_len"] or 0),
                    degrees=tuple(int(cells[key] or 1) for key in ("tp", "cp", "pp", "ep")),
                    flops_per_token=float(cells["flops_per_token"] or 0),
                    has_experts=bool(cells["ep"]),
                )
            )
    return tuple(rows)


def find_published_run(run_id: str) -> PublishedRun | None:
    """Return the published run of an id; None where there is none."""
    return next((row.run for row in _read_rows() if row.run.id == run_id), None)


def find_nearest_runs(plan: Plan, count: int = _SHOWN) -> tuple[PublishedRun, ...]:
    """Return the published runs that are most like a plan, the nearest first.

    Distance counts model and device most, then precision, factors of two in devices and degrees,
    and the length of the sequence. Another model is the nearer the more alike the FLOPs of a token.
    """
    flops = model_flops_per_token(plan.model, plan.workload.seq_len)
    ordered = sorted(_read_rows(), key=lambda row: (_distance(row, plan, flops), row.run.id))
    return tuple(_describe_difference(row, plan) for row in ordered[:count])


def find_fastest_run(plan: Plan) -> PublishedRun | None:
    """Return the published run of a plan's model, part and precision with the highest speed.

    Sequences are as long, within a factor of two. None where nobody published one.
    """
    rows = [
        row
        for row in _read_rows()
        if _has_model(row, plan)
        and _has_device(row, plan)
        and _has_format(row.run, plan)
        and row.seq_len
        and abs(log2(row.seq_len / plan.workload.seq_len)) <= 1
    ]
    if not rows:
        return None
    return _describe_difference(max(rows, key=lambda row: row.run.measured), plan)


def _short(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _has_model(row: _Row, plan: Plan) -> bool:
    return _short(row.run.model) == _short(plan.model.name)


def _has_device(row: _Row, plan: Plan) -> bool:
    return row.run.device.lower() in plan.hardware.device.name.lower()


def _has_format(run: PublishedRun, plan: Plan) -> bool:
    """Return whether a run multiplied numbers of a plan's format, whatever their scales.

    Sources write scales beside the format: "fp8 (current scaling)", "fp8-blockwise"; those that say
    nothing may have had any.
    """
    if not run.precision:
        return True
    return re.split(r"[^a-z0-9]", run.precision, maxsplit=1)[0] == plan.workload.precision.value


def _distance(row: _Row, plan: Plan, flops_per_token: float) -> float:
    layout = plan.layout
    degrees = (layout.tp, layout.cp, layout.pp, layout.ep)
    distance = 0.0 if _has_model(row, plan) else _model_distance(row, plan, flops_per_token)
    distance += 0.0 if _has_device(row, plan) else _OTHER_DEVICE
    distance += 0.0 if _has_format(row.run, plan) else _OTHER_PRECISION
    distance += _HALF * abs(log2(row.run.devices / layout.world_size))
    pairs = zip(degrees, row.degrees, strict=True)
    distance += sum(_HALF * abs(log2(own / other)) for own, other in pairs)
    if row.seq_len:
        distance += _HALF * abs(log2(row.seq_len / plan.workload.seq_len))
    return distance


def _model_distance(row: _Row, plan: Plan, flops_per_token: float) -> float:
    distance = _OTHER_MODEL
    if row.has_experts != (plan.model.moe is not None):
        distance += _OTHER_KIND
    if not row.flops_per_token:
        return distance + _FARTHEST_SIZE
    return distance + min(_FARTHEST_SIZE, 2 * abs(log2(row.flops_per_token / flops_per_token)))


def _describe_difference(row: _Row, plan: Plan) -> PublishedRun:
    run = row.run
    layout = plan.layout
    degrees = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ep": layout.ep}
    differences = []
    shared = 0
    if _has_model(row, plan):
        shared += 1
    else:
        differences.append("another model")
    if _has_device(row, plan):
        shared += 1
    else:
        differences.append("another device")
    if run.devices != layout.world_size:
        differences.append(plural(run.devices, "device"))
    if not _has_format(run, plan):
        differences.append(run.precision)
    for (key, own), other in zip(degrees.items(), row.degrees, strict=True):
        if own != other:
            differences.append(f"{key}{other}")
    if row.seq_len != plan.workload.seq_len:
        differences.append(f"sequence {row.seq_len:,}")
    nearness = (Nearness.FAR, Nearness.RELATED, Nearness.NEAR)[shared]
    if not differences:
        nearness = Nearness.SAME
    return replace(run, differs=", ".join(differences), nearness=nearness)
