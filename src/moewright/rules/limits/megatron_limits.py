"""What Megatron-LM does not start at d98e8a64 (2026-08-22), or has no option for.

Its rules are those of its parser, configuration classes, model and schedules; `make megatron` holds
them against its own code. Limits of attention under context parallelism and of 8-bit products are
those of Transformer Engine (d0067d0d, 2026-08-22). A refusal names the nearest that starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from moewright.rules.job import Job
from moewright.rules.limits.engine_features import Feature, unsupported_features
from moewright.rules.limits.export_limits import missing_choices, unexported_training
from moewright.rules.optimizers import GRADIENT_DTYPES, MOMENT_DTYPES
from moewright.spec.choices import Payload
from moewright.spec.errors import Reason
from moewright.spec.hardware import DeviceKind, Hardware
from moewright.spec.layout import (
    LAYOUT_FIELDS,
    CapacityFill,
    CpComm,
    CudaGraphScope,
    DispatcherKind,
    Layout,
    Offload,
    Overlap,
    Recompute,
    Schedule,
    plain_schedule,
)
from moewright.spec.model import (
    Activation,
    AttentionKind,
    AttentionSpec,
    MixerKind,
    ModelSpec,
    MultiplierSpec,
    NormKind,
    PositionKind,
    QkNorm,
    RouterSpec,
    ScoreFunction,
)
from moewright.spec.workload import (
    AttentionBackend,
    CrossEntropyKernel,
    Dtype,
    ExpertKernels,
    Fusion,
    MatrixUpdate,
    RouterAssignment,
    Workload,
)

# Features that the engine lacks and the export writes, or refuses by a rule of its own.
_WRITTEN = frozenset(
    {
        "activation",
        "attention.qkv_bias",
        "attention.rope.interleaved",
        "attention.rope.scaling",
        "gated",
        "norm",
        "position",
    }
)
# The original positions, beta_fast and beta_slow of Megatron-LM's MLA configuration.
MLA_YARN_DEFAULTS = (4096, 32.0, 1.0)
# The original length that its llama3 scaling is written for.
LLAMA3_POSITIONS = 8192

_ONLY_DEFAULTS = tuple(
    (field, field.facts.megatron_instead) for field in LAYOUT_FIELDS if field.facts.megatron_instead
)


def megatron_refusals(job: Job, hardware: Hardware) -> tuple[Reason, ...]:
    """Return why Megatron-LM does not train a legal layout; () where it does."""
    return (*core_refusals(job, hardware), *_check_yarn(job.model.attention))


def core_refusals(job: Job, hardware: Hardware) -> tuple[Reason, ...]:
    """Return why Megatron Core does not train a legal layout, whatever options a script has."""
    return (
        *_check_features(job.model),
        *_check_attention(job.model),
        *provider_refusals(job, hardware),
    )


def provider_refusals(job: Job, hardware: Hardware) -> tuple[Reason, ...]:
    """Return why Megatron Core does not train a model whose attention and mixers are built for it.

    Bridge has code of its own for the models that it converts, such as norms over all heads.
    """
    return (*_check_parts(job), *broken_rules(job), *_check_libraries(job, hardware))


def missing_options(job: Job) -> Iterator[Reason]:
    """Yield what no option of Megatron-LM's says."""
    yield from _core_limits(job)
    yield from _check_yarn(job.model.attention)


def _core_limits(job: Job) -> Iterator[Reason]:
    """Yield what no configuration of Megatron Core says."""
    yield from _check_features(job.model)
    yield from _check_attention(job.model)
    yield from _check_parts(job)


def _check_parts(job: Job) -> Iterator[Reason]:
    """Yield what is against the biases, the router, the layout and the training of a job."""
    yield from _check_biases(job.model)
    if job.model.moe is not None:
        yield from _check_router(job.model.moe.router)
    yield from _check_layout(job.layout)
    yield from _check_training(job.workload, job.layout)


