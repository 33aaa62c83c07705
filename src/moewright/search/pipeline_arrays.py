"""Pipelines as arrays: what each pipeline rank holds, and when its memory can be fullest.

Moments that another one of the same rank exceeds in every count are left out, so a few rows stand
for a whole timetable; ranks that hold the same are stood for by the first of them, which holds most
in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moewright.cost.memory import MomentCounts, count_moments
from moewright.cost.parameter_tree import ParameterTree, RankSequences
from moewright.cost.snapshots import rank_table
from moewright.cost.stage_parts import Array, StageParts, count_parts
from moewright.rules import stages
from moewright.search.space import PipelineShapes
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec

# Bucket sets of a rank: embedding and head have sets of their own where several ranks hold them.
_MAX_SETS = 3


@dataclass(frozen=True, kw_only=True)
class DistinctRanks:
    """The ranks of one pipeline that differ: `first` is the first rank that holds each.

    `chunks` [ranks, chunks, parts] is what they hold; `multiplicity` [ranks] ranks hold the same.
    `nodes` and `holders` [ranks, sets] are those of RankSequences, 0 and 1 where a rank has fewer
    sets; `blocks` [ranks][layers] are its layers.
    """

    chunks: Array
    first: tuple[int, ...]
    multiplicity: Array
    nodes: Array
    holders: Array
    blocks: tuple[tuple[int, ...], ...]

    @cached_property
    def contents(self) -> Array:
        """What each rank holds [ranks, parts]."""
        return np.asarray(self.chunks.sum(axis=1))


def find_distinct_ranks(
    model: ModelSpec, parts: StageParts, tree: ParameterTree, layout: Layout
) -> DistinctRanks:
    """Find the pipeline ranks of a layout that differ.

    A schedule that is not the same for a rank and the ones after it keeps every rank apart.
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


def fullest_moments(
    ranks: DistinctRanks, parts: StageParts, layout: Layout, micro_batches: int
) -> tuple[MomentCounts, ...]:
    """Return the moments at which each rank can be fullest, under the layout's timetable."""
    return tuple(
        _undominated(parts, count_moments(parts, chunks, rank_table(layout, micro_batches, rank)))
        for chunks, rank in zip(ranks.chunks, ranks.first, strict=True)
    )


