"""`moewright diagnose`: which wall holds a run back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import Dtype

if TYPE_CHECKING:
    from rich.console import Console

    from moewright.diagnosis.priced_fixes import PricedJob
    from moewright.diagnosis.traces.megatron_log import MegatronLog
    from moewright.spec.plan import Plan

PLAN_FILE, TRACE_FOLDER, MERGED_TRACE_FILE = "plan.json", "trace", "trace.json"  # of a run's folder
_SQLITE = b"SQLite format 3\0"


def diagnose(
    run: Path,
    /,
    *,
    script: Path | None = None,
    model: str = "",
    on: str = "",
    layout: str = "",
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Dtype | None = None,
) -> int:
    """Name the wall that holds a run back, with its evidence, where the step goes, and what to
    change next.

    Fixes stand in the order of trying; where the job is known (a run of ours, or MODEL, hardware
    and layout given here) each says what the planner expects of it.

    Parameters
    ----------
    run
        The folder of a run, as `moewright train --out` made it; a trace of the PyTorch profiler (.json, .json.gz) or
        a folder of them, one a rank; an Nsight Systems export (.sqlite); or a console log of Megatron-LM.
    script
        Of a trace or a log: the Megatron-LM launch script of the run, which tells model, batch and layout.
    model
        Of a trace or a log: the model trained, a name or a config.json; or a job .toml.
    on
        Of a trace or a log: the devices, count x device.
    layout
        Of a trace or a log: the layout trained, such as "tp2,ep8,pp4".
    seq_len
        Tokens a sequence, with --model.
    global_batch
        Sequences a step, with --model.
    precision
        Compute precision, with --model.
    """
    from moewright.codec import read_json
    from moewright.report.console import make_console
    from moewright.spec.plan import Plan

    console = make_console(sys.stdout)
    if (run / PLAN_FILE).exists():
        return _own_run(console, run)
    if script is not None:
        if layout:
            raise BadInput(
                Reason(
                    field="--layout",
                    value=layout,
                    rule="cannot stand beside --script, which tells it",
                )
            )
        known: PricedJob | None = _of_script(console, script, model, on)
    else:
        known = _known(model, on, layout, seq_len, global_batch, precision)
    if not run.exists():
        raise BadInput(Reason(field=str(run), rule="no such run folder, trace or log"))
    if run.name == MERGED_TRACE_FILE and (run.parent / TRACE_FOLDER).is_dir():
        run = run.parent / TRACE_FOLDER  # the same, rank by rank
    if known is None and (run.parent / PLAN_FILE).exists():
        known = _of_plan(read_json(Plan, run.parent / PLAN_FILE))
    if run.is_dir() or run.name.endswith((".json", ".json.gz", ".gz")) or _is_sqlite(run):
        return _traces(console, run, known)
    return _log(console, run, known, model, on)


def _is_sqlite(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(_SQLITE)) == _SQLITE


def _known(
    model: str,
    on: str,
    layout: str,
    seq_len: int | None,
    global_batch: int | None,
    precision: Dtype | None,
) -> PricedJob | None:
    """The job as the options tell it; None when no model is given."""
    from moewright.cli.plan_request import read_plan_request, to_options, translate_fields
    from moewright.codec import parse_layout
    from moewright.cost.estimate import estimate
    from moewright.diagnosis.priced_fixes import PricedJob

    if not model:
        given = [name for name, value in (("--layout", layout), ("--seq-len", seq_len)) if value]
        if given:
            raise BadInput(Reason(field=given[0], rule="needs --model beside it"))
        return None
    asked = read_plan_request(
        model, on=on, seq_len=seq_len, global_batch=global_batch, precision=precision
    )
    with translate_fields(to_options("--layout")):
        chosen = parse_layout(layout or asked.layout_text, world_size=asked.hardware.count)
        found = estimate(asked.model, asked.workload, asked.hardware, chosen)
    return PricedJob(
        model=asked.model,
        workload=asked.workload,
        hardware=asked.hardware,
        layout=chosen,
        estimate=found,
    )


def _of_script(console: Console, script: Path, model: str, on: str) -> PricedJob:
    """The job as its launch script tells it; what was read otherwise than written is said."""
    from moewright.cli.launch_script import read_plan_from_script

    plan, read = read_plan_from_script(script, model=model, on=on)
    for note in read.notes:
        console.print(note, soft_wrap=True)
    return _of_plan(plan)


def _of_plan(plan: Plan) -> PricedJob:
    from moewright.diagnosis.priced_fixes import PricedJob

    return PricedJob(
        model=plan.model,
        workload=plan.workload,
        hardware=plan.hardware,
        layout=plan.layout,
        estimate=plan.estimate,
    )


def _own_run(console: Console, run: Path) -> int:
    from moewright.codec import read_run
    from moewright.diagnosis.engine_run import build_run_waterfall, find_critical_rank
    from moewright.diagnosis.engine_run import diagnose_run as findings_of
    from moewright.diagnosis.priced_fixes import price_findings
    from moewright.report.diagnosis_text import print_findings, print_waterfall

    record = read_run(run)
    findings = findings_of(record)
    if not findings:
        raise BadInput(
            Reason(
                field=str(run),
                rule="holds no finished steps to diagnose",
                nearest="a run that trained",
            )
        )
    known = _of_plan(record.plan)
    print_findings(console, price_findings(findings, known))
    print_waterfall(
        console,
        build_run_waterfall(record, find_critical_rank(record), known),
        known.estimate.model_flops_per_step / known.layout.world_size,
    )
    return 0


def _traces(console: Console, path: Path, known: PricedJob | None) -> int:
    from moewright.diagnosis.traces.breakdown import break_down_step
    from moewright.diagnosis.traces.kineto import read_traces
    from moewright.diagnosis.traces.nsight import read_nsight
    from moewright.diagnosis.traces.rank_skew import measure_rank_skew
    from moewright.diagnosis.traces.trace_findings import (
        build_trace_waterfall,
        diagnose_traces,
        find_peak_rate,
    )
    from moewright.report.diagnosis_text import print_breakdown, print_findings, print_waterfall

    captures = read_nsight(path) if path.is_file() and _is_sqlite(path) else read_traces(path)
    if not captures:
        rule = "holds neither a run (plan.json) nor traces (.json, .json.gz)"
        raise BadInput(Reason(field=str(path), rule=rule))
    layout = known.layout if known else None
    parts = tuple(break_down_step(capture, layout) for capture in captures)
    beside, peak = measure_rank_skew(captures, parts, layout), find_peak_rate(parts, known)
    print_breakdown(console, parts)
    print_findings(console, diagnose_traces(parts, beside, known, peak))
    fall = build_trace_waterfall(parts, beside, known, peak)
    if fall is None:
        console.print(
            f"no waterfall: {peak.note}, or no shapes were recorded; say the job with --model, --on, --layout"
        )
    else:
        flops = known.estimate.model_flops_per_step / known.layout.world_size if known else 0.0
        print_waterfall(console, fall, flops)
    return 0


def _of_dump(
    console: Console, log: MegatronLog, path: Path, model: str, on: str
) -> PricedJob | None:
    """The job by the arguments that the log itself printed; None, with the reason, where they do
    not make one."""
    from moewright.cli.launch_script import read_plan_from_log

    if not log.arguments or not on:
        return None
    try:
        found = read_plan_from_log(log.arguments, path, model=model, on=on)
    except BadInput as error:
        console.print(
            f"the log's arguments make no job that can be planned: {error}", soft_wrap=True
        )
        return None
    return _of_plan(found[0]) if found else None


def _log(console: Console, path: Path, known: PricedJob | None, model: str, on: str) -> int:
    from moewright.diagnosis.traces.log_findings import diagnose_log
    from moewright.diagnosis.traces.megatron_log import read_log
    from moewright.diagnosis.traces.megatron_timers import measure_parts
    from moewright.diagnosis.waterfall import build_log_waterfall
    from moewright.report.diagnosis_text import print_findings, print_log, print_waterfall

    log = read_log(path)
    known = known or _of_dump(console, log, path, model, on)
    print_log(console, log, known)
    found = diagnose_log(log, known)
    print_findings(console, found)
    if known is None:
        rest = "what nobody timed" if log.timers else "a wall of time"
        console.print(
            f"the log alone does not tell {rest}: say --on (and --model, --layout, or --script)",
            soft_wrap=True,
        )
    elif log.step_s:
        fall = build_log_waterfall(known, log.step_s, measure_parts(log.timers))
        print_waterfall(
            console, fall, known.estimate.model_flops_per_step / known.layout.world_size
        )
    return 0
