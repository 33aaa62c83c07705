"""What helps against each cause, in the order in which it is worth trying, with what it excludes
and Megatron's flags.

The order is that of the tuning workflow for Megatron-Core MoE (docs/formulas.md 10): cheap before
dear, and of equals the one that changes least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

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
    """What a remedy is asked about."""

    model: ModelSpec
    hardware: Hardware
    layout: Layout


LayoutChange = Callable[[RemedyContext], Layout]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """`change` makes the layout that has it, the same one where there is nothing to change; absent
    for what is no choice of a layout."""

    text: str
    change: LayoutChange | None = None
    megatron: str = ""
    excludes: str = ""


def _recompute(*more: Recompute) -> LayoutChange:
    def change(job: RemedyContext) -> Layout:
        layout = job.layout
        if Recompute.FULL in layout.recompute:
            return layout
        wanted = {each for each in more if each is not Recompute.MLA_UP_PROJ or _latent(job.model)}
        return replace(layout, recompute=tuple(sorted({*layout.recompute, *wanted})))

    return change


def _latent(model: ModelSpec) -> bool:
    return model.attention.kind is AttentionKind.MLA


def _only(*chosen: Recompute) -> LayoutChange:
    """These of a layer; whether logits are kept stays as it is."""

    def change(job: RemedyContext) -> Layout:
        loss = {Recompute.LOSS}.intersection(job.layout.recompute)
        return replace(
            job.layout,
            recompute=tuple(sorted({*chosen, *loss})),
            recompute_block=0,
            recompute_span=1,
        )

    return change


def _offload(*more: Offload) -> LayoutChange:
    return lambda job: replace(job.layout, offload=tuple(sorted({*job.layout.offload, *more})))


def _overlap(*more: Overlap) -> LayoutChange:
    return lambda job: replace(job.layout, overlap=tuple(sorted({*job.layout.overlap, *more})))


def _graphs(job: RemedyContext) -> Layout:
    wanted = (
        (CudaGraphScope.ATTN, CudaGraphScope.MOE_PREPROCESS, CudaGraphScope.MOE_ROUTER)
        if job.model.moe
        else (CudaGraphScope.ATTN,)
    )
    return job.layout if job.layout.graphs else replace(job.layout, graphs=wanted)


def _less_tp(job: RemedyContext) -> Layout:
    tp = max(1, job.layout.tp // 2)
    return replace(job.layout, tp=tp, sp=job.layout.sp and tp > 1)


def _times(axis: str, factor: float) -> LayoutChange:
    def change(job: RemedyContext) -> Layout:
        scaled: dict[str, Any] = {axis: max(1, int(getattr(job.layout, axis) * factor))}
        return replace(job.layout, **scaled)

    return change


def _more_vpp(job: RemedyContext) -> Layout:
    """The next number of chunks a rank that splits the layers evenly, as Megatron-LM wants it."""
    layout = job.layout
    if (
        layout.pp == 1
        or layout.stages
        or layout.schedule not in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
    ):
        return layout
    more = [vpp for vpp in divisors(max(1, job.model.layers // layout.pp)) if vpp > layout.vpp]
    return replace(layout, vpp=more[0], schedule=Schedule.INTERLEAVED) if more else layout


def _ep_in_domain(job: RemedyContext) -> Layout:
    layout, domain = job.layout, job.hardware.fabric.domain_size
    fitting = [ep for ep in divisors(layout.ep) if ep * layout.etp <= domain]
    return replace(layout, ep=max(fitting, default=1))


def _dispatcher(chosen: DispatcherKind) -> LayoutChange:
    return lambda job: replace(job.layout, dispatcher=chosen) if job.layout.ep > 1 else job.layout


def _cp_comm(job: RemedyContext) -> Layout:
    layout, node = job.layout, job.hardware.fabric.domain_size
    wanted = CpComm.A2A if layout.cp * layout.tp <= node else CpComm.A2A_P2P
    return replace(layout, cp_comm=wanted) if layout.cp > 1 else layout


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
        change=_times("mbs", 2),
        megatron="--micro-batch-size",
    ),
    Remedy(
        text="a wider ep: each expert gets the tokens of more ranks",
        change=_times("ep", 2),
        megatron="--expert-model-parallel-size",
    ),
)
_FUSIONS = Remedy(
    text="fused kernels: permute, router, cross-entropy, rope",
    megatron="--moe-permute-fusion --moe-router-fusion --cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
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
        text="replay the cheap modules in backward",
        change=_recompute(Recompute.MOE_ACT, Recompute.LAYERNORM, Recompute.MLA_UP_PROJ),
        megatron=f"{_RECOMPUTE_FLAGS} moe_act layernorm mla_up_proj",
    ),
    Remedy(
        text="a better split of layers: count embedding and loss as layers, or say it with layout='...'",
        megatron="--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        excludes="an even split of the layers alone",
    ),
    Remedy(
        text="offload activations of the experts and of attention",
        change=_offload(*_OFFLOADED),
        megatron=_OFFLOAD_FLAGS,
        excludes="recompute=moe and recompute=full",
    ),
    Remedy(
        text="optimizer moments in bf16 (train.moment_dtype)",
        megatron="--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    ),
    Remedy(
        text="keep the optimizer's state in host memory",
        change=_offload(Offload.OPTIMIZER),
        megatron="--optimizer-cpu-offload --optimizer-offload-fraction 1.0",
    ),
    _LOWER_PRECISION,
    Remedy(
        text="replay the whole MoE block",
        change=_recompute(Recompute.MOE),
        megatron=f"{_RECOMPUTE_FLAGS} moe layernorm",
    ),
    Remedy(
        text="replay everything",
        change=_only(Recompute.FULL),
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
        change=_graphs,
        megatron=_GRAPH_FLAGS,
        excludes="full recompute; dynamic shapes inside the captured part",
    ),
    Remedy(
        text="a larger micro-batch: fewer, longer kernels",
        change=_times("mbs", 2),
        megatron="--micro-batch-size",
    ),
    Remedy(
        text="a smaller tp: longer kernels",
        change=_less_tp,
        megatron="--tensor-model-parallel-size",
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
                text="overlap the reduction with backward and the gather with forward; pays when micro-batches are few",
                change=_overlap(Overlap.GRAD, Overlap.PARAM),
                megatron="--overlap-grad-reduce --overlap-param-gather",
            ),
            Remedy(
                text="more micro-batches a step (a larger global batch) spread the one reduction"
            ),
        ),
        Cause.TP: (
            Remedy(text="a lower tp", change=_less_tp, megatron="--tensor-model-parallel-size"),
            Remedy(
                text="overlap it with the products before and after it",
                change=_overlap(Overlap.TP),
                megatron="--tp-comm-overlap",
                excludes="tp without sequence parallelism",
            ),
        ),
        Cause.PP: (
            Remedy(
                text="more virtual stages: a smaller bubble, and messages under compute",
                change=_more_vpp,
                megatron="--num-virtual-stages-per-pipeline-rank",
                excludes="--num-layers-per-virtual-pipeline-stage beside it",
            ),
            Remedy(
                text="more micro-batches: a smaller micro-batch",
                change=_times("mbs", 0.5),
                megatron="--micro-batch-size",
            ),
            Remedy(
                text="fewer stages",
                change=_times("pp", 0.5),
                megatron="--pipeline-model-parallel-size",
            ),
            Remedy(
                text="a larger global batch: more micro-batches", megatron="--global-batch-size"
            ),
        ),
        Cause.EP: (
            Remedy(
                text="a dispatcher that sends a token once to each node or rank",
                change=_dispatcher(DispatcherKind.DEEPEP),
                megatron="--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
                excludes="dry runs with a fake process group",
            ),
            Remedy(
                text="route each token to few nodes only (a property of the model's router)",
                megatron="--moe-router-num-groups --moe-router-group-topk",
            ),
            Remedy(
                text="overlap it with the compute of another micro-batch",
                change=_overlap(Overlap.EP),
                megatron="--overlap-moe-expert-parallel-comm --delay-wgrad-compute CUDA_DEVICE_MAX_CONNECTIONS=32",
                excludes="full recompute, shared-expert overlap, CUDA_DEVICE_MAX_CONNECTIONS=1",
            ),
            Remedy(
                text="fold ep into the fast domain",
                change=_ep_in_domain,
                megatron="--expert-model-parallel-size --expert-tensor-parallel-size 1",
            ),
        ),
        Cause.CP: (
            Remedy(
                text="exchange heads inside a node, a ring across nodes",
                change=_cp_comm,
                megatron="--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes",
                excludes="more ranks of the exchange than key heads / tp",
            ),
            Remedy(
                text="a smaller cp", change=_times("cp", 0.5), megatron="--context-parallel-size"
            ),
        ),
        Cause.STRAGGLER: (
            Remedy(
                text="look at the late rank: its clocks, its node's other jobs, its loader, its links"
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
                text="static shapes: pad to a capacity, or a dispatcher that keeps counts on the device",
                megatron="--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
                excludes="dropless routing",
            ),
            *_LAUNCH[:2],
        ),
        Cause.LAUNCH: _LAUNCH,
        Cause.HOST_OTHER: _LAUNCH,
        Cause.RECOMPUTE: (
            Remedy(
                text="replay the cheap modules only, where memory allows",
                change=_only(Recompute.LAYERNORM, Recompute.MOE_ACT),
                megatron=f"{_RECOMPUTE_FLAGS} moe_act layernorm",
            ),
            Remedy(text="replay nothing", change=_only(), megatron="no --recompute-granularity"),
            Remedy(
                text="offload activations instead",
                change=lambda job: replace(job.layout, recompute=(), offload=_OFFLOADED),
                megatron=_OFFLOAD_FLAGS,
            ),
        ),
        Cause.IMBALANCE: (
            Remedy(
                text="a larger auxiliary loss coefficient, or an expert bias, while the loss does not suffer",
                megatron="--moe-aux-loss-coeff --moe-router-enable-expert-bias",
            ),
            Remedy(
                text="a capacity for the hottest experts",
                megatron="--moe-expert-capacity-factor --moe-pad-expert-input-to-capacity",
                excludes="dropless routing",
            ),
            Remedy(
                text="a smaller ep: one rank averages over more experts",
                change=_times("ep", 0.5),
                megatron="--expert-model-parallel-size",
            ),
        ),
        Cause.FEW_ROWS: _BETTER_PRODUCTS,
        Cause.KERNEL_RATES: _BETTER_PRODUCTS,
    }
)
