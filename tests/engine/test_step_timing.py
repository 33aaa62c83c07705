"""Where the host's time of a step goes, and the part of a wait that is the link's.

Of every call it is what the rank to come last waited.
"""

import time

from moewright.engine.observe.step_timing import StepTimer, add_links
from moewright.engine.observe.wait_clock import WaitClock
from moewright.spec.layout import Layout
from moewright.spec.run import GroupWait, HostTime, RankTiming


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
