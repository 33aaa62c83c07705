"""Where the host's time of a step goes, and the part of a wait that is the link's.

Of every call it is what the rank to come last waited.
"""

import time

import torch

from moewright.engine.observe.phase_clock import DeviceMeter
from moewright.engine.observe.step_timing import StepTimer, WaitClock, add_links
from moewright.spec.layout import Layout
from moewright.spec.run import DeviceSample, GroupWait, HostTime, RankTiming


def rank_timing(rank: int, **seconds: float) -> RankTiming:
    waits = tuple(GroupWait(group=group, seconds=spent) for group, spent in seconds.items())
    return RankTiming(rank=rank, steps=3, phases=(), waits=waits, host=HostTime())


def test_a_wait_in_no_phase_of_the_step_is_no_sleep() -> None:
    wait_clock = WaitClock(blocking=True)
    timer = StepTimer(rank=0)
    timer.begin_step(wait_clock)
    time.sleep(0.05)
    with wait_clock.measure("world"):
        time.sleep(0.2)
    waits, _ = wait_clock.take()
    host = timer.end_step(waits)
    timer.close()
    assert host.asleep_s >= 0.04
    assert host.asleep_s < 0.15


def test_of_every_call_what_its_last_rank_waited() -> None:
    layout = Layout(world_size=2, ep=2)
    calls = [[{"ep": [100, 900]}] * 3, [{"ep": [800, 200]}] * 3]
    first, second = add_links(layout, [rank_timing(0, ep=1e-3), rank_timing(1, ep=1e-3)], calls)
    assert first.links == second.links == (GroupWait(group="ep", seconds=3e-4),)


def test_groups_meet_by_themselves_and_neighbours_of_a_pipeline_never() -> None:
    layout = Layout(world_size=8, pp=2, ep=2)
    timings = [rank_timing(rank, ep=1.0, pp=1.0) for rank in range(8)]
    calls = [[{"ep": [1000 * (rank // 2 + 1)], "pp": [5]}] for rank in range(8)]
    linked = add_links(layout, timings, calls)
    assert [timing.links[0].seconds for timing in linked] == [
        1e-3,
        1e-3,
        2e-3,
        2e-3,
        3e-3,
        3e-3,
        4e-3,
        4e-3,
    ]
    assert {link.group for timing in linked for link in timing.links} == {"ep"}


def test_ranks_that_do_not_tell_the_same_calls_tell_no_link() -> None:
    layout = Layout(world_size=2, ep=2)
    calls = [[{"ep": [100, 900]}], [{"ep": [800]}]]
    assert (
        add_links(layout, [rank_timing(0, ep=1e-3), rank_timing(1, ep=1e-3)], calls)[0].links == ()
    )


def test_a_process_that_computes_is_busy_and_one_that_sleeps_is_not() -> None:
    meter = DeviceMeter(torch.device("cpu"))
    samples = []
    for work in (lambda: sum(range(10**7)), lambda: time.sleep(0.3)):
        meter.begin_step()
        work()
        sample = meter.end_step()
        assert sample is not None
        samples.append(sample)
    assert samples[0].resident_share > 3 * samples[1].resident_share
    assert samples[0].used_bytes > 50 << 20  # torch is imported


def test_the_use_of_a_device_is_the_median_of_its_steady_steps_and_its_most_memory() -> None:
    timer = StepTimer(rank=0)
    for share, used in ((0.5, 100), (0.9, 300), (0.7, 200)):
        sample = DeviceSample(resident_share=share, used_bytes=used, peak_allocated_bytes=0)
        timer.add_steady_step((), (), {}, HostTime(), sample)
    timer.close()
    expected = DeviceSample(resident_share=0.7, used_bytes=300, peak_allocated_bytes=0)
    assert timer.build_rank_timing().device == expected
