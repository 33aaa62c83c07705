"""What a run records of itself: its session, every step, and the journal of its incidents.

The journal of incidents in the folder of a run: what ended its ranks, and how it went on. The
launcher notes an incident when all ranks have ended; rank 0 of the next start notes how the run
went on, after its first step. Both need only the folder, so that it does not matter who starts the
ranks again: the supervisor, torchrun, a cluster or a person.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moewright.codec import (
    INCIDENTS_FILE,
    STEPS_FILE,
    FloatPolicy,
    format_layout,
    parse_json,
    read_complete_lines,
    read_journal,
    write_incidents,
)
from moewright.engine.observe.record import (
    ConsoleWriter,
    JsonLinesWriter,
    Recorder,
    RecordWriter,
    build_layer_loads,
    clamp_to_finite,
)
from moewright.engine.observe.trackers import open_trackers
from moewright.engine.run.step import StepResult
from moewright.engine.run.worker import RankFailure
from moewright.rules.expert_moves import Placement
from moewright.rules.shapes.flops import model_flops_per_token
from moewright.spec.errors import BadInput, Paragraph, escape_controls
from moewright.spec.layout import Layout
from moewright.spec.plan import Plan
from moewright.spec.run import Incident, IncidentKind, LayerLoad, Session, StepRecord
from moewright.spec.units import TERA, divide, mention

_MOST_SPANS = 5  # what fits a line of standard error


def open_recorder(
    plan: Plan, run_dir: Path, rank: int, first_step: int, last_step: int, *, prints_steps: bool
) -> Recorder:
    """Open the files that rank 0 records in; on other ranks the recorder writes nothing.

    With `prints_steps` it prints a line a step as well.
    """
    if rank != 0:
        return Recorder(writers=())
    journal = JsonLinesWriter(run_dir, first_step=first_step)
    if journal.missing:
        _tell_missing(run_dir, journal.missing)
    writers: list[RecordWriter] = [journal]
    if prints_steps:
        writers.append(ConsoleWriter(last_step=last_step, stream=sys.stdout))
    writers.append(open_trackers(plan, run_dir, first_step=first_step))
    return Recorder(writers=tuple(writers))


def _tell_missing(run_dir: Path, missing: Sequence[tuple[int, int]]) -> None:
    """Say which steps before the checkpoint nobody knows anything about any more."""
    spans = [str(first) if first == last else f"{first}-{last}" for first, last in missing]
    more = mention(" and {} more spans", len(spans[_MOST_SPANS:]))
    steps = ", ".join(spans[:_MOST_SPANS])
    line = (
        f"{run_dir / STEPS_FILE} has no record of steps {steps}{more}, which the checkpoint holds: "
        "reports leave them out"
    )
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def build_session(plan: Plan, first_step: int, device: torch.device) -> Session:
    """Build the record of a session that starts at `first_step`."""
    device_name = plan.hardware.device.name
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    return Session(
        first_step=first_step,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        world_size=plan.layout.world_size,
        torch_version=torch.__version__,
        device_name=device_name,
        threads_per_rank=torch.get_num_threads(),
        routing=plan.workload.router.force,
        layout=format_layout(plan.layout),
    )


def build_step_record(
    plan: Plan, step: int, lr: float, result: StepResult, placement: Placement
) -> StepRecord:
    """Build the record of a step from its result, without what was timed around it."""
    workload = plan.workload
    step_s = sum(row.seconds for row in result.phases)
    sequences = len(result.backward.expert_counts) * plan.layout.mbs * plan.layout.dp
    tokens = sequences * workload.seq_len
    tokens_per_s_per_rank = tokens / plan.layout.world_size / step_s
    flops_per_s = tokens_per_s_per_rank * model_flops_per_token(
        plan.model,
        workload.seq_len,
        attended_share=workload.data.attended_share,
        fine_tuning=workload.fine_tuning,
    )
    mfu = _share_of_peak(plan, flops_per_s)
    every = workload.router_log_every_steps
    logs_loads = every > 0 and step % every == 0
    return StepRecord(
        step=step,
        loss=clamp_to_finite(result.backward.loss),
        aux_loss=clamp_to_finite(result.backward.aux_loss),
        lr=lr,
        grad_norm=clamp_to_finite(result.backward.grad_norm),
        tokens=tokens,
        step_s=step_s,
        tokens_per_s_per_rank=tokens_per_s_per_rank,
        tflops_per_rank=flops_per_s / TERA,
        mfu=mfu,
        samples_per_s=tokens / workload.seq_len / step_s,
        hfu=mfu * _hfu_over_mfu(plan),
        skipped=result.skipped,
        is_repeated=result.backward.is_repeated,
        rewards=result.backward.rewards,
        phases=result.phases,
        loads=_build_loads(plan, result, tokens, placement) if logs_loads else (),
    )


def _share_of_peak(plan: Plan, flops_per_s: float) -> float:
    """Divide by the device's peak in the training precision; 0 where no peak is stated."""
    for peak in plan.hardware.device.peaks:
        if peak.dtype is plan.workload.precision and peak.rate.value:
            return flops_per_s / peak.rate.value
    return 0.0


def _hfu_over_mfu(plan: Plan) -> float:
    """Divide the FLOPs with the planned recomputation by those without it."""
    return divide(plan.estimate.hfu, plan.estimate.mfu, otherwise=1.0)


