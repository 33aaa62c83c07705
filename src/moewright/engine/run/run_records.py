"""What a run records of itself: the session when it starts, and every step."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from moewright.codec import STEPS_FILE, format_layout
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
from moewright.rules.expert_placement import slot_experts
from moewright.rules.job import plan_job
from moewright.rules.shapes.flops import model_flops_per_token
from moewright.spec.plan import Plan
from moewright.spec.run import LayerLoad, Session, StepRecord
from moewright.spec.units import TERA

_MOST_SPANS = 5


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
    more = f" and {len(spans) - _MOST_SPANS} more spans" if len(spans) > _MOST_SPANS else ""
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


def build_step_record(plan: Plan, step: int, lr: float, result: StepResult) -> StepRecord:
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
        loads=_build_loads(plan, result, tokens) if logs_loads else (),
    )


def _share_of_peak(plan: Plan, flops_per_s: float) -> float:
    """Divide by the device's peak in the training precision; 0 where no peak is stated."""
    for peak in plan.hardware.device.peaks:
        if peak.dtype is plan.workload.precision and peak.rate.value:
            return flops_per_s / peak.rate.value
    return 0.0


def _hfu_over_mfu(plan: Plan) -> float:
    """Divide the FLOPs with the planned recomputation by those without it."""
    return plan.estimate.hfu / plan.estimate.mfu if plan.estimate.mfu else 1.0


def _build_loads(plan: Plan, result: StepResult, tokens: int) -> tuple[LayerLoad, ...]:
    if plan.model.moe is None:
        return ()
    slots = {layer: slot_experts(plan_job(plan), layer) for layer in plan.model.routed_layers}
    # Without a capacity rows that no expert got are of tokens that do not count.
    chosen_rows = tokens * plan.model.moe.router.top_k if plan.layout.capacity else 0
    return build_layer_loads(
        result.expert_loads,
        result.backward.router_losses,
        slots,
        ep=plan.layout.ep,
        chosen_rows=chosen_rows,
    )
