"""Qwen3-Next and Qwen3.5: gated attention in some layers, gated delta nets in the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.attention import NO_WINDOW, HeadDim, grouped_query
from moewright.families.decoder import LAYER_COUNT, SWIGLU, Decoder, norm_eps
from moewright.families.draft import Draft, Part
from moewright.families.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, FieldReader
from moewright.families.keys import Fixed, Neutral
from moewright.families.layer_words import (
    FULL,
    LINEAR,
    RecurrentLayers,
    mixer_size,
    read_layer_words,
    read_mixers,
    write_mixers,
)
from moewright.families.qwen import qwen_experts
from moewright.families.record import Family
from moewright.families.rope import Rope
from moewright.families.tiny import EIGHT_EXPERTS
from moewright.families.weight_names import NamePattern, WeightNames, shared_mlp
from moewright.spec.model import ModelSpec, QkNorm, RecurrentKind


@dataclass(frozen=True, kw_only=True, slots=True)
class FullEvery:
    """Which layers have full attention: listed, or every n-th, counted from 1."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the list, or make it."""
        layers = draft["layers"]
        every = fields.integer("full_attention_interval", low=1, high=MAX_LAYERS, default=4)
        default = [FULL if (layer + 1) % every == 0 else LINEAR for layer in range(layers)]
        kinds = read_layer_words(fields, "layer_types", layers, (FULL, LINEAR)) or default
        draft["mixers"] = read_mixers(kinds)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the list."""
        config["layer_types"] = write_mixers(model)


DELTA_NETS: tuple[Part, ...] = (
    LAYER_COUNT,
    RecurrentLayers(
        kind=RecurrentKind.GATED_DELTA,
        parts=(
            FullEvery(),
            mixer_size("linear_num_value_heads", "heads", MAX_HEADS),
            mixer_size("linear_value_head_dim", "head_dim", MAX_HEAD_DIM),
            mixer_size("linear_num_key_heads", "key_heads", MAX_HEADS),
            mixer_size("linear_key_head_dim", "key_dim", MAX_HEAD_DIM),
            mixer_size("linear_conv_kernel_dim", "short_conv", 64, 4),
        ),
    ),
)


def _delta_nets(rope: Rope) -> Decoder:
    return Decoder(
        layers=DELTA_NETS,
        style=(SWIGLU, norm_eps(), Fixed(values={"zero_centered_norms": True})),
        attention=grouped_query(
            Neutral(names=("attn_output_gate",), allowed=(True,)),
            Fixed(values={"attention.output_gate": True}),
            head_dim=HeadDim(default=256),
            window=NO_WINDOW,
            qk_norm=QkNorm.PER_HEAD,
            rope=rope,
        ),
        experts=qwen_experts(renormalizes=True),
    )


_TINY = {
    **EIGHT_EXPERTS,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
    # A first token reads what it wrote under a key across its query: nearly nothing, which
    # a smaller epsilon would blow up, rounding and all.
    "rms_norm_eps": 1e-3,
}
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    config=_delta_nets(Rope(share=0.25)),
    weights=WeightNames(layers=shared_mlp("mlp.shared_expert")),
    tiny=_TINY,
)
QWEN3_5 = Family(
    model_type="qwen3_5_moe_text",
    torchtitan_with_images=True,
    architecture="Qwen3_5MoeForCausalLM",
    nested_in=("qwen3_5_moe",),
    # sections agree on positions of text
    config=_delta_nets(Rope(share=0.25, passive=("mrope_section", "mrope_interleaved"))),
    weights=WeightNames(
        layers={
            "attention.qkvz.weight": (
                NamePattern(
                    names=("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),
                    recurrent=True,
                    head_parts=("qkv", "z"),
                ),
            ),
            "attention.rates.weight": (
                NamePattern(
                    names=("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
                    recurrent=True,
                    head_parts=("b", "a"),
                ),
            ),
            **shared_mlp("mlp.shared_expert"),
        }
    ),
    tiny=_TINY,
)
