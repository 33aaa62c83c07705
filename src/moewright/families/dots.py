"""dots.llm1 and Solar Open: DeepSeek-V3's experts behind grouped-query attention."""

from __future__ import annotations

from moewright.families.attention import AttentionBias, HeadDim, Window, grouped_query
from moewright.families.decoder import Decoder
from moewright.families.deepseek import deepseek_v3_experts
from moewright.families.experts import DenseFirst
from moewright.families.keys import Written
from moewright.families.record import Family
from moewright.families.rope import Rope
from moewright.families.tiny import SHARED_EXPERT, SHARED_EXPERT_BEHIND_DENSE
from moewright.spec.model import QkNorm

DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    config=Decoder(
        attention=grouped_query(window=Window(needs_types=True), qk_norm=QkNorm.PER_HEAD),
        experts=deepseek_v3_experts(layers=DenseFirst(), names_method=False),
    ),
    tiny={**SHARED_EXPERT_BEHIND_DENSE, "n_group": 4, "topk_group": 2},
)
SOLAR_OPEN = Family(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    config=Decoder(
        attention=grouped_query(
            head_dim=HeadDim(default=128),
            biases=(AttentionBias(has_output=False),),
            rope=Rope(share=1.0, share_written=Written.CHANGED),
        ),
        experts=deepseek_v3_experts(layers=DenseFirst(), names_method=False),
    ),
    tiny={**SHARED_EXPERT, "n_group": 4, "topk_group": 2},
)
