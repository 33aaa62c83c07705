"""What mixes the tokens of each layer of a config.json, and which layers have an MLP or experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moewright.codec import closest_match
from moewright.intake.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    FieldReader,
)
from moewright.spec.model import MixerKind, ModelSpec, RecurrentKind, RecurrentSpec

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
LINEAR = "linear_attention"
MLA_FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm4_moe_lite",
    "kimi_k2",
    "kimi_linear",
)
# Families that can predict more than one token ahead.
_MTP_FAMILIES = (
    *MLA_FAMILIES,
    "bailing_moe",
    "bailing_moe_v2",
    "deepseek_v4",
    "ernie4_5_moe",
    "glm4_moe",
    "hy_v3",
    "nemotron_h",
)
_MAX_STATE = 2**16
_MAX_CHUNK = 2**16
# Tokens after which mamba_ssm's selective scan keeps its state.
_SELECTIVE_SCAN_TOKENS = 2048

# The letters of Nemotron-H's pattern, and transformers' words for them: what mixes, what follows.
_NEMOTRON_LAYERS: Mapping[str, tuple[MixerKind, bool]] = MappingProxyType(
    {
        "M": (MixerKind.RECURRENT, False),
        "*": (MixerKind.ATTENTION, False),
        "E": (MixerKind.NONE, True),
        "-": (MixerKind.NONE, True),
    }
)
_NEMOTRON_WORDS: Mapping[str, str] = MappingProxyType(
    {"mamba": "M", LINEAR: "M", "attention": "*", FULL: "*", "moe": "E", "mlp": "-"}
)
_JAMBA_WORDS: Mapping[str, str] = MappingProxyType({FULL: "attention", LINEAR: "mamba"})
# transformers' words for the kinds of layers of DeepSeek-V4.
COMPRESSED_KINDS: Mapping[str, MixerKind] = MappingProxyType(
    {
        SLIDING: MixerKind.LOCAL_ATTENTION,
        "compressed_sparse_attention": MixerKind.COMPRESSED_SPARSE,
        "heavily_compressed_attention": MixerKind.HEAVILY_COMPRESSED,
    }
)
_COMPRESSED_RATIOS: Mapping[int, str] = MappingProxyType(
    {0: SLIDING, 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """The mixers of a model's layers, and which layers have an MLP; () where all are alike."""

    mixers: tuple[MixerKind, ...] = ()
    mlp_layers: tuple[bool, ...] = ()
    recurrent: RecurrentSpec | None = None


def read_layer_plan(fields: FieldReader, family: str) -> LayerPlan:
    """Read what mixes the tokens of each layer, for families whose layers are not all attention.

    Raises:
        BadInput: a field is missing or wrong, or names a mixer that the family does not have.
    """
    if family == "nemotron_h":
        return _read_nemotron_h(fields)
    if family == "jamba":
        return _read_jamba(fields)
    if family in ("qwen3_next", "qwen3_5_moe_text"):
        return _read_gated_delta(fields)
    if family == "kimi_linear":
        return _read_kimi_delta(fields)
    if family == "glm_moe_dsa":
        return LayerPlan(mixers=_read_indexer_types(fields))
    if family == "deepseek_v4":
        return LayerPlan(mixers=_read_compressed(fields))
    return LayerPlan()


def read_mtp_layers(fields: FieldReader, family: str) -> int:
    """Read how many tokens more the model predicts ahead.

    Raises:
        BadInput: the family has no such depths.
    """
    name = "num_nextn_predict_layers"
    if family in _MTP_FAMILIES:
        return fields.integer(name, "num_mtp_layers", low=0, high=MAX_LAYERS, default=0)
    if fields.raw_value(name):
        raise fields.refusal(name, f"multi-token prediction is not known for {family}", "0")
    return 0


def nemotron_letters(fields: FieldReader) -> str:
    """Read Nemotron-H's pattern of layers, a letter each, in either of its spellings.

    Raises:
        BadInput: it is missing, holds another letter, or disagrees with num_hidden_layers.
    """
    name = "hybrid_override_pattern"
    pattern = fields.raw_value(name)
    fields.ignore(name)
    if pattern is None:
        words = fields.sequence("layers_block_type", max_length=MAX_LAYERS)
        if words is None:
            words = fields.sequence("layer_types", max_length=MAX_LAYERS)
        if words is None:
            raise fields.refusal(name, "is missing: a letter of M E * - for each layer")
        pattern = "".join(_NEMOTRON_WORDS.get(word, "?") for word in map(str, words))
        name = "layers_block_type"
    fields.ignore("layers_block_type", "layer_types")
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_NEMOTRON_LAYERS):
        raise fields.refusal(name, "must hold a letter of M E * - for each layer")
    if len(pattern) > MAX_LAYERS:
        raise fields.refusal(name, f"must have at most {MAX_LAYERS} layers")
    fields.require_neutral("num_hidden_layers", len(pattern))
    return pattern


