"""Which layer's indexer chooses the keys that a layer attends to (GLM-5.2)."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.rules.timetable.stages import pipeline_chunks
from moewright.spec.layout import Layout
from moewright.spec.model import MixerKind, ModelSpec


def choice_source(model: ModelSpec, layer: int) -> int | None:
    """Return the layer that chooses for `layer`: itself, or the last before it that chooses.

    None where attention is to all keys.
    """
    if model.attention.indexer is None:
        return None
    if model.mixer(layer) is not MixerKind.SHARED_INDEX:
        return layer
    return max(i for i in range(layer) if model.mixer(i) is MixerKind.ATTENTION)


def is_choice_shared(model: ModelSpec, layer: int) -> bool:
    """Return whether the layer after `layer` takes its choice of keys."""
    return layer + 1 < model.layers and model.mixer(layer + 1) is MixerKind.SHARED_INDEX


def parted_choices(model: ModelSpec, layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield each layer whose choice comes from another chunk of the pipeline, and its source."""
    if MixerKind.SHARED_INDEX not in model.mixers:
        return
    for chunk in pipeline_chunks(model, layout):
        for layer in chunk.layers:
            source = choice_source(model, layer)
            if source is not None and source not in chunk.layers:
                yield layer, source
