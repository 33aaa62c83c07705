"""Parameters of tiny models of every planned family against those that transformers builds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from moewright.families.afmoe import AFMOE
from moewright.families.olmo import FLEX_OLMO
from moewright.families.tiny import TINY
from moewright.intake import hf
from moewright.rules.limits import engine_features
from moewright.rules.shapes import parameters
from moewright.spec.errors import BadInput
from moewright.spec.model import MixerKind

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Transformers' names without "Config", with settings of a tiny model.
FAMILIES: dict[str, dict[str, Any]] = {
    "Afmoe": {**TINY, **AFMOE.tiny},
    "FlexOlmo": {**TINY, **FLEX_OLMO.tiny},
    "Glm4Moe": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_mtp_layers": 0,
    },
    "Glm4MoeLite": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    },
    "MiniMaxM2": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Ernie4_5_Moe": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "moe_num_experts": 8,
        "moe_k": 2,
    },
    "HunYuanMoEV1": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "num_experts": 8,
        "moe_topk": 2,
    },
    "Dots1": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "Phimoe": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "GraniteMoe": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "GraniteMoeShared": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
    },
    "Llama4Text": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
    },
    "Qwen3Next": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
    "Qwen3_5MoeText": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
    "KimiLinear": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "pad_token_id": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "NemotronH": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "intermediate_size": 48,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "n_routed_experts": 8,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "moe_latent_size": 8,
        "num_experts_per_tok": 2,
    },
    "DeepseekV32": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 8,
    },
    "Jamba": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 3,
    },
    "GlmMoeDsa": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 8,
        "indexer_types": ["full", "full", "shared", "shared"],
    },
    "DeepseekV4": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 16,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 8,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 8,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
    },
    "SmolLM3": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "pad_token_id": 1,
    },
    "Olmo3": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
    },
    "Nemotron": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
    },
}


def build(name: str) -> tuple[Any, int]:
    """Return the config of a tiny model, and the elements that transformers trains."""
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name])
    with torch.device("meta"):
        model = getattr(transformers, f"{name.replace('Text', '')}ForCausalLM")(config)
    weights = (weight for key, weight in model.named_parameters() if is_trained(key))
    return config, sum(weight.numel() for weight in weights)


def is_trained(key: str) -> bool:
    """Whether gradients reach a weight: the bias that selects experts is state of the router."""
    return not key.endswith(("e_score_correction_bias", "expert_bias"))


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_models_have_as_many_parameters_as_those_of_transformers(name: str) -> None:
    config, elements = build(name)
    model = hf.parse_config(json.loads(config.to_json_string()), where=name, name=name)
    assert parameters.count_parameters(model).total == elements


def refused_features(name: str) -> Iterator[str]:
    config, _ = build(name)
    model = hf.parse_config(json.loads(config.to_json_string()), where=name, name=name)
    for field, _, is_refused, _ in engine_features.unsupported_features(model):
        if is_refused:
            yield field


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("GraniteMoe", "multipliers.attention"),
        ("KimiLinear", "mixers"),
        ("Jamba", "mixers"),
    ],
)
def test_the_engine_refuses_by_name_what_it_does_not_compute(name: str, field: str) -> None:
    assert field in set(refused_features(name))


def test_the_first_layer_of_glm_5_chooses_for_itself() -> None:
    config, _ = build("GlmMoeDsa")
    fields = json.loads(config.to_json_string())
    fields["indexer_types"] = ["shared", "full", "full", "full"]
    with pytest.raises(BadInput, match=r"indexer_types=.*: must begin with full"):
        hf.parse_config(fields, where="c", name="m")


def test_layers_of_a_hybrid_are_read_in_their_order() -> None:
    config, _ = build("NemotronH")
    model = hf.parse_config(json.loads(config.to_json_string()), where="c", name="m")
    assert model.mixers == (
        MixerKind.RECURRENT,
        MixerKind.NONE,
        MixerKind.ATTENTION,
        MixerKind.NONE,
    )
    assert model.mlp_layers == (False, True, False, True)
    assert model.moe_layers == (False, True, False, False)
