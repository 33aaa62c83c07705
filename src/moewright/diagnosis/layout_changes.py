"""Changes of a layout that remedies make, each for a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from moewright.rules.limits.divisibility import divisors
from moewright.spec.hardware import Hardware
from moewright.spec.layout import (
    CpComm,
    CudaGraphScope,
    DispatcherKind,
    Layout,
    Offload,
    Overlap,
    Recompute,
    Schedule,
)
from moewright.spec.model import AttentionKind, ModelSpec

OFFLOADED = (Offload.CORE_ATTN, Offload.EXPERT_FC1, Offload.MOE_ACT)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemedyContext:
    """The job whose layout a remedy changes."""

    model: ModelSpec
    hardware: Hardware
    layout: Layout


LayoutChange = Callable[[RemedyContext], Layout]


def add_recompute(*policies: Recompute) -> LayoutChange:
    """Return the change that recomputes more modules."""

    def change(context: RemedyContext) -> Layout:
        layout = context.layout
        if Recompute.FULL in layout.recompute:
            return layout
        is_mla = context.model.attention.kind is AttentionKind.MLA
        added = {policy for policy in policies if policy is not Recompute.MLA_UP_PROJ or is_mla}
        return replace(layout, recompute=tuple(sorted({*layout.recompute, *added})))

    return change


def set_recompute(*policies: Recompute) -> LayoutChange:
    """Return the change of a layer's recompute to `policies`; recompute of the loss stays."""

    def change(context: RemedyContext) -> Layout:
        loss = {Recompute.LOSS}.intersection(context.layout.recompute)
        return replace(
            context.layout,
            recompute=tuple(sorted({*policies, *loss})),
            recompute_block=0,
            recompute_span=1,
        )

    return change


def add_offload(*modules: Offload) -> LayoutChange:
    """Return the change that offloads more."""

    def change(context: RemedyContext) -> Layout:
        layout = context.layout
        return replace(layout, offload=tuple(sorted({*layout.offload, *modules})))

    return change


def add_overlap(*overlaps: Overlap) -> LayoutChange:
    """Return the change that overlaps more communication."""

    def change(context: RemedyContext) -> Layout:
        layout = context.layout
        return replace(layout, overlap=tuple(sorted({*layout.overlap, *overlaps})))

    return change


def add_graphs(context: RemedyContext) -> Layout:
    """Return the layout with graphs, if it has none."""
    if context.layout.graphs:
        return context.layout
    graphs: tuple[CudaGraphScope, ...] = (CudaGraphScope.ATTN,)
    if context.model.moe:
        graphs = (CudaGraphScope.ATTN, CudaGraphScope.MOE_PREPROCESS, CudaGraphScope.MOE_ROUTER)
    return replace(context.layout, graphs=graphs)


def halve_tp(context: RemedyContext) -> Layout:
    """Return the layout with half the tensor parallelism."""
    tp = max(1, context.layout.tp // 2)
    return replace(context.layout, tp=tp, sp=context.layout.sp and tp > 1)


def scale_degree(axis: str, factor: float) -> LayoutChange:
    """Return the change of a degree by a factor, to 1 at least."""

    def change(context: RemedyContext) -> Layout:
        scaled: dict[str, Any] = {axis: max(1, int(getattr(context.layout, axis) * factor))}
        return replace(context.layout, **scaled)

    return change


def raise_vpp(context: RemedyContext) -> Layout:
    """Return the next number of virtual stages a rank that splits the layers evenly.

    Megatron-LM accepts even splits alone.
    """
    layout = context.layout
    has_chunks = layout.schedule in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
    if layout.pp == 1 or layout.stages or not has_chunks:
        return layout
    layers_per_rank = max(1, context.model.layers // layout.pp)
    larger = [vpp for vpp in divisors(layers_per_rank) if vpp > layout.vpp]
    if not larger:
        return layout
    return replace(layout, vpp=larger[0], schedule=Schedule.INTERLEAVED)


def fold_ep_into_domain(context: RemedyContext) -> Layout:
    """Return the layout with the widest ep that the fast domain holds."""
    layout = context.layout
    domain = context.hardware.fabric.domain_size
    fitting = [ep for ep in divisors(layout.ep) if ep * layout.etp <= domain]
    return replace(layout, ep=max(fitting, default=1))


def set_dispatcher(dispatcher: DispatcherKind) -> LayoutChange:
    """Return the change of the dispatcher."""

    def change(context: RemedyContext) -> Layout:
        layout = context.layout
        return replace(layout, dispatcher=dispatcher) if layout.ep > 1 else layout

    return change


def set_cp_comm(context: RemedyContext) -> Layout:
    """Return the layout with the exchange of cp that suits the fast domain."""
    layout = context.layout
    if layout.cp == 1:
        return layout
    fits_domain = layout.cp * layout.tp <= context.hardware.fabric.domain_size
    return replace(layout, cp_comm=CpComm.A2A if fits_domain else CpComm.A2A_P2P)


def offload_instead_of_recompute(context: RemedyContext) -> Layout:
    """Return the layout that offloads what it recomputed."""
    return replace(context.layout, recompute=(), offload=OFFLOADED)
