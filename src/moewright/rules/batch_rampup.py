"""The samples that a step trains on while the global batch grows.

They are a pure function of the step, so that any resume agrees. The sizes are Megatron-LM's: with
n = (global_batch - start) / increment, a step that comes after c < ramp_samples sequences takes
start + increment * floor(c * n / ramp_samples); later steps take global_batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moewright.spec.errors import Reason
from moewright.spec.layout import Layout
from moewright.spec.workload import BatchRampSpec, DocumentMasking, OptimizerSpec, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRange:
    """The samples [first, first + size) of the endless sequence of samples."""

    first: int
    size: int


def step_samples(workload: Workload, step: int) -> SampleRange:
    """Return the global batch of a step, counted from 0."""
    full_size = workload.global_batch
    first_sample = 0
    first_step = 0
    for size, end in _ramp_stages(workload.ramp, full_size):
        # The last step of a size may consume all samples of the next size: then that has no step.
        steps = max(0, -(-(end - first_sample) // size))  # until `end` samples are consumed
        if step < first_step + steps:
            return SampleRange(first=first_sample + (step - first_step) * size, size=size)
        first_sample += steps * size
        first_step += steps
    return SampleRange(first=first_sample + (step - first_step) * full_size, size=full_size)


def batch_sizes(workload: Workload) -> Iterator[tuple[int, int]]:
    """Yield (sequences consumed before, batch size) of each batch size, the full one last."""
    begin = 0
    for size, end in _ramp_stages(workload.ramp, workload.global_batch):
        if end > begin:
            yield begin, size
        begin = end
    yield begin, workload.global_batch


def deciding_batches(workload: Workload) -> tuple[int, ...]:
    """Return the first two batch sizes and the full one, which stand for all sizes of the ramp.

    Whatever divides them divides every size, and the first is the smallest.
    """
    ramp = workload.ramp
    full_size = workload.global_batch
    if not ramp.ramp_start:
        return (full_size,)
    return (ramp.ramp_start, min(ramp.ramp_start + ramp.ramp_increment, full_size), full_size)


def count_steps(workload: Workload, samples: int) -> Iterator[tuple[int, int]]:
    """Yield (batch size, steps) of each batch size, in order, until `samples` are consumed."""
    consumed = 0
    for size, end in _ramp_stages(workload.ramp, workload.global_batch):
        steps = max(0, -(-(min(end, samples) - consumed) // size))
        if steps:
            yield size, steps
        consumed += steps * size
    if consumed < samples:
        yield workload.global_batch, -(-(samples - consumed) // workload.global_batch)


def workload_at_step(workload: Workload, step: int) -> Workload:
    """Return the workload as a step, counted from 0, runs it: with its batch and without a ramp."""
    size = step_samples(workload, step).size
    return replace(workload, global_batch=size, ramp=BatchRampSpec())


def check_ramp(workload: Workload, layout: Layout) -> Iterator[Reason]:
    """Yield why the batches of the ramp are not whole micro-batches of a layout."""
    ramp = workload.ramp
    full_size = workload.global_batch
    if not ramp.ramp_start:
        return
    step = layout.dp * layout.mbs
    # The first broken rule alone: the test of the growth below divides by the increment.
    for field, value in (("ramp_start", ramp.ramp_start), ("ramp_increment", ramp.ramp_increment)):
        if not 0 < value <= full_size or value % step:
            rule = f"must be a multiple of mbs * dp = {step} up to global_batch={full_size}"
            near = str(min(max(1, value // step) * step, full_size))
            yield Reason(field=f"workload.{field}", value=str(value), rule=rule, nearest=near)
            return
    growth = full_size - ramp.ramp_start
    # Sizes are ramp_start + i * increment, and the last of them has to be the full batch.
    if growth % ramp.ramp_increment:
        legal = [n for n in range(step, full_size + 1, step) if growth % n == 0]
        near = str(min(legal, key=lambda n: abs(n - ramp.ramp_increment), default=""))
        yield Reason(
            field="workload.ramp_increment",
            value=str(ramp.ramp_increment),
            rule=f"must divide global_batch - ramp_start = {growth}",
            nearest=near,
        )


def check_batch_samples(workload: Workload) -> Iterator[Reason]:
    """Yield why steps cannot be of a number of chats, packed for each step."""
    samples = workload.batch_samples
    if not samples:
        return
    documents = workload.data.documents
    routes = workload.routes.record_routes or workload.routes.replay_routes
    choices = (
        (
            "data.documents",
            documents,
            documents is not DocumentMasking.RESTARTED,
            "batch_samples packs chats, which never attend each other",
            DocumentMasking.RESTARTED,
        ),
        (
            "workload.ramp_start",
            workload.ramp.ramp_start,
            workload.ramp.ramp_start > 0,
            "a batch of batch_samples does not grow",
            "0",
        ),
        (
            "workload.routes",
            routes,
            bool(routes),
            "routes are numbered by sequences, of which steps of batch_samples have any number",
            "none",
        ),
    )
    for field, value, is_broken, rule, nearest in choices:
        if is_broken:
            yield Reason(field=field, value=str(value), rule=rule, nearest=nearest)


def _ramp_stages(ramp: BatchRampSpec, full_size: int) -> Iterator[tuple[int, int]]:
    """Yield each batch size below the full one, and the sample at which the next size begins."""
    if not ramp.ramp_start:
        return
    count = (full_size - ramp.ramp_start) // ramp.ramp_increment
    for stage in range(count):
        size = ramp.ramp_start + stage * ramp.ramp_increment
        # Rounded up: floor(c n / S) of the module's formula rises at the first whole c beyond.
        yield size, -(-(stage + 1) * ramp.ramp_samples // count)


def wsd_decay_steps(spec: OptimizerSpec, steps: int) -> int:
    """Return the steps in which a WSD learning rate falls, at least 1.

    They are those before `decay_steps`, or before the end of a run of `steps`.
    """
    return spec.wsd_decay_steps or max(1, (spec.decay_steps or steps) // 10)
