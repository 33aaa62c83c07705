"""A ModelSpec as a Hugging Face config.json, in the dialect every transformers release reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from moewright.intake.hf_layers import nemotron_pattern
from moewright.intake.hf_write_v4 import build_v4_fields
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import (
    AttentionKind,
    MixerKind,
    ModelSpec,
    MoeSpec,
    PositionKind,
    QkNorm,
    RecurrentSpec,
    RopeSpec,
)

_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "mixtral": "MixtralForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "olmoe": "OlmoeForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "kimi_k2": "DeepseekV3ForCausalLM",
        "deepseek_v32": "DeepseekV32ForCausalLM",
        "deepseek_v4": "DeepseekV4ForCausalLM",
        "glm_moe_dsa": "GlmMoeDsaForCausalLM",
        "glm4_moe": "Glm4MoeForCausalLM",
        "dots1": "Dots1ForCausalLM",
        "solar_open": "SolarOpenForCausalLM",
        "hy_v3": "HYV3ForCausalLM",
        "minimax_m2": "MiniMaxM2ForCausalLM",
        "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
        "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
        "phimoe": "PhimoeForCausalLM",
        "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
        "llama4_text": "Llama4ForCausalLM",
        "granitemoe": "GraniteMoeForCausalLM",
        "granitemoeshared": "GraniteMoeSharedForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
        "nemotron_h": "NemotronHForCausalLM",
        "nemotron": "NemotronForCausalLM",
        "bailing_moe": "BailingMoeForCausalLM",
        "bailing_moe_v2": "BailingMoeV2ForCausalLM",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gpt2": "GPT2LMHeadModel",
    }
)


# Families whose language model alone is written as another one, which has no class of its own.
_WRITTEN_AS: Mapping[str, str] = MappingProxyType({"qwen3_vl_moe_text": "qwen3_moe"})
_BAILING = ("bailing_moe", "bailing_moe_v2")


def build_config(model: ModelSpec) -> dict[str, Any]:
    """Build the fields of a config.json that `hf.parse_config` reads back to `model`.

    Only the name is not among them. The language model of Qwen3-VL is that of a Qwen3-MoE.

    Raises:
        BadInput: transformers has no such model.
    """
    model = replace(model, family=_WRITTEN_AS.get(model.family, model.family))
    if model.family not in _ARCHITECTURES:
        rule = f"has no HF form; families: {', '.join(_ARCHITECTURES)}"
        raise BadInput(Reason(field="model.family", value=model.family or '""', rule=rule))
    if model.position is PositionKind.ALIBI:
        rule = "has no HF form: transformers has no such positions in this family"
        raise BadInput(
            Reason(field="model.position", value=model.position, rule=rule, nearest="rope")
        )
    if model.moe and model.moe.latent_size and model.family != "nemotron_h":
        size = str(model.moe.latent_size)
        rule = "has no HF form: transformers has no such experts in this family"
        raise BadInput(Reason(field="model.moe_latent_size", value=size, rule=rule, nearest="0"))
    head = {"architectures": [_ARCHITECTURES[model.family]], "model_type": model.family}
    if model.family == "gpt2":
        return head | _gpt2_fields(model)
    if model.family == "nemotron_h":
        return head | _nemotron_h_fields(model)
    if model.family == "deepseek_v4":
        return head | build_v4_fields(model)
    attention = model.attention
    config = head | {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "intermediate_size": _intermediate_size(model),
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        "hidden_act": "silu" if model.gated else "relu2",
        "norm_eps" if model.family == "nemotron" else "rms_norm_eps": model.norm_eps,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": attention.rope.theta,
        "rope_scaling": _rope_scaling(attention.rope, model.family),
    }
    config |= _mla_fields(model) if attention.kind is AttentionKind.MLA else _gqa_fields(model)
    if model.mlp_bias:
        config["mlp_bias"] = True
    if model.moe is not None:
        config |= _moe_fields(model, model.moe)
    return config


def _intermediate_size(model: ModelSpec) -> int:
    """Return the width of dense layers; families without any have an expert's width there."""
    if model.dense_ffn_size:
        return model.dense_ffn_size
    return model.moe.ffn_size if model.moe else 1


