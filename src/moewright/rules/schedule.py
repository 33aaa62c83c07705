"""The pipeline timetable: which forward and backward each pipeline rank runs, in order (docs/formulas.md 5).

The planner simulates these rows and the engine executes them; neither knows a schedule by name. A row's `chunk` is the
virtual-pipeline index on its rank, so the row works on virtual stage chunk * pp + rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout, Overlap, Schedule


class Kind(StrEnum):
    F = "F"  # forward
    B = "B"  # backward
    W = "W"  # weight gradients alone, where a schedule splits them from B


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    kind: Kind
    micro_batch: int
    chunk: int


def group_of(layout: Layout) -> int:
    """Micro-batches that an interleaved rank takes through one chunk before it turns to the next (N)."""
    return layout.vpp_group or layout.pp


def schedule_reasons(layout: Layout, micro_batches: int) -> tuple[Reason, ...]:
    """Rules of the timetable that layout and micro-batch count break; () when there is a table for them."""
    schedule, pp, vpp = layout.schedule, layout.pp, layout.vpp
    if schedule not in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED):
        nearest = Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B
        rule = "no timetable for this schedule yet"
        return (Reason(field="layout.schedule", value=schedule, rule=rule, nearest=nearest),)
    if vpp > 1 and pp == 1:
        return (Reason(field="layout.vpp", value=str(vpp), rule="virtual stages need pp > 1", nearest="1"),)
    if vpp > 1 and schedule is Schedule.ONE_F_ONE_B:
        rule = f"vpp={vpp} needs the interleaved schedule"
        return (Reason(field="layout.schedule", value=schedule, rule=rule, nearest=Schedule.INTERLEAVED),)
    if vpp == 1 and schedule is Schedule.INTERLEAVED:
        rule = "the interleaved schedule needs vpp > 1"
        return (Reason(field="layout.schedule", value=schedule, rule=rule, nearest=Schedule.ONE_F_ONE_B),)
    if vpp == 1 and layout.vpp_group:
        rule = "micro-batch groups belong to the interleaved schedule (vpp > 1)"
        return (Reason(field="layout.vpp_group", value=str(layout.vpp_group), rule=rule, nearest="0"),)
    return _group_reasons(layout, micro_batches) if vpp > 1 else ()


def _group_reasons(layout: Layout, micro_batches: int) -> tuple[Reason, ...]:
    pp, group = layout.pp, group_of(layout)
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


def warmup(layout: Layout, micro_batches: int, pp_rank: int) -> int:
    """Forwards (of one chunk each) that a rank runs before its first backward, less the one paired with it.

    1F1B: pp - r - 1; interleaved: 2 (pp - r - 1) + (v - 1) N. Overlapping expert communication pairs a forward with
    the backward of another micro-batch, which takes one forward more.
    """
    behind = layout.pp - pp_rank - 1
    count = 2 * behind + (layout.vpp - 1) * group_of(layout) if layout.vpp > 1 else behind
    return min(count + (Overlap.EP in layout.overlap), micro_batches * layout.vpp)


def _order(layout: Layout, micro_batches: int) -> list[tuple[int, int]]:
    """(micro_batch, chunk) of every forward: group by group of N, and in each group chunk by chunk."""
    group = group_of(layout) if layout.vpp > 1 else micro_batches
    return [
        (micro_batch, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(layout.vpp)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]


def timetable(layout: Layout, micro_batches: int) -> tuple[tuple[Row, ...], ...]:
    """The rows of each pipeline rank, in the order it runs them: warm-up, (forward, backward) pairs, drain.

    Backwards follow the forwards' order with the chunks reversed. Raises BadInput where there is no table.
    """
    reasons = schedule_reasons(layout, micro_batches)
    if micro_batches < 1:
        reasons = (Reason(field="micro_batches", value=str(micro_batches), rule="must be at least 1", nearest="1"),)
    if reasons:
        raise BadInput(*reasons)
    order = _order(layout, micro_batches)
    forward = [Row(kind=Kind.F, micro_batch=mb, chunk=chunk) for mb, chunk in order]
    backward = [Row(kind=Kind.B, micro_batch=mb, chunk=layout.vpp - 1 - chunk) for mb, chunk in order]
    ranks = []
    for pp_rank in range(layout.pp):
        ahead = warmup(layout, micro_batches, pp_rank)
        pairs = [row for pair in zip(forward[ahead:], backward, strict=False) for row in pair]
        ranks.append((*forward[:ahead], *pairs, *backward[len(forward) - ahead :]))
    return tuple(ranks)


def bubble_fraction(layout: Layout, micro_batches: int) -> float:
    """Idle share of the step for equal chunks and free communication: (pp - 1) / (m v + pp - 1)."""
    return (layout.pp - 1) / (micro_batches * layout.vpp + layout.pp - 1)


def in_flight(layout: Layout, micro_batches: int, pp_rank: int) -> int:
    """Peak number of chunk activations (each of 1 / vpp of the rank's layers) alive on a rank: warm-up plus one."""
    return min(warmup(layout, micro_batches, pp_rank) + 1, micro_batches * layout.vpp)
