"""Attention of a config.json: grouped-query with its variants, and latent attention."""

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


def read_gqa(
    fields: FieldReader, family: str, hidden: int, layers: int, max_position: int
) -> AttentionSpec:
    heads = fields.integer("num_attention_heads", low=1, high=MAX_HEADS)
    absent_is_mha = family in ("llama", "olmoe") or "num_key_value_heads" in fields
    kv_heads = fields.integer(
        "num_key_value_heads",
        low=1,
        high=heads,
        bound="num_attention_heads",
        default=heads if absent_is_mha else None,
    )
    if heads % kv_heads:
        raise fields.refusal(
            "num_key_value_heads",
            f"must divide num_attention_heads={heads}",
            nearest_divisor(heads, kv_heads),
        )
    head_dim = _head_dim(fields, family, hidden, heads)
    window, every = _window(fields, family, layers)
    if family == "olmoe":
        fields.require_neutral("clip_qkv")
    biased = family == "gpt_oss"
    bias = fields.boolean("attention_bias", default=biased)
    qwen2 = family in ("qwen2", "qwen2_moe")
    if qwen2:
        if bias:
            raise fields.refusal(
                "attention_bias", f"{family} has biases on q, k and v only", "false"
            )
        bias = fields.boolean("qkv_bias", default=True)
    norms = {"qwen3": QkNorm.PER_HEAD, "qwen3_moe": QkNorm.PER_HEAD, "olmoe": QkNorm.FULL}
    return AttentionSpec(
        kind=AttentionKind.GQA,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        qk_norm=norms.get(family, QkNorm.NONE),
        qkv_bias=bias,
        out_bias=bias and not qwen2,
        sinks=family == "gpt_oss",
        sliding_window=window,
        window_every=every,
        rope=read_rope(fields, family, max_position, interleaved=False),
    )


def _head_dim(fields: FieldReader, family: str, hidden: int, heads: int) -> int:
    absent = {"qwen3": 128, "gpt_oss": 64}.get(family, hidden // heads)
    if not fields.has_value("head_dim") and hidden % heads and family not in ("qwen3", "gpt_oss"):
        rule = f"must divide hidden_size={hidden} when head_dim is not given"
        raise fields.refusal("num_attention_heads", rule, nearest_divisor(hidden, heads))
    head_dim = fields.integer("head_dim", low=1, high=MAX_HEAD_DIM, default=absent)
    if head_dim % 2:
        raise fields.refusal(
            "head_dim", "must be even: rotary embedding turns pairs", str(head_dim + 1)
        )
    return head_dim


def _window(fields: FieldReader, family: str, layers: int) -> tuple[int, int]:
    """(sliding window, every how many layers it holds); (0, 0) for full attention everywhere."""
    kinds = fields.sequence("layer_types", max_length=layers)
    qwen = family.startswith("qwen")
    switched = fields.boolean("use_sliding_window", default=not qwen)
    window = fields.integer("sliding_window", low=0, high=MAX_POSITION, default=0)
    if kinds is None:
        if not switched or not window:
            return 0, 0
        if qwen:
            raise fields.refusal(
                "use_sliding_window", "needs layer_types to say which layers are windowed", "false"
            )
        return window, 2 if family == "gpt_oss" else 1
    legal = ("full_attention", "sliding_attention")
    if len(kinds) != layers:
        raise fields.refusal(
            "layer_types", f"must have num_hidden_layers={layers} entries", str(layers)
        )
    for kind in kinds:
        if kind not in legal:
            rule = f"holds {str(kind)[:40]!r}, a mixer that moewright does not model; legal: {', '.join(legal)}"
            raise fields.refusal(
                "layer_types", rule, closest_match(str(kind)[:40], legal) or legal[0]
            )
    if legal[1] not in kinds:
        return 0, 0
    if not window:
        raise fields.refusal("sliding_window", "is missing while layer_types has sliding_attention")
    every = next((n for n in range(1, layers + 1) if _periodic(kinds, n)), 0)
    if not every:
        raise fields.refusal("layer_types", "sliding layers must be every n-th from layer 0")
    return window, every


def _periodic(kinds: tuple[Any, ...], every: int) -> bool:
    return all(
        (kind == "sliding_attention") == (layer % every == 0) for layer, kind in enumerate(kinds)
    )


def read_mla(
    fields: FieldReader, family: str, hidden: int, layers: int, max_position: int
) -> AttentionSpec:
    heads = fields.integer("num_attention_heads", low=1, high=MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", low=1, high=MAX_HEADS, default=heads)
    if kv_heads != heads:
        rule = (
            f"must equal num_attention_heads={heads}: latent attention expands keys for every head"
        )
        raise fields.refusal("num_key_value_heads", rule, str(heads))
    nope = fields.integer("qk_nope_head_dim", low=1, high=MAX_HEAD_DIM)
    rope = fields.integer("qk_rope_head_dim", low=2, high=MAX_HEAD_DIM)
    if rope % 2:
        raise fields.refusal(
            "qk_rope_head_dim", "must be even: rotary embedding turns pairs", str(rope + 1)
        )
    # HF writes the rotary width as head_dim and the sum as qk_head_dim; neither says anything new.
    fields.ignore("head_dim")
    fields.require_neutral("qk_head_dim", nope + rope)
    if fields.sequence("layer_types", max_length=layers) not in (
        None,
        ("full_attention",) * layers,
    ):
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
