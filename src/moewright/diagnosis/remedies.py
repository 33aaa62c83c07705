"""What helps against each cause, in the order of trying, with its exclusions and Megatron flags.

The order is that of the tuning workflow for Megatron-Core MoE (docs/formulas.md 10): cheap before
expensive, and of equals the one that changes least.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moewright.codec.megatron_options import LAYOUT_OPTIONS, WORKLOAD_OPTIONS, dispatcher_options
from moewright.diagnosis.remedy import (
    FULL_RECOMPUTE,
    FUSIONS,
    GRAPH_FLAGS,
    LOWER_PRECISION,
    MANUAL_GC,
    MORE_ROWS,
    OFFLOAD_FLAGS,
    OFFLOADED,
    PINNED_THREADS,
    RECOMPUTE_FLAGS,
    Remedy,
    add_graphs,
    add_offload,
    add_overlap,
    add_recompute,
    fold_ep_into_domain,
    halve_tp,
    offload_instead_of_recompute,
    raise_vpp,
    scale_degree,
    set_cp_comm,
    set_dispatcher,
    set_recompute,
)
from moewright.diagnosis.traces.capture import TrainerMark
from moewright.spec.finding import Cause
from moewright.spec.layout import DispatcherKind, Offload, Overlap, Recompute

# The first library whose speed is known.
_LIBRARY = next(kind for kind in DispatcherKind if kind.facts.is_searched)
_MEMORY = (
    Remedy(
        text="let the allocator grow its segments: ends fragmentation, costs nothing",
        megatron="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        is_switch=True,
        is_environment=True,
    ),
    Remedy(
        text="recompute the cheap modules in backward",
        change=add_recompute(Recompute.MOE_ACT, Recompute.LAYERNORM, Recompute.MLA_UP_PROJ),
        megatron=f"{RECOMPUTE_FLAGS} moe_act layernorm mla_up_proj",
    ),
    Remedy(
        text=(
            "a better split of layers: count embedding and loss as layers, or say it with "
            "layout='...'"
        ),
        megatron="--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        setting="layout",
        excludes="an even split of the layers alone",
    ),
    Remedy(
        text="offload activations of the experts and of attention",
        change=add_offload(*OFFLOADED),
        megatron=OFFLOAD_FLAGS,
        is_switch=True,
        excludes="recompute=moe and recompute=full",
    ),
    Remedy(
        text="optimizer moments in bf16",
        megatron="--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        setting='train.moment_dtype = "bf16"',
        is_switch=True,
    ),
    Remedy(
        text="keep the optimizer's state in host memory",
        change=add_offload(Offload.OPTIMIZER),
        is_switch=True,
        megatron="--optimizer-cpu-offload --optimizer-offload-fraction 1.0",
    ),
    LOWER_PRECISION,
    Remedy(
        text="recompute the whole MoE block",
        for_experts=True,
        change=add_recompute(Recompute.MOE),
        megatron=f"{RECOMPUTE_FLAGS} moe layernorm",
    ),
    Remedy(
        text="recompute everything",
        change=set_recompute(Recompute.FULL),
        megatron="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        excludes=FULL_RECOMPUTE,
    ),
)
_BETTER_PRODUCTS = (
    Remedy(
        text="one grouped product for all local experts",
        megatron="--moe-grouped-gemm",
        is_switch=True,
        mark=TrainerMark.GROUPED_GEMM,
        for_experts=True,
        only_megatron=True,
    ),
    *MORE_ROWS,
    *FUSIONS,
    LOWER_PRECISION,
)
_LAUNCH = (
    Remedy(
        text="capture the static parts of a layer in graphs",
        change=add_graphs,
        megatron=GRAPH_FLAGS,
        is_switch=True,
        mark=TrainerMark.GRAPHS,
        excludes="full recompute; dynamic shapes inside the captured part",
    ),
    Remedy(
        text="a larger micro-batch: fewer, longer kernels",
        change=scale_degree("mbs", 2),
        megatron=LAYOUT_OPTIONS["mbs"],
    ),
    Remedy(
        text="a smaller tp: longer kernels",
        for_parallel=True,
        change=halve_tp,
        megatron=LAYOUT_OPTIONS["tp"],
    ),
    *FUSIONS,
    MANUAL_GC,
    PINNED_THREADS,
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
                change=add_overlap(Overlap.GRAD, Overlap.PARAM),
                is_switch=True,
                megatron="--overlap-grad-reduce --overlap-param-gather",
            ),
            Remedy(
                text="more micro-batches a step (a larger global batch) spread the one reduction",
                changes_training=True,
                megatron=WORKLOAD_OPTIONS["global_batch"],
                setting="train.global_batch",
            ),
        ),
        Cause.TP: (
            Remedy(text="a lower tp", change=halve_tp, megatron=LAYOUT_OPTIONS["tp"]),
            Remedy(
                text="overlap it with the products before and after it",
                change=add_overlap(Overlap.TP),
                is_switch=True,
                megatron="--tp-comm-overlap",
                excludes="tp without sequence parallelism",
            ),
        ),
        Cause.PP: (
            Remedy(
                text="more virtual stages: a smaller bubble, and messages under compute",
                change=raise_vpp,
                megatron=LAYOUT_OPTIONS["vpp"],
                excludes="together with --num-layers-per-virtual-pipeline-stage",
            ),
            Remedy(
                text="more micro-batches: a smaller micro-batch",
                change=scale_degree("mbs", 0.5),
                megatron=LAYOUT_OPTIONS["mbs"],
            ),
            Remedy(
                text="fewer stages",
                change=scale_degree("pp", 0.5),
                megatron=LAYOUT_OPTIONS["pp"],
            ),
            Remedy(
                text="a larger global batch: more micro-batches",
                changes_training=True,
                megatron=WORKLOAD_OPTIONS["global_batch"],
                setting="train.global_batch",
            ),
        ),
        Cause.EP: (
            Remedy(
                text="a dispatcher that sends a token once to each node or rank",
                change=set_dispatcher(_LIBRARY),
                is_switch=True,
                mark=TrainerMark.DEEPEP,
                for_experts=True,
                megatron=" ".join(map(" ".join, dispatcher_options(_LIBRARY))),
                excludes="dry runs with a fake process group",
            ),
            Remedy(
                text="route each token to few nodes only (a property of the model's router)",
                changes_training=True,
                megatron="--moe-router-num-groups --moe-router-group-topk",
            ),
            Remedy(
                text="overlap it with the compute of another micro-batch",
                change=add_overlap(Overlap.EP),
                is_switch=True,
                for_experts=True,
                megatron=(
                    "--overlap-moe-expert-parallel-comm --delay-wgrad-compute "
                    "CUDA_DEVICE_MAX_CONNECTIONS=32"
                ),
                excludes="full recompute, shared-expert overlap, CUDA_DEVICE_MAX_CONNECTIONS=1",
            ),
            Remedy(
                text="fold ep into the fast domain",
                change=fold_ep_into_domain,
                megatron="--expert-model-parallel-size --expert-tensor-parallel-size 1",
            ),
        ),
        Cause.CP: (
            Remedy(
                text="exchange heads inside a node, a ring across nodes",
                change=set_cp_comm,
                megatron="--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes",
                excludes="more ranks of the exchange than key heads / tp",
            ),
            Remedy(
                text="a smaller cp",
                change=scale_degree("cp", 0.5),
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
            MANUAL_GC,
        ),
        Cause.DATA: (
            Remedy(
                text="more loader workers, data on a local disk, mapped index files",
                megatron="--num-workers 8",
            ),
            Remedy(
                text="no attention mask made by the loader",
                megatron="--no-create-attention-mask-in-dataloader",
                is_switch=True,
                only_megatron=True,
            ),
        ),
        Cause.GARBAGE_COLLECTION: (MANUAL_GC,),
        Cause.SYNC: (
            Remedy(
                text="fused permute: no counts read back",
                megatron="--moe-permute-fusion",
                is_switch=True,
                mark=TrainerMark.FUSED_PERMUTE,
                for_experts=True,
                only_megatron=True,
            ),
            Remedy(
                text=(
                    "static shapes: pad to a capacity, or a dispatcher that keeps counts "
                    "on the device"
                ),
                changes_training=True,
                megatron="--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
                excludes="dropless routing",
                is_switch=True,
                for_experts=True,
            ),
            *_LAUNCH[:2],
        ),
        Cause.LAUNCH: _LAUNCH,
        Cause.HOST_OTHER: (
            Remedy(
                text=(
                    "take what fills the longest gaps out of the step, or do it less often: logs, "
                    "metrics, checkpoints"
                )
            ),
            Remedy(
                text=(
                    "where an allocation or the loading of kernels fills them: let more steps pass "
                    "before measuring"
                )
            ),
            MANUAL_GC,
            PINNED_THREADS,
        ),
        Cause.COPIES: (
            Remedy(
                text=(
                    "pinned host memory and non_blocking copies: faster, and overlapped with "
                    "kernels"
                )
            ),
            Remedy(text="offload less, or only what is copied while something else computes"),
            Remedy(text="keep on the device what is copied to the host and back each step"),
        ),
        Cause.DEVICE_COPIES: (
            Remedy(
                text="views in place of copies, and buffers that are filled where they are used"
            ),
            Remedy(
                text="a fused permute writes the rows in their order",
                megatron="--moe-permute-fusion",
                is_switch=True,
                mark=TrainerMark.FUSED_PERMUTE,
                for_experts=True,
                only_megatron=True,
            ),
        ),
        Cause.QUEUED: (
            Remedy(
                text=(
                    "look at what the kernel behind the longest gap waits for: an event of another "
                    "stream, a peer, or another process on the same device"
                )
            ),
            Remedy(
                text="let streams run side by side",
                megatron="CUDA_DEVICE_MAX_CONNECTIONS=32",
                is_environment=True,
                excludes="overlap of tensor parallelism, which wants 1 before Blackwell",
            ),
            Remedy(
                text="capture the static parts of a layer in graphs: no time between short kernels",
                change=add_graphs,
                megatron=GRAPH_FLAGS,
                is_switch=True,
                mark=TrainerMark.GRAPHS,
                excludes="full recompute; dynamic shapes inside the captured part",
            ),
        ),
        Cause.UNLISTED: (
            Remedy(
                text=(
                    "free what the named place keeps: a list or an attribute that holds tensors "
                    "beyond their use, or a copy beside the one that is used"
                )
            ),
        ),
        Cause.GROWING: (
            Remedy(
                text=(
                    "find what accumulates over steps: tensors that keep their graph, hooks that "
                    "are registered again, logs and buffers that are searched each step"
                )
            ),
            Remedy(
                text="compare traces of an early and of a late step",
                megatron="--profile --use-pytorch-profiler --profile-step-start --profile-step-end",
            ),
            MANUAL_GC,
        ),
        Cause.COLLECTIVES: (
            Remedy(
                text=(
                    "find what calls it: name the process group (group_desc), or record the trace "
                    "with its metadata (torch 2.4 or later)"
                )
            ),
            Remedy(text="fewer, larger calls, started before the compute that they can hide under"),
        ),
        Cause.RECOMPUTE: (
            Remedy(
                text="recompute the cheap modules only, where memory allows",
                change=set_recompute(Recompute.LAYERNORM, Recompute.MOE_ACT),
                megatron=f"{RECOMPUTE_FLAGS} moe_act layernorm",
            ),
            Remedy(
                text="recompute nothing",
                change=set_recompute(),
                megatron="no --recompute-granularity",
            ),
            Remedy(
                text="offload activations instead",
                change=offload_instead_of_recompute,
                megatron=OFFLOAD_FLAGS,
            ),
        ),
        Cause.IMBALANCE: (
            Remedy(
                text=(
                    "a larger auxiliary loss coefficient, or an expert bias, while the "
                    "loss does not suffer"
                ),
                changes_training=True,
                megatron="--moe-aux-loss-coeff --moe-router-enable-expert-bias",
            ),
            Remedy(
                text="a capacity for the hottest experts",
                changes_training=True,
                megatron="--moe-expert-capacity-factor --moe-pad-expert-input-to-capacity",
                excludes="dropless routing",
            ),
            Remedy(
                text="a smaller ep: one rank averages over more experts",
                change=scale_degree("ep", 0.5),
                megatron=LAYOUT_OPTIONS["ep"],
            ),
        ),
        Cause.FEW_ROWS: _BETTER_PRODUCTS,
        Cause.KERNEL_RATES: _BETTER_PRODUCTS,
    }
)
