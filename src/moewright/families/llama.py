"""Llama, and the dense families that differ from it in windows and rotation alone."""

from __future__ import annotations

from moewright.families.attention import KvHeads, RopeLayers, Window, grouped_query
from moewright.families.decoder import LAYER_COUNT, Decoder
from moewright.families.record import Family, UpcycledForms

LLAMA = Family(
    model_type="llama",
    upcycled=UpcycledForms(in_all_layers="mixtral", in_some_layers="qwen2_moe"),
    architecture="LlamaForCausalLM",
    config=Decoder(attention=grouped_query(kv_heads=KvHeads(is_optional=True))),
    tiny={
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
)
MISTRAL = Family(
    model_type="mistral",
    upcycled=UpcycledForms(in_all_layers="mixtral", in_some_layers="qwen2_moe"),
    architecture="MistralForCausalLM",
    config=Decoder(attention=grouped_query(window=Window(is_plain=True))),
)
SMOLLM3 = Family(
    model_type="smollm3",
    config=Decoder(
        layers=(LAYER_COUNT, RopeLayers()),
        attention=grouped_query(window=Window(needs_types=True)),
        tied=True,
    ),
)