def nemotron_pattern(model: ModelSpec) -> str:
    """Return the pattern of layers that `nemotron_letters` reads of a model of that family."""
    letters = {MixerKind.RECURRENT: "M", MixerKind.ATTENTION: "*"}
    return "".join(
        letters.get(mixer, "E" if is_moe else "-")
        for mixer, is_moe in zip(model.mixers, model.moe_layers, strict=True)
    )


def _read_nemotron_h(fields: FieldReader) -> LayerPlan:
    pattern = nemotron_letters(fields)
    layers = [_NEMOTRON_LAYERS[letter] for letter in pattern]
    for name in ("mamba_proj_bias", "use_bias", "residual_in_fp32"):
        fields.require_neutral(name, False)
    for limits in ("time_step_limit", "mamba_dt_limit"):
        fields.require_neutral(limits, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
    if "E" in pattern:
        fields.require_neutral("mlp_bias", False)  # of shared experts and latents too
    fields.choice("mamba_hidden_act", choices=("silu",), default="silu")
    fields.require_neutral("mtp_hybrid_override_pattern", "*E")
    fields.require_neutral(
        "mtp_layers_block_type", ["attention", "moe"], [FULL, "moe"], ("attention", "moe")
    )
    fields.ignore("expand", "mtp_use_repeated_layer")
    recurrent = None
    if "M" in pattern:
        recurrent = RecurrentSpec(
            kind=RecurrentKind.MAMBA2,
            heads=fields.integer("mamba_num_heads", low=1, high=MAX_HEADS),
            head_dim=fields.integer("mamba_head_dim", low=1, high=MAX_HEAD_DIM),
            key_heads=fields.integer("n_groups", "mamba_n_groups", low=1, high=MAX_HEADS),
            key_dim=fields.integer("ssm_state_size", low=1, high=_MAX_STATE),
            short_conv=fields.integer("conv_kernel", low=1, high=64, default=4),
            conv_bias=fields.boolean("use_conv_bias", default=True),
            chunk_size=fields.integer("chunk_size", low=1, high=_MAX_CHUNK, default=128),
        )
    return LayerPlan(
        mixers=tuple(mixer for mixer, _ in layers),
        mlp_layers=tuple(has_mlp for _, has_mlp in layers),
        recurrent=recurrent,
    )


def _read_jamba(fields: FieldReader) -> LayerPlan:
    """Read Jamba's layers: attention in one of each period, Mamba in the others."""
    layers = fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    period = fields.integer("attn_layer_period", low=1, high=MAX_LAYERS, default=8)
    offset = fields.integer("attn_layer_offset", low=0, high=period - 1, default=min(4, period - 1))
    default = [FULL if layer % period == offset else LINEAR for layer in range(layers)]
    kinds = read_kinds(fields, "layer_types", layers, (FULL, LINEAR)) or default
    words = [_JAMBA_WORDS[kind] for kind in kinds]
    fields.require_neutral("layers_block_type", words, tuple(words))
    fields.require_neutral("mamba_proj_bias", False)
    fields.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan")
    hidden = fields.integer("hidden_size", low=1, high=MAX_HIDDEN)
    expand = fields.integer("mamba_expand", low=1, high=64, default=2)
    rank = -(-hidden // 16)
    if fields.raw_value("mamba_dt_rank") != "auto":
        rank = fields.integer("mamba_dt_rank", low=1, high=MAX_HIDDEN, default=rank)
    fields.ignore("mamba_dt_rank")
    return LayerPlan(
        mixers=_mixers_of(kinds),
        recurrent=RecurrentSpec(
            kind=RecurrentKind.MAMBA,
            heads=expand * hidden,
            head_dim=1,
            key_heads=1,
            key_dim=fields.integer("mamba_d_state", low=1, high=_MAX_STATE, default=16),
            short_conv=fields.integer("mamba_d_conv", low=1, high=64, default=4),
            conv_bias=fields.boolean("mamba_conv_bias", default=True),
            chunk_size=_SELECTIVE_SCAN_TOKENS,
            step_rank=rank,
        ),
    )


def _read_gated_delta(fields: FieldReader) -> LayerPlan:
    layers = fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    interval = fields.integer("full_attention_interval", low=1, high=MAX_LAYERS, default=4)
    default = [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(layers)]
    kinds = read_kinds(fields, "layer_types", layers, (FULL, LINEAR)) or default
    return LayerPlan(
        mixers=_mixers_of(kinds),
        recurrent=RecurrentSpec(
            kind=RecurrentKind.GATED_DELTA,
            heads=fields.integer("linear_num_value_heads", low=1, high=MAX_HEADS),
            head_dim=fields.integer("linear_value_head_dim", low=1, high=MAX_HEAD_DIM),
            key_heads=fields.integer("linear_num_key_heads", low=1, high=MAX_HEADS),
            key_dim=fields.integer("linear_key_head_dim", low=1, high=MAX_HEAD_DIM),
            short_conv=fields.integer("linear_conv_kernel_dim", low=1, high=64, default=4),
        ),
    )


def _read_kimi_delta(fields: FieldReader) -> LayerPlan:
    """Read Kimi Linear's layers; the checkpoint's table counts them from 1."""
    layers = fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    table = fields.table("linear_attn_config")
    fields.require_neutral("mla_use_nope", True)
    if table is None:
        default = [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(layers)]
        kinds = read_kinds(fields, "layer_types", layers, (FULL, LINEAR)) or default
        heads = fields.integer("linear_num_heads", low=1, high=MAX_HEADS)
        width = fields.integer("linear_head_dim", low=1, high=MAX_HEAD_DIM)
        short_conv = fields.integer("linear_conv_kernel_dim", low=1, high=64, default=4)
    else:
        full = table.sequence("full_attn_layers", max_length=layers) or ()
        kinds = [FULL if layer + 1 in full else LINEAR for layer in range(layers)]
        table.ignore("kda_layers")
        heads = table.integer("num_heads", low=1, high=MAX_HEADS)
        width = table.integer("head_dim", low=1, high=MAX_HEAD_DIM)
        short_conv = table.integer("short_conv_kernel_size", low=1, high=64, default=4)
        for name in table.unread_names():
            raise table.refusal(name, "is not known here", "leave it out")
    return LayerPlan(
        mixers=_mixers_of(kinds),
        recurrent=RecurrentSpec(
            kind=RecurrentKind.KIMI_DELTA,
            heads=heads,
            head_dim=width,
            key_heads=heads,
            key_dim=width,
            short_conv=short_conv,
        ),
    )


def _read_indexer_types(fields: FieldReader) -> tuple[MixerKind, ...]:
    """Read which layers of GLM-5 choose their keys, and which take an earlier layer's choice."""
    layers = fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    freq = fields.integer("index_topk_freq", low=1, high=MAX_LAYERS, default=1)
    offset = fields.integer("index_skip_topk_offset", low=0, high=MAX_LAYERS, default=2)
    fields.require_neutral("index_topk_pattern")
    fields.ignore("index_share_for_mtp_iteration")
    default = ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers)]
    kinds = read_kinds(fields, "indexer_types", layers, ("full", "shared")) or default
    read_kinds(fields, "layer_types", layers, ("indexed_attention",))
    if kinds[0] == "shared":
        rule = "must begin with full: a shared layer takes the choice of one before it"
        raise fields.refusal("indexer_types", rule, "full")
    if "shared" not in kinds:
        return ()
    shared = MixerKind.SHARED_INDEX
    return tuple(shared if kind == "shared" else MixerKind.ATTENTION for kind in kinds)


