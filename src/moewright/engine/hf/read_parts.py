"""Weights of a Hugging Face folder read as parts of our tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moewright.engine.comm.mesh import TensorPlacement
from moewright.engine.hf.candidates import HfTensor
from moewright.engine.hf.folder import HfReader


def read_parameter_box(
    reader: HfReader, hf_tensors: Sequence[HfTensor], offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Read a box of one of our tensors, in fp32.

    Only what lies in it is read, or everything below the first dim where experts are fused.
    """
    box = torch.empty(tuple(sizes))
    for hf_tensor in hf_tensors:
        lead = len(hf_tensor.index)
        # Where this part lies in the box; a part outside of it is not read.
        position = [index - offset for index, offset in zip(hf_tensor.index, offsets, strict=False)]
        if any(not 0 <= index < size for index, size in zip(position, sizes, strict=False)):
            continue
        inner = tuple(
            slice(offset, offset + size)
            for offset, size in zip(offsets[lead:], sizes[lead:], strict=True)
        )
        if hf_tensor.rows:
            stored = reader.read(hf_tensor.name).reshape(hf_tensor.whole_shape)
            _fill_rows(box, stored.float(), hf_tensor.rows, inner)
            continue
        if hf_tensor.whole_shape:
            value = reader.read(hf_tensor.name).reshape(hf_tensor.whole_shape)[inner]
        elif hf_tensor.inner_shape:
            experts = hf_tensor.from_hf(reader.read_slice(hf_tensor.name, inner[:1]))
            value = experts[(slice(None), *inner[1:])]
        elif hf_tensor.fused_shape:
            first = hf_tensor.fused_rows.start
            rows = slice(first + inner[0].start, first + inner[0].stop)
            value = reader.read_slice(hf_tensor.name, (rows, *inner[1:]))
        else:
            value = reader.read_slice(hf_tensor.name, inner)
        box[tuple(position)] = value.float()
    return box


def _fill_rows(
    box: torch.Tensor, stored: torch.Tensor, rows: Sequence[range], inner: tuple[slice, ...]
) -> None:
    """Copy to a box those rows of ours that a stored tensor has and that lie in `inner`."""
    own, *columns = inner
    for part, values in zip(rows, stored.split([len(part) for part in rows]), strict=True):
        first, stop = max(part.start, own.start), min(part.stop, own.stop)
        if first < stop:
            taken = values[(slice(first - part.start, stop - part.start), *columns)]
            box[first - own.start : stop - own.start] = taken


def read_local_part(
    reader: HfReader, hf_tensors: Sequence[HfTensor], placement: TensorPlacement
) -> torch.Tensor:
    """Read this rank's part of a tensor in fp32, its padding zero."""
    if placement.row_indices:
        parts = placement.split_rows()
        return torch.cat([read_local_part(reader, hf_tensors, part) for part in parts])
    local = torch.zeros(placement.local_shape)
    unpadded = tuple(slice(size) for size in placement.unpadded_shape)
    local[unpadded] = read_parameter_box(
        reader, hf_tensors, placement.offsets, placement.unpadded_shape
    )
    return local
