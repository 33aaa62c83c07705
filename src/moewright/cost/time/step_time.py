"""Seconds of a training step: the parts of every pipeline rank, and the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.memory.activations import (
    NOTHING_OFFLOADED,
    OffloadedActivations,
    activation_context,
    offloaded_activations,
    policy_of,
)
from moewright.cost.stage_parts import Array, LayerKind, StageParts, layer_kinds
from moewright.cost.symbols import Symbols
from moewright.cost.time.collective_time import CollectiveModel
from moewright.cost.time.gemm_rows import LayerOps
from moewright.cost.time.head_ops import (
    add_eager_loss,
    embedding_ops,
    head_ops,
    mtp_ops,
)
from moewright.cost.time.host_time import layer_host_s
from moewright.cost.time.layer_time import (
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
from moewright.cost.time.op_time import DeviceRates, OpRow
from moewright.cost.time.ops import expert_ops, layer_ops
from moewright.cost.time.pipeline_time import build_pipeline, exposed_transfers, simulate_pipeline_s
from moewright.cost.time.step_tail import StepTail
from moewright.cost.time.torch_sums import add_bias_sums, add_token_sums
from moewright.rules.expert_load import expected_repeats
from moewright.rules.timetable.simulate import StageSeconds
from moewright.spec.layout import Layout, Overlap
from moewright.spec.plan import TimePart
from moewright.spec.record import copy_with

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
            kind: layer_ops(_layer_symbols(sym, kind), layer=layer, moe=kind.is_moe)
            for kind, layer in layer_kinds(sym.model, sym.workload.trainer).items()
        },
        embedding=embedding_ops(sym),
        head=head_ops(sym),
        mtp=mtp_ops(sym),
    )


def _layer_symbols(sym: Symbols, kind: LayerKind) -> Symbols:
    """Return the symbols of a layer: one that stays in 16 bits has their rates."""
    return replace(sym, dtype=sym.wide_dtype) if kind.is_wide else sym


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
    # An embedding scatters its output and gathers that output's gradient; a head gathers its input,
    # again for the weight's gradient, and scatters the input's.
    embedding = outside_layers_time(collectives, sym, price_ops(rates, ops.embedding), gathers=2)
    head_priced = price_ops(rates, add_eager_loss(rates.constants, sym, ops.head))
    head = outside_layers_time(collectives, sym, head_priced, gathers=3, sums=_LOSS_SUMS)
    gathers = 5 if sym.model.joins_mtp_inputs else 0
    projection = outside_layers_time(collectives, sym, price_ops(rates, ops.mtp), gathers=gathers)
    layers = {kind: price_ops(rates, layer) for kind, layer in ops.layers.items()}
    for kind, priced in layers.items():
        if kind.is_moe:
            with_sums = add_token_sums(rates.constants, sym, priced)
            layers[kind] = add_bias_sums(rates.constants, sym, with_sums)
    return PricedModelOps(
        layers=layers,
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
    experts = {
        is_wide: add_bias_sums(
            rates.constants, sym, price_ops(rates, expert_ops(replace(sym, dtype=dtype)))
        )
        for is_wide, dtype in ((False, sym.dtype), (True, sym.wide_dtype))
        if not is_wide or any(kind.is_wide for kind in priced.layers)
    }
    layers = {
        kind: replace_expert_rows(rows, experts[kind.is_wide]) if kind.is_moe else rows
        for kind, rows in priced.layers.items()
    }
    return replace(priced, layers=layers)


class _Outside(Enum):
    """What of a stage is priced outside its layers."""

    MTP = auto()
    EMBEDDING = auto()
    HEAD = auto()


_Source = tuple[LayerKind, bool] | _Outside  # a kind of layer and whether it offloads, or another


def _part_sources(parts: StageParts) -> list[list[_Source]]:
    """Return what each part of a model is made up of, in the order of StageParts."""
    layers: list[list[_Source]] = [
        [(part.kind, part.offloads), *([_Outside.MTP] if part.is_mtp else [])]
        for part in parts.layers
    ]
    mtp_input: list[_Source] = []  # what keeps an MTP depth's input takes no time
    return [*layers, [_Outside.EMBEDDING], [_Outside.HEAD], mtp_input]


class Pricer:
    """Prices of parts for layouts that differ in pipeline, recompute, offload, overlap or graphs.

    Rows are priced once for all of these layouts, collectives and policies once for each set of
    overlaps. Where steps are expected to run twice, each micro-batch is as much longer on average.
    """

    __slots__ = (
        "_collectives",
        "_device",
        "_exchanges",
        "_passes",
        "_priced",
        "_replays",
        "_shared",
        "sym",
    )

    def __init__(
        self,
        collectives: CollectiveModel,
        sym: Symbols,
        priced: PricedModelOps,
        shared: Pricer | None = None,
    ) -> None:
        self.sym, self._collectives, self._priced = sym, collectives, priced
        self._shared = shared  # prices the layers without experts, which are the same
        self._passes = 1.0 + expected_repeats(sym.job)  # through each micro-batch
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
        for kind, offloads in {(part.kind, part.offloads) for part in parts.layers}:
            rows = self._priced.layers[kind]
            _, device = self._device_time(layout, kind)
            replay = self._replay_cost(layout, kind, layout)
            offloaded = NOTHING_OFFLOADED
            if offloads:
                offloaded = _offloaded(self._collectives.constants, sym, kind)
            cost = LayerCost(device=device, replay=replay, offloaded=offloaded, is_moe=kind.is_moe)
            layers[kind, offloads] = layer_time(self._collectives, sym, layout, rows, cost)
        priced = self._priced
        times = [
            add_times([(layers[part.kind, part.offloads], 1.0), (priced.mtp, float(part.is_mtp))])
            for part in parts.layers
        ]
        nothing = add_times([])  # what keeps an MTP depth's input takes no time
        times += [priced.embedding, priced.head, nothing]
        return PartTimes(
            parts=tuple(add_times([(time, self._passes)]) for time in times),
            transfer_s=self._passes * stage_transfer_s(self._collectives, self.sym, layout),
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
        # Thousands of policies choose among a few replays: each replay is priced once.
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
        total_s = pass_times(self._collectives, self.sym, layout, cost, synced=synced).total_s
        return self._passes * total_s

    def part_seconds(
        self,
        parts: StageParts,
        layers: Mapping[LayerKind, FloatOrArray],
        staying: Mapping[LayerKind, FloatOrArray],
    ) -> list[FloatOrArray]:
        """Return the seconds of every part, given those of the layers of each kind.

        `staying` are those of layers that do not offload where others do.
        """
        priced = self._priced
        mtp_s, embedding_s, head_s = (
            self._passes * time.total_s for time in (priced.mtp, priced.embedding, priced.head)
        )
        times = [
            (layers if part.offloads else staying)[part.kind] + part.is_mtp * mtp_s
            for part in parts.layers
        ]
        return [*times, embedding_s, head_s, 0.0]

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
            alone = copy_with(layout, overlap=())
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
            # The share of layers that a block takes depends on the chunks there are.
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
    sent = offloaded_activations(
        activation_context(constants, sym),
        policy_of(sym.layout),
        kind,
        load=sym.peak_load,
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


def step_time(
    sym: Symbols,
    times: PartTimes,
    counts: Array,
    stages: Sequence[MicroBatchTime],
    tails: Sequence[StepTail],
) -> StepTime:
    """Return the time of a step: the pipeline of `stages`, then the slowest rank's tail.

    `counts` [virtual stages, parts] is what the pipeline holds, `stages` the time of one
    micro-batch on each pipeline rank. The time in which the slowest rank does not work is booked to
    transfers and bubble.
    """
    totals = [stage.total_s for stage in stages]
    slowest = totals.index(max(totals))
    own = add_times([(stages[slowest], sym.m)])
    still_s, sending_s = pipeline_s(sym, times, counts)
    waiting_s = 0.0
    if sym.layout.pp > 1:
        waiting_s = still_s - sym.m * totals[slowest]
    last = max(tails, key=lambda tail: tail.step_s(still_s + sending_s))
    # Collectives that take longer than what they run beside show.
    uncovered_s = last.uncovered_s(still_s + sending_s)
    parts = dict(own.exposed)
    for part, seconds in (
        (TimePart.PP_COMM, sending_s),
        (TimePart.BUBBLE, waiting_s),
        *last.by_part().items(),
        (TimePart.DP_COMM, uncovered_s),
    ):
        parts[part] = parts.get(part, 0.0) + seconds
    exposed = {part: seconds for part, seconds in parts.items() if seconds > 0}
    hidden = {**own.hidden, TimePart.DP_COMM: last.hidden_s - uncovered_s}
    return StepTime(
        step_s=sum(exposed.values()), slowest_rank=slowest, exposed=exposed, hidden=hidden
    )