def _build_loads(
    plan: Plan, result: StepResult, tokens: int, placement: Placement
) -> tuple[LayerLoad, ...]:
    if plan.model.moe is None:
        return ()
    # Without a capacity rows that no expert got are of tokens that do not count.
    chosen_rows = tokens * plan.model.moe.router.top_k if plan.layout.capacity else 0
    return build_layer_loads(
        result.expert_loads,
        result.backward.router_losses,
        placement,
        ep=plan.layout.ep,
        chosen_rows=chosen_rows,
    )


def note_failure(run_dir: Path, layout: Layout, failure: RankFailure) -> None:
    """Note that a rank has failed; a disk that takes no note must not hide the failure.

    It is noted once the other ranks have ended, and has the time at which it was noticed.
    """
    _append(
        run_dir,
        layout,
        age_s=time.monotonic() - failure.time_s,
        kind=failure.cause,
        message=escape_controls(str(failure)),
        rank=failure.rank,
        step=failure.step,
    )


def note_return(run_dir: Path, layout: Layout) -> None:
    """Note that the ranks are stopped for those that were gone."""
    _append(run_dir, layout, kind=IncidentKind.RETURN, message="stops for the ranks that were gone")


def note_slow_rank(run_dir: Path, layout: Layout, *, rank: int, step: int, message: str) -> None:
    """Note that a rank is slow; the run goes on meanwhile."""
    _append(
        run_dir,
        layout,
        kind=IncidentKind.SLOW,
        message=message,
        rank=rank,
        step=step,
        resumed_step=step + 1,
    )


def note_copy_failure(run_dir: Path, layout: Layout, *, step: int, message: str) -> None:
    """Note that no copies can be made since a step; the run goes on meanwhile."""
    _append(
        run_dir,
        layout,
        kind=IncidentKind.COPY,
        message=escape_controls(message),
        step=step,
        resumed_step=step + 1,
    )


def note_restart(run_dir: Path, layout: Layout, starter: str) -> None:
    """Note that `starter` has started the ranks again, where nobody could note why."""
    if _find_open(_read(run_dir)) is None:
        message = f"{starter} has started the ranks again; who failed was not noted"
        _append(run_dir, layout, kind=IncidentKind.CRASH, message=message)


def note_end(run_dir: Path, reason: str) -> None:
    """Note why the ranks are not started again after the last incident."""
    incidents = _read(run_dir)
    number = _find_open(incidents)
    if number is not None:
        ended = replace(incidents[number], gave_up=Paragraph(escape_controls(reason)))
        _write(run_dir, (*incidents[:number], ended, *incidents[number + 1 :]))


def _append(run_dir: Path, layout: Layout, *, age_s: float = 0.0, **values: Any) -> None:
    """Append an incident of `age_s` seconds ago."""
    noticed = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age_s)
    incident = Incident(
        time=noticed.isoformat(timespec="seconds"),
        unix_s=noticed.timestamp(),
        layout=format_layout(layout),
        world_size=layout.world_size,
        **values,
    )
    _write(run_dir, (*_read(run_dir), incident))


def _read(run_dir: Path) -> tuple[Incident, ...]:
    """Return the incidents so far; a damaged journal is put aside, and goes on with its others."""
    incidents, damage = read_journal(run_dir)
    if damage:
        path = run_dir / INCIDENTS_FILE
        with suppress(OSError):
            path.replace(path.with_name(f".damaged-{path.name}"))
        _write(run_dir, incidents)
    return incidents


def _write(run_dir: Path, incidents: tuple[Incident, ...]) -> None:
    try:
        write_incidents(run_dir, incidents)
    except BadInput:
        return  # the journal is no reason to end a run


def _find_open(incidents: tuple[Incident, ...]) -> int | None:
    """Return the number of the incident since which the run has not gone on, if there is one."""
    for number in reversed(range(len(incidents))):
        incident = incidents[number]
        if incident.kind.ends_ranks:
            return None if incident.resumed_step or incident.gave_up else number
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedSteps:
    """The steps that a start is about to do again, and the seconds that they had taken."""

    count: int
    seconds: float


def count_repeated_steps(run_dir: Path, first_step: int) -> RepeatedSteps:
    """Count the recorded steps from `first_step` on; before the recorder drops them."""
    path = run_dir / STEPS_FILE
    records = [
        parse_json(line, where=f"{path}:{number}", floats=FloatPolicy.NON_FINITE)
        for number, line in enumerate(read_complete_lines(path), 1)
    ]
    # By step: one that was done again counts once, as it was last.
    steps = {
        record["step"]: float(record.get("step_s", 0.0))
        for record in records
        if isinstance(record, dict)
        and record.get("kind") == "step"
        and isinstance(step := record.get("step"), int)
        and step >= first_step
    }
    return RepeatedSteps(count=len(steps), seconds=sum(steps.values()))


def note_way_on(run_dir: Path, layout: Layout, first_step: int, repeated: RepeatedSteps) -> None:
    """Note that the run has done its first step since the last incident, if there was one."""
    incidents = _read(run_dir)
    number = _find_open(incidents)
    if number is None:
        return
    ended = replace(
        incidents[number],
        resumed_step=first_step,
        next_layout=format_layout(layout),
        next_world_size=layout.world_size,
        repeated_steps=repeated.count,
        repeated_s=repeated.seconds,
        # Clocks are set back, and the next start may be on another machine.
        down_s=max(0.0, time.time() - incidents[number].unix_s),
    )
    _write(run_dir, (*incidents[:number], ended, *incidents[number + 1 :]))
