"""Jamba: attention in one layer of each period, the first form of Mamba in the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.attention import NO_WINDOW, grouped_query
from moewright.families.decoder import LAYER_COUNT, Decoder, Positions
from moewright.families.draft import Draft, Part
from moewright.families.experts import (
    DenseWidthOfExperts,
    Experts,
    expert_count,
    top_k,
)
from moewright.families.fields import MAX_HIDDEN, MAX_LAYERS, FieldReader
from moewright.families.keys import Fixed, Ignored, Switch
from moewright.families.layer_words import (
    FULL,
    LINEAR,
    MAX_STATE,
    RecurrentLayers,
    mixer_size,
    read_layer_words,
    read_mixers,
    write_mixers,
)
from moewright.families.record import Family
from moewright.spec.model import ModelSpec, PositionKind, RecurrentKind

# Tokens after which mamba_ssm's selective scan keeps its state.
_SELECTIVE_SCAN_TOKENS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class JambaLayers:
    """Jamba's layers: attention in one of each period, the first form of Mamba in the others."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the layers, which two lists may repeat, and their mixer."""
        layers = draft["layers"]
        period = fields.integer("attn_layer_period", low=1, high=MAX_LAYERS, default=8)
        offset = fields.integer(
            "attn_layer_offset", low=0, high=period - 1, default=min(4, period - 1)
        )
        default = [FULL if layer % period == offset else LINEAR for layer in range(layers)]
        kinds = read_layer_words(fields, "layer_types", layers, (FULL, LINEAR)) or default
        words = ["attention" if kind == FULL else "mamba" for kind in kinds]
        fields.require_neutral("layers_block_type", words, tuple(words))
        fields.require_neutral("mamba_proj_bias", False)
        fields.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan")
        hidden = draft["hidden_size"]
        expand = fields.integer("mamba_expand", low=1, high=64, default=2)
        # What transformers takes for "auto".
        rank = -(-hidden // 16)
        if fields.raw_value("mamba_dt_rank") != "auto":
            rank = fields.integer("mamba_dt_rank", low=1, high=MAX_HIDDEN, default=rank)
        fields.ignore("mamba_dt_rank")
        draft["mixers"] = read_mixers(kinds)
        draft["recurrent.heads"] = expand * hidden
        draft["recurrent.step_rank"] = rank

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the layers as a list, and the mixer's widths."""
        if model.recurrent is not None:
            config |= {
                "layer_types": write_mixers(model),
                "mamba_expand": model.recurrent.heads // model.hidden_size,
                "mamba_dt_rank": model.recurrent.step_rank,
            }


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPeriod:
    """Experts in one layer of each period, unless there is one expert alone (Jamba)."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the period and the place in it."""
        period = fields.integer("expert_layer_period", low=1, high=MAX_LAYERS, default=2)
        offset = fields.integer(
            "expert_layer_offset", low=0, high=period - 1, default=min(1, period - 1)
        )
        has_experts = draft["moe.experts"] > 1
        draft["moe_layers"] = tuple(
            has_experts and layer % period == offset for layer in range(draft["layers"])
        )

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the period and the place of the first layer with experts."""
        numbers = [layer for layer, is_moe in enumerate(model.moe_layers) if is_moe]
        # A single layer with experts: of a period of all layers.
        period = numbers[1] - numbers[0] if len(numbers) > 1 else model.layers
        config |= {"expert_layer_period": period, "expert_layer_offset": numbers[0] % period}


JAMBA_LAYERS: tuple[Part, ...] = (
    LAYER_COUNT,
    RecurrentLayers(
        kind=RecurrentKind.MAMBA,
        parts=(
            JambaLayers(),
            Fixed(
                values={
                    "recurrent.head_dim": 1,
                    "recurrent.key_heads": 1,
                    "recurrent.chunk_size": _SELECTIVE_SCAN_TOKENS,
                }
            ),
            mixer_size("mamba_d_state", "key_dim", MAX_STATE, 16),
            mixer_size("mamba_d_conv", "short_conv", 64, 4),
            Switch(names=("mamba_conv_bias",), says="recurrent.conv_bias", default=True),
        ),
    ),
)


JAMBA = Family(
    model_type="jamba",
    config=Decoder(
        layers=JAMBA_LAYERS,
        attention=grouped_query(window=NO_WINDOW),
        experts=Experts(
            parts=(
                expert_count("num_experts"),
                top_k(),
                ExpertPeriod(),
                DenseWidthOfExperts(),
                Ignored(names=("num_logits_to_keep",)),
                # softmax over all experts, not divided again
                Fixed(values={"moe.router.renormalize": False, "moe.router.pre_softmax": True}),
            )
        ),
        positions=Positions(kind=PositionKind.NONE),
    ),
)
