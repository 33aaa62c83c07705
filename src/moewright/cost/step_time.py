"""Seconds of a training step: the parts of every pipeline rank, the pipeline, and the tail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

import numpy as np

from moewright.cost.activations import (
    OffloadedActivations,
    activation_context,
    offloaded_activations,
    policy_of,
)
from moewright.cost.collective_time import CollectiveModel
from moewright.cost.constants import Constants
from moewright.cost.gemm_rows import LayerOps
from moewright.cost.head_ops import (
    add_eager_loss,
    embedding_ops,
    head_ops,
    mtp_ops,
    optimizer_ops,
)
from moewright.cost.host_time import layer_host_s
from moewright.cost.layer_time import (
    DeviceTime,
    FloatOrArray,
    LayerCollectives,
    LayerCost,
    MicroBatchTime,
    PartSeconds,
    PricedOps,
    ReplayCost,
    ReplayPolicy,
    add_times,
    device_time,
    layer_time,
    outside_layers_time,
    pass_times,
    price_collectives,
    price_ops,
    replace_expert_rows,
    replay_cost,
    stage_transfer_s,
    token_loop_time,
)
from moewright.cost.model_states import MOMENTUM_BYTES
from moewright.cost.muon import muon_ops
from moewright.cost.op_time import DeviceRates, OpRow
from moewright.cost.ops import expert_ops, layer_ops
from moewright.cost.pipeline_time import build_pipeline, exposed_transfers, simulate_pipeline_s
from moewright.cost.stage_parts import Array, LayerKind, StageParts, layer_kinds
from moewright.cost.symbols import Symbols
from moewright.rules import capacity, fsdp, grid
from moewright.rules.extremes import largest_of
from moewright.rules.simulate import StageSeconds
from moewright.spec.hardware import Collective
from moewright.spec.layout import Layout, Offload, Overlap
from moewright.spec.plan import TimePart
from moewright.spec.workload import Dtype, MatrixUpdate

_FP32_BYTES = 4
_BUCKET_ELEMENTS_A_RANK = 1_000_000
_LOSS_SUMS = 3  # the top of the logits, the sum of their exponentials, and the target's


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """Seconds of one micro-batch of every part of a model, and of one transfer between stages."""

    parts: tuple[MicroBatchTime, ...]  # as StageParts orders them
    transfer_s: float

    @cached_property
    def forward_s(self) -> Array:
        """Seconds of a forward [parts]."""
        return np.array([time.forward_s for time in self.parts])

    @cached_property
    def backward_s(self) -> Array:
        """Seconds of a backward [parts]."""
        return np.array([time.total_s for time in self.parts]) - self.forward_s

    @cached_property
    def weight_grad_s(self) -> Array:
        """Seconds of the backward that weight gradients take [parts]."""
        return np.array([time.weight_grad_s for time in self.parts])


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParameters:
    """Parameters of one rank: dense and expert elements, and the calls their buckets take."""

    dense: int
    expert: int
    dense_calls: int = 1
    expert_calls: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTail:
    """Seconds of the work that a step does once, after its micro-batches.

    `hidden_s` are the seconds of collectives that run beside micro-batches, and are hidden as far
    as these take as long; the other fields are exposed.
    """

    reduce_s: float
    gather_s: float
    optimizer_s: float
    hidden_s: float

    @property
    def total_s(self) -> float:
        return self.reduce_s + self.gather_s + self.optimizer_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The seconds of a step; `exposed` are the parts of the slowest rank, and sum to `step_s`."""

    step_s: float
    slowest_rank: int
    exposed: PartSeconds
    hidden: PartSeconds

    def scale(self, factor: float) -> StepTime:
        """Return the step with all of its seconds so many times as long."""
        return StepTime(
            step_s=factor * self.step_s,
            slowest_rank=self.slowest_rank,
            exposed={part: factor * seconds for part, seconds in self.exposed.items()},
            hidden={part: factor * seconds for part, seconds in self.hidden.items()},
        )


