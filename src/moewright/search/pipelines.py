"""The pipelines of a space apart from all other degrees, each worked out once.

Pipelines as arrays: what each pipeline rank holds, and when its memory can be fullest. Only a few
moments of a timetable can be the fullest of a rank: a moment is left out where another moment of
the same rank holds at least as much of everything. Ranks with the same layers are represented by
the first of them, which has most micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np

from moewright.cost.memory.parameter_tree import ParameterTree, RankSequences
from moewright.cost.memory.peak import MomentCounts, count_moments, steady_micro_batches
from moewright.cost.memory.snapshots import RankTable, rank_table
from moewright.cost.stage_parts import Array, StageParts, count_parts, list_parts
from moewright.rules.timetable import stages
from moewright.search.space import (
    DegreeGroup,
    PipelineShape,
    PipelineShapes,
    SearchSpace,
    with_pipeline,
)
from moewright.spec.layout import Layout, Overlap
from moewright.spec.model import ModelSpec

# The most bucket sets of a rank: its layers, and embedding and head, which have sets of their own
# where several ranks hold them.
_MAX_SETS = 3


@dataclass(frozen=True, kw_only=True)
class DistinctRanks:
    """The pipeline ranks of one pipeline that hold different layers, one for each such content.

    `first` is the first pipeline rank with each content, and `multiplicity` [ranks] how many ranks
    share it. `chunks` [ranks, chunks, parts] counts the parts that each model chunk holds. `nodes`
    and `holders` [ranks, sets] are those of RankSequences, filled up with 0 and 1 where a rank has
    fewer sets; `blocks` [ranks][layers] are the layers' parameter blocks.
    """

    chunks: Array
    first: tuple[int, ...]
    multiplicity: Array
    nodes: Array
    holders: Array
    blocks: tuple[tuple[int, ...], ...]

    @cached_property
    def contents(self) -> Array:
        """Return the parts that each rank holds, over its chunks [ranks, parts]."""
        return np.asarray(self.chunks.sum(axis=1))


def find_distinct_ranks(
    model: ModelSpec, parts: StageParts, tree: ParameterTree, layout: Layout
) -> DistinctRanks:
    """Find the pipeline ranks of a layout that hold different layers.

    Under a schedule that splits backwards, every rank is kept apart: its timetable is not that of
    the ranks after it.
    """
    chunks = stages.pipeline_chunks(model, layout)
    by_rank = np.zeros((layout.pp, layout.vpp, parts.count))
    for chunk, row in zip(chunks, count_parts(model, layout, parts, chunks), strict=True):
        by_rank[chunk.pp_rank, chunk.vpp_rank] = row
    first: dict[object, int] = {}
    multiplicity: dict[object, int] = {}
    sequences: list[RankSequences] = []
    for rank in range(layout.pp):
        sequence = tree.rank_sequences(model, layout, rank)
        key: object = by_rank[rank].tobytes(), sequence.nodes
        if layout.schedule.splits_backward:
            key = rank
        if key not in first:
            first[key] = rank
            sequences.append(sequence)
        multiplicity[key] = multiplicity.get(key, 0) + 1
    return DistinctRanks(
        chunks=by_rank[list(first.values())],
        first=tuple(first.values()),
        multiplicity=np.array(list(multiplicity.values())),
        nodes=np.array([_pad(sequence.nodes, 0) for sequence in sequences]),
        holders=np.array([_pad(sequence.holders, 1) for sequence in sequences]),
        blocks=tuple(sequence.layers for sequence in sequences),
    )


def _pad(values: tuple[int, ...], filler: int) -> tuple[int, ...]:
    return values + (filler,) * (_MAX_SETS - len(values))


def _undominated(parts: StageParts, moments: MomentCounts) -> MomentCounts:
    """Drop the moments at which another moment holds at least as much of everything.

    Of the layers in backward only their kinds matter, not how many there are; of a paired chunk
    (whose forward runs beside the backward), one layer's share.
    """
    backward = moments.backward.copy()
    kinds = [column for column, part in enumerate(parts.layers) if not part.is_mtp]
    backward[:, kinds] = backward[:, kinds] > 0
    live = moments.live.copy()
    live[:, : parts.count] += moments.paired / parts.count_layers(moments.paired)[:, None]
    keys = np.concatenate([live, backward], axis=1)
    if len(moments.fetched):
        keys = np.concatenate([keys, moments.fetched], axis=1)
    # Equal rows are found by their bytes: to compare column by column would take far longer. Adding
    # 0.0 turns -0.0 into 0.0, so that equal rows have equal bytes.
    rounded = np.ascontiguousarray(np.round(keys, 9) + 0.0)
    _, index = np.unique(rounded.view(np.dtype((np.void, rounded[0].nbytes))), return_index=True)
    keys = keys[index]
    left = np.argsort(-keys.sum(axis=1), kind="stable")
    kept = []
    # A moment that dominates another has the greater sum, so nothing dominates the first one left.
    while len(left):
        kept.append(left[0])
        left = left[~(keys[left] <= keys[left[0]] + 1e-9).all(axis=1)]
    chosen = index[np.sort(kept)]
    return MomentCounts(
        live=moments.live[chosen],
        fetched=moments.fetched[chosen] if len(moments.fetched) else moments.fetched,
        backward=backward[chosen],
        paired=moments.paired[chosen],
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineBatch:
    """Several pipelines concatenated: arrays over pipelines, their distinct ranks, and moments.

    `rank_starts` holds the row at which the ranks of each pipeline begin. Ranks with the same
    moments share them: `moment_starts` holds the row at which each set of moments begins, and
    `moments_of_rank` the index of each rank's set.
    """

    pipelines: PipelineShapes
    layouts: tuple[Layout, ...]  # [pipelines] with one device a pipeline rank
    distinct: tuple[DistinctRanks, ...]  # [pipelines]
    pp: Array  # [pipelines]
    degrees: tuple[int, ...]  # the distinct values of pp
    degree: Array  # [pipelines] index in `degrees`
    vpp: Array  # [pipelines]
    micro_batches: Array  # [pipelines]
    ranks: Array  # [ranks, parts]
    multiplicity: Array  # [ranks]
    rank_starts: Array  # [pipelines]
    pipeline_of_rank: Array  # [ranks]
    nodes: Array  # [ranks, sets] nodes of the ParameterTree, 0 for none
    holders: Array  # [ranks, sets]
    live: Array  # [moments, 2 parts + 2]
    fetched: Array  # [moments, parts], or no rows
    backward: Array  # [moments, parts]
    paired: Array  # [moments, parts]
    moment_starts: Array  # [sets of moments]
    moments_of_rank: Array  # [ranks] index of the rank's set

    @cached_property
    def transients(self) -> tuple[Array, Array, Array]:
        """Return the distinct (backward, paired) rows, and the index of each moment's row."""
        parts = self.backward.shape[1]
        if not self.paired.any():
            distinct_rows, index = np.unique(self.backward, axis=0, return_inverse=True)
            return distinct_rows, np.zeros_like(distinct_rows), index.reshape(-1)
        both = np.concatenate([self.backward, self.paired], axis=1)
        distinct_rows, index = np.unique(both, axis=0, return_inverse=True)
        return distinct_rows[:, :parts], distinct_rows[:, parts:], index.reshape(-1)

    @cached_property
    def _moment_rows(self) -> list[Array]:
        return _segment_rows(self.moment_starts, len(self.live))

    @cached_property
    def _rank_rows(self) -> list[Array]:
        return _segment_rows(self.rank_starts, len(self.ranks))

    def fullest_moments(self, moment_values: Array) -> Array:
        """Return the highest value over each rank's moments: [moments, ...] -> [ranks, ...]."""
        return np.asarray(
            _highest(moment_values, self._moment_rows).take(self.moments_of_rank, axis=0)
        )

    def fullest_ranks(self, rank_values: Array, more: Array, pipelines: Array) -> Array:
        """Return the highest `rank_values` + `more` over the ranks of each of `pipelines`.

        Shapes: [ranks, ...] and [ranks] -> [some pipelines, ...].
        """
        return _highest(rank_values, [rows[pipelines] for rows in self._rank_rows], more)

    def slowest_and_all(self, rank_values: Array) -> tuple[Array, Array]:
        """Return the largest of each pipeline, and the sum over its ranks: [pipelines, ...]."""
        weighted = rank_values * self.multiplicity.reshape(-1, *[1] * (rank_values.ndim - 1))
        # No pipeline is without ranks: reduceat would give an empty segment the row after it.
        total = np.add.reduceat(weighted, self.rank_starts, axis=0)
        return _highest(rank_values, self._rank_rows), np.asarray(total)

    def count_blocks(self, ranks: Array, count: int) -> Array:
        """Count how often each of `count` parameter blocks is held by ranks [some ranks, blocks].

        `ranks` are rows of this batch.
        """
        blocks = [layers for distinct in self.distinct for layers in distinct.blocks]
        return np.array([np.bincount(blocks[rank], minlength=count) for rank in ranks])

    @cached_property
    def contents(self) -> list[tuple[object, ...]]:
        """Return what is equal for ranks that hold and share equal parameters [ranks]."""
        return [
            (alone.pp, blocks, nodes.tobytes())
            for alone, distinct in zip(self.layouts, self.distinct, strict=True)
            for blocks, nodes in zip(distinct.blocks, distinct.nodes, strict=True)
        ]

    def rank_layouts(self, cut: Layout) -> Iterator[tuple[Layout, int]]:
        """Yield the layout and the pipeline rank of each rank, under the degrees of `cut`."""
        for alone, distinct in zip(self.layouts, self.distinct, strict=True):
            layout = replace(
                cut, pp=alone.pp, vpp=alone.vpp, stages=alone.stages, schedule=alone.schedule
            )
            for rank in distinct.first:
                yield layout, rank


