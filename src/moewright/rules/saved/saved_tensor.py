"""The record of one tensor that a layer saves for backward, and which of them go to host memory.

Offloaded activations: which layers send what to host memory until backward. A fraction covers the
first layers of each chunk, as in Megatron-LM, whose groups are modules of a layer instead of
layers: what a forward releases first stays away longest. A number of chunks covers the first of
each rank, which it would hold longest whatever the schedule (the selective offload of PipeOffload,
Wan et al., arXiv 2503.01328).

They come back a layer ahead of the backward that needs them; under schedule=gis the whole chunk
comes back beside the row before its backward, as in PipeOffload, whose rows leave time for that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from types import MappingProxyType

from moewright.rules.timetable.stages import Chunk, chunk_layers
from moewright.rules.timetable.timetable_row import RowKind, TimetableRow
from moewright.spec.layout import Layout, Offload, Recompute, Schedule
from moewright.spec.ledger import Module
from moewright.spec.model import ModelSpec


class KeptFormat(StrEnum):
    """The number formats in which tensors are kept for backward."""

    ACTIVATION = "activation"  # the dtype of activations: 16 bits, or fp32 where products have it
    FP32 = "fp32"
    FP64 = "fp64"
    INT64 = "int64"
    INT32 = "int32"
    BOOL = "bool"
    E4M3 = "e4m3"  # codes of 8 bits, and their scales
    E2M1 = "e2m1"  # codes of 4 bits packed in pairs, and their scales


class Place(StrEnum):
    """The memory in which a tensor waits for backward."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavingStack:
    """The software whose saved tensors are listed.

    `is_fused` means a fused CUDA stack of other trainers, else it is our engine. `input_ratio` is
    the size of the converted input of an 8-bit linear over its 16-bit size, as it was measured of a
    fused stack; None where linears are not 8-bit, and for the engine, whose recipes give the bytes.
    """

    is_fused: bool = False
    input_ratio: float | None = None


ENGINE_STACK = SavingStack()


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """One tensor that a layer saves for backward, per micro-batch on one rank.

    It takes `bytes` in the `format` that is kept, and `wide_bytes` as the forward made it and as
    backward takes it. Any policy of `freed_by` frees it, and one of `kept_by` must be on, where
    there are any, for it to be kept; where one of `wide_by` is on, it is kept as the forward made
    it. No policy frees the layer input, from which even full recomputation starts, nor what a
    router decided, which a replay must not decide again. The offload choice `sent_by`, where there
    is one, moves it to the host.
    """

    module: Module
    name: str
    bytes: int
    wide_bytes: int
    format: KeptFormat
    freed_by: tuple[Recompute, ...]
    owner: Module  # the module that it is part of, even where `module` is an MTP depth
    kept_by: tuple[Recompute, ...] = ()
    wide_by: tuple[Recompute, ...] = ()
    sent_by: Offload | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTensor:
    """A saved tensor as a layer keeps it under its policies: how many bytes, how and where."""

    tensor: SavedTensor
    bytes: int
    format: KeptFormat
    place: Place


def saved_tensor(
    module: Module,
    name: str,
    size_bytes: int,
    *freed_by: Recompute,
    full: bool = True,
    kept_as: KeptFormat = KeptFormat.ACTIVATION,
) -> SavedTensor:
    """Return a tensor that the given policies free, and full recompute too unless `full` is off."""
    if full:
        freed_by = (Recompute.FULL, *freed_by)
    return SavedTensor(
        module=module,
        name=name,
        bytes=size_bytes,
        wide_bytes=size_bytes,
        format=kept_as,
        freed_by=freed_by,
        owner=module,
    )


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
_CHOICE_BY_TENSOR = MappingProxyType(
    {(owner, name): choice for choice, (owner, names) in _OFFLOADED.items() for name in names}
)
_DIGITS = 9  # 0.1 of 30 layers is 3, whatever the product's last bits say


def activation_offloads(offload: Collection[Offload]) -> tuple[Offload, ...]:
    """Return the choices that offload activations, not the optimizer."""
    return tuple(item for item in offload if item is not Offload.OPTIMIZER)


def find_offload(tensor: SavedTensor) -> Offload | None:
    """Return the choice that moves a tensor to the host; None where none does."""
    return _CHOICE_BY_TENSOR.get((tensor.owner, tensor.name))


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
