"""Tensors that a Hugging Face folder holds in fewer bits than they stand for, next to their scales.

MXFP4 (OCP Microscaling Formats v1.0: blocks of 32 values of 4 bits and a power of two), as gpt-oss
is published: "x" is "x_blocks" and "x_scales". FP8, as DeepSeek-V3 is published (its
README_WEIGHTS.md): "x" of e4m3, and "x_scale_inv" with one factor for each block of
`quantization_config.weight_block_size` rows and columns; the last blocks may be cut off.
DeepSeek-V4's files (its inference/convert.py, and transformers' Fp8Dequantize) have FP8 too, and
rows of FP4: "x.weight" of two values in a byte, and "x.scale" with a power of two for 32 values.
All are read in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moewright.codec import FloatPolicy, read_json_data
from moewright.engine.kernels.low_precision import decode_e2m1
from moewright.spec.errors import BadInput, Reason

MXFP4 = "MXFP4"
FP8 = "F8_E4M3"
FP4 = "F4_E2M1"
PACKED_DTYPES = (MXFP4, FP8, FP4)

_BLOCKS_SUFFIX = "_blocks"
_SCALES_SUFFIX = "_scales"
_FACTORS_SUFFIX = "_scale_inv"
_WEIGHT = ".weight"
_FACTORS = ".scale"  # in place of _WEIGHT
_POWERS = "F8_E8M0"
# The dtypes of values that factors of that name scale.
_SCALED_DTYPES = (FP8, "I8")
_SCALE_BIAS = 127
_BLOCK = 32
_FACTOR_DTYPES = ("F32", "BF16", _POWERS)

Box = tuple[slice, ...]
# Reads a box of a tensor as it is stored.
ReadStored = Callable[[str, Box], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor and the file in which it lies.

    `dtype` is the safetensors name, or that of packed values; `block` has the rows and columns that
    share a factor, which is in the tensor `factors`.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    block: tuple[int, int] = (1, 1)
    factors: str = ""


def resolve_packed(
    path: Path, tensors: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of the folder `path` under the names and shapes that they stand for.

    Raises:
        BadInput: naming packed values without their scales, or scales without values.
    """
    block = _read_block_size(path, tensors)
    for name, stored in tensors.items():
        if name.endswith(_BLOCKS_SUFFIX):
            yield name.removesuffix(_BLOCKS_SUFFIX), _resolve_mxfp4(path, name, tensors)
        elif name.endswith(_FACTORS_SUFFIX):
            scaled = name.removesuffix(_FACTORS_SUFFIX)
            if scaled not in tensors or tensors[scaled].dtype != FP8:
                raise tensor_error(path, name, f"has no tensor {scaled} of {FP8} to scale")
        elif name.endswith(_FACTORS) and stored.dtype in _FACTOR_DTYPES:
            scaled = name.removesuffix(_FACTORS) + _WEIGHT
            if scaled not in tensors or tensors[scaled].dtype not in _SCALED_DTYPES:
                dtypes = " or ".join(_SCALED_DTYPES)
                raise tensor_error(path, name, f"has no tensor {scaled} of {dtypes} to scale")
        elif stored.dtype == FP8:
            yield name, _resolve_fp8(path, name, tensors, block)
        elif stored.dtype == "I8":
            yield name, _resolve_fp4(path, name, tensors)
        elif not _is_mxfp4_scale(name, tensors):
            yield name, stored


