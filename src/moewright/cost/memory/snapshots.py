"""The moments at which the memory of a pipeline rank can be fullest, from its timetable as arrays.

A rank holds what a forward kept until the backward of the same micro-batch and chunk has ended.
Where weight gradients have rows of their own, it then holds what they need until they have run.
Where expert communication overlaps, a forward runs layer by layer beside the backward of another
micro-batch: the backward frees a layer for each one that the forward keeps, so that the two hold
one more layer, not one more chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moewright.cost.stage_parts import Array
from moewright.rules.saved.saved_tensor import fetches_chunks
from moewright.rules.timetable import schedule, timetable_row
from moewright.rules.timetable.paired_passes import can_pair
from moewright.spec.layout import Layout

_FORWARD, _BACKWARD, _WEIGHTS = range(3)
_KINDS = {
    timetable_row.RowKind.F: _FORWARD,
    timetable_row.RowKind.B: _BACKWARD,
    timetable_row.RowKind.W: _WEIGHTS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTable:
    """The rows of a rank's timetable as arrays [rows].

    `frees` marks the rows that free what their forward kept. Of those, `owes` marks the rows that
    leave weight gradients, and `settles` the rows that compute these. `is_paired` marks the
    forwards that run beside the backward in the next row. `fetches` marks the rows beside which the
    chunk of the next row, a backward, comes back from the host.
    """

    micro_batch: Array
    chunk: Array
    is_forward: Array
    frees: Array
    owes: Array
    settles: Array
    is_paired: Array
    fetches: Array


def rank_table(layout: Layout, micro_batches: int, pp_rank: int) -> RankTable:
    """Build the rows of one rank."""
    if layout.schedule.splits_backward:
        return table_from_rows(layout, schedule.timetable(layout, micro_batches)[pp_rank])
    order = np.array(schedule.forward_order(layout, micro_batches))
    ahead = schedule.warmup_forwards(layout, micro_batches, pp_rank)
    count = len(order)
    is_forward = np.zeros(2 * count, dtype=bool)
    is_forward[:ahead] = True
    # Warm-up forwards, then pairs, then a cool-down of as many backwards as there were in warm-up.
    is_forward[ahead : 2 * count - ahead : 2] = True
    micro_batch, chunk = np.empty((2, 2 * count), dtype=int)
    for direction, chunks in (
        (is_forward, order[:, 1]),
        (~is_forward, layout.vpp - 1 - order[:, 1]),
    ):
        micro_batch[direction] = order[:, 0]
        chunk[direction] = chunks
    kind = np.where(is_forward, _FORWARD, _BACKWARD)
    return _build_table(layout, kind, micro_batch, chunk)


def table_from_rows(layout: Layout, rows: Sequence[timetable_row.TimetableRow]) -> RankTable:
    """Build the arrays of a timetable's rows."""
    kind = np.array([_KINDS[row.kind] for row in rows])
    micro_batch = np.array([row.micro_batch for row in rows])
    chunk = np.array([row.chunk for row in rows])
    return _build_table(layout, kind, micro_batch, chunk)


def _build_table(layout: Layout, kind: Array, micro_batch: Array, chunk: Array) -> RankTable:
    key = micro_batch * layout.vpp + chunk
    is_forward = kind == _FORWARD
    is_paired = np.zeros(len(kind), dtype=bool)
    micro_batches = 0
    if len(micro_batch):
        micro_batches = int(micro_batch.max()) + 1
    if can_pair(layout, micro_batches):
        # A forward cannot run beside its own backward.
        is_paired[:-1] = is_forward[:-1] & (kind[1:] == _BACKWARD) & (key[:-1] != key[1:])
    frees = kind == _BACKWARD
    settles = kind == _WEIGHTS
    return RankTable(
        micro_batch=micro_batch,
        chunk=chunk,
        is_forward=is_forward,
        frees=frees,
        owes=frees & np.isin(key, key[settles]),
        settles=settles,
        is_paired=is_paired,
        fetches=_mark_fetches(layout, kind, key),
    )


