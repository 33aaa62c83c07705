"""The model of a Hugging Face config.json, as a ModelSpec.

The reader is strict where a field changes the model, and never runs code from a checkpoint. It
reads both forms of rope (`rope_theta` + `rope_scaling`, `rope_parameters`) and all spellings of the
expert count. Fields that say nothing about the model's shape are ignored; `unknown_fields` names
those that moewright does not know. A field that asks for other mathematics (another scorer,
activation or mixer, a soft cap) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moewright.codec import closest_match, read_json_data
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
from moewright.intake.hf_attention import read_gqa, read_mla
from moewright.intake.hf_experts import (
    MoeLayers,
    read_deepseek_v2,
    read_deepseek_v3,
    read_gpt_oss,
    read_mixtral,
    read_olmoe,
    read_qwen_moe,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import (
    AttentionKind,
    AttentionSpec,
    ModelSpec,
    MoeSpec,
    NormKind,
    PositionKind,
    RopeSpec,
)

MAX_FILE_BYTES = 16 * 2**20

# Model types whose token mixer a ModelSpec cannot describe, and what it is.
_UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "qwen3_next": "gated delta net (linear attention) layers",
        "qwen3_5_moe": "gated delta net (linear attention) layers",
        "nemotron_h": "hybrid Mamba-2 layers",
        "deepseek_v32": "sparse attention with an indexer (DSA)",
        "deepseek_v4": "compressed sparse attention layers",
        "glm_moe_dsa": "sparse attention with an indexer (DSA)",
        "jamba": "hybrid Mamba layers",
        "falcon_h1": "hybrid Mamba-2 layers",
        "mamba": "Mamba layers",
        "mamba2": "Mamba-2 layers",
    }
)

# Fields that say nothing about the shape of the model.
_HARMLESS = (
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
    "name_or_path",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "decoder_start_token_id",
    "output_router_logits",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "pretraining_tp",
    "quantization_config",
    "max_window_layers",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "num_nextn_predict_layers",
    "is_decoder",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "problem_type",
    "task_specific_params",
    "tokenizer_class",
    "use_bfloat16",
    "torchscript",
    "initial_context_length",
    "_attn_implementation",
    "attn_implementation",
    "router_z_loss_coef",
    "moe_z_loss_coef",
    "expert_parallel",
)

# An unknown field asks for other mathematics if its name contains one of these,
_TELLING_PARTS = (
    "mamba",
    "ssm",
    "linear_",
    "conv",
    "hybrid",
    "index_",
    "indexer",
    "dsa",
    "delta",
    "softcap",
    "soft_cap",
    "multiplier",
    "residual_streams",
    "hash_layers",
    "latent",
    "cross_attention",
    "output_gate",
    "compress",
    "full_attention_interval",
    "attention_chunk",
    "no_rope",
    "inverse_layer",
    "logit_scale",
    "dropout",
    "pdrop",
    "alibi",
    "parallel_attn",
    "parallel_residual",
    "sandwich",
    "zero_expert",
    "engram",
    "mhc",
)
# or begins with one of these, the parts of a model that decide its mathematics.
_TELLING_PREFIXES = (
    "attention_",
    "attn_",
    "qk_",
    "rope_",
    "rotary_",
    "norm_",
    "mlp_",
    "ffn_",
    "moe_",
    "router_",
    "expert",
    "n_group",
)

_GPT2_SUMMARY_FIELDS = ("activation", "proj_to_labels", "type", "use_proj")
_MLA_FAMILIES = ("deepseek_v2", "deepseek_v3", "kimi_k2")

# The reader of each family's experts; None for a dense family.
FAMILIES: Mapping[str, Callable[[FieldReader, int], MoeLayers] | None] = MappingProxyType(
    {
        "mixtral": read_mixtral,
        "qwen2_moe": read_qwen_moe,
        "qwen3_moe": read_qwen_moe,
        "olmoe": read_olmoe,
        "gpt_oss": read_gpt_oss,
        "deepseek_v2": read_deepseek_v2,
        "deepseek_v3": read_deepseek_v3,
        "kimi_k2": read_deepseek_v3,
        "llama": None,
        "mistral": None,
        "qwen2": None,
        "qwen3": None,
        "gpt2": None,
    }
)


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
    return parse_config(_read_table(file), where=str(file), name=file.resolve().parent.name)


def unknown_fields(path: Path) -> tuple[str, ...]:
    """Return the names in a config.json that are skipped because moewright does not know them."""
    file = _config_file(path)
    return _parse(_read_table(file), str(file), "").unknown_fields


def parse_config(config: Mapping[str, Any], *, where: str, name: str) -> ModelSpec:
    """Return the model of a table of HF fields; `where` locates errors.

    Raises:
        BadInput: a field is missing, wrong or asks for what moewright does not model.
    """
    return _parse(config, where, name).model


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
    data = read_json_data(file)
    if not isinstance(data, dict):
        raise BadInput(Reason(field=str(file), rule="must hold a table of fields at its top"))
    return data


def _parse(config: Mapping[str, Any], where: str, name: str) -> _ParsedConfig:
    fields = FieldReader(config, where)
    family = _read_family(fields)
    model = _read_gpt2(fields, name) if family == "gpt2" else _read_rotary(fields, family, name)
    fields.ignore(*_HARMLESS)
    unknown = fields.unread_names()
    for field in unknown:
        if _is_telling(field) and not _is_off(fields.raw_value(field)):
            raise fields.refusal(field, "asks for what moewright does not model", "leave it out")
    return _ParsedConfig(model=model, unknown_fields=unknown)


def _is_telling(field: str) -> bool:
    return field.startswith(_TELLING_PREFIXES) or any(part in field for part in _TELLING_PARTS)


def _is_off(value: object) -> bool:
    """Whether an unknown field leaves the model as it is: absent, off, or a factor of 1."""
    return value in (None, False, 0, 1, 1.0, [], {})


def _read_family(fields: FieldReader) -> str:
    family = fields.raw_value("model_type")
    fields.ignore("model_type")
    rule = f"must be one of {', '.join(FAMILIES)}"
    if family is None:
        raise fields.refusal("model_type", f"is missing; one of {', '.join(FAMILIES)}")
    if not isinstance(family, str):
        raise fields.refusal("model_type", rule)
    if family in _UNSUPPORTED:
        raise fields.refusal(
            "model_type",
            f"has {_UNSUPPORTED[family]}, a mixer that moewright does not model; "
            "supported: GQA and MLA attention",
        )
    if family not in FAMILIES:
        raise fields.refusal("model_type", rule, closest_match(family, FAMILIES))
    return family


def _read_rotary(fields: FieldReader, family: str, name: str) -> ModelSpec:
    """Read any family but GPT-2: RMSNorm, rotary positions, gated MLP."""
    hidden = fields.integer("hidden_size", low=1, high=MAX_HIDDEN)
    layers = fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    max_position = fields.integer("max_position_embeddings", low=1, high=MAX_POSITION, default=2048)
    fields.choice("hidden_act", choices=("silu", "swiglu"), default="silu")
    fields.require_neutral("attention_dropout", 0)
    fields.require_neutral("partial_rotary_factor", 1)
    read_attention = read_mla if family in _MLA_FAMILIES else read_gqa
    attention = read_attention(fields, family, hidden, layers, max_position)
    read_experts = FAMILIES[family]
    experts = read_experts(fields, layers) if read_experts else None
    moe_layers = experts.layers if experts else (False,) * layers
    moe = None
    if experts is not None and any(moe_layers):
        moe = _with_latent_size(fields, experts.spec, hidden)
    has_dense_layers = not all(moe_layers)
    # Families without dense layers call the width of an expert intermediate_size.
    width = fields.integer(
        "intermediate_size", low=1, high=MAX_FFN, default=None if has_dense_layers else 1
    )
    return ModelSpec(
        name=name,
        family=family,
        hidden_size=hidden,
        layers=layers,
        mtp_layers=_read_mtp_layers(fields, family),
        vocab_size=fields.integer("vocab_size", low=1, high=MAX_VOCAB),
        attention=attention,
        dense_ffn_size=width if has_dense_layers else 0,
        moe=moe,
        moe_layers=moe_layers,
        mlp_bias=fields.boolean("mlp_bias", default=False),
        norm_eps=fields.number("rms_norm_eps", low=0, high=1, default=1e-6),
        max_position=max_position,
        tie_embeddings=fields.boolean("tie_word_embeddings", default=False),
        initializer_range=fields.number("initializer_range", low=0, high=100, default=0.02),
    )


def _read_mtp_layers(fields: FieldReader, family: str) -> int:
    name = "num_nextn_predict_layers"
    if family in _MLA_FAMILIES:
        return fields.integer(name, low=0, high=MAX_LAYERS, default=0)
    if fields.raw_value(name):
        raise fields.refusal(name, f"multi-token prediction is not known for {family}", "0")
    return 0


def _with_latent_size(fields: FieldReader, spec: MoeSpec, hidden: int) -> MoeSpec:
    """Return the experts with the size of their latent space, `moe_latent_size`; 0 for none.

    The field is Nemotron 3's; no family here has such experts of its own.
    """
    size = fields.integer("moe_latent_size", low=0, high=hidden, bound="hidden_size", default=0)
    return replace(spec, latent_size=size)


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
