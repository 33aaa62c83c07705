"""Phi-3.5-MoE: two choices one after the other, LayerNorms, a rope of listed factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.attention import Window, grouped_query
from moewright.families.decoder import SWIGLU, Decoder, norm_eps
from moewright.families.draft import Draft
from moewright.families.experts import (
    AllLayers,
    DenseWidthOfExperts,
    Experts,
    expert_count,
    top_k,
)
from moewright.families.fields import FieldReader
from moewright.families.keys import Fixed, Ignored, Neutral, Number, Switch
from moewright.families.mixtral import MIXTRAL_LAYER_NAMES
from moewright.families.record import Family
from moewright.families.rope import Rope
from moewright.families.tiny import EIGHT_LOCAL_EXPERTS
from moewright.families.weight_names import WeightNames
from moewright.spec.model import ModelSpec, NormKind, ScoreFunction


@dataclass(frozen=True, kw_only=True, slots=True)
class _TwoChoices:
    """The sparse mixer: two choices, each by a softmax of its own.

    The jitter is the threshold of its choice, not noise; it also samples its choices in training,
    where moewright chooses as in inference.
    """

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Refuse another number of choices."""
        if draft["moe.router.top_k"] != 2:
            raise fields.refusal("num_experts_per_tok", "the sparse mixer chooses 2", "2")
        draft["moe.router.score"] = ScoreFunction.SPARSE_MIXER
        draft["moe.router.renormalize"] = False

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Write nothing: the number of choices is written."""


PHIMOE = Family(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    config=Decoder(
        style=(
            SWIGLU,
            norm_eps(
                "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", default=1e-5
            ),
            Fixed(values={"norm": NormKind.LAYER}),
            Switch(names=("lm_head_bias",), says="head_bias", default=False),
        ),
        attention=grouped_query(
            window=Window(within_positions=True), rope=Rope(more_types=("longrope",))
        ),
        experts=Experts(
            parts=(
                expert_count("num_local_experts"),
                top_k(),
                _TwoChoices(),
                Number(names=("router_jitter_noise",), says="moe.router.mixer_eps", default=0.01),
                Neutral(names=("input_jitter_noise",), allowed=(0, 0.01)),
                Ignored(names=("original_max_position_embeddings",)),
                DenseWidthOfExperts(),
                AllLayers(),
            )
        ),
    ),
    weights=WeightNames(layers=MIXTRAL_LAYER_NAMES),
    tiny={
        **EIGHT_LOCAL_EXPERTS,
        "intermediate_size": 16,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.2,  # wide enough to hold several experts
        "max_position_embeddings": 256,
        # Factors and magnitudes for sequences of up to 64 tokens, and for longer ones.
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.25, 1.5, 2.0],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
            "short_mscale": 1.2,
            "long_mscale": 1.4,
            "original_max_position_embeddings": 64,
        },
    },
)
