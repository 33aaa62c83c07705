"""Seconds of the collectives that one layer makes for one micro-batch."""

from __future__ import annotations

from moewright.cost.symbols import Symbols
from moewright.cost.time.collective_time import CollectiveModel, GroupSpan
from moewright.rules import routing
from moewright.spec.choices import Payload
from moewright.spec.hardware import Collective
from moewright.spec.layout import CpComm, Layout, Overlap
from moewright.spec.model import AttentionKind, MixerKind, QkNorm

_INT64_BYTES = 8
_FP32_BYTES = 4


def tp_exchange_s(collectives: CollectiveModel, layout: Layout, tensor_bytes: float) -> float:
    """Return the time of one gather or scatter of a TP group, as far as no GEMM hides it.

    `tensor_bytes` is the size of the tensor when it is gathered.
    """
    if layout.tp == 1:
        return 0.0
    c = collectives.constants
    seconds = collectives.seconds(
        Collective.REDUCE_SCATTER,
        collectives.span(layout, "tp"),
        tensor_bytes,
        efficiency=c["tp_efficiency"],
    )
    exposed_share = 1.0
    if Overlap.TP in layout.overlap:
        exposed_share = 1 - c["tp_overlap_hidden"]
    return c["tp_time_scale"] * exposed_share * seconds


def tp_all_reduce_s(collectives: CollectiveModel, sym: Symbols) -> float:
    """Return the time of one all-reduce of an fp32 number a token over a TP group."""
    span = collectives.span(sym.layout, "tp")
    return collectives.seconds(Collective.ALL_REDUCE, span, _FP32_BYTES * sym.T)


def tp_heads_s(collectives: CollectiveModel, sym: Symbols, mixer: MixerKind) -> float:
    """Return the time that a mixer exchanges queries and keys over a TP group, forward.

    A norm over all heads, of which each rank has a part, is two all-reduces. More ranks than key
    heads gather their parts of these: this engine keys and values, Megatron queries too.
    """
    spec = sym.model.attention
    layout = sym.layout
    seconds = 0.0
    if spec.qk_norm is QkNorm.FULL and mixer is not MixerKind.NONE:
        seconds += 2 * tp_all_reduce_s(collectives, sym)
    is_shared = spec.kind is AttentionKind.GQA and layout.tp > spec.kv_heads
    if is_shared and mixer is MixerKind.ATTENTION:
        width = 2 * spec.kv_width + (spec.q_width if sym.is_fused else 0)
        seconds += tp_exchange_s(collectives, layout, sym.c * sym.T * width)
    return seconds


def ep_exchange_s(collectives: CollectiveModel, sym: Symbols) -> tuple[float, float]:
    """Return the time of dispatch and combine, forward and backward.

    The small exchanges of counts and probabilities are in it.
    """
    model, layout = sym.model, sym.layout
    if model.moe is None or layout.ep * layout.etp == 1:
        return 0.0, 0.0
    top_k = model.moe.router.top_k
    balanced_rows = sym.t * top_k
    load = 1.0
    if balanced_rows:
        load = sym.R / (balanced_rows * layout.etp)
    row_bytes = sym.c * model.expert_width
    one_way_s = collectives.dispatch_s(
        layout, tokens=sym.t, router=model.moe.router, row_bytes=row_bytes, load=load
    )
    forward_s = backward_s = 2 * one_way_s
    if layout.dispatcher.facts.payload is Payload.ROWS:
        span = collectives.span(layout, "ep")
        counts_bytes = _INT64_BYTES * model.moe.experts
        counts_s = collectives.seconds(Collective.ALL_TO_ALL, span, counts_bytes)
        probs_s = collectives.seconds(Collective.ALL_TO_ALL, span, _FP32_BYTES * balanced_rows)
        forward_s += counts_s + probs_s
        backward_s += probs_s
    if layout.etp > 1:
        gathered_rows = routing.etp_gathered_rows(sym.workload, layout, sym.R)
        gathered_bytes = gathered_rows * sym.c * model.expert_width
        etp_span = collectives.span(layout, "etp")
        etp_s = collectives.seconds(Collective.REDUCE_SCATTER, etp_span, gathered_bytes)
        forward_s += 2 * etp_s
        backward_s += 2 * etp_s
    return forward_s, backward_s


def cp_exchange_s(collectives: CollectiveModel, sym: Symbols, mixer: MixerKind) -> float:
    """Return the time that keys and values of other CP ranks take in forward.

    A recurrent mixer exchanges heads for tokens, all-to-all, before and after it.

    P2P is a ring of cp - 1 steps, all-gather one gather; a2a moves queries and the output too, but
    only its own part of each; a2a+p2p does so inside a domain, and rings over the domains.
    """
    spec = sym.model.attention
    layout = sym.layout
    if layout.cp == 1 or mixer is MixerKind.NONE:
        return 0.0
    span = collectives.span(layout, "cp")
    if mixer is MixerKind.RECURRENT and sym.model.recurrent is not None:
        recurrent = sym.model.recurrent
        widths = recurrent.projected_width + recurrent.value_width
        moved_bytes = sym.c * sym.T * widths / layout.tp
        return collectives.seconds(Collective.ALL_TO_ALL, span, moved_bytes)
    kv_bytes = sym.c * sym.T * 2 * spec.kv_width / layout.tp
    if layout.cp_comm is CpComm.ALL_GATHER:
        return collectives.seconds(Collective.ALL_GATHER, span, kv_bytes)
    if layout.cp_comm is CpComm.P2P:
        return (layout.cp - 1) * collectives.seconds(Collective.P2P, span, kv_bytes)
    head_bytes = kv_bytes + sym.c * sym.T * (spec.q_width + spec.out_width) / layout.tp
    if layout.cp_comm is not CpComm.A2A_P2P or span.is_inside_domain:
        return collectives.seconds(Collective.ALL_TO_ALL, span, head_bytes)
    local = span.ranks_per_domain
    inside = GroupSpan(size=local, ranks_per_domain=local, domains=1)
    between = GroupSpan(size=span.domains, ranks_per_domain=1, domains=span.domains)
    ring_s = (span.domains - 1) * collectives.seconds(Collective.P2P, between, kv_bytes)
    return collectives.seconds(Collective.ALL_TO_ALL, inside, head_bytes) + ring_s
