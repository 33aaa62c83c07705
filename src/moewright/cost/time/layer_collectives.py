"""Seconds of the collectives that one layer makes for one micro-batch.

The part of the expert exchange (dispatch and combine) that other work covers. The work is that of
another micro-batch, or of shared experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moewright.cost.symbols import Symbols
from moewright.cost.time.collective_time import CollectiveModel, GroupSpan
from moewright.cost.time.gemm_rows import NEVER_DELAYED
from moewright.cost.time.op_time import OpRow, TimedRows
from moewright.rules import routing
from moewright.spec.choices import Payload
from moewright.spec.hardware import Collective, Op
from moewright.spec.layout import CpComm, Layout, Overlap
from moewright.spec.model import AttentionKind, MixerKind, QkNorm
from moewright.spec.units import FP32_BYTES, INT64_BYTES


def tp_exchange_s(collectives: CollectiveModel, layout: Layout, tensor_bytes: float) -> float:
    """Return the time of one gather or scatter of a TP group, as far as no GEMM hides it.

    `tensor_bytes` is the size of the tensor when it is gathered. Where products hide it, it goes
    around a ring, a rank to its neighbour (Transformer Engine, userbuffers: ring_exchange), where
    NCCL has rings over all links.
    """
    if layout.tp == 1:
        return 0.0
    c = collectives.constants
    span = collectives.span(layout, "tp")
    exposed_share = 1.0
    efficiency = c["tp_efficiency"]
    if Overlap.TP in layout.overlap:
        exposed_share = 1 - c["tp_overlap_hidden"]
        efficiency *= collectives.neighbour_share(span)
    seconds = collectives.seconds(
        # A gather of the same tensor passes the same bytes over every link: one price for both.
        Collective.REDUCE_SCATTER,
        span,
        tensor_bytes,
        efficiency=efficiency,
    )
    return c["tp_time_scale"] * exposed_share * seconds


def tp_all_reduce_s(collectives: CollectiveModel, sym: Symbols) -> float:
    """Return the time of one all-reduce of an fp32 number a token over a TP group."""
    span = collectives.span(sym.layout, "tp")
    return collectives.seconds(Collective.ALL_REDUCE, span, FP32_BYTES * sym.T)


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
        counts_bytes = INT64_BYTES * model.moe.experts
        counts_s = collectives.seconds(Collective.ALL_TO_ALL, span, counts_bytes)
        probs_s = collectives.seconds(Collective.ALL_TO_ALL, span, FP32_BYTES * balanced_rows)
        forward_s += counts_s + probs_s
        # The backward knows the counts of its forward.
        backward_s += probs_s
    if layout.etp > 1:
        gathered_rows = routing.etp_gathered_rows(sym.workload, layout, sym.R)
        gathered_bytes = gathered_rows * sym.c * model.expert_width
        etp_span = collectives.span(layout, "etp")
        # Gathered before the experts and scattered behind them, in backward the other way round.
        etp_s = collectives.seconds(Collective.REDUCE_SCATTER, etp_span, gathered_bytes)
        forward_s += 2 * etp_s
        backward_s += 2 * etp_s
    return forward_s, backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextExchange:
    """Seconds of the exchange of context parallelism around a mixer, forward and backward.

    A ring runs beside the attention that it feeds; what moves before and after a mixer does not.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    is_ring: bool = False


