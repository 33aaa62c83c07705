"""The rotary embedding of a config.json, in its old or its new form.

The old form has the fields `rope_theta` and `rope_scaling`, the new one `rope_parameters`. The old
one is written: every release of transformers reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, log, sqrt
from typing import Any

from moewright.families.draft import Draft
from moewright.families.fields import MAX_POSITION, FieldReader
from moewright.families.keys import Written
from moewright.spec.model import ModelSpec, RopeSpec

_TYPES = ("default", "linear", "yarn", "llama3")
MAX_THETA = 1e15  # far beyond any published base
_MAX_FACTOR = 1e6  # a context a million times as long is a mistake
USUAL_THETA = 10000.0  # transformers' default, from the paper of RoPE
SHARE = "partial_rotary_factor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """The rotation of heads that are `width` wide (a field of the model).

    `theta` is the base where the config does not say, `share` the part of a head that turns; None
    where all of it turns in every config. `has_share_width` families may give the part as a width,
    `rotary_dim`. `more_types` are further types of the family; what is not read of their tables
    changes numbers alone, not the shape. A config is refused that rounds the bounds of its yarn
    ramp where the family does not (`rounds`), or the other way. `kinds` are tables for kinds of
    layers: the first counts, of which the others differ by the scaling alone. `passive` fields of
    the table say nothing of text.
    """

    width: str = "attention.head_dim"
    theta: float = USUAL_THETA
    share: float | None = None
    share_written: Written = Written.ALWAYS
    has_share_width: bool = False
    more_types: tuple[str, ...] = ()
    rounds: bool = True
    kinds: tuple[str, ...] = ()
    passive: tuple[str, ...] = ()
    written: Written = Written.ALWAYS

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the rope in either form; the two must agree."""
        new_table = fields.table("rope_parameters")
        old_table = fields.table("rope_scaling")
        is_equal = fields.raw_value("rope_parameters") == fields.raw_value("rope_scaling")
        if new_table and old_table and not is_equal:
            raise fields.refusal("rope_scaling", "disagrees with rope_parameters", "leave one out")
        theta = fields.number("rope_theta", low=1, high=MAX_THETA, default=self.theta)
        table = new_table or old_table
        if self.kinds and new_table is not None:
            new_table.ignore(*self.kinds[1:])
            table = new_table.table(self.kinds[0]) or new_table
        head_dim = draft[self.width]
        rope = RopeSpec(
            theta=theta,
            interleaved=draft.get("attention.rope.interleaved", False),
            rotary_share=self._read_share(fields, table, head_dim),
        )
        if table is not None:
            rope = self._read_table(fields, table, rope, draft["max_position"], head_dim)
        draft["attention.rope"] = rope

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the old form."""
        rope = model.attention.rope
        is_always = self.written is Written.ALWAYS
        if is_always or rope.theta != self.theta:
            config["rope_theta"] = rope.theta
        if is_always or rope.scaling != "default":
            config["rope_scaling"] = self._scaling_table(rope)
        if self.share is None:
            return
        if self.share_written is Written.ALWAYS or rope.rotary_share != self.share:
            config[SHARE] = rope.rotary_share

    def _read_share(self, fields: FieldReader, table: FieldReader | None, head_dim: int) -> float:
        """Read the part of a head that turns, outside or in the table."""
        if self.share is None:
            fields.require_neutral(SHARE, 1)
            if table is not None:
                table.require_neutral(SHARE, 1)
            return 1.0
        default = self.share
        if self.has_share_width:
            width = fields.integer("rotary_dim", low=2, high=head_dim, default=head_dim)
            default = width / head_dim
        share = fields.number(SHARE, low=0, high=1, default=default)
        if table is not None:
            return table.number(SHARE, low=0, high=1, default=share)
        return share

    def _read_table(
        self,
        fields: FieldReader,
        table: FieldReader,
        rope: RopeSpec,
        max_position: int,
        head_dim: int,
    ) -> RopeSpec:
        theta = table.number("rope_theta", low=1, high=MAX_THETA, default=rope.theta)
        if fields.has_value("rope_theta") and theta != rope.theta:
            nearest = f"{rope.theta:g}"
            raise table.refusal("rope_theta", "disagrees with rope_theta outside", nearest)
        types = (*_TYPES, *self.more_types)
        scaling = table.choice("rope_type", "type", choices=types, default="default")
        rope = replace(rope, theta=theta, scaling=scaling)
        if scaling == "dynamic" and table.has_value("alpha"):
            # A base that does not change with the sequence, whatever its type is called.
            alpha = table.number("alpha", low=1, high=_MAX_FACTOR)
            theta *= alpha ** (head_dim / (head_dim - 2))
            rope = replace(rope, theta=theta, scaling="default")
            table.ignore(*table.unread_names())
        elif scaling in _TYPES[1:]:
            rope = read_scaling(table, rope, max_position, rounds=self.rounds)
            if scaling == "yarn":
                table.require_neutral("attention_factor")
        elif scaling == "longrope":
            rope = _read_factor_lists(fields, table, rope, head_dim, max_position)
        elif scaling != "default":
            table.ignore(*table.unread_names())
        table.ignore("finetuned", *self.passive)
        refuse_unread(table, f"is not known for rope type {scaling}")
        return rope

    def _scaling_table(self, rope: RopeSpec) -> dict[str, Any] | None:
        if rope.scaling == "default":
            return None
        table: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
        if rope.scaling == "linear":
            return table
        table["original_max_position_embeddings"] = rope.original_max_position
        if rope.scaling == "longrope":
            return table | {
                "short_factor": list(rope.short_factors),
                "long_factor": list(rope.long_factors),
                "short_mscale": rope.short_magnitude,
                "long_mscale": rope.long_magnitude,
            }
        if rope.scaling == "llama3":
            return table | {
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
            }
        table |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        # The pair that is read where a table has none.
        if (rope.mscale, rope.mscale_all_dim) != (1.0, 0.0):
            table |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
        if not self.rounds:
            table["truncate"] = False
        return table


def refuse_unread(table: FieldReader, rule: str) -> None:
    """Refuse a table inside the config with a field that nothing has read.

    Raises:
        BadInput: it names the first such field.
    """
    for name in table.unread_names():
        raise table.refusal(name, rule, "leave it out")


def read_scaling(
    table: FieldReader, rope: RopeSpec, max_position: int, *, rounds: bool
) -> RopeSpec:
    """Read the factors of a linear, yarn or llama3 rope; `rounds` is whether yarn's ramp does.

    Raises:
        BadInput: a field is missing or wrong.
    """
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
    table.require_neutral("truncate", rounds)
    return replace(
        rope,
        beta_slow=slow,
        beta_fast=fast,
        mscale=table.number("mscale", low=0, high=1e3, default=rope.mscale),
        mscale_all_dim=table.number("mscale_all_dim", low=0, high=1e3, default=rope.mscale_all_dim),
    )


def _read_factor_lists(
    fields: FieldReader, table: FieldReader, rope: RopeSpec, head_dim: int, max_position: int
) -> RopeSpec:
    """Read longrope's factors, one for each pair of a head, and its magnitudes.

    The magnitude where the table does not say is that of the paper.
    """
    name = "original_max_position_embeddings"
    # Not 1, whose logarithm is divided by.
    outside = fields.integer(name, low=2, high=MAX_POSITION, default=max_position)
    original = table.integer(name, low=2, high=MAX_POSITION, default=outside)
    stretch = table.number("factor", low=1, high=_MAX_FACTOR, default=max_position / original)
    # A context that is shorter than the original one is not stretched.
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