def _segment_rows(starts: Array, count: int) -> list[Array]:
    """Return the first row of every segment, then the second row of every segment, and so on.

    Segments begin at `starts` and the last ends at `count`; a segment that is too short repeats its
    last row. `_highest` takes the maximum of each segment over them, far faster than
    ufunc.reduceat.
    """
    lengths = np.diff(np.append(starts, count))
    return [starts + np.minimum(position, lengths - 1) for position in range(int(lengths.max()))]


def _highest(values: Array, segment_rows: Sequence[Array], more: Array | None = None) -> Array:
    """Return the highest row of each segment; with `more` [rows], the highest sum of both."""
    highest: Array | None = None
    for rows in segment_rows:
        taken = values.take(rows, axis=0)
        if more is not None:
            taken += more[rows, None]
        highest = taken if highest is None else np.maximum(highest, taken, out=highest)
    assert highest is not None
    return highest


def _join_fetched(counts: Sequence[MomentCounts]) -> Array:
    """Return what has come back from the host at all moments; no rows where nothing has."""
    if not any(len(moment.fetched) for moment in counts):
        return counts[0].fetched
    return np.concatenate(
        [
            moment.fetched if len(moment.fetched) else np.zeros_like(moment.backward)
            for moment in counts
        ]
    )


def batch_pipelines(
    pipelines: PipelineShapes,
    layouts: Sequence[Layout],
    ranks: Sequence[DistinctRanks],
    moments: Sequence[Sequence[MomentCounts]],
    micro_batches: Sequence[int],
) -> PipelineBatch:
    """Concatenate the pipelines of `layouts` into one batch.

    `ranks` and `micro_batches` [pipelines] belong to the layouts, as `moments` [pipelines][ranks]
    do, of which equal ones are one object.
    """
    rank_counts = [len(distinct.first) for distinct in ranks]
    by_rank = list(chain.from_iterable(moments))
    counts = list({id(moment): moment for moment in by_rank}.values())
    places = {id(moment): place for place, moment in enumerate(counts)}
    moments_of_rank = np.array([places[id(moment)] for moment in by_rank])
    pp = np.array([layout.pp for layout in layouts])
    degrees, degree = np.unique(pp, return_inverse=True)
    return PipelineBatch(
        pipelines=pipelines,
        layouts=tuple(layouts),
        distinct=tuple(ranks),
        pp=pp,
        degrees=tuple(int(value) for value in degrees),
        degree=degree,
        vpp=np.array([layout.vpp for layout in layouts]),
        micro_batches=np.array(micro_batches),
        ranks=np.concatenate([distinct.contents for distinct in ranks]),
        multiplicity=np.concatenate([distinct.multiplicity for distinct in ranks]),
        rank_starts=np.cumsum([0, *rank_counts[:-1]]),
        pipeline_of_rank=np.repeat(np.arange(len(ranks)), rank_counts),
        nodes=np.concatenate([distinct.nodes for distinct in ranks]),
        holders=np.concatenate([distinct.holders for distinct in ranks]),
        live=np.concatenate([moment.live for moment in counts]),
        fetched=_join_fetched(counts),
        backward=np.concatenate([moment.backward for moment in counts]),
        paired=np.concatenate([moment.paired for moment in counts]),
        moment_starts=np.cumsum([0, *(len(moment.live) for moment in counts[:-1])]),
        moments_of_rank=moments_of_rank,
    )


