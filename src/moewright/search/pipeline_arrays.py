"""Pipelines as arrays: what each pipeline rank holds, and the moments at which its memory can be
fullest.

A piece is what prices are known for: a kind of layer, or one of embedding, head and MTP depth. A
moment is a row of piece counts alive together. Moments that another one of the same rank exceeds in
every count are left out, so a few rows stand for a whole timetable; ranks that hold the same are
stood for by the first of them, which holds most in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moewright.cost.memory import steady_micro_batches
from moewright.cost.step_time import LayerKind, layer_kind
from moewright.rules import schedule, stages
from moewright.spec.layout import Layout, Overlap
from moewright.spec.model import ModelSpec

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True)
class LayerKinds:
    """The pieces of a model, in the order of all arrays: kinds of layer, then an MTP depth,
    embedding, and a pass through the head. An MTP depth holds its layer; it embeds and makes its
    pass through the head itself.
    """

    kinds: tuple[LayerKind, ...]

    @property
    def mtp(self) -> int:
        return len(self.kinds)

    @property
    def embedding(self) -> int:
        return len(self.kinds) + 1

    @property
    def head(self) -> int:
        return len(self.kinds) + 2

    @property
    def count(self) -> int:
        return len(self.kinds) + 3


def list_layer_kinds(model: ModelSpec) -> LayerKinds:
    return LayerKinds(
        kinds=tuple(dict.fromkeys(layer_kind(model, layer) for layer in range(model.layers)))
    )


@dataclass(frozen=True, kw_only=True)
class DistinctRanks:
    """One pipeline. `chunks` [pp ranks that differ][chunk] are piece counts; `ranks` the first rank
    that holds each, `alike` how many do.
    """

    chunks: Array  # [seats, vpp, pieces]
    ranks: tuple[int, ...]
    multiplicity: Array  # [seats]

    @cached_property
    def held(self) -> Array:
        """[seats, pieces]"""
        return np.asarray(self.chunks.sum(axis=1))


def find_distinct_ranks(model: ModelSpec, pieces: LayerKinds, layout: Layout) -> DistinctRanks:
    """What the pipeline ranks of a layout hold. A schedule that is not the same for a rank and the
    ones after it keeps every rank apart.
    """
    rows = np.zeros((layout.pp, layout.vpp, pieces.count))
    place = {kind: index for index, kind in enumerate(pieces.kinds)}
    for chunk in stages.pipeline_chunks(model, layout):
        row = rows[chunk.pp_rank, chunk.vpp_rank]
        for layer in chunk.layers:
            row[place[layer_kind(model, layer)]] += 1
        row[pieces.mtp] = chunk.mtp_layers
        row[pieces.embedding] = chunk.has_embedding
        row[pieces.head] = chunk.has_loss
    first: dict[bytes | int, int] = {}
    alike: dict[bytes | int, int] = {}
    for rank in range(layout.pp):
        key = rank if layout.schedule.splits_backward else rows[rank].tobytes()
        first.setdefault(key, rank)
        alike[key] = alike.get(key, 0) + 1
    ranks = tuple(first.values())
    return DistinctRanks(
        chunks=rows[list(ranks)], ranks=ranks, multiplicity=np.array([alike[key] for key in first])
    )


def peak_snapshots(
    shape: DistinctRanks, pieces: LayerKinds, layout: Layout, micro_batches: int
) -> tuple[Array, ...]:
    """The moments of every seat of a shape [rows, pieces + 1 + pieces], under the timetable of the
    layout: what lives; the passes through the head that a forward ending then makes, and what the
    chunk of a backward running then holds.
    """
    enough, paired = steady_micro_batches(layout, micro_batches), Overlap.EP in layout.overlap
    return tuple(
        _undominated(
            _moments(shape.chunks[seat], pieces, *_rows(layout, enough, rank), paired=paired)
        )
        for seat, rank in enumerate(shape.ranks)
    )


def _rows(layout: Layout, micro_batches: int, rank: int) -> tuple[Array, Array, Array]:
    """Of the rows of a rank: whether each is a forward, its chunk, and whether it frees what its
    forward kept."""
    if layout.schedule.splits_backward:
        table = schedule.timetable(layout, micro_batches)[rank]
        owing = schedule.split_backwards(table)
        runs = [row.kind is schedule.RowKind.F for row in table]
        frees = [
            row.kind is schedule.RowKind.W
            or (row.kind is schedule.RowKind.B and (row.micro_batch, row.chunk) not in owing)
            for row in table
        ]
        return np.array(runs), np.array([row.chunk for row in table]), np.array(frees)
    order = np.array([chunk for _, chunk in schedule.forward_order(layout, micro_batches)])
    ahead, count = schedule.warmup_forwards(layout, micro_batches, rank), len(order)
    forward = np.zeros(2 * count, dtype=bool)
    forward[:ahead] = True
    forward[ahead : 2 * count - ahead : 2] = True
    chunks = np.empty(2 * count, dtype=int)
    chunks[forward] = order
    chunks[~forward] = layout.vpp - 1 - order
    return forward, chunks, ~forward


def _moments(
    chunks: Array, pieces: LayerKinds, forward: Array, chunk: Array, frees: Array, *, paired: bool
) -> Array:
    """[rows, pieces + 1 + pieces]: what lives as each row runs, passes of its forward, pieces of
    its backward.

    cost.saved walks the same rows one by one; where a forward runs beside a backward it holds a
    layer of the forward more, once before either has ended and once after both.
    """
    one = np.eye(chunks.shape[0])[chunk]
    kept = np.cumsum(one * forward[:, None] - one * frees[:, None], axis=0)
    during = kept + one * frees[:, None]  # a backward still holds what it frees
    passes = chunks[:, pieces.mtp] + chunks[:, pieces.head]
    live = during @ chunks
    backward = np.where(forward[:, None], 0.0, chunks[chunk])
    made = np.where(forward, passes[chunk], 0.0)
    rows = np.concatenate([live, made[:, None], backward], axis=1)
    if not paired or forward.sum() == 1:  # a forward cannot run beside its own backward
        return rows
    beside = np.flatnonzero(forward[:-1] & ~forward[1:])
    layers = np.maximum(1, chunks[:, : pieces.mtp + 1].sum(axis=1))
    part = (chunks / layers[:, None])[chunk[beside]]
    ends = kept[beside + 1] @ chunks + part
    starts = (kept[beside] - one[beside]) @ chunks + part
    extra = np.concatenate([made[beside, None], chunks[chunk[beside + 1]]], axis=1)
    alone = np.ones(len(rows), dtype=bool)
    alone[beside] = alone[beside + 1] = False
    both = [np.concatenate([state, extra], axis=1) for state in (starts, ends)]
    return np.concatenate([rows[alone], *both])


def _undominated(rows: Array) -> Array:
    """Rows that no other exceeds in every column; which kinds a backward holds counts, not how
    many."""
    n = (rows.shape[1] - 1) // 2
    keys = rows.copy()
    layers = keys[:, n + 1 : -2]
    layers[:] = layers > 0
    # By their bytes: columns one by one would take far longer. Adding zero leaves one zero.
    whole = np.ascontiguousarray(np.round(keys, 9) + 0.0)
    _, index = np.unique(whole.view(np.dtype((np.void, whole[0].nbytes))), return_index=True)
    rows, keys = rows[index], keys[index]
    left, found = np.argsort(-keys.sum(axis=1), kind="stable"), []
    while len(
        left
    ):  # what exceeds a row has the greater sum, so the first of those left is exceeded by none
        found.append(left[0])
        left = left[~(keys[left] <= keys[left[0]] + 1e-9).all(axis=1)]
    return np.asarray(rows[np.sort(found)])


@dataclass(frozen=True, kw_only=True)
class PipelineBatch:
    """Several pipelines end to end: arrays over pipelines [P] and their seats [Q], and the moments
    [M] of the seats that differ in theirs [D]; `*_starts` say where the seats of each pipeline, and
    the moments of each of D, begin.
    """

    pp: Array  # [P]
    degrees: tuple[int, ...]  # the values of pp
    degree: Array  # [P] place in `degrees`
    vpp: Array  # [P]
    micro_batches: Array  # [P]
    ranks: Array  # [Q, pieces]
    multiplicity: Array  # [Q]
    seat_starts: Array  # [P]
    pipe_of_seat: Array  # [Q]
    snapshots: Array  # [M, pieces + 1 + pieces]
    moment_starts: Array  # [D]
    full: Array  # [Q] place among the D

    @cached_property
    def kept(self) -> Array:
        """[M, pieces + 1] what lives at each moment, and passes through the head of its forward."""
        return np.ascontiguousarray(self.snapshots[:, : self.ranks.shape[1] + 1])

    @cached_property
    def backwards(self) -> tuple[Array, Array]:
        """[backwards that differ, pieces] which layers each holds, and how many MTP depths and
        heads; [M] the backward of each moment.
        """
        held = self.snapshots[:, self.ranks.shape[1] + 1 :].copy()
        held[:, :-3] = held[:, :-3] > 0
        found, place = np.unique(held, axis=0, return_inverse=True)
        return found, place.reshape(-1)

    @cached_property
    def _of_seat(self) -> list[Array]:
        return _in_turn(self.moment_starts, len(self.snapshots))

    @cached_property
    def _of_pipe(self) -> list[Array]:
        return _in_turn(self.seat_starts, len(self.ranks))

    def fullest(self, of_moments: Array) -> Array:
        """[M, ...] -> [Q, ...]: the highest of each seat."""
        return np.asarray(_highest(of_moments, self._of_seat).take(self.full, axis=0))

    def most(self, of_seats: Array, more: Array, pipes: Array) -> Array:
        """[Q, ...] and [Q] -> [some of P, ...]: the highest sum of each of these pipelines."""
        return _highest(of_seats, [turn[pipes] for turn in self._of_pipe], more)

    def slowest_and_all(self, of_seats: Array) -> tuple[Array, Array]:
        """[Q, ...] -> two of [P, ...]: the largest of each pipeline, and the sum over its ranks."""
        weighted = of_seats * self.multiplicity.reshape(-1, *[1] * (of_seats.ndim - 1))
        return _highest(of_seats, self._of_pipe), np.asarray(
            np.add.reduceat(weighted, self.seat_starts, axis=0)
        )


def _in_turn(starts: Array, count: int) -> list[Array]:
    """Of rows in runs that begin at `starts`: the first of every run, the second, and so on; a
    short run ends with its last again and again. The highest of each run is taken over these: far
    faster than ufunc.reduceat.
    """
    lengths = np.diff(np.append(starts, count))
    return [starts + np.minimum(turn, lengths - 1) for turn in range(int(lengths.max()))]


def _highest(rows: Array, turns: Sequence[Array], more: Array | None = None) -> Array:
    """Of the rows, or of their sums with `more` [rows]."""
    found: Array | None = None
    for turn in turns:
        taken = rows.take(turn, axis=0)
        if more is not None:
            taken += more[turn, None]
        found = taken if found is None else np.maximum(found, taken, out=found)
    assert found is not None
    return found


def batch_pipelines(
    layouts: Sequence[Layout],
    shapes: Sequence[DistinctRanks],
    moments: Sequence[Sequence[Array]],
    counts: Sequence[int],
) -> PipelineBatch:
    """Pipelines of these layouts, each with so many micro-batches."""
    of_pipe = [len(shape.ranks) for shape in shapes]
    different: dict[bytes, tuple[int, Array]] = {}
    full = [
        different.setdefault(rows.tobytes(), (len(different), rows))[0]
        for each in moments
        for rows in each
    ]
    rows = [rows for _, rows in different.values()]
    pp = np.array([layout.pp for layout in layouts])
    degrees, degree = np.unique(pp, return_inverse=True)
    return PipelineBatch(
        pp=pp,
        degrees=tuple(int(each) for each in degrees),
        degree=degree,
        vpp=np.array([layout.vpp for layout in layouts]),
        micro_batches=np.array(counts),
        ranks=np.concatenate([shape.held for shape in shapes]),
        multiplicity=np.concatenate([shape.multiplicity for shape in shapes]),
        seat_starts=np.cumsum([0, *of_pipe[:-1]]),
        pipe_of_seat=np.repeat(np.arange(len(shapes)), of_pipe),
        snapshots=np.concatenate(rows),
        moment_starts=np.cumsum([0, *(len(each) for each in rows[:-1])]),
        full=np.array(full),
    )
