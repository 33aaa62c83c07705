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
from moewright.spec.workload import Dtype, LossSpec, RouterAssignment, RouterForce, Workload

Flag = tuple[str, ...]  # the flag, then its values

POSITIONS = {
    PositionKind.ROPE: "rope",
    PositionKind.LEARNED: "learned_absolute",
    PositionKind.NONE: "none",
}


def format_number(value: float) -> str:
    """As the parser reads it back to the same float."""
    return f"{value:.12g}"


def model_flags(model: ModelSpec, workload: Workload) -> Iterator[Flag]:
    yield from _shape(model, workload)
    yield from _attention(model.attention, model.position)
    if model.moe:
        yield from _moe(model.moe, model, workload)


def _shape(model: ModelSpec, workload: Workload) -> Iterator[Flag]:
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
        yield "--mtp-loss-scaling-factor", format_number(workload.loss.mtp_coeff)


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
        yield "--rotary-scaling-factor", format_number(rope.factor)
        yield "--mscale", format_number(rope.mscale)
        yield "--mscale-all-dim", format_number(rope.mscale_all_dim)
    elif rope.scaling == "llama3":
        yield ("--use-rope-scaling",)
        yield "--rope-scaling-factor", format_number(rope.factor)


def _moe(moe: MoeSpec, model: ModelSpec, workload: Workload) -> Iterator[Flag]:
    yield "--num-experts", str(moe.experts)
    yield "--moe-ffn-hidden-size", str(moe.ffn_size)
    if not all(model.moe_layers):
        runs = ((int(has), len(list(run))) for has, run in groupby(model.moe_layers))
        yield "--moe-layer-freq", f"({'+'.join(f'[{has}]*{times}' for has, times in runs)})"
    yield from _router(moe.router)
    yield "--moe-router-dtype", workload.router.router_dtype.value
    if workload.router.jitter_eps:
        yield "--moe-input-jitter-eps", format_number(workload.router.jitter_eps)
    yield from _balance(moe.router, workload)
    if moe.shared_ffn_size:
        yield "--moe-shared-expert-intermediate-size", str(moe.shared_ffn_size)
    if moe.latent_size:
        yield "--moe-latent-size", str(moe.latent_size)
    if moe.shared_gate:
        yield ("--moe-shared-expert-gate",)
    if workload.precision is Dtype.BF16 or workload.precision.is_narrow:
        yield ("--moe-grouped-gemm",)  # the parser takes it with --bf16 only


def _router(router: RouterSpec) -> Iterator[Flag]:
    yield "--moe-router-topk", str(router.top_k)
    yield "--moe-router-score-function", router.score.value
    if router.score is ScoreFunction.SOFTMAX and not router.renormalize:
        yield (
            "--moe-router-pre-softmax",
        )  # with renormalisation softmax-then-top-k equals the default order
    if router.scaling_factor != 1:
        yield "--moe-router-topk-scaling-factor", format_number(router.scaling_factor)
    if router.groups > 1:
        yield "--moe-router-num-groups", str(router.groups)
        yield "--moe-router-group-topk", str(router.top_groups)


def _balance(router: RouterSpec, workload: Workload) -> Iterator[Flag]:
    losses = balance_losses(workload.loss)
    alone = "sinkhorn" if workload.router.assignment is RouterAssignment.SINKHORN else "none"
    yield "--moe-router-load-balancing-type", *(name for name, _ in losses or ((alone, 0.0),))
    if losses:
        yield "--moe-aux-loss-coeff", *(format_number(coeff) for _, coeff in losses)
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
    """Megatron's names of the balance losses that are on, with their coefficients."""
    known = (
        ("aux_loss", loss.aux_coeff),
        ("seq_aux_loss", loss.seq_aux_coeff),
        ("global_aux_loss", loss.global_aux_coeff),
    )
    return tuple((name, coeff) for name, coeff in known if coeff > 0)
