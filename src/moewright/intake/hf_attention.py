"""The attention of a config.json: grouped-query with its variants, latent and compressed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moewright.intake.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_POSITION,
    FieldReader,
    nearest_divisor,
)
from moewright.intake.hf_layers import CHUNKED, FULL, MLA_FAMILIES, SLIDING, read_kinds
from moewright.intake.hf_rope import read_compressed_ropes, read_rope
from moewright.spec.model import AttentionKind, AttentionSpec, IndexerSpec, MixerKind, QkNorm

# How a family normalises queries and keys, or would where its config switches that on.
_QK_NORMS: Mapping[str, QkNorm] = MappingProxyType(
    {
        "qwen3": QkNorm.PER_HEAD,
        "qwen3_moe": QkNorm.PER_HEAD,
        "qwen3_vl_moe_text": QkNorm.PER_HEAD,
        "qwen3_next": QkNorm.PER_HEAD,
        "qwen3_5_moe_text": QkNorm.PER_HEAD,
        "dots1": QkNorm.PER_HEAD,
        "hy_v3": QkNorm.PER_HEAD,
        "glm4_moe": QkNorm.PER_HEAD,
        "bailing_moe": QkNorm.PER_HEAD,
        "bailing_moe_v2": QkNorm.PER_HEAD,
        "hunyuan_v1_moe": QkNorm.PER_HEAD_ROTATED,
        "llama4_text": QkNorm.UNWEIGHTED,
        "olmoe": QkNorm.FULL,
        "olmo3": QkNorm.FULL,
        "minimax_m2": QkNorm.FULL,
    }
)
# Families whose config says whether it does, and what it means where it does not say.
_QK_NORM_SWITCHES: Mapping[str, bool] = MappingProxyType(
    {
        "glm4_moe": False,
        "bailing_moe": False,
        "bailing_moe_v2": True,
        "hunyuan_v1_moe": True,
        "llama4_text": True,
        "minimax_m2": True,
    }
)
# Families whose head width does not follow from the hidden size, and their default.
_HEAD_DIMS: Mapping[str, int] = MappingProxyType(
    {
        "qwen3": 128,
        "gpt_oss": 64,
        "qwen3_next": 256,
        "qwen3_5_moe_text": 256,
        "minimax_m2": 128,
        "solar_open": 128,
        "hy_v3": 128,
    }
)
# Families with biases on q, k and v alone.
_QKV_BIASED = ("qwen2", "qwen2_moe", "glm4_moe", "solar_open")
# Families that turn pairs of neighbours.
_INTERLEAVED = ("ernie4_5_moe", "llama4_text")
_GATED = ("qwen3_next", "qwen3_5_moe_text")


def read_attention(
    fields: FieldReader, family: str, hidden: int, layers: int, max_position: int
) -> tuple[AttentionSpec, tuple[MixerKind, ...]]:
    """Read the attention, and the mixers of the layers where only some have a window.

    The mixers are () where every layer, or every n-th from the first, has the window.

    Raises:
        BadInput: a field is missing or wrong.
    """
    if family == "deepseek_v4":
        return _read_compressed(fields, family, max_position), ()
    if family in MLA_FAMILIES:
        return _read_mla(fields, family, layers, max_position), ()
    return _read_gqa(fields, family, hidden, layers, max_position)


def _read_gqa(
    fields: FieldReader, family: str, hidden: int, layers: int, max_position: int
) -> tuple[AttentionSpec, tuple[MixerKind, ...]]:
    heads = fields.integer("num_attention_heads", low=1, high=MAX_HEADS)
    kv_heads = _read_kv_heads(fields, family, heads)
    head_dim = _read_head_dim(fields, family, hidden, heads)
    window, every, mixers = _read_window(fields, family, layers, max_position)
    if family == "olmoe":
        fields.require_neutral("clip_qkv")
    if family in _GATED:
        fields.require_neutral("attn_output_gate", True)
    temperature_floor, temperature_scale = _read_temperatures(fields, family)
    qkv_bias, out_bias = _read_biases(fields, family)
    spec = AttentionSpec(
        kind=AttentionKind.GQA,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        qk_norm=_read_qk_norm(fields, family),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        sinks=family == "gpt_oss",
        sliding_window=window,
        window_every=every,
        output_gate=family in _GATED,
        chunked=family == "llama4_text" and bool(window),
        temperature_floor=temperature_floor,
        temperature_scale=temperature_scale,
        rope=read_rope(
            fields,
            family,
            max_position,
            interleaved=family in _INTERLEAVED,
            head_dim=head_dim,
        ),
    )
    return spec, mixers


def _read_biases(fields: FieldReader, family: str) -> tuple[bool, bool]:
    """Read whether q, k and v have biases, and whether the output has one."""
    if family in ("bailing_moe", "bailing_moe_v2"):
        qkv_bias = fields.boolean("use_qkv_bias", default=False)
        return qkv_bias, fields.boolean("use_bias", default=False)
    if family == "ernie4_5_moe":
        fields.require_neutral("use_bias", False)  # of all linears, those of MLPs too
        return False, False
    bias = fields.boolean("attention_bias", default=family == "gpt_oss")
    if family in ("qwen2", "qwen2_moe"):
        if bias:
            rule = f"{family} has biases on q, k and v only"
            raise fields.refusal("attention_bias", rule, "false")
        bias = fields.boolean("qkv_bias", default=True)
    return bias, bias and family not in _QKV_BIASED


def _read_qk_norm(fields: FieldReader, family: str) -> QkNorm:
    norm = _QK_NORMS.get(family, QkNorm.NONE)
    if family not in _QK_NORM_SWITCHES:
        return norm
    if family == "minimax_m2":
        fields.require_neutral("qk_norm_type", "per_layer")
    is_on = fields.boolean("use_qk_norm", default=_QK_NORM_SWITCHES[family])
    return norm if is_on else QkNorm.NONE


def _read_temperatures(fields: FieldReader, family: str) -> tuple[float, float]:
    """Read the positions and the factor by which Llama 4's unrotated queries grow; 0 for none."""
    if family != "llama4_text" or not fields.boolean("attn_temperature_tuning", default=True):
        fields.ignore("attn_temperature_tuning", "floor_scale", "attn_scale")
        return 0.0, 0.0
    floor = fields.number("floor_scale", low=1, high=MAX_POSITION, default=8192)
    return floor, fields.number("attn_scale", low=0, high=1e3, default=0.1)


