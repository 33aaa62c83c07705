"""`moewright diagnose`: which wall holds a run back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import Dtype

if TYPE_CHECKING:
    from rich.console import Console

    from moewright.diagnosis.priced_fixes import Known
    from moewright.diagnosis.traces.megatron_log import MegatronLog
    from moewright.spec.plan import Plan

PLAN, TRACES, MERGED = "plan.json", "trace", "trace.json"  # of a run's folder
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
    from moewright.report.console import console_for
    from moewright.spec.plan import Plan

    console = console_for(sys.stdout)
    if (run / PLAN).exists():
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
        known: Known | None = _of_script(console, script, model, on)
    else:
        known = _known(model, on, layout, seq_len, global_batch, precision)
    if not run.exists():
        raise BadInput(Reason(field=str(run), rule="no such run folder, trace or log"))
    if run.name == MERGED and (run.parent / TRACES).is_dir():
        run = run.parent / TRACES  # the same, rank by rank
    if known is None and (run.parent / PLAN).exists():
        known = _of_plan(read_json(Plan, run.parent / PLAN))
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
) -> Known | None:
    """The job as the options tell it; None when no model is given."""
    from moewright.cli.jobs import as_written, option_field, read_asked
    from moewright.codec import parse_layout
    from moewright.cost.estimate import estimate
    from moewright.diagnosis.priced_fixes import Known

    if not model:
        given = [name for name, value in (("--layout", layout), ("--seq-len", seq_len)) if value]
        if given:
            raise BadInput(Reason(field=given[0], rule="needs --model beside it"))
        return None
    asked = read_asked(
        model, on=on, seq_len=seq_len, global_batch=global_batch, precision=precision
    )
    with as_written(option_field("--layout")):
        chosen = parse_layout(layout or asked.fixed, world_size=asked.hardware.count)
        found = estimate(asked.model, asked.workload, asked.hardware, chosen)
    return Known(
        model=asked.model,
        workload=asked.workload,
        hardware=asked.hardware,
        layout=chosen,
        estimate=found,
    )


def _of_script(console: Console, script: Path, model: str, on: str) -> Known:
    """The job as its launch script tells it; what was read otherwise than written is said."""
    from moewright.cli.flags import plan_of_script

    plan, read = plan_of_script(script, model=model, on=on)
    for note in read.notes:
        console.print(note, soft_wrap=True)
    return _of_plan(plan)


def _of_plan(plan: Plan) -> Known:
    from moewright.diagnosis.priced_fixes import Known

    return Known(
        model=plan.model,
        workload=plan.workload,
        hardware=plan.hardware,
        layout=plan.layout,
        estimate=plan.estimate,
    )


def _own_run(console: Console, run: Path) -> int:
    from moewright.codec import read_run
    from moewright.diagnosis.own_run import diagnose as findings_of
    from moewright.diagnosis.own_run import pace_of, waterfall_of
    from moewright.diagnosis.priced_fixes import priced
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
    print_findings(console, priced(findings, known))
    print_waterfall(
        console,
        waterfall_of(record, pace_of(record), known),
        known.estimate.model_flops_per_step / known.layout.world_size,
    )
    return 0


def _traces(console: Console, path: Path, known: Known | None) -> int:
    from moewright.diagnosis.traces.across import across
    from moewright.diagnosis.traces.breakdown import breakdown
    from moewright.diagnosis.traces.kineto import read_traces
    from moewright.diagnosis.traces.nsight import read_nsight
    from moewright.diagnosis.traces.verdict import findings, peak_of, waterfall
    from moewright.report.diagnosis_text import print_breakdown, print_findings, print_waterfall

    captures = read_nsight(path) if path.is_file() and _is_sqlite(path) else read_traces(path)
    if not captures:
        rule = "holds neither a run (plan.json) nor traces (.json, .json.gz)"
        raise BadInput(Reason(field=str(path), rule=rule))
    layout = known.layout if known else None
    parts = tuple(breakdown(capture, layout) for capture in captures)
    beside, peak = across(captures, parts, layout), peak_of(parts, known)
    print_breakdown(console, parts)
    print_findings(console, findings(parts, beside, known, peak))
    fall = waterfall(parts, beside, known, peak)
    if fall is None:
        console.print(
            f"no waterfall: {peak.note}, or no shapes were recorded; say the job with --model, --on, --layout"
        )
    else:
        flops = known.estimate.model_flops_per_step / known.layout.world_size if known else 0.0
        print_waterfall(console, fall, flops)
    return 0


def _of_dump(console: Console, log: MegatronLog, path: Path, model: str, on: str) -> Known | None:
    """The job by the arguments that the log itself printed; None, with the reason, where they do
    not make one."""
    from moewright.cli.flags import plan_of_dump

    if not log.arguments or not on:
        return None
    try:
        found = plan_of_dump(log.arguments, path, model=model, on=on)
    except BadInput as error:
        console.print(
            f"the log's arguments make no job that can be planned: {error}", soft_wrap=True
        )
        return None
    return _of_plan(found[0]) if found else None


def _log(console: Console, path: Path, known: Known | None, model: str, on: str) -> int:
    from moewright.diagnosis.traces.log_verdict import findings
    from moewright.diagnosis.traces.megatron_log import read_log
    from moewright.diagnosis.traces.timers import timed_parts
    from moewright.diagnosis.waterfall import predicted
    from moewright.report.diagnosis_text import print_findings, print_log, print_waterfall

    log = read_log(path)
    known = known or _of_dump(console, log, path, model, on)
    print_log(console, log, known)
    found = findings(log, known)
    print_findings(console, found)
    if known is None:
        rest = "what nobody timed" if log.timers else "a wall of time"
        console.print(
            f"the log alone does not tell {rest}: say --on (and --model, --layout, or --script)",
            soft_wrap=True,
        )
    elif log.step_s:
        fall = predicted(known, log.step_s, timed_parts(log.timers))
        print_waterfall(
            console, fall, known.estimate.model_flops_per_step / known.layout.world_size
        )
    return 0