def _gqa_fields(model: ModelSpec) -> dict[str, Any]:
    attention = model.attention
    family = model.family
    config: dict[str, Any] = {"head_dim": attention.head_dim}
    if family == "qwen2_moe":
        config["qkv_bias"] = attention.qkv_bias
    elif family in _BAILING:
        config |= _bailing_attention_fields(model)
    elif family not in ("qwen2", "ernie4_5_moe"):
        config["attention_bias"] = attention.qkv_bias
    if family == "hunyuan_v1_moe":
        config["use_qk_norm"] = attention.qk_norm is not QkNorm.NONE
    if family == "nemotron":
        config["partial_rotary_factor"] = attention.rope.rotary_share
    if family in ("glm4_moe", "minimax_m2"):
        config["partial_rotary_factor"] = attention.rope.rotary_share
        config["use_qk_norm"] = attention.qk_norm is not QkNorm.NONE
    if model.recurrent is not None:
        config |= _delta_net_fields(model, model.recurrent)
    windows_every_layer = family in ("mistral", "mixtral")
    if attention.sliding_window and not attention.chunked:
        config["sliding_window"] = attention.sliding_window
        if family.startswith("qwen"):
            config["use_sliding_window"] = True
        if not windows_every_layer:
            kinds = ("sliding_attention", "full_attention")
            config["layer_types"] = [
                kinds[bool(i % attention.window_every)] for i in range(model.layers)
            ]
    elif windows_every_layer:
        config["sliding_window"] = None
    return config


def _bailing_attention_fields(model: ModelSpec) -> dict[str, Any]:
    attention = model.attention
    return {
        "use_qkv_bias": attention.qkv_bias,
        "use_bias": attention.out_bias,
        "use_qk_norm": attention.qk_norm is not QkNorm.NONE,
        "partial_rotary_factor": attention.rope.rotary_share,
    }


def _delta_net_fields(model: ModelSpec, spec: RecurrentSpec) -> dict[str, Any]:
    kinds = ("full_attention", "linear_attention")
    return {
        "partial_rotary_factor": model.attention.rope.rotary_share,
        "layer_types": [kinds[mixer is MixerKind.RECURRENT] for mixer in model.mixers],
        "linear_num_value_heads": spec.heads,
        "linear_value_head_dim": spec.head_dim,
        "linear_num_key_heads": spec.key_heads,
        "linear_key_head_dim": spec.key_dim,
        "linear_conv_kernel_dim": spec.short_conv,
    }


def _mla_fields(model: ModelSpec) -> dict[str, Any]:
    attention = model.attention
    config: dict[str, Any] = {
        "q_lora_rank": attention.q_lora_rank or None,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "attention_bias": attention.qkv_bias,
        "rope_interleave": attention.rope.interleaved,
        "num_nextn_predict_layers": model.mtp_layers,
    }
    if attention.indexer is None:
        return config
    del config["rope_interleave"]  # these families have no other way
    config |= {
        "index_n_heads": attention.indexer.heads,
        "index_head_dim": attention.indexer.head_dim,
        "index_topk": attention.indexer.top_k,
        "indexer_rope_interleave": attention.indexer.interleaved,
    }
    if model.family == "glm_moe_dsa":
        mixers = [model.mixer(layer) for layer in range(model.layers)]
        kinds = ("full", "shared")
        config["indexer_types"] = [kinds[mixer is MixerKind.SHARED_INDEX] for mixer in mixers]
    return config


