"""What helps against each cause, in the order of trying, with its exclusions and Megatron flags.

The order is that of the tuning workflow for Megatron-Core MoE (docs/formulas.md 10): cheap before
expensive, and of equals the one that changes least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from moewright.codec.megatron_options import LAYOUT_OPTIONS, WORKLOAD_OPTIONS
from moewright.rules.divisibility import divisors
from moewright.spec.finding import Cause
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RemedyContext:
    """The job whose layout a remedy changes."""

    model: ModelSpec
    hardware: Hardware
    layout: Layout


LayoutChange = Callable[[RemedyContext], Layout]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A remedy in words, with the change that it makes to a layout.

    `change` returns the same layout where there is nothing to change; it is None for a remedy that
    no field of a layout expresses. `megatron` holds the flags of Megatron-LM, and `excludes` what
    the remedy rules out.
    """

    text: str
    change: LayoutChange | None = None
    megatron: str = ""
    excludes: str = ""


def _add_recompute(*policies: Recompute) -> LayoutChange:
    def change(context: RemedyContext) -> Layout:
        layout = context.layout
        if Recompute.FULL in layout.recompute:
            return layout
        is_mla = context.model.attention.kind is AttentionKind.MLA
        added = {policy for policy in policies if policy is not Recompute.MLA_UP_PROJ or is_mla}
        return replace(layout, recompute=tuple(sorted({*layout.recompute, *added})))

    return change


def _set_recompute(*policies: Recompute) -> LayoutChange:
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


def _add_offload(*modules: Offload) -> LayoutChange:
    def change(context: RemedyContext) -> Layout:
        layout = context.layout
        return replace(layout, offload=tuple(sorted({*layout.offload, *modules})))

    return change


def _add_overlap(*overlaps: Overlap) -> LayoutChange:
    def change(context: RemedyContext) -> Layout:
        layout = context.layout
        return replace(layout, overlap=tuple(sorted({*layout.overlap, *overlaps})))

    return change


def _add_graphs(context: RemedyContext) -> Layout:
    if context.layout.graphs:
        return context.layout
    graphs: tuple[CudaGraphScope, ...] = (CudaGraphScope.ATTN,)
    if context.model.moe:
        graphs = (CudaGraphScope.ATTN, CudaGraphScope.MOE_PREPROCESS, CudaGraphScope.MOE_ROUTER)
    return replace(context.layout, graphs=graphs)


