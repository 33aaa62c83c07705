"""The model of a Hugging Face config.json, as a ModelSpec.

The reader is strict where a field changes the model, and never runs code from a checkpoint. It
reads both forms of rope (`rope_theta` + `rope_scaling`, `rope_parameters`) and all spellings of the
expert count. Fields that say nothing about the model's shape are ignored; `unknown_fields` names
those that moewright does not know. A field that asks for other mathematics (another scorer,
activation or mixer, a soft cap, an unknown switch that is on) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moewright.codec import FloatPolicy, closest_match, read_json_data
from moewright.codec.files import name_model
from moewright.intake.fields import (
    MAX_FFN,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_VOCAB,
    FieldReader,
    nearest_divisor,
)
from moewright.intake.hf_attention import read_attention, read_rope_layers
from moewright.intake.hf_experts import (
    MoeLayers,
    read_deepseek_v2,
    read_deepseek_v3,
    read_gpt_oss,
    read_mixtral,
    read_olmoe,
    read_qwen_hybrid,
    read_qwen_moe,
)
from moewright.intake.hf_layers import read_layer_plan, read_mtp_layers
from moewright.intake.hf_moe_families import (
    read_bailing,
    read_deepseek_v4,
    read_ernie,
    read_granite,
    read_hunyuan,
    read_hy_v3,
    read_jamba,
    read_kimi_linear,
    read_llama4,
    read_minimax,
    read_nemotron_h,
    read_phimoe,
)
from moewright.intake.hf_style import TIED, UNROTATED, read_style
from moewright.intake.hf_unknown import require_same_score, skipped_names
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import (
    Activation,
    AttentionKind,
    AttentionSpec,
    ModelSpec,
    MoeSpec,
    NormKind,
    PositionKind,
    RopeSpec,
)
from moewright.spec.printable import escape_controls

MAX_FILE_BYTES = 16 * 2**20

# Model types whose token mixer a ModelSpec cannot describe, and what it is.
_UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "falcon_h1": "Mamba-2 and attention side by side",
        "mamba": "Mamba layers",
        "mamba2": "Mamba-2 layers",
    }
)

_GPT2_SUMMARY_FIELDS = ("activation", "proj_to_labels", "type", "use_proj")
# The reader of each family's experts; None for a dense family.
FAMILIES: Mapping[str, Callable[[FieldReader, int], MoeLayers] | None] = MappingProxyType(
    {
        "mixtral": read_mixtral,
        "qwen2_moe": read_qwen_moe,
        "qwen3_moe": read_qwen_moe,
        "qwen3_vl_moe_text": read_qwen_hybrid,
        "olmoe": read_olmoe,
        "gpt_oss": read_gpt_oss,
        "deepseek_v2": read_deepseek_v2,
        "deepseek_v3": read_deepseek_v3,
        "kimi_k2": read_deepseek_v3,
        "dots1": read_deepseek_v3,
        "glm4_moe": read_deepseek_v3,
        "glm4_moe_lite": read_deepseek_v3,
        "solar_open": read_deepseek_v3,
        "minimax_m2": read_minimax,
        "ernie4_5_moe": read_ernie,
        "hunyuan_v1_moe": read_hunyuan,
        "bailing_moe": read_bailing,
        "bailing_moe_v2": read_bailing,
        "phimoe": read_phimoe,
        "jamba": read_jamba,
        "hy_v3": read_hy_v3,
        "granitemoe": read_granite,
        "granitemoeshared": read_granite,
        "llama4_text": read_llama4,
        "grok-1": read_mixtral,
        "qwen3_next": read_qwen_hybrid,
        "qwen3_5_moe_text": read_qwen_hybrid,
        "kimi_linear": read_kimi_linear,
        "nemotron_h": read_nemotron_h,
        "deepseek_v32": read_deepseek_v3,
        "glm_moe_dsa": read_deepseek_v3,
        "deepseek_v4": read_deepseek_v4,
        "llama": None,
        "mistral": None,
        "qwen2": None,
        "qwen3": None,
        "smollm3": None,
        "olmo3": None,
        "nemotron": None,
        "gpt2": None,
    }
)

# Model types whose `text_config` holds the language model, and the family it has by default. What
# they see or hear beside is not part of the ModelSpec.
_NESTED: Mapping[str, str] = MappingProxyType(
    {
        "qwen3_vl_moe": "qwen3_vl_moe_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
        "llama4": "llama4_text",
        "kimi_k25": "kimi_k2",
    }
)
# Fields of such a model type beside `text_config`, by the beginning or the end of their names.
_BESIDE_TEXT = ("vision", "image", "video", "audio", "projection", "boi_", "eoi_", "mm_", "media")


@dataclass(frozen=True, kw_only=True, slots=True)
class _ParsedConfig:
    model: ModelSpec
    unknown_fields: tuple[str, ...]


def read_config(path: Path) -> ModelSpec:
    """Read the model of a config.json, or of a folder with one.

    Raises:
        BadInput: the file cannot be read, or it has a model that moewright does not know.
    """
    file = _config_file(path)
    return parse_config(_read_table(file), where=str(file), name=name_model(file.parent))


def unknown_fields(path: Path) -> tuple[str, ...]:
    """Return the names in a config.json that are skipped because moewright does not know them."""
    file = _config_file(path)
    return _parse(_read_table(file), str(file), "").unknown_fields


def parse_config(config: Mapping[str, Any], *, where: str, name: str) -> ModelSpec:
    """Return the model of a table of HF fields; `where` locates errors.

    Raises:
        BadInput: a field is missing, wrong or asks for what moewright does not model.
    """
    return _parse(config, where, escape_controls(name)).model


def _config_file(path: Path) -> Path:
    if "\0" in str(path):
        raise BadInput(Reason(field=repr(str(path))[:80], rule="is no path: it holds a zero byte"))
    try:
        if path.is_dir():
            path = path / "config.json"
        size = path.stat().st_size if path.is_file() else 0
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise BadInput(Reason(field=str(path)[:80], rule=rule)) from None
    if size > MAX_FILE_BYTES:
        rule = f"is no config.json: larger than {MAX_FILE_BYTES // 2**20} MiB"
        raise BadInput(Reason(field=str(path), rule=rule))
    return path


def _read_table(file: Path) -> Mapping[str, Any]:
    # Published configs of Nemotron-H bound time steps by [0.0, Infinity].
    data = read_json_data(file, FloatPolicy.NON_FINITE)
    if not isinstance(data, dict):
        raise BadInput(Reason(field=str(file), rule="must hold a table of fields at its top"))
    return data


def _parse(config: Mapping[str, Any], where: str, name: str) -> _ParsedConfig:
    fields = FieldReader(config, where)
    skipped: tuple[str, ...] = ()
    family = fields.raw_value("model_type")
    if isinstance(family, str) and family in _NESTED:
        fields, family, skipped = _enter_text_config(fields, family)
    else:
        family = _read_family(fields)
    model = _read_gpt2(fields, name) if family == "gpt2" else _read_rotary(fields, family, name)
    require_same_score(fields, model)
    return _ParsedConfig(model=model, unknown_fields=(*skipped, *skipped_names(fields)))


def _enter_text_config(
    fields: FieldReader, outer_family: str
) -> tuple[FieldReader, str, tuple[str, ...]]:
    """Return the nested language model, its family, and the fields beside it that are skipped."""
    text = fields.table("text_config")
    if text is None:
        raise fields.refusal("text_config", "is missing: it holds the language model")
    other_parts = (field for field in fields.unread_names() if _is_beside_text(field))
    if fields.has_value("tie_word_embeddings"):  # transformers ties by that of the outer table
        inner = dict(fields.raw_value("text_config"))
        inner["tie_word_embeddings"] = fields.raw_value("tie_word_embeddings")
        text = FieldReader(inner, text.where)
    fields.ignore("model_type", "tie_word_embeddings", *other_parts)
    family = text.raw_value("model_type") or _NESTED[outer_family]
    text.ignore("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise text.refusal("model_type", f"must be {_NESTED[outer_family]}", _NESTED[outer_family])
    return text, family, skipped_names(fields)


def _is_beside_text(field: str) -> bool:
    is_other_part = any(part in field for part in _BESIDE_TEXT)
    return is_other_part or field.endswith(("_token_id", "_token_index"))


def _read_family(fields: FieldReader) -> str:
    family = fields.raw_value("model_type")
    fields.ignore("model_type")
    names = (*FAMILIES, *_NESTED)
    rule = f"must be one of {len(names)} known model types"
    if family is None:
        raise fields.refusal("model_type", f"is missing; {rule}", "llama")
    if not isinstance(family, str):
        raise fields.refusal("model_type", rule, "llama")
    if family in _UNSUPPORTED:
        raise fields.refusal(
            "model_type",
            f"has {_UNSUPPORTED[family]}, a mixer that moewright does not model",
        )
    if family not in FAMILIES:
        nearest = closest_match(family, names)
        raise fields.refusal("model_type", rule, nearest or f"one of {', '.join(FAMILIES)}")
    return family


def _read_rotary(fields: FieldReader, family: str, name: str) -> ModelSpec:
    """Read any family but GPT-2, by the parts that its layers consist of."""
    hidden = fields.integer("hidden_size", low=1, high=MAX_HIDDEN)
    plan = read_layer_plan(fields, family)
    layers = len(plan.mixers) or fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    max_position = fields.integer(
        "max_position_embeddings", "model_max_length", low=1, high=MAX_POSITION, default=2048
    )
    style = read_style(fields, family)
    attention, windows = read_attention(fields, family, hidden, layers, max_position)
    read_experts = FAMILIES[family]
    experts = read_experts(fields, layers) if read_experts else None
    moe_layers = experts.layers if experts else (False,) * layers
    moe = None
    if experts is not None and any(moe_layers):
        moe = _with_latent_size(fields, experts.spec, hidden)
    model = ModelSpec(
        name=name,
        family=family,
        hidden_size=hidden,
        layers=layers,
        mtp_layers=read_mtp_layers(fields, family),
        mtp_shared=family == "nemotron_h",
        vocab_size=fields.integer("vocab_size", low=1, high=MAX_VOCAB),
        attention=attention,
        dense_ffn_size=0,
        moe=moe,
        moe_layers=moe_layers,
        gated=style.gated,
        mlp_bias=fields.boolean("mlp_bias", default=False),
        norm=style.norm,
        norm_eps=style.norm_eps,
        position=_read_position(fields, family),
        max_position=max_position,
        tie_embeddings=fields.boolean("tie_word_embeddings", default=family in TIED),
        initializer_range=fields.number("initializer_range", low=0, high=100, default=0.02),
        mixers=plan.mixers or windows,
        mlp_layers=plan.mlp_layers,
        recurrent=plan.recurrent,
        activation=style.activation,
        norm_placement=style.norm_placement,
        rope_layers=read_rope_layers(fields, family, layers),
        head_bias=style.head_bias,
        multipliers=style.multipliers,
        score_cap=style.score_cap,
        residual_streams=style.residual_streams,
        stream_iterations=style.stream_iterations,
        stream_eps=style.stream_eps,
        activation_limit=style.activation_limit,
        zero_centered_norms=style.zero_centered_norms,
    )
    return replace(model, dense_ffn_size=_read_dense_width(fields, family, model))


def _read_dense_width(fields: FieldReader, family: str, model: ModelSpec) -> int:
    """Return the width of dense MLPs; 0 where no layer has one.

    Families without dense layers call the width of an expert intermediate_size.
    """
    names = ("intermediate_size_mlp",) if family == "llama4_text" else ("intermediate_size",)
    default = None if model.dense_layer_count else 1
    width = fields.integer(*names, low=1, high=MAX_FFN, default=default)
    return width if model.dense_layer_count else 0


def _with_latent_size(fields: FieldReader, spec: MoeSpec, hidden: int) -> MoeSpec:
    """Return the experts with the size of their latent space, `moe_latent_size`; 0 for none."""
    size = fields.integer("moe_latent_size", low=0, high=hidden, bound="hidden_size", default=0)
    return replace(spec, latent_size=size)


def _read_position(fields: FieldReader, family: str) -> PositionKind:
    if fields.boolean("alibi", default=False):
        return PositionKind.ALIBI
    return PositionKind.NONE if family in UNROTATED else PositionKind.ROPE


def _read_gpt2(fields: FieldReader, name: str) -> ModelSpec:
    """Read GPT-2 and GPT-3: LayerNorm, learned positions, biases, GELU, tied embeddings."""
    hidden = fields.integer("n_embd", "hidden_size", low=1, high=MAX_HIDDEN)
    layers = fields.integer("n_layer", "num_hidden_layers", low=1, high=MAX_LAYERS)
    heads = fields.integer("n_head", "num_attention_heads", low=1, high=MAX_HEADS)
    if hidden % heads:
        nearest = nearest_divisor(hidden, heads)
        raise fields.refusal("n_head", f"must divide n_embd={hidden}", nearest)
    fields.choice("activation_function", choices=("gelu_new", "gelu"), default="gelu_new")
    for dropout in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"):
        fields.require_neutral(dropout, 0)
    fields.require_neutral("scale_attn_by_inverse_layer_idx", False)
    fields.require_neutral("scale_attn_weights", True)
    fields.ignore("reorder_and_upcast_attn", "n_ctx")
    fields.ignore(*(f"summary_{field}" for field in _GPT2_SUMMARY_FIELDS))
    head_dim = hidden // heads
    return ModelSpec(
        name=name,
        family="gpt2",
        hidden_size=hidden,
        layers=layers,
        vocab_size=fields.integer("vocab_size", low=1, high=MAX_VOCAB),
        attention=AttentionSpec(
            kind=AttentionKind.GQA,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            qkv_bias=True,
            out_bias=True,
            rope=RopeSpec(),
        ),
        activation=Activation.GELU,
        dense_ffn_size=fields.integer("n_inner", low=1, high=MAX_FFN, default=4 * hidden),
        moe=None,
        moe_layers=(False,) * layers,
        gated=False,
        mlp_bias=True,
        norm=NormKind.LAYER,
        norm_eps=fields.number("layer_norm_epsilon", low=0, high=1, default=1e-5),
        position=PositionKind.LEARNED,
        max_position=fields.integer("n_positions", low=1, high=MAX_POSITION, default=1024),
        tie_embeddings=fields.boolean("tie_word_embeddings", default=True),
        initializer_range=fields.number("initializer_range", low=0, high=100, default=0.02),
    )
