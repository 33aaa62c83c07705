"""Mixtral: softmax over the chosen experts, in every layer."""

from __future__ import annotations

from types import MappingProxyType

from moewright.families.attention import Window, grouped_query
from moewright.families.decoder import Decoder
from moewright.families.experts import (
    AllLayers,
    DenseWidthOfExperts,
    Experts,
    expert_count,
    top_k,
)
from moewright.families.keys import Neutral
from moewright.families.record import Family
from moewright.families.weight_names import LayerNames, WeightNames, gate_and_up, whole

MIXTRAL_EXPERTS = Experts(
    parts=(
        expert_count("num_local_experts"),
        top_k(),
        Neutral(names=("router_jitter_noise",), allowed=(0,)),
        DenseWidthOfExperts(),
        AllLayers(),
    )
)
MIXTRAL_LAYER_NAMES: LayerNames = MappingProxyType(
    {
        "moe.router.weight": whole("block_sparse_moe.gate.weight"),
        "moe.experts.gate_up.weight": gate_and_up(
            "block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"
        ),
        "moe.experts.down.weight": whole("block_sparse_moe.experts.{}.w2.weight"),
    }
)
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    config=Decoder(attention=grouped_query(window=Window(is_plain=True)), experts=MIXTRAL_EXPERTS),
    weights=WeightNames(layers=MIXTRAL_LAYER_NAMES),
    tiny={"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
)
