"""The pipelines of a space apart from all other degrees, each worked out once."""

from __future__ import annotations

import numpy as np

from moewright.cost.memory.parameter_tree import ParameterTree
from moewright.cost.memory.peak import MomentCounts, steady_micro_batches
from moewright.cost.stage_parts import Array, list_parts
from moewright.search.pipeline_arrays import (
    DistinctRanks,
    PipelineBatch,
    batch_pipelines,
    find_distinct_ranks,
    fullest_moments,
)
from moewright.search.space import (
    DegreeGroup,
    PipelineShape,
    PipelineShapes,
    SearchSpace,
    with_pipeline,
)
from moewright.spec.layout import Layout, Overlap


class PipelineCache:
    """A cache of what ranks of pipelines hold, and of the batches of groups."""

    def __init__(self, space: SearchSpace, tree: ParameterTree) -> None:
        self._space, self._tree = space, tree
        self._parts = list_parts(space.model, space.base)
        self._layouts: dict[tuple[PipelineShape, int, bool], Layout] = {}
        self._ranks: dict[PipelineShape, DistinctRanks] = {}
        self._moments: dict[tuple[PipelineShape, int, bool], Array] = {}
        self._places: dict[bytes, int] = {}
        self._distinct_moments: list[MomentCounts] = []
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
                self._distinct_moments,
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
                self._space.model, self._parts, self._tree, layout
            )
        return self._ranks[shape]

    def _fullest_moments(self, shape: PipelineShape, layout: Layout, micro_batches: int) -> Array:
        """Return the index in `_distinct_moments` of the fullest moments of each rank [ranks]."""
        steady = steady_micro_batches(layout, micro_batches)
        key = shape, steady, bool(layout.overlap)
        if key not in self._moments:
            ranks = self._distinct_ranks(shape, layout)
            moments = fullest_moments(ranks, self._parts, layout, steady)
            self._moments[key] = np.array([self._place(counts) for counts in moments])
        return self._moments[key]

    def _place(self, counts: MomentCounts) -> int:
        arrays = counts.live, counts.fetched, counts.backward, counts.paired
        key = b"".join(array.tobytes() for array in arrays)
        if key not in self._places:
            self._places[key] = len(self._distinct_moments)
            self._distinct_moments.append(counts)
        return self._places[key]
