"""A Triton kernel that decodes numbers of 8 and 4 bits: codes are read once, numbers written.

The bits are those of kernels.low_precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moewright.engine.kernels import low_precision
from moewright.engine.kernels.low_precision import NarrowTensor
from moewright.rules.low_precision import NarrowFormat, ScaleFormat

_ROWS = 32  # with _COLUMNS a tile of 8,192 numbers, 32 KiB in fp32
_COLUMNS = 256  # one row of a tile is whole lines of memory
# The dtypes that the kernels write, and whether they round to them.
ROUNDS = {torch.float32: False, torch.bfloat16: True}
# The scales of blocks, as constants of the kernels.
POWER_OF_TWO = tl.constexpr(0)
E8M0 = tl.constexpr(1)
SCALES = {
    ScaleFormat.POWER_OF_TWO: (0, torch.float32, torch.float32),
    ScaleFormat.E8M0: (1, torch.uint8, torch.float8_e8m0fnu),
    ScaleFormat.E4M3: (2, torch.uint8, torch.float8_e4m3fn),
}
# Bits of the mantissa, and the bias of the exponent.
SHAPES = {NarrowFormat.E4M3: (3, 7), NarrowFormat.E5M2: (2, 15), NarrowFormat.E2M1: (1, 1)}
CODES = {NarrowFormat.E4M3: torch.float8_e4m3fn, NarrowFormat.E5M2: torch.float8_e5m2}
_E2M1 = tl.constexpr(1)  # bits of the mantissa


@triton.jit
def number_of_code(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the number in fp32 of a code of 8 bits, or of 4 of them."""
    SIGN: tl.constexpr = 3 if MANTISSA == _E2M1 else 7
    magnitude = code & ((1 << SIGN) - 1)
    shifted = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)
    step: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA)
    small = magnitude.to(tl.float32) * step
    number = tl.where(magnitude < (1 << MANTISSA), small, shifted.to(tl.float32, bitcast=True))
    if MANTISSA == 3:
        number = tl.where(magnitude == 0x7F, float("nan"), number)
    if MANTISSA == 2:
        number = tl.where(magnitude == 0x7C, float("inf"), number)
        number = tl.where(magnitude > 0x7C, float("nan"), number)
    bits = number.to(tl.int32, bitcast=True) | ((code >> SIGN) << 31)  # -0 is a number of its own
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_to_bf16(value):
    """Return the upper halves of numbers in fp32, rounded to the nearest, ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value != value, 0x7FC0, rounded)


@triton.jit
def decode_scales(scale, SCALE: tl.constexpr):
    """Return the scales of blocks in fp32."""
    if SCALE == POWER_OF_TWO:
        decoded = scale
    elif SCALE == E8M0:
        exponent = scale.to(tl.int32)
        bits = tl.where(exponent > 0, exponent << 23, 0x400000)
        decoded = bits.to(tl.float32, bitcast=True)
    else:
        decoded = number_of_code(scale.to(tl.int32), 3, 7)
    return decoded


@triton.jit
def place_scales(row, block, row_blocks, TILES: tl.constexpr):
    """Return where the scales of blocks of rows lie, row after row or in tiles (scale_tiles)."""
    if TILES:
        tile = (row // 128)[:, None] * (row_blocks // 4) + (block // 4)[None, :]
        lane = (row % 32) * 16 + row % 128 // 32 * 4
        place = tile * 512 + lane[:, None] + (block % 4)[None, :]
    else:
        place = row[:, None] * row_blocks + block[None, :]
    return place


@triton.jit
def _widen(
    codes, scales, factors, out, rows, columns, row_stride, column_stride, row_blocks,
    row_factor, column_factor,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    HAS_FACTORS: tl.constexpr, TO_BF16: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Decode a tile: codes times the scale of their block, times the factor of their group."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if MANTISSA == _E2M1:
        place = row[:, None] * row_stride + (column // 2)[None, :] * column_stride
        pair = tl.load(codes + place, inside, 0).to(tl.int32)
        code = (pair >> ((column % 2) * 4).to(tl.int32)[None, :]) & 15
    else:
        place = row[:, None] * row_stride + column[None, :] * column_stride
        code = tl.load(codes + place, inside, 0).to(tl.int32)
    number = number_of_code(code, MANTISSA, BIAS)
    if BLOCK:
        place = place_scales(row, column // BLOCK, row_blocks, TILES)
        number *= decode_scales(tl.load(scales + place, inside, 0), SCALE)
    if HAS_FACTORS:
        place = row[:, None] * row_factor + column[None, :] * column_factor
        number *= tl.load(factors + place, inside, 0.0)
    target = out + row[:, None] * columns + column[None, :]
    if TO_BF16:
        tl.store(target, round_to_bf16(number).to(tl.int16), inside)
    else:
        tl.store(target, number, inside)


def widen(narrow: NarrowTensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute NarrowTensor.widen."""
    if dtype not in ROUNDS or not narrow.codes.numel():
        return low_precision.decode_numbers(narrow, dtype)
    operand = narrow.operand
    rows = len(narrow.codes)
    out = narrow.codes.new_empty(rows, narrow.columns, dtype=dtype)
    factors = out
    if narrow.group_scales is not None:
        factors = narrow.groups.spread(narrow.group_scales, out)
    number, scale_dtype, _ = SCALES.get(operand.scale, (0, torch.float32, torch.float32))
    scales = out if narrow.scales is None else narrow.scales.view(scale_dtype)
    mantissa, bias = SHAPES[operand.number]
    _widen[triton.cdiv(rows, _ROWS), triton.cdiv(narrow.columns, _COLUMNS)](
        narrow.codes.view(torch.uint8),
        scales,
        factors,
        out.view(torch.int16) if ROUNDS[dtype] else out,
        rows,
        narrow.columns,
        *narrow.codes.stride(),
        scales.shape[1],
        *broadcast_strides(factors),
        MANTISSA=mantissa,
        BIAS=bias,
        SCALE=number,
        BLOCK=operand.block,
        HAS_FACTORS=narrow.group_scales is not None,
        TO_BF16=ROUNDS[dtype],
        TILES=narrow.in_tiles,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )
    return out


def broadcast_strides(values: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a matrix that is read as if its dims of one were as long as needed."""
    pairs = zip(values.shape, values.stride(), strict=True)
    return tuple(0 if size == 1 else stride for size, stride in pairs)
