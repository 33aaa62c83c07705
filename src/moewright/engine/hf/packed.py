"""Tensors that a Hugging Face folder holds in fewer bits than they stand for, beside scales.

MXFP4 (OCP Microscaling Formats v1.0: blocks of 32 values of 4 bits and a power of two), as gpt-oss
is published: "x" is "x_blocks" and "x_scales". FP8, as DeepSeek-V3 is published (its
README_WEIGHTS.md): "x" of e4m3, and "x_scale_inv" with one factor for each block of
`quantization_config.weight_block_size` rows and columns; the last blocks may be cut off. Both are
read in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moewright.spec.errors import BadInput, Reason

MXFP4, FP8 = "MXFP4", "F8_E4M3"
PACKED_DTYPES = (MXFP4, FP8)

_BLOCKS, _SCALES, _FACTORS = "_blocks", "_scales", "_scale_inv"
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below zero
_SCALE_BIAS = 127
_BLOCK = 32
_FACTOR_DTYPES = ("F32", "BF16")

Box = tuple[slice, ...]
ReadStored = Callable[[str, Box], torch.Tensor]  # a box of a tensor as it is stored


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where a tensor lies; `dtype` is the safetensors name, or MXFP4; `block` of FP8: rows and
    columns a factor."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    block: tuple[int, int] = (1, 1)


def resolve_packed(
    path: Path, tensors: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of the folder `path` under the names and shapes that they stand for.

    Raises BadInput naming packed values without their scales, or scales without values.
    """
    block = _block_size(
        path, next((name for name, stored in tensors.items() if stored.dtype == FP8), "")
    )
    for name, stored in tensors.items():
        if name.endswith(_BLOCKS):
            yield name.removesuffix(_BLOCKS), _resolve_mxfp4(path, name, tensors)
        elif name.endswith(_FACTORS):
            if tensors.get(name.removesuffix(_FACTORS), stored).dtype != FP8:
                raise tensor_error(
                    path, name, f"has no tensor {name.removesuffix(_FACTORS)} of {FP8} to scale"
                )
        elif stored.dtype == FP8:
            yield name, _resolve_fp8(path, name, tensors, block)
        elif not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in tensors):
            yield name, stored


def _resolve_mxfp4(path: Path, name: str, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    """[E,K,N], of blocks [E,N,K/32,16] and scales [E,N,K/32]."""
    stored, other = tensors[name], name.removesuffix(_BLOCKS) + _SCALES
    scales = tensors.get(other)
    packed = stored.dtype == "U8" and len(stored.shape) == 4 and stored.shape[3] == _BLOCK // 2
    if not packed or scales is None or scales.dtype != "U8" or scales.shape != stored.shape[:3]:
        raise tensor_error(
            path, name, f"needs {_BLOCK // 2} bytes a block, and a byte in {other} for each"
        )
    experts, rows, blocks, _ = stored.shape
    return StoredTensor(file=stored.file, dtype=MXFP4, shape=(experts, blocks * _BLOCK, rows))


def _resolve_fp8(
    path: Path, name: str, tensors: Mapping[str, StoredTensor], block: tuple[int, int]
) -> StoredTensor:
    stored, other = tensors[name], name + _FACTORS
    factors = tensors.get(other)
    if factors is None or len(stored.shape) < 2:
        raise tensor_error(path, name, f"is of {FP8} and needs rows, columns, and factors {other}")
    wanted = (
        *stored.shape[:-2],
        *(-(-size // step) for size, step in zip(stored.shape[-2:], block, strict=True)),
    )
    if factors.shape != wanted:
        raise tensor_error(
            path,
            other,
            f"has shape {list(factors.shape)}, blocks of {list(block)} make {list(wanted)}",
        )
    if factors.dtype not in _FACTOR_DTYPES:
        raise tensor_error(
            path, other, f"is of {factors.dtype}; known are {', '.join(_FACTOR_DTYPES)}"
        )
    return replace(stored, block=block)


def _block_size(path: Path, tensor_name: str) -> tuple[int, int]:
    """Rows and columns of a block, as config.json says, where a tensor is `asking` for it."""
    if not tensor_name:
        return (1, 1)
    try:
        said = json.loads((path / "config.json").read_text("utf-8"))["quantization_config"][
            "weight_block_size"
        ]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        said = None
    match said:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    rule = f"is of {FP8}, and config.json gives no quantization_config.weight_block_size of two whole numbers"
    raise tensor_error(path, tensor_name, rule)


def unpack(name: str, stored: StoredTensor, box: Box, read_stored: ReadStored) -> torch.Tensor:
    """A box of a packed tensor in fp32; what it leaves out of the last dims is taken whole."""
    box = (*box, *(slice(None),) * (len(stored.shape) - len(box)))
    return (
        _unpack_mxfp4(name, box, read_stored)
        if stored.dtype == MXFP4
        else _unpack_fp8(name, stored, box, read_stored)
    )


def _unpack_mxfp4(name: str, box: Box, raw: ReadStored) -> torch.Tensor:
    """Of two values in a byte the first is in the lower half; whole experts are unpacked."""
    packed, powers = raw(name + _BLOCKS, box[:1]), raw(name + _SCALES, box[:1])
    known = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
    values = torch.stack((known[(packed & 15).int()], known[(packed >> 4).int()]), -1).flatten(-2)
    scaled = torch.ldexp(values, powers.int()[..., None] - _SCALE_BIAS)
    return scaled.flatten(-2).transpose(1, 2)[(slice(None), *box[1:])]


def _unpack_fp8(name: str, stored: StoredTensor, box: Box, raw: ReadStored) -> torch.Tensor:
    """Each value times the factor of its block, rounded once; the box may begin and end inside of
    blocks."""
    rows, columns = (
        range(*cut.indices(size)) for cut, size in zip(box[-2:], stored.shape[-2:], strict=True)
    )
    cover = tuple(
        slice(part.start // step, -(-part.stop // step))
        for part, step in zip((rows, columns), stored.block, strict=True)
    )
    factors = raw(name + _FACTORS, (*box[:-2], *cover)).float()
    along = factors[
        ..., torch.arange(columns.start, columns.stop) // stored.block[1] - cover[1].start
    ]
    wide = raw(name, box).float()
    for number, strip in enumerate(along.unbind(-2), cover[0].start):
        first, last = (
            min(max(n * stored.block[0], rows.start), rows.stop) for n in (number, number + 1)
        )
        wide[..., first - rows.start : last - rows.start, :] *= strip[..., None, :]
    return wide


def tensor_error(path: Path, name: str, rule: str) -> BadInput:
    """The refusal of one tensor of a folder, by name."""
    return BadInput(Reason(field=name, rule=f"{rule} ({path})"))
