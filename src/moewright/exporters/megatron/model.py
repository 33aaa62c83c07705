"""The model in Megatron-LM's flags: shape, attention, experts and what trains the router."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from moewright.spec.model import (
    AttentionKind,
    AttentionSpec,
    ModelSpec,
    MoeSpec,
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
    LossSpec,
    RouterAssignment,
    RouterForce,
    TrainerSpec,
    Workload,
)

Flag = tuple[str, ...]  # the flag, then its values

POSITIONS = {
    PositionKind.ROPE: "rope",
    PositionKind.LEARNED: "learned_absolute",
    PositionKind.NONE: "none",
}


def format_number(value: float) -> str:
    """Format a number so that the parser reads back the same float."""
    return f"{value:.12g}"


def model_flags(model: ModelSpec, workload: Workload) -> Iterator[Flag]:
    """Yield the flags of a model and of what its router is trained with."""
    yield from _shape_flags(model, workload)
    yield from trainer_flags(workload.trainer, is_gated=model.gated)
    yield from _attention_flags(model.attention, model.position)
    if model.moe:
        yield from _moe_flags(model.moe, model, workload)


def _shape_flags(model: ModelSpec, workload: Workload) -> Iterator[Flag]:
    yield "--num-layers", str(model.layers)
    yield "--hidden-size", str(model.hidden_size)
    if model.dense_ffn_size:
        yield "--ffn-hidden-size", str(model.dense_ffn_size)
    yield "--max-position-embeddings", str(max(model.max_position, workload.seq_len))
    yield "--tokenizer-type", "NullTokenizer"  # data is tokenized already
    yield "--vocab-size", str(model.vocab_size)
    yield "--padded-vocab-size", str(model.vocab_size)
    yield "--null-tokenizer-eod-id", str(model.vocab_size - 1)
    yield "--position-embedding-type", POSITIONS[model.position]
    yield "--normalization", "RMSNorm" if model.norm is NormKind.RMS else "LayerNorm"
    yield "--norm-epsilon", format_number(model.norm_eps)
    yield "--init-method-std", format_number(model.initializer_range)
    if model.gated:
        yield ("--swiglu",)
    if not model.mlp_bias:
        yield ("--disable-bias-linear",)
    if not model.tie_embeddings:
        yield ("--untie-embeddings-and-output-weights",)
    if model.mtp_layers:
        yield "--mtp-num-layers", str(model.mtp_layers)
        yield "--mtp-loss-scaling-factor", format_number(workload.loss.mtp_coeff)


def trainer_flags(trainer: TrainerSpec, *, is_gated: bool) -> Iterator[Flag]:
    """Yield the flags of kernels and dropout; what is Megatron-LM's own choice is left out."""
    yield "--attention-dropout", format_number(trainer.attention_dropout)
    yield "--hidden-dropout", format_number(trainer.hidden_dropout)
    if trainer.attention_backend is AttentionBackend.LOCAL:
        yield "--transformer-impl", "local"
    elif trainer.attention_backend is not AttentionBackend.FLASH:
        yield "--attention-backend", trainer.attention_backend.value
    if trainer.cross_entropy is not CrossEntropyKernel.FP32:
        is_in_place = trainer.cross_entropy is CrossEntropyKernel.IN_PLACE
        yield ("--cross-entropy-loss-fusion",)
        yield "--cross-entropy-fusion-impl", "te" if is_in_place else "native"
    activation = "--no-bias-swiglu-fusion" if is_gated else "--no-bias-gelu-fusion"
    switches = {
        Fusion.ACTIVATION: activation,
        Fusion.WEIGHT_GRAD: "--no-gradient-accumulation-fusion",
    }
    for fusion in trainer.unfused:
        yield (switches[fusion],)


def _attention_flags(attention: AttentionSpec, position: PositionKind) -> Iterator[Flag]:
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
        yield from _rope_flags(attention)