def list_op_rows(sym: Symbols) -> tuple[OpRow, ...]:
    """List every row that enters an estimate but the optimizer's."""
    ops = model_ops(sym)
    parts = [*ops.layers.values(), ops.embedding, ops.head]
    if sym.model.mtp_layers:
        parts.append(ops.mtp)
    return tuple(row for part in parts for row in (*part.forward, *part.backward))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOps:
    """The rows of everything that a stage can hold."""

    layers: Mapping[LayerKind, LayerOps]
    embedding: LayerOps
    head: LayerOps
    mtp: LayerOps


def model_ops(sym: Symbols) -> ModelOps:
    """Return the rows of everything that a stage can hold."""
    return ModelOps(
        layers={
            kind: layer_ops(sym, layer=layer, moe=kind.is_moe)
            for kind, layer in layer_kinds(sym.model).items()
        },
        embedding=embedding_ops(sym),
        head=head_ops(sym),
        mtp=mtp_ops(sym),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedModelOps:
    """The rows of layers with their seconds, and the times of what stands outside them."""

    layers: Mapping[LayerKind, PricedOps]
    embedding: MicroBatchTime
    head: MicroBatchTime
    mtp: MicroBatchTime


def price_model_ops(
    rates: DeviceRates, collectives: CollectiveModel, sym: Symbols, ops: ModelOps
) -> PricedModelOps:
    """Price the rows; an MTP depth is priced with its embedding and its pass through the head."""
    embedding = outside_layers_time(collectives, sym, price_ops(rates, ops.embedding), gathers=2)
    head_priced = price_ops(rates, add_eager_loss(rates.constants, sym, ops.head))
    head = outside_layers_time(collectives, sym, head_priced, gathers=3, sums=_LOSS_SUMS)
    projection = outside_layers_time(collectives, sym, price_ops(rates, ops.mtp), gathers=5)
    return PricedModelOps(
        layers={kind: price_ops(rates, layer) for kind, layer in ops.layers.items()},
        embedding=embedding,
        head=add_times([(head, 1.0), (token_loop_time(rates.constants, sym), 1.0)]),
        mtp=add_times([(head, 1.0), (projection, 1.0), (embedding, 1.0)]),
    )


def reprice_experts(rates: DeviceRates, priced: PricedModelOps, sym: Symbols) -> PricedModelOps:
    """Price the rows between dispatch and combine again, for experts that are sharded otherwise.

    `sym` is of a fused stack, with the same dispatcher as the priced layout.
    """
    if sym.model.moe is None:
        return priced
    experts = price_ops(rates, expert_ops(sym))
    layers = {
        kind: replace_expert_rows(rows, experts) if kind.is_moe else rows
        for kind, rows in priced.layers.items()
    }
    return replace(priced, layers=layers)


class Pricer:
    """Prices of parts for layouts that differ in pipeline, recompute, offload, overlap or graphs.

    Rows are priced once for all of these layouts, collectives and policies once for each set of
    overlaps.
    """

    __slots__ = ("_collectives", "_device", "_exchanges", "_priced", "_replays", "_shared", "sym")

    def __init__(
        self,
        collectives: CollectiveModel,
        sym: Symbols,
        priced: PricedModelOps,
        shared: Pricer | None = None,
    ) -> None:
        self.sym, self._collectives, self._priced = sym, collectives, priced
        self._shared = shared  # prices the layers without experts, which are the same
        self._exchanges: dict[tuple[object, ...], tuple[LayerCollectives, float]] = {}
        self._device: dict[tuple[object, ...], tuple[LayerCollectives, DeviceTime]] = {}
        self._replays: dict[tuple[object, ...], ReplayCost] = {}

    def with_experts(self, rates: DeviceRates, sym: Symbols) -> Pricer:
        """Return the prices of layouts that shard their experts otherwise, on a fused stack.

        Their dispatcher is the same; only the rows of experts are priced again.
        """
        priced = reprice_experts(rates, self._priced, sym)
        return Pricer(self._collectives, sym, priced, shared=self)

    def with_micro_batches(self, sym: Symbols) -> Pricer:
        """Return the prices of layouts with another number of micro-batches, on a fused stack.

        Nothing but the overlap of host and device depends on it, so what is known is shared.
        """
        pricer = Pricer(self._collectives, sym, self._priced, shared=self._shared)
        pricer._exchanges, pricer._device = self._exchanges, self._device
        pricer._replays = self._replays
        return pricer

    def part_times(self, layout: Layout, parts: StageParts) -> PartTimes:
        """Price the parts of a layout with the degrees and micro-batch of the priced one."""
        sym = replace(self.sym, job=replace(self.sym.job, layout=layout))
        layers = {}
        for kind, rows in self._priced.layers.items():
            _, device = self._device_time(layout, kind)
            replay = self._replay_cost(layout, kind, layout)
            offloaded = _offloaded(self._collectives.constants, sym, kind)
            cost = LayerCost(device=device, replay=replay, offloaded=offloaded, is_moe=kind.is_moe)
            layers[kind] = layer_time(self._collectives, sym, layout, rows, cost)
        priced = self._priced
        times = [
            add_times([(layers[part.kind], 1.0), (priced.mtp, float(part.is_mtp))])
            for part in parts.layers
        ]
        nothing = add_times([])  # what keeps an MTP depth's input takes no time
        return PartTimes(
            parts=(*times, priced.embedding, priced.head, nothing),
            transfer_s=stage_transfer_s(self._collectives, self.sym, layout),
        )

    def layer_totals_s(
        self,
        layout: Layout,
        replays: Sequence[ReplayPolicy],
        chosen: Array,
        offloaded: Mapping[LayerKind, OffloadedActivations],
        *,
        synced: bool,
    ) -> dict[LayerKind, Array]:
        """Return the seconds of a layer of each kind, under policies instead of the layout's own.

        `chosen` [policies] is the index into `replays` that each policy takes, `offloaded`
        [policies] what it sends to the host. With `synced` the host waits for every transfer
        between stages.
        """
        is_used = np.zeros(len(replays), dtype=bool)
        is_used[chosen] = True
        used = np.flatnonzero(is_used)
        place = np.searchsorted(used, chosen)
        totals = {}
        for kind in self._priced.layers:
            costs = ReplayCost.stack(
                [self._replay_cost(layout, kind, replays[replay]) for replay in used.tolist()]
            )
            cost = ReplayCost(
                **{name: getattr(costs, name)[place] for name in ReplayCost.__slots__}
            )
            totals[kind] = np.asarray(self._total_s(layout, kind, cost, offloaded[kind], synced))
        return totals

    def layer_total_s(
        self,
        layout: Layout,
        replay: ReplayPolicy,
        offloaded: Mapping[LayerKind, OffloadedActivations],
        *,
        synced: bool,
    ) -> dict[LayerKind, float]:
        """Return `layer_totals_s` of one policy, as numbers."""
        return {
            kind: float(
                self._total_s(
                    layout, kind, self._replay_cost(layout, kind, replay), offloaded[kind], synced
                )
            )
            for kind in self._priced.layers
        }

    def _total_s(
        self,
        layout: Layout,
        kind: LayerKind,
        replay: ReplayCost,
        offloaded: OffloadedActivations,
        synced: bool,
    ) -> FloatOrArray:
        _, device = self._device_time(layout, kind)
        cost = LayerCost(device=device, replay=replay, offloaded=offloaded, is_moe=kind.is_moe)
        return pass_times(self._collectives, self.sym, layout, cost, synced=synced).total_s

    def part_seconds(
        self, parts: StageParts, layers: Mapping[LayerKind, FloatOrArray]
    ) -> list[FloatOrArray]:
        """Return the seconds of every part, given those of the layers of each kind."""
        priced = self._priced
        times = [layers[part.kind] + part.is_mtp * priced.mtp.total_s for part in parts.layers]
        return [*times, priced.embedding.total_s, priced.head.total_s, 0.0]

    def _device_time(self, layout: Layout, kind: LayerKind) -> tuple[LayerCollectives, DeviceTime]:
        if self._shared and not kind.is_moe:
            return self._shared._device_time(layout, kind)
        key = kind, layout.overlap, layout.dispatcher, layout.cp_comm
        if key not in self._device:
            moved, host_s = self._exchange(layout, kind)
            rows = self._priced.layers[kind]
            self._device[key] = (
                moved,
                device_time(self._collectives, layout, rows, moved, host_s=host_s),
            )
        return self._device[key]

    def _exchange(self, layout: Layout, kind: LayerKind) -> tuple[LayerCollectives, float]:
        """Return the collectives of a layer, and its eager host time where nothing overlaps.

        Of all overlaps that of tensor-parallel collectives alone changes them.
        """
        key = kind, Overlap.TP in layout.overlap, layout.dispatcher, layout.cp_comm
        if key not in self._exchanges:
            sym = replace(self.sym, job=replace(self.sym.job, layout=layout))
            alone = replace(layout, overlap=())
            self._exchanges[key] = (
                price_collectives(self._collectives, sym, kind),
                layer_host_s(self._collectives.constants, alone, (), sym, kind),
            )
        return self._exchanges[key]

    def _replay_cost(self, layout: Layout, kind: LayerKind, policy: ReplayPolicy) -> ReplayCost:
        if self._shared and not kind.is_moe:
            return self._shared._replay_cost(layout, kind, policy)
        key = (
            kind,
            layout.overlap,
            layout.dispatcher,
            layout.cp_comm,
            policy.recompute,
            policy.graphs,
            layout.pp * layout.vpp if layout.recompute_block else 0,
        )
        if key not in self._replays:
            moved, _ = self._device_time(layout, kind)
            rows = self._priced.layers[kind]
            self._replays[key] = replay_cost(
                self._collectives, self.sym, layout, policy, rows, moved, kind
            )
        return self._replays[key]


def _offloaded(constants: Constants, sym: Symbols, kind: LayerKind) -> OffloadedActivations:
    """Return what a layer of a kind sends to the host under the layout's own policy."""
    even = capacity.routed_rows(sym.model, sym.workload, sym.layout, 1.0)
    sent = offloaded_activations(
        activation_context(constants, sym),
        policy_of(sym.layout),
        kind,
        load=sym.R / even if even else 1.0,
    )
    return OffloadedActivations(bytes=float(sent.bytes[0]), modules=int(sent.modules[0]))


def stage_time(times: PartTimes, counts: Array) -> MicroBatchTime:
    """Return the time of one micro-batch through a stage that holds `counts` [parts]."""
    weights = zip(times.parts, counts.tolist(), strict=True)
    return add_times((time, weight) for time, weight in weights if weight)


def pipeline_s(sym: Symbols, times: PartTimes, counts: Array) -> tuple[float, float]:
    """Return the seconds of all micro-batches without transfers, and those that transfers add.

    `counts` [virtual stages, parts] is what the pipeline holds.
    """
    layout = sym.layout
    forward, backward = counts @ times.forward_s, counts @ times.backward_s
    if not layout.schedule.splits_backward:
        transfers = float(exposed_transfers(layout.pp, layout.vpp, sym.m))
        computing_s = build_pipeline(layout, sym.m).total_s(forward, backward)
        return computing_s, transfers * times.transfer_s
    weights = counts @ times.weight_grad_s
    seconds = [
        StageSeconds(forward=forward_s, input_backward=input_s, weight_backward=weight_s)
        for forward_s, input_s, weight_s in zip(
            forward.tolist(), (backward - weights).tolist(), weights.tolist(), strict=True
        )
    ]
    without_s, with_transfers_s = (
        simulate_pipeline_s(layout, seconds, micro_batches=sym.m, transfer_s=transfer_s)
        for transfer_s in (0.0, times.transfer_s)
    )
    return without_s, with_transfers_s - without_s


def count_owned_parameters(layout: Layout, parameters: RankParameters) -> tuple[int, int]:
    """Count the dense and the expert parameters that a rank updates: its shards of its own."""
    if not layout.zero:
        return parameters.dense, parameters.expert
    dense_shards = grid.group_size(layout, fsdp.state_group(layout, "dp_cp"))
    expert_shards = grid.group_size(layout, fsdp.state_group(layout, "edp"))
    return parameters.dense // dense_shards, parameters.expert // expert_shards


def step_tail(
    rates: DeviceRates, collectives: CollectiveModel, sym: Symbols, parameters: RankParameters
) -> StepTail:
    """Return gradient reduction, optimizer and weight gather of a rank with so many parameters.

    zero=2 and 3 reduce after every micro-batch, zero=3 gathers for each forward and backward; under
    hybrid sharding the ranks that hold replicas of a shard then sum its gradient, once a step.
    Replicas of experts send gradients to the experts' owners after backward, before the owners
    reduce, and receive weights at the end of the step: none of that, nor the owners' reduction and
    gather, is hidden.
    """
    layout = sym.layout
    reduce_s, gather_s, replica_sums_s = 0.0, 0.0, 0.0
    hideable_reduce_s, hideable_gather_s = 0.0, 0.0  # what other work may hide
    for group, numel, calls in (
        ("dp_cp", parameters.dense, parameters.dense_calls),
        ("edp", parameters.expert, parameters.expert_calls),
    ):
        if not numel:
            continue
        exchange = _state_exchange(collectives, sym, group, numel, calls)
        reduce_s += exchange.reduce_s
        gather_s += exchange.gather_s
        replica_sums_s += exchange.replica_sums_s
        if not layout.spare or group != "edp":
            hideable_reduce_s = reduce_s
            hideable_gather_s = gather_s
    if layout.spare and sym.model.moe is not None:
        span = collectives.span(layout, "ep")
        replicas = layout.spare * parameters.expert * layout.ep / sym.model.moe.experts
        reduce_s += collectives.seconds(Collective.ALL_TO_ALL, span, _FP32_BYTES * replicas)
        gather_s += collectives.seconds(Collective.ALL_TO_ALL, span, sym.c * replicas)
    gather_s += _momentum_exchange_s(collectives, sym, parameters)
    hidden_share = 1 - collectives.constants["overlapped_dp_share"] if sym.is_fused else 0.0
    hidden_reduce_s, hidden_gather_s = 0.0, 0.0
    if Overlap.GRAD in layout.overlap or layout.zero >= 2:
        hidden_reduce_s = hidden_share * hideable_reduce_s
    if Overlap.PARAM in layout.overlap or layout.zero == 3:
        hidden_gather_s = hidden_share * hideable_gather_s
    return StepTail(
        reduce_s=reduce_s - hidden_reduce_s + replica_sums_s,
        gather_s=gather_s - hidden_gather_s,
        optimizer_s=_optimizer_s(rates, sym, parameters),
        hidden_s=hidden_reduce_s + hidden_gather_s,
    )


def _momentum_exchange_s(
    collectives: CollectiveModel, sym: Symbols, parameters: RankParameters
) -> float:
    """Return the seconds in which Muon's momentum goes to whole matrices and comes back."""
    is_muon = sym.workload.optimizer.matrix_update is MatrixUpdate.MUON
    if not is_muon or not sym.layout.zero:
        return 0.0
    total_s = 0.0
    owned = count_owned_parameters(sym.layout, parameters)
    for group, numel in zip(("dp_cp", "edp"), owned, strict=True):
        if numel:
            span = collectives.span(sym.layout, fsdp.state_group(sym.layout, group))
            nbytes = MOMENTUM_BYTES * numel
            total_s += 2 * collectives.seconds(Collective.ALL_TO_ALL, span, nbytes)
    return total_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _StateExchange:
    """Seconds of a group's gradient reduction and weight gather, and of sums over replicas."""

    reduce_s: float
    gather_s: float
    replica_sums_s: float


def _state_exchange(
    collectives: CollectiveModel, sym: Symbols, group: str, numel: int, calls: int
) -> _StateExchange:
    """Return the exchanges of a step for the parameters that `group` reduces, in so many calls.

    Stacks on CUDA grow their buckets with the group, to a million elements a rank (Megatron-LM,
    param_and_grad_buffer.py), so that calls over many ranks stay few.
    """
    layout, workload = sym.layout, sym.workload
    passes = sym.m if layout.zero >= 2 else 1
    span = collectives.span(layout, fsdp.state_group(layout, group))
    if sym.is_fused:
        calls = min(calls, ceil(numel / (_BUCKET_ELEMENTS_A_RANK * span.size)))
    # Gradients are those of what trains, and so are updated weights, which ZeRO-1 gathers.
    trained = sym.trained_share
    call_bytes = workload.grad_dtype.nbytes * trained * numel / calls
    if not layout.zero:
        reduce_s = calls * collectives.seconds(Collective.ALL_REDUCE, span, call_bytes)
        return _StateExchange(reduce_s=reduce_s, gather_s=0.0, replica_sums_s=0.0)
    reduce_s = calls * collectives.seconds(Collective.REDUCE_SCATTER, span, call_bytes)
    gathered = numel if layout.zero == 3 else trained * numel
    gathered_bytes = _gathered_weight_bytes(collectives.constants, sym) * gathered
    weight_bytes = gathered_bytes / span.size / calls
    gather_s = calls * collectives.seconds(Collective.ALL_GATHER, span, weight_bytes)
    replica_sums_s = 0.0
    if layout.shard:
        replicas_span = collectives.span(layout, fsdp.fsdp_groups(layout, group).replica_group)
        replica_sums_s = calls * collectives.seconds(
            Collective.ALL_REDUCE, replicas_span, call_bytes / span.size
        )
    gathers = 2 * passes if layout.zero == 3 else 1
    return _StateExchange(
        reduce_s=passes * reduce_s, gather_s=gathers * gather_s, replica_sums_s=replica_sums_s
    )


def _gathered_weight_bytes(constants: Constants, sym: Symbols) -> int:
    """Return the bytes of a gathered weight: one where 8-bit weights are the stored ones.

    Weights with a scale a block are gathered in 16 bits and quantised after that.
    """
    stores_8bit = sym.dtype is Dtype.FP8 and not constants["fp8_weight_copies_bytes"]
    return 1 if stores_8bit else sym.c


def _optimizer_s(rates: DeviceRates, sym: Symbols, parameters: RankParameters) -> float:
    """Return the seconds of the optimizer, on the device and on the host, and of the step's end.

    Between two steps all ranks wait for the one whose host comes last.
    """
    c, layout = rates.constants, sym.layout
    trained = sym.trained_share
    owned_dense, owned_expert = count_owned_parameters(layout, parameters)
    owned = trained * (owned_dense + owned_expert)
    numel = trained * (parameters.dense + parameters.expert)
    ops = optimizer_ops(sym, numel=numel, owned_numel=owned)
    on_device_s = sum(rates.seconds(row) for row in ops)
    host_share = layout.offload_fraction if Offload.OPTIMIZER in layout.offload else 0.0
    on_host_s = owned * c["host_optimizer_s_per_parameter"]
    tail_s = c["step_tail_s"] + c["step_jitter_s"] * largest_of(layout.world_size)
    for row in muon_ops(sym, owned_dense=owned_dense, owned_expert=owned_expert):
        tail_s += rates.seconds(row)
    return tail_s + (1 - host_share) * on_device_s + host_share * on_host_s


def step_time(
    sym: Symbols,
    times: PartTimes,
    counts: Array,
    stages: Sequence[MicroBatchTime],
    last: StepTail,
) -> StepTime:
    """Return the time of a step: the pipeline of `stages`, then the tail `last`.

    `counts` [virtual stages, parts] is what the pipeline holds, `stages` the time of one
    micro-batch on each pipeline rank. The time in which the slowest rank does not work is booked to
    transfers and bubble.
    """
    totals = [stage.total_s for stage in stages]
    slowest = totals.index(max(totals))
    own = add_times([(stages[slowest], sym.m)])
    still_s, sending_s = pipeline_s(sym, times, counts)
    waiting_s = still_s - sym.m * totals[slowest] if sym.layout.pp > 1 else 0.0
    uncovered_s = max(0.0, last.hidden_s - still_s - sending_s)
    parts = {
        **own.exposed,
        TimePart.PP_COMM: sending_s,
        TimePart.BUBBLE: waiting_s,
        TimePart.DP_COMM: last.reduce_s + last.gather_s + uncovered_s,
        TimePart.OPTIMIZER: last.optimizer_s,
    }
    exposed = {part: seconds for part, seconds in parts.items() if seconds > 0}
    hidden = {**own.hidden, TimePart.DP_COMM: last.hidden_s - uncovered_s}
    return StepTime(
        step_s=sum(exposed.values()), slowest_rank=slowest, exposed=exposed, hidden=hidden
    )
