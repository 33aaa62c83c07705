"""Run a timetable on paper: when each row ends if chunks take equal time and communication takes none."""

from __future__ import annotations

from collections.abc import Sequence

from moewright.rules.schedule import Kind, Row


def makespan_s(table: Sequence[Sequence[Row]], *, forward_s: float, backward_s: float) -> float:
    """Seconds from the first forward to the last backward of a table of F and B rows (see `ends_s`)."""
    return max(ends_s(table, forward_s=forward_s, backward_s=backward_s).values())


def ends_s(
    table: Sequence[Sequence[Row]], *, forward_s: float, backward_s: float
) -> dict[tuple[Kind, int, int], float]:
    """When each F and B row of a table ends, in seconds, by (kind, micro-batch, virtual stage).

    A forward waits for the same micro-batch's forward one virtual stage before; a backward for its own forward and
    for the backward one stage after. Raises RuntimeError when the rows wait for each other for ever.
    """
    pp = len(table)
    last_stage = pp * (1 + max(row.chunk for row in table[0])) - 1
    ended: dict[tuple[Kind, int, int], float] = {}
    clock = [0.0] * pp
    position = [0] * pp
    awake = list(range(pp))
    while awake:
        rank = awake.pop()
        while position[rank] < len(table[rank]):
            row = table[rank][position[rank]]
            stage = row.chunk * pp + rank
            needs = _needs(row, stage, last_stage)
            if any(need not in ended for need in needs):
                break
            start = max([clock[rank], *(ended[need] for need in needs)])
            clock[rank] = start + (forward_s if row.kind is Kind.F else backward_s)
            ended[row.kind, row.micro_batch, stage] = clock[rank]
            position[rank] += 1
            awake.append((rank + (1 if row.kind is Kind.F else -1)) % pp)
    if any(position[rank] < len(table[rank]) for rank in range(pp)):
        stuck = [rank for rank in range(pp) if position[rank] < len(table[rank])]
        raise RuntimeError(f"the timetable deadlocks on pipeline ranks {stuck}")
    return ended


def _needs(row: Row, stage: int, last_stage: int) -> tuple[tuple[Kind, int, int], ...]:
    if row.kind is Kind.F:
        return ((Kind.F, row.micro_batch, stage - 1),) if stage else ()
    own = (Kind.F, row.micro_batch, stage)
    return (own,) if stage == last_stage else (own, (Kind.B, row.micro_batch, stage + 1))


def peak_live(rows: Sequence[Row], chunk_weights: Sequence[int]) -> int:
    """Highest sum of `chunk_weights` over forwards of a rank whose backward has not run yet (weight 1: a count)."""
    live = peak = 0
    for row in rows:
        if row.kind is Kind.F:
            live += chunk_weights[row.chunk]
            peak = max(peak, live)
        elif row.kind is Kind.B:
            live -= chunk_weights[row.chunk]
    return peak
