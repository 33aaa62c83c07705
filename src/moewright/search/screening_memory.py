"""Device bytes of all candidates of a group at once: the formulas of the cost floor over arrays of
pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

import numpy as np

from moewright.cost import memory
from moewright.cost.activations import is_offloaded, outside_layers_bytes, quantised_bytes
from moewright.cost.buffers import dispatcher_bytes, graph_bytes
from moewright.cost.constants import Constants
from moewright.cost.model_states import sharded_states, state_bytes_per_parameter
from moewright.cost.routed_rows import is_moe_layer
from moewright.cost.step_time import layer_kind
from moewright.cost.symbols import Symbols
from moewright.rules import fsdp, grid, recompute, routing, shards
from moewright.rules.parameters import parameters
from moewright.rules.stages import Chunk
from moewright.search.pipeline_arrays import Array, LayerKinds, PipelineBatch
from moewright.search.space import ActivationPolicy, PipelineShapes, SearchSpace, StatePolicy
from moewright.spec.layout import Layout, Offload
from moewright.spec.ledger import Component, Module

_PAD_ELEMENTS = 128
_GROUPS = {group: column for column, group in enumerate(shards.GRADIENT_GROUPS)}


@dataclass(frozen=True, kw_only=True)
class LayerParameters:
    """Elements of one rank by piece and the group that reduces them (rules.shards) [pieces,
    groups]: all of them, and those with 8-bit copies; what a bucket holds on average [groups].
    """

    numel: Array
    copied: Array
    bucket: Array


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """[pieces, works] bytes that a micro-batch keeps, that live shortly in the backward of a layer,
    and that it sends to the host.
    """

    saved: Array
    transient: Array
    offloaded: Array


class ScreeningMemory:
    """Bytes of the candidates of one space. What does not depend on the candidate is worked out
    once."""

    def __init__(
        self,
        space: SearchSpace,
        pieces: LayerKinds,
        constants: Constants,
        works: Sequence[ActivationPolicy],
        keeps: Sequence[StatePolicy],
    ) -> None:
        self._space, self._pieces, self._constants = space, pieces, constants
        self._works, self._keeps = works, keeps
        model = space.model
        kinds = [layer_kind(model, layer) for layer in range(model.layers)]
        self._layers = tuple(kinds.index(kind) for kind in pieces.kinds)
        wanted = {*self._layers, -1, model.layers, model.layers + 1}
        self._params = [param for param in parameters(model) if param.layer in wanted]
        narrow = space.workload.precision.is_narrow
        held = recompute.activation_nbytes(space.workload)
        self._inputs = (
            constants.low_precision_bytes("input", space.workload.precision) / held
            if narrow
            else None
        )
        self._copies = (
            constants.low_precision_bytes("weight_copies", space.workload.precision) / held
            if narrow
            else 0.0
        )
        self._replays = np.array([bool(work.recompute) for work in works])
        self._without_experts: dict[tuple[int, int, int], LayerBytes] = {}
        self._masks: dict[tuple[tuple[Module, str], ...], tuple[Array, Array]] = {}
        self._placeholders: dict[tuple[int, int], Array] = {}
        self._groups: dict[tuple[int, int, bool, tuple[int, ...]], Array] = {}
        self._states: dict[tuple[PipelineShapes, int, int, int, int], Array] = {}
        self._counted: dict[tuple[int, int, int], LayerParameters] = {}

    def device_bytes(
        self,
        size: Symbols,
        layers: LayerBytes,
        pipes: PipelineShapes,
        stack: PipelineBatch,
        suits: Array,
    ) -> tuple[Array, Array]:
        """[pipelines, works, keeps] bytes of the fullest rank, and their standard deviation; 0
        allocated for keeps that are not searched on a pipeline, by `suits` [pipelines, keeps].
        """
        cut, pieces = size.layout, self._pieces
        head = memory.head_bytes(self._constants, size)
        backwards, which = stack.backwards
        passes = backwards[:, pieces.mtp] + backwards[:, pieces.head]
        short = np.multiply.outer(passes * head.backward, np.ones(len(self._works)))
        for piece in range(pieces.mtp + 1):
            np.maximum(short, (backwards[:, piece, None] > 0) * layers.transient[piece], out=short)
        kept = np.concatenate([layers.saved, np.full((1, len(self._works)), head.forward)])
        alive = stack.kept @ kept
        alive += short.take(
            which, axis=0
        )  # in place: a fresh array of this size costs the system more than its sum
        alive = stack.fullest(alive)
        key = pipes, cut.tp, cut.cp, cut.ep, cut.etp
        if key not in self._states:
            self._states[key] = self._state_bytes(cut, stack) + self._resident(size, stack)[:, None]
        states = self._states[key]
        allocated = np.zeros((*suits.shape, len(self._works)))
        for keep in range(len(self._keeps)):
            some = np.flatnonzero(suits[:, keep])
            allocated[some, keep] = stack.most(alive, states[:, keep], some)
        allocated = allocated.transpose(0, 2, 1)  # the works stay side by side in memory
        device = memory.runtime_overhead(
            self._constants,
            allocated,
            groups=self._communicators(cut, stack)[:, None, None],
            buffers=dispatcher_bytes(size),
        )
        return allocated + device.reserved_bytes + device.communication_bytes, device.sd_bytes

    def _communicators(self, cut: Layout, stack: PipelineBatch) -> Array:
        """[P]"""
        key = cut.tp, cut.cp, cut.ep > 1, stack.degrees
        if key not in self._groups:
            self._groups[key] = np.array(
                [memory.count_communicators(replace(cut, pp=pp)) for pp in stack.degrees]
            )
        return np.asarray(self._groups[key][stack.degree])

    def parameters(self, cut: Layout) -> LayerParameters:
        """Elements of the pieces under a cut."""
        key = cut.tp, cut.ep, cut.etp
        if key not in self._counted:
            self._counted[key] = self._count(cut)
        return self._counted[key]

    def held(self, cut: Layout, stack: PipelineBatch) -> tuple[Array, Array]:
        """[seats, groups] elements of every seat: all, and those with 8-bit copies."""
        pieces, counted = self._pieces, self.parameters(cut)
        seats = stack.ranks.copy()
        mtp, head = stack.ranks[:, pieces.mtp], stack.ranks[:, pieces.head]
        tied = head if self._space.model.tie_embeddings else np.zeros_like(head)
        # A rank that embeds shifted tokens, or makes a pass through the head, for an MTP depth
        # holds both once.
        seats[:, pieces.embedding] = (stack.ranks[:, pieces.embedding] + mtp + tied) > 0
        seats[:, pieces.head] = (head + mtp) > 0
        return seats @ counted.numel, seats @ counted.copied

    def shares(self, cut: Layout, stack: PipelineBatch) -> Array:
        """[seats, 4] dense and expert elements that every seat reduces and gathers, and in how many
        calls each."""
        numel, _ = self.held(cut, stack)
        calls = np.maximum(1, np.ceil(numel / self.parameters(cut).bucket))
        dense, expert = _GROUPS["dp_cp"], _GROUPS["edp"]
        return np.concatenate(
            [numel[:, [dense, expert]], calls[:, [dense, expert]]], axis=1
        ).astype(np.int64)

    def _count(self, cut: Layout) -> LayerParameters:
        pieces, model = self._pieces, self._space.model
        place = {layer: index for index, layer in enumerate(self._layers)}
        place |= {model.layers + 1: pieces.mtp, -1: pieces.embedding, model.layers: pieces.head}
        numel, copied = np.zeros((2, pieces.count, len(_GROUPS)))
        squares = np.zeros(len(_GROUPS))
        for param in self._params:
            count, row = prod(shards.local_shape(param, cut)), place[param.layer]
            column = _GROUPS[shards.gradient_group(param.sharded_dims, cut)]
            numel[row, column] += count
            squares[column] += float(count) ** 2
            if param.module in memory.LINEAR_MODULES:
                copied[row, column] += count
        # A bucket closes with the parameter that fills it: on average half a parameter late.
        late = squares / np.maximum(1.0, 2 * numel.sum(axis=0))
        closes = self._space.workload.optimizer.bucket_elements
        return LayerParameters(numel=numel, copied=copied, bucket=closes + late)

    def _state_bytes(self, cut: Layout, stack: PipelineBatch) -> Array:
        """[seats, keeps]"""
        numel, copied = self.held(cut, stack)
        layouts = [replace(cut, pp=pp) for pp in stack.degrees]
        ranks = [
            [grid.group_size(layout, fsdp.state_group(layout, group)) for group in _GROUPS]
            for layout in layouts
        ]
        padding = [[lcm(size, _PAD_ELEMENTS) / 2 for size in sizes] for sizes in ranks]
        degree = stack.degree[stack.pipe_of_seat]
        over = np.array(ranks, dtype=float)[degree]
        buckets = np.ceil(numel / self.parameters(cut).bucket)
        padded = numel + buckets * np.array(padding)[degree]
        found = np.zeros((len(numel), len(self._keeps)))
        element = state_bytes_per_parameter(self._space.workload)
        for column, keep in enumerate(self._keeps):
            sharded = sharded_states(keep.zero)
            for component, nbytes in element.items():
                if (
                    component in (Component.MASTER, Component.MOMENTS)
                    and Offload.OPTIMIZER in keep.offload
                ):
                    on_device = 1 - self._space.base.offload_fraction
                else:
                    on_device = 1.0
                here = padded / over if component in sharded else padded
                found[:, column] += on_device * nbytes * here.sum(axis=1)
                if keep.zero == 3 and component in (Component.WEIGHTS, Component.GRADIENTS):
                    found[:, column] += nbytes * self._gathered(cut, stack)
                if component is Component.WEIGHTS and self._copies:
                    copies = copied / over if component in sharded else copied
                    found[:, column] += nbytes * self._copies * copies.sum(axis=1)
        return found

    def _gathered(self, cut: Layout, stack: PipelineBatch) -> Array:
        """[seats] elements of the two largest layers, which ZeRO-3 gathers at once."""
        pieces = self.parameters(cut).numel.sum(axis=1)
        present = np.minimum(stack.ranks, 2) * np.ones_like(pieces)
        order = np.argsort(-pieces)
        taken = np.minimum(np.cumsum(present[:, order], axis=1), 2)
        return np.asarray(np.diff(taken, axis=1, prepend=0) @ pieces[order])

    def _resident(self, size: Symbols, stack: PipelineBatch) -> Array:
        """[seats] gradient placeholders and workspaces."""
        kinds = stack.ranks[:, : self._pieces.mtp + 1] > 0
        codes = kinds @ (1 << np.arange(kinds.shape[1]))
        key = size.layout.tp, size.layout.etp
        if key not in self._placeholders:
            self._placeholders[key] = np.array(
                [self._placeholder(size, code) for code in range(1 << kinds.shape[1])], dtype=float
            )
        return self._placeholders[key][codes] + self._constants["workspace_bytes"]

    def _placeholder(self, size: Symbols, code: int) -> int:
        layers = tuple(layer for place, layer in enumerate(self._layers) if code >> place & 1)
        mtp = code >> self._pieces.mtp & 1
        chunk = Chunk(
            pp_rank=0,
            vpp_rank=0,
            has_embedding=False,
            layers=layers,
            mtp_layers=mtp,
            has_loss=False,
        )
        return memory.placeholder_bytes(size, [chunk])

    def layers(self, size: Symbols) -> LayerBytes:
        """Of a cut, whatever its pipeline and overlaps."""
        model, cut = self._space.model, size.layout
        key = cut.tp, cut.cp, cut.mbs
        numbered = [
            *enumerate(self._layers),
            *([(self._pieces.mtp, model.layers + 1)] if model.mtp_layers else []),
        ]
        if key not in self._without_experts:
            self._without_experts[key] = self._outside(size)
            self._add_layers(
                size,
                self._without_experts[key],
                [one for one in numbered if not is_moe_layer(model, one[1])],
            )
        known = self._without_experts[key]
        found = LayerBytes(
            saved=known.saved.copy(),
            transient=known.transient.copy(),
            offloaded=known.offloaded.copy(),
        )
        self._add_layers(size, found, [one for one in numbered if is_moe_layer(model, one[1])])
        return found

    def delay_weight_gradients(self, size: Symbols, layers: LayerBytes) -> LayerBytes:
        """The same with weight gradients delayed, which hold what they wait with beside a layer's
        backward."""
        piece = np.arange(self._pieces.count)[:, None]
        waiting = memory.delayed_gradient_bytes(size) * (
            piece < self._pieces.mtp + bool(self._space.model.mtp_layers)
        )
        return replace(layers, transient=layers.transient + waiting)

    def _outside(self, size: Symbols) -> LayerBytes:
        """What stands outside layers, and the graphs of the layers."""
        model, workload, pieces, cut = (
            self._space.model,
            self._space.workload,
            self._pieces,
            size.layout,
        )
        saved, transient, away = np.zeros((3, pieces.count, len(self._works)))
        kinds = {work.graphs for work in self._works}
        of_graphs = {
            graphs: graph_bytes(model, workload, replace(cut, graphs=graphs)) for graphs in kinds
        }
        saved[: pieces.mtp + bool(model.mtp_layers)] = [
            of_graphs[work.graphs] for work in self._works
        ]
        for piece in (pieces.mtp, pieces.embedding, pieces.head):
            chunk = Chunk(
                pp_rank=0,
                vpp_rank=0,
                has_embedding=piece == pieces.embedding,
                layers=(),
                mtp_layers=int(piece == pieces.mtp),
                has_loss=piece == pieces.head,
            )
            outside = outside_layers_bytes(
                model, workload, cut, chunk, keeps_logits=not size.is_fused
            )
            saved[piece] += sum(outside.values())
        return LayerBytes(saved=saved, transient=transient, offloaded=away)

    def _add_layers(
        self, size: Symbols, found: LayerBytes, numbered: Sequence[tuple[int, int]]
    ) -> None:
        """Put in what the layers of these pieces hold."""
        model, workload, cut = self._space.model, self._space.workload, size.layout
        load = routing.expected_load_factor(model, workload, cut)
        for piece, layer in numbered:
            rows = recompute.saved_tensors(
                model, workload, cut, layer, load=load, repeats_exchange=size.is_fused
            )
            stays, there = self._mask(rows)
            whole = np.array([row.bytes for row in rows], dtype=float)
            kept = (
                whole
                if self._inputs is None
                else np.array([float(quantised_bytes(model, row, self._inputs)) for row in rows])
            )
            found.saved[piece] += there @ kept
            found.offloaded[piece] = (stays - there) @ kept
            replayed = self._replays * (whole.sum() - stays @ whole)
            found.transient[piece] = memory.layer_gradient_bytes(size, layer) + replayed

    def _mask(self, rows: Sequence[recompute.SavedTensor]) -> tuple[Array, Array]:
        """[works, rows]: what recompute leaves, and what of that stays on the device."""
        key = tuple((row.module, row.name) for row in rows)
        if key not in self._masks:
            stays = np.array(
                [
                    [bool(recompute.kept_tensors([row], work.recompute)) for row in rows]
                    for work in self._works
                ]
            )
            away = np.array(
                [[is_offloaded(row, work.offload) for row in rows] for work in self._works]
            )
            self._masks[key] = stays.astype(float), (stays & ~away).astype(float)
        return self._masks[key]
