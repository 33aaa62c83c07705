"""Device bytes of all candidates of a group at once, by the memory model of the cost floor.

This module has no formula of its own: the terms of a peak are those of an estimate (cost.memory),
asked of arrays of ranks. What candidates have in common is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.memory import model_states, peak
from moewright.cost.memory.activations import ActivationPolicies, activation_context
from moewright.cost.memory.buffers import dispatcher_bytes
from moewright.cost.memory.host_memory import USABLE_SHARE, host_capacity
from moewright.cost.memory.model_states import LINEAR_MODULES, StateElements
from moewright.cost.memory.parameter_tree import BucketFill, ParameterTree, local_params
from moewright.cost.memory.peak_terms import (
    OPTIMIZER_TERMS,
    RESIDENT_TERMS,
    count_communicators,
    device_bytes,
    host_bytes,
    runtime_overhead,
)
from moewright.cost.memory.rank_batch import Booked, RankBatch, sum_rows
from moewright.cost.stage_parts import Array, StageParts
from moewright.cost.symbols import Symbols
from moewright.rules import grid
from moewright.rules.adapters import is_trained
from moewright.rules.job import Job
from moewright.rules.optimizers import shard_multiple
from moewright.rules.packed_base import holds_packed
from moewright.rules.shapes import fsdp, shards
from moewright.rules.shapes.param import Param
from moewright.search.pipelines import PipelineBatch
from moewright.search.space import PipelineShapes, SearchSpace, StatePolicy
from moewright.spec.layout import Layout
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.record import copy_with
from moewright.spec.workload import MatrixUpdate

_WITHOUT_EXPERTS, _WITH_EXPERTS = False, True
# The kinds of layer that a rank can hold, numbered by 1 for those without experts and 2 for those
# with.
_KINDS = ((), (_WITHOUT_EXPERTS,), (_WITH_EXPERTS,), (_WITHOUT_EXPERTS, _WITH_EXPERTS))
_LINEAR, _REST = range(2)
_COLUMNS = {module: _LINEAR if module in LINEAR_MODULES else _REST for module in Module}


@dataclass(frozen=True, kw_only=True)
class RankElements:
    """The parameter elements that ranks hold under one sharding of the model states [ranks].

    `numel` and `calls` [ranks, groups] are the elements of the buckets, padding included, and the
    number of buckets, by the group that reduces their gradients. `own` counts the elements of a
    rank's shards of them. `linear` counts the elements of linear weights, `own_linear` those of
    their shards, `own_matrices` those of the shards that Muon updates, and `checkpointed` the
    elements that a rank saves in a checkpoint.
    """

    numel: Array
    calls: Array
    own: Array
    linear: Array
    own_linear: Array
    own_matrices: Array
    checkpointed: Array


class ScreeningMemory:
    """A calculator of the device bytes of one space's candidates.

    What candidates have in common is worked out once.
    """

    def __init__(
        self,
        space: SearchSpace,
        parts: StageParts,
        constants: Constants,
        policies: ActivationPolicies,
        states: Sequence[StatePolicy],
        tree: ParameterTree,
    ) -> None:
        self.tree = tree
        self._space = space
        self._parts = parts
        self._constants = constants
        self._policies = policies
        self._state_policies = states
        self._host_bytes = USABLE_SHARE * host_capacity(space.hardware, constants)
        self._has_muon = space.workload.optimizer.matrix_update is MatrixUpdate.MUON
        counts_linear = space.workload.precision.is_narrow or holds_packed(space.workload)
        self._follows_linear = counts_linear and any(policy.zero == 3 for policy in states)
        # On a CPU, device and host share a memory, so a checkpoint that is being saved counts.
        self._checkpoints_on_device = not space.hardware.device.kind.is_accelerator
        self._dense_layers: dict[tuple[int, int, int, int], peak.LayerMemory] = {}
        self._communicators: dict[tuple[int, int, bool, tuple[int, ...]], Array] = {}
        self._fills: dict[tuple[str, int, int, bool], BucketFill] = {}
        self._elements: dict[tuple[object, ...], RankElements] = {}
        self._booked: dict[tuple[object, ...], Booked] = {}
        self._searched: dict[tuple[PipelineShapes, int], Array] = {}
        self._block_counts: dict[PipelineShapes, Array] = {}

    def model_memory(self, sym: Symbols) -> peak.ModelMemory:
        """Return the memory of the model's parts under the degrees of `sym`, for any pipeline."""
        context = activation_context(self._constants, sym)
        cut = sym.layout
        layers = []
        for column, part in enumerate(self._parts.layers):
            key = column, cut.tp, cut.cp, cut.mbs
            layer = self._dense_layers.get(key)
            if layer is None:
                layer = peak.layer_memory(context, sym, self._policies, part)
                if not part.kind.is_moe:  # EP and ETP change nothing in it
                    self._dense_layers[key] = layer
            layers.append(layer)
        return peak.join_memory(self._constants, sym, self._parts, layers)

    def device_bytes(
        self, parts_memory: peak.ModelMemory, sym: Symbols, batch: PipelineBatch, is_searched: Array
    ) -> tuple[Array, Array]:
        """Return the bytes of the fullest rank and their standard deviation.

        Both are [pipelines, activation policies, state policies]. `sym` are the symbols of the
        group's layout with the choices that are made for it. Where `is_searched` [pipelines, state
        policies] is false, allocated bytes count as 0; where the host has no room for the states
        that lie there, no device has any.
        """
        live = parts_memory.live_bytes(peak.split_counts(batch.live, batch.fetched))
        short_lived: dict[int, Array] = {}
        allocated = np.zeros((*is_searched.shape, len(self._policies.members)))
        overflows = np.zeros(is_searched.shape, dtype=bool)
        for column, policy in enumerate(self._state_policies):
            some = np.flatnonzero(is_searched[:, column])
            if not len(some):
                continue
            ranks = self._ranks(sym, policy, batch)
            beside_layer = peak.beside_layer_bytes(ranks.sym)
            if beside_layer not in short_lived:
                short_lived[beside_layer] = _fullest_moments(
                    parts_memory, batch, live, beside_layer=beside_layer
                )
            moments = short_lived[beside_layer]
            at_step = ranks.spread(device_bytes(ranks, OPTIMIZER_TERMS))
            if at_step.any():  # fp32 gradients make none, and most searches have these
                moments = np.maximum(moments, at_step[:, None])
            resident = ranks.spread(device_bytes(ranks, RESIDENT_TERMS))
            allocated[some, column] = batch.fullest_ranks(moments, resident, some)
            if policy.offload and self._host_bytes < np.inf:
                hosted = ranks.spread(host_bytes(ranks, RESIDENT_TERMS))
                fullest = batch.fullest_ranks(hosted[:, None], np.zeros_like(hosted), some)
                overflows[some, column] = fullest[:, 0] > self._host_bytes
        allocated = allocated.transpose(0, 2, 1)  # activation policies stay neighbours in memory
        device = runtime_overhead(
            self._constants,
            allocated,
            groups=self._count_communicators(sym.layout, batch)[:, None, None],
            buffers=dispatcher_bytes(sym),
        )
        peak_bytes = sum(device.bytes.values(), start=allocated)
        if overflows.any():
            peak_bytes = np.where(overflows[:, None, :], np.inf, peak_bytes)
        return peak_bytes, device.sd_bytes

    def elements(self, cut: Layout, zero: int, batch: PipelineBatch) -> RankElements:
        """Return the elements of every rank of a batch under a layout `cut` and a level of ZeRO."""
        # Levels 1 to 3 shard over the same ranks, unless sharding is hybrid (layout.shard).
        level = zero if cut.shard else min(zero, 1)
        key = batch.pipelines, cut.tp, cut.cp, cut.ep, cut.etp, level
        if key not in self._elements:
            layouts = [copy_with(cut, pp=pp, zero=zero) for pp in batch.degrees]
            self._elements[key] = self._count_elements(layouts, batch)
        return self._elements[key]

    def _count_communicators(self, cut: Layout, batch: PipelineBatch) -> Array:
        """Count the process groups of a rank [pipelines]."""
        key = cut.tp, cut.cp, cut.ep > 1, batch.degrees
        if key not in self._communicators:
            self._communicators[key] = np.array(
                [count_communicators(copy_with(cut, pp=pp)) for pp in batch.degrees]
            )
        return np.asarray(self._communicators[key][batch.degree])

    def _fill(self, cut: Layout, group: str, *, marks_matrices: bool = False) -> BucketFill:
        """Return the buckets of the parameters that a group reduces, under the layout's degrees.

        What they count apart are linear weights, or with `marks_matrices` what Muon updates.
        """
        cuts = (cut.ep, cut.etp) if group == "edp" else (cut.tp, 1)
        key = group, *cuts, marks_matrices
        if key not in self._fills:
            workload = self._space.workload
            is_marked = _is_linear
            if marks_matrices:
                is_marked = partial(model_states.is_updated_by_muon, workload)
            self._fills[key] = BucketFill(
                self.tree,
                lambda params: local_params(self._trained(params), cut, group, is_marked),
                bucket_elements=workload.optimizer.bucket_elements,
                shard_multiple=shard_multiple(workload.optimizer),
                follows_marked=marks_matrices or self._follows_linear,
            )
        return self._fills[key]

    def _trained(self, params: Sequence[Param]) -> Sequence[Param]:
        """Return the parameters without frozen parts; beside adapters, all of them."""
        fine_tuning = self._space.workload.fine_tuning
        if not fine_tuning.freeze:
            return params
        return [param for param in params if is_trained(fine_tuning, param.name)]

    def _count_elements(self, layouts: Sequence[Layout], batch: PipelineBatch) -> RankElements:
        """Count the elements of every rank; `layouts` has one layout for each of batch.degrees."""
        groups = shards.GRADIENT_GROUPS
        numel, calls = np.zeros((2, len(batch.ranks), len(groups)))
        own, linear, own_linear, own_matrices, checkpointed = np.zeros((5, len(batch.ranks)))
        degree = batch.degree[batch.pipeline_of_rank]
        for place, layout in enumerate(layouts):
            ranks = np.flatnonzero(degree == place)
            nodes, holders = batch.nodes[ranks], batch.holders[ranks]
            for column, group in enumerate(groups):
                size = grid.group_size(layout, fsdp.state_group(layout, group))
                shard_count = size if layout.zero else 1
                totals = self._fill(layout, group).totals(shard_count)
                set_numel = totals.numel[nodes]  # [ranks, sets]
                numel[ranks, column] = set_numel.sum(axis=1)
                calls[ranks, column] = totals.calls[nodes].sum(axis=1)
                own[ranks] += numel[ranks, column] / shard_count
                linear[ranks] += totals.marked[nodes].sum(axis=1)
                own_linear[ranks] += totals.own_marked[nodes].sum(axis=1)
                if self._has_muon:
                    matrices = self._fill(layout, group, marks_matrices=True).totals(shard_count)
                    own_matrices[ranks] += matrices.own_marked[nodes].sum(axis=1)
                if self._checkpoints_on_device:
                    saved = model_states.copied_elements(layout, group, set_numel, holders)
                    checkpointed[ranks] += saved.sum(axis=1)
        return RankElements(
            numel=numel,
            calls=calls,
            own=own,
            linear=linear,
            own_linear=own_linear,
            own_matrices=own_matrices,
            checkpointed=checkpointed,
        )

    def _ranks(self, sym: Symbols, policy: StatePolicy, batch: PipelineBatch) -> SearchedRanks:
        """Return the ranks of the pipelines on which a policy of the model states is searched."""
        key = batch.pipelines, policy.zero
        if key not in self._searched:
            is_searched = np.array(
                [policy.is_searched_on(shape, self._space) for shape in batch.pipelines.shapes]
            )
            self._searched[key] = np.flatnonzero(is_searched[batch.pipeline_of_rank])
        layout = copy_with(sym.layout, zero=policy.zero, offload=policy.offload)
        return SearchedRanks(
            constants=self._constants,
            sym=replace(sym, job=replace(sym.job, layout=layout)),
            columns=_COLUMNS,
            memory=self,
            batch=batch,
            rows=self._searched[key],
        )

    def recall(
        self,
        term: object,
        fields: Sequence[str],
        ranks: SearchedRanks,
        compute: Callable[[], Booked],
    ) -> Booked:
        """Return what a term books on ranks, worked out once for equal fields of their layout."""
        layout = ranks.sym.layout
        values = tuple([getattr(layout, field) for field in fields])
        # The level of ZeRO says on which ranks of the batch a policy is searched.
        key = term, ranks.batch.pipelines, layout.zero, values
        if key not in self._booked:
            self._booked[key] = compute()
        return self._booked[key]

    def count_states(self, layout: Layout, batch: PipelineBatch, ranks: Array) -> StateElements:
        """Count the elements of model states in two columns [some ranks, columns].

        `ranks` are rows of the batch. What only sums need is in the second column.
        """
        elements = self.elements(layout, layout.zero, batch)
        whole, own = elements.numel[ranks].sum(axis=1), elements.own[ranks]
        linear, own_linear = elements.linear[ranks], elements.own_linear[ranks]
        matrices = elements.own_matrices[ranks]
        hosted = model_states.hosted_elements(layout, own)
        nothing = np.zeros_like(own)
        return StateElements(
            whole=np.stack([linear, whole - linear], axis=1),
            own=np.stack([own_linear, own - own_linear], axis=1),
            matrices=np.stack([nothing, matrices], axis=1),
            hosted=np.stack([nothing, hosted], axis=1),
            # in proportion: what lies where in a shard is not counted here
            hosted_matrices=np.stack(
                [nothing, np.rint(matrices * hosted / np.maximum(own, 1))], axis=1
            ),
        )

    def contents(self, batch: PipelineBatch) -> tuple[Array, Array]:
        """Return which of `_KINDS` of layers each rank holds, and whether it has the head."""
        layers = batch.ranks[:, : len(self._parts.layers)]
        is_moe = np.array([part.kind.is_moe for part in self._parts.layers])
        kinds = (layers[:, ~is_moe] > 0).any(axis=1) + 2 * (layers[:, is_moe] > 0).any(axis=1)
        has_head = (batch.ranks[:, self._parts.head_columns] > 0).any(axis=1)
        return np.asarray(kinds), np.asarray(has_head)

    def count_blocks(self, batch: PipelineBatch) -> Array:
        """Count how often ranks hold each parameter block [ranks, blocks]."""
        if batch.pipelines not in self._block_counts:
            ranks = np.arange(len(batch.ranks))
            counts = batch.count_blocks(ranks, len(self.tree.blocks))
            self._block_counts[batch.pipelines] = counts
        return self._block_counts[batch.pipelines]


