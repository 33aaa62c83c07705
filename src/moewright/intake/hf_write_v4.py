"""The fields of a DeepSeek-V4 in a config.json, whose layers have attention of three kinds."""

from __future__ import annotations

from typing import Any

from moewright.intake.hf_layers import COMPRESSED_KINDS
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import AttentionSpec, ModelSpec, MoeSpec, RopeSpec


def build_v4_fields(model: ModelSpec) -> dict[str, Any]:
    """Build the fields of a config.json besides its class.

    transformers has none of the MTP depths that a field counts, and leaves out their tensors.

    Raises:
        BadInput: shared experts are wider than one.
    """
    kinds = {mixer: kind for kind, mixer in COMPRESSED_KINDS.items()}
    config: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_embeddings,
        "num_nextn_predict_layers": model.mtp_layers,
        "layer_types": [kinds[model.mixer(layer)] for layer in range(model.layers)],
        "hc_mult": model.residual_streams,
        "hc_sinkhorn_iters": model.stream_iterations,
        "hc_eps": model.stream_eps,
        "swiglu_limit": model.activation_limit,
    }
    config |= _attention_fields(model.attention)
    if model.moe is not None:
        config |= _moe_fields(model, model.moe)
    return config


def _attention_fields(spec: AttentionSpec) -> dict[str, Any]:
    share = spec.qk_rope_head_dim / spec.head_dim
    fields: dict[str, Any] = {
        "num_attention_heads": spec.heads,
        "num_key_value_heads": 1,
        "head_dim": spec.head_dim,
        "qk_rope_head_dim": spec.qk_rope_head_dim,
        "partial_rotary_factor": share,
        "q_lora_rank": spec.q_lora_rank,
        "o_groups": spec.output_groups,
        "o_lora_rank": spec.output_lora_rank,
        "sliding_window": spec.sliding_window,
        "compress_rates": {
            "compressed_sparse_attention": spec.sparse_rate,
            "heavily_compressed_attention": spec.heavy_rate,
        },
        "rope_theta": spec.rope.theta,
        "compress_rope_theta": spec.compressed_rope.theta,
        "rope_parameters": {
            "main": _rope_fields(spec.rope, share),
            "compress": _rope_fields(spec.compressed_rope, share),
        },
    }
    if spec.indexer is not None:
        fields |= {
            "index_n_heads": spec.indexer.heads,
            "index_head_dim": spec.indexer.head_dim,
            "index_topk": spec.indexer.top_k,
        }
    return fields


def _rope_fields(rope: RopeSpec, share: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "rope_type": rope.scaling,
        "rope_theta": rope.theta,
        "partial_rotary_factor": share,
    }
    if rope.scaling == "default":
        return fields
    return fields | {
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "attention_factor": 1.0,
    }


def _moe_fields(model: ModelSpec, moe: MoeSpec) -> dict[str, Any]:
    router = moe.router
    if moe.shared_ffn_size != moe.ffn_size:
        rule = (
            "has no HF form: transformers has one shared expert in this family, as wide as others"
        )
        raise BadInput(
            Reason(
                field="model.moe.shared_ffn_size",
                value=str(moe.shared_ffn_size),
                rule=rule,
                nearest=str(moe.ffn_size),
            )
        )
    kinds = ("moe", "hash_moe")
    return {
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": router.top_k,
        "moe_intermediate_size": moe.ffn_size,
        "n_shared_experts": 1,
        "scoring_func": router.score.value,
        "norm_topk_prob": router.renormalize,
        "routed_scaling_factor": router.scaling_factor,
        "mlp_layer_types": [kinds[layer < router.hash_layers] for layer in range(model.layers)],
    }
