"""Kimi Linear: delta nets with a decay for each channel, latent attention in every fourth layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.attention import latent_attention
from moewright.families.decoder import LAYER_COUNT, Decoder, Positions, mtp_depths
from moewright.families.draft import Draft
from moewright.families.experts import (
    SIGMOID,
    DenseFirst,
    Experts,
    Renormalize,
    SharedExpertCount,
    expert_width,
    scaling_factor,
    top_k,
)
from moewright.families.fields import MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, FieldReader
from moewright.families.keys import Fixed, Ignored, Neutral, OneWord, Whole
from moewright.families.layer_words import FULL, LINEAR, read_layer_words, read_mixers, write_mixers
from moewright.families.record import Family
from moewright.families.rope import refuse_unread
from moewright.spec.model import ModelSpec, PositionKind, RecurrentKind


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiDeltaLayers:
    """Kimi Linear's layers: in transformers' fields, or in the table of its checkpoints.

    That table counts layers from 1.
    """

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the layers and their mixer in either form."""
        layers = draft["layers"]
        table = fields.table("linear_attn_config")
        fields.require_neutral("mla_use_nope", True)
        if table is None:
            default = [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(layers)]
            kinds = read_layer_words(fields, "layer_types", layers, (FULL, LINEAR)) or default
            heads = fields.integer("linear_num_heads", low=1, high=MAX_HEADS)
            width = fields.integer("linear_head_dim", low=1, high=MAX_HEAD_DIM)
            short_conv = fields.integer("linear_conv_kernel_dim", low=1, high=64, default=4)
        else:
            full = table.sequence("full_attn_layers", max_length=layers) or ()
            kinds = [FULL if layer + 1 in full else LINEAR for layer in range(layers)]
            # All that are not full.
            table.ignore("kda_layers")
            heads = table.integer("num_heads", low=1, high=MAX_HEADS)
            width = table.integer("head_dim", low=1, high=MAX_HEAD_DIM)
            short_conv = table.integer("short_conv_kernel_size", low=1, high=64, default=4)
            refuse_unread(table, "is not known here")
        draft["mixers"] = read_mixers(kinds)
        draft["recurrent.kind"] = RecurrentKind.KIMI_DELTA
        for field, value in (
            ("heads", heads),
            ("head_dim", width),
            ("key_heads", heads),
            ("key_dim", width),
            ("short_conv", short_conv),
        ):
            draft[f"recurrent.{field}"] = value

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the layers and their mixer in transformers' fields."""
        if model.recurrent is not None:
            config |= {
                "layer_types": write_mixers(model),
                "linear_num_heads": model.recurrent.heads,
                "linear_head_dim": model.recurrent.head_dim,
                "linear_conv_kernel_dim": model.recurrent.short_conv,
            }


KIMI_LINEAR = Family(
    model_type="kimi_linear",
    config=Decoder(
        layers=(LAYER_COUNT, KimiDeltaLayers()),
        attention=latent_attention(layers=()),
        experts=Experts(
            parts=(
                Whole(
                    names=("num_experts", "num_local_experts"),
                    says="moe.experts",
                    high=MAX_EXPERTS,
                ),
                top_k("num_experts_per_token", "num_experts_per_tok"),
                OneWord(names=("moe_router_activation_func",), word="sigmoid"),
                Neutral(names=("num_expert_group", "n_group", "topk_group"), allowed=(1,)),
                Ignored(names=("use_grouped_topk",)),
                Renormalize(default=True, is_softmax=False, name="moe_renormalize"),
                Fixed(values={**SIGMOID, "moe.router.selection_bias": True}),
                scaling_factor(),
                expert_width(),
                SharedExpertCount(names=("num_shared_experts", "n_shared_experts")),
                DenseFirst(),
            )
        ),
        mtp=mtp_depths(),
        positions=Positions(kind=PositionKind.NONE),
    ),
)