def broken_rules(job: Job) -> Iterator[Reason]:
    """Yield what Megatron-LM's own checks stop at, although its options can say it."""
    moe = job.model.moe
    has_biases = job.model.attention.out_bias
    if moe and has_biases and job.layout.etp > 1:
        yield _refusal("layout.etp", job.layout.etp, "does not split experts that have biases", 1)
    if moe and has_biases and moe.shared_ffn_size:
        rule = "does not combine biases with shared experts"
        yield _refusal("model.moe.shared_ffn_size", moe.shared_ffn_size, rule, 0)
    if moe and moe.router.selection_bias and moe.router.score is ScoreFunction.SOFTMAX:
        rule = "corrects the selection of sigmoid-like scores only"
        yield _refusal("model.moe.router.selection_bias", True, rule, False)
    if moe and moe.latent_size and Overlap.SHARED in job.layout.overlap:
        rule = "does not overlap shared experts with experts in a latent space"
        yield _refusal("layout.overlap", Overlap.SHARED, rule, "none")
    if (
        job.model.mtp_layers
        and job.model.position is PositionKind.ROPE
        and is_yarn(job.model.attention)
    ):
        rule = "predicts further tokens with plain rotary positions"
        yield _refusal("model.mtp_layers", job.model.mtp_layers, rule, 0)
    has_wide_moments = job.workload.optimizer.moment_dtypes == (Dtype.FP32, Dtype.FP32)
    is_precision_aware = Offload.OPTIMIZER in job.layout.offload or not has_wide_moments
    if job.workload.optimizer.matrix_update is MatrixUpdate.MUON:
        rule = "moves and narrows the moments of adam alone, and shards adam's weights alone"
        if is_precision_aware or job.layout.zero >= 2:
            yield _refusal("workload.matrix_update", MatrixUpdate.MUON, rule, MatrixUpdate.ADAMW)
    if not job.layout.zero and is_precision_aware:
        rule = "offloads and narrows moments only in its distributed optimizer"
        yield _refusal("layout.zero", 0, rule, 1)
    yield from paired_pass_limits(job)
    yield from _check_graphs(job.layout)
    yield from _check_rank_capacity(job.layout)
    yield from _check_trainer(job)


def paired_pass_limits(job: Job) -> Iterator[Reason]:
    """Yield why no forward runs beside the backward of another micro-batch, where one is to."""
    layout = job.layout
    if Overlap.EP not in layout.overlap:
        return
    replayed = [item for item in layout.recompute if item in (Recompute.FULL, Recompute.MOE)]
    rules = (
        (bool(replayed), f"ep cannot stand with recompute={''.join(replayed[:1])}"),
        (job.workload.precision is Dtype.FP32, "ep needs bf16 or fp16 compute"),
        (job.model.mtp_layers > 1, "ep takes at most one MTP layer"),
    )
    others = (item for item in layout.overlap if item not in (Overlap.EP, Overlap.WGRAD))
    nearest = "+".join(others) or "none"
    for is_broken, rule in rules:
        if is_broken:
            rule = f"overlaps no two micro-batches here: {rule}"
            yield _refusal("layout.overlap", "+".join(layout.overlap), rule, nearest)


def is_yarn(attention: AttentionSpec) -> bool:
    """Whether positions are stretched by YaRN outside latent attention."""
    return attention.rope.scaling == "yarn" and attention.kind is not AttentionKind.MLA


def _refusal(field: str, value: object, rule: str, nearest: object = "") -> Reason:
    return Reason(field=field, value=str(value), rule=f"Megatron-LM {rule}", nearest=str(nearest))