@dataclass(frozen=True, kw_only=True)
class SearchedRanks(RankBatch):
    """The ranks of the pipelines of a batch on which a policy of the model states is searched.

    They are `rows` of the batch. Linear weights have a column, all else has another.
    """

    memory: ScreeningMemory
    batch: PipelineBatch
    rows: Array

    def spread(self, values: Array | float) -> Array:
        """Return values of these ranks as those of all ranks of the batch, 0 for the others."""
        everywhere = np.zeros(len(self.batch.ranks))
        everywhere[self.rows] = values
        return everywhere

    def recall(self, term: object, fields: Sequence[str], compute: Callable[[], Booked]) -> Booked:
        """Return what a term books, worked out once for equal fields of layouts."""
        return self.memory.recall(term, fields, self, compute)

    def count_elements(self) -> StateElements:
        """Count the elements by the tree of parameters."""
        return self.memory.count_states(self.sym.layout, self.batch, self.rows)

    def count_checkpointed(self) -> Array:
        """Count the elements of each rank's part; 0 where they are in the host's memory."""
        layout = self.sym.layout
        checkpointed = self.memory.elements(layout, layout.zero, self.batch).checkpointed
        return np.asarray(checkpointed[self.rows])

    def count_by_layer(self) -> Array:
        """Count the elements of layers [ranks, 2 x blocks].

        At most two layers are gathered at once, so each block stands there at most twice.
        """
        numel = np.array(
            [
                sum(prod(shards.local_shape(param, self.sym.layout)) for param in params)
                for params in self.memory.tree.blocks
            ],
            dtype=float,
        )
        counts = self._count_blocks(len(numel))
        return np.concatenate([numel * (counts > n) for n in (0, 1)], axis=1)

    def sum_parameters(self, rows: Callable[[Job, Sequence[Param]], Iterable[MemoryRow]]) -> Booked:
        """Sum over blocks of parameters, which differ in their number in a rank alone.

        The rows of a block are made once for each number of stages.
        """
        blocks = self.memory.tree.blocks
        counts = self._count_blocks(len(blocks))
        sums: dict[Component, Array] = {}
        for place, pp in enumerate(self.batch.degrees):
            members = np.flatnonzero(self._degrees() == place)
            blocks_held = set(np.flatnonzero(counts[members].any(axis=0)).tolist())
            job = replace(self.sym.job, layout=copy_with(self.sym.layout, pp=pp))
            by_block = sum_rows(
                [
                    rows(job, params) if block in blocks_held else ()
                    for block, params in enumerate(blocks)
                ],
                self.columns,
            )
            for component, nbytes in by_block.items():
                if component not in sums:
                    sums[component] = np.zeros((len(self.rows), nbytes.shape[1]))
                sums[component][members] = counts[members] @ nbytes
        return sums

    def _degrees(self) -> Array:
        """Return the index of each rank's number of stages in the batch's `degrees` [ranks]."""
        return np.asarray(self.batch.degree[self.batch.pipeline_of_rank[self.rows]])

    def _count_blocks(self, count: int) -> Array:
        # Counted when the tree had fewer blocks: ranks of this batch hold none of the later ones.
        counts = self.memory.count_blocks(self.batch)[self.rows]
        return np.pad(counts, ((0, 0), (0, count - counts.shape[1])))

    def sum_rows(self, rows: Callable[[Job, int], Iterable[MemoryRow]]) -> Booked:
        """Sum the rows of each rank as an estimate would, once for equal parameters."""
        job = self.sym.job
        contents = self.batch.contents
        first: dict[object, int] = {}
        for row in self.rows.tolist():
            first.setdefault(contents[row], row)
        layouts = dict(enumerate(self.batch.rank_layouts(self.sym.layout)))
        distinct = []
        for row in first.values():
            layout, pp_rank = layouts[row]
            distinct.append(rows(replace(job, layout=layout), pp_rank))
        places = {content: place for place, content in enumerate(first)}
        index = [places[contents[row]] for row in self.rows.tolist()]
        sums = sum_rows(distinct, self.columns)
        return {component: nbytes[index] for component, nbytes in sums.items()}

    def by_degree(self, nbytes: Callable[[Symbols], float]) -> Array:
        """Return the bytes of each rank, worked out once for each number of stages."""
        job = self.sym.job
        by_degree = [
            nbytes(replace(self.sym, job=replace(job, layout=copy_with(job.layout, pp=pp))))
            for pp in self.batch.degrees
        ]
        return np.array(by_degree, dtype=float)[self._degrees()]

    def by_contents(self, nbytes: Callable[[Collection[bool], bool], float]) -> Array:
        """Return the bytes of each rank, worked out once for each content there is."""
        kinds, has_head = self.memory.contents(self.batch)
        number = (kinds + len(_KINDS) * has_head)[self.rows]
        distinct, index = np.unique(number, return_inverse=True)
        values = [
            nbytes(_KINDS[content % len(_KINDS)], content >= len(_KINDS))
            for content in distinct.tolist()
        ]
        return np.array(values, dtype=float)[index]


def _is_linear(param: Param) -> bool:
    return param.module in model_states.LINEAR_MODULES


def _fullest_moments(
    parts_memory: peak.ModelMemory, batch: PipelineBatch, live: Array, *, beside_layer: int
) -> Array:
    """Return the bytes at the fullest moment of every rank [ranks, activation policies].

    `live` [moments, activation policies] is what is kept at each of their moments.
    """
    backward, paired, moment = batch.transients
    short = parts_memory.transient_bytes(backward, paired, beside_layer=beside_layer)
    moments = short.take(moment, axis=0)
    moments += live
    return batch.fullest_moments(moments)
