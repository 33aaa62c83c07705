"""The rotary embedding of a config.json, in its old or its new form.

The old form has the fields `rope_theta` and `rope_scaling`, the new one `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf, log, sqrt
from types import MappingProxyType

from moewright.intake.fields import MAX_POSITION, FieldReader
from moewright.spec.model import RopeSpec

_TYPES = ("default", "linear", "yarn", "llama3")
# Further types of a family; what is not read of their tables changes numbers alone, not the shape.
_MORE_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"hunyuan_v1_moe": ("dynamic",), "phimoe": ("longrope",)}
)
# Families that may turn a part of each head only, and the part where the config does not say.
_ROTARY_SHARES: Mapping[str, float] = MappingProxyType(
    {
        "glm4_moe": 0.5,
        "qwen3_next": 0.25,
        "qwen3_5_moe_text": 0.25,
        "nemotron": 0.5,
        "minimax_m2": 1.0,
        "solar_open": 1.0,
        "bailing_moe": 1.0,
        "bailing_moe_v2": 1.0,
    }
)
_VISION_FAMILIES = ("qwen3_vl_moe_text", "qwen3_5_moe_text")
_MAX_THETA = 1e15
_MAX_FACTOR = 1e6


def read_rope(
    fields: FieldReader, family: str, max_position: int, *, interleaved: bool, head_dim: int
) -> RopeSpec:
    """Read the rope of a config whose heads are `head_dim` wide.

    gpt-oss does not round the bounds of its yarn ramp (`truncate: false`), every other family does;
    a config that says otherwise is refused.

    Raises:
        BadInput: a field is missing or wrong, or the two forms disagree.
    """
    new_table = fields.table("rope_parameters")
    old_table = fields.table("rope_scaling")
    is_equal = fields.raw_value("rope_parameters") == fields.raw_value("rope_scaling")
    if new_table and old_table and not is_equal:
        raise fields.refusal("rope_scaling", "disagrees with rope_parameters", "leave one out")
    theta = fields.number("rope_theta", low=1, high=_MAX_THETA, default=10000.0)
    table = new_table or old_table
    if family == "olmo3" and new_table is not None:
        # A table for each kind of layer; windows do not rotate otherwise but for the scaling.
        new_table.ignore("sliding_attention")
        table = new_table.table("full_attention") or new_table
    share = _read_share(fields, table, family, head_dim)
    if table is None:
        return RopeSpec(theta=theta, interleaved=interleaved, rotary_share=share)
    table_theta = table.number("rope_theta", low=1, high=_MAX_THETA, default=theta)
    if fields.has_value("rope_theta") and table_theta != theta:
        raise table.refusal("rope_theta", "disagrees with rope_theta outside", f"{theta:g}")
    types = (*_TYPES, *_MORE_TYPES.get(family, ()))
    scaling = table.choice("rope_type", "type", choices=types, default="default")
    rope = RopeSpec(theta=table_theta, scaling=scaling, interleaved=interleaved, rotary_share=share)
    if family == "hunyuan_v1_moe" and scaling == "dynamic" and table.has_value("alpha"):
        # A base that does not change with the sequence, whatever its type is called.
        alpha = table.number("alpha", low=1, high=_MAX_FACTOR)
        theta = table_theta * alpha ** (head_dim / (head_dim - 2))
        rope = replace(rope, theta=theta, scaling="default")
        table.ignore(*table.unread_names())
    elif scaling in _TYPES[1:]:
        rope = _with_scaling(table, rope, family, max_position)
    elif scaling == "longrope":
        rope = _with_factors(fields, table, rope, head_dim, max_position)
    elif scaling != "default":
        table.ignore(*table.unread_names())
    table.ignore("finetuned")
    if family in _VISION_FAMILIES:
        table.ignore("mrope_section", "mrope_interleaved")  # sections agree on positions of text
    for name in table.unread_names():
        raise table.refusal(name, f"is not known for rope type {scaling}", "leave it out")
    return rope


def read_compressed_ropes(
    fields: FieldReader, family: str, max_position: int, share: float
) -> tuple[RopeSpec, RopeSpec]:
    """Read DeepSeek-V4's two ropes: of layers with a window alone, and of those with a compressor.

    The new form has a table for each; of the old one, the table is of the second. No scaling
    grows cosines and sines.

    Raises:
        BadInput: a field is missing or wrong, or asks for a rotation that the family has not.
    """
    theta = fields.number("rope_theta", low=1, high=_MAX_THETA, default=10000.0)
    second_theta = fields.number("compress_rope_theta", low=1, high=_MAX_THETA, default=160000.0)
    table = fields.table("rope_parameters") or fields.table("rope_scaling")
    fields.ignore("rope_parameters", "rope_scaling")
    plain, second = None, table
    if table is not None and "main" in table:
        plain, second = table.table("main"), table.table("compress")
        table.ignore("rope_type")
        for name in table.unread_names():
            raise table.refusal(name, "is no kind of layer: main, compress", "leave it out")
    main = RopeSpec(theta=_read_theta(plain, theta), interleaved=True)
    if plain is not None:
        plain.choice("rope_type", "type", choices=("default",), default="default")
        plain.require_neutral("partial_rotary_factor", share)
    rope = RopeSpec(theta=_read_theta(second, second_theta), interleaved=True)
    if second is None:
        return main, rope
    second.require_neutral("partial_rotary_factor", share)
    second.require_neutral("attention_factor", 1)
    scaling = second.choice("rope_type", "type", choices=("default", "yarn"), default="default")
    if scaling == "yarn":
        rope = _with_scaling(second, replace(rope, scaling=scaling), family, max_position)
        rope = replace(rope, mscale=1.0, mscale_all_dim=1.0)
    for name in second.unread_names():
        raise second.refusal(name, f"is not known for rope type {scaling}", "leave it out")
    return main, rope


def _read_theta(table: FieldReader | None, default: float) -> float:
    if table is None:
        return default
    return table.number("rope_theta", low=1, high=_MAX_THETA, default=default)


def _read_share(
    fields: FieldReader, table: FieldReader | None, family: str, head_dim: int
) -> float:
    """Read the part of a head that turns, by its factor or its width, outside or in the table."""
    name = "partial_rotary_factor"
    if family not in _ROTARY_SHARES:
        fields.require_neutral(name, 1)
        if table is not None:
            table.require_neutral(name, 1)
        return 1.0
    default = _ROTARY_SHARES[family]
    if family in ("minimax_m2", "bailing_moe", "bailing_moe_v2"):
        width = fields.integer("rotary_dim", low=2, high=head_dim, default=head_dim)
        default = width / head_dim
    share = fields.number(name, low=0, high=1, default=default)
    return table.number(name, low=0, high=1, default=share) if table is not None else share


def _with_scaling(table: FieldReader, rope: RopeSpec, family: str, max_position: int) -> RopeSpec:
    rope = replace(rope, factor=table.number("factor", low=1, high=_MAX_FACTOR))
    if rope.scaling == "linear":
        return rope
    is_llama3 = rope.scaling == "llama3"
    original = table.integer(
        "original_max_position_embeddings",
        low=1,
        high=MAX_POSITION,
        default=None if is_llama3 else max_position,
    )
    rope = replace(rope, original_max_position=original)
    if is_llama3:
        low = table.number("low_freq_factor", low=0, high=_MAX_FACTOR)
        high = table.number("high_freq_factor", low=0, high=_MAX_FACTOR)
        _require_order(table, "low_freq_factor", low, high)
        return replace(rope, low_freq_factor=low, high_freq_factor=high)
    slow = table.number("beta_slow", low=0, high=_MAX_FACTOR, default=rope.beta_slow)
    fast = table.number("beta_fast", low=0, high=_MAX_FACTOR, default=rope.beta_fast)
    _require_order(table, "beta_slow", slow, fast)
    table.require_neutral("truncate", family != "gpt_oss")
    if family != "deepseek_v4":
        table.require_neutral("attention_factor")
    return replace(
        rope,
        beta_slow=slow,
        beta_fast=fast,
        mscale=table.number("mscale", low=0, high=1e3, default=rope.mscale),
        mscale_all_dim=table.number("mscale_all_dim", low=0, high=1e3, default=rope.mscale_all_dim),
    )


def _with_factors(
    fields: FieldReader, table: FieldReader, rope: RopeSpec, head_dim: int, max_position: int
) -> RopeSpec:
    """Read longrope's factors, one for each pair of a head, and its magnitudes.

    The magnitude where the table does not say is that of the paper.
    """
    name = "original_max_position_embeddings"
    outside = fields.integer(name, low=2, high=MAX_POSITION, default=max_position)
    original = table.integer(name, low=2, high=MAX_POSITION, default=outside)
    stretch = table.number("factor", low=1, high=_MAX_FACTOR, default=max_position / original)
    magnitude = sqrt(1 + log(max(1.0, stretch)) / log(original))
    magnitude = table.number("attention_factor", low=0, high=1e3, default=magnitude)
    return replace(
        rope,
        factor=stretch,
        original_max_position=original,
        short_factors=_read_factors(table, "short_factor", head_dim // 2),
        long_factors=_read_factors(table, "long_factor", head_dim // 2),
        short_magnitude=table.number("short_mscale", low=0, high=1e3, default=magnitude),
        long_magnitude=table.number("long_mscale", low=0, high=1e3, default=magnitude),
    )


def _read_factors(table: FieldReader, name: str, count: int) -> tuple[float, ...]:
    factors = table.sequence(name, max_length=count) or ()
    is_number = all(
        isinstance(factor, int | float) and not isinstance(factor, bool) and 0 < factor < inf
        for factor in factors
    )
    if len(factors) != count or not is_number:
        raise table.refusal(name, f"must hold {count} positive numbers")
    return tuple(map(float, factors))


def _require_order(table: FieldReader, name: str, low: float, high: float) -> None:
    """Refuse the field `name`, whose value is `low`, where it is above `high`."""
    if low > high:
        raise table.refusal(name, f"must be at most {high:g}", f"{high:g}")
