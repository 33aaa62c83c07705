"""MiniMax-M2: sigmoid scores with a bias for the choice, in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.attention import HeadDim, QkNormSwitch, grouped_query
from moewright.families.decoder import Decoder
from moewright.families.draft import Draft
from moewright.families.experts import (
    SIGMOID,
    AllLayers,
    DenseWidthOfExperts,
    Experts,
    expert_count,
    selection_bias,
    top_k,
)
from moewright.families.fields import FieldReader
from moewright.families.keys import Fixed, Ignored, Neutral, OneWord
from moewright.families.mixtral import MIXTRAL_LAYER_NAMES
from moewright.families.record import Family
from moewright.families.rope import Rope
from moewright.families.tiny import EIGHT_LOCAL_EXPERTS, HALF_ROTARY
from moewright.families.weight_names import WeightNames, whole
from moewright.spec.model import ModelSpec, QkNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class _FullAttentionList:
    """A list that says of each layer that it has full attention."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Refuse a list of anything else."""
        layers = draft["layers"]
        fields.require_neutral("attn_type_list", [1] * layers, (1,) * layers)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Write nothing: the list says nothing new."""


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    config=Decoder(
        attention=grouped_query(
            Neutral(names=("qk_norm_type",), allowed=("per_layer",)),
            head_dim=HeadDim(default=128),
            qk_norm=QkNormSwitch(norm=QkNorm.FULL, default=True),
            rope=Rope(share=1.0, has_share_width=True),
        ),
        experts=Experts(
            parts=(
                expert_count("num_local_experts"),
                top_k(),
                Neutral(names=("router_jitter_noise", "shared_intermediate_size"), allowed=(0,)),
                OneWord(names=("scoring_func",), word="sigmoid", is_written=True),
                _FullAttentionList(),
                # The modules that predict further tokens are not in the checkpoints.
                Ignored(names=("use_mtp", "num_mtp_modules", "mtp_transformer_layers")),
                selection_bias("use_routing_bias"),
                DenseWidthOfExperts(names=("intermediate_size", "moe_intermediate_size")),
                Fixed(values=SIGMOID),
                AllLayers(),
            )
        ),
    ),
    weights=WeightNames(
        layers={
            **MIXTRAL_LAYER_NAMES,
            "moe.router.selection_bias": whole("block_sparse_moe.e_score_correction_bias"),
        }
    ),
    tiny={
        **EIGHT_LOCAL_EXPERTS,
        "head_dim": 16,
        "intermediate_size": 16,
        "rope_parameters": HALF_ROTARY,
    },
)