def _rope_flags(attention: AttentionSpec) -> Iterator[Flag]:
    rope = attention.rope
    yield "--rotary-base", str(int(rope.theta))
    if attention.kind is AttentionKind.MLA:
        yield "--rope-type", "yarn" if rope.scaling == "yarn" else "rope"
    if rope.scaling == "yarn":
        yield "--rotary-scaling-factor", format_number(rope.factor)
        yield "--mscale", format_number(rope.mscale)
        yield "--mscale-all-dim", format_number(rope.mscale_all_dim)
    elif rope.scaling == "llama3":
        yield ("--use-rope-scaling",)
        yield "--rope-scaling-factor", format_number(rope.factor)


def _moe_flags(moe: MoeSpec, model: ModelSpec, workload: Workload) -> Iterator[Flag]:
    yield "--num-experts", str(moe.experts)
    yield "--moe-ffn-hidden-size", str(moe.ffn_size)
    if not all(model.moe_layers):
        yield "--moe-layer-freq", _format_moe_layers(model.moe_layers)
    yield from _router_flags(moe.router)
    yield "--moe-router-dtype", workload.router.router_dtype.value
    if workload.router.jitter_eps:
        yield "--moe-input-jitter-eps", format_number(workload.router.jitter_eps)
    yield from _balance_flags(moe.router, workload)
    if moe.shared_ffn_size:
        yield "--moe-shared-expert-intermediate-size", str(moe.shared_ffn_size)
    if moe.latent_size:
        yield "--moe-latent-size", str(moe.latent_size)
    if moe.shared_gate:
        yield ("--moe-shared-expert-gate",)
    has_bf16 = workload.precision is Dtype.BF16 or workload.precision.is_narrow
    if has_bf16 and workload.trainer.expert_kernels is ExpertKernels.GROUPED:
        yield ("--moe-grouped-gemm",)  # the parser takes it with --bf16 only


def _format_moe_layers(moe_layers: tuple[bool, ...]) -> str:
    """Return the layers as ([0]*3+[1]*58)."""
    runs = (f"[{int(is_moe)}]*{len(list(run))}" for is_moe, run in groupby(moe_layers))
    return f"({'+'.join(runs)})"


def _router_flags(router: RouterSpec) -> Iterator[Flag]:
    yield "--moe-router-topk", str(router.top_k)
    yield "--moe-router-score-function", router.score.value
    # With renormalisation, softmax-then-top-k equals the default order.
    if router.score is ScoreFunction.SOFTMAX and not router.renormalize:
        yield ("--moe-router-pre-softmax",)
    if router.scaling_factor != 1:
        yield "--moe-router-topk-scaling-factor", format_number(router.scaling_factor)
    if router.groups > 1:
        yield "--moe-router-num-groups", str(router.groups)
        yield "--moe-router-group-topk", str(router.top_groups)


def _balance_flags(router: RouterSpec, workload: Workload) -> Iterator[Flag]:
    losses = balance_losses(workload.loss)
    is_sinkhorn = workload.router.assignment is RouterAssignment.SINKHORN
    if losses:
        yield "--moe-router-load-balancing-type", *(name for name, _ in losses)
        yield "--moe-aux-loss-coeff", *(format_number(coeff) for _, coeff in losses)
    else:
        yield "--moe-router-load-balancing-type", "sinkhorn" if is_sinkhorn else "none"
    if workload.loss.z_coeff:
        yield "--moe-z-loss-coeff", format_number(workload.loss.z_coeff)
    if router.selection_bias:
        yield ("--moe-router-enable-expert-bias",)
        yield "--moe-router-bias-update-rate", format_number(workload.router.bias_update_rate)
    if workload.router.force is RouterForce.BALANCED:
        yield ("--moe-router-force-load-balancing",)
    elif workload.router.force is RouterForce.SKEWED:
        yield "--moe-router-force-biased", format_number(workload.router.force_std)


def balance_losses(loss: LossSpec) -> tuple[tuple[str, float], ...]:
    """Return Megatron's names of the balance losses that are on, with their coefficients."""
    losses = (
        ("aux_loss", loss.aux_coeff),
        ("seq_aux_loss", loss.seq_aux_coeff),
        ("global_aux_loss", loss.global_aux_coeff),
    )
    return tuple((name, coeff) for name, coeff in losses if coeff > 0)
