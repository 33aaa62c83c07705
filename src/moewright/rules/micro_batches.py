"""How a global batch splits into micro-batches, and how many tokens of one a rank sees."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.rules.grid import min_world_size
from moewright.rules.limits.divisibility import divisors, nearest_legal, nearest_multiples
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout
from moewright.spec.workload import Workload


def micro_batches(workload: Workload, layout: Layout) -> int:
    """Return the micro-batches of a step, GBS / (mbs * dp).

    Raises:
        BadInput: The global batch is not a whole number of micro-batches.
    """
    reasons = tuple(check_batch(workload, layout))
    if reasons:
        raise BadInput(*reasons)
    return workload.global_batch // (layout.mbs * layout.dp)


def check_batch(workload: Workload, layout: Layout) -> Iterator[Reason]:
    """Yield why the global batch does not split into whole micro-batches, GBS = mbs * dp * m."""
    batch = workload.global_batch
    dp = layout.dp
    mbs = layout.mbs
    if dp < 1:
        dense_ranks = layout.tp * layout.cp * layout.pp
        least = min_world_size(
            tp=layout.tp, cp=layout.cp, pp=layout.pp, ep=layout.ep, etp=layout.etp
        )
        yield Reason(
            field="layout.world_size",
            value=str(layout.world_size),
            rule=f"world_size={layout.world_size} is less than tp * cp * pp = {dense_ranks}",
            nearest=str(least),
        )
        return
    if batch % (mbs * dp) == 0:
        return
    rule = f"mbs * dp = {mbs} * {dp} must divide global_batch={batch}"
    batches = nearest_multiples(batch, mbs * dp)
    if batch % dp == 0:
        sizes = nearest_legal(mbs, divisors(batch // dp))
        near = f"{sizes}, or global_batch {batches}"
        yield Reason(field="layout.mbs", value=str(mbs), rule=rule, nearest=near)
    else:
        yield Reason(field="workload.global_batch", value=str(batch), rule=rule, nearest=batches)


def tp_group_tokens(workload: Workload, layout: Layout) -> int:
    """Return the tokens of one micro-batch on a TP group (T): its CP part of every sequence."""
    return workload.seq_len * layout.mbs // layout.cp


def micro_batch_tokens(workload: Workload, layout: Layout) -> int:
    """Return the tokens of one micro-batch that a rank routes (t).

    These are the TP group's tokens, or the rank's part of them under sequence parallelism.
    """
    tokens = tp_group_tokens(workload, layout)
    return tokens // layout.tp if layout.sp else tokens
