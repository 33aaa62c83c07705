"""The contents of pipeline stages, counted in parts: the columns of every array over stages.

A part is a kind of layer, an MTP depth, the embedding, or the final norm with head and loss. The
cost of a stage is the sum over its parts, so memory and time of any pipeline are products of a
matrix of counts with the cost of each part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from moewright.rules.saved.saved_tensor import has_staying_layers, offloads_at
from moewright.rules.shapes import flops
from moewright.rules.timetable.stages import Chunk, chunk_layers
from moewright.spec.layout import Layout
from moewright.spec.model import MixerKind, ModelSpec
from moewright.spec.workload import TrainerSpec

Array = np.ndarray[Any, np.dtype[Any]]


class LayerKind(NamedTuple):
    """The properties of a layer that decide how long it takes."""

    is_moe: bool
    is_windowed: bool
    mixer: MixerKind = MixerKind.ATTENTION
    has_mlp: bool = True  # or experts
    is_wide: bool = False  # in 16 bits, whatever the precision of the others


def layer_kind(model: ModelSpec, trainer: TrainerSpec, layer: int) -> LayerKind:
    """Return the kind of a layer; MTP depths are numbered above the layers."""
    return LayerKind(
        model.has_experts(layer),
        flops.is_windowed(model, layer),
        model.mixer(layer),
        model.has_mlp(layer),
        trainer.is_wide_layer(layer, model.layers),
    )


@lru_cache(maxsize=16)
def layer_kinds(model: ModelSpec, trainer: TrainerSpec) -> Mapping[LayerKind, int]:
    """Return every kind of layer the model has, with the first layer of that kind."""
    mtp = [model.layers + 1] if model.mtp_layers else []
    kinds: dict[LayerKind, int] = {}
    for layer in (*range(model.layers), *mtp):
        kinds.setdefault(layer_kind(model, trainer, layer), layer)
    return MappingProxyType(kinds)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPart:
    """Layers that take the same bytes and seconds, which one layer and its position stand for."""

    kind: LayerKind
    layer: int
    position: int  # in its chunk, which decides what full recompute takes of it
    is_mtp: bool
    offloads: bool  # whether its activations are offloaded where those of some layers are


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """The parts of a model: its layers, MTP depths last, then embedding, head and an MTP input.

    The part of an MTP depth includes its embedding and its pass through the head. Its input is a
    part of its own where no final norm on the same stage keeps it. `columns` [variants][layers]
    holds the column of a layer; variants are the positions in a chunk that full recompute, or
    offload of a part of the layers, treats differently.
    """

    layers: tuple[LayerPart, ...]
    columns: tuple[Array, ...]

    @property
    def embedding(self) -> int:
        return len(self.layers)

    @property
    def head(self) -> int:
        return len(self.layers) + 1

    @property
    def mtp_input(self) -> int:
        return len(self.layers) + 2

    @property
    def count(self) -> int:
        return len(self.layers) + 3

    @cached_property
    def head_columns(self) -> list[int]:
        """Columns of what makes a pass through the head."""
        depths = [column for column, part in enumerate(self.layers) if part.is_mtp]
        return [*depths, self.head]

    def count_layers(self, counts: Array) -> Array:
        """Return the layers of each row of `counts` [..., parts], and 1 where there are none."""
        return np.asarray(np.maximum(1, counts[..., : len(self.layers)].sum(axis=-1)))

    @cached_property
    def has_staying(self) -> bool:
        """Whether some layers do not offload where others do."""
        return not all(part.offloads for part in self.layers)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of all layers, MTP depths included."""
        return tuple(dict.fromkeys(part.kind for part in self.layers))


def list_parts(model: ModelSpec, layout: Layout, trainer: TrainerSpec) -> StageParts:
    """List the parts of a model on any pipeline.

    They depend on the layout's recompute, and on what the trainer leaves in 16 bits.
    """
    depths = range(model.layers + 1, model.layers + 1 + model.mtp_layers)
    parts: dict[tuple[object, ...], LayerPart] = {}
    columns = np.full((_VARIANTS, model.layers + 1 + model.mtp_layers), -1)
    for layers, is_mtp in ((range(model.layers), False), (depths, True)):
        for layer in layers:
            kind = layer_kind(model, trainer, layer)
            for variant, position in enumerate(_positions(layout)):
                key = is_mtp, kind, variant
                part = LayerPart(
                    kind=kind,
                    layer=layer,
                    position=position,
                    is_mtp=is_mtp,
                    # Variant 0 is the layers that offload, where some stay (see _variant).
                    offloads=not has_staying_layers(layout) or not variant,
                )
                parts.setdefault(key, part)
                columns[variant, layer] = list(parts).index(key)
    return StageParts(layers=tuple(parts.values()), columns=tuple(columns))


_VARIANTS = 2  # a layer that is recomputed or offloaded, and one that is not


def _variant(layout: Layout, chunk: int, position: int, layers: int) -> int:
    """Return 1 for the later of a chunk's `layers`, or of a checkpoint's span, else 0.

    So are the layers of later chunks where only the first offload. They keep other tensors than
    the first ones. Full recompute leaves nothing to offload, so that not both can tell layers
    apart.
    """
    if has_staying_layers(layout):
        return int(not offloads_at(layout, chunk, position, layers))
    if layout.recompute_block:
        return int(position >= layout.recompute_block)
    return int(position % layout.recompute_span > 0)


def _positions(layout: Layout) -> tuple[int, ...]:
    """Return one position in a chunk for each variant, 0 where positions do not matter."""
    if has_staying_layers(layout):
        return 0, 0
    if layout.recompute_block:
        return 0, layout.recompute_block
    return (0, 1) if layout.recompute_span > 1 else (0,)


def layer_columns(
    layout: Layout, parts: StageParts, chunk: Chunk, model: ModelSpec
) -> list[tuple[int, int]]:
    """Return the layers of a virtual stage, each with its column."""
    layers = chunk_layers(model, chunk)
    return [
        (layer, int(parts.columns[_variant(layout, chunk.vpp_rank, position, len(layers))][layer]))
        for position, layer in enumerate(layers)
    ]


def count_parts(
    model: ModelSpec, layout: Layout, parts: StageParts, chunks: Sequence[Chunk]
) -> Array:
    """Count the parts of each virtual stage [chunks, parts]."""
    has_variants = len(_positions(layout)) > 1
    counts = np.zeros((len(chunks), parts.count))
    for row, chunk in zip(counts, chunks, strict=True):
        if has_variants:
            for _, column in layer_columns(layout, parts, chunk, model):
                row[column] += 1
        else:
            row += np.bincount(
                parts.columns[0][list(chunk_layers(model, chunk))], minlength=parts.count
            )
        row[parts.embedding] = chunk.has_embedding
        row[parts.head] = chunk.has_loss
        row[parts.mtp_input] = chunk.mtp_layers > 0 and not chunk.has_loss
    return counts
