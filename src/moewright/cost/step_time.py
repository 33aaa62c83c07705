"""Seconds of a training step: layers and outside work on each pipeline rank, the pipeline, and the
tail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType

import numpy as np

from moewright.cost.activations import (
    OffloadedActivations,
    activation_context,
    offloaded_activations,
    policy_of,
)
from moewright.cost.collective_time import CollectiveModel
from moewright.cost.constants import Constants
from moewright.cost.head_ops import embedding_ops, head_ops, mtp_ops, optimizer_ops
from moewright.cost.layer_time import (
    DeviceTime,
    FloatOrArray,
    LayerCollectives,
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
)
from moewright.cost.op_time import DeviceRates, OpRow
from moewright.cost.ops import LayerOps, expert_ops, layer_ops
from moewright.cost.pipeline_time import build_pipeline, exposed_transfers, simulate_pipeline_s
from moewright.cost.stage_parts import Array, LayerKind, StageParts, layer_kind
from moewright.cost.symbols import Symbols
from moewright.rules import fsdp, grid, routing
from moewright.rules.simulate import StageSeconds
from moewright.spec.hardware import Collective
from moewright.spec.layout import Layout, Offload, Overlap
from moewright.spec.model import ModelSpec
from moewright.spec.plan import TimePart
from moewright.spec.workload import Workload

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
    """Seconds of what a step does once; `hidden_s` of the collectives run under other work."""

    reduce_s: float
    gather_s: float
    optimizer_s: float
    hidden_s: float

    @property
    def total_s(self) -> float:
        return self.reduce_s + self.gather_s + self.optimizer_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """`exposed` are the parts of the slowest pipeline rank, and sum to `step_s`."""

    step_s: float
    slowest_rank: int
    exposed: PartSeconds
    hidden: PartSeconds


@lru_cache(maxsize=16)
def layer_kinds(model: ModelSpec) -> Mapping[LayerKind, int]:
    """Every kind of layer the model has, with a layer of that kind."""
    mtp = [model.layers + 1] if model.mtp_layers else []
    return MappingProxyType(
        {layer_kind(model, layer): layer for layer in (*range(model.layers), *mtp)}
    )


def list_op_rows(size: Symbols) -> tuple[OpRow, ...]:
    """Every row that enters an estimate but the optimizer's."""
    work = model_ops(size)
    ops = [
        *work.layers.values(),
        work.embedding,
        work.head,
        *([work.mtp] if size.model.mtp_layers else []),
    ]
    return tuple(row for one in ops for row in (*one.forward, *one.backward))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOps:
    """Rows of everything that a stage can hold."""

    layers: Mapping[LayerKind, LayerOps]
    embedding: LayerOps
    head: LayerOps
    mtp: LayerOps


