"""Offloaded activations: which layers send what to host memory until backward.

A fraction covers the first layers of each chunk, as in Megatron-LM, whose groups are modules of a
layer instead of layers: what a forward releases first stays away longest. A number of chunks covers
the first of each rank, which it would hold longest whatever the schedule (the selective offload of
PipeOffload, Wan et al., arXiv 2503.01328).

They come back a layer ahead of the backward that needs them; under schedule=gis the whole chunk
comes back beside the row before its backward, as in PipeOffload, whose rows leave time for that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import ceil
from types import MappingProxyType

from moewright.rules.saved.saved_tensor import SavedTensor
from moewright.rules.timetable.stages import Chunk, chunk_layers
from moewright.rules.timetable.timetable_row import RowKind, TimetableRow
from moewright.spec.layout import Layout, Offload, Schedule
from moewright.spec.ledger import Module
from moewright.spec.model import ModelSpec

# The saved tensors (rules.saved.recompute) that each offload choice moves to the host: its module's
# input, and what attention keeps of its scores.
_OFFLOADED: Mapping[Offload, tuple[Module, tuple[str, ...]]] = MappingProxyType(
    {
        Offload.ATTN_NORM: (Module.NORM, ("layer_input",)),
        Offload.QKV_LINEAR: (Module.ATTENTION, ("input_norm_out",)),
        Offload.CORE_ATTN: (
            Module.ATTENTION,
            ("qkv", "probabilities", "dropped_probabilities", "dropout_mask"),
        ),
        Offload.ATTN_PROJ: (Module.ATTENTION, ("attention_out",)),
        Offload.MLP_NORM: (Module.NORM, ("residual", "mlp_input")),
        Offload.EXPERT_FC1: (Module.EXPERTS, ("permuted",)),
        Offload.MOE_ACT: (Module.EXPERTS, ("fc1",)),
    }
)
_DIGITS = 9  # 0.1 of 30 layers is 3, whatever the product's last bits say


def activation_offloads(offload: Collection[Offload]) -> tuple[Offload, ...]:
    """Return the choices that offload activations, not the optimizer."""
    return tuple(item for item in offload if item is not Offload.OPTIMIZER)


def find_offload(tensor: SavedTensor) -> Offload | None:
    """Return the choice that moves a tensor to the host; None where none does."""
    for choice, (module, names) in _OFFLOADED.items():
        if tensor.owner is module and tensor.name in names:
            return choice
    return None


def has_staying_layers(layout: Layout) -> bool:
    """Return whether some layers may keep their activations where others offload them."""
    return layout.offload_layers < 1 or layout.offload_chunks > 0


def offloads_at(layout: Layout, chunk: int, place: int, layers: int) -> bool:
    """Return whether the layer at `place` is one that offloads.

    It is one of `layers` of a rank's model chunk `chunk`.
    """
    if layout.offload_chunks and chunk >= layout.offload_chunks:
        return False
    return place < ceil(round(layout.offload_layers * layers, _DIGITS))


def fetches_chunks(layout: Layout) -> bool:
    """Return whether the activations of whole chunks come back a row ahead of their backwards."""
    return layout.schedule is Schedule.GIS


def chunk_to_fetch(rows: Sequence[TimetableRow], index: int) -> TimetableRow | None:
    """Return the backward whose chunk comes back beside the row at `index`, None for none.

    It is that of the next row, but for a backward that follows its own forward.
    """
    if index + 1 >= len(rows):
        return None
    row, after = rows[index], rows[index + 1]
    is_own = (row.micro_batch, row.chunk) == (after.micro_batch, after.chunk)
    if after.kind is RowKind.B and not is_own:
        return after
    return None


def offloading_layers(model: ModelSpec, layout: Layout, chunks: Sequence[Chunk]) -> frozenset[int]:
    """Return the numbers of the layers in `chunks` that offload activations."""
    if not activation_offloads(layout.offload):
        return frozenset()
    numbers = [(chunk.vpp_rank, chunk_layers(model, chunk)) for chunk in chunks]
    return frozenset(
        layer
        for chunk, layers in numbers
        for place, layer in enumerate(layers)
        if offloads_at(layout, chunk, place, len(layers))
    )