def _halve_tp(context: RemedyContext) -> Layout:
    tp = max(1, context.layout.tp // 2)
    return replace(context.layout, tp=tp, sp=context.layout.sp and tp > 1)


def _scale_degree(axis: str, factor: float) -> LayoutChange:
    def change(context: RemedyContext) -> Layout:
        scaled: dict[str, Any] = {axis: max(1, int(getattr(context.layout, axis) * factor))}
        return replace(context.layout, **scaled)

    return change


def _raise_vpp(context: RemedyContext) -> Layout:
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


def _fold_ep_into_domain(context: RemedyContext) -> Layout:
    layout = context.layout
    domain = context.hardware.fabric.domain_size
    fitting = [ep for ep in divisors(layout.ep) if ep * layout.etp <= domain]
    return replace(layout, ep=max(fitting, default=1))


def _set_dispatcher(dispatcher: DispatcherKind) -> LayoutChange:
    def change(context: RemedyContext) -> Layout:
        layout = context.layout
        return replace(layout, dispatcher=dispatcher) if layout.ep > 1 else layout

    return change


def _set_cp_comm(context: RemedyContext) -> Layout:
    layout = context.layout
    if layout.cp == 1:
        return layout
    fits_domain = layout.cp * layout.tp <= context.hardware.fabric.domain_size
    return replace(layout, cp_comm=CpComm.A2A if fits_domain else CpComm.A2A_P2P)


def _offload_instead_of_recompute(context: RemedyContext) -> Layout:
    return replace(context.layout, recompute=(), offload=_OFFLOADED)


_OFFLOADED = (Offload.CORE_ATTN, Offload.EXPERT_FC1, Offload.MOE_ACT)
_OFFLOAD_FLAGS = f"--fine-grained-activation-offloading --offload-modules {' '.join(_OFFLOADED)}"
_FULL_RECOMPUTE = "overlap of expert communication, and graphs over the recomputed part"
_GRAPH_FLAGS = (
    "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess"
)
_RECOMPUTE_FLAGS = "--recompute-granularity selective --recompute-modules"
_MORE_ROWS = (
    Remedy(
        text="a larger micro-batch: more tokens for each expert and kernel",
        change=_scale_degree("mbs", 2),
        megatron=LAYOUT_OPTIONS["mbs"],
    ),
    Remedy(
        text="a wider ep: each expert gets the tokens of more ranks",
        change=_scale_degree("ep", 2),
        megatron=LAYOUT_OPTIONS["ep"],
    ),
)
_FUSIONS = Remedy(
    text="fused kernels: permute, router, cross-entropy, rope",
    megatron=(
        "--moe-permute-fusion --moe-router-fusion --cross-entropy-loss-fusion "
        "--cross-entropy-fusion-impl te"
    ),
)
_MANUAL_GC = Remedy(
    text="collect garbage in step on all ranks (train.gc_every_steps)",
    megatron="--manual-gc --manual-gc-interval 100",
)
_LOWER_PRECISION = Remedy(
    text="a lower compute precision where the device has a faster rate for it (train.precision)",
    megatron="--fp8-format hybrid --fp8-recipe blockwise --moe-router-padding-for-quantization",
)

_MEMORY = (
    Remedy(
        text="let the allocator grow its segments: ends fragmentation, costs nothing",
        megatron="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    Remedy(
        text="recompute the cheap modules in backward",
        change=_add_recompute(Recompute.MOE_ACT, Recompute.LAYERNORM, Recompute.MLA_UP_PROJ),
        megatron=f"{_RECOMPUTE_FLAGS} moe_act layernorm mla_up_proj",
    ),
    Remedy(
        text=(
            "a better split of layers: count embedding and loss as layers, or say it with "
            "layout='...'"
        ),
        megatron="--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        excludes="an even split of the layers alone",
    ),
    Remedy(
        text="offload activations of the experts and of attention",
        change=_add_offload(*_OFFLOADED),
        megatron=_OFFLOAD_FLAGS,
        excludes="recompute=moe and recompute=full",
    ),
    Remedy(
        text="optimizer moments in bf16 (train.moment_dtype)",
        megatron="--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    ),
    Remedy(
        text="keep the optimizer's state in host memory",
        change=_add_offload(Offload.OPTIMIZER),
        megatron="--optimizer-cpu-offload --optimizer-offload-fraction 1.0",
    ),
    _LOWER_PRECISION,
    Remedy(
        text="recompute the whole MoE block",
        change=_add_recompute(Recompute.MOE),
        megatron=f"{_RECOMPUTE_FLAGS} moe layernorm",
    ),
    Remedy(
        text="recompute everything",
        change=_set_recompute(Recompute.FULL),
        megatron="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        excludes=_FULL_RECOMPUTE,
    ),
)
_BETTER_PRODUCTS = (
    Remedy(text="one grouped product for all local experts", megatron="--moe-grouped-gemm"),
    *_MORE_ROWS,
    _FUSIONS,
    _LOWER_PRECISION,
)
_LAUNCH = (
    _MANUAL_GC,
    Remedy(
        text="capture the static parts of a layer in graphs",
        change=_add_graphs,
        megatron=_GRAPH_FLAGS,
        excludes="full recompute; dynamic shapes inside the captured part",
    ),
    Remedy(
        text="a larger micro-batch: fewer, longer kernels",
        change=_scale_degree("mbs", 2),
        megatron=LAYOUT_OPTIONS["mbs"],
    ),
    Remedy(
        text="a smaller tp: longer kernels",
        change=_halve_tp,
        megatron=LAYOUT_OPTIONS["tp"],
    ),
    _FUSIONS,
    Remedy(
        text="pin each rank's threads to cores of its own socket",
        megatron="numactl --cpunodebind --membind",
    ),
)

REMEDIES: Mapping[Cause, tuple[Remedy, ...]] = MappingProxyType(
    {
        Cause.CAPACITY: _MEMORY,
        Cause.FRAGMENTATION: _MEMORY[:1],
        Cause.DP: (
            Remedy(
                text=(
                    "overlap the reduction with backward and the gather with forward; "
                    "pays when micro-batches are few"
                ),
                change=_add_overlap(Overlap.GRAD, Overlap.PARAM),
                megatron="--overlap-grad-reduce --overlap-param-gather",
            ),
            Remedy(
                text="more micro-batches a step (a larger global batch) spread the one reduction"
            ),
        ),
        Cause.TP: (
            Remedy(text="a lower tp", change=_halve_tp, megatron=LAYOUT_OPTIONS["tp"]),
            Remedy(
                text="overlap it with the products before and after it",
                change=_add_overlap(Overlap.TP),
                megatron="--tp-comm-overlap",
                excludes="tp without sequence parallelism",
            ),
        ),
        Cause.PP: (
            Remedy(
                text="more virtual stages: a smaller bubble, and messages under compute",
                change=_raise_vpp,
                megatron=LAYOUT_OPTIONS["vpp"],
                excludes="--num-layers-per-virtual-pipeline-stage beside it",
            ),
            Remedy(
                text="more micro-batches: a smaller micro-batch",
                change=_scale_degree("mbs", 0.5),
                megatron=LAYOUT_OPTIONS["mbs"],
            ),
            Remedy(
                text="fewer stages",
                change=_scale_degree("pp", 0.5),
                megatron=LAYOUT_OPTIONS["pp"],
            ),
            Remedy(
                text="a larger global batch: more micro-batches",
                megatron=WORKLOAD_OPTIONS["global_batch"],
            ),
        ),
        Cause.EP: (
            Remedy(
                text="a dispatcher that sends a token once to each node or rank",
                change=_set_dispatcher(DispatcherKind.DEEPEP),
                megatron="--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
                excludes="dry runs with a fake process group",
            ),
            Remedy(
                text="route each token to few nodes only (a property of the model's router)",
                megatron="--moe-router-num-groups --moe-router-group-topk",
            ),
            Remedy(
                text="overlap it with the compute of another micro-batch",
                change=_add_overlap(Overlap.EP),
                megatron=(
                    "--overlap-moe-expert-parallel-comm --delay-wgrad-compute "
                    "CUDA_DEVICE_MAX_CONNECTIONS=32"
                ),
                excludes="full recompute, shared-expert overlap, CUDA_DEVICE_MAX_CONNECTIONS=1",
            ),
            Remedy(
                text="fold ep into the fast domain",
                change=_fold_ep_into_domain,
                megatron="--expert-model-parallel-size --expert-tensor-parallel-size 1",
            ),
        ),
        Cause.CP: (
            Remedy(
                text="exchange heads inside a node, a ring across nodes",
                change=_set_cp_comm,
                megatron="--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes",
                excludes="more ranks of the exchange than key heads / tp",
            ),
            Remedy(
                text="a smaller cp",
                change=_scale_degree("cp", 0.5),
                megatron=LAYOUT_OPTIONS["cp"],
            ),
        ),
        Cause.STRAGGLER: (
            Remedy(
                text=(
                    "look at the late rank: its clocks, its node's other jobs, its "
                    "loader, its links"
                )
            ),
            Remedy(text="give stages the same work: layout='...' counts embedding and loss"),
            _MANUAL_GC,
        ),
        Cause.DATA: (
            Remedy(
                text="more loader workers, data on a local disk, mapped index files",
                megatron="--num-workers 8",
            ),
            Remedy(
                text="no attention mask made by the loader",
                megatron="--no-create-attention-mask-in-dataloader",
            ),
        ),
        Cause.GARBAGE_COLLECTION: (_MANUAL_GC,),
        Cause.SYNC: (
            Remedy(text="fused permute: no counts read back", megatron="--moe-permute-fusion"),
            Remedy(
                text=(
                    "static shapes: pad to a capacity, or a dispatcher that keeps counts "
                    "on the device"
                ),
                megatron="--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
                excludes="dropless routing",
            ),
            *_LAUNCH[:2],
        ),
        Cause.LAUNCH: _LAUNCH,
        Cause.HOST_OTHER: _LAUNCH,
        Cause.RECOMPUTE: (
            Remedy(
                text="recompute the cheap modules only, where memory allows",
                change=_set_recompute(Recompute.LAYERNORM, Recompute.MOE_ACT),
                megatron=f"{_RECOMPUTE_FLAGS} moe_act layernorm",
            ),
            Remedy(
                text="recompute nothing",
                change=_set_recompute(),
                megatron="no --recompute-granularity",
            ),
            Remedy(
                text="offload activations instead",
                change=_offload_instead_of_recompute,
                megatron=_OFFLOAD_FLAGS,
            ),
        ),
        Cause.IMBALANCE: (
            Remedy(
                text=(
                    "a larger auxiliary loss coefficient, or an expert bias, while the "
                    "loss does not suffer"
                ),
                megatron="--moe-aux-loss-coeff --moe-router-enable-expert-bias",
            ),
            Remedy(
                text="a capacity for the hottest experts",
                megatron="--moe-expert-capacity-factor --moe-pad-expert-input-to-capacity",
                excludes="dropless routing",
            ),
            Remedy(
                text="a smaller ep: one rank averages over more experts",
                change=_scale_degree("ep", 0.5),
                megatron=LAYOUT_OPTIONS["ep"],
            ),
        ),
        Cause.FEW_ROWS: _BETTER_PRODUCTS,
        Cause.KERNEL_RATES: _BETTER_PRODUCTS,
    }
)
