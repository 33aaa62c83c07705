"""Seconds of one layer, or of what stands outside the layers, for one micro-batch: rows,
collectives and host time.

time_model_findings section 2. Device and host overlap in part: time = (device^p + host^p)^(1/p),
for forward, backward and a replayed block each; p = 1 adds them. Waits for the split sizes of an
all-to-all are always added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moewright.cost.activations import OffloadedActivations
from moewright.cost.collective_time import CollectiveModel, GroupSpan
from moewright.cost.ep_overlap import EXPERT_ROW_NAMES, covered_exchange, weight_gradient_s
from moewright.cost.op_time import DeviceRates, OpRow
from moewright.cost.ops import LayerOps
from moewright.cost.symbols import Symbols
from moewright.rules import routing
from moewright.spec.hardware import Collective
from moewright.spec.layout import CpComm, CudaGraphScope, DispatcherKind, Layout, Overlap, Recompute
from moewright.spec.model import ModelSpec, QkNorm
from moewright.spec.plan import TimePart

PartSeconds = Mapping[TimePart, float]
TimedRows = tuple[tuple[OpRow, float], ...]
FloatOrArray = Any  # floats, or arrays of one shape

_NO_SYNC = (DispatcherKind.DEEPEP, DispatcherKind.HYBRIDEP)
_INT64_BYTES = 8
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchTime:
    """Seconds of one micro-batch, forward and backward: exposed by part, and hidden under other
    work.

    `forward_s` of the exposed seconds belong to forward, `weight_s` to the weight gradients.
    """

    exposed: PartSeconds
    hidden: PartSeconds
    forward_s: float
    weight_grad_s: float

    @property
    def total_s(self) -> float:
        return sum(self.exposed.values())


def add_times(many: Iterable[tuple[MicroBatchTime, float]]) -> MicroBatchTime:
    """The weighted sum."""
    exposed: dict[TimePart, float] = {}
    hidden: dict[TimePart, float] = {}
    forward_s = weight_s = 0.0
    for times, weight in many:
        forward_s += weight * times.forward_s
        weight_s += weight * times.weight_grad_s
        for sums, parts in ((exposed, times.exposed), (hidden, times.hidden)):
            for part, seconds in parts.items():
                sums[part] = sums.get(part, 0.0) + weight * seconds
    return MicroBatchTime(
        exposed=exposed, hidden=hidden, forward_s=forward_s, weight_grad_s=weight_s
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedOps:
    """Rows of a layer with their seconds."""

    forward: TimedRows
    backward: TimedRows


def price_ops(rates: DeviceRates, ops: LayerOps) -> PricedOps:
    return PricedOps(
        forward=tuple((row, rates.seconds(row)) for row in ops.forward),
        backward=tuple((row, rates.seconds(row)) for row in ops.backward),
    )


def replace_expert_rows(priced: PricedOps, experts: PricedOps) -> PricedOps:
    """With the rows between dispatch and combine taken from `experts`, one for one."""

    def mixed(rows: TimedRows, others: TimedRows) -> TimedRows:
        other = iter(others)
        return tuple(
            next(other) if row.name.startswith(EXPERT_ROW_NAMES) else (row, seconds)
            for row, seconds in rows
        )

    return PricedOps(
        forward=mixed(priced.forward, experts.forward),
        backward=mixed(priced.backward, experts.backward),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCollectives:
    """Collectives of one layer and micro-batch, forward; `tp` one gather or scatter, `ep` dispatch
    and combine; `tp_means` those of norms over all heads, where ranks hold a part each.
    """

    ep_forward_s: float
    ep_backward_s: float
    tp_s: float
    tp_blocks: int
    qk_norm_s: float
    cp_s: float


def price_collectives(links: CollectiveModel, size: Symbols, *, moe: bool) -> LayerCollectives:
    model, layout = size.model, size.layout
    shared = model.moe is not None and model.moe.shared_ffn_size > 0
    whole = size.c * size.T * model.hidden_size
    tp = tp_exchange_s(links, layout, whole)
    forward, backward = _dispatch(links, size) if moe else (0.0, 0.0)
    return LayerCollectives(
        ep_forward_s=forward,
        ep_backward_s=backward,
        tp_s=tp if layout.sp else 2 * tp,
        tp_blocks=(1 + shared if moe else 2) if layout.tp > 1 else 0,
        qk_norm_s=2 * tp_all_reduce_s(links, size)
        if model.attention.qk_norm is QkNorm.FULL
        else 0.0,
        cp_s=_context(links, size),
    )


def tp_exchange_s(links: CollectiveModel, layout: Layout, whole_bytes: float) -> float:
    """One gather or scatter of a tensor-parallel group, as far as no GEMM hides it."""
    c = links.constants
    if layout.tp == 1:
        return 0.0
    where = links.span(layout, "tp")
    seconds = links.seconds(
        Collective.REDUCE_SCATTER, where, whole_bytes, efficiency=c["tp_efficiency"]
    )
    shown = 1 - c["tp_overlap_hidden"] if Overlap.TP in layout.overlap else 1.0
    return c["tp_time_scale"] * shown * seconds


def tp_all_reduce_s(links: CollectiveModel, size: Symbols) -> float:
    """One all-reduce of an fp32 number a token over a tensor-parallel group."""
    return links.seconds(Collective.ALL_REDUCE, links.span(size.layout, "tp"), _FP32_BYTES * size.T)


def stage_transfer_s(links: CollectiveModel, size: Symbols, layout: Layout) -> float:
    """One activation to the next pipeline stage."""
    if layout.pp == 1:
        return 0.0
    return links.seconds(
        Collective.P2P, links.span(layout, "pp"), size.c * size.t * size.model.hidden_size
    )


def _dispatch(links: CollectiveModel, size: Symbols) -> tuple[float, float]:
    """Dispatch and combine, forward and backward, with the small exchanges of counts and
    probabilities."""
    model, layout = size.model, size.layout
    if model.moe is None or layout.ep * layout.etp == 1:
        return 0.0, 0.0
    k, even = model.moe.router.top_k, size.t * model.moe.router.top_k
    load = size.R / (even * layout.etp) if even else 1.0
    one = links.dispatch_s(
        layout, tokens=size.t, top_k=k, row_bytes=size.c * model.expert_width, load=load
    )
    forward = backward = 2 * one
    if layout.dispatcher is DispatcherKind.ALL_TO_ALL:
        where = links.span(layout, "ep")
        probs = links.seconds(Collective.ALL_TO_ALL, where, _FP32_BYTES * even)
        forward += (
            links.seconds(Collective.ALL_TO_ALL, where, _INT64_BYTES * model.moe.experts) + probs
        )
        backward += probs
    if layout.etp > 1:
        gathered = (
            routing.etp_gathered_rows(size.workload, layout, size.R) * size.c * model.expert_width
        )
        etp = links.seconds(Collective.REDUCE_SCATTER, links.span(layout, "etp"), gathered)
        forward, backward = forward + 2 * etp, backward + 2 * etp
    return forward, backward


def _context(links: CollectiveModel, size: Symbols) -> float:
    """Keys and values of the other ranks, forward: a ring of cp - 1 steps, or one gather; a2a moves
    q and the output too, but only its own part of each; a2a+p2p does so inside a domain, and rings
    over the domains."""
    spec, layout = size.model.attention, size.layout
    if layout.cp == 1:
        return 0.0
    where = links.span(layout, "cp")
    kv = size.c * size.T * 2 * spec.kv_width / layout.tp
    if layout.cp_comm is CpComm.ALL_GATHER:
        return links.seconds(Collective.ALL_GATHER, where, kv)
    if layout.cp_comm is CpComm.P2P:
        return (layout.cp - 1) * links.seconds(Collective.P2P, where, kv)
    moved = kv + size.c * size.T * (spec.q_width + spec.out_width) / layout.tp
    if layout.cp_comm is CpComm.A2A_P2P and where.domains > 1:
        near = GroupSpan(
            size=where.ranks_per_domain, ranks_per_domain=where.ranks_per_domain, domains=1
        )
        far = GroupSpan(size=where.domains, ranks_per_domain=1, domains=where.domains)
        ring = (where.domains - 1) * links.seconds(Collective.P2P, far, kv)
        return links.seconds(Collective.ALL_TO_ALL, near, moved) + ring
    return links.seconds(Collective.ALL_TO_ALL, where, moved)


def host_s(
    links: CollectiveModel,
    layout: Layout,
    graphs: Sequence[CudaGraphScope],
    model: ModelSpec,
    *,
    moe: bool,
) -> float:
    """Host time of one layer and micro-batch, forward and backward, that does not depend on the
    tokens."""
    c = links.constants
    if CudaGraphScope.FULL in graphs:
        return c["host_s_full_graph"]
    seconds = c["host_s_per_layer_microbatch"] * float(c["host_per_year"] ** c["stack_age_years"])
    if graphs:
        seconds *= 1 - _graphed(links, graphs)
    if Overlap.GRAD in layout.overlap or Overlap.PARAM in layout.overlap:
        seconds *= c["dp_overlap_host"]
    if layout.tp > 1:
        seconds *= c["tp_host"]
    if not moe or model.moe is None:
        return seconds * c["host_dense_layer_share"]
    seconds += c["host_s_per_local_expert"] * model.moe.experts / layout.ep
    return seconds * (c["ep_overlap_host"] if Overlap.EP in layout.overlap else 1.0)


def _graphed(links: CollectiveModel, graphs: Sequence[CudaGraphScope]) -> float:
    """Share of a layer's host time that its graphs take over."""
    c = links.constants
    attention = c["host_graphed_attention"] if CudaGraphScope.ATTN in graphs else 0.0
    return attention + (c["host_graphed_router"] if CudaGraphScope.MOE_ROUTER in graphs else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTime:
    """Seconds of one layer and micro-batch on the device, by part, before recompute and host work
    are added."""

    exposed: PartSeconds
    hidden: PartSeconds
    forward_s: float
    backward_s: float


def device_time(
    links: CollectiveModel, layout: Layout, priced: PricedOps, moved: LayerCollectives
) -> DeviceTime:
    """Rows and collectives of both directions, what the layout overlaps taken off."""
    exposed: dict[TimePart, float] = {}
    hidden: dict[TimePart, float] = {}

    def device_s(rows: TimedRows, ep: float, hidden_ep: float, tp: float, cp: float) -> float:
        """Books rows and collectives of one direction."""
        core = sum(seconds for row, seconds in rows if row.part is TimePart.ATTENTION)
        hidden_cp = min(cp, core) if layout.cp_comm is CpComm.P2P else 0.0
        _put(hidden, TimePart.EP_COMM, hidden_ep)
        _put(hidden, TimePart.CP_COMM, hidden_cp)
        _put(exposed, TimePart.EP_COMM, ep - hidden_ep)
        _put(exposed, TimePart.TP_COMM, tp)
        _put(exposed, TimePart.CP_COMM, cp - hidden_cp)
        return _sum_parts(exposed, rows) + ep - hidden_ep + tp + cp - hidden_cp

    tp = moved.tp_blocks * moved.tp_s
    beside = covered_exchange(
        layout, priced.forward, priced.backward, moved.ep_forward_s, moved.ep_backward_s
    )
    share = links.constants["ep_overlap_hidden"] if Overlap.EP in layout.overlap else 1.0
    hidden_s = (
        min(moved.ep_forward_s, share * beside.forward_s),
        min(moved.ep_backward_s, share * beside.backward_s),
    )
    forward_s = device_s(
        priced.forward, moved.ep_forward_s, hidden_s[0], 2 * tp + moved.qk_norm_s, moved.cp_s
    )
    backward_s = device_s(
        priced.backward, moved.ep_backward_s, hidden_s[1], 3 * tp + moved.qk_norm_s, 2 * moved.cp_s
    )
    return DeviceTime(exposed=exposed, hidden=hidden, forward_s=forward_s, backward_s=backward_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayCost:
    """What recompute and graphs add to the device's own time of a layer and micro-batch: floats of
    one choice, or arrays over many.

    A replayed block of `block_s` stands alone, takes `block_host` of the forward's host time, and
    is of `block_share` of the layers; `light_s` of `light_calls` replayed kernels join the
    backward.
    """

    host_s: FloatOrArray
    block_s: FloatOrArray
    block_host_share: FloatOrArray
    block_layer_share: FloatOrArray
    kernel_s: FloatOrArray
    kernel_groups: FloatOrArray

    @classmethod
    def stack(cls, many: Sequence[ReplayCost]) -> ReplayCost:
        """Choices side by side."""
        return cls(
            **{name: np.array([getattr(one, name) for one in many]) for name in cls.__slots__}
        )


class ReplayPolicy(Protocol):
    """What a micro-batch of a layer replays, and its graphs: a layout, or a part of one."""

    @property
    def recompute(self) -> tuple[Recompute, ...]: ...
    @property
    def graphs(self) -> tuple[CudaGraphScope, ...]: ...


def replay_cost(
    links: CollectiveModel,
    size: Symbols,
    layout: Layout,
    choices: ReplayPolicy,
    priced: PricedOps,
    moved: LayerCollectives,
    *,
    moe: bool,
) -> ReplayCost:
    """Of these choices in a layout. Full recompute is one forward more, with its collectives and
    host time, of the share of the layers that it takes; `moe` its block with 0.6 of the host time.
    """
    chosen, small = choices.recompute, _small(choices.recompute)
    block_s = light_s = 0.0
    if Recompute.FULL in chosen:
        block_s = sum(seconds for _, seconds in priced.forward)
        block_s += (
            moved.ep_forward_s + 2 * moved.tp_blocks * moved.tp_s + moved.qk_norm_s + moved.cp_s
        )
    elif chosen:
        for row, seconds in priced.forward:
            if Recompute.MOE in chosen and Recompute.MOE in row.recomputed_by:
                block_s += seconds
            elif not frozenset(small).isdisjoint(row.recomputed_by):
                light_s += seconds
        block_s += moved.ep_forward_s if Recompute.MOE in chosen else 0.0
    return ReplayCost(
        host_s=host_s(links, layout, choices.graphs, size.model, moe=moe),
        block_s=block_s,
        block_host_share=1.0 if Recompute.FULL in chosen else 0.6,
        block_layer_share=_replayed_share(layout, size.model) if Recompute.FULL in chosen else 1.0,
        kernel_s=light_s,
        kernel_groups=len(small),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTimes:
    """Seconds of forward and backward with the host's, of replayed blocks, and of copies that
    either waits for; `travel_s` those of one direction.
    """

    forward_s: FloatOrArray
    backward_s: FloatOrArray
    block_s: FloatOrArray
    forward_wait_s: FloatOrArray
    backward_wait_s: FloatOrArray

    copy_s: FloatOrArray

    @property
    def total_s(self) -> FloatOrArray:
        return (
            self.forward_s
            + self.backward_s
            + self.block_s
            + self.forward_wait_s
            + self.backward_wait_s
        )


def pass_times(
    links: CollectiveModel,
    size: Symbols,
    layout: Layout,
    device: DeviceTime,
    more: ReplayCost,
    away: OffloadedActivations,
    *,
    moe: bool,
    synced: bool,
) -> PassTimes:
    """Device and host side by side, and copies beside both: what takes longer than a pass shows. An
    offloaded module costs the host as much as a recomputed one, in forward and in backward.
    `synced`: the host waits for transfers.
    """
    c = links.constants
    sync = 0.0
    if moe and layout.ep > 1:
        sync = c["sync_s_fused" if layout.dispatcher in _NO_SYNC else "sync_s_alltoall"]
    p, third, call_s = (
        _exponent(links, size, synced=synced),
        more.host_s / 3,
        c["host_s_per_recompute_module"],
    )
    calls_s = call_s * away.modules
    forward_s = _joint(p, device.forward_s, third + calls_s) + sync
    backward_s = (
        _joint(
            p, device.backward_s + more.kernel_s, 2 * third + call_s * more.kernel_groups + calls_s
        )
        + sync
    )
    travel_s = away.bytes / (c["host_link_Bps"] * c["host_link_efficiency"])
    replays = np.greater(more.block_s, 0)
    return PassTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        block_s=replays
        * more.block_layer_share
        * _joint(p, more.block_s, more.block_host_share * third),
        forward_wait_s=np.maximum(0.0, travel_s - forward_s),
        backward_wait_s=np.maximum(0.0, travel_s - backward_s),
        copy_s=travel_s,
    )


def layer_time(
    links: CollectiveModel,
    size: Symbols,
    layout: Layout,
    priced: PricedOps,
    device: DeviceTime,
    more: ReplayCost,
    away: OffloadedActivations,
    *,
    moe: bool,
) -> MicroBatchTime:
    """One layer and micro-batch by part."""
    found = pass_times(
        links, size, layout, device, more, away, moe=moe, synced=layout.pp > 1 and layout.vpp == 1
    )
    exposed, hidden = dict(device.exposed), dict(device.hidden)
    busy_s = device.backward_s + more.kernel_s
    _put(
        exposed,
        TimePart.HOST,
        float(found.forward_s - device.forward_s + found.backward_s - busy_s),
    )
    _put(exposed, TimePart.RECOMPUTE, float(found.block_s + more.kernel_s))
    late_s = float(found.forward_wait_s + found.backward_wait_s)
    _put(exposed, TimePart.OFFLOAD, late_s)
    _put(hidden, TimePart.OFFLOAD, 2 * float(found.copy_s) - late_s)
    backward_s = float(found.backward_s + found.backward_wait_s)
    # The host's part and what overlaps fall on input and weight gradients alike.
    weight_s = (
        weight_gradient_s(priced.backward) * backward_s / float(busy_s)
        if device.backward_s
        else 0.0
    )
    return MicroBatchTime(
        exposed=exposed,
        hidden=hidden,
        forward_s=float(found.forward_s + found.forward_wait_s),
        weight_grad_s=weight_s,
    )


def _exponent(links: CollectiveModel, size: Symbols, *, synced: bool) -> float:
    """How far host and device run side by side: less where 1F1B waits for every transfer, not at
    all in one pass."""
    if not size.is_steady:
        return 1.0
    return links.constants["host_exponent_synced" if synced else "host_exponent"]


def _small(recompute: Sequence[Recompute]) -> tuple[Recompute, ...]:
    """Recompute choices that replay a few kernels of a layer inside backward, not a block of their
    own."""
    return tuple(
        choice
        for choice in recompute
        if choice not in (Recompute.FULL, Recompute.MOE, Recompute.LOSS)
    )


def _replayed_share(layout: Layout, model: ModelSpec) -> float:
    """Of a chunk's layers: those that full recompute takes, where it takes the first alone."""
    if not layout.recompute_block:
        return 1.0
    return min(1.0, layout.recompute_block * layout.pp * layout.vpp / model.layers)


def _joint(exponent: float, device: FloatOrArray, host: FloatOrArray) -> FloatOrArray:
    if exponent == 1.0:
        return device + host
    return (device**exponent + host**exponent) ** (1 / exponent)


def _sum_parts(exposed: dict[TimePart, float], rows: Iterable[tuple[OpRow, float]]) -> float:
    total = 0.0
    for row, seconds in rows:
        _put(exposed, row.part, seconds)
        total += seconds
    return total


def _put(parts: dict[TimePart, float], part: TimePart, seconds: float) -> None:
    if seconds:
        parts[part] = parts.get(part, 0.0) + seconds


def outside_layers_time(
    links: CollectiveModel, size: Symbols, priced: PricedOps, *, gathers: int, sums: int = 0
) -> MicroBatchTime:
    """Embedding, head or MTP projection: device time only; `gathers` collectives of the hidden
    state under TP, and in forward `sums` all-reduces of a number a token, as a loss over a cut
    vocabulary takes.
    """
    exposed: dict[TimePart, float] = {}
    forward_s = _sum_parts(exposed, priced.forward)
    _sum_parts(exposed, priced.backward)
    if size.layout.tp > 1:
        whole = size.c * size.T * size.model.hidden_size
        one = tp_exchange_s(links, size.layout, whole)
        summed = sums * tp_all_reduce_s(links, size)
        _put(exposed, TimePart.TP_COMM, gathers * one + summed)
        forward_s += gathers * one / 2 + summed
    return MicroBatchTime(
        exposed=exposed,
        hidden={},
        forward_s=forward_s,
        weight_grad_s=weight_gradient_s(priced.backward),
    )
