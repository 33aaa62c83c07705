"""Fields of the tiny configs of families: models that train in seconds, to prove a family with.

Sizes differ from each other, so that one in the place of another shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

VOCABULARY = 97  # odd: no axis divides it
# What all of them share; a family's record has the others.
TINY: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,  # wide, so that routing has clear margins
    }
)
EIGHT_EXPERTS: Mapping[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2}
EIGHT_LOCAL_EXPERTS: Mapping[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
EIGHT_ROUTED_EXPERTS: Mapping[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2}
HALF_ROTARY: Mapping[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
LATENT_HEADS: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
LATENT: Mapping[str, Any] = {
    **LATENT_HEADS,
    **EIGHT_ROUTED_EXPERTS,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
# Enough heads that no key scores exactly zero in all of them, as another may.
INDEXER: Mapping[str, Any] = {
    "index_n_heads": 16,
    "index_head_dim": 12,
    "index_topk": 5,
    "q_lora_rank": 24,
}
SHARED_EXPERT: Mapping[str, Any] = {
    **EIGHT_ROUTED_EXPERTS,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
SHARED_EXPERT_BEHIND_DENSE: Mapping[str, Any] = {
    **SHARED_EXPERT,
    "intermediate_size": 48,
    "first_k_dense_replace": 1,
}
