"""OLMoE; FlexOlmo and the dense OLMo 3, with norms after each block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moewright.families.attention import KvHeads, Window, grouped_query
from moewright.families.decoder import SWIGLU, Decoder, norm_eps
from moewright.families.experts import (
    AllLayers,
    DenseWidthOfExperts,
    Experts,
    Renormalize,
    expert_count,
    top_k,
)
from moewright.families.keys import Fixed, Ignored, Neutral
from moewright.families.record import Family
from moewright.families.rope import Rope
from moewright.families.tiny import EIGHT_EXPERTS
from moewright.families.weight_names import WeightNames, whole
from moewright.spec.model import NormPlacement, QkNorm

_EXPERTS = Experts(
    parts=(
        expert_count("num_experts"),
        top_k(),
        DenseWidthOfExperts(),
        Renormalize(default=False),
        AllLayers(),
    )
)
OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    config=Decoder(
        attention=grouped_query(
            Neutral(names=("clip_qkv",)),
            kv_heads=KvHeads(is_optional=True),
            qk_norm=QkNorm.FULL,
        ),
        experts=_EXPERTS,
    ),
    tiny={**EIGHT_EXPERTS, "intermediate_size": 16, "pad_token_id": None},
)
_NORMS_AFTER: Mapping[str, Any] = {"norm_placement": NormPlacement.AFTER}
_NAMES_AFTER = WeightNames(
    layers={
        "attention_norm.weight": whole("post_attention_layernorm.weight"),
        "mlp_norm.weight": whole("post_feedforward_layernorm.weight"),
    }
)
FLEX_OLMO = Family(
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    config=Decoder(
        style=(
            SWIGLU,
            norm_eps(),
            Fixed(values=_NORMS_AFTER),
            # That of transformers, in its absence, lies outside of smaller vocabularies.
            Ignored(names=(), constants={"pad_token_id": None}),
        ),
        attention=grouped_query(
            kv_heads=KvHeads(is_optional=True), qk_norm=QkNorm.FULL, rope=Rope(theta=500000.0)
        ),
        experts=_EXPERTS,
    ),
    weights=_NAMES_AFTER,
    tiny={**EIGHT_EXPERTS, "intermediate_size": 16, "pad_token_id": None},
)
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    weights=_NAMES_AFTER,
    tiny={
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "sliding_window": 6,
        "pad_token_id": None,
    },
    config=Decoder(
        style=(SWIGLU, norm_eps(), Fixed(values=_NORMS_AFTER)),
        attention=grouped_query(
            kv_heads=KvHeads(is_optional=True),
            window=Window(default=4096, full_every=4),
            qk_norm=QkNorm.FULL,
            # A table for each kind of layer; windows do not rotate otherwise but for the scaling.
            rope=Rope(kinds=("full_attention", "sliding_attention")),
        ),
    ),
)
