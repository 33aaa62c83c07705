"""Llama 4: attention within chunks, scores that weight the input of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.attention import QkNormSwitch, RopeLayers, grouped_query
from moewright.families.decoder import LAYER_COUNT, Decoder, DenseWidth
from moewright.families.draft import Draft
from moewright.families.experts import (
    SIGMOID,
    DenseWidthOfExperts,
    Experts,
    expert_count,
    require_layers,
    top_k,
)
from moewright.families.fields import MAX_LAYERS, MAX_POSITION, FieldReader
from moewright.families.keys import Copied, Fixed, Ignored, Neutral
from moewright.families.layer_words import (
    CHUNKED,
    FULL,
    read_layer_words,
    read_local_mixers,
    write_local_words,
)
from moewright.families.record import Family
from moewright.families.weight_names import NamePattern, WeightNames, gate_and_up, shared_mlp, whole
from moewright.spec.model import ModelSpec, QkNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """Llama 4's chunks: the layers that rotate attend within them, every fourth to all."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the size of a chunk and the layers that attend within one."""
        layers = draft["layers"]
        chunk = fields.integer("attention_chunk_size", low=0, high=MAX_POSITION, default=8192)
        kinds = read_layer_words(fields, "layer_types", layers, (FULL, CHUNKED))
        if kinds is None:
            rotated = draft["rope_layers"] or (True,) * layers
            kinds = tuple(CHUNKED if rotates else FULL for rotates in rotated)
        if chunk and CHUNKED in kinds:
            draft["attention.sliding_window"] = chunk
            draft["attention.chunked"] = True
            draft["mixers"] = read_local_mixers(kinds, CHUNKED)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the size and the kind of each layer."""
        config |= {
            "layer_types": write_local_words(model, CHUNKED),
            "attention_chunk_size": model.attention.sliding_window or None,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Temperatures:
    """The positions and the factor by which Llama 4's unrotated queries grow; 0 for none."""

    floor: float = 8192
    scale: float = 0.1

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read both, where the config does not switch them off."""
        if not fields.boolean("attn_temperature_tuning", default=True):
            fields.ignore("floor_scale", "attn_scale")
            return
        draft["attention.temperature_floor"] = fields.number(
            "floor_scale", low=1, high=MAX_POSITION, default=self.floor
        )
        draft["attention.temperature_scale"] = fields.number(
            "attn_scale", low=0, high=1e3, default=self.scale
        )

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the switch and both."""
        floor = model.attention.temperature_floor
        config |= {
            "attn_temperature_tuning": floor > 0,
            # transformers takes whole positions alone
            "floor_scale": int(floor or self.floor),
            "attn_scale": model.attention.temperature_scale if floor else self.scale,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedLayers:
    """Experts in every n-th layer, or in the layers whose numbers are listed (Llama 4)."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read n and the list."""
        layers = draft["layers"]
        step = fields.integer("interleave_moe_layer_step", low=1, high=MAX_LAYERS, default=1)
        listed = fields.sequence("moe_layers", max_length=layers)
        numbers = tuple(range(step - 1, layers, step)) if listed is None else listed
        require_layers(fields, "moe_layers", numbers, layers, "null")
        draft["moe_layers"] = tuple(layer in numbers for layer in range(layers))

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the list."""
        config["moe_layers"] = [layer for layer, is_moe in enumerate(model.moe_layers) if is_moe]


LLAMA4 = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    nested_in=("llama4",),
    config=Decoder(
        layers=(LAYER_COUNT, RopeLayers()),
        attention=grouped_query(
            Temperatures(),
            # It turns pairs of neighbours.
            Fixed(values={"attention.rope.interleaved": True}),
            window=Chunks(),
            qk_norm=QkNormSwitch(norm=QkNorm.UNWEIGHTED, default=True),
        ),
        experts=Experts(
            parts=(
                expert_count("num_local_experts"),
                top_k(),
                Neutral(names=("router_jitter_noise",), allowed=(0,)),
                Ignored(names=("for_llm_class", "use_scaled_rope")),
                ListedLayers(),
                DenseWidthOfExperts(),
                Copied(says="moe.shared_ffn_size", source="moe.ffn_size"),
                Fixed(
                    values={
                        **SIGMOID,
                        "moe.router.renormalize": False,
                        "moe.router.scales_input": True,
                    }
                ),
            )
        ),
        dense_width=DenseWidth(name="intermediate_size_mlp"),
    ),
    weights=WeightNames(
        layers={
            "mlp.gate_up.weight": gate_and_up(
                "feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"
            ),
            "mlp.down.weight": whole("feed_forward.down_proj.weight"),
            "moe.router.weight": whole("feed_forward.router.weight"),
            **shared_mlp("feed_forward.shared_expert"),
            # columns are gate and up, one after the other
            "moe.experts.gate_up.weight": (
                NamePattern(
                    names=("feed_forward.experts.gate_up_proj",),
                    dim_order=(0, 3, 1, 2),
                    merged_dim=2,
                ),
            ),
            "moe.experts.down.weight": (
                NamePattern(names=("feed_forward.experts.down_proj",), dim_order=(0, 2, 1)),
            ),
        }
    ),
    tiny={
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size": 16,
        "intermediate_size_mlp": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 6,
        "floor_scale": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
)
