"""The model in Megatron-LM's flags: shape, attention, experts and what trains the router."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from moewright.exporters.torchrun import NO_FILES, RunFiles
from moewright.families.table import find_family
from moewright.rules.limits.megatron_limits import is_yarn
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


def model_flags(model: ModelSpec, workload: Workload, files: RunFiles = NO_FILES) -> Iterator[Flag]:
    """Yield the flags of a model, its tokenizer and of what its router is trained with."""
    yield from _shape_flags(model, workload, files)
    yield from trainer_flags(workload.trainer, has_swiglu=has_swiglu(model))
    yield from _attention_flags(model)
    yield from _window_flags(model)
    if model.moe:
        yield from _moe_flags(model.moe, model, workload)


def _shape_flags(model: ModelSpec, workload: Workload, files: RunFiles) -> Iterator[Flag]:
    yield "--num-layers", str(model.layers)
    yield "--hidden-size", str(model.hidden_size)
    if model.dense_ffn_size:
        yield "--ffn-hidden-size", str(model.dense_ffn_size)
    # Megatron-LM asserts that no sequence is longer.
    yield "--max-position-embeddings", str(max(model.max_position, workload.seq_len))
    if files.tokenizer:
        yield "--tokenizer-type", "HuggingFaceTokenizer"
        yield "--tokenizer-model", files.tokenizer
    else:  # data is tokenized already
        yield "--tokenizer-type", "NullTokenizer"
        yield "--vocab-size", str(model.vocab_size)
    # Without it Megatron-LM pads, which would be another model.
    yield "--padded-vocab-size", str(model.vocab_size)
    if not files.tokenizer:
        yield "--null-tokenizer-eod-id", str(model.vocab_size - 1)
    uses_yarn = model.position is PositionKind.ROPE and is_yarn(model.attention)
    yield "--position-embedding-type", "yarn" if uses_yarn else POSITIONS[model.position]
    yield "--normalization", "RMSNorm" if model.norm is NormKind.RMS else "LayerNorm"
    yield "--norm-epsilon", format_number(model.norm_eps)
    yield "--init-method-std", format_number(model.initializer_range)
    yield from _activation_flags(model)
    if not model.attention.out_bias:
        yield ("--disable-bias-linear",)
    elif model.moe:
        yield ("--no-bias-dropout-fusion",)  # grouped experts with biases have none
    if not model.tie_embeddings:
        yield ("--untie-embeddings-and-output-weights",)
    if model.mtp_layers:
        yield "--mtp-num-layers", str(model.mtp_layers)
        yield "--mtp-loss-scaling-factor", format_number(workload.loss.mtp_coeff)


def trainer_flags(trainer: TrainerSpec, *, has_swiglu: bool) -> Iterator[Flag]:
    """Yield the flags of kernels and dropout; what is Megatron-LM's own choice is left out."""
    yield "--attention-dropout", format_number(trainer.attention_dropout)
    yield "--hidden-dropout", format_number(trainer.hidden_dropout)
    if trainer.attention_backend is AttentionBackend.LOCAL:
        yield "--transformer-impl", "local"
        yield ("--no-persist-layer-norm",)  # its norms are torch's, which have it not
    elif trainer.attention_backend is not AttentionBackend.FLASH:
        yield "--attention-backend", trainer.attention_backend.value
    if trainer.cross_entropy is not CrossEntropyKernel.FP32:
        is_in_place = trainer.cross_entropy is CrossEntropyKernel.IN_PLACE
        yield ("--cross-entropy-loss-fusion",)
        yield "--cross-entropy-fusion-impl", "te" if is_in_place else "native"
    activation = "--no-bias-swiglu-fusion" if has_swiglu else "--no-bias-gelu-fusion"
    switches = {
        Fusion.ACTIVATION: activation,
        Fusion.WEIGHT_GRAD: "--no-gradient-accumulation-fusion",
    }
    for fusion in trainer.unfused:
        if fusion in switches:
            yield (switches[fusion],)
    if trainer.bf16_first_layers or trainer.bf16_last_layers:
        yield ("--first-last-layers-bf16",)
        yield "--num-layers-at-start-in-bf16", str(trainer.bf16_first_layers)
        yield "--num-layers-at-end-in-bf16", str(trainer.bf16_last_layers)


def has_swiglu(model: ModelSpec) -> bool:
    """Whether experts and MLPs have SwiGLU; gpt-oss has a gated activation of its own."""
    return model.gated and not find_family(model.family).has_clamped_swiglu


