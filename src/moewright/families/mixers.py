"""Parts of a config.json that say which layers have a recurrent mixer, and its widths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moewright.families.draft import Draft, Part
from moewright.families.fields import FieldReader
from moewright.families.keys import Whole
from moewright.families.layer_words import FULL, LINEAR
from moewright.spec.model import MixerKind, ModelSpec, RecurrentKind

MAX_STATE = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentLayers:
    """Layers of which some have attention and the others a recurrent mixer of these `parts`."""

    kind: RecurrentKind
    parts: tuple[Part, ...]

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the mixer; every model of the family has such layers."""
        draft["recurrent.kind"] = self.kind
        for part in self.parts:
            part.read(fields, draft)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the mixer, where the model has such layers."""
        if model.recurrent is not None:
            for part in self.parts:
                part.write(model, config)


def mixer_size(name: str, says: str, high: int, default: int | None = None) -> Whole:
    """Build a size of the recurrent mixer: the field `name` says RecurrentSpec's field `says`."""
    return Whole(names=(name,), says=f"recurrent.{says}", high=high, default=default)


def read_mixers(kinds: Sequence[Any]) -> tuple[MixerKind, ...]:
    """Return what mixes the tokens of each layer; all that is not full attention is recurrent."""
    return tuple(MixerKind.ATTENTION if kind == FULL else MixerKind.RECURRENT for kind in kinds)


def write_mixers(model: ModelSpec) -> list[str]:
    """Return transformers' word for what mixes the tokens of each layer."""
    return [LINEAR if mixer is MixerKind.RECURRENT else FULL for mixer in model.mixers]
