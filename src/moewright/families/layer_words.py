"""Lists of one word a layer in a config.json."""

from __future__ import annotations

from typing import Any

from moewright.families.fields import FieldReader
from moewright.spec.model import MixerKind, ModelSpec
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
