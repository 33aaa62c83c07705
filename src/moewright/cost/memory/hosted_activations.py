"""The activations that a rank has sent to host memory and not yet taken back, at their most.

They are counted between the rows of its timetable: a forward has sent everything when it ends, and
its backward has taken everything back, whether weight gradients follow or not; where whole chunks
come back a row ahead, the row before has. A forward and a backward that run beside each other end
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from moewright.cost.memory.activations import ActivationContext, layer_activations, policy_of
from moewright.cost.routed_rows import ExpertRows
from moewright.cost.stage_parts import layer_columns, list_parts
from moewright.rules.routing import DispatchCounts
from moewright.rules.saved.activation_offload import (
    activation_offloads,
    chunk_to_fetch,
    fetches_chunks,
)
from moewright.rules.timetable.paired_passes import can_pair, paired_rows
from moewright.rules.timetable.stages import Chunk
from moewright.rules.timetable.timetable_row import RowKind, TimetableRow
from moewright.spec.ledger import Component, MemoryRow, Module


def hosted_rows(
    context: ActivationContext,
    rows: ExpertRows,
    *,
    chunks: Sequence[Chunk],
    table: Sequence[TimetableRow],
) -> tuple[MemoryRow, ...]:
    """Return the memory row of a rank's activations on the host; () where none go there.

    `rows` may differ between micro-batches and layers, as those of a recorded step do.
    """
    if not activation_offloads(context.job.layout.offload):
        return ()
    sent = _sent_bytes(context, rows, chunks, [row for row in table if row.kind is RowKind.F])
    change = {RowKind.F: 1, RowKind.B: -1, RowKind.W: 0}
    changes = [change[row.kind] * sent[row.micro_batch, row.chunk] for row in table]
    if fetches_chunks(context.job.layout):
        for index in range(len(table)):
            if chunk_to_fetch(table, index) is not None:
                changes[index] += changes[index + 1]
                changes[index + 1] = 0
    live = np.cumsum(changes)
    if can_pair(context.job.layout, context.job.micro_batches):
        live = np.delete(live, sorted(paired_rows(table)))
    most = int(live.max(initial=0))
    return (MemoryRow(component=Component.HOST, module=Module.OTHER, bytes=most),)


def _sent_bytes(
    context: ActivationContext,
    rows: ExpertRows,
    chunks: Sequence[Chunk],
    forwards: Sequence[TimetableRow],
) -> dict[tuple[int, int], int]:
    """Return the bytes that each forward sends to the host, by micro-batch and chunk."""
    layout = context.job.layout
    parts = list_parts(context.job.model, layout)
    policies = policy_of(layout)

    @cache
    def layer_bytes(column: int, load: float, dispatch: DispatchCounts | None) -> int:
        part = parts.layers[column]
        kept = layer_activations(context, policies, part, load=load, dispatch=dispatch)
        return int(kept.offloaded[0].sum())

    columns = [layer_columns(layout, parts, chunk, context.job.model) for chunk in chunks]
    return {
        (row.micro_batch, row.chunk): sum(
            layer_bytes(
                column,
                rows.load_factor(row.micro_batch, layer),
                rows.dispatch_counts(row.micro_batch, layer),
            )
            for layer, column in columns[row.chunk]
        )
        for row in forwards
    }
