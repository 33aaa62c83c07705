"""A forward beside a backward of another micro-batch, in parts of layers (docs/formulas.md 11).

Rows move to experts and back four times in a layer: dispatch and combine, forward and backward.
These exchanges cut a pass into segments, and while the exchange that ends a segment travels, the
rank runs a segment of the other pass. `pair_passes` says which. The executor takes turns as it says
(engine.comm.pass_turns), and the planner counts by it what is alive (cost.memory.paired_memory).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from moewright.rules.saved.recompute import layer_recompute
from moewright.rules.timetable.schedule import interleaved_group_size
from moewright.rules.timetable.stages import Chunk, chunk_layers
from moewright.rules.timetable.timetable_row import RowKind, TimetableRow
from moewright.spec.layout import Layout, Overlap, Recompute
from moewright.spec.model import ModelSpec


class PassWork(StrEnum):
    """What a pass computes without an exchange between."""

    EMBEDDING = "embedding"
    WHOLE = "whole layer"  # one without experts
    BEFORE = "before dispatch"  # attention, router and the sort of rows
    EXPERTS = "experts"
    AFTER = "after combine"  # the sum of a token's rows, and shared experts
    HEAD = "head"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkStep:
    """A piece of a pass: its work, in which layer, and whether a backward replays a forward there.

    Layers are numbered as by rules.shapes.parameters; -1 where the work is in none.
    """

    work: PassWork
    layer: int = -1
    is_replay: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSegment:
    """The work of a pass between two exchanges; after all but the last, an exchange starts."""

    kind: RowKind
    steps: tuple[WorkStep, ...]


def forward_segments(model: ModelSpec, chunk: Chunk) -> tuple[PassSegment, ...]:
    """Cut the forward of a chunk into segments."""
    return _cut(RowKind.F, _forward_steps(model, chunk))


def backward_segments(model: ModelSpec, layout: Layout, chunk: Chunk) -> tuple[PassSegment, ...]:
    """Cut the backward of a chunk into segments, in which replayed forwards exchange rows too."""
    return _cut(RowKind.B, _backward_steps(model, layout, chunk))


def pair_passes(
    forward: Sequence[PassSegment], backward: Sequence[PassSegment]
) -> tuple[PassSegment, ...]:
    """Merge two passes so that as many exchanges as can be have a segment of the other beside them.

    Segments alternate where both passes have as many. Where a pass has more, they are spread over
    it, and both passes end together. The backward begins, because it frees memory; a backward
    without an exchange runs beside the first exchange of the forward.
    """
    ordered = [
        *(
            (number / len(backward), 0 if len(backward) > 1 else 2)
            for number in range(len(backward))
        ),
        *((number / len(forward), 1) for number in range(len(forward))),
    ]
    segments = (*backward, *forward)
    return tuple(segments[i] for i in sorted(range(len(segments)), key=lambda i: ordered[i]))


def checkpoint_layers(layout: Layout, chunk: Chunk, layer: int) -> tuple[int, ...]:
    """Return the layers that a checkpoint over whole layers has together with a layer of a chunk.

    An MTP depth has a checkpoint of its own.
    """
    if layer not in chunk.layers:
        return (layer,)
    place = chunk.layers.index(layer)
    first = place - place % layout.recompute_span
    return tuple(chunk.layers[first : first + layout.recompute_span])


def can_pair(layout: Layout, micro_batches: int) -> bool:
    """Return whether forwards and backwards of this layout's timetable run beside each other.

    Both take their input before either begins. In a single group of fewer than 2 pp - 1
    micro-batches ranks would wait for each other for ever (tests/rules/test_paired_passes.py): all
    rows run alone.
    """
    if Overlap.EP not in layout.overlap:
        return False
    is_one_group = layout.vpp > 1 and micro_batches == interleaved_group_size(layout)
    return not is_one_group or layout.schedule.is_v_shaped or micro_batches >= 2 * layout.pp - 1


def paired_rows(rows: Sequence[TimetableRow]) -> frozenset[int]:
    """Return the indices of the forwards that run beside the backward in the row after them.

    A forward cannot run beside its own backward.
    """
    return frozenset(
        index
        for index, (row, after) in enumerate(pairwise(rows))
        if row.kind is RowKind.F
        and after.kind is RowKind.B
        and (row.micro_batch, row.chunk) != (after.micro_batch, after.chunk)
    )


# An exchange of rows, among the steps of a pass.
_EXCHANGE = None


def _cut(kind: RowKind, steps: Iterator[WorkStep | None]) -> tuple[PassSegment, ...]:
    segments: list[list[WorkStep]] = [[]]
    for step in steps:
        if step is _EXCHANGE:
            segments.append([])
        else:
            segments[-1].append(step)
    return tuple(PassSegment(kind=kind, steps=tuple(steps_)) for steps_ in segments)


def _forward_layer(
    model: ModelSpec, layer: int, *, is_replay: bool = False
) -> Iterator[WorkStep | None]:
    if not model.has_experts(layer):
        yield WorkStep(work=PassWork.WHOLE, layer=layer, is_replay=is_replay)
        return
    yield WorkStep(work=PassWork.BEFORE, layer=layer, is_replay=is_replay)
    yield _EXCHANGE
    yield WorkStep(work=PassWork.EXPERTS, layer=layer, is_replay=is_replay)
    yield _EXCHANGE
    yield WorkStep(work=PassWork.AFTER, layer=layer, is_replay=is_replay)


def _forward_steps(model: ModelSpec, chunk: Chunk) -> Iterator[WorkStep | None]:
    if chunk.has_embedding:
        yield WorkStep(work=PassWork.EMBEDDING)
    for layer in chunk.layers:
        yield from _forward_layer(model, layer)
    if chunk.has_loss:
        yield WorkStep(work=PassWork.HEAD)
    for layer in chunk_layers(model, chunk)[len(chunk.layers) :]:
        yield WorkStep(work=PassWork.EMBEDDING, layer=layer)
        yield from _forward_layer(model, layer)
        yield WorkStep(work=PassWork.HEAD, layer=layer)


def _backward_layer(model: ModelSpec, layer: int) -> Iterator[WorkStep | None]:
    steps = list(_forward_layer(model, layer))
    yield from reversed(steps)


def _backward_steps(model: ModelSpec, layout: Layout, chunk: Chunk) -> Iterator[WorkStep | None]:
    depths = chunk_layers(model, chunk)[len(chunk.layers) :]
    for place in reversed(range(len(chunk.layers), len(chunk.layers) + len(depths))):
        depth = depths[place - len(chunk.layers)]
        yield WorkStep(work=PassWork.HEAD, layer=depth)
        yield from _backward_span(model, layout, [depth], place)
        yield WorkStep(work=PassWork.EMBEDDING, layer=depth)
    if chunk.has_loss:
        yield WorkStep(work=PassWork.HEAD)
    span = layout.recompute_span
    for place in reversed(range(0, len(chunk.layers), span)):
        yield from _backward_span(model, layout, chunk.layers[place : place + span], place)
    if chunk.has_embedding:
        yield WorkStep(work=PassWork.EMBEDDING)


def _backward_span(
    model: ModelSpec, layout: Layout, layers: Sequence[int], place: int
) -> Iterator[WorkStep | None]:
    """Yield the backward of the layers of one checkpoint, the first of which is at `place`."""
    is_replayed = Recompute.FULL in layer_recompute(layout, place)
    if is_replayed:
        for layer in layers:
            yield from _forward_layer(model, layer, is_replay=True)
    for layer in reversed(layers):
        if Recompute.MOE in layout.recompute and model.has_experts(layer):
            yield from _forward_layer(model, layer, is_replay=True)
        yield from _backward_layer(model, layer)