def _activation_flags(model: ModelSpec) -> Iterator[Flag]:
    if has_swiglu(model):
        yield ("--swiglu",)
    elif model.gated:  # silu(1.702 x) of a clamped gate, times a clamped up plus 1
        yield ("--quick-geglu",)
        yield "--glu-linear-offset", "1"
        yield "--activation-func-clamp-value", "7"


def _attention_flags(model: ModelSpec) -> Iterator[Flag]:
    attention = model.attention
    yield "--num-attention-heads", str(attention.heads)
    if attention.kind is AttentionKind.MLA:
        yield ("--multi-latent-attention",)
        if attention.q_lora_rank:
            yield "--q-lora-rank", str(attention.q_lora_rank)
        yield "--kv-lora-rank", str(attention.kv_lora_rank)
        yield "--qk-head-dim", str(attention.qk_nope_head_dim)
        yield "--qk-pos-emb-head-dim", str(attention.qk_rope_head_dim)
        yield "--v-head-dim", str(attention.v_head_dim)
        if model.hidden_size % attention.heads:
            # Nothing of latent attention has this width, which else must divide.
            yield "--kv-channels", str(attention.v_head_dim)
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
    if attention.sinks:
        yield "--softmax-type", "learnable"
    if model.position is PositionKind.ROPE:
        yield from _rope_flags(attention, model.family)


def _window_flags(model: ModelSpec) -> Iterator[Flag]:
    """Yield the tokens before a query that its window holds, and which layers have one."""
    window = model.attention.sliding_window
    every = model.attention.window_every
    if not (window and every):
        return
    # Our width counts the query's own token.
    yield "--window-size", f"{window - 1},0"
    if every == 2:
        yield "--window-attn-skip-freq", "2"  # every second layer skips it
    elif every > 2:
        has_window = (bool(model.layer_window(layer)) for layer in range(model.layers))
        yield "--window-attn-skip-freq", _format_layers(tuple(has_window))


def _rope_flags(attention: AttentionSpec, family: str) -> Iterator[Flag]:
    rope = attention.rope
    yield "--rotary-base", str(int(rope.theta))
    if rope.rotary_share != 1:
        yield "--rotary-percent", format_number(rope.rotary_share)
    if attention.kind is AttentionKind.MLA:
        yield "--rope-type", "yarn" if rope.scaling == "yarn" else "rope"
        if rope.scaling != "yarn":
            yield ("--no-rope-fusion",)  # latent attention has it for yarn alone
    if rope.scaling == "yarn":
        yield "--rotary-scaling-factor", format_number(rope.factor)
        yield "--mscale", format_number(rope.mscale)
        yield "--mscale-all-dim", format_number(rope.mscale_all_dim)
        if is_yarn(attention):
            yield "--yarn-original-max-position-embeddings", str(rope.original_max_position)
            yield "--yarn-beta-fast", format_number(rope.beta_fast)
            yield "--yarn-beta-slow", format_number(rope.beta_slow)
            if not find_family(family).rounds_yarn:
                yield ("--no-yarn-correction-range-round-to-int",)
    elif rope.scaling == "llama3":
        yield ("--use-rope-scaling",)
        yield "--rope-scaling-factor", format_number(rope.factor)


def _moe_flags(moe: MoeSpec, model: ModelSpec, workload: Workload) -> Iterator[Flag]:
    yield "--num-experts", str(moe.experts)
    yield "--moe-ffn-hidden-size", str(moe.ffn_size)
    if not all(model.moe_layers):
        yield "--moe-layer-freq", _format_layers(model.moe_layers)
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
    if workload.trainer.expert_kernels is not ExpertKernels.SEQUENTIAL:
        yield ("--moe-grouped-gemm",)
    if workload.trainer.expert_kernels is ExpertKernels.FUSED:
        yield ("--use-transformer-engine-op-fuser",)
    is_permute_fused = Fusion.PERMUTE not in workload.trainer.unfused
    if is_permute_fused and workload.trainer.attention_backend is not AttentionBackend.LOCAL:
        yield ("--moe-permute-fusion",)  # Transformer Engine's


def _format_layers(layers: tuple[bool, ...]) -> str:
    """Return a list of layers as ([0]*3+[1]*58)."""
    runs = (f"[{int(is_chosen)}]*{len(list(run))}" for is_chosen, run in groupby(layers))
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
