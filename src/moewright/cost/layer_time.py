"""Seconds of one layer, or of what stands outside the layers, for one micro-batch: rows, collectives and host time.

time_model_findings section 2. Device and host overlap in part: time = (device^p + host^p)^(1/p), for forward, backward
and a replayed block each; p = 1 adds them. Waits for the split sizes of an all-to-all are always added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moewright.cost.comm import Links, Span
from moewright.cost.compute import OpRow, Rates
from moewright.cost.ops import LayerOps
from moewright.cost.sizes import Sizes
from moewright.spec.hardware import Collective, Op
from moewright.spec.layout import CpComm, Dispatcher, Graphs, Layout, Overlap, Recompute
from moewright.spec.model import ModelSpec
from moewright.spec.plan import TimePart

Parts = Mapping[TimePart, float]

_NO_SYNC = (Dispatcher.DEEPEP, Dispatcher.HYBRIDEP)
_INT64_BYTES = 8
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of one micro-batch, forward and backward: exposed by part, and hidden under other work.

    `forward_s` of the exposed seconds belong to forward, `weight_s` to the weight gradients.
    """

    exposed: Parts
    hidden: Parts
    forward_s: float
    weight_s: float

    @property
    def total_s(self) -> float:
        return sum(self.exposed.values())


def add(many: Iterable[tuple[Times, float]]) -> Times:
    """The weighted sum."""
    exposed: dict[TimePart, float] = {}
    hidden: dict[TimePart, float] = {}
    forward_s = weight_s = 0.0
    for times, weight in many:
        forward_s += weight * times.forward_s
        weight_s += weight * times.weight_s
        for sums, parts in ((exposed, times.exposed), (hidden, times.hidden)):
            for part, seconds in parts.items():
                sums[part] = sums.get(part, 0.0) + weight * seconds
    return Times(exposed=exposed, hidden=hidden, forward_s=forward_s, weight_s=weight_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """Rows of a layer with their seconds."""

    forward: tuple[tuple[OpRow, float], ...]
    backward: tuple[tuple[OpRow, float], ...]


def price(rates: Rates, ops: LayerOps) -> Priced:
    return Priced(
        forward=tuple((row, rates.seconds(row)) for row in ops.forward),
        backward=tuple((row, rates.seconds(row)) for row in ops.backward),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Collectives of one layer and micro-batch, forward; `tp` one gather or scatter, `ep` dispatch and combine."""

    ep_forward: float
    ep_backward: float
    tp: float
    tp_blocks: int
    cp: float


def exchange(links: Links, size: Sizes, *, moe: bool) -> Exchange:
    model, layout = size.model, size.layout
    shared = model.moe is not None and model.moe.shared_ffn_size > 0
    whole = size.c * size.T * model.hidden_size
    tp = tp_s(links, layout, whole)
    forward, backward = _dispatch(links, size) if moe else (0.0, 0.0)
    return Exchange(
        ep_forward=forward,
        ep_backward=backward,
        tp=tp if layout.sp else 2 * tp,
        tp_blocks=(1 + shared if moe else 2) if layout.tp > 1 else 0,
        cp=_context(links, size),
    )


def tp_s(links: Links, layout: Layout, whole_bytes: float) -> float:
    """One gather or scatter of a tensor-parallel group, as far as no GEMM hides it."""
    c = links.constants
    if layout.tp == 1:
        return 0.0
    where = links.span(layout, "tp")
    seconds = links.seconds(Collective.REDUCE_SCATTER, where, whole_bytes, efficiency=c["tp_efficiency"])
    shown = 1 - c["tp_overlap_hidden"] if Overlap.TP in layout.overlap else 1.0
    return c["tp_time_scale"] * shown * seconds


def _dispatch(links: Links, size: Sizes) -> tuple[float, float]:
    """Dispatch and combine, forward and backward, with the small exchanges of counts and probabilities."""
    model, layout = size.model, size.layout
    if model.moe is None or layout.ep * layout.etp == 1:
        return 0.0, 0.0
    k, even = model.moe.router.top_k, size.t * model.moe.router.top_k
    load = size.R / (even * layout.etp) if even else 1.0
    one = links.dispatch_s(layout, tokens=size.t, top_k=k, row_bytes=size.c * model.hidden_size, load=load)
    forward = backward = 2 * one
    if layout.dispatcher is Dispatcher.ALL_TO_ALL:
        where = links.span(layout, "ep")
        probs = links.seconds(Collective.ALL_TO_ALL, where, _FP32_BYTES * even)
        forward += links.seconds(Collective.ALL_TO_ALL, where, _INT64_BYTES * model.moe.experts) + probs
        backward += probs
    if layout.etp > 1:
        gathered = size.R * size.c * model.hidden_size
        etp = links.seconds(Collective.REDUCE_SCATTER, links.span(layout, "etp"), gathered)
        forward, backward = forward + 2 * etp, backward + 2 * etp
    return forward, backward


def _context(links: Links, size: Sizes) -> float:
    """Keys and values of the other ranks, forward: a ring of cp - 1 steps, or one gather; a2a moves q and the output
    too, but only its own part of each; a2a+p2p does so inside a domain, and rings over the domains."""
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
        near = Span(size=where.inside, inside=where.inside, domains=1)
        far = Span(size=where.domains, inside=1, domains=where.domains)
        ring = (where.domains - 1) * links.seconds(Collective.P2P, far, kv)
        return links.seconds(Collective.ALL_TO_ALL, near, moved) + ring
    return links.seconds(Collective.ALL_TO_ALL, where, moved)


def host_s(links: Links, layout: Layout, model: ModelSpec, *, moe: bool) -> float:
    """Host time of one layer and micro-batch, forward and backward, that does not depend on the tokens."""
    c = links.constants
    if Graphs.FULL in layout.graphs:
        return c["host_s_full_graph"]
    seconds = c["host_s_per_layer_microbatch"] * float(c["host_per_year"] ** c["stack_age_years"])
    if layout.graphs:
        seconds *= 1 - _graphed(links, layout)
    if Overlap.GRAD in layout.overlap or Overlap.PARAM in layout.overlap:
        seconds *= c["dp_overlap_host"]
    if layout.tp > 1:
        seconds *= c["tp_host"]
    if not moe or model.moe is None:
        return seconds * c["host_dense_layer_share"]
    seconds += c["host_s_per_local_expert"] * model.moe.experts / layout.ep
    return seconds * (c["ep_overlap_host"] if Overlap.EP in layout.overlap else 1.0)


def _graphed(links: Links, layout: Layout) -> float:
    """Share of a layer's host time that its graphs take over."""
    c = links.constants
    attention = c["host_graphed_attention"] if Graphs.ATTN in layout.graphs else 0.0
    return attention + (c["host_graphed_router"] if Graphs.MOE_ROUTER in layout.graphs else 0.0)


def layer_time(links: Links, size: Sizes, layout: Layout, priced: Priced, moved: Exchange, *, moe: bool) -> Times:
    """One layer and micro-batch under the layout's recompute, overlap and graph choices."""
    c = links.constants
    host = host_s(links, layout, size.model, moe=moe)
    exposed: dict[TimePart, float] = {}
    hidden: dict[TimePart, float] = {}

    def device_s(rows: tuple[tuple[OpRow, float], ...], ep: float, tp: float, cp: float) -> float:
        """Books rows and collectives of one direction."""
        core = sum(seconds for row, seconds in rows if row.part is TimePart.ATTENTION)
        hidden_ep = ep * c["ep_overlap_hidden"] if Overlap.EP in layout.overlap else 0.0
        hidden_cp = min(cp, core) if layout.cp_comm is CpComm.P2P else 0.0
        _put(hidden, TimePart.EP_COMM, hidden_ep)
        _put(hidden, TimePart.CP_COMM, hidden_cp)
        _put(exposed, TimePart.EP_COMM, ep - hidden_ep)
        _put(exposed, TimePart.TP_COMM, tp)
        _put(exposed, TimePart.CP_COMM, cp - hidden_cp)
        return _sum_parts(exposed, rows) + ep - hidden_ep + tp + cp - hidden_cp

    tp = moved.tp_blocks * moved.tp
    sync = 0.0
    if moe and layout.ep > 1:
        sync = c["sync_s_fused" if layout.dispatcher in _NO_SYNC else "sync_s_alltoall"]
    p = _exponent(links, size, layout)
    device = device_s(priced.forward, moved.ep_forward, 2 * tp, moved.cp)
    forward_s = _joint(p, device, host / 3) + sync
    _put(exposed, TimePart.HOST, forward_s - device)
    device = device_s(priced.backward, moved.ep_backward, 3 * tp, 2 * moved.cp)
    light = _replay(layout, priced, moved, exposed, host, p, share=_replayed_share(size))
    host_back = 2 * host / 3 + c["host_s_per_recompute_module"] * len(_small(layout))
    backward_s = _joint(p, device + light, host_back) + sync
    _put(exposed, TimePart.HOST, backward_s - device - light)
    # The host's part and what overlaps fall on input and weight gradients alike.
    weight_s = weight_gradient_s(priced) * backward_s / (device + light) if device else 0.0
    return Times(exposed=exposed, hidden=hidden, forward_s=forward_s, weight_s=weight_s)


def weight_gradient_s(priced: Priced) -> float:
    """Seconds of the backward rows that weight gradients take: half of each product, and their accumulation."""
    halves = sum(seconds for row, seconds in priced.backward if row.op in (Op.GEMM, Op.GROUPED_GEMM)) / 2
    return halves + sum(seconds for row, seconds in priced.backward if row.name.endswith("gradient_sum"))


def _exponent(links: Links, size: Sizes, layout: Layout) -> float:
    """How far host and device run side by side: less where 1F1B waits for every transfer, not at all in one pass."""
    if not size.steady:
        return 1.0
    return links.constants["host_exponent_synced" if layout.pp > 1 and layout.vpp == 1 else "host_exponent"]


def _small(layout: Layout) -> tuple[Recompute, ...]:
    """Recompute choices that replay a few kernels inside backward, not a block of their own."""
    return tuple(choice for choice in layout.recompute if choice not in (Recompute.FULL, Recompute.MOE))


def _replay(
    layout: Layout,
    priced: Priced,
    moved: Exchange,
    exposed: dict[TimePart, float],
    host: float,
    p: float,
    *,
    share: float,
) -> float:
    """Books what backward runs again; returns the seconds that join the backward's own device time.

    Full recompute is one forward more, with its collectives and host time, of the `share` of the layers that it takes;
    `moe` its block with 0.6 of the host time. Both stand as blocks of their own.
    """
    chosen = layout.recompute
    if not chosen:
        return 0.0
    if Recompute.FULL in chosen:
        device = sum(seconds for _, seconds in priced.forward)
        device += moved.ep_forward + 2 * moved.tp_blocks * moved.tp + moved.cp
        _put(exposed, TimePart.RECOMPUTE, share * _joint(p, device, host / 3))
        return 0.0
    small = frozenset(_small(layout))
    block = 0.0
    light = 0.0
    for row, seconds in priced.forward:
        if Recompute.MOE in chosen and Recompute.MOE in row.replay:
            block += seconds
        elif not small.isdisjoint(row.replay):
            light += seconds
    if Recompute.MOE in chosen:
        block = _joint(p, block + moved.ep_forward, 0.6 * host / 3) if moved.ep_forward or block else 0.0
    _put(exposed, TimePart.RECOMPUTE, block + light)
    return light


def _replayed_share(size: Sizes) -> float:
    """Of a chunk's layers: those that full recompute takes, where it takes the first alone."""
    layout = size.layout
    if not layout.recompute_block:
        return 1.0
    return min(1.0, layout.recompute_block * layout.pp * layout.vpp / size.model.layers)


def _joint(exponent: float, device: float, host: float) -> float:
    if exponent == 1.0 or not host or not device:
        return device + host
    return float((device**exponent + host**exponent) ** (1 / exponent))


def _sum_parts(exposed: dict[TimePart, float], rows: Iterable[tuple[OpRow, float]]) -> float:
    total = 0.0
    for row, seconds in rows:
        _put(exposed, row.part, seconds)
        total += seconds
    return total


def _put(parts: dict[TimePart, float], part: TimePart, seconds: float) -> None:
    if seconds:
        parts[part] = parts.get(part, 0.0) + seconds


def outside_time(links: Links, size: Sizes, priced: Priced, *, gathers: int) -> Times:
    """Embedding, head or MTP projection: device time only; `gathers` collectives of the hidden state under TP."""
    exposed: dict[TimePart, float] = {}
    forward_s = _sum_parts(exposed, priced.forward)
    _sum_parts(exposed, priced.backward)
    if size.layout.tp > 1:
        whole = size.c * size.T * size.model.hidden_size
        one = tp_s(links, size.layout, whole)
        _put(exposed, TimePart.TP_COMM, gathers * one)
        forward_s += gathers * one / 2
    return Times(exposed=exposed, hidden={}, forward_s=forward_s, weight_s=weight_gradient_s(priced))
