"""The generalized interleaved schedule, whose micro-batches enter one by one.

Wan et al., "PipeOffload" (arXiv 2503.01328): GIS and GIS-H. Megatron-LM's interleaved timetable
takes a group of micro-batches through a chunk before the next chunk begins, so that most of what a
rank holds comes and goes at once. Here every micro-batch repeats one pattern, a constant time after
the one before it, so that each chunk has its own share in what a rank holds at any moment. A rank
that offloads the chunk that it holds longest is rid of the largest share.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from moewright.rules.timetable.timetable_row import RowKind, Table, TimetableRow

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