def cp_exchange(collectives: CollectiveModel, sym: Symbols, mixer: MixerKind) -> ContextExchange:
    """Return the time that tokens or heads of other CP ranks take.

    P2P is a ring of cp - 1 steps, all-gather one gather, of keys and values; backward moves them
    again beside their gradients. All-to-all moves queries and the output too, but only its own part
    of each, and backward the gradients alone; a2a+p2p does so inside a domain, and rings over the
    domains. A recurrent mixer exchanges heads for tokens, all-to-all, before and after it.
    """
    spec = sym.model.attention
    layout = sym.layout
    if layout.cp == 1 or mixer is MixerKind.NONE:
        return ContextExchange()
    span = collectives.span(layout, "cp")
    if mixer is MixerKind.RECURRENT and sym.model.recurrent is not None:
        recurrent = sym.model.recurrent
        widths = recurrent.projected_width + recurrent.value_width
        moved_bytes = sym.c * sym.T * widths / layout.tp
        heads_s = collectives.seconds(Collective.ALL_TO_ALL, span, moved_bytes)
        return ContextExchange(forward_s=heads_s, backward_s=heads_s)
    kv_bytes = sym.c * sym.T * 2 * spec.kv_width / layout.tp
    if layout.cp_comm is CpComm.ALL_GATHER:
        gather_s = collectives.seconds(Collective.ALL_GATHER, span, kv_bytes)
        return ContextExchange(forward_s=gather_s, backward_s=2 * gather_s)
    if layout.cp_comm is CpComm.P2P:
        ring_s = (layout.cp - 1) * collectives.seconds(Collective.P2P, span, kv_bytes)
        return ContextExchange(forward_s=ring_s, backward_s=2 * ring_s, is_ring=True)
    head_bytes = kv_bytes + sym.c * sym.T * (spec.q_width + spec.out_width) / layout.tp
    # Inside one domain a2a+p2p has no ring over domains to price.
    if layout.cp_comm is not CpComm.A2A_P2P or span.is_inside_domain:
        heads_s = collectives.seconds(Collective.ALL_TO_ALL, span, head_bytes)
        return ContextExchange(forward_s=heads_s, backward_s=heads_s)
    local = span.ranks_per_domain
    inside = GroupSpan(size=local, ranks_per_domain=local, domains=1)
    between = GroupSpan(size=span.domains, ranks_per_domain=1, domains=span.domains)
    ring_s = (span.domains - 1) * collectives.seconds(Collective.P2P, between, kv_bytes)
    heads_s = collectives.seconds(Collective.ALL_TO_ALL, inside, head_bytes)
    return ContextExchange(forward_s=heads_s + ring_s, backward_s=heads_s + 2 * ring_s)


# How the names of rows between dispatch and combine begin; the others come before the dispatch.
EXPERT_ROW_NAMES = ("experts", "sort_received")
_PRODUCTS = (Op.GEMM, Op.GROUPED_GEMM)


@dataclass(frozen=True, kw_only=True, slots=True)
class CoveredTime:
    """Seconds of the exchange of one layer, forward and backward, that other work covers."""

    forward_s: float
    backward_s: float


def weight_gradient_s(rows: Iterable[tuple[OpRow, float]]) -> float:
    """Return the seconds of backward rows that weight gradients take where they can be delayed.

    These are half of each product, and the accumulation of the gradients.
    """
    total_s = 0.0
    for row, seconds in rows:
        if row.name.endswith(NEVER_DELAYED):
            continue
        if row.op in _PRODUCTS:
            total_s += seconds / 2
        elif row.name.endswith("gradient_sum"):
            total_s += seconds
    return total_s


def covered_exchange(
    layout: Layout,
    forward: TimedRows,
    backward: TimedRows,
    ep_forward_s: float,
    ep_backward_s: float,
    *,
    delayed_share: float = 1.0,
) -> CoveredTime:
    """Return what the layout's overlap covers of the exchange of a layer with these rows.

    An exchange is half dispatch and half combine. Beside another micro-batch all of it counts as
    covered, because the share that is really hidden is a constant fitted to runs
    (`ep_overlap_hidden`); delayed weight gradients add `delayed_share` of what they would gain in
    the overlap windows.
    """
    if Overlap.EP in layout.overlap:
        if Overlap.WGRAD not in layout.overlap:
            return CoveredTime(forward_s=ep_forward_s, backward_s=ep_backward_s)
        gain = _delay_gain(forward, backward, ep_forward_s / 2, ep_backward_s / 2)
        return CoveredTime(
            forward_s=ep_forward_s + delayed_share * gain.forward_s,
            backward_s=ep_backward_s + delayed_share * gain.backward_s,
        )
    if Overlap.SHARED in layout.overlap:
        return CoveredTime(
            forward_s=min(ep_forward_s, _shared_expert_s(forward)),
            backward_s=min(ep_backward_s, _shared_expert_s(backward)),
        )
    return CoveredTime(forward_s=0.0, backward_s=0.0)


