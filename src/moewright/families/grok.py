"""Grok-1: norms around each block, GELU, capped scores and constant factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.attention import grouped_query
from moewright.families.decoder import MAX_FACTOR, Decoder, factor, norm_eps
from moewright.families.draft import Draft
from moewright.families.fields import FieldReader
from moewright.families.keys import Fixed, Number, Word
from moewright.families.mixtral import MIXTRAL_EXPERTS
from moewright.families.record import Family
from moewright.spec.model import Activation, ModelSpec, NormPlacement


@dataclass(frozen=True, kw_only=True, slots=True)
class _OutputScale:
    """What logits are multiplied by, where the model has what they are divided by."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the factor."""
        name = "output_multiplier_scale"
        scale = fields.number(name, low=1 / MAX_FACTOR, high=MAX_FACTOR, default=1.0)
        draft["multipliers.logits"] = 1 / scale

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the factor."""
        config["output_multiplier_scale"] = 1 / model.multipliers.logits


GROK1 = Family(
    model_type="grok-1",
    config=Decoder(
        style=(
            Word(names=("hidden_act",), says="activation", words={"gelu": Activation.GELU}),
            norm_eps(default=1e-5),
            Fixed(values={"norm_placement": NormPlacement.AROUND}),
            factor("embedding_multiplier_scale", "multipliers.embedding"),
            factor("attn_output_multiplier", "multipliers.attention"),
            _OutputScale(),
            Number(names=("max_attn_value",), says="score_cap", high=MAX_FACTOR, default=0.0),
        ),
        attention=grouped_query(),
        experts=MIXTRAL_EXPERTS,
        tied=True,
    ),
)
