"""The fields of a tiny config of each family of transformers, beside those that all share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

VOCABULARY = 97  # odd: no axis divides it
SHARED_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,  # wide, so that routing has clear margins
        "attn_implementation": "eager",
    }
)
_EIGHT_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
_EIGHT_LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_EIGHT_ROUTED_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2}
_HALF_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
_LATENT_HEADS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_LATENT = {
    **_LATENT_HEADS,
    **_EIGHT_ROUTED_EXPERTS,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
# Enough heads that no key scores exactly zero in all of them, as another may.
_INDEXER = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 5, "q_lora_rank": 24}
_SHARED_EXPERT = {
    **_EIGHT_ROUTED_EXPERTS,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_SHARED_EXPERT_BEHIND_DENSE = {
    **_SHARED_EXPERT,
    "intermediate_size": 48,
    "first_k_dense_replace": 1,
}
_GRANITE = {
    **_EIGHT_LOCAL_EXPERTS,
    "intermediate_size": 16,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.25,
    "logits_scaling": 6.0,
    "tie_word_embeddings": True,
}
_DELTA_NETS = {
    **_EIGHT_EXPERTS,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
    # A first token reads what it wrote under a key across its query: nearly nothing, which
    # a smaller epsilon would blow up, rounding and all.
    "rms_norm_eps": 1e-3,
}

# The class of a family's model, and the fields of its config.
FAMILY_CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "qwen3_moe": (
            "Qwen3MoeForCausalLM",
            {
                **_EIGHT_EXPERTS,
                "head_dim": 16,
                "intermediate_size": 48,
                "moe_intermediate_size": 16,
                "norm_topk_prob": True,
                "mlp_only_layers": [1],
                "tie_word_embeddings": True,
            },
        ),
        "qwen2_moe": (
            "Qwen2MoeForCausalLM",
            {
                **_EIGHT_EXPERTS,
                "intermediate_size": 48,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 24,
                "mlp_only_layers": [1],
            },
        ),
        "mixtral": (
            "MixtralForCausalLM",
            {"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
        "olmoe": (
            "OlmoeForCausalLM",
            {**_EIGHT_EXPERTS, "intermediate_size": 16, "pad_token_id": None},
        ),
        "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16, "intermediate_size": 48}),
        "llama": (
            "LlamaForCausalLM",
            {
                "intermediate_size": 48,
                "attention_bias": True,
                "mlp_bias": True,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
            },
        ),
        "gpt_oss": (
            "GptOssForCausalLM",
            {
                **_EIGHT_LOCAL_EXPERTS,
                "intermediate_size": 16,
                "head_dim": 16,
                "sliding_window": 6,
                "max_position_embeddings": 64,
                "rope_parameters": {**_YARN, "truncate": False},
            },
        ),
        "deepseek_v2": (
            "DeepseekV2ForCausalLM",
            {**_LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
        ),
        "deepseek_v3": (
            "DeepseekV3ForCausalLM",
            {
                **_LATENT,
                "q_lora_rank": 24,
                "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        ),
        "deepseek_v32": (
            "DeepseekV32ForCausalLM",
            {
                **_LATENT,
                **_INDEXER,
                "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        ),
        "deepseek_v4": (
            "DeepseekV4ForCausalLM",
            {
                **_EIGHT_ROUTED_EXPERTS,
                "num_hidden_layers": 4,
                "num_key_value_heads": 1,
                "head_dim": 16,
                "partial_rotary_factor": 0.5,
                "q_lora_rank": 24,
                "o_groups": 2,
                "o_lora_rank": 8,
                "moe_intermediate_size": 16,
                "sliding_window": 6,
                "index_n_heads": 16,
                "index_head_dim": 12,
                "index_topk": 2,
                "hc_mult": 3,
                "hc_sinkhorn_iters": 4,
                "swiglu_limit": 0.5,  # most rows reach it
                "layer_types": [
                    "sliding_attention",
                    "compressed_sparse_attention",
                    "heavily_compressed_attention",
                    "compressed_sparse_attention",
                ],
                "compress_rates": {
                    "compressed_sparse_attention": 4,
                    "heavily_compressed_attention": 8,
                },
                "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
                "rope_parameters": {
                    name: value for name, value in _YARN.items() if name != "rope_theta"
                },
            },
        ),
        "glm_moe_dsa": (
            "GlmMoeDsaForCausalLM",
            {
                **_LATENT,
                **_INDEXER,
                # The second layer attends to what the first has chosen.
                "num_hidden_layers": 3,
                "indexer_types": ["full", "shared", "full"],
            },
        ),
        "glm4_moe": (
            "Glm4MoeForCausalLM",
            {
                **_SHARED_EXPERT_BEHIND_DENSE,
                "attention_bias": True,
                "use_qk_norm": True,
                "rope_parameters": _HALF_ROTARY,
            },
        ),
        "dots1": (
            "Dots1ForCausalLM",
            {**_SHARED_EXPERT_BEHIND_DENSE, "n_group": 4, "topk_group": 2},
        ),
        "solar_open": ("SolarOpenForCausalLM", {**_SHARED_EXPERT, "n_group": 4, "topk_group": 2}),
        "hy_v3": (
            "HYV3ForCausalLM",
            {
                **_EIGHT_EXPERTS,
                "head_dim": 16,
                "intermediate_size": 48,
                "moe_intermediate_size": 16,
                "num_shared_experts": 1,
                "router_scaling_factor": 2.5,
            },
        ),
        "minimax_m2": (
            "MiniMaxM2ForCausalLM",
            {
                **_EIGHT_LOCAL_EXPERTS,
                "head_dim": 16,
                "intermediate_size": 16,
                "rope_parameters": _HALF_ROTARY,
            },
        ),
        "glm4_moe_lite": (
            "Glm4MoeLiteForCausalLM",
            {
                **_LATENT_HEADS,
                **_EIGHT_ROUTED_EXPERTS,
                "num_hidden_layers": 3,
                "q_lora_rank": 24,
                "intermediate_size": 48,
                "moe_intermediate_size": 16,
            },
        ),
        "ernie4_5_moe": (
            "Ernie4_5_MoeForCausalLM",
            {
                "intermediate_size": 48,
                "moe_intermediate_size": 16,
                "moe_num_experts": 8,
                "moe_k": 2,
                "moe_num_shared_experts": 2,
                "pad_token_id": None,
            },
        ),
        "hunyuan_v1_moe": (
            "HunYuanMoEV1ForCausalLM",
            {
                "head_dim": 16,
                "intermediate_size": 16,
                "num_experts": 8,
                "moe_topk": 2,
                "pad_token_id": None,
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "type": "dynamic",
                    "rope_theta": 10000.0,
                    "alpha": 1000.0,
                    "factor": 1.0,
                },
            },
        ),
        "granitemoe": ("GraniteMoeForCausalLM", _GRANITE),
        "granitemoeshared": (
            "GraniteMoeSharedForCausalLM",
            {**_GRANITE, "shared_intermediate_size": 24},
        ),
        "llama4_text": (
            "Llama4ForCausalLM",
            {
                "num_hidden_layers": 4,
                "head_dim": 16,
                "intermediate_size": 16,
                "intermediate_size_mlp": 48,
                "num_local_experts": 8,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 6,
                "floor_scale": 5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        "phimoe": (
            "PhimoeForCausalLM",
            {
                **_EIGHT_LOCAL_EXPERTS,
                "intermediate_size": 16,
                "attention_bias": True,
                "lm_head_bias": True,
                "router_jitter_noise": 0.2,  # wide enough to hold several experts
                "max_position_embeddings": 256,
                # Factors and magnitudes for sequences of up to 64 tokens, and for longer ones.
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0, 1.25, 1.5, 2.0],
                    "long_factor": [1.0, 2.0, 4.0, 8.0],
                    "short_mscale": 1.2,
                    "long_mscale": 1.4,
                    "original_max_position_embeddings": 64,
                },
            },
        ),
        "qwen3_next": ("Qwen3NextForCausalLM", _DELTA_NETS),
        "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", _DELTA_NETS),
        "nemotron_h": (
            "NemotronHForCausalLM",
            {
                **_EIGHT_ROUTED_EXPERTS,
                "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
                "num_hidden_layers": 4,
                "head_dim": 16,
                "intermediate_size": 48,
                "mamba_num_heads": 4,
                "mamba_head_dim": 12,
                "n_groups": 2,
                "ssm_state_size": 8,
                "chunk_size": 8,
                "layer_norm_epsilon": 1e-3,  # as for delta nets
                # transformers takes it for a bound of steps, where the models have none.
                "time_step_min": 1e-9,
                "moe_intermediate_size": 16,
                "moe_shared_expert_intermediate_size": 24,
                "moe_latent_size": 16,
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 2.5,
                "pad_token_id": None,
            },
        ),
        "nemotron": (
            "NemotronForCausalLM",
            {"head_dim": 16, "intermediate_size": 48, "pad_token_id": None},
        ),
    }
)
