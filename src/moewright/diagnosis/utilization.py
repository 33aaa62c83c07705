"""How busy the devices of a run are, how full, and how much of a step is communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moewright.diagnosis.engine_run import CriticalRank
from moewright.diagnosis.thresholds import (
    BUSY_SHARE,
    COMMUNICATION_GOAL,
    MEMORY_GOAL,
)
from moewright.spec.run import DeviceSample, RunRecord
from moewright.spec.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """The use of a rank's device: the median of its steady steps."""

    rank: int
    sample: DeviceSample


def list_device_use(record: RunRecord) -> tuple[DeviceUse, ...]:
    """Return the use of every rank's device; of rank 0 alone in a run that has not ended."""
    uses = tuple(
        DeviceUse(rank=timing.rank, sample=timing.device)
        for timing in record.paces
        if timing.device is not None
    )
    samples = [step.device for step in record.planned_steps if step.device is not None]
    if not uses and samples:
        uses = (DeviceUse(rank=0, sample=samples[-1]),)
    return uses


def describe_use(record: RunRecord, critical: CriticalRank) -> Iterator[str]:
    """Yield a line on each of three goals: busy devices, filled memory, little communication.

    The goals are those of the throughput guide that the thresholds name.
    """
    uses = list_device_use(record)
    if uses:
        least = min(uses, key=lambda use: use.sample.resident_share)
        share = least.sample.resident_share
        line = f"utilisation {share:.0%} on rank {least.rank}, the least busy"
        yield f"{line}, {_judge(share, BUSY_SHARE, is_floor=True)}"
        fullest = max(uses, key=lambda use: use.sample.used_bytes)
        capacity = record.plan.estimate.capacity_bytes
        used = fullest.sample.used_bytes
        if used and capacity:
            share = used / capacity
            line = f"memory {format_bytes(used)} of {format_bytes(capacity)} on rank {fullest.rank}"
            yield f"{line}, {_judge(share, MEMORY_GOAL, is_floor=True)}"
    if critical.waits and critical.step_s:
        share = (sum(critical.waits.values()) + critical.late_wait_s) / critical.step_s
        line = f"communication and waits for others {share:.0%} of the step on rank {critical.rank}"
        yield f"{line}, {_judge(share, COMMUNICATION_GOAL, is_floor=False)}"


def _judge(share: float, goal: float, *, is_floor: bool) -> str:
    if is_floor:
        return f"{'at least' if share >= goal else 'below'} the {goal:.0%} to aim at"
    return f"{'above' if share > goal else 'within'} the {goal:.0%} to aim at"