def read_rope_layers(fields: FieldReader, family: str, layers: int) -> tuple[bool, ...]:
    """Read which layers rotate their queries and keys; () where all do, or none.

    Raises:
        BadInput: the list has another length, or another number than 0 and 1.
    """
    if family not in ("llama4_text", "smollm3"):
        return ()
    interval = fields.integer("no_rope_layer_interval", low=1, high=MAX_LAYERS, default=4)
    listed = fields.sequence("no_rope_layers", max_length=layers)
    if not listed:
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if len(listed) != layers or any(entry not in (0, 1) for entry in listed):
        raise fields.refusal("no_rope_layers", f"must hold 0 or 1 for each of {layers} layers")
    return () if all(listed) else tuple(map(bool, listed))


def _read_kv_heads(fields: FieldReader, family: str, heads: int) -> int:
    name = "num_key_value_heads"
    # Where these families leave it out, or any family has null, every head has its own keys.
    has_default = family in ("llama", "olmoe", "nemotron", "olmo3") or name in fields
    kv_heads = fields.integer(
        name,
        low=1,
        high=heads,
        bound="num_attention_heads",
        default=heads if has_default else None,
    )
    if heads % kv_heads:
        rule = f"must divide num_attention_heads={heads}"
        raise fields.refusal(name, rule, nearest_divisor(heads, kv_heads))
    return kv_heads