def _check_biases(model: ModelSpec) -> Iterator[Reason]:
    """Yield what does not go with one switch for the biases of all linear layers."""
    has_biases = model.attention.out_bias
    # Where all layers have experts, biases of dense MLPs are nobody's.
    if model.moe_layer_count < model.layers and model.mlp_bias != has_biases:
        rule = "has one switch for the biases of the MLP and of the attention output"
        yield _refusal("model.mlp_bias", model.mlp_bias, rule, has_biases)
    if has_biases and not model.attention.qkv_bias:
        rule = "adds it whenever linear layers have a bias"
        yield _refusal("model.attention.qkv_bias", False, rule, True)
    if model.moe is None:
        return
    if model.moe.expert_bias != has_biases:
        rule = "has one switch for the biases of experts and of the attention output"
        yield _refusal("model.moe.expert_bias", model.moe.expert_bias, rule, has_biases)
    if model.moe.router.logit_bias != has_biases:
        rule = "has one switch for the biases of the router and of the attention output"
        yield _refusal("model.moe.router.logit_bias", not has_biases, rule, has_biases)


def _check_features(model: ModelSpec) -> Iterator[Reason]:
    """Yield the features of newer architectures, for which the export writes no flags."""
    rule = "export writes no flags for it"
    attention = model.attention
    is_local = MixerKind.LOCAL_ATTENTION in model.mixers
    is_rotated_norm = attention.qk_norm in (QkNorm.PER_HEAD_ROTATED, QkNorm.UNWEIGHTED)
    scales_input = model.moe is not None and model.moe.router.scales_input
    is_latent = attention.kind is AttentionKind.MLA
    top_k = 0
    if attention.indexer and is_latent:
        top_k = attention.indexer.top_k
    is_squared = model.activation is Activation.RELU_SQUARED
    is_compressed = attention.kind is AttentionKind.COMPRESSED
    hash_layers = 0
    if model.moe:
        hash_layers = model.moe.router.hash_layers
    streams = model.residual_streams
    limit = model.activation_limit
    features: tuple[Feature, ...] = (
        ("activation", model.activation, is_squared, Activation.SILU),
        ("attention.qk_norm", attention.qk_norm, is_rotated_norm, QkNorm.PER_HEAD),
        ("attention.chunked", True, attention.chunked, "false"),
        ("attention.indexer.top_k", top_k, top_k > 0, "none"),
        ("mixers", MixerKind.LOCAL_ATTENTION, is_local, "attention"),
        ("mixers", MixerKind.RECURRENT, model.recurrent is not None, "attention"),
        ("attention.output_gate", True, attention.output_gate, "false"),
        ("zero_centered_norms", True, model.zero_centered_norms, "false"),
        ("attention.kind", attention.kind, is_compressed, AttentionKind.GQA),
        ("residual_streams", streams, streams > 1, "1"),
        ("activation_limit", limit, limit > 0, "0"),
        ("mtp_shared", True, model.mtp_shared and model.mtp_layers > 0, "false"),
        ("moe.router.hash_layers", hash_layers, hash_layers > 0, "0"),
        ("rope_layers", "some", not all(model.rope_layers), "all"),
        ("multipliers", "other than 1", model.multipliers != MultiplierSpec(), "1"),
        ("moe.router.scales_input", True, scales_input, "false"),
        ("norm_placement", model.norm_placement, model.norm_placement.is_after, "before"),
    )
    others = (feature for feature in unsupported_features(model) if feature[0] not in _WRITTEN)
    for field, value, is_new, nearest in (*features, *others):
        if is_new:
            yield _refusal(f"model.{field}", value, rule, nearest)


def _check_attention(model: ModelSpec) -> Iterator[Reason]:
    attention = model.attention
    if attention.qk_norm is QkNorm.FULL:
        rule = "normalises queries and keys per head"
        yield _refusal("model.attention.qk_norm", attention.qk_norm, rule, QkNorm.PER_HEAD)
    if model.position is PositionKind.ALIBI:
        yield _refusal("model.position", model.position, "has no linear biases", PositionKind.ROPE)
    if model.position is PositionKind.ROPE:
        yield from _check_rope(attention)


