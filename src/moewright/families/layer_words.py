"""Parts of a config.json that say what each layer is: a list of words, or recurrent mixers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moewright.families.draft import Draft, Part
from moewright.families.fields import FieldReader
from moewright.families.keys import Whole
from moewright.spec.model import MixerKind, ModelSpec, RecurrentKind
from moewright.spec.names import closest_match

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
LINEAR = "linear_attention"


def read_layer_words(
    fields: FieldReader, name: str, layers: int, legal: tuple[str, ...]
) -> tuple[Any, ...] | None:
    """Read a list of one word a layer, each of `legal`; None when absent or null.

    Raises:
        BadInput: it has another length, or another word.
    """
    words = fields.sequence(name, max_length=layers)
    if words is None:
        return None
    if len(words) != layers:
        raise fields.refusal(name, f"must have num_hidden_layers={layers} entries", str(layers))
    for word in words:
        if word not in legal:
            # The word is a file's: a line shows its beginning alone.
            shown = str(word)[:40]
            rule = (
                f"holds {shown!r}, a mixer that moewright does not model; legal: {', '.join(legal)}"
            )
            raise fields.refusal(name, rule, closest_match(shown, legal) or legal[0])
    return words


def read_local_mixers(kinds: tuple[Any, ...], local: str) -> tuple[MixerKind, ...]:
    """Return what mixes the tokens of each layer, where `local` ones attend to a window."""
    return tuple(
        MixerKind.LOCAL_ATTENTION if kind == local else MixerKind.ATTENTION for kind in kinds
    )


def write_local_words(model: ModelSpec, local: str) -> list[str]:
    """Return a word for each layer: `local` where it attends to a window."""
    return [local if model.layer_window(layer) else FULL for layer in range(model.layers)]


MAX_STATE = 2**16  # beyond it a mistake; products of sizes stay below 2^63


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