def model_ops(size: Symbols) -> ModelOps:
    return ModelOps(
        layers={
            kind: layer_ops(size, layer=layer, moe=kind[0])
            for kind, layer in layer_kinds(size.model).items()
        },
        embedding=embedding_ops(size),
        head=head_ops(size),
        mtp=mtp_ops(size),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedModelOps:
    """Rows of the layers with their seconds, and the times of what stands outside them."""

    layers: Mapping[LayerKind, PricedOps]
    embedding: MicroBatchTime
    head: MicroBatchTime
    mtp: MicroBatchTime


def price_model_ops(
    rates: DeviceRates, links: CollectiveModel, size: Symbols, work: ModelOps
) -> PricedModelOps:
    embedding = outside_layers_time(links, size, price_ops(rates, work.embedding), gathers=2)
    head = outside_layers_time(links, size, price_ops(rates, work.head), gathers=3, sums=_LOSS_SUMS)
    mtp = add_times(
        [
            (head, 1.0),
            (outside_layers_time(links, size, price_ops(rates, work.mtp), gathers=5), 1.0),
        ]
    )
    return PricedModelOps(
        layers={kind: price_ops(rates, ops) for kind, ops in work.layers.items()},
        embedding=embedding,
        head=head,
        mtp=add_times([(mtp, 1.0), (embedding, 1.0)]),
    )


def reprice_experts(rates: DeviceRates, known: PricedModelOps, size: Symbols) -> PricedModelOps:
    """The same for a layout of a fused stack that cuts its experts otherwise and takes an equal
    dispatcher: only what stands between dispatch and combine is priced anew.
    """
    if size.model.moe is None:
        return known
    experts = price_ops(rates, expert_ops(size))
    layers = {
        kind: replace_expert_rows(priced, experts) if kind[0] else priced
        for kind, priced in known.layers.items()
    }
    return replace(known, layers=layers)


class Pricer:
    """Prices the pieces of layouts that differ only in pipeline, recompute, offload, overlap and
    graphs.

    What a choice does not touch is worked out once: rows for all, collectives and choices for each
    set of overlaps.
    """

    __slots__ = ("_added", "_beside", "_device", "_links", "_priced", "size")

    def __init__(
        self,
        links: CollectiveModel,
        size: Symbols,
        priced: PricedModelOps,
        beside: Pricer | None = None,
    ) -> None:
        self.size, self._links, self._priced, self._beside = size, links, priced, beside
        self._device: dict[tuple[object, ...], tuple[LayerCollectives, DeviceTime]] = {}
        self._added: dict[tuple[object, ...], ReplayCost] = {}

    def with_experts(self, rates: DeviceRates, size: Symbols) -> Pricer:
        """Of layouts of a fused stack that cut their experts otherwise and take an equal
        dispatcher: only what experts change is priced anew.
        """
        return Pricer(self._links, size, reprice_experts(rates, self._priced, size), beside=self)

    def part_times(self, layout: Layout, parts: StageParts) -> PartTimes:
        """Price the parts of a layout with the degrees and micro-batch of the priced one."""
        layers, size = {}, replace(self.size, layout=layout)
        for kind, priced in self._priced.layers.items():
            _, device = self._moved(layout, kind)
            more = self._more(layout, kind, layout)
            sent = _offloaded(self._links.constants, size, kind)
            layers[kind] = layer_time(
                self._links, size, layout, priced, device, more, sent, moe=kind[0]
            )
        priced_ops = self._priced
        times = [
            add_times([(layers[part.kind], 1.0), (priced_ops.mtp, float(part.is_mtp))])
            for part in parts.layers
        ]
        nothing = add_times([])  # what keeps an MTP depth's input takes no time
        return PartTimes(
            parts=(*times, priced_ops.embedding, priced_ops.head, nothing),
            transfer_s=stage_transfer_s(self._links, self.size, layout),
        )

    def layer_totals_s(
        self,
        layout: Layout,
        choices: Sequence[ReplayPolicy],
        taken: np.ndarray,
        sent: Mapping[LayerKind, OffloadedActivations],
        *,
        synced: bool,
    ) -> dict[LayerKind, np.ndarray]:
        """[taken] seconds of a layer of each kind, of the layout with one of the choices instead of
        its own, given by its place; `sent` [taken] to the host, which waits for every transfer
        between stages if `synced`.
        """
        place = np.zeros(len(choices), dtype=int)
        place[taken] = 1
        used = np.flatnonzero(place).tolist()
        place[used] = np.arange(len(used))
        found = {}
        for kind in self._priced.layers:
            each = ReplayCost.stack([self._more(layout, kind, choices[choice]) for choice in used])
            more = ReplayCost(
                **{name: getattr(each, name)[place[taken]] for name in ReplayCost.__slots__}
            )
            found[kind] = np.asarray(self._total_s(layout, kind, more, sent[kind], synced))
        return found

    def layer_total_s(
        self,
        layout: Layout,
        choices: ReplayPolicy,
        sent: Mapping[LayerKind, OffloadedActivations],
        *,
        synced: bool,
    ) -> dict[LayerKind, float]:
        """The same of one choice, as numbers."""
        return {
            kind: float(
                self._total_s(layout, kind, self._more(layout, kind, choices), sent[kind], synced)
            )
            for kind in self._priced.layers
        }

    def _total_s(
        self,
        layout: Layout,
        kind: LayerKind,
        more: ReplayCost,
        sent: OffloadedActivations,
        synced: bool,
    ) -> FloatOrArray:
        _, device = self._moved(layout, kind)
        return pass_times(
            self._links, self.size, layout, device, more, sent, moe=kind[0], synced=synced
        ).total_s

    def part_seconds(
        self, parts: StageParts, layers: Mapping[LayerKind, FloatOrArray]
    ) -> list[FloatOrArray]:
        """Return the seconds of every part, given those of the layers of each kind."""
        priced = self._priced
        times = [
            layers[part.kind] + (priced.mtp.total_s if part.is_mtp else 0.0)
            for part in parts.layers
        ]
        return [*times, priced.embedding.total_s, priced.head.total_s, 0.0]

    def _moved(self, layout: Layout, kind: LayerKind) -> tuple[LayerCollectives, DeviceTime]:
        if self._beside and not kind[0]:
            return self._beside._moved(layout, kind)
        key = kind, layout.overlap, layout.dispatcher, layout.cp_comm
        if key not in self._device:
            moved = price_collectives(self._links, replace(self.size, layout=layout), moe=kind[0])
            self._device[key] = (
                moved,
                device_time(self._links, layout, self._priced.layers[kind], moved),
            )
        return self._device[key]

    def _more(self, layout: Layout, kind: LayerKind, chosen: ReplayPolicy) -> ReplayCost:
        if self._beside and not kind[0]:
            return self._beside._more(layout, kind, chosen)
        key = (
            kind,
            layout.overlap,
            layout.dispatcher,
            layout.cp_comm,
            chosen.recompute,
            chosen.graphs,
            layout.pp * layout.vpp if layout.recompute_block else 0,
        )
        if key not in self._added:
            moved, _ = self._moved(layout, kind)
            priced = self._priced.layers[kind]
            self._added[key] = replay_cost(
                self._links, self.size, layout, chosen, priced, moved, moe=kind[0]
            )
        return self._added[key]


def _offloaded(constants: Constants, size: Symbols, kind: LayerKind) -> OffloadedActivations:
    """Return what a layer of a kind sends to the host under the layout's own policy."""
    even = routing.routed_rows(size.model, size.workload, size.layout, 1.0)
    sent = offloaded_activations(
        activation_context(constants, size),
        policy_of(size.layout),
        is_moe=kind.is_moe,
        load=size.R / even if even else 1.0,
    )
    return OffloadedActivations(bytes=float(sent.bytes[0]), modules=int(sent.modules[0]))


def stage_time(times: PartTimes, counts: Array) -> MicroBatchTime:
    """Return the time of one micro-batch through the parts that `counts` [parts] says."""
    weights = zip(times.parts, counts.tolist(), strict=True)
    return add_times((time, weight) for time, weight in weights if weight)


def pipeline_s(size: Symbols, times: PartTimes, counts: Array) -> tuple[float, float]:
    """Return the seconds of all micro-batches, and how much longer they take for transfers.

    `counts` [virtual stages, parts] is what the pipeline holds.
    """
    layout = size.layout
    forward, backward = counts @ times.forward_s, counts @ times.backward_s
    if not layout.schedule.splits_backward:
        shown = float(exposed_transfers(layout.pp, layout.vpp, size.m))
        return build_pipeline(layout, size.m).total_s(forward, backward), shown * times.transfer_s
    weights = counts @ times.weight_grad_s
    seconds = [
        StageSeconds(forward=forward_s, input_backward=input_s, weight_backward=weight_s)
        for forward_s, input_s, weight_s in zip(
            forward.tolist(), (backward - weights).tolist(), weights.tolist(), strict=True
        )
    ]
    still, sending = (
        simulate_pipeline_s(layout, seconds, micro_batches=size.m, transfer_s=transfer_s)
        for transfer_s in (0.0, times.transfer_s)
    )
    return still, sending - still


def count_owned_parameters(layout: Layout, held: RankParameters) -> int:
    """Parameters that a rank updates: its shards of what it holds."""
    if not layout.zero:
        return held.dense + held.expert
    dense, expert = (
        grid.group_size(layout, fsdp.state_group(layout, group)) for group in ("dp_cp", "edp")
    )
    return held.dense // dense + held.expert // expert


def step_tail(
    rates: DeviceRates,
    links: CollectiveModel,
    workload: Workload,
    size: Symbols,
    layout: Layout,
    held: RankParameters,
) -> StepTail:
    """Gradient reduction, optimizer and weight gather of a rank that holds so many parameters.

    zero=3 reduces after every micro-batch, and gathers for each forward and each backward; under
    hybrid sharding copies of a part then sum its gradient, once a step. Replicas of experts send
    gradients home after backward, before their owners reduce, and take weights at the end of the
    step: nothing of that is hidden.
    """
    c = links.constants
    often = workload.global_batch // (layout.mbs * layout.dp) if layout.zero == 3 else 1
    reduce_s, copies_s, gather_s = 0.0, 0.0, 0.0
    beside_s = (0.0, 0.0)  # of both, what may run beside computation
    for group, numel, calls in (
        ("dp_cp", held.dense, held.dense_calls),
        ("edp", held.expert, held.expert_calls),
    ):
        if not numel:
            continue
        where = links.span(layout, fsdp.state_group(layout, group))
        shards = where.size if layout.zero else 1
        op = Collective.REDUCE_SCATTER if layout.zero else Collective.ALL_REDUCE
        nbytes = workload.grad_dtype.nbytes * numel / calls
        reduce_s += often * calls * links.seconds(op, where, nbytes)
        if layout.shard:
            across = links.span(layout, fsdp.fsdp_groups(layout, group).replica_group)
            copies_s += calls * links.seconds(Collective.ALL_REDUCE, across, nbytes / shards)
        if layout.zero:
            gather = calls * links.seconds(
                Collective.ALL_GATHER, where, size.c * numel / shards / calls
            )
            gather_s += (2 * often if layout.zero == 3 else 1) * gather
        if not layout.spare or group != "edp":
            beside_s = reduce_s, gather_s
    if layout.spare and size.model.moe is not None:
        where = links.span(layout, "ep")
        replicas = layout.spare * held.expert * layout.ep / size.model.moe.experts
        reduce_s += links.seconds(Collective.ALL_TO_ALL, where, 4 * replicas)
        gather_s += links.seconds(Collective.ALL_TO_ALL, where, size.c * replicas)
    hidden_share = 1 - c["overlapped_dp_share"] if size.is_fused else 0.0
    hidden_reduce = (
        hidden_share * beside_s[0] if Overlap.GRAD in layout.overlap or layout.zero == 3 else 0.0
    )
    hidden_gather = (
        hidden_share * beside_s[1] if Overlap.PARAM in layout.overlap or layout.zero == 3 else 0.0
    )
    owned = count_owned_parameters(layout, held)
    on_device = sum(
        rates.seconds(row)
        for row in optimizer_ops(size, numel=held.dense + held.expert, owned_numel=owned)
    )
    on_host = layout.offload_fraction if Offload.OPTIMIZER in layout.offload else 0.0
    return StepTail(
        reduce_s=reduce_s - hidden_reduce + copies_s,
        gather_s=gather_s - hidden_gather,
        optimizer_s=c["step_tail_s"]
        + (1 - on_host) * on_device
        + on_host * owned * c["host_optimizer_s_per_parameter"],
        hidden_s=hidden_reduce + hidden_gather,
    )


def step_time(
    size: Symbols,
    times: PartTimes,
    counts: Array,
    stages: Sequence[MicroBatchTime],
    last: StepTail,
) -> StepTime:
    """Return the time of the pipeline of `stages`, then `last`.

    `counts` [virtual stages, parts] is what the pipeline holds, `stages` the time of each pipeline
    rank. What the slowest rank does not work is transfers and bubble.
    """
    totals = [stage.total_s for stage in stages]
    slowest = totals.index(max(totals))
    own = add_times([(stages[slowest], size.m)])
    still_s, sending_s = pipeline_s(size, times, counts)
    waiting_s = still_s - size.m * totals[slowest] if size.layout.pp > 1 else 0.0
    parts = {
        **own.exposed,
        TimePart.PP_COMM: sending_s,
        TimePart.BUBBLE: waiting_s,
        TimePart.DP_COMM: last.reduce_s + last.gather_s,
        TimePart.OPTIMIZER: last.optimizer_s,
    }
    exposed = {part: seconds for part, seconds in parts.items() if seconds > 0}
    hidden = {**own.hidden, TimePart.DP_COMM: last.hidden_s}
    return StepTime(
        step_s=sum(exposed.values()), slowest_rank=slowest, exposed=exposed, hidden=hidden
    )