def _check_rope(attention: AttentionSpec) -> Iterator[Reason]:
    rope = attention.rope
    is_mla = attention.kind is AttentionKind.MLA
    if is_mla and not rope.interleaved:
        rule = "rotates neighbouring elements in latent attention"
        yield _refusal("model.attention.rope.interleaved", False, rule, True)
    if rope.theta != int(rope.theta):
        rule = "needs a rotary base that is a whole number"
        yield _refusal("model.attention.rope.theta", rope.theta, rule, round(rope.theta))
    if rope.rotary_share != 1 and (is_mla or rope.scaling == "yarn"):
        rule = "rotates whole heads in latent attention and under yarn"
        yield _refusal("model.attention.rope.rotary_share", rope.rotary_share, rule, 1)
    field = "model.attention.rope.scaling"
    if rope.scaling == "llama3" and not is_mla:
        # 0 is a config that does not say it.
        if rope.original_max_position not in (0, LLAMA3_POSITIONS):
            field = "model.attention.rope.original_max_position"
            rule = "scales llama3 positions from a fixed length"
            yield _refusal(field, rope.original_max_position, rule, LLAMA3_POSITIONS)
    elif rope.scaling not in ("default", "yarn"):
        rule = "export has no such scaling for this attention"
        yield _refusal(field, rope.scaling, rule, "default")


def _check_yarn(attention: AttentionSpec) -> Iterator[Reason]:
    """Yield what Megatron-LM has no options for, although its configuration has fields."""
    rope = attention.rope
    settings = (rope.original_max_position, rope.beta_fast, rope.beta_slow)
    is_mla = attention.kind is AttentionKind.MLA
    if rope.scaling == "yarn" and is_mla and settings != MLA_YARN_DEFAULTS:
        rule = "fixes original positions, beta_fast and beta_slow of MLA's yarn"
        nearest = f"yarn {MLA_YARN_DEFAULTS}"
        yield _refusal("model.attention.rope.scaling", f"yarn {settings}", rule, nearest)


def _check_router(router: RouterSpec) -> Iterator[Reason]:
    if router.groups > 1 and router.scores_per_group != max(1, router.top_k // router.top_groups):
        nearest = router.top_k // router.top_groups
        rule = f"rates a group by its top_k // top_groups = {nearest} highest scores"
        yield _refusal("model.moe.router.group_scores", router.scores_per_group, rule, nearest)
    is_softmax = router.score is ScoreFunction.SOFTMAX
    if not is_softmax and not router.renormalize and router.top_k > 1:
        rule = f"always renormalises {router.score} scores of more than one expert"
        yield _refusal("model.moe.router.renormalize", False, rule, True)


def _check_layout(layout: Layout) -> Iterator[Reason]:
    if layout.schedule not in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED):
        nearest = plain_schedule(layout.vpp)
        yield _refusal("layout.schedule", layout.schedule, "has 1f1b and interleaved", nearest)
    if 0 < layout.offload_chunks < layout.vpp:
        rule = "offloads the same modules of every chunk"
        yield _refusal("layout.offload_chunks", layout.offload_chunks, rule, 0)
    if not layout.dispatcher.facts.megatron:
        nearest_kind = _find_exported(layout.dispatcher.facts.payload)
        rule = "de-duplicates tokens in DeepEP and HybridEP only"
        yield _refusal("layout.dispatcher", layout.dispatcher, rule, nearest_kind)
    if layout.shard and layout.zero != 1:
        yield _refusal("layout.shard", layout.shard, "export has no hybrid sharding", "all ranks")
    for field, value, rule, default in missing_choices(layout, _ONLY_DEFAULTS):
        yield _refusal(f"layout.{field}", value, rule, default)
    if Recompute.LOSS in layout.recompute:
        others = "+".join(item for item in layout.recompute if item is not Recompute.LOSS)
        rule = "export has no loss that computes the logits in pieces"
        yield _refusal("layout.recompute", Recompute.LOSS, rule, others or "none")


