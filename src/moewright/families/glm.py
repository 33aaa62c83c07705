"""GLM-4.5 to GLM-5: DeepSeek-V3's experts behind attention of three kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.attention import (
    AttentionBias,
    IndexerFields,
    QkNormSwitch,
    grouped_query,
    latent_attention,
)
from moewright.families.decoder import LAYER_COUNT, Decoder, mtp_depths
from moewright.families.deepseek import deepseek_v3_experts
from moewright.families.draft import Draft
from moewright.families.experts import DenseFirst
from moewright.families.fields import MAX_LAYERS, FieldReader
from moewright.families.keys import Written
from moewright.families.layer_words import read_layer_words
from moewright.families.record import Family
from moewright.families.rope import Rope
from moewright.families.tiny import (
    EIGHT_ROUTED_EXPERTS,
    HALF_ROTARY,
    INDEXER,
    LATENT,
    LATENT_HEADS,
    SHARED_EXPERT_BEHIND_DENSE,
)
from moewright.spec.model import MixerKind, ModelSpec, QkNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerTypes:
    """Which layers of GLM-5 choose their keys, and which take an earlier layer's choice."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the list, or make it of the interval and its offset."""
        layers = draft["layers"]
        freq = fields.integer("index_topk_freq", low=1, high=MAX_LAYERS, default=1)
        offset = fields.integer("index_skip_topk_offset", low=0, high=MAX_LAYERS, default=2)
        fields.require_neutral("index_topk_pattern")
        fields.ignore("index_share_for_mtp_iteration")
        default = [
            "full" if max(layer - offset + 1, 0) % freq == 0 else "shared"
            for layer in range(layers)
        ]
        kinds = read_layer_words(fields, "indexer_types", layers, ("full", "shared")) or default
        read_layer_words(fields, "layer_types", layers, ("indexed_attention",))
        if kinds[0] == "shared":
            rule = "must begin with full: a shared layer takes the choice of one before it"
            raise fields.refusal("indexer_types", rule, "full")
        if "shared" in kinds:
            draft["mixers"] = tuple(
                MixerKind.SHARED_INDEX if kind == "shared" else MixerKind.ATTENTION
                for kind in kinds
            )

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the list."""
        if model.attention.indexer is not None:
            mixers = [model.mixer(layer) for layer in range(model.layers)]
            config["indexer_types"] = [
                "shared" if mixer is MixerKind.SHARED_INDEX else "full" for mixer in mixers
            ]


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    config=Decoder(
        attention=grouped_query(
            biases=(AttentionBias(has_output=False),),
            qk_norm=QkNormSwitch(norm=QkNorm.PER_HEAD, default=False),
            rope=Rope(share=0.5),
        ),
        experts=deepseek_v3_experts(layers=DenseFirst(), names_method=False),
        mtp=mtp_depths(Written.CHANGED),
    ),
    tiny={
        **SHARED_EXPERT_BEHIND_DENSE,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": HALF_ROTARY,
    },
)
GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    config=Decoder(
        attention=latent_attention(),
        experts=deepseek_v3_experts(layers=DenseFirst(words=True), names_method=False),
        mtp=mtp_depths(),
    ),
    tiny={
        **LATENT_HEADS,
        **EIGHT_ROUTED_EXPERTS,
        "num_hidden_layers": 3,
        "q_lora_rank": 24,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
    },
)
GLM_MOE_DSA = Family(
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    config=Decoder(
        layers=(LAYER_COUNT, IndexerTypes()),
        attention=latent_attention(
            IndexerFields(interleaved=True), layers=(), interleaved_written=False
        ),
        experts=deepseek_v3_experts(),
        mtp=mtp_depths(),
    ),
    tiny={
        **LATENT,
        **INDEXER,
        # The second layer attends to what the first has chosen.
        "num_hidden_layers": 3,
        "indexer_types": ["full", "shared", "full"],
    },
)
