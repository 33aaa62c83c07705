"""Growing global batches: Megatron-LM's sizes, samples once and in order, whole micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model_shapes import moe_model
from moewright.rules.batch_rampup import count_steps, step_samples, workload_at_step
from moewright.rules.job import Job
from moewright.rules.limits.legality import check_legality
from moewright.spec.layout import Layout, Schedule
from moewright.spec.workload import BatchRampSpec, Workload


def growing(start: int, increment: int, samples: int, full: int) -> Workload:
    ramp = BatchRampSpec(ramp_start=start, ramp_increment=increment, ramp_samples=samples)
    return Workload(seq_len=32, global_batch=full, ramp=ramp)


def megatron_batch_size(work: Workload, consumed: int) -> int:
    """Return the global batch as Megatron-LM calculates it.

    Source: RampupBatchsizeNumMicroBatchesCalculator.update in
    megatron/core/num_microbatches_calculator.py.
    """
    ramp = work.ramp
    full = work.global_batch
    increments = (full - ramp.ramp_start) // ramp.ramp_increment
    per_increment = ramp.ramp_samples / increments if increments else 0.0
    if consumed > ramp.ramp_samples or not increments or not per_increment:
        return full
    return min(full, ramp.ramp_start + int(consumed / per_increment) * ramp.ramp_increment)


@pytest.mark.parametrize(
    ("start", "increment", "samples", "full"),
    [
        (4, 4, 100, 16),
        (8, 8, 64, 32),
        (16, 16, 50, 16),
        (2, 6, 7, 32),
        (4, 4, 0, 16),
        (1, 1, 1000, 9),
    ],
)
def test_sizes_are_megatrons_and_samples_follow_each_other(
    start: int, increment: int, samples: int, full: int
) -> None:
    work = growing(start, increment, samples, full)
    consumed = 0
    for step in range(400):
        batch = step_samples(work, step)
        assert batch.first == consumed
        assert batch.size == megatron_batch_size(work, consumed)
        assert batch.size == workload_at_step(work, step).global_batch
        consumed += batch.size
    assert batch.size == full


def test_without_a_ramp_batches_are_alike() -> None:
    work = Workload(seq_len=32, global_batch=6)
    assert [step_samples(work, step).first for step in range(4)] == [0, 6, 12, 18]


@pytest.mark.parametrize(
    ("start", "increment", "message"),
    [
        (
            6,
            4,
            "workload.ramp_start=6: must be a multiple of mbs * dp = 4 up to global_batch=16; "
            "nearest legal value: 4",
        ),
        (
            4,
            2,
            "workload.ramp_increment=2: must be a multiple of mbs * dp = 4 up to global_batch=16",
        ),
        (4, 8, "workload.ramp_increment=8: must divide global_batch - ramp_start = 12"),
    ],
)
def test_batches_that_are_no_whole_micro_batches_are_refused(
    start: int, increment: int, message: str
) -> None:
    layout = Layout(world_size=2, mbs=2)
    work = growing(start, increment, 64, 16)
    (reason,) = check_legality(Job(model=moe_model(), workload=work, layout=layout))
    assert str(reason).startswith(message)
    assert not check_legality(
        Job(
            model=moe_model(),
            workload=replace(work, ramp=replace(work.ramp, ramp_start=4, ramp_increment=4)),
            layout=layout,
        )
    )


def test_the_smallest_batch_must_fill_the_pipeline() -> None:
    layout = Layout(world_size=4, pp=2, vpp=2, mbs=1, schedule=Schedule.INTERLEAVED)
    assert not check_legality(Job(model=moe_model(), workload=growing(4, 4, 64, 16), layout=layout))
    assert check_legality(Job(model=moe_model(), workload=growing(2, 2, 64, 16), layout=layout))


@pytest.mark.parametrize("increment", [2, 4])
def test_every_batch_of_the_ramp_has_a_timetable(increment: int) -> None:
    """Six sequences, the second batch, are no multiple of four stages in an interleaved step."""
    layout = Layout(world_size=4, pp=4, vpp=2, schedule=Schedule.INTERLEAVED)
    model = moe_model(layers=8)
    job = Job(model=model, workload=growing(4, increment, 100, 16), layout=layout)
    assert bool(check_legality(job)) is (increment == 2)


@pytest.mark.parametrize("samples", [1, 8, 99, 100, 101, 1000])
def test_steps_are_counted_as_they_are_taken(samples: int) -> None:
    for work in (growing(4, 4, 100, 16), growing(2, 6, 7, 32), growing(16, 16, 50, 16)):
        sizes = [size for size, steps in count_steps(work, samples) for _ in range(steps)]
        assert sizes == [step_samples(work, step).size for step in range(len(sizes))]
        assert sum(sizes) - sizes[-1] < samples <= sum(sizes)