def _read_head_dim(fields: FieldReader, family: str, hidden: int, heads: int) -> int:
    if not fields.has_value("head_dim") and hidden % heads and family not in _HEAD_DIMS:
        rule = f"must divide hidden_size={hidden} when head_dim is not given"
        raise fields.refusal("num_attention_heads", rule, nearest_divisor(hidden, heads))
    default = _HEAD_DIMS.get(family, hidden // heads)
    names = ("head_dim", "attention_head_dim") if family == "hunyuan_v1_moe" else ("head_dim",)
    head_dim = fields.integer(*names, low=1, high=MAX_HEAD_DIM, default=default)
    _require_even(fields, "head_dim", head_dim)
    return head_dim


def _require_even(fields: FieldReader, name: str, width: int) -> None:
    if width % 2:
        rule = "must be even: rotary embedding turns pairs"
        raise fields.refusal(name, rule, str(width + 1))


def _read_window(
    fields: FieldReader, family: str, layers: int, max_position: int
) -> tuple[int, int, tuple[MixerKind, ...]]:
    """Read (window, every how many layers it holds, mixers); (0, 0, ()) for full attention."""
    if family in _GATED or family == "nemotron_h":
        fields.require_neutral("sliding_window")
        return 0, 0, ()  # their layer_types are of mixers (hf_layers)
    if family == "llama4_text":
        return _read_chunks(fields, layers)
    kinds = read_kinds(fields, "layer_types", layers, (FULL, SLIDING))
    is_qwen = family.startswith(("qwen", "dots1", "smollm3"))
    is_used = fields.boolean("use_sliding_window", default=not is_qwen)
    default = 4096 if family == "olmo3" else 0
    window = fields.integer("sliding_window", low=0, high=MAX_POSITION, default=default)
    if family == "phimoe" and window >= max_position:
        return 0, 0, ()
    if kinds is None and family == "olmo3":
        kinds = tuple(SLIDING if (layer + 1) % 4 else FULL for layer in range(layers))
    if kinds is not None:
        return _window_of_layer_types(fields, kinds, window, layers)
    if not is_used or not window:
        return 0, 0, ()
    if is_qwen:
        rule = "needs layer_types to say which layers are windowed"
        raise fields.refusal("use_sliding_window", rule, "false")
    return window, 2 if family == "gpt_oss" else 1, ()


def _window_of_layer_types(
    fields: FieldReader, kinds: tuple[str, ...], window: int, layers: int
) -> tuple[int, int, tuple[MixerKind, ...]]:
    if SLIDING not in kinds:
        return 0, 0, ()
    if not window:
        raise fields.refusal("sliding_window", f"is missing while layer_types has {SLIDING}")
    for every in range(1, layers + 1):
        if all((kind == SLIDING) == (layer % every == 0) for layer, kind in enumerate(kinds)):
            return window, every, ()
    return window, 0, _local_mixers(kinds, SLIDING)


def _read_chunks(fields: FieldReader, layers: int) -> tuple[int, int, tuple[MixerKind, ...]]:
    """Read Llama 4's chunks: the layers that rotate attend within them, every fourth to all."""
    chunk = fields.integer("attention_chunk_size", low=0, high=MAX_POSITION, default=8192)
    kinds = read_kinds(fields, "layer_types", layers, (FULL, CHUNKED))
    if kinds is None:
        rotated = read_rope_layers(fields, "llama4_text", layers) or (True,) * layers
        kinds = tuple(CHUNKED if rotates else FULL for rotates in rotated)
    if not chunk or CHUNKED not in kinds:
        return 0, 0, ()
    return chunk, 0, _local_mixers(kinds, CHUNKED)


def _local_mixers(kinds: tuple[str, ...], local: str) -> tuple[MixerKind, ...]:
    return tuple(
        MixerKind.LOCAL_ATTENTION if kind == local else MixerKind.ATTENTION for kind in kinds
    )


def _read_mla(fields: FieldReader, family: str, layers: int, max_position: int) -> AttentionSpec:
    heads = fields.integer("num_attention_heads", low=1, high=MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", low=1, high=MAX_HEADS, default=heads)
    if kv_heads != heads:
        rule = (
            f"must equal num_attention_heads={heads}: latent attention expands keys for every head"
        )
        raise fields.refusal("num_key_value_heads", rule, str(heads))
    nope = fields.integer("qk_nope_head_dim", low=1, high=MAX_HEAD_DIM)
    rope = fields.integer("qk_rope_head_dim", low=2, high=MAX_HEAD_DIM)
    _require_even(fields, "qk_rope_head_dim", rope)
    # HF writes the rotary width as head_dim and the sum as qk_head_dim; neither says anything new.
    fields.ignore("head_dim")
    fields.require_neutral("qk_head_dim", nope + rope)
    if family not in ("kimi_linear", "glm_moe_dsa", "deepseek_v32") and (
        fields.sequence("layer_types", max_length=layers) not in (None, (FULL,) * layers)
    ):
        raise fields.refusal("layer_types", "latent attention is full in every layer")
    if family == "deepseek_v32":
        read_kinds(fields, "layer_types", layers, ("indexed_attention",))
    bias = fields.boolean("attention_bias", default=False)
    return AttentionSpec(
        kind=AttentionKind.MLA,
        heads=heads,
        kv_heads=heads,
        head_dim=nope + rope,
        v_head_dim=fields.integer("v_head_dim", low=1, high=MAX_HEAD_DIM),
        qkv_bias=bias,
        out_bias=bias,
        q_lora_rank=fields.integer("q_lora_rank", low=0, high=MAX_HIDDEN, default=0),
        kv_lora_rank=fields.integer("kv_lora_rank", low=1, high=MAX_HIDDEN),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        indexer=_read_indexer(fields, family),
        rope=read_rope(
            fields,
            family,
            max_position,
            interleaved=fields.boolean("rope_interleave", default=True),
            head_dim=rope,
        ),
    )


def _read_indexer(fields: FieldReader, family: str) -> IndexerSpec | None:
    if family not in ("deepseek_v32", "glm_moe_dsa", "deepseek_v4"):
        return None
    is_glm = family == "glm_moe_dsa"
    return IndexerSpec(
        heads=fields.integer("index_n_heads", low=1, high=MAX_HEADS),
        head_dim=fields.integer("index_head_dim", low=1, high=MAX_HEAD_DIM),
        top_k=fields.integer("index_topk", low=1, high=MAX_POSITION),
        interleaved=fields.boolean("indexer_rope_interleave", default=is_glm),
    )


def _read_compressed(fields: FieldReader, family: str, max_position: int) -> AttentionSpec:
    """Read DeepSeek-V4's attention: one head is key and value, its output grouped and low-rank."""
    heads = fields.integer("num_attention_heads", low=1, high=MAX_HEADS)
    fields.require_neutral("num_key_value_heads", 1)
    head_dim = fields.integer("head_dim", low=2, high=MAX_HEAD_DIM)
    groups = fields.integer("o_groups", low=1, high=heads, bound="num_attention_heads")
    if heads % groups:
        rule = f"must divide num_attention_heads={heads}"
        raise fields.refusal("o_groups", rule, nearest_divisor(heads, groups))
    rates = fields.table("compress_rates")
    sparse_rate, heavy_rate = 4, 128
    if rates is not None:
        sparse_rate = rates.integer("compressed_sparse_attention", low=1, high=4096, default=4)
        heavy_rate = rates.integer(
            "heavily_compressed_attention", low=1, high=MAX_POSITION, default=128
        )
    for name in ("attention_bias", "mlp_bias"):
        fields.require_neutral(name, False)
    share = fields.number("partial_rotary_factor", low=0, high=1, default=0.125)
    # The factor says what the width was, where both are there.
    rotated = fields.integer(
        "qk_rope_head_dim", low=2, high=head_dim, default=max(2, int(head_dim * share))
    )
    rope, compressed_rope = read_compressed_ropes(fields, family, max_position, rotated / head_dim)
    return AttentionSpec(
        kind=AttentionKind.COMPRESSED,
        heads=heads,
        kv_heads=1,
        head_dim=head_dim,
        v_head_dim=head_dim,
        sinks=True,
        sliding_window=fields.integer("sliding_window", low=1, high=MAX_POSITION),
        q_lora_rank=fields.integer("q_lora_rank", low=1, high=MAX_HIDDEN),
        qk_rope_head_dim=rotated,
        indexer=_read_indexer(fields, family),
        output_groups=groups,
        output_lora_rank=fields.integer("o_lora_rank", low=1, high=MAX_HIDDEN),
        sparse_rate=sparse_rate,
        heavy_rate=heavy_rate,
        rope=rope,
        compressed_rope=compressed_rope,
    )
