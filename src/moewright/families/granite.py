"""Granite 3, without shared experts and with them: constant factors on the stream."""

from __future__ import annotations

from moewright.families.attention import grouped_query
from moewright.families.decoder import SWIGLU, Decoder, factor, norm_eps
from moewright.families.experts import (
    AllLayers,
    DenseWidthOfExperts,
    Experts,
    expert_count,
    top_k,
)
from moewright.families.fields import MAX_FFN
from moewright.families.keys import Whole, Written
from moewright.families.record import Family
from moewright.families.tiny import EIGHT_LOCAL_EXPERTS
from moewright.families.weight_names import NamePattern, WeightNames, whole


def _granite(shared: Written) -> Decoder:
    return Decoder(
        style=(
            SWIGLU,
            norm_eps(),
            factor("embedding_multiplier", "multipliers.embedding"),
            factor("residual_multiplier", "multipliers.residual"),
            factor("attention_multiplier", "multipliers.attention"),
            factor("logits_scaling", "multipliers.logits"),
        ),
        attention=grouped_query(),
        experts=Experts(
            parts=(
                expert_count("num_local_experts"),
                top_k(),
                Whole(
                    names=("shared_intermediate_size",),
                    says="moe.shared_ffn_size",
                    low=0,
                    high=MAX_FFN,
                    default=0,
                    # The class that has shared experts names their width in any case.
                    written=shared,
                ),
                DenseWidthOfExperts(),
                AllLayers(),
            )
        ),
    )


_WEIGHTS = WeightNames(
    layers={
        "moe.router.weight": whole("block_sparse_moe.router.layer.weight"),
        "moe.shared.gate_up.weight": (
            NamePattern(names=("shared_mlp.input_linear.weight",), merged_dim=0),
        ),
        "moe.shared.down.weight": whole("shared_mlp.output_linear.weight"),
        "moe.experts.gate_up.weight": (
            NamePattern(
                names=("block_sparse_moe.input_linear.weight",),
                dim_order=(0, 1, 2, 3),
                merged_dim=1,
            ),
        ),
        "moe.experts.down.weight": whole("block_sparse_moe.output_linear.weight"),
    }
)
_TINY = {
    **EIGHT_LOCAL_EXPERTS,
    "intermediate_size": 16,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.25,
    "logits_scaling": 6.0,
    "tie_word_embeddings": True,
}
GRANITE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    has_score_factor=True,
    config=_granite(Written.CHANGED),
    weights=_WEIGHTS,
    tiny=_TINY,
)
GRANITE_SHARED = Family(
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    has_score_factor=True,
    config=_granite(Written.ALWAYS),
    weights=_WEIGHTS,
    tiny={**_TINY, "shared_intermediate_size": 24},
)
