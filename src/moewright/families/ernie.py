"""ERNIE 4.5: softmax over all experts, chosen with a bias, in a range of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.attention import grouped_query
from moewright.families.decoder import Decoder, mtp_depths
from moewright.families.draft import Draft
from moewright.families.experts import (
    Experts,
    SharedExpertCount,
    expert_width,
    selection_bias,
    top_k,
)
from moewright.families.fields import MAX_EXPERTS, MAX_LAYERS, FieldReader
from moewright.families.keys import Fixed, Ignored, Neutral, Whole, Written
from moewright.families.record import Family
from moewright.families.weight_names import NamePattern, WeightNames
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRange:
    """Experts in every n-th layer, counted from 1, of one range of layers (ERNIE)."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the range and n; an end of -1 is the last layer."""
        layers = draft["layers"]
        start = fields.integer("moe_layer_start_index", low=0, high=layers, default=1)
        end = fields.integer("moe_layer_end_index", low=-1, high=MAX_LAYERS, default=-1)
        step = fields.integer("moe_layer_interval", low=1, high=MAX_LAYERS, default=1)
        last = layers - 1 if end == -1 else end
        draft["moe_layers"] = tuple(
            (layer + 1) % step == 0 and start <= layer <= last for layer in range(layers)
        )

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the range and n, where the layers are such."""
        numbers = [layer for layer, is_moe in enumerate(model.moe_layers) if is_moe]
        first = numbers[0]
        # A single layer: the n whose first multiple, counted from 1, it is.
        step = numbers[1] - first if len(numbers) > 1 else first + 1
        expected = [layer for layer in range(first, numbers[-1] + 1) if (layer + 1) % step == 0]
        if numbers != expected:
            rule = "these MoE layers have no HF form in ERNIE: every n-th, in one range of layers"
            raise BadInput(Reason(field="model.moe_layers", rule=rule))
        config |= {
            "moe_layer_start_index": first,
            "moe_layer_end_index": numbers[-1],
            "moe_layer_interval": step,
        }


ERNIE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    config=Decoder(
        attention=grouped_query(
            # It turns pairs of neighbours.
            Fixed(values={"attention.rope.interleaved": True}),
            biases=(Neutral(names=("use_bias",), allowed=(False,)),),  # of MLPs too
        ),
        experts=Experts(
            parts=(
                Whole(
                    names=("moe_num_experts", "num_experts"), says="moe.experts", high=MAX_EXPERTS
                ),
                top_k("moe_k", "num_experts_per_tok"),
                ExpertRange(),
                expert_width(),
                SharedExpertCount(names=("moe_num_shared_experts",)),
                selection_bias("moe_use_aux_free"),
                Ignored(names=("moe_norm_min", "moe_capacity", "moe_gate", "moe_gate_act")),
            )
        ),
        mtp=mtp_depths(Written.CHANGED),
        tied=True,
    ),
    weights=WeightNames(
        layers={
            "moe.router.selection_bias": (
                NamePattern(names=("mlp.moe_statics.e_score_correction_bias",), unit_dim=0),
            )
        }
    ),
    tiny={
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "pad_token_id": None,
    },
)