def _mark_fetches(layout: Layout, kind: Array, key: Array) -> Array:
    """Mark the rows of `chunk_to_fetch`, where whole chunks are fetched."""
    marks = np.zeros(len(kind), dtype=bool)
    if fetches_chunks(layout):
        marks[:-1] = (kind[1:] == _BACKWARD) & (key[:-1] != key[1:])
    return marks


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshots:
    """The contents alive at each moment, and the items that run then.

    `live` [snapshots, columns] is what forwards have kept, `owed` [snapshots, columns] what weight
    gradients wait with, `fetched` [snapshots, columns] what has come back from the host (no rows
    where chunks are not fetched whole). The others [snapshots] are items, -1 for none: the forward
    of `forward`
    ends, the backward of `backward` runs, the weight gradients of `weights` are computed, and
    `paired` holds one more layer because its forward runs beside that backward.
    """

    live: Array
    owed: Array
    fetched: Array
    forward: Array
    backward: Array
    weights: Array
    paired: Array


def take_snapshots(
    table: RankTable,
    contents: Array,
    item: Array,
    owed_contents: Array | None = None,
    sent_contents: Array | None = None,
) -> Snapshots:
    """Return what is alive at the moments of a timetable, in the order of its rows.

    `contents` [items, columns] is what a forward of each item keeps, in any unit, and
    `owed_contents` what its weight gradients wait with and `sent_contents` what it has on the host
    (None: the same); `item` [rows] is the item of each row: its chunk, or its micro-batch and chunk
    where micro-batches differ.
    """
    row_contents = contents[item]
    change = table.is_forward.astype(float) - table.frees  # 1 keeps its contents, -1 frees them
    kept = np.cumsum(row_contents * change[:, None], axis=0)
    row_owed = row_contents if owed_contents is None else owed_contents[item]
    debt = table.owes.astype(float) - table.settles
    owed = np.cumsum(row_owed * debt[:, None], axis=0)
    first = np.flatnonzero(table.is_paired)  # the forward of each pair
    is_alone = np.ones(len(item), dtype=bool)
    is_alone[first] = is_alone[first + 1] = False
    sent = contents if sent_contents is None else sent_contents
    fetched = _fetched_contents(table, sent[item])
    none = np.full(len(item), -1)
    # A backward still holds what it frees.
    during = kept + row_contents * table.frees[:, None]
    live = during[is_alone]
    # While a backward runs, what it owes takes the place of what it frees. While weight gradients
    # are computed, what they wait with is still there.
    owed_live = (owed - row_owed * debt[:, None])[is_alone]
    forward = np.where(table.is_forward, item, none)[is_alone]
    backward = np.where(table.frees, item, none)[is_alone]
    weights = np.where(table.settles, item, none)[is_alone]
    paired = none[is_alone]
    if len(first):
        # While layers of both run, with what was alive before either or with what is after both;
        # and as the forward ends with the head, when the backward has freed its last layer.
        pairs = np.repeat(first, 3)
        ends = np.stack(
            [kept[first] - row_contents[first], kept[first + 1], kept[first + 1]], axis=1
        )
        is_head = np.tile([False, False, True], len(first))
        # Stable: the three moments of a pair keep their order at the index of its forward.
        order = np.argsort(np.concatenate([np.flatnonzero(is_alone), pairs]), kind="stable")
        live = np.concatenate([live, ends.reshape(-1, contents.shape[1])])[order]
        owed_ends = np.stack([owed[first], owed[first + 1], owed[first + 1]], axis=1)
        owed_live = np.concatenate([owed_live, owed_ends.reshape(len(pairs), -1)])[order]
        weights = np.concatenate([weights, np.full(len(pairs), -1)])[order]
        forward = np.concatenate([forward, np.where(is_head, item[pairs], -1)])[order]
        backward = np.concatenate([backward, np.where(is_head, -1, item[pairs + 1])])[order]
        paired = np.concatenate([paired, np.where(is_head, -1, item[pairs])])[order]
    return Snapshots(
        live=live,
        owed=owed_live,
        fetched=fetched,
        forward=forward,
        backward=backward,
        weights=weights,
        paired=paired,
    )


def _fetched_contents(table: RankTable, sent: Array) -> Array:
    """Return what has come back from the host at each row [rows, columns]; no rows for nothing.

    `sent` [rows, columns] is what the item of a row has there. It comes back beside the row before
    its backward, and stays until that ends. Of tables that fetch, no rows run beside each other.
    """
    if not table.fetches.any():
        return np.zeros((0, sent.shape[1]))
    fetched = np.zeros_like(sent)
    first = np.flatnonzero(table.fetches)
    fetched[first] += sent[first + 1]
    fetched[first + 1] += sent[first + 1]
    return fetched
