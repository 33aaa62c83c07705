"""Device bytes of all candidates of a group at once, by the memory model of the cost floor.

This module has no formula of its own: it calls the functions of moewright.cost with arrays over
ranks and policies, and caches what candidates have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.memory import model_states, peak
from moewright.cost.memory.activations import ActivationPolicies, activation_context
from moewright.cost.memory.buffers import (
    dispatcher_bytes,
    fsdp_buffer_bytes,
    fsdp_layer_bytes,
    gathered_bytes,
    resident_bytes,
)
from moewright.cost.memory.fsdp_states import unit_state_rows
from moewright.cost.memory.model_states import StateElements
from moewright.cost.memory.parameter_tree import BucketFill, ParameterTree, local_params
from moewright.cost.memory.replicas import replica_rows
from moewright.cost.stage_parts import Array, StageParts
from moewright.cost.symbols import Symbols
from moewright.rules import grid
from moewright.rules.adapters import is_trained
from moewright.rules.delayed_scaling import delayed_scaling_rows, is_delayed
from moewright.rules.moments import shard_multiple
from moewright.rules.packed_base import holds_packed
from moewright.rules.saved.recompute import activation_nbytes
from moewright.rules.shapes import fsdp, shards
from moewright.rules.shapes.param import Param
from moewright.search.pipeline_arrays import PipelineBatch
from moewright.search.space import PipelineShapes, SearchSpace, StatePolicy
from moewright.spec.layout import Layout
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.workload import Dtype, MatrixUpdate

_WITHOUT_EXPERTS, _WITH_EXPERTS = False, True


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
    ) -> None:
        self.tree = ParameterTree()
        self._space = space
        self._parts = parts
        self._constants = constants
        self._policies = policies
        self._state_policies = states
        self._has_muon = space.workload.optimizer.matrix_update is MatrixUpdate.MUON
        counts_linear = space.workload.precision.is_narrow or holds_packed(space.workload)
        self._follows_linear = counts_linear and any(policy.zero == 3 for policy in states)
        # On a CPU, device and host share a memory, so a checkpoint that is being saved counts.
        self._checkpoints_on_device = not space.hardware.device.kind.is_accelerator
        self._dense_layers: dict[tuple[int, int, int, int], peak.LayerMemory] = {}
        self._buffers: dict[tuple[object, ...], Array] = {}
        self._communicators: dict[tuple[int, int, bool, tuple[int, ...]], Array] = {}
        self._fills: dict[tuple[str, int, int, bool], BucketFill] = {}
        self._elements: dict[tuple[object, ...], RankElements] = {}
        self._resident: dict[tuple[object, ...], Array] = {}
        self._scales: dict[tuple[PipelineShapes, int, int], Array] = {}
        self._block_numel: dict[tuple[int, int, int], Array] = {}

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

    def delay_weight_gradients(self, parts_memory: peak.ModelMemory) -> peak.ModelMemory:
        """Return the memory with the output gradients that delayed weight gradients hold longer."""
        waiting = peak.delayed_gradient_bytes(parts_memory.sym)
        layers = [
            replace(layer, transient=layer.transient + waiting) for layer in parts_memory.layers
        ]
        return replace(parts_memory, layers=tuple(layers))

    def device_bytes(
        self, parts_memory: peak.ModelMemory, batch: PipelineBatch, is_searched: Array
    ) -> tuple[Array, Array]:
        """Return the bytes of the fullest rank and their standard deviation.

        Both are [pipelines, activation policies, state policies]. Where `is_searched` [pipelines,
        state policies] is false, allocated bytes count as 0.
        """
        live = parts_memory.live_bytes(batch.live, batch.fetched)
        activations = _fullest_moments(parts_memory, batch, live, beside_layer=0)
        gathered = activations
        beside_layer = self._fsdp_layer_bytes(parts_memory.sym)
        if beside_layer:
            gathered = _fullest_moments(parts_memory, batch, live, beside_layer=beside_layer)
        at_step = self._step_bytes(parts_memory.sym, batch)
        resident = self._resident_bytes(parts_memory.sym, batch)
        resident = resident + self._buffer_bytes(parts_memory.sym, batch)[:, None]
        allocated = np.zeros((*is_searched.shape, len(self._policies.members)))
        for column, policy in enumerate(self._state_policies):
            some = np.flatnonzero(is_searched[:, column])
            short_lived = gathered if policy.zero == 3 else activations
            if at_step is not None:
                short_lived = np.maximum(activations, at_step[:, column, None])
            allocated[some, column] = batch.fullest_ranks(short_lived, resident[:, column], some)
        allocated = allocated.transpose(0, 2, 1)  # activation policies stay neighbours in memory
        device = peak.runtime_overhead(
            self._constants,
            allocated,
            groups=self._count_communicators(parts_memory.sym.layout, batch)[:, None, None],
            buffers=dispatcher_bytes(parts_memory.sym),
        )
        return allocated + device.reserved_bytes + device.communication_bytes, device.sd_bytes

    def elements(self, cut: Layout, zero: int, batch: PipelineBatch) -> RankElements:
        """Return the elements of every rank of a batch under a layout `cut` and a level of ZeRO."""
        # Levels 1 to 3 shard over the same ranks, unless sharding is hybrid (layout.shard).
        level = zero if cut.shard else min(zero, 1)
        key = batch.pipelines, cut.tp, cut.cp, cut.ep, cut.etp, level
        if key not in self._elements:
            layouts = [replace(cut, pp=pp, zero=zero) for pp in batch.degrees]
            self._elements[key] = self._count_elements(layouts, batch)
        return self._elements[key]

    def _count_communicators(self, cut: Layout, batch: PipelineBatch) -> Array:
        """Count the process groups of a rank [pipelines]."""
        key = cut.tp, cut.cp, cut.ep > 1, batch.degrees
        if key not in self._communicators:
            self._communicators[key] = np.array(
                [peak.count_communicators(replace(cut, pp=pp)) for pp in batch.degrees]
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

    def _frozen_numel(self, cut: Layout, batch: PipelineBatch) -> Array | None:
        """Return the elements of the frozen parts of every rank; None where there are none."""
        fine_tuning = self._space.workload.fine_tuning
        if not fine_tuning.freeze:
            return None
        total = np.zeros(len(batch.ranks))
        for group in shards.GRADIENT_GROUPS:
            cuts = (cut.ep, cut.etp) if group == "edp" else (cut.tp, 1)
            key = f"frozen {group}", *cuts, False
            if key not in self._fills:
                self._fills[key] = BucketFill(
                    self.tree,
                    partial(self._mark_frozen, cut, group),
                    bucket_elements=self._space.workload.optimizer.bucket_elements,
                    shard_multiple=1,
                    follows_marked=False,
                )
            total += self._fills[key].totals(1).marked[batch.nodes].sum(axis=1)
        return total

    def _mark_frozen(
        self, cut: Layout, group: str, params: Sequence[Param]
    ) -> list[tuple[int, bool]]:
        fine_tuning = self._space.workload.fine_tuning
        return local_params(
            params, cut, group, lambda param: not is_trained(fine_tuning, param.name)
        )

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

    def _fsdp_layer_bytes(self, sym: Symbols) -> int:
        """Return `fsdp_layer_bytes` under ZeRO-3, 0 where that is not searched."""
        if all(policy.zero != 3 for policy in self._state_policies):
            return 0
        job = replace(sym.job, layout=replace(sym.layout, zero=3))
        return fsdp_layer_bytes(replace(sym, job=job))

    def _step_bytes(self, sym: Symbols, batch: PipelineBatch) -> Array | None:
        """Return the bytes of the step [ranks, state policies]; None where it needs none."""
        if sym.workload.grad_dtype is Dtype.FP32:
            return None
        columns = []
        for policy in self._state_policies:
            layout = replace(sym.layout, zero=policy.zero, offload=policy.offload)
            own = self.elements(sym.layout, policy.zero, batch).own
            columns.append(model_states.step_gradient_bytes(sym.workload, layout, own))
        return np.stack(columns, axis=1)

    def _resident_bytes(self, sym: Symbols, batch: PipelineBatch) -> Array:
        """Return the bytes of states, copies and gathers of weights [ranks, state policies]."""
        cut = sym.layout
        is_gathered = any(policy.zero == 3 for policy in self._state_policies)
        key = batch.pipelines, cut.tp, cut.cp, cut.ep, cut.etp, cut.mbs if is_gathered else 0
        if key not in self._resident:
            resident = np.zeros((len(batch.ranks), len(self._state_policies)))
            for column, policy in enumerate(self._state_policies):
                is_searched = np.array(
                    [policy.is_searched_on(shape, self._space) for shape in batch.pipelines.shapes]
                )
                ranks = np.flatnonzero(is_searched[batch.pipeline_of_rank])
                if len(ranks):
                    resident[ranks, column] += self._states_bytes(sym, policy, batch, ranks)
            self._resident[key] = resident
        return self._resident[key]

    def _states_bytes(
        self, sym: Symbols, policy: StatePolicy, batch: PipelineBatch, ranks: Array
    ) -> Array:
        """Return the bytes of model states, with copies and buffers that go with them [some ranks].

        `ranks` are rows of the batch.
        """
        workload = sym.workload
        cut = sym.layout
        layout = replace(cut, zero=policy.zero, offload=policy.offload)
        elements = self.elements(cut, policy.zero, batch)
        total = self._flat_or_unit_bytes(sym, layout, batch, ranks)
        frozen = self._frozen_numel(cut, batch)
        if frozen is not None:
            total += activation_nbytes(workload) * frozen[ranks]
        if sym.is_low_precision:
            copies = self._constants.low_precision_bytes("weight_copies", sym.dtype)
            is_sharded = Component.WEIGHTS in model_states.sharded_states(policy.zero)
            linear = elements.own_linear if is_sharded else elements.linear
            total += copies * linear[ranks]
        if self._checkpoints_on_device:
            total += model_states.checkpoint_bytes(workload, elements.checkpointed[ranks])
        if policy.zero >= 2:
            layer_numel = self._layer_numel(cut, batch, ranks)
            total += gathered_bytes(workload, layer_numel, zero=policy.zero)
            total += _fsdp_buffer_bytes(sym, layout, batch)[ranks]
        if layout.spare:
            total += self._replica_bytes(sym, batch)[ranks]
        if is_delayed(workload):
            total += self._scale_bytes(sym, batch)[ranks]
        return total

    def _flat_or_unit_bytes(
        self, sym: Symbols, layout: Layout, batch: PipelineBatch, ranks: Array
    ) -> Array:
        """Return the device bytes of states, in flat buffers or units of fully_shard [some ranks].

        Which units make up a part of the optimizer differs between ranks, so that each of them is
        then asked as an estimate asks it.
        """
        workload = sym.workload
        moves_units = model_states.moves_units(layout, trained=sym.trained_share)
        if moves_units and layout.offload_fraction < 1:
            unit_bytes = [
                sum(row.bytes for row in rows if row.component is not Component.HOST)
                for rows in _unit_rows(sym, layout, batch)
            ]
            return np.array(unit_bytes, dtype=float)[ranks]
        elements = self.elements(layout, layout.zero, batch)
        own, matrices = elements.own[ranks], elements.own_matrices[ranks]
        hosted = model_states.hosted_elements(layout, own)
        state_elements = StateElements(
            whole=elements.numel[ranks].sum(axis=1),
            own=own,
            matrices=matrices,
            hosted=hosted,
            # in proportion: what lies where in a shard is not counted here
            hosted_matrices=np.rint(matrices * hosted / np.maximum(own, 1)),
        )
        scales = model_states.scale_bytes(workload, state_elements, trained=sym.trained_share)
        packed: Array | float = 0.0
        if holds_packed(workload):
            is_sharded = Component.WEIGHTS in model_states.sharded_states(layout.zero)
            packed = (elements.own_linear if is_sharded else elements.linear)[ranks]
        parts = [(layout, state_elements)]
        if moves_units:
            parts = self._split_flat(layout, batch, ranks, state_elements)
        total: Array = scales[Component.MOMENTS]
        for of_layout, counted in parts:
            sizes = model_states.state_bytes(
                workload,
                of_layout,
                counted,
                trained=sym.trained_share,
                frozen_nbytes=self._constants["frozen_weight_bytes"],
                packed=packed,
            )
            total = total + sum(
                nbytes for component, nbytes in sizes.items() if component is not Component.HOST
            )
        return total

    def _split_flat(
        self, layout: Layout, batch: PipelineBatch, ranks: Array, elements: StateElements
    ) -> list[tuple[Layout, StateElements]]:
        """Split elements in those of flat buffers, which one rank alone holds, and those of units.

        Each comes with the layout that says where it lies. `elements` are those of `ranks`, rows of
        the batch.
        """
        numel = self.elements(layout, layout.zero, batch).numel[ranks]
        is_flat = np.array(
            [
                [
                    not fsdp.is_fsdp_sharded(replace(layout, pp=pp), group)
                    for group in shards.GRADIENT_GROUPS
                ]
                for pp in batch.degrees
            ]
        )[batch.degree[batch.pipeline_of_rank[ranks]]]
        flat_share = (numel * is_flat).sum(axis=1) / elements.own
        parts = (
            (fsdp.flat_buffer_layout(layout), flat_share, (numel * is_flat).sum(axis=1)),
            (layout, 1 - flat_share, (numel * ~is_flat).sum(axis=1)),
        )
        return [
            (
                of_layout,
                StateElements(
                    whole=whole,
                    own=elements.own * share,
                    matrices=elements.matrices * share,
                    hosted=elements.hosted * share,
                    hosted_matrices=elements.hosted_matrices * share,
                ),
            )
            for of_layout, share, whole in parts
        ]

    def _buffer_bytes(self, sym: Symbols, batch: PipelineBatch) -> Array:
        """Return the bytes of placeholders, workspaces and gathers [ranks]."""
        cut = sym.layout
        key = cut.tp, cut.cp, cut.ep, cut.etp, cut.mbs, cut.dispatcher
        if key not in self._buffers:
            # By the kinds of layer that a rank holds: none, dense, MoE, both; `kinds` below.
            fullest = ((), (_WITHOUT_EXPERTS,), (_WITH_EXPERTS,), (_WITHOUT_EXPERTS, _WITH_EXPERTS))
            self._buffers[key] = np.array(
                [
                    [
                        resident_bytes(self._constants, sym, kinds, has_head=has_head)
                        for kinds in fullest
                    ]
                    for has_head in (False, True)
                ],
                dtype=float,
            )
        layers = batch.ranks[:, : len(self._parts.layers)]
        is_moe = np.array([part.kind.is_moe for part in self._parts.layers])
        kinds = (layers[:, ~is_moe] > 0).any(axis=1) + 2 * (layers[:, is_moe] > 0).any(axis=1)
        has_head = (batch.ranks[:, self._parts.head_columns] > 0).any(axis=1)
        return np.asarray(self._buffers[key][has_head.astype(int), kinds])

    def _layer_numel(self, cut: Layout, batch: PipelineBatch, ranks: Array) -> Array:
        """Return the elements of ranks' layers [some ranks, 2 x blocks], for gathers.

        At most two layers are gathered at once, so each block stands there at most twice.
        """
        key = cut.tp, cut.ep, cut.etp
        blocks = self.tree.blocks
        if key not in self._block_numel or len(self._block_numel[key]) < len(blocks):
            self._block_numel[key] = np.array(
                [
                    sum(
                        numel
                        for group in shards.GRADIENT_GROUPS
                        for numel, _ in local_params(params, cut, group, _is_linear)
                    )
                    for params in blocks
                ],
                dtype=float,
            )
        counts = batch.count_blocks(ranks, len(blocks))
        return np.concatenate([self._block_numel[key] * (counts > n) for n in (0, 1)], axis=1)

    def _scale_bytes(self, sym: Symbols, batch: PipelineBatch) -> Array:
        """Return the bytes of delayed scales and their histories [ranks]."""
        key = batch.pipelines, sym.layout.ep, sym.layout.spare
        if key not in self._scales:
            self._scales[key] = np.array(
                [
                    sum(
                        row.bytes
                        for row in delayed_scaling_rows(replace(sym.job, layout=layout), pp_rank)
                    )
                    for layout, pp_rank in batch.rank_layouts(sym.layout)
                ],
                dtype=float,
            )
        return self._scales[key]

    def _replica_bytes(self, sym: Symbols, batch: PipelineBatch) -> Array:
        """Return the bytes of expert replicas [ranks]: weights, their 8-bit copies, gradients."""
        copies = 1.0
        if sym.is_low_precision:
            share = self._constants.low_precision_bytes("weight_copies", sym.dtype) / sym.c
            copies += share
        replica_bytes = []
        for layout, pp_rank in batch.rank_layouts(sym.layout):
            rows = replica_rows(replace(sym.job, layout=layout), pp_rank)
            sizes = {row.component: row.bytes for row in rows if row.module is Module.EXPERTS}
            weights = sizes.get(Component.WEIGHTS, 0)
            replica_bytes.append(copies * weights + sizes.get(Component.GRADIENTS, 0))
        return np.array(replica_bytes, dtype=float)


def _unit_rows(
    sym: Symbols, layout: Layout, batch: PipelineBatch
) -> Iterator[tuple[MemoryRow, ...]]:
    """Yield the memory rows of the states of every rank of a batch."""
    for cut, pp_rank in batch.rank_layouts(layout):
        yield unit_state_rows(replace(sym.job, layout=cut), grid.stage_rank(cut, pp_rank))


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


def _fsdp_buffer_bytes(sym: Symbols, layout: Layout, batch: PipelineBatch) -> Array:
    """Return `fsdp_buffer_bytes` of every rank: it depends on how many ranks share a stage."""
    by_degree = np.zeros(batch.pp.max() + 1)
    for pp in np.unique(batch.pp).tolist():
        job = replace(sym.job, layout=replace(layout, pp=pp))
        by_degree[pp] = fsdp_buffer_bytes(replace(sym, job=job))
    return np.asarray(by_degree[batch.pp[batch.pipeline_of_rank]])