def _moe_fields(model: ModelSpec, moe: MoeSpec) -> dict[str, Any]:
    family = model.family
    router = moe.router
    config: dict[str, Any] = {"num_experts_per_tok": router.top_k}
    if family in ("mixtral", "gpt_oss"):
        return config | {"num_local_experts": moe.experts}
    if family == "phimoe":
        return config | {
            "num_local_experts": moe.experts,
            "intermediate_size": moe.ffn_size,
            "router_jitter_noise": router.mixer_eps,
            "lm_head_bias": model.head_bias,
        }
    if family == "hy_v3":
        return config | {
            "num_experts": moe.experts,
            "moe_intermediate_size": moe.ffn_size,
            "num_shared_experts": moe.shared_ffn_size // moe.ffn_size,
            "router_scaling_factor": router.scaling_factor,
            "mlp_layer_types": _layer_words(model),
            "num_nextn_predict_layers": model.mtp_layers,
        }
    if family == "minimax_m2":
        return config | {
            "num_local_experts": moe.experts,
            "scoring_func": "sigmoid",
            "use_routing_bias": router.selection_bias,
        }
    if family == "olmoe":
        return config | {"num_experts": moe.experts, "norm_topk_prob": router.renormalize}
    if family in ("granitemoe", "granitemoeshared"):
        return config | _granite_fields(model, moe)
    if family == "hunyuan_v1_moe":
        return {
            "num_experts": moe.experts,
            "moe_topk": router.top_k,
            "norm_topk_prob": router.renormalize,
            "use_mixed_mlp_moe": moe.shared_ffn_size > 0,
            "num_shared_expert": max(1, moe.shared_ffn_size // moe.ffn_size),
        }
    if family == "llama4_text":
        return config | _llama4_fields(model, moe)
    if family == "ernie4_5_moe":
        return _ernie_fields(model, moe)
    if family in _BAILING:
        return config | _bailing_fields(model, moe)
    config |= {"moe_intermediate_size": moe.ffn_size, "norm_topk_prob": router.renormalize}
    if family in ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"):
        dense = [i for i, is_moe in enumerate(model.moe_layers) if not is_moe]
        config |= {"num_experts": moe.experts, "decoder_sparse_step": 1, "mlp_only_layers": dense}
        if family != "qwen3_moe":
            config["shared_expert_intermediate_size"] = moe.shared_ffn_size
        return config
    return config | _deepseek_fields(model, moe)


def _granite_fields(model: ModelSpec, moe: MoeSpec) -> dict[str, Any]:
    factors = model.multipliers
    config: dict[str, Any] = {
        "num_local_experts": moe.experts,
        "embedding_multiplier": factors.embedding,
        "residual_multiplier": factors.residual,
        "attention_multiplier": factors.attention,
        "logits_scaling": factors.logits,
    }
    if model.family == "granitemoeshared":
        config["shared_intermediate_size"] = moe.shared_ffn_size
    return config


def _llama4_fields(model: ModelSpec, moe: MoeSpec) -> dict[str, Any]:
    attention = model.attention
    is_local = [bool(model.layer_window(layer)) for layer in range(model.layers)]
    kinds = ("full_attention", "chunked_attention")
    return {
        "num_local_experts": moe.experts,
        "intermediate_size": moe.ffn_size,
        "intermediate_size_mlp": model.dense_ffn_size or moe.ffn_size,
        "moe_layers": [layer for layer, is_moe in enumerate(model.moe_layers) if is_moe],
        "no_rope_layers": [int(rotates) for rotates in model.rope_layers or (1,) * model.layers],
        "layer_types": [kinds[is_chunked] for is_chunked in is_local],
        "attention_chunk_size": attention.sliding_window or None,
        "use_qk_norm": attention.qk_norm is not QkNorm.NONE,
        "attn_temperature_tuning": attention.temperature_floor > 0,
        "floor_scale": int(attention.temperature_floor) or 8192,
        "attn_scale": attention.temperature_scale or 0.1,
    }


def _ernie_fields(model: ModelSpec, moe: MoeSpec) -> dict[str, Any]:
    first = model.moe_layers.index(True)
    numbers = [layer for layer, is_moe in enumerate(model.moe_layers) if is_moe]
    interval = numbers[1] - first if len(numbers) > 1 else first + 1
    expected = [layer for layer in range(first, numbers[-1] + 1) if (layer + 1) % interval == 0]
    if numbers != expected:
        rule = "these MoE layers have no HF form in ERNIE: every n-th, in one range of layers"
        raise BadInput(Reason(field="model.moe_layers", rule=rule))
    return {
        "moe_num_experts": moe.experts,
        "moe_k": moe.router.top_k,
        "moe_intermediate_size": moe.ffn_size,
        "moe_num_shared_experts": moe.shared_ffn_size // moe.ffn_size,
        "moe_layer_start_index": first,
        "moe_layer_end_index": numbers[-1],
        "moe_layer_interval": interval,
        "moe_use_aux_free": moe.router.selection_bias,
    }


def _bailing_fields(model: ModelSpec, moe: MoeSpec) -> dict[str, Any]:
    router = moe.router
    config: dict[str, Any] = {
        "num_experts": moe.experts,
        "moe_intermediate_size": moe.ffn_size,
        "num_shared_experts": moe.shared_ffn_size // moe.ffn_size,
        "norm_topk_prob": router.renormalize,
        "first_k_dense_replace": model.moe_layers.index(True),
    }
    if model.family == "bailing_moe":
        return config
    return config | {
        "score_function": router.score.value,
        "moe_router_enable_expert_bias": router.selection_bias,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "routed_scaling_factor": router.scaling_factor,
        "num_nextn_predict_layers": model.mtp_layers,
    }


def _deepseek_fields(model: ModelSpec, moe: MoeSpec) -> dict[str, Any]:
    router = moe.router
    first = model.moe_layers.index(True)
    config: dict[str, Any] = {
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_ffn_size // moe.ffn_size,
        "routed_scaling_factor": router.scaling_factor,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "first_k_dense_replace": first,
    }
    if model.family in ("glm4_moe", "dots1", "solar_open"):
        if model.mtp_layers:
            config["num_nextn_predict_layers"] = model.mtp_layers
        return config
    if model.family == "glm4_moe_lite":
        return config | {"mlp_layer_types": _layer_words(model)}
    config["moe_layer_freq"] = _moe_layer_freq(model.moe_layers, first)
    if model.family != "deepseek_v2":
        return config | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    is_grouped = router.groups > 1 or router.top_groups > 1
    method = "group_limited_greedy" if is_grouped else "greedy"
    return config | {"scoring_func": "softmax", "topk_method": method}


def _layer_words(model: ModelSpec) -> list[str]:
    return ["sparse" if is_moe else "dense" for is_moe in model.moe_layers]


def _moe_layer_freq(moe_layers: tuple[bool, ...], first: int) -> int:
    """Return the n for which layer i has experts if and only if i >= first and n divides i."""
    for n in range(1, len(moe_layers) + 1):
        if moe_layers == tuple(i >= first and i % n == 0 for i in range(len(moe_layers))):
            return n
    rule = "these MoE layers have no HF form in the DeepSeek families: dense first, then every n-th"
    raise BadInput(Reason(field="model.moe_layers", rule=rule))


def _rope_scaling(rope: RopeSpec, family: str) -> dict[str, Any] | None:
    if rope.scaling == "default":
        return None
    table: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "linear":
        return table
    table["original_max_position_embeddings"] = rope.original_max_position
    if rope.scaling == "longrope":
        return table | {
            "short_factor": list(rope.short_factors),
            "long_factor": list(rope.long_factors),
            "short_mscale": rope.short_magnitude,
            "long_mscale": rope.long_magnitude,
        }
    if rope.scaling == "llama3":
        return table | {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    table |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    if (rope.mscale, rope.mscale_all_dim) != (1.0, 0.0):
        table |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    if family == "gpt_oss":
        table["truncate"] = False
    return table


def _nemotron_h_fields(model: ModelSpec) -> dict[str, Any]:
    attention = model.attention
    config: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "hybrid_override_pattern": nemotron_pattern(model),
        "num_hidden_layers": model.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": _intermediate_size(model),
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        "mlp_hidden_act": "relu2",
        "mlp_bias": model.mlp_bias,
        "layer_norm_epsilon": model.norm_eps,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_embeddings,
        "num_nextn_predict_layers": model.mtp_layers,
    }
    if model.recurrent is not None:
        config |= _mamba_fields(model.recurrent)
    if model.moe is not None:
        config |= _latent_expert_fields(model.moe)
    return config


def _mamba_fields(spec: RecurrentSpec) -> dict[str, Any]:
    return {
        "mamba_num_heads": spec.heads,
        "mamba_head_dim": spec.head_dim,
        "n_groups": spec.key_heads,
        "ssm_state_size": spec.key_dim,
        "conv_kernel": spec.short_conv,
        "use_conv_bias": spec.conv_bias,
        "chunk_size": spec.chunk_size,
        # transformers 5.23 has no steps below this (its pull request 48989), the models none at 0.
        "time_step_min": 1e-9,
    }


def _latent_expert_fields(moe: MoeSpec) -> dict[str, Any]:
    router = moe.router
    return {
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": router.top_k,
        "moe_intermediate_size": moe.ffn_size,
        "moe_latent_size": moe.latent_size or None,
        "n_shared_experts": int(moe.shared_ffn_size > 0),
        "moe_shared_expert_intermediate_size": moe.shared_ffn_size or moe.ffn_size,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "norm_topk_prob": router.renormalize,
        "routed_scaling_factor": router.scaling_factor,
    }


def _gpt2_fields(model: ModelSpec) -> dict[str, Any]:
    return {
        "n_embd": model.hidden_size,
        "n_layer": model.layers,
        "n_head": model.attention.heads,
        "n_inner": model.dense_ffn_size,
        "n_positions": model.max_position,
        "vocab_size": model.vocab_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_embeddings,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
