"""Layouts of every kind of timetable, for the tests of the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moewright.rules.timetable.schedule import check_schedule
from moewright.spec.layout import Layout, Overlap, Schedule

_STAGES_PER_RANK = {
    Schedule.ONE_F_ONE_B: 1,
    Schedule.ZB_H1: 1,
    Schedule.ZBV: 2,
    Schedule.V_HALF: 2,
    Schedule.V_MIN: 2,
    Schedule.DUALPIPEV: 2,
}


def legal_layouts(pp: int, max_micro_batches: int) -> Iterator[tuple[Layout, int]]:
    """Yield layouts of `pp` ranks with each legal number of micro-batches up to the maximum."""
    for m in range(1, max_micro_batches + 1):
        for schedule, vpp in _STAGES_PER_RANK.items():
            yield from _legal(Layout(world_size=pp, pp=pp, vpp=vpp, schedule=schedule), m)
        for vpp in (2, 3):
            for interval in {(pp + 1) // 2, pp}:
                generalized = Layout(
                    world_size=pp, pp=pp, vpp=vpp, schedule=Schedule.GIS, vpp_group=interval
                )
                yield from _legal(generalized, m)
            for group in range(pp, m + 1):
                layout = Layout(
                    world_size=pp, pp=pp, vpp=vpp, schedule=Schedule.INTERLEAVED, vpp_group=group
                )
                yield from _legal(layout, m)
                yield from _legal(replace(layout, overlap=(Overlap.P2P,)), m)


def _legal(layout: Layout, micro_batches: int) -> Iterator[tuple[Layout, int]]:
    if not check_schedule(layout, micro_batches):
        yield layout, micro_batches
