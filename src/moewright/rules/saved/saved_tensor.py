"""The record of one tensor that a layer saves for backward."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moewright.spec.layout import Offload, Recompute
from moewright.spec.ledger import Module


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