class PipelineCache:
    """A cache of what ranks of pipelines hold, and of the batches of groups."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self.tree = ParameterTree()
        self._parts = list_parts(space.model, space.base, space.workload.trainer)
        self._layouts: dict[tuple[PipelineShape, int, bool], Layout] = {}
        self._ranks: dict[PipelineShape, DistinctRanks] = {}
        self._moments: dict[tuple[PipelineShape, int, bool], list[MomentCounts]] = {}
        is_mtp = tuple(part.is_mtp for part in self._parts.layers)
        self._fullest = _fullest_moments(is_mtp, space.base, space.fixed)
        self._batches: dict[tuple[PipelineShapes, int, int, bool], PipelineBatch] = {}

    def batch(self, group: DegreeGroup, *, is_paired: bool) -> PipelineBatch:
        """Return the pipelines of a group as arrays.

        `is_paired` says that a forward runs beside the backward of another micro-batch.
        """
        cut, shapes = group.layout, group.pipelines.shapes
        sequences = self._space.workload.global_batch * cut.tp * cut.cp
        pass_sequences = cut.mbs * self._space.hardware.count
        key = group.pipelines, sequences, pass_sequences, is_paired
        if key not in self._batches:
            layouts = [self._layout(shape, cut.vpp_group, is_paired=is_paired) for shape in shapes]
            # GBS / (mbs dp), with dp = N / (tp cp pp).
            micro_batches = [sequences * shape.pp // pass_sequences for shape in shapes]
            self._batches[key] = batch_pipelines(
                group.pipelines,
                layouts,
                [
                    self._distinct_ranks(shape, layout)
                    for shape, layout in zip(shapes, layouts, strict=True)
                ],
                [
                    self._fullest_moments(shape, layout, count)
                    for shape, layout, count in zip(shapes, layouts, micro_batches, strict=True)
                ],
                micro_batches,
            )
        return self._batches[key]

    def _layout(self, shape: PipelineShape, vpp_group: int, *, is_paired: bool) -> Layout:
        """Return a layout that is this pipeline with one device a pipeline rank."""
        key = shape, vpp_group, is_paired
        if key not in self._layouts:
            base = self._space.base
            alone = Layout(
                world_size=shape.pp,
                vpp_group=vpp_group,
                overlap=(Overlap.EP,) if is_paired else (),
                recompute_block=base.recompute_block,
                recompute_span=base.recompute_span,
                offload_layers=base.offload_layers,
                offload_chunks=base.offload_chunks,
            )
            self._layouts[key] = with_pipeline(alone, shape, self._space)
        return self._layouts[key]

    def _distinct_ranks(self, shape: PipelineShape, layout: Layout) -> DistinctRanks:
        """Return the pipeline ranks that hold different layers."""
        if shape not in self._ranks:
            self._ranks[shape] = find_distinct_ranks(
                self._space.model, self._parts, self.tree, layout
            )
        return self._ranks[shape]

    def _fullest_moments(
        self, shape: PipelineShape, layout: Layout, micro_batches: int
    ) -> list[MomentCounts]:
        """Return the moments at which each rank can be fullest [ranks]."""
        steady = steady_micro_batches(layout, micro_batches)
        key = shape, steady, bool(layout.overlap)
        if key not in self._moments:
            ranks = self._distinct_ranks(shape, layout)
            self._moments[key] = [
                self._fullest.count(self._parts, layout, steady, rank, chunks)
                for rank, chunks in zip(ranks.first, ranks.chunks, strict=True)
            ]
        return self._moments[key]


class FullestMoments:
    """The moments at which ranks can be fullest, each worked out once for models alike.

    Nothing but the number of parts of each chunk decides them, and which parts are MTP depths. What
    has been worked out is never changed, so that several searches may ask at once.
    """

    def __init__(self) -> None:
        self._of_ranks: dict[tuple[object, ...], MomentCounts] = {}
        self._tables: dict[tuple[object, ...], RankTable] = {}
        self._equal: dict[bytes, MomentCounts] = {}

    def count(
        self, parts: StageParts, layout: Layout, micro_batches: int, rank: int, chunks: Array
    ) -> MomentCounts:
        """Return the moments at which a rank can be fullest; equal ones are one object.

        Pipelines that differ in their splits have ranks in common, and all their timetables.
        """
        timetable = layout.pp, layout.vpp, bool(layout.overlap), micro_batches, rank
        key = *timetable, chunks.tobytes()
        if key not in self._of_ranks:
            if timetable not in self._tables:
                self._tables[timetable] = rank_table(layout, micro_batches, rank)
            counts = _undominated(parts, count_moments(parts, chunks, self._tables[timetable]))
            arrays = counts.live, counts.fetched, counts.backward, counts.paired
            content = b"".join(array.tobytes() for array in arrays)
            self._of_ranks[key] = self._equal.setdefault(content, counts)
        return self._of_ranks[key]


@lru_cache(maxsize=4)  # a design searches for models that differ in their numbers alone
def _fullest_moments(
    _is_mtp: tuple[bool, ...], _base: Layout, _fixed: frozenset[str]
) -> FullestMoments:
    """Return the moments of models with these parts, under what is fixed of their layouts."""
    return FullestMoments()
