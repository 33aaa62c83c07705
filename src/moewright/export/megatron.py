"""A plan as a Megatron-LM launch script. Flags are those of Megatron-LM's own parser at d98e8a64 (2026-08-22)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from shlex import quote

from moewright.codec import layout_text
from moewright.export.megatron_limits import refusals
from moewright.export.torchrun import launcher
from moewright.rules.context import factors
from moewright.rules.stages import chunks
from moewright.spec.errors import BadInput
from moewright.spec.layout import CpComm, Dispatcher, Graphs, Layout, Offload, Overlap, Recompute
from moewright.spec.model import (
    AttentionKind,
    AttentionSpec,
    ModelSpec,
    MoeSpec,
    NormKind,
    PositionKind,
    QkNorm,
    ScoreFunction,
)
from moewright.spec.plan import Plan
from moewright.spec.workload import Documents, Dtype, Workload

Flag = tuple[str, ...]  # the flag, then its values

DISPATCHERS = {
    Dispatcher.ALL_GATHER: (("--moe-token-dispatcher-type", "allgather"),),
    Dispatcher.ALL_TO_ALL: (("--moe-token-dispatcher-type", "alltoall"),),
    Dispatcher.DEEPEP: (("--moe-token-dispatcher-type", "flex"), ("--moe-flex-dispatcher-backend", "deepep")),
    Dispatcher.HYBRIDEP: (("--moe-token-dispatcher-type", "flex"), ("--moe-flex-dispatcher-backend", "hybridep")),
}
POSITIONS = {PositionKind.ROPE: "rope", PositionKind.LEARNED: "learned_absolute", PositionKind.NONE: "none"}


def megatron(plan: Plan) -> str:
    """A shell script that starts pretrain_gpt.py on every node. Raises BadInput for what Megatron-LM cannot say."""
    lines = [f"{name} {' '.join(map(quote, values))}".rstrip() for name, *values in megatron_flags(plan)]
    environment = f"export CUDA_DEVICE_MAX_CONNECTIONS={_connections(plan.layout)}"
    head = (
        "#!/bin/sh",
        f"# {plan.model.name or 'model'}, {layout_text(plan.layout)}, plan {plan.fingerprint}".replace("\n", " "),
        environment,
    )
    return "\n".join((*head, " \\\n  ".join((f"{launcher(plan)} pretrain_gpt.py", *lines)))) + "\n"


def megatron_flags(plan: Plan) -> tuple[Flag, ...]:
    """The flags of pretrain_gpt.py that say this plan; nothing is left to a default that depends on another flag.

    Raises BadInput with a Reason for each thing that Megatron-LM cannot say.
    """
    reasons = refusals(plan)
    if reasons:
        raise BadInput(*reasons)
    model, workload, layout = plan.model, plan.workload, plan.layout
    return (
        *_model(model, workload),
        *_attention(model.attention, model.position),
        *(_moe(model.moe, model, workload) if model.moe else ()),
        *_degrees(model, layout),
        *_memory(layout),
        *_overlap(layout),
        *_training(workload, layout),
        *_optimizer(workload, layout),
        *_data(workload),
    )


def _connections(layout: Layout) -> int:
    """Hardware queues: sequence-parallel overlap relies on 1 up to Hopper; FSDP and expert overlap need more."""
    return 32 if layout.zero == 3 or Overlap.EP in layout.overlap else 1


def _number(value: float) -> str:
    return f"{value:.12g}"


def _model(model: ModelSpec, workload: Workload) -> Iterator[Flag]:
    yield "--num-layers", str(model.layers)
    yield "--hidden-size", str(model.hidden_size)
    if model.dense_ffn_size:
        yield "--ffn-hidden-size", str(model.dense_ffn_size)
    yield "--max-position-embeddings", str(max(model.max_position, workload.seq_len))
    yield "--tokenizer-type", "NullTokenizer"
    yield "--vocab-size", str(model.vocab_size)
    yield "--padded-vocab-size", str(model.vocab_size)
    yield "--position-embedding-type", POSITIONS[model.position]
    yield "--normalization", "RMSNorm" if model.norm is NormKind.RMS else "LayerNorm"
    yield "--norm-epsilon", _number(model.norm_eps)
    yield "--init-method-std", _number(model.initializer_range)
    yield "--attention-dropout", "0"
    yield "--hidden-dropout", "0"
    if model.gated:
        yield ("--swiglu",)
    if not model.mlp_bias:
        yield ("--disable-bias-linear",)
    if not model.tie_embeddings:
        yield ("--untie-embeddings-and-output-weights",)
    if model.mtp_layers:
        yield "--mtp-num-layers", str(model.mtp_layers)


def _attention(attention: AttentionSpec, position: PositionKind) -> Iterator[Flag]:
    yield "--num-attention-heads", str(attention.heads)
    if attention.kind is AttentionKind.MLA:
        yield ("--multi-latent-attention",)
        if attention.q_lora_rank:
            yield "--q-lora-rank", str(attention.q_lora_rank)
        yield "--kv-lora-rank", str(attention.kv_lora_rank)
        yield "--qk-head-dim", str(attention.qk_nope_head_dim)
        yield "--qk-pos-emb-head-dim", str(attention.qk_rope_head_dim)
        yield "--v-head-dim", str(attention.v_head_dim)
    else:
        yield "--kv-channels", str(attention.head_dim)
        if attention.kv_heads != attention.heads:
            yield ("--group-query-attention",)
            yield "--num-query-groups", str(attention.kv_heads)
        if attention.rope.interleaved:
            yield ("--rotary-interleaved",)
    if attention.qkv_bias:
        yield ("--add-qkv-bias",)
    if attention.qk_norm is QkNorm.PER_HEAD or attention.kind is AttentionKind.MLA:
        yield ("--qk-layernorm",)
    if position is PositionKind.ROPE:
        yield from _rope(attention)


def _rope(attention: AttentionSpec) -> Iterator[Flag]:
    rope = attention.rope
    yield "--rotary-base", str(int(rope.theta))
    if attention.kind is AttentionKind.MLA:
        yield "--rope-type", "yarn" if rope.scaling == "yarn" else "rope"
    if rope.scaling == "yarn":
        yield "--rotary-scaling-factor", _number(rope.factor)
        yield "--mscale", _number(rope.mscale)
        yield "--mscale-all-dim", _number(rope.mscale_all_dim)
    elif rope.scaling == "llama3":
        yield ("--use-rope-scaling",)
        yield "--rope-scaling-factor", _number(rope.factor)


def _moe(moe: MoeSpec, model: ModelSpec, workload: Workload) -> Iterator[Flag]:
    router = moe.router
    yield "--num-experts", str(moe.experts)
    yield "--moe-ffn-hidden-size", str(moe.ffn_size)
    if not all(model.moe_layers):
        runs = ((int(has), len(list(run))) for has, run in groupby(model.moe_layers))
        yield "--moe-layer-freq", f"({'+'.join(f'[{has}]*{times}' for has, times in runs)})"
    yield "--moe-router-topk", str(router.top_k)
    yield "--moe-router-score-function", router.score.value
    if router.score is ScoreFunction.SOFTMAX and not router.renormalize:
        yield ("--moe-router-pre-softmax",)  # with renormalisation softmax-then-top-k equals the default order
    if router.scaling_factor != 1:
        yield "--moe-router-topk-scaling-factor", _number(router.scaling_factor)
    if router.groups > 1:
        yield "--moe-router-num-groups", str(router.groups)
        yield "--moe-router-group-topk", str(router.top_groups)
    if router.selection_bias:
        yield ("--moe-router-enable-expert-bias",)
    yield "--moe-router-dtype", "fp32"
    balancing = workload.loss.aux_coeff > 0
    yield "--moe-router-load-balancing-type", "aux_loss" if balancing else "none"
    if balancing:
        yield "--moe-aux-loss-coeff", _number(workload.loss.aux_coeff)
    if workload.loss.z_coeff:
        yield "--moe-z-loss-coeff", _number(workload.loss.z_coeff)
    if moe.shared_ffn_size:
        yield "--moe-shared-expert-intermediate-size", str(moe.shared_ffn_size)
    if moe.shared_gate:
        yield ("--moe-shared-expert-gate",)
    if workload.precision is Dtype.BF16:
        yield ("--moe-grouped-gemm",)  # the parser takes it for bf16 only


def _degrees(model: ModelSpec, layout: Layout) -> Iterator[Flag]:
    yield "--tensor-model-parallel-size", str(layout.tp)
    if layout.sp:
        yield ("--sequence-parallel",)
    yield "--context-parallel-size", str(layout.cp)
    if layout.cp > 1:
        yield "--cp-comm-type", layout.cp_comm.value
    if layout.cp_comm is CpComm.A2A_P2P:
        yield "--hierarchical-context-parallel-sizes", *map(str, factors(layout))
    yield "--pipeline-model-parallel-size", str(layout.pp)
    if layout.stages:
        yield "--pipeline-model-parallel-layout", layout.stages
    elif layout.pp > 1:
        if layout.vpp > 1:
            yield "--num-virtual-stages-per-pipeline-rank", str(layout.vpp)
        if len({len(chunk.layers) for chunk in chunks(model, layout)}) > 1:  # embedding and loss count as layers
            yield ("--account-for-embedding-in-pipeline-split",)
            yield ("--account-for-loss-in-pipeline-split",)
    if layout.vpp > 1 and layout.vpp_group:
        yield "--microbatch-group-size-per-virtual-pipeline-stage", str(layout.vpp_group)
    if model.moe:
        yield "--expert-model-parallel-size", str(layout.ep)
        yield "--expert-tensor-parallel-size", str(layout.etp)  # always: left out, it would be tp
        yield from DISPATCHERS[layout.dispatcher]
        if layout.capacity:
            yield "--moe-expert-capacity-factor", _number(layout.capacity)


def _memory(layout: Layout) -> Iterator[Flag]:
    if layout.zero:
        yield ("--use-distributed-optimizer",)
    if layout.zero == 3:
        yield ("--use-megatron-fsdp",)
        yield "--data-parallel-sharding-strategy", "optim_grads_params"
        yield "--ckpt-format", "fsdp_dtensor"
    if Recompute.FULL in layout.recompute:
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "block" if layout.recompute_block else "uniform"
        yield "--recompute-num-layers", str(layout.recompute_block or layout.recompute_span)
    elif layout.recompute:
        yield "--recompute-granularity", "selective"
        yield ("--recompute-modules", *(module.value for module in layout.recompute))
    activations = [each.value for each in layout.offload if each is not Offload.OPTIMIZER]
    if activations:
        yield ("--fine-grained-activation-offloading",)
        yield ("--offload-modules", *activations)


def _overlap(layout: Layout) -> Iterator[Flag]:
    flags = {
        Overlap.GRAD: "--overlap-grad-reduce",
        Overlap.PARAM: "--overlap-param-gather",
        Overlap.TP: "--tp-comm-overlap",
        Overlap.EP: "--overlap-moe-expert-parallel-comm",
    }
    for each in layout.overlap:
        if each in flags:
            yield (flags[each],)
    if layout.vpp > 1 and Overlap.P2P not in layout.overlap:
        yield ("--no-overlap-p2p-communication",)  # on by itself with virtual stages
    if Graphs.FULL in layout.graphs:
        yield "--cuda-graph-impl", "full_iteration"
        yield ("--no-check-for-nan-in-loss-and-grad",)
    elif layout.graphs:
        yield "--cuda-graph-impl", "transformer_engine"
        yield ("--cuda-graph-modules", *(part.value for part in layout.graphs))


def _training(workload: Workload, layout: Layout) -> Iterator[Flag]:
    yield "--seq-length", str(workload.seq_len)
    yield "--micro-batch-size", str(layout.mbs)
    yield "--global-batch-size", str(workload.global_batch)
    if workload.steps:
        yield "--train-iters", str(workload.steps)
    yield "--seed", str(workload.seed)
    if workload.precision is not Dtype.FP32:
        yield (f"--{workload.precision}",)
    if workload.grad_dtype is Dtype.BF16:
        yield ("--grad-reduce-in-bf16",)
    elif workload.precision is Dtype.BF16:
        yield ("--accumulate-allreduce-grads-in-fp32",)
    if workload.checkpoint.every_steps:
        yield "--save", "checkpoints"
        yield "--load", "checkpoints"
        yield "--save-interval", str(workload.checkpoint.every_steps)
    yield "--log-interval", "1"
    yield ("--log-throughput",)


def _optimizer(workload: Workload, layout: Layout) -> Iterator[Flag]:
    optimizer = workload.optimizer
    offloaded, moments = Offload.OPTIMIZER in layout.offload, optimizer.moment_dtype
    if offloaded:
        yield ("--optimizer-cpu-offload",)
        if layout.offload_fraction < 1:
            yield "--optimizer-offload-fraction", _number(layout.offload_fraction)
    if offloaded or moments is not Dtype.FP32:
        yield ("--use-precision-aware-optimizer",)
        yield "--exp-avg-dtype", moments.value
        yield "--exp-avg-sq-dtype", moments.value
    yield "--lr", _number(optimizer.lr)
    yield "--min-lr", _number(optimizer.lr * optimizer.min_lr_fraction)
    yield "--lr-decay-style", "cosine"
    yield "--lr-warmup-iters", str(optimizer.warmup_steps)
    if optimizer.decay_steps or workload.steps:
        yield "--lr-decay-iters", str(optimizer.decay_steps or workload.steps)
    yield "--adam-beta1", _number(optimizer.beta1)
    yield "--adam-beta2", _number(optimizer.beta2)
    yield "--adam-eps", _number(optimizer.eps)
    yield "--weight-decay", _number(optimizer.weight_decay)
    yield "--clip-grad", _number(optimizer.clip_norm)
    yield "--ddp-bucket-size", str(optimizer.bucket_elements)


def _data(workload: Workload) -> Iterator[Flag]:
    data = workload.data
    if data.train and data.heldout:
        yield "--train-data-path", data.train
        yield "--valid-data-path", data.heldout
    elif data.train:
        yield "--data-path", data.train
        yield "--split", "1,0,0"
    else:
        yield ("--mock-data",)
    if data.documents is not Documents.JOINED:
        yield ("--reset-attention-mask",)
        yield ("--eod-mask-loss",)
    if data.documents is Documents.RESTARTED:
        yield ("--reset-position-ids",)
    if data.heldout and workload.eval_every_steps:
        yield "--eval-interval", str(workload.eval_every_steps)
    yield "--eval-iters", str(workload.eval_batches if data.heldout else 0)