def _find_exported(payload: Payload) -> DispatcherKind:
    """Return the first dispatcher that Megatron-LM has and that sends this."""
    return next(
        kind for kind in DispatcherKind if kind.facts.payload is payload and kind.facts.megatron
    )


def _check_training(workload: Workload, layout: Layout) -> Iterator[Reason]:
    loss = workload.loss
    if workload.router.assignment is RouterAssignment.SINKHORN:
        iterations = workload.router.sinkhorn_iterations
        if iterations:
            rule = "scales until it converges"
            yield _refusal("workload.sinkhorn_iterations", iterations, rule, 0)
        if loss.aux_coeff or loss.seq_aux_coeff or loss.global_aux_coeff:
            field = "workload.assignment"
            rule = "has it instead of balance losses"
            yield _refusal(field, RouterAssignment.SINKHORN, rule, RouterAssignment.TOP_K)
        if layout.capacity:
            yield _refusal("layout.capacity", layout.capacity, "drops no rows under sinkhorn", 0)
    for field, value, rule, nearest in unexported_training(workload):
        yield _refusal(f"workload.{field}", value, rule, nearest)
    if workload.weights:
        rule = "starts from its own checkpoints; convert them first"
        yield _refusal("workload.weights", workload.weights, rule, "none")
    for dtype in workload.optimizer.moment_dtypes:
        if dtype not in (*MOMENT_DTYPES, Dtype.FP16):
            yield _refusal("workload.moment_dtype", dtype, "has no such moments", Dtype.FP8)
    if workload.grad_dtype not in GRADIENT_DTYPES:
        rule = "reduces gradients in fp32 or bf16"
        yield _refusal("workload.grad_dtype", workload.grad_dtype, rule, Dtype.FP32)
    is_full = workload.precision in (Dtype.FP32, Dtype.FP16)
    if workload.grad_dtype is Dtype.BF16 and is_full:
        rule = "reduces in bf16 only in bf16 training"
        yield _refusal("workload.grad_dtype", Dtype.BF16, rule, Dtype.FP32)


def _check_graphs(layout: Layout) -> Iterator[Reason]:
    is_synchronous = (
        layout.dispatcher.facts.payload is Payload.ROWS
        and layout.capacity
        and layout.capacity_fill is not CapacityFill.PADDED
    )
    if CudaGraphScope.MOE_PREPROCESS in layout.graphs and is_synchronous:
        rule = "captures moe_preprocess only with padded capacities"
        yield _refusal("layout.capacity_fill", layout.capacity_fill, rule, CapacityFill.PADDED)


def _check_rank_capacity(layout: Layout) -> Iterator[Reason]:
    overlaps_expert_input = Overlap.EP in layout.overlap and Offload.EXPERT_FC1 in layout.offload
    facts = layout.dispatcher.facts
    if facts.frees_received_rows and overlaps_expert_input:
        rule = f"frees the rows of {facts.title} that expert_fc1 would offload, with overlap=ep"
        yield _refusal("layout.offload", "+".join(layout.offload), rule, "without expert_fc1")
    if layout.rank_capacity and not facts.has_static_shapes:
        rule = "has a rank capacity only with hybridep"
        yield _refusal("layout.rank_capacity", layout.rank_capacity, rule, 0)


