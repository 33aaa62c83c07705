"""Hardware as a trace shows it: the constants of a plan from one traced step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from moewright.calibration.fit_inputs import is_other_hardware
from moewright.calibration.measured_row import MeasuredRow
from moewright.calibration.own_runs import row_from_run, row_from_step
from moewright.calibration.traced_step import TracedSeconds, calibrate_on_trace
from moewright.codec import PLAN_FILE, read_json, read_run
from moewright.codec.run_files import TRACE_FOLDER
from moewright.diagnosis.traces.breakdown import Breakdown, break_down_step
from moewright.diagnosis.traces.capture import Capture, KernelKind
from moewright.diagnosis.traces.comm_classes import CommClass
from moewright.diagnosis.traces.rank_skew import measure_comm, measure_rank_skew
from moewright.diagnosis.traces.trace_files import read_captures
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout, Overlap
from moewright.spec.plan import Plan

_OPTION = "--from-trace"
_STEPS_FILE = "steps.jsonl"
# Names of the kernels of an update: torch's fused and looped ones, Apex', Transformer Engine's.
_UPDATE_KERNEL = re.compile(r"multi_tensor|adam|addcdiv|muon|newton|optimi[sz]er|sgd|lamb_", re.I)


def calibrate_from_trace(path: Path, hardware: Hardware) -> tuple[Hardware, str]:
    """Return the hardware with constants from a traced step, and a line that says what they are.

    `path` is the folder of a run of this engine with traces, or a trace (or a folder of them) with
    the plan of its job beside it, as `estimate --json plan.json` writes it.

    Raises:
        BadInput: there is no trace of marked steps, its job is not known or another, or it ran on
            other devices.
    """
    row, captures = _read_step(path)
    if is_other_hardware(row, hardware):
        rule = f"was traced on {row.hardware.name}, not on {hardware.name}"
        raise BadInput(Reason(field=f"{_OPTION} {path}", rule=rule))
    breakdowns = [break_down_step(capture, row.layout) for capture in captures]
    traced = _measure_kinds(captures, breakdowns, row.layout)
    calibrated, factors = calibrate_on_trace(hardware, row, traced)
    if not factors:
        rule = f"has no kernels of the job that {PLAN_FILE} states: none takes 0.1 to 10 x as long"
        raise BadInput(Reason(field=f"{_OPTION} {path}", rule=rule))
    told = ", ".join(f"{item.kind} x {item.factor:.2f}" for item in factors)
    if not traced.has_update:
        told += "; it holds no update of weights, so that its length is not taken for a step's"
    line = f"constants of {path}: {told} ({_OPTION})"
    return calibrated, line


def _read_step(path: Path) -> tuple[MeasuredRow, tuple[Capture, ...]]:
    """Return the traced step as a measured row, and its captures, all with marked steps."""
    folder = path if path.is_dir() else path.parent
    if not path.exists() or not (folder / PLAN_FILE).is_file():
        rule = f"needs a trace that is there, with its job as {PLAN_FILE} beside it"
        nearest = f"moewright estimate MODEL --on DEVICES --layout TEXT --json {folder / PLAN_FILE}"
        raise BadInput(Reason(field=f"{_OPTION} {path}", rule=rule, nearest=nearest))
    is_run = path.is_dir() and (path / _STEPS_FILE).is_file()
    if is_run and not (path / TRACE_FOLDER).is_dir():
        rule = "is a run without traces"
        nearest = "train.profile of its job, or moewright fit"
        raise BadInput(Reason(field=f"{_OPTION} {path}", rule=rule, nearest=nearest))
    captures = read_captures(path / TRACE_FOLDER if is_run else path)
    if not all(capture.steps for capture in captures):
        rule = "marks no steps (ProfilerStep, or ranges of NVTX)"
        raise BadInput(Reason(field=f"{_OPTION} {path}", rule=rule))
    if is_run:
        return row_from_run(read_run(path), name=path.name), captures
    plan = read_json(Plan, folder / PLAN_FILE)
    step_s = fmean(break_down_step(capture).step_s for capture in captures)
    return row_from_step(plan, step_s, name=path.name, origin="traced steps"), captures


def _measure_kinds(
    captures: Sequence[Capture], breakdowns: Sequence[Breakdown], layout: Layout
) -> TracedSeconds:
    """Return the seconds a step of each kind of work, on the rank that computes longest.

    Exchanges are told by the traces of several ranks alone: a single one does not say how long it
    waited for others.
    """
    longest = max(breakdowns, key=lambda breakdown: breakdown.compute_s)
    seconds = dict(longest.kind_times)
    skew = measure_rank_skew(captures, breakdowns, layout)

    def measure(comm: CommClass, overlap: Overlap) -> float:
        # What runs beside compute takes longer than it would alone.
        if skew is None or overlap in layout.overlap:
            return 0.0
        return max(0.0, measure_comm(breakdowns, skew, comm).own_s)

    return TracedSeconds(
        products=seconds.get(KernelKind.GEMM, 0.0),
        grouped=seconds.get(KernelKind.GROUPED_GEMM, 0.0),
        attention=seconds.get(KernelKind.ATTENTION, 0.0),
        other=seconds.get(KernelKind.OTHER, 0.0),
        exchange=measure(CommClass.EP, Overlap.EP),
        tensor=measure(CommClass.TP, Overlap.TP),
        has_update=any(map(_holds_update, captures)),
    )


def _holds_update(capture: Capture) -> bool:
    ranges = () if capture.host_ranges is None else capture.host_ranges.names
    return any(_UPDATE_KERNEL.search(name) for name in (*capture.kernels.names, *ranges))
