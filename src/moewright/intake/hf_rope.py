"""Rotary embedding settings of a config.json, in the old dialect (`rope_scaling`) or the new
(`rope_parameters`)."""

from __future__ import annotations

from dataclasses import replace

from moewright.intake.fields import FieldReader
from moewright.spec.model import RopeSpec

_TYPES = ("default", "linear", "yarn", "llama3")
_MAX_THETA = 1e15
_MAX_FACTOR = 1e6


def read_rope(
    fields: FieldReader, family: str, max_position: int, *, interleaved: bool
) -> RopeSpec:
    """The rope of a config.

    gpt-oss does not round the bounds of its yarn ramp (`truncate: false`), every other family does;
    a config that says otherwise is refused.
    """
    new, old = fields.table("rope_parameters"), fields.table("rope_scaling")
    if new and old and fields.raw_value("rope_parameters") != fields.raw_value("rope_scaling"):
        raise fields.refusal("rope_scaling", "disagrees with rope_parameters", "leave one out")
    theta = fields.number("rope_theta", low=1, high=_MAX_THETA, default=10000.0)
    table = new or old
    if table is None:
        return RopeSpec(theta=theta, interleaved=interleaved)
    inner = table.number("rope_theta", low=1, high=_MAX_THETA, default=theta)
    if fields.has_value("rope_theta") and inner != theta:
        raise table.refusal("rope_theta", "disagrees with rope_theta outside", f"{theta:g}")
    scaling = table.choice("rope_type", "type", choices=_TYPES, default="default")
    spec = RopeSpec(theta=inner, scaling=scaling, interleaved=interleaved)
    if scaling != "default":
        spec = _scaled(table, spec, family, max_position)
    table.require_neutral("partial_rotary_factor", 1)
    table.ignore("finetuned")
    for name in table.unread_names():
        raise table.refusal(name, f"is not known for rope type {scaling}", "leave it out")
    return spec


def _scaled(table: FieldReader, spec: RopeSpec, family: str, max_position: int) -> RopeSpec:
    spec = replace(spec, factor=table.number("factor", low=1, high=_MAX_FACTOR))
    if spec.scaling == "linear":
        return spec
    llama3 = spec.scaling == "llama3"
    original = table.integer(
        "original_max_position_embeddings",
        low=1,
        high=2**30,
        default=None if llama3 else max_position,
    )
    if llama3:
        low, high = _ordered(table, "low_freq_factor", "high_freq_factor")
        return replace(
            spec, original_max_position=original, low_freq_factor=low, high_freq_factor=high
        )
    slow, fast = _ordered(table, "beta_slow", "beta_fast", spec.beta_slow, spec.beta_fast)
    table.require_neutral("truncate", family != "gpt_oss")
    table.require_neutral("attention_factor")
    return replace(
        spec,
        original_max_position=original,
        beta_slow=slow,
        beta_fast=fast,
        mscale=table.number("mscale", low=0, high=1e3, default=spec.mscale),
        mscale_all_dim=table.number("mscale_all_dim", low=0, high=1e3, default=spec.mscale_all_dim),
    )


def _ordered(
    table: FieldReader,
    low: str,
    high: str,
    low_default: float | None = None,
    high_default: float | None = None,
) -> tuple[float, float]:
    """Two numbers of the table, the first at most the second."""
    first = table.number(low, low=0, high=1e6, default=low_default)
    second = table.number(high, low=0, high=1e6, default=high_default)
    if first > second:
        raise table.refusal(low, f"must be at most {second:g}", f"{second:g}")
    return first, second