def _read_compressed(fields: FieldReader) -> tuple[MixerKind, ...]:
    """Read DeepSeek-V4's kinds of layers, or the ratios that older configs give for them."""
    layers = fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    kinds = read_kinds(fields, "layer_types", layers, tuple(COMPRESSED_KINDS))
    ratios = fields.sequence("compress_ratios", max_length=MAX_LAYERS)
    if kinds is None and ratios is not None:
        if any(ratio not in _COMPRESSED_RATIOS for ratio in ratios) or len(ratios) < layers:
            raise fields.refusal("compress_ratios", "must hold 0, 4 or 128 for each layer")
        kinds = tuple(_COMPRESSED_RATIOS[ratio] for ratio in ratios[:layers])
    if kinds is None:
        heavy, sparse = _COMPRESSED_RATIOS[128], _COMPRESSED_RATIOS[4]
        kinds = tuple(sparse if i >= 2 and i % 2 else heavy for i in range(layers))
    return tuple(COMPRESSED_KINDS[kind] for kind in kinds)


def read_kinds(
    fields: FieldReader, name: str, layers: int, legal: tuple[str, ...]
) -> tuple[Any, ...] | None:
    """Read a list of one word a layer, each of `legal`; None when absent or null.

    Raises:
        BadInput: it has another length, or another word.
    """
    kinds = fields.sequence(name, max_length=layers)
    if kinds is None:
        return None
    if len(kinds) != layers:
        raise fields.refusal(name, f"must have num_hidden_layers={layers} entries", str(layers))
    for kind in kinds:
        if kind not in legal:
            shown = str(kind)[:40]
            rule = (
                f"holds {shown!r}, a mixer that moewright does not model; legal: {', '.join(legal)}"
            )
            raise fields.refusal(name, rule, closest_match(shown, legal) or legal[0])
    return kinds


def _mixers_of(kinds: tuple[Any, ...] | list[str]) -> tuple[MixerKind, ...]:
    return tuple(MixerKind.ATTENTION if kind == FULL else MixerKind.RECURRENT for kind in kinds)
