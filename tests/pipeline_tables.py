"""Every kind of timetable, many of each: what tests of the pipeline run through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moewright.rules.schedule import check_schedule
from moewright.spec.layout import Layout, Overlap, Schedule

_CHUNKS = {Schedule.ONE_F_ONE_B: 1, Schedule.ZB_H1: 1, Schedule.ZBV: 2, Schedule.DUALPIPEV: 2}


def legal_layouts(pp: int, max_micro_batches: int) -> Iterator[tuple[Layout, int]]:
    """Layouts of `pp` ranks with a legal number of micro-batches, up to `most`."""
    for m in range(1, max_micro_batches + 1):
        for schedule, vpp in _CHUNKS.items():
            yield from _legal(Layout(world_size=pp, pp=pp, vpp=vpp, schedule=schedule), m)
        for vpp in (2, 3):
            for group in range(pp, m + 1):
                chosen = Layout(
                    world_size=pp, pp=pp, vpp=vpp, schedule=Schedule.INTERLEAVED, vpp_group=group
                )
                yield from _legal(chosen, m)
                yield from _legal(replace(chosen, overlap=(Overlap.P2P,)), m)


def _legal(layout: Layout, micro_batches: int) -> Iterator[tuple[Layout, int]]:
    if not check_schedule(layout, micro_batches):
        yield layout, micro_batches