def _check_trainer(job: Job) -> Iterator[Reason]:
    """Yield what does not go with the chosen kernels and dropout."""
    trainer = job.workload.trainer
    if trainer.cross_entropy is CrossEntropyKernel.IN_PLACE:
        rule = "has switched this loss of Transformer Engine's off"
        yield _refusal("workload.cross_entropy", trainer.cross_entropy, rule, "fp32")
    by_product = (*trainer.bf16_products, *trainer.narrowed)
    if by_product:
        rule = "takes precisions by product from a file of recipes, which is not written"
        field = "bf16_products" if trainer.bf16_products else "narrowed"
        yield _refusal(f"workload.{field}", "+".join(by_product), rule, "none")
    if Fusion.EXPERT_BIAS in trainer.unfused:
        rule = "sums the gradients of experts' biases in its own kernels"
        yield _refusal("workload.unfused", Fusion.EXPERT_BIAS, rule, "none")
    if trainer.attention_backend is AttentionBackend.LOCAL:
        yield from _check_local_layers(job.model, job.layout)
    if (
        trainer.expert_kernels is ExpertKernels.SEQUENTIAL
        and Recompute.MOE_ACT in job.layout.recompute
    ):
        rule = "recomputes moe_act only of grouped experts"
        yield _refusal("layout.recompute", Recompute.MOE_ACT, rule, Recompute.MOE)
    delays_wgrad = Overlap.WGRAD in job.layout.overlap and Overlap.GRAD in job.layout.overlap
    if (
        Fusion.WEIGHT_GRAD in trainer.unfused
        and delays_wgrad
        and CudaGraphScope.ATTN in job.layout.graphs
    ):
        rule = "captures delayed weight gradients where their sum is fused"
        yield _refusal("layout.graphs", CudaGraphScope.ATTN, rule, "none")
    has_attention_graph = {CudaGraphScope.ATTN, CudaGraphScope.FULL} & set(job.layout.graphs)
    if (
        trainer.attention_dropout
        and has_attention_graph
        and Recompute.CORE_ATTN in job.layout.recompute
    ):
        rule = "replays no attention with dropout inside a graph"
        yield _refusal("layout.recompute", Recompute.CORE_ATTN, rule, "none")


def _check_local_layers(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    """Yield what Megatron-LM's own layers have not, without Transformer Engine."""
    if model.attention.kind is AttentionKind.MLA:
        rule = "has latent attention only in Transformer Engine's layers"
        yield _refusal("workload.attention_backend", AttentionBackend.LOCAL, rule, "flash")
    if layout.cp > 1:
        rule = "has context parallelism only in Transformer Engine's layers"
        yield _refusal("layout.cp", layout.cp, rule, 1)
    if model.norm is NormKind.RMS:
        rule = "has an RMS norm before the head only in Transformer Engine's layers"
        yield _refusal("workload.attention_backend", AttentionBackend.LOCAL, rule, "flash")
    if Overlap.WGRAD in layout.overlap:
        rule = "delays weight gradients only in Transformer Engine's layers"
        yield _refusal("layout.overlap", Overlap.WGRAD, rule, "none")
    if any(module is not Offload.OPTIMIZER for module in layout.offload):
        rule = "offloads activations only of Transformer Engine's layers"
        yield _refusal("layout.offload", "+".join(layout.offload), rule, "none")


def _check_libraries(job: Job, hardware: Hardware) -> Iterator[Reason]:
    """Yield what stops in Transformer Engine, or needs another device."""
    device = hardware.device
    if not device.kind.runs_cuda:
        rule = "trains on CUDA and ROCm devices"
        yield _refusal("hardware.device.kind", device.kind, rule, DeviceKind.CUDA)
    if job.workload.precision.is_narrow and not any(peak.dtype.is_narrow for peak in device.peaks):
        rule = f"needs 8-bit tensor cores, which {device.name} has not"
        yield _refusal("workload.precision", job.workload.precision, rule, Dtype.BF16)
    attention = job.model.attention
    if job.layout.cp == 1:
        return
    if attention.sinks and job.layout.cp_comm is not CpComm.A2A:
        rule = "supports only a2a context parallelism where attention has sinks"
        yield _refusal("layout.cp_comm", job.layout.cp_comm, rule, CpComm.A2A)
    elif attention.sliding_window and job.layout.cp_comm not in (CpComm.A2A, CpComm.ALL_GATHER):
        rule = "does not support sliding windows in ring attention"
        yield _refusal("layout.cp_comm", job.layout.cp_comm, rule, CpComm.A2A)
