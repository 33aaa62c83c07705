"""gpt-oss: sinks, a window in every second layer, biases everywhere, a clamped SwiGLU."""

from __future__ import annotations

from moewright.families.attention import AttentionBias, HeadDim, Window, grouped_query
from moewright.families.decoder import Decoder
from moewright.families.experts import (
    AllLayers,
    DenseWidthOfExperts,
    Experts,
    expert_count,
    top_k,
)
from moewright.families.keys import Fixed, Neutral
from moewright.families.record import Family
from moewright.families.rope import Rope
from moewright.families.tiny import EIGHT_LOCAL_EXPERTS, YARN
from moewright.families.weight_names import NamePattern, WeightNames, whole

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    has_clamped_swiglu=True,
    config=Decoder(
        attention=grouped_query(
            Fixed(values={"attention.sinks": True}),
            head_dim=HeadDim(default=64),
            window=Window(every=2),
            biases=(AttentionBias(default=True),),
            # The one family that does not round the bounds of its yarn ramp.
            rope=Rope(rounds=False),
        ),
        experts=Experts(
            parts=(
                expert_count("num_local_experts"),
                top_k(),
                # The constants of the clamped SwiGLU.
                Neutral(names=("swiglu_limit",), allowed=(7,)),
                Neutral(names=("swiglu_alpha",), allowed=(1.702,)),
                DenseWidthOfExperts(),
                Fixed(values={"moe.router.logit_bias": True, "moe.expert_bias": True}),
                AllLayers(),
            )
        ),
    ),
    weights=WeightNames(
        layers={
            "moe.router.weight": whole("mlp.router.weight"),
            # gate and up take turns in the columns
            "moe.experts.gate_up.weight": (
                NamePattern(
                    names=("mlp.experts.gate_up_proj",), dim_order=(0, 3, 2, 1), merged_dim=2
                ),
            ),
            "moe.experts.gate_up.bias": (
                NamePattern(
                    names=("mlp.experts.gate_up_proj_bias",), dim_order=(0, 2, 1), merged_dim=1
                ),
            ),
            "moe.experts.down.weight": (
                NamePattern(names=("mlp.experts.down_proj",), dim_order=(0, 2, 1)),
            ),
        }
    ),
    tiny={
        **EIGHT_LOCAL_EXPERTS,
        "intermediate_size": 16,
        "head_dim": 16,
        "sliding_window": 6,
        "max_position_embeddings": 64,
        "rope_parameters": {**YARN, "truncate": False},
    },
)