def _shared_expert_s(rows: TimedRows) -> float:
    return sum(seconds for row, seconds in rows if row.name.startswith("shared"))


def _delay_gain(
    forward: TimedRows, backward: TimedRows, exchange_s: float, gradient_exchange_s: float
) -> CoveredTime:
    """Return how much more of the exchange is covered where weight gradients are delayed."""
    before, experts = _split_rows(forward)
    before_backward, experts_backward = _split_rows(backward)
    windows = OverlapWindows(
        before_s=_sum_seconds(before),
        before_backward_s=_sum_seconds(before_backward),
        experts_s=_sum_seconds(experts),
        experts_backward_s=_sum_seconds(experts_backward),
    )
    at_once = windows.cover(exchange_s, gradient_exchange_s, delayed_s=0.0, delayed_experts_s=0.0)
    delayed = windows.cover(
        exchange_s,
        gradient_exchange_s,
        delayed_s=weight_gradient_s(before_backward),
        delayed_experts_s=weight_gradient_s(experts_backward),
    )
    return CoveredTime(
        forward_s=delayed.forward_s - at_once.forward_s,
        backward_s=delayed.backward_s - at_once.backward_s,
    )


def _split_rows(rows: TimedRows) -> tuple[TimedRows, TimedRows]:
    """Return the rows before the dispatch, and those between dispatch and combine."""
    before = [row for row in rows if not row[0].name.startswith(EXPERT_ROW_NAMES)]
    experts = [row for row in rows if row[0].name.startswith(EXPERT_ROW_NAMES)]
    return before, experts


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapWindows:
    """Seconds of a layer's work that an exchange can run beside, forward and backward.

    `before_s` is the work before the dispatch, `experts_s` that between dispatch and combine.
    """

    before_s: float
    before_backward_s: float
    experts_s: float
    experts_backward_s: float

    def cover(
        self, forward_s: float, backward_s: float, *, delayed_s: float, delayed_experts_s: float
    ) -> CoveredTime:
        """Return what is covered where a forward runs beside the backward of another micro-batch.

        Both run layer by layer (docs/formulas.md 11), in three windows:

        - the gradient's combine runs beside the forward work before the dispatch;
        - the dispatch, then the gradient's dispatch, run beside the experts' backward, then their
          forward;
        - the combine runs beside the backward of the work before the dispatch.

        A dispatch or a combine takes `forward_s` forward and `backward_s` backward. Of the backward
        of the work before the dispatch, `delayed_s` are put off into the next window; of the
        experts' backward, the gradient's dispatch does not wait for `delayed_experts_s`.
        """
        experts_ready_s = self.experts_backward_s - delayed_experts_s
        forward_starts_s = max(forward_s, self.experts_backward_s)
        gradient_leaves_s = max(forward_s, experts_ready_s)
        window_s = max(forward_starts_s + self.experts_s, gradient_leaves_s + backward_s)
        shown_s = window_s - self.experts_backward_s - self.experts_s
        covered_dispatch_s = min(forward_s, self.experts_backward_s)
        covered_combine_s = min(forward_s, self.before_backward_s - delayed_s)
        covered_gradient_s = forward_s + backward_s - shown_s - covered_dispatch_s
        return CoveredTime(
            forward_s=covered_dispatch_s + covered_combine_s,
            backward_s=covered_gradient_s + min(backward_s, self.before_s + delayed_s),
        )


def _sum_seconds(rows: TimedRows) -> float:
    return sum(seconds for _, seconds in rows)