def _is_mxfp4_scale(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    if not name.endswith(_SCALES_SUFFIX):
        return False
    return name.removesuffix(_SCALES_SUFFIX) + _BLOCKS_SUFFIX in tensors


def _resolve_mxfp4(path: Path, name: str, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    """Return [E,K,N], which blocks [E,N,K/32,16] and scales [E,N,K/32] stand for."""
    stored = tensors[name]
    scales_name = name.removesuffix(_BLOCKS_SUFFIX) + _SCALES_SUFFIX
    scales = tensors.get(scales_name)
    is_packed = stored.dtype == "U8" and len(stored.shape) == 4 and stored.shape[3] == _BLOCK // 2
    if not is_packed or scales is None or scales.dtype != "U8" or scales.shape != stored.shape[:3]:
        rule = f"needs {_BLOCK // 2} bytes a block, and a byte in {scales_name} for each"
        raise tensor_error(path, name, rule)
    experts, rows, blocks, _ = stored.shape
    return StoredTensor(file=stored.file, dtype=MXFP4, shape=(experts, blocks * _BLOCK, rows))


def _factors_name(name: str, tensors: Mapping[str, StoredTensor]) -> str:
    """Return the name of the factors of a tensor, which DeepSeek-V4 gives in place of its own."""
    other = name.removesuffix(_WEIGHT) + _FACTORS
    if name.endswith(_WEIGHT) and other in tensors:
        return other
    return name + _FACTORS_SUFFIX


def _resolve_fp4(path: Path, name: str, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    """Return [N,K], which bytes [N,K/2] and powers of two [N,K/32] stand for."""
    stored = tensors[name]
    factors_name = _factors_name(name, tensors)
    factors = tensors.get(factors_name)
    *lead, width = stored.shape
    expected = (*lead, 2 * width // _BLOCK)
    is_whole = len(lead) == 1 and not 2 * width % _BLOCK
    has_powers = factors is not None and (factors.shape, factors.dtype) == (expected, _POWERS)
    if not is_whole or not has_powers:
        rule = f"has two values of 4 bits a byte, and needs a {_POWERS} for {_BLOCK} in a row"
        raise tensor_error(path, name, f"{rule}, in {factors_name}")
    return StoredTensor(
        file=stored.file,
        dtype=FP4,
        shape=(*lead, 2 * width),
        block=(1, _BLOCK),
        factors=factors_name,
    )


def _resolve_fp8(
    path: Path, name: str, tensors: Mapping[str, StoredTensor], block: tuple[int, int]
) -> StoredTensor:
    stored = tensors[name]
    factors_name = _factors_name(name, tensors)
    factors = tensors.get(factors_name)
    if factors is None or len(stored.shape) < 2:
        rule = f"is of {FP8} and needs rows, columns, and factors {factors_name}"
        raise tensor_error(path, name, rule)
    *lead, rows, columns = stored.shape
    block_rows, block_columns = block
    expected = (*lead, -(-rows // block_rows), -(-columns // block_columns))
    if factors.shape != expected:
        rule = f"has shape {list(factors.shape)}, blocks of {list(block)} make {list(expected)}"
        raise tensor_error(path, factors_name, rule)
    if factors.dtype not in _FACTOR_DTYPES:
        rule = f"is of {factors.dtype}; known are {', '.join(_FACTOR_DTYPES)}"
        raise tensor_error(path, factors_name, rule)
    return replace(stored, block=block, factors=factors_name)


def _read_block_size(path: Path, tensors: Mapping[str, StoredTensor]) -> tuple[int, int]:
    """Read the rows and columns of an FP8 block in config.json, where a tensor is of FP8."""
    fp8_name = next((name for name, stored in tensors.items() if stored.dtype == FP8), "")
    if not fp8_name:
        return (1, 1)
    try:
        config = read_json_data(path / "config.json", FloatPolicy.NON_FINITE)
        block_size = config["quantization_config"]["weight_block_size"]
    except (BadInput, LookupError, TypeError):
        block_size = None
    match block_size:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    rule = (
        f"is of {FP8}, and config.json gives no quantization_config.weight_block_size of two "
        "whole numbers"
    )
    raise tensor_error(path, fp8_name, rule)


def unpack(name: str, stored: StoredTensor, box: Box, read_stored: ReadStored) -> torch.Tensor:
    """Unpack a box of a packed tensor in fp32; of dims that the box leaves out, all is taken."""
    missing_dims = len(stored.shape) - len(box)
    box = (*box, *(slice(None),) * missing_dims)
    if stored.dtype == MXFP4:
        return _unpack_mxfp4(name, box, read_stored)
    return _unpack_blocks(name, stored, box, read_stored)


def _unpack_mxfp4(name: str, box: Box, read_stored: ReadStored) -> torch.Tensor:
    """Unpack whole experts."""
    values = decode_e2m1(read_stored(name + _BLOCKS_SUFFIX, box[:1]))
    powers = read_stored(name + _SCALES_SUFFIX, box[:1])
    # Exact: a power of two changes the exponent alone.
    scaled = torch.ldexp(values, powers.int()[..., None] - _SCALE_BIAS)
    return scaled.flatten(-2).transpose(1, 2)[(slice(None), *box[1:])]


def _read_values(
    name: str, stored: StoredTensor, box: Box, read_stored: ReadStored
) -> torch.Tensor:
    """Read a box of values that have no factors yet, in fp32."""
    if stored.dtype != FP4:
        return read_stored(name, box).float()
    start, stop, _ = box[-1].indices(stored.shape[-1])
    # Whole bytes, of which the first and the last may have a value beside the box.
    packed = read_stored(name, (*box[:-1], slice(start // 2, -(-stop // 2))))
    return decode_e2m1(packed.view(torch.uint8))[..., start % 2 :][..., : stop - start]


def _unpack_blocks(
    name: str, stored: StoredTensor, box: Box, read_stored: ReadStored
) -> torch.Tensor:
    """Multiply each value by the factor of its block, rounded once.

    The box may begin and end inside of blocks.
    """
    block_rows, block_columns = stored.block
    rows = range(*box[-2].indices(stored.shape[-2]))
    columns = range(*box[-1].indices(stored.shape[-1]))
    first_block_row = rows.start // block_rows
    first_block_column = columns.start // block_columns
    factor_box = (
        *box[:-2],
        slice(first_block_row, -(-rows.stop // block_rows)),
        slice(first_block_column, -(-columns.stop // block_columns)),
    )
    factors = read_stored(stored.factors, factor_box).float()
    block_of_column = torch.arange(columns.start, columns.stop) // block_columns
    column_factors = factors[..., block_of_column - first_block_column]
    values = _read_values(name, stored, box, read_stored)
    if block_rows == 1:
        return values.mul_(column_factors)
    for block_row, row_factors in enumerate(column_factors.unbind(-2), first_block_row):
        first = max(block_row * block_rows, rows.start)
        last = min((block_row + 1) * block_rows, rows.stop)
        values[..., first - rows.start : last - rows.start, :] *= row_factors[..., None, :]
    return values


def tensor_error(path: Path, name: str, rule: str, nearest: str = "") -> BadInput:
    """Return the refusal of one tensor of a folder, by name."""
    return BadInput(Reason(field=name, rule=f"{rule} ({path})", nearest=nearest))
