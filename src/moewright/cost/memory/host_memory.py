"""What ranks keep in host memory: states, sent activations, copies of states.

The memory of a node's host: the part of one rank, and whether what ranks keep there fits. Offloaded
states and activations and the copies of asynchronous checkpoints lie there.

The activations that a rank has sent to host memory and not yet taken back, at their most. They are
counted between the rows of its timetable: a forward has sent everything when it ends, and its
backward has taken everything back, whether weight gradients follow or not; where whole chunks come
back a row ahead, the row before has. A forward and a backward that run beside each other end
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.memory.activations import ActivationContext, layer_activations, policy_of
from moewright.cost.memory.model_states import MASTER_BYTES
from moewright.cost.routed_rows import ExpertRows
from moewright.cost.stage_parts import layer_columns, list_parts
from moewright.rules.optimizers import stored_nbytes
from moewright.rules.routing import DispatchCounts
from moewright.rules.saved.saved_tensor import (
    activation_offloads,
    chunk_to_fetch,
    fetches_chunks,
)
from moewright.rules.timetable.paired_passes import can_pair, paired_rows
from moewright.rules.timetable.stages import Chunk
from moewright.rules.timetable.timetable_row import RowKind, TimetableRow
from moewright.spec.hardware import Hardware
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.plan import Verdict
from moewright.spec.workload import Workload

# The rest is for the operating system, the trainer's processes and what they read.
USABLE_SHARE = 0.9
_FIT_PROBABILITIES = {Verdict.FITS: 1.0, Verdict.UNCERTAIN: 0.5, Verdict.OOM: 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """The most that a rank keeps in host memory, its part of that, and the verdict.

    A `capacity_bytes` of 0 means that nobody says how much there is.
    """

    bytes: int
    capacity_bytes: int
    verdict: Verdict

    @property
    def fit_probability(self) -> float:
        """The probability that the hosts hold it."""
        return _FIT_PROBABILITIES[self.verdict]

    def join(self, of_device: Verdict) -> Verdict:
        """Return the worse of this verdict and that on the device's memory."""
        # The mapping lists verdicts from best to worst.
        order = list(_FIT_PROBABILITIES)
        return max(self.verdict, of_device, key=order.index)


def judge_host_memory(
    hardware: Hardware, constants: Constants, ranks: Sequence[Iterable[MemoryRow]]
) -> HostMemory:
    """Judge what ranks keep in host memory, as if all of a node held as much as the fullest."""
    nbytes = max(
        sum(row.bytes for row in rows if row.component is Component.HOST) for rows in ranks
    )
    capacity = host_capacity(hardware, constants)
    verdict = Verdict.OOM
    if nbytes <= USABLE_SHARE * capacity:
        verdict = Verdict.FITS
    elif nbytes <= capacity:
        verdict = Verdict.UNCERTAIN
    known_bytes = 0 if capacity == inf else round(capacity)
    return HostMemory(bytes=nbytes, capacity_bytes=known_bytes, verdict=verdict)


def host_capacity(hardware: Hardware, constants: Constants) -> float:
    """Return the bytes of host memory for each rank of a node; infinite where nobody says."""
    node_bytes = constants["host_memory_bytes"]
    if not node_bytes:
        return inf
    return node_bytes / min(hardware.count, hardware.fabric.devices_per_node)


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
        # A paired forward ends with the backward behind it: between the two there is no moment.
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
    parts = list_parts(context.job.model, layout, context.job.workload.trainer)
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


def element_nbytes(workload: Workload) -> int:
    """Return the bytes of a copied element: its master weight and its moments."""
    return MASTER_BYTES + stored_nbytes(workload.optimizer)
