"""The pipeline timetable: which forward and backward each pipeline rank runs, in order
(docs/formulas.md 5).

The planner simulates these rows and the engine executes them; neither knows a schedule by name. A
row's `chunk` is the virtual-pipeline index on its rank, so the row works on virtual stage chunk *
pp + rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from moewright.rules.timetable_row import RowKind as RowKind
from moewright.rules.timetable_row import TimetableRow as TimetableRow
from moewright.rules.zero_bubble import TimetableBuilder, dualpipev, zb_h1, zbv
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout, Overlap, Schedule

# Rows of one rank, given pp, the rank and the micro-batches.
_SPLIT: Mapping[Schedule, TimetableBuilder] = MappingProxyType(
    {Schedule.ZB_H1: zb_h1, Schedule.ZBV: zbv, Schedule.DUALPIPEV: dualpipev}
)
_CHUNKS: Mapping[Schedule, int] = MappingProxyType(
    {Schedule.ZB_H1: 1, Schedule.ZBV: 2, Schedule.DUALPIPEV: 2}
)


def interleaved_group_size(layout: Layout) -> int:
    """Micro-batches that an interleaved rank takes through one chunk before it turns to the next
    (N)."""
    return layout.vpp_group or layout.pp


def check_schedule(layout: Layout, micro_batches: int) -> tuple[Reason, ...]:
    """Rules of the timetable that layout and micro-batch count break; () when there is a table for
    them."""
    schedule, pp, vpp = layout.schedule, layout.pp, layout.vpp
    if schedule.splits_backward:
        return _split_reasons(layout, micro_batches)
    if vpp > 1 and pp == 1:
        return (
            Reason(
                field="layout.vpp", value=str(vpp), rule="virtual stages need pp > 1", nearest="1"
            ),
        )
    if vpp > 1 and schedule is Schedule.ONE_F_ONE_B:
        rule = f"vpp={vpp} needs the interleaved schedule"
        return (
            Reason(
                field="layout.schedule", value=schedule, rule=rule, nearest=Schedule.INTERLEAVED
            ),
        )
    if vpp == 1 and schedule is Schedule.INTERLEAVED:
        rule = "the interleaved schedule needs vpp > 1"
        return (
            Reason(
                field="layout.schedule", value=schedule, rule=rule, nearest=Schedule.ONE_F_ONE_B
            ),
        )
    if vpp == 1 and layout.vpp_group:
        rule = "micro-batch groups belong to the interleaved schedule (vpp > 1)"
        return (
            Reason(field="layout.vpp_group", value=str(layout.vpp_group), rule=rule, nearest="0"),
        )
    return _group_reasons(layout, micro_batches) if vpp > 1 else ()


def _split_reasons(layout: Layout, micro_batches: int) -> tuple[Reason, ...]:
    schedule, pp, chunks = layout.schedule, layout.pp, _CHUNKS[layout.schedule]
    if pp == 1:
        rule = f"{schedule} needs pp > 1"
        return (
            Reason(
                field="layout.schedule", value=schedule, rule=rule, nearest=Schedule.ONE_F_ONE_B
            ),
        )
    if layout.vpp != chunks:
        rule = f"{schedule} takes {chunks} chunk{'s' * (chunks > 1)} a rank"
        return (Reason(field="layout.vpp", value=str(layout.vpp), rule=rule, nearest=str(chunks)),)
    if layout.vpp_group:
        rule = "micro-batch groups belong to the interleaved schedule"
        return (
            Reason(field="layout.vpp_group", value=str(layout.vpp_group), rule=rule, nearest="0"),
        )
    if schedule is Schedule.DUALPIPEV and micro_batches < 2 * pp:
        rule = f"dualpipev needs at least 2 * pp = {2 * pp} micro-batches a step; there are {micro_batches}"
        batch = layout.mbs * layout.dp  # sequences of one micro-batch over all data-parallel ranks
        value, near = str(micro_batches * batch), str(2 * pp * batch)
        return (Reason(field="workload.global_batch", value=value, rule=rule, nearest=near),)
    return ()


def _group_reasons(layout: Layout, micro_batches: int) -> tuple[Reason, ...]:
    pp, group = layout.pp, interleaved_group_size(layout)
    if micro_batches < pp:
        rule = f"the interleaved schedule needs at least pp={pp} micro-batches a step; there are {micro_batches}"
        batch = layout.mbs * layout.dp  # sequences of one micro-batch over all data-parallel ranks
        value, nearest = str(micro_batches * batch), str(pp * batch)
        return (Reason(field="workload.global_batch", value=value, rule=rule, nearest=nearest),)
    if _group_fits(group, pp, micro_batches):
        return ()
    start = min(max(group, pp), micro_batches)
    below = next((n for n in range(start, pp - 1, -1) if _group_fits(n, pp, micro_batches)), None)
    above = next(n for n in range(start, micro_batches + 1) if _group_fits(n, pp, micro_batches))
    rule = f"pp={pp} <= group <= m={micro_batches}, and m modulo group must be 0 or at least pp"
    nearest = " or ".join(str(n) for n in dict.fromkeys((below, above)) if n is not None)
    return (Reason(field="layout.vpp_group", value=str(group), rule=rule, nearest=nearest),)


def _group_fits(group: int, pp: int, micro_batches: int) -> bool:
    if not pp <= group <= micro_batches:
        return False
    rest = micro_batches % group
    return rest == 0 or rest >= pp


def warmup_forwards(layout: Layout, micro_batches: int, pp_rank: int) -> int:
    """Forwards (of one chunk each) that a rank runs before its first backward, less the one paired
    with it.

    1F1B: pp - r - 1; interleaved: 2 (pp - r - 1) + (v - 1) N. Overlapping expert communication
    pairs a forward with the backward of another micro-batch, which takes one forward more.
    """
    behind = layout.pp - pp_rank - 1
    count = (
        2 * behind + (layout.vpp - 1) * interleaved_group_size(layout) if layout.vpp > 1 else behind
    )
    return min(count + (Overlap.EP in layout.overlap), micro_batches * layout.vpp)


def forward_order(layout: Layout, micro_batches: int) -> list[tuple[int, int]]:
    """(micro_batch, chunk) of every forward: group by group of N, and in each group chunk by
    chunk."""
    group = interleaved_group_size(layout) if layout.vpp > 1 else micro_batches
    return [
        (micro_batch, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(layout.vpp)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]


def timetable(layout: Layout, micro_batches: int) -> tuple[tuple[TimetableRow, ...], ...]:
    """The rows of each pipeline rank, in the order it runs them: warm-up, (forward, backward)
    pairs, drain.

    Backwards follow the forwards' order with the chunks reversed. Raises BadInput where there is no
    table.
    """
    reasons = check_schedule(layout, micro_batches)
    if micro_batches < 1:
        reasons = (
            Reason(
                field="micro_batches",
                value=str(micro_batches),
                rule="must be at least 1",
                nearest="1",
            ),
        )
    if reasons:
        raise BadInput(*reasons)
    if layout.schedule.splits_backward:
        build = _SPLIT[layout.schedule]
        return tuple(
            tuple(build(layout.pp, pp_rank, micro_batches)) for pp_rank in range(layout.pp)
        )
    order = forward_order(layout, micro_batches)
    forward = [TimetableRow(kind=RowKind.F, micro_batch=mb, chunk=chunk) for mb, chunk in order]
    backward = [
        TimetableRow(kind=RowKind.B, micro_batch=mb, chunk=layout.vpp - 1 - chunk)
        for mb, chunk in order
    ]
    ranks = []
    for pp_rank in range(layout.pp):
        ahead = warmup_forwards(layout, micro_batches, pp_rank)
        pairs = [row for pair in zip(forward[ahead:], backward, strict=False) for row in pair]
        ranks.append((*forward[:ahead], *pairs, *backward[len(forward) - ahead :]))
    return tuple(ranks)


def bubble_fraction(layout: Layout, micro_batches: int) -> float:
    """Idle share of the step of 1F1B and interleaved tables for equal chunks and free
    communication: (pp - 1) / (m v + pp - 1).
    """
    return (layout.pp - 1) / (micro_batches * layout.vpp + layout.pp - 1)


def split_backwards(rows: Sequence[TimetableRow]) -> frozenset[tuple[int, int]]:
    """(micro-batch, chunk) of every backward of a rank that leaves its weight gradients to a W
    row."""
    return frozenset((row.micro_batch, row.chunk) for row in rows if row.kind is RowKind.W)


def max_in_flight(layout: Layout, micro_batches: int, pp_rank: int) -> int:
    """Peak number of chunk activations (each of 1 / vpp of the rank's layers) alive on a rank.

    1F1B and interleaved: warm-up plus one. Where weight gradients are split off a chunk lives until
    its W.
    """
    if layout.schedule.splits_backward:
        return peak_live_chunks(timetable(layout, min(micro_batches, 4 * layout.pp))[pp_rank])
    return min(warmup_forwards(layout, micro_batches, pp_rank) + 1, micro_batches * layout.vpp)


def peak_live_chunks(rows: Sequence[TimetableRow]) -> int:
    """Highest number of chunk activations alive as a rank runs its rows."""
    owing = split_backwards(rows)
    live = peak = 0
    for row in rows:
        if row.kind is RowKind.F:
            live += 1
            peak = max(peak, live)
        elif row.kind is RowKind.W or (row.micro_batch, row.chunk) not in owing:
            live -= 1
    return peak
