"""Which samples a step trains on while the global batch grows: a pure function of the step, so that
any resume agrees.

The sizes are Megatron-LM's: with n = (global_batch - start) / increment, a step that has c <
ramp_samples sequences before it takes start + increment * floor(c * n / ramp_samples), later ones
take global_batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moewright.spec.errors import Reason
from moewright.spec.layout import Layout
from moewright.spec.workload import BatchRampSpec, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRange:
    """Places [first, first + size) in the endless sequence of samples."""

    first: int
    size: int


def step_samples(workload: Workload, step: int) -> SampleRange:
    """The global batch of a step, counted from 0."""
    ramp, full = workload.ramp, workload.global_batch
    first = passed = 0
    for size, end in _stages(ramp, full):
        steps = max(0, -(-(end - first) // size))  # until `end` samples are behind
        if step < passed + steps:
            return SampleRange(first=first + (step - passed) * size, size=size)
        first, passed = first + steps * size, passed + steps
    return SampleRange(first=first + (step - passed) * full, size=full)


def workload_at_step(workload: Workload, step: int) -> Workload:
    """The workload as a step, counted from 0, runs it."""
    return replace(workload, global_batch=step_samples(workload, step).size, ramp=BatchRampSpec())


def check_ramp(workload: Workload, layout: Layout) -> Iterator[Reason]:
    """What keeps the batches of the ramp from being whole micro-batches of a layout."""
    ramp, full = workload.ramp, workload.global_batch
    if not ramp.ramp_start:
        return
    step = layout.dp * layout.mbs
    for field, value in (("ramp_start", ramp.ramp_start), ("ramp_increment", ramp.ramp_increment)):
        if not 0 < value <= full or value % step:
            rule = f"must be a multiple of mbs * dp = {step} up to global_batch={full}"
            near = str(min(max(1, value // step) * step, full))
            yield Reason(field=f"workload.{field}", value=str(value), rule=rule, nearest=near)
            return
    if (full - ramp.ramp_start) % ramp.ramp_increment:
        rule = f"must divide global_batch - ramp_start = {full - ramp.ramp_start}"
        fits = [n for n in range(step, full + 1, step) if (full - ramp.ramp_start) % n == 0]
        near = str(min(fits, key=lambda n: abs(n - ramp.ramp_increment), default=""))
        yield Reason(
            field="workload.ramp_increment", value=str(ramp.ramp_increment), rule=rule, nearest=near
        )


def _stages(ramp: BatchRampSpec, full: int) -> Iterator[tuple[int, int]]:
    """Sizes below the full one, each with the number of samples from which the next one holds."""
    if not ramp.ramp_start:
        return
    count = (full - ramp.ramp_start) // ramp.ramp_increment
    for stage in range(count):
        yield (
            ramp.ramp_start + stage * ramp.ramp_increment,
            -(-(stage + 1) * ramp.ramp_samples // count),
        )
