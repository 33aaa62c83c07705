"""The attention of a config.json: grouped-query with its variants, and latent attention."""

from __future__ import annotations

from typing import Any

from moewright.codec import closest_match
from moewright.intake.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_POSITION,
    FieldReader,
    nearest_divisor,
)
from moewright.intake.hf_rope import read_rope
from moewright.spec.model import AttentionKind, AttentionSpec, QkNorm

_QK_NORMS = {"qwen3": QkNorm.PER_HEAD, "qwen3_moe": QkNorm.PER_HEAD, "olmoe": QkNorm.FULL}
# Families whose head width does not follow from the hidden size, and their default.
_HEAD_DIMS = {"qwen3": 128, "gpt_oss": 64}
_FULL = "full_attention"
_SLIDING = "sliding_attention"


def read_gqa(
    fields: FieldReader, family: str, hidden: int, layers: int, max_position: int
) -> AttentionSpec:
    """Read grouped-query attention.

    Raises:
        BadInput: a field is missing or wrong.
    """
    heads = fields.integer("num_attention_heads", low=1, high=MAX_HEADS)
    kv_heads = _read_kv_heads(fields, family, heads)
    head_dim = _read_head_dim(fields, family, hidden, heads)
    window, every = _read_window(fields, family, layers)
    if family == "olmoe":
        fields.require_neutral("clip_qkv")
    is_gpt_oss = family == "gpt_oss"
    is_qwen2 = family in ("qwen2", "qwen2_moe")
    bias = fields.boolean("attention_bias", default=is_gpt_oss)
    if is_qwen2:
        if bias:
            rule = f"{family} has biases on q, k and v only"
            raise fields.refusal("attention_bias", rule, "false")
        bias = fields.boolean("qkv_bias", default=True)
    return AttentionSpec(
        kind=AttentionKind.GQA,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        qk_norm=_QK_NORMS.get(family, QkNorm.NONE),
        qkv_bias=bias,
        out_bias=bias and not is_qwen2,
        sinks=is_gpt_oss,
        sliding_window=window,
        window_every=every,
        rope=read_rope(fields, family, max_position, interleaved=False),
    )


def _read_kv_heads(fields: FieldReader, family: str, heads: int) -> int:
    name = "num_key_value_heads"
    # Where these families leave it out, or any family has null, every head has its own keys.
    has_default = family in ("llama", "olmoe") or name in fields
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
    head_dim = fields.integer("head_dim", low=1, high=MAX_HEAD_DIM, default=default)
    _require_even(fields, "head_dim", head_dim)
    return head_dim


def _require_even(fields: FieldReader, name: str, width: int) -> None:
    if width % 2:
        rule = "must be even: rotary embedding turns pairs"
        raise fields.refusal(name, rule, str(width + 1))


def _read_window(fields: FieldReader, family: str, layers: int) -> tuple[int, int]:
    """Read (sliding window, every how many layers it holds); (0, 0) for full attention."""
    kinds = fields.sequence("layer_types", max_length=layers)
    is_qwen = family.startswith("qwen")
    is_used = fields.boolean("use_sliding_window", default=not is_qwen)
    window = fields.integer("sliding_window", low=0, high=MAX_POSITION, default=0)
    if kinds is not None:
        return _window_of_layer_types(fields, kinds, window, layers)
    if not is_used or not window:
        return 0, 0
    if is_qwen:
        rule = "needs layer_types to say which layers are windowed"
        raise fields.refusal("use_sliding_window", rule, "false")
    return window, 2 if family == "gpt_oss" else 1


def _window_of_layer_types(
    fields: FieldReader, kinds: tuple[Any, ...], window: int, layers: int
) -> tuple[int, int]:
    name = "layer_types"
    if len(kinds) != layers:
        raise fields.refusal(name, f"must have num_hidden_layers={layers} entries", str(layers))
    legal = (_FULL, _SLIDING)
    for kind in kinds:
        if kind not in legal:
            shown = str(kind)[:40]
            rule = (
                f"holds {shown!r}, a mixer that moewright does not model; legal: {', '.join(legal)}"
            )
            raise fields.refusal(name, rule, closest_match(shown, legal) or _FULL)
    if _SLIDING not in kinds:
        return 0, 0
    if not window:
        raise fields.refusal("sliding_window", f"is missing while layer_types has {_SLIDING}")
    for every in range(1, layers + 1):
        if all((kind == _SLIDING) == (layer % every == 0) for layer, kind in enumerate(kinds)):
            return window, every
    raise fields.refusal(name, "sliding layers must be every n-th from layer 0")


def read_mla(
    fields: FieldReader, family: str, hidden: int, layers: int, max_position: int
) -> AttentionSpec:
    """Read multi-head latent attention.

    Raises:
        BadInput: a field is missing or wrong.
    """
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
    if fields.sequence("layer_types", max_length=layers) not in (None, (_FULL,) * layers):
        raise fields.refusal("layer_types", "latent attention is full in every layer")
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
        rope=read_rope(
            fields,
            family,
            max_position,
            interleaved=fields.boolean("rope_interleave", default=True),
        ),
    )
