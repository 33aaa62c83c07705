"""The pipeline timetable: the forwards and backwards of each pipeline rank, in order.

See docs/formulas.md 5. The planner simulates these rows and the engine executes them; neither knows
a schedule by name. The `chunk` of a row is the virtual-pipeline index on its rank, and
`stages.virtual_stage` says which virtual stage that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import gcd
from types import MappingProxyType

from moewright.rules.timetable.timetable_row import RowKind, Table, TimetableRow
from moewright.rules.timetable.zero_bubble import dualpipev, v_half, v_min, zb_h1, zbv
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout, Overlap, Schedule

# The generalized interleaved schedule, whose micro-batches enter one by one.
#
# Wan et al., "PipeOffload" (arXiv 2503.01328): GIS and GIS-H. Megatron-LM's interleaved timetable
# takes a group of micro-batches through a chunk before the next chunk begins, so that most of what
# a rank holds comes and goes at once. Here every micro-batch repeats one pattern, a constant time
# after the one before it, so that each chunk has its own share in what a rank holds at any moment.
# A rank that offloads the chunk that it holds longest is rid of the largest share.

_ROW_S = 3  # F, B and W of a chunk take a second each


def shortest_interval(pp: int) -> int:
    """Return the fewest micro-batches between the chunks of one: fewer would make ranks wait."""
    return (pp + 1) // 2


@lru_cache(maxsize=8)  # planner and engine ask rank by rank
def generalized_interleaved(pp: int, vpp: int, interval: int, micro_batches: int) -> Table:
    """Build the rows of all ranks; weight gradients follow the backward that leaves them.

    A rank runs the forwards of two chunks of a micro-batch `interval` micro-batches apart, and the
    backwards too. With interval = pp (GIS) it holds as much as 1F1B, and one chunk more; with half
    of that (GIS-H) the share of all chunks but the last is half.
    """
    period_s = _ROW_S * vpp
    # What chunks start at takes each of the `vpp` turns of a period once.
    turns = [
        _ROW_S * (interval * chunk + chunk // (vpp // gcd(vpp, interval))) for chunk in range(vpp)
    ]
    return tuple(
        tuple(
            row
            for _, row in sorted(
                (
                    (start_s + period_s * micro_batch, row)
                    for micro_batch in range(micro_batches)
                    for start_s, row in _pattern(pp, pp_rank, turns, micro_batch)
                ),
                key=lambda item: item[0],
            )
        )
        for pp_rank in range(pp)
    )


def _pattern(
    pp: int, pp_rank: int, turns: list[int], micro_batch: int
) -> list[tuple[int, TimetableRow]]:
    """Return the rows of a micro-batch on a rank, each with its start after the micro-batch's.

    A forward reaches the next rank after one second and a gradient after two, as if it came with
    the weight gradients; no two rows of a rank start at once.
    """
    rows = []
    first_backward_s = turns[-1] + 3 * pp - 2 - 2 * pp_rank
    for chunk, turn_s in enumerate(turns):
        backward_s = first_backward_s + turns[len(turns) - 1 - chunk]
        starts = (
            (RowKind.F, turn_s + pp_rank),
            (RowKind.B, backward_s),
            (RowKind.W, backward_s + 1),
        )
        rows += [
            (start_s, TimetableRow(kind=kind, micro_batch=micro_batch, chunk=chunk))
            for kind, start_s in starts
        ]
    return rows


# Builders of the rows of all ranks, given pp and the micro-batches.
_SPLIT_BUILDERS: Mapping[Schedule, Callable[[int, int], Table]] = MappingProxyType(
    {
        Schedule.ZB_H1: zb_h1,
        Schedule.ZBV: zbv,
        Schedule.V_HALF: v_half,
        Schedule.V_MIN: v_min,
        Schedule.DUALPIPEV: dualpipev,
    }
)


def interleaved_group_size(layout: Layout) -> int:
    """Return the micro-batches (N) that an interleaved rank runs before it switches chunks."""
    return layout.vpp_group or layout.pp


def chunk_interval(layout: Layout) -> int:
    """Return the micro-batches between the chunks of a micro-batch under gis."""
    return layout.vpp_group or shortest_interval(layout.pp)


def check_schedule(layout: Layout, micro_batches: int) -> tuple[Reason, ...]:
    """Return the rules of the timetable that are broken; () when there is a timetable.

    The rules are about the layout and the micro-batches of a step.
    """
    schedule = layout.schedule
    vpp = layout.vpp
    if schedule.splits_backward:
        return _check_split_schedule(layout, micro_batches)
    if vpp > 1 and layout.pp == 1:
        return (_reason("vpp", vpp, "virtual stages need pp > 1", "1"),)
    if vpp > 1 and schedule is Schedule.ONE_F_ONE_B:
        rule = f"vpp={vpp} needs the interleaved schedule"
        return (_reason("schedule", schedule, rule, Schedule.INTERLEAVED),)
    if vpp == 1 and schedule is Schedule.INTERLEAVED:
        rule = "the interleaved schedule needs vpp > 1"
        return (_reason("schedule", schedule, rule, Schedule.ONE_F_ONE_B),)
    if vpp == 1 and layout.vpp_group:
        rule = "micro-batch groups belong to the interleaved schedule (vpp > 1)"
        return (_reason("vpp_group", layout.vpp_group, rule, "0"),)
    if vpp > 1:
        return _check_interleaved(layout, micro_batches)
    return ()


def _reason(key: str, value: object, rule: str, nearest: str) -> Reason:
    return Reason(field=f"layout.{key}", value=str(value), rule=rule, nearest=nearest)


def _check_split_schedule(layout: Layout, micro_batches: int) -> tuple[Reason, ...]:
    schedule = layout.schedule
    pp = layout.pp
    chunks = 2 if schedule.is_v_shaped else 1
    if pp == 1:
        return (_reason("schedule", schedule, f"{schedule} needs pp > 1", Schedule.ONE_F_ONE_B),)
    if schedule is Schedule.GIS:
        return _check_generalized(layout)
    if layout.vpp != chunks:
        plural = "s" * (chunks > 1)
        rule = f"{schedule} takes {chunks} chunk{plural} a rank"
        return (_reason("vpp", layout.vpp, rule, str(chunks)),)
    if layout.vpp_group:
        rule = "micro-batch groups belong to the interleaved schedule"
        return (_reason("vpp_group", layout.vpp_group, rule, "0"),)
    if schedule is Schedule.DUALPIPEV and micro_batches < 2 * pp:
        rule = f"dualpipev needs at least 2 * pp = {2 * pp} micro-batches a step"
        return (_too_few(layout, micro_batches, 2 * pp, rule),)
    return ()


def _check_generalized(layout: Layout) -> tuple[Reason, ...]:
    if layout.vpp == 1:
        return (_reason("vpp", 1, f"{layout.schedule} needs vpp > 1", "2"),)
    least = shortest_interval(layout.pp)
    interval = chunk_interval(layout)
    if least <= interval <= layout.pp:
        return ()
    rule = (
        f"{layout.schedule} takes pp / 2 to pp micro-batches between chunks: {least} to {layout.pp}"
    )
    nearest = str(min(max(interval, least), layout.pp))
    return (_reason("vpp_group", layout.vpp_group, rule, nearest),)


def _too_few(layout: Layout, micro_batches: int, needed: int, rule: str) -> Reason:
    """Return the Reason for a global batch of too few micro-batches."""
    sequences = layout.mbs * layout.dp  # of one micro-batch on all data-parallel ranks
    return Reason(
        field="workload.global_batch",
        value=str(micro_batches * sequences),
        rule=f"{rule}; there are {micro_batches}",
        nearest=str(needed * sequences),
    )


def _check_interleaved(layout: Layout, micro_batches: int) -> tuple[Reason, ...]:
    pp = layout.pp
    group = interleaved_group_size(layout)
    if micro_batches < pp:
        rule = f"the interleaved schedule needs at least pp={pp} micro-batches a step"
        return (_too_few(layout, micro_batches, pp, rule),)
    if _group_fits(group, pp, micro_batches):
        return ()
    start = min(max(group, pp), micro_batches)
    below = next((n for n in range(start, pp - 1, -1) if _group_fits(n, pp, micro_batches)), None)
    above = next(n for n in range(start, micro_batches + 1) if _group_fits(n, pp, micro_batches))
    rule = f"pp={pp} <= group <= m={micro_batches}, and m modulo group must be 0 or at least pp"
    nearest = " or ".join(str(n) for n in dict.fromkeys((below, above)) if n is not None)
    return (_reason("vpp_group", group, rule, nearest),)


def _group_fits(group: int, pp: int, micro_batches: int) -> bool:
    if not pp <= group <= micro_batches:
        return False
    remainder = micro_batches % group
    return remainder == 0 or remainder >= pp


def warmup_forwards(layout: Layout, micro_batches: int, pp_rank: int) -> int:
    """Return the warm-up forwards of a rank: all before its first (forward, backward) pair.

    Each is a forward of one chunk. 1F1B: pp - r - 1; interleaved: 2 (pp - r - 1) + (v - 1) N.
    Overlapped expert communication pairs a forward with the backward of another micro-batch, which
    takes one more forward.
    """
    count = layout.pp - pp_rank - 1
    if layout.vpp > 1:
        count = 2 * count + (layout.vpp - 1) * interleaved_group_size(layout)
    if Overlap.EP in layout.overlap:
        count += 1
    return min(count, micro_batches * layout.vpp)


def forward_order(layout: Layout, micro_batches: int) -> list[tuple[int, int]]:
    """Return (micro_batch, chunk) of every forward: group by group of N, in each chunk by chunk."""
    group = interleaved_group_size(layout) if layout.vpp > 1 else micro_batches
    return [
        (micro_batch, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(layout.vpp)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]


@lru_cache(maxsize=8)  # planner and engine ask rank by rank
def _build_split(schedule: Schedule, pp: int, micro_batches: int) -> Table:
    return _SPLIT_BUILDERS[schedule](pp, micro_batches)


def timetable(layout: Layout, micro_batches: int) -> Table:
    """Return the rows of each pipeline rank: warm-up, (forward, backward) pairs, cool-down.

    Backwards follow the order of the forwards with the chunks reversed.

    Raises:
        BadInput: There is no timetable for the layout and the micro-batches.
    """
    if micro_batches < 1:
        rule = "must be at least 1"
        raise BadInput(
            Reason(field="micro_batches", value=str(micro_batches), rule=rule, nearest="1")
        )
    reasons = check_schedule(layout, micro_batches)
    if reasons:
        raise BadInput(*reasons)
    if layout.schedule is Schedule.GIS:
        return generalized_interleaved(layout.pp, layout.vpp, chunk_interval(layout), micro_batches)
    if layout.schedule.splits_backward:
        return _build_split(layout.schedule, layout.pp, micro_batches)
    order = forward_order(layout, micro_batches)
    forwards = [TimetableRow(kind=RowKind.F, micro_batch=mb, chunk=chunk) for mb, chunk in order]
    backwards = [
        TimetableRow(kind=RowKind.B, micro_batch=mb, chunk=layout.vpp - 1 - chunk)
        for mb, chunk in order
    ]
    ranks = []
    for pp_rank in range(layout.pp):
        ahead = warmup_forwards(layout, micro_batches, pp_rank)
        # There are more backwards than forwards left: the cool-down takes the rest.
        pairs = [row for pair in zip(forwards[ahead:], backwards, strict=False) for row in pair]
        ranks.append((*forwards[:ahead], *pairs, *backwards[len(forwards) - ahead :]))
    return tuple(ranks)


def bubble_fraction(layout: Layout, micro_batches: int) -> float:
    """Return the idle share of a step of 1F1B and interleaved: (pp - 1) / (m v + pp - 1).

    It is exact for equal chunks and free communication.
    """
    return (layout.pp - 1) / (micro_batches * layout.vpp + layout.pp - 1)


def split_backwards(rows: Sequence[TimetableRow]) -> frozenset[tuple[int, int]]:
    """Return (micro-batch, chunk) of every backward that leaves weight gradients to a W row."""
    return frozenset((row.micro_batch, row.chunk) for row in rows if row.kind is RowKind.W)


def max_in_flight(layout: Layout, micro_batches: int, pp_rank: int) -> int:
    """Return the highest number of chunk activations alive on a rank.

    Each is of 1 / vpp of the rank's layers. 1F1B and interleaved: warm-up plus one. Where weight
    gradients are split off, a chunk lives until its W row.
    """
    if layout.schedule.splits_backward:
        # 4 pp micro-batches fill every pipeline here; the rows behind repeat and hold no more.
        return peak_live_chunks(timetable(layout, min(micro_batches, 4 * layout.pp))[pp_rank])
    return min(warmup_forwards(layout, micro_batches, pp_rank) + 1, micro_batches * layout.vpp)


def peak_live_chunks(rows: Sequence[TimetableRow]) -> int:
    """Return the highest number of chunk activations alive as a rank runs its rows."""
    split = split_backwards(rows)
    live = 0
    peak = 0
    for row in rows:
        if row.kind is RowKind.F:
            live += 1
            peak = max(peak, live)
        elif row.kind is RowKind.W or (row.micro_batch, row.chunk) not in split:
            live -= 1
    return peak