def _undominated(parts: StageParts, moments: MomentCounts) -> MomentCounts:
    """Keep the moments that no other exceeds in every count.

    Which kinds of layer a backward holds counts, not how many; of a chunk beside it, its share of a
    layer.
    """
    backward = moments.backward.copy()
    kinds = [column for column, part in enumerate(parts.layers) if not part.is_mtp]
    backward[:, kinds] = backward[:, kinds] > 0
    live = moments.live.copy()
    live[:, :-1] += moments.paired / parts.count_layers(moments.paired)[:, None]
    keys = np.concatenate([live, backward], axis=1)
    # By their bytes: columns one by one would take far longer. Adding zero leaves one zero.
    whole = np.ascontiguousarray(np.round(keys, 9) + 0.0)
    _, index = np.unique(whole.view(np.dtype((np.void, whole[0].nbytes))), return_index=True)
    keys = keys[index]
    left, kept = np.argsort(-keys.sum(axis=1), kind="stable"), []
    # What exceeds a moment has the greater sum, so the first of those left is exceeded by none.
    while len(left):
        kept.append(left[0])
        left = left[~(keys[left] <= keys[left[0]] + 1e-9).all(axis=1)]
    chosen = index[np.sort(kept)]
    return MomentCounts(
        live=moments.live[chosen], backward=backward[chosen], paired=moments.paired[chosen]
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineBatch:
    """Several pipelines end to end: arrays over pipelines, their ranks, and moments of the ranks.

    `moment_starts` say where the moments of each of the ranks that differ in theirs begin, and
    `rank_starts` where the ranks of each pipeline do.
    """

    pipelines: PipelineShapes
    layouts: tuple[Layout, ...]  # [pipelines] of single ranks
    distinct: tuple[DistinctRanks, ...]  # [pipelines]
    pp: Array  # [pipelines]
    degrees: tuple[int, ...]  # the values of pp
    degree: Array  # [pipelines] place in `degrees`
    vpp: Array  # [pipelines]
    micro_batches: Array  # [pipelines]
    ranks: Array  # [ranks, parts]
    multiplicity: Array  # [ranks]
    rank_starts: Array  # [pipelines]
    pipeline_of_rank: Array  # [ranks]
    nodes: Array  # [ranks, sets] sequences of parameters, 0 for none
    holders: Array  # [ranks, sets]
    live: Array  # [moments, parts + 1]
    backward: Array  # [moments, parts]
    paired: Array  # [moments, parts]
    moment_starts: Array  # [ranks that differ in their moments]
    moments_of_rank: Array  # [ranks] place among those

    @cached_property
    def transients(self) -> tuple[Array, Array, Array]:
        """Return the `backward` and `paired` that differ, and which of them each moment has."""
        parts = self.backward.shape[1]
        if not self.paired.any():
            distinct_rows, place = np.unique(self.backward, axis=0, return_inverse=True)
            return distinct_rows, np.zeros_like(distinct_rows), place.reshape(-1)
        both = np.concatenate([self.backward, self.paired], axis=1)
        distinct_rows, place = np.unique(both, axis=0, return_inverse=True)
        return distinct_rows[:, :parts], distinct_rows[:, parts:], place.reshape(-1)

    @cached_property
    def _moment_turns(self) -> list[Array]:
        return _take_turns(self.moment_starts, len(self.live))

    @cached_property
    def _rank_turns(self) -> list[Array]:
        return _take_turns(self.rank_starts, len(self.ranks))

    def fullest_moments(self, of_moments: Array) -> Array:
        """Return the highest of each rank: [moments, ...] -> [ranks, ...]."""
        return np.asarray(
            _highest(of_moments, self._moment_turns).take(self.moments_of_rank, axis=0)
        )

    def fullest_ranks(self, of_ranks: Array, more: Array, pipelines: Array) -> Array:
        """Return the highest sum of some pipelines: [ranks, ...] and [ranks] -> [some, ...]."""
        return _highest(of_ranks, [turn[pipelines] for turn in self._rank_turns], more)

    def slowest_and_all(self, of_ranks: Array) -> tuple[Array, Array]:
        """Return the largest of each pipeline, and the sum over its ranks: [pipelines, ...]."""
        weighted = of_ranks * self.multiplicity.reshape(-1, *[1] * (of_ranks.ndim - 1))
        total = np.add.reduceat(weighted, self.rank_starts, axis=0)
        return _highest(of_ranks, self._rank_turns), np.asarray(total)

    def count_blocks(self, ranks: Array, count: int) -> Array:
        """Count the blocks of parameters that some ranks hold [some ranks, blocks]."""
        blocks = [layers for distinct in self.distinct for layers in distinct.blocks]
        return np.array([np.bincount(blocks[rank], minlength=count) for rank in ranks])

    def rank_layouts(self, cut: Layout) -> Iterator[tuple[Layout, int]]:
        """Yield the layout and the pipeline rank of each rank, under the degrees of `cut`."""
        for alone, distinct in zip(self.layouts, self.distinct, strict=True):
            layout = replace(
                cut, pp=alone.pp, vpp=alone.vpp, stages=alone.stages, schedule=alone.schedule
            )
            for rank in distinct.first:
                yield layout, rank


def _take_turns(starts: Array, count: int) -> list[Array]:
    """Return the first row of every run, then the second, and so on; runs begin at `starts`.

    A short run ends with its last again and again. The highest of each run is taken over these: far
    faster than ufunc.reduceat.
    """
    lengths = np.diff(np.append(starts, count))
    return [starts + np.minimum(turn, lengths - 1) for turn in range(int(lengths.max()))]


def _highest(rows: Array, turns: Sequence[Array], more: Array | None = None) -> Array:
    """Return the highest of the rows, or of their sums with `more` [rows]."""
    highest: Array | None = None
    for turn in turns:
        taken = rows.take(turn, axis=0)
        if more is not None:
            taken += more[turn, None]
        highest = taken if highest is None else np.maximum(highest, taken, out=highest)
    assert highest is not None
    return highest


def batch_pipelines(
    pipelines: PipelineShapes,
    layouts: Sequence[Layout],
    ranks: Sequence[DistinctRanks],
    moments: Sequence[Array],
    distinct_moments: Sequence[MomentCounts],
    micro_batches: Sequence[int],
) -> PipelineBatch:
    """Join the pipelines of these layouts, each with so many micro-batches.

    `moments` [pipelines][ranks] says which of `distinct_moments` each rank has.
    """
    rank_counts = [len(distinct.first) for distinct in ranks]
    used, moments_of_rank = np.unique(np.concatenate(moments), return_inverse=True)
    counts = [distinct_moments[place] for place in used.tolist()]
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
        backward=np.concatenate([moment.backward for moment in counts]),
        paired=np.concatenate([moment.paired for moment in counts]),
        moment_starts=np.cumsum([0, *(len(moment.live) for moment in counts[:-1])]),
        moments_of_rank=moments_of_rank,
    )
