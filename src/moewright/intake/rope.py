"""Rotary embedding settings of a config.json, in the old dialect (`rope_scaling`) or the new (`rope_parameters`)."""

from __future__ import annotations

from moewright.intake.fields import Fields
from moewright.spec.model import RopeSpec

_TYPES = ("default", "linear", "yarn", "llama3")
_MAX_THETA = 1e15
_MAX_FACTOR = 1e6


def read_rope(fields: Fields, family: str, max_position: int, *, interleaved: bool) -> RopeSpec:
    """The rope of a config. For llama3 scaling, low_freq_factor stands as beta_slow and high_freq_factor as beta_fast.

    gpt-oss does not round the bounds of its yarn ramp (`truncate: false`), every other family does; a config that says
    otherwise is refused.
    """
    new, old = fields.table("rope_parameters"), fields.table("rope_scaling")
    if new and old and fields.value("rope_parameters") != fields.value("rope_scaling"):
        raise fields.refuse("rope_scaling", "disagrees with rope_parameters", "leave one out")
    theta = fields.number("rope_theta", low=1, high=_MAX_THETA, default=10000.0)
    table = new or old
    if table is None:
        return RopeSpec(theta=theta, interleaved=interleaved)
    inner = table.number("rope_theta", low=1, high=_MAX_THETA, default=theta)
    if fields.given("rope_theta") and inner != theta:
        raise table.refuse("rope_theta", "disagrees with rope_theta outside", f"{theta:g}")
    scaling = table.text("rope_type", "type", choices=_TYPES, default="default")
    spec = RopeSpec(theta=inner, scaling=scaling, interleaved=interleaved)
    if scaling != "default":
        spec = _scaled(table, spec, family, max_position)
    table.neutral("partial_rotary_factor", 1)
    table.ignore("finetuned")
    for name in table.unused():
        raise table.refuse(name, f"is not known for rope type {scaling}", "leave it out")
    return spec


def _scaled(table: Fields, spec: RopeSpec, family: str, max_position: int) -> RopeSpec:
    factor = table.number("factor", low=1, high=_MAX_FACTOR)
    if spec.scaling == "linear":
        return RopeSpec(theta=spec.theta, scaling="linear", factor=factor, interleaved=spec.interleaved)
    llama3 = spec.scaling == "llama3"
    original = table.whole(
        "original_max_position_embeddings", low=1, high=2**30, default=None if llama3 else max_position
    )
    if llama3:
        low, high = "low_freq_factor", "high_freq_factor"
        slow, fast = table.number(low, low=0, high=1e6), table.number(high, low=0, high=1e6)
    else:
        slow = table.number("beta_slow", low=0, high=1e6, default=1.0)
        fast = table.number("beta_fast", low=0, high=1e6, default=32.0)
    if slow > fast:
        raise table.refuse(low if llama3 else "beta_slow", f"must be at most {fast:g}", f"{fast:g}")
    mscale, all_dim = 1.0, 0.0
    if not llama3:
        mscale = table.number("mscale", low=0, high=1e3, default=1.0)
        all_dim = table.number("mscale_all_dim", low=0, high=1e3, default=0.0)
        table.neutral("truncate", family != "gpt_oss")
        table.neutral("attention_factor")
    return RopeSpec(
        theta=spec.theta,
        scaling=spec.scaling,
        factor=factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        mscale=mscale,
        mscale_all_dim=all_dim,
        interleaved=spec.interleaved,
    )
