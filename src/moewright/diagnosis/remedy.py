"""Remedies: what to change, in whose settings, and the changes of a layout that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from moewright.codec.megatron_options import LAYOUT_OPTIONS
from moewright.diagnosis.traces.capture import TrainerMark
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A remedy in words, with the change that it makes to a layout.

    `change` returns the same layout where there is nothing to change; it is None for a remedy that
    no field of a layout expresses. `megatron` holds the flags of Megatron-LM, `setting` the fields
    of our job file, and `excludes` what the remedy rules out. A switch is on or off, and `mark` is
    what shows in a trace that it is on.
    """

    text: str
    change: LayoutChange | None = None
    megatron: str = ""
    setting: str = ""
    excludes: str = ""
    is_switch: bool = False
    mark: TrainerMark | None = None
    for_experts: bool = False  # of no use without experts
    for_parallel: bool = False  # of no use on a single device
    only_megatron: bool = False  # this engine has nothing to set
    changes_training: bool = False  # batch, precision, capacity: such remedies come last
    is_narrow: bool = False  # the flags are those of the device's own 8-bit format
    is_environment: bool = False  # `megatron` holds variables or a command, for any trainer


OFFLOAD_FLAGS = f"--fine-grained-activation-offloading --offload-modules {' '.join(OFFLOADED)}"
FULL_RECOMPUTE = "overlap of expert communication, and graphs over the recomputed part"
GRAPH_FLAGS = (
    "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess"
)
RECOMPUTE_FLAGS = "--recompute-granularity selective --recompute-modules"
MORE_ROWS = (
    Remedy(
        text="a larger micro-batch: more tokens for each kernel",
        change=scale_degree("mbs", 2),
        megatron=LAYOUT_OPTIONS["mbs"],
    ),
    Remedy(
        text="a wider ep: each expert gets the tokens of more ranks",
        change=scale_degree("ep", 2),
        megatron=LAYOUT_OPTIONS["ep"],
        for_experts=True,
    ),
)
FUSIONS = (
    Remedy(
        text="fused kernels of the experts: permute, router",
        megatron="--moe-permute-fusion --moe-router-fusion",
        is_switch=True,
        for_experts=True,
        only_megatron=True,
    ),
    Remedy(
        text="a fused loss",
        megatron="--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
        is_switch=True,
        only_megatron=True,
    ),
)
MANUAL_GC = Remedy(
    text="collect garbage in step on all ranks",
    megatron="--manual-gc --manual-gc-interval 100",
    setting="train.gc_every_steps",
    is_switch=True,
)
PINNED_THREADS = Remedy(
    text="pin each rank's threads to cores of its own socket",
    megatron="numactl --cpunodebind --membind",
    is_environment=True,
)
LOWER_PRECISION = Remedy(
    text="the 8-bit format of the device for linear layers",
    is_narrow=True,
    changes_training=True,
)
