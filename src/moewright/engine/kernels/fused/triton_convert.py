"""Triton kernels of the conversion to 8 and 4 bits: a tensor is read once, codes are written.

Operation by operation the conversion goes over fp32 copies about ten times. Here a program finds
the scales of the blocks in its tile and rounds the numbers by them; where a scale is for a whole
group, a second kernel finds the largest magnitudes of rows before. A transposed tensor is read
where it lies; a weight is read once and written along its columns and along its rows.

The bits are those of kernels.low_precision: quotients are rounded to the nearest, and numbers to
their format by whole numbers, so that no device's own conversion has a say. A NaN stays one where
the format has it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moewright.engine.kernels import low_precision
from moewright.engine.kernels.fused.triton_widen import (
    CODES,
    E8M0,
    POWER_OF_TWO,
    SCALES,
    SHAPES,
    broadcast_strides,
    place_scales,
    widen,
)
from moewright.engine.kernels.low_precision import ONE_GROUP, Groups, NarrowTensor, NarrowWeight
from moewright.engine.kernels.scaled_products import reads_tiles
from moewright.rules.low_precision import NarrowFormat, OperandFormat, ScaleFormat

_TILE_NUMEL = 8192  # numbers that a program holds at a time
_TILE_COLUMNS = 128  # a multiple of every block
_SIDE = 64  # of the square tile that is written both ways; blocks of 128 take one of theirs
_FP32_LARGEST = tl.constexpr(low_precision.FP32_LARGEST)
_E4M3_LARGEST = tl.constexpr(NarrowFormat.E4M3.largest)


@triton.jit
def _clamp(x, most):
    return tl.where(x > most, most, tl.where(x < -most, -most, x))


@triton.jit
def _divide(a, b):
    return tl.div_rn(a, b)


@triton.jit
def _round_magnitude(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the code, without its sign, of |value| rounded to the nearest, ties to even.

    A number below the least normal one counts in the least steps of the format; the sum with 2^23
    leaves that count in the lowest bits.
    """
    magnitude = tl.abs(value)
    bits = magnitude.to(tl.int32, bitcast=True)
    dropped: tl.constexpr = 23 - MANTISSA
    half: tl.constexpr = (1 << (dropped - 1)) - 1
    normal = ((bits + half + ((bits >> dropped) & 1)) >> dropped) - ((127 - BIAS) << MANTISSA)
    steps_of_one: tl.constexpr = 2.0 ** (BIAS + MANTISSA - 1)
    counted = magnitude * steps_of_one + 8388608.0
    small = counted.to(tl.int32, bitcast=True) & 0x7FFFFF
    least_normal: tl.constexpr = 2.0 ** (1 - BIAS)
    return tl.where(magnitude < least_normal, small, normal)


@triton.jit
def round_to_byte(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the code of a number that is no larger than the format's largest; NaN is 0x7f."""
    code = _round_magnitude(value, MANTISSA, BIAS)
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(value != value, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def _number_of_e2m1(code):
    return tl.where(code < 4, code * 0.5, tl.where(code < 6, code - 2.0, 2.0 * code - 8.0))


@triton.jit
def _draw_e2m1(value, draw):
    """Return one of the two neighbours of |value|, the nearer one with more probability."""
    magnitude = tl.abs(value)
    below = tl.zeros_like(magnitude).to(tl.int32)
    for code in tl.static_range(1, 7):
        below += (magnitude >= _number_of_e2m1(code)).to(tl.int32)
    low = _number_of_e2m1(below)
    step = _number_of_e2m1(below + 1) - low
    return below + (draw < _divide(magnitude - low, step)).to(tl.int32)


@triton.jit
def encode_scales(largest, spread, TOP: tl.constexpr, SCALE: tl.constexpr):
    """Return the scales of blocks as they are kept, and what they decode to, in fp32."""
    share = _divide(largest, spread)
    if SCALE == POWER_OF_TWO:
        factor = tl.where(share > 0, _divide(tl.full(share.shape, TOP, tl.float32), share), 1.0)
        factor = tl.where(factor > _FP32_LARGEST, _FP32_LARGEST, factor)
        power = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        kept = _divide(tl.full(share.shape, 1.0, tl.float32), power)
        decoded = kept
    elif SCALE == E8M0:
        bits = (share * (1.0 / TOP)).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) & 0xFF
        mantissa = bits & 0x7FFFFF
        is_above = (mantissa > 0) & ((exponent > 0) | (mantissa > 0x400000))
        exponent = tl.minimum(exponent + is_above.to(tl.int32), 254)
        kept = exponent.to(tl.uint8)
        decoded = tl.where(exponent > 0, exponent << 23, 0x400000).to(tl.float32, bitcast=True)
    else:
        top = tl.full(share.shape, TOP, tl.float32)
        kept = round_to_byte(_clamp(_divide(share, top), _E4M3_LARGEST), 3, 7)
        code = kept.to(tl.int32)
        normal = ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        decoded = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
    return kept, decoded * spread


@triton.jit
def _encode_tile(
    value, codes, scales, spread, draws,
    first_row, first_column, rows, columns, row_spread, block_spread,
    TOP: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, TILED: tl.constexpr, PACKED: tl.constexpr, RANDOM: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Convert a tile of numbers [ROWS, COLUMNS] in fp32, which lies in `rows` and `columns`.

    `spread` has the scale of each row's group, or of each block's.
    """
    row = first_row + tl.arange(0, ROWS)
    encode_rows(
        value, codes, scales, spread, draws,
        row, row < rows, first_column, columns, row_spread, block_spread,
        TOP, MANTISSA, BIAS, SCALE, BLOCK, TILED, PACKED, RANDOM, TILES, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def encode_rows(
    value, codes, scales, spread, draws,
    row, has_row, first_column, columns, row_spread, block_spread,
    TOP: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, TILED: tl.constexpr, PACKED: tl.constexpr, RANDOM: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Convert numbers [ROWS, COLUMNS] in fp32, and write those that have a row to it."""
    blocks: tl.constexpr = COLUMNS // BLOCK
    column = first_column + tl.arange(0, COLUMNS)
    inside = has_row[:, None] & (column < columns)[None, :]
    value = value.reshape(ROWS, blocks, BLOCK)
    largest = tl.max(tl.abs(value), 2)
    if TILED:  # of as many rows, too
        largest = tl.max(largest.reshape(ROWS // BLOCK, BLOCK, blocks), 1)
        largest = tl.broadcast_to(largest[:, None, :], (ROWS // BLOCK, BLOCK, blocks))
        largest = largest.reshape(ROWS, blocks)
    block = first_column // BLOCK + tl.arange(0, blocks)
    row_blocks = tl.cdiv(columns, BLOCK)
    is_block = has_row[:, None] & (block < row_blocks)[None, :]
    spread_place = row[:, None] * row_spread + block[None, :] * block_spread
    block_scale = tl.load(spread + spread_place, is_block, 1.0)
    kept, decoded = encode_scales(largest, block_scale, TOP, SCALE)
    tl.store(scales + place_scales(row, block, row_blocks, TILES), kept, is_block)
    scaled = scale_blocks(value, decoded, TOP, ROWS, COLUMNS)
    if PACKED:
        if RANDOM:
            draw = tl.load(draws + row[:, None] * columns + column[None, :], inside, 0.0)
            code = _draw_e2m1(scaled, draw)
        else:
            code = _round_magnitude(scaled, MANTISSA, BIAS)
        code |= (scaled.to(tl.int32, bitcast=True) >> 28) & 8
        code = tl.where(inside, code, 0)
        low, high = tl.split(code.reshape(ROWS, COLUMNS // 2, 2))
        pair = first_column // 2 + tl.arange(0, COLUMNS // 2)
        width = tl.cdiv(columns, 2)
        has_pair = has_row[:, None] & (pair < width)[None, :]
        packed = (low | (high << 4)).to(tl.uint8)
        tl.store(codes + row[:, None] * width + pair[None, :], packed, has_pair)
    else:
        code = round_to_byte(scaled, MANTISSA, BIAS)
        tl.store(codes + row[:, None] * columns + column[None, :], code, inside)


@triton.jit
def scale_blocks(value, decoded, TOP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return numbers [ROWS, blocks, n] over the scale of their block, as [ROWS, COLUMNS]."""
    unit = tl.full(decoded.shape, 1.0, tl.float32)
    encode = tl.where(decoded > 0, _divide(unit, decoded), 0.0)
    return _clamp((value * encode[:, :, None]).reshape(ROWS, COLUMNS), TOP)


@triton.jit
def _load_tile(
    x, first_row, first_column, rows, columns, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * row_stride + column[None, :] * column_stride
    return tl.load(x + place, inside, 0.0).to(tl.float32)


@triton.jit
def _convert_blocks(
    x, codes, scales, spread, draws,
    rows, columns, row_stride, column_stride, row_spread, block_spread,
    TOP: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, TILED: tl.constexpr, PACKED: tl.constexpr, RANDOM: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Convert a tile; `spread` as in _encode_tile."""
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    first_column = tl.program_id(1).to(tl.int64) * COLUMNS
    value = _load_tile(
        x, first_row, first_column, rows, columns, row_stride, column_stride, ROWS, COLUMNS
    )
    _encode_tile(
        value, codes, scales, spread, draws,
        first_row, first_column, rows, columns, row_spread, block_spread,
        TOP, MANTISSA, BIAS, SCALE, BLOCK, TILED, PACKED, RANDOM, TILES, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _convert_weight(
    x, codes, scales, turned_codes, turned_scales, spread,
    rows, columns, padded_rows, padded_columns, expert_stride, row_stride, column_stride,
    expert_spread,
    TOP: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, TILED: tl.constexpr, PACKED: tl.constexpr, TILES: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """Convert a square tile of an expert's weight along its columns, and along its rows.

    An expert has `padded_rows` of codes along columns, and `padded_columns` along rows, so that no
    block of its tiles holds rows of another.
    """
    expert = tl.program_id(2).to(tl.int64)
    first_row = tl.program_id(0).to(tl.int64) * SIDE
    first_column = tl.program_id(1).to(tl.int64) * SIDE
    value = _load_tile(
        x + expert * expert_stride,
        first_row, first_column, rows, columns, row_stride, column_stride, SIDE, SIDE,
    )  # fmt: skip
    width = tl.cdiv(columns, 2) if PACKED else columns
    turned_width = tl.cdiv(rows, 2) if PACKED else rows
    scale = spread + expert * expert_spread
    place = expert * padded_rows
    _encode_tile(
        value, codes + place * width, scales + place * tl.cdiv(columns, BLOCK), scale, scale,
        first_row, first_column, padded_rows, columns, 0, 0,
        TOP, MANTISSA, BIAS, SCALE, BLOCK, TILED, PACKED, False, TILES, SIDE, SIDE,
    )  # fmt: skip
    place = expert * padded_columns
    _encode_tile(
        tl.trans(value),
        turned_codes + place * turned_width,
        turned_scales + place * tl.cdiv(rows, BLOCK),
        scale, scale, first_column, first_row, padded_columns, rows, 0, 0,
        TOP, MANTISSA, BIAS, SCALE, BLOCK, TILED, PACKED, False, TILES, SIDE, SIDE,
    )  # fmt: skip


@triton.jit
def _cast_weight(
    x, codes, turned_codes, factors, rows, columns, expert_stride, row_stride, column_stride,
    TOP: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Convert a square tile of an expert's weight by its factor, and write it both ways."""
    expert = tl.program_id(2).to(tl.int64)
    first_row = tl.program_id(0).to(tl.int64) * SIDE
    first_column = tl.program_id(1).to(tl.int64) * SIDE
    value = _load_tile(
        x + expert * expert_stride,
        first_row, first_column, rows, columns, row_stride, column_stride, SIDE, SIDE,
    )  # fmt: skip
    scaled = _clamp(value * tl.load(factors + expert), TOP)
    code = round_to_byte(scaled, MANTISSA, BIAS)
    row = first_row + tl.arange(0, SIDE)
    column = first_column + tl.arange(0, SIDE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    start = expert * rows * columns
    tl.store(codes + start + row[:, None] * columns + column[None, :], code, inside)
    turned_inside = (column < columns)[:, None] & (row < rows)[None, :]
    place = start + column[:, None] * rows + row[None, :]
    tl.store(turned_codes + place, tl.trans(code), turned_inside)


@triton.jit
def _largest_of_rows(
    x, out, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        place = row[:, None] * row_stride + column[None, :] * column_stride
        largest = tl.maximum(largest, tl.abs(tl.load(x + place, inside, 0.0).to(tl.float32)))
    tl.store(out + row, tl.max(largest, 1), row < rows)


@triton.jit
def _cast_rows(
    x, codes, factors, rows, columns, row_stride, column_stride, row_factor, column_factor,
    TOP: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Convert a tile by the factor of each row, or of each column."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * row_stride + column[None, :] * column_stride
    value = tl.load(x + place, inside, 0.0).to(tl.float32)
    factor_place = row[:, None] * row_factor + column[None, :] * column_factor
    scaled = _clamp(value * tl.load(factors + factor_place, inside, 0.0), TOP)
    code = round_to_byte(scaled, MANTISSA, BIAS)
    tl.store(codes + row[:, None] * columns + column[None, :], code, inside)


def convert(
    x_RK: torch.Tensor,
    operand: OperandFormat,
    groups: Groups = ONE_GROUP,
    generator: torch.Generator | None = None,
) -> NarrowTensor:
    """Compute KernelSet.convert."""
    if not x_RK.numel():
        return low_precision.convert(x_RK, operand, groups, generator)
    if operand.block:
        return _convert_by_blocks(x_RK, operand, groups, generator)
    scales = low_precision.find_group_scales(_largest_of_groups(x_RK, groups), operand)
    return cast_groups(x_RK, operand, groups, scales)


def cast_groups(
    x_RK: torch.Tensor, operand: OperandFormat, groups: Groups, scales: torch.Tensor
) -> NarrowTensor:
    """Convert numbers [R,K] by given scales [G] of groups; see low_precision.cast_groups."""
    rows, columns = x_RK.shape
    codes = x_RK.new_empty(rows, columns, dtype=torch.uint8)
    factors = groups.spread(scales, x_RK)
    mantissa, bias = SHAPES[operand.number]
    tile_rows = _TILE_NUMEL // _TILE_COLUMNS
    _cast_rows[triton.cdiv(rows, tile_rows), triton.cdiv(columns, _TILE_COLUMNS)](
        x_RK,
        codes,
        factors,
        rows,
        columns,
        *x_RK.stride(),
        *broadcast_strides(factors),
        TOP=operand.number.largest,
        MANTISSA=mantissa,
        BIAS=bias,
        ROWS=tile_rows,
        COLUMNS=_TILE_COLUMNS,
    )
    return NarrowTensor(
        codes=codes.view(CODES[operand.number]),
        scales=None,
        group_scales=1.0 / scales,
        groups=groups,
        operand=operand,
        columns=columns,
        decode=widen,
    )


def convert_weight(w: torch.Tensor, operand: OperandFormat) -> NarrowWeight:
    """Compute KernelSet.convert_weight: a weight is read once for both copies."""
    if not w.numel():
        return low_precision.convert_weight(w, operand)
    w_ENK = w[None] if w.dim() == 2 else w
    if not operand.block:
        return _cast_both_ways(w, w_ENK, operand)
    return _convert_both_ways(w, w_ENK, operand)


def _cast_both_ways(w: torch.Tensor, w_ENK: torch.Tensor, operand: OperandFormat) -> NarrowWeight:
    """Convert with one scale for each expert."""
    scales = low_precision.find_group_scales(_largest_of_experts(w_ENK), operand)
    forward, turned = (_allocate_copy(part, operand, 1.0 / scales) for part in (w, w.mT))
    mantissa, bias = SHAPES[operand.number]
    _cast_weight[_count_squares(w_ENK, _SIDE)](
        w_ENK,
        forward.codes.view(torch.uint8),
        turned.codes.view(torch.uint8),
        scales,
        *w_ENK.shape[1:],
        *w_ENK.stride(),
        TOP=operand.number.largest,
        MANTISSA=mantissa,
        BIAS=bias,
        SIDE=_SIDE,
    )
    return NarrowWeight(forward=forward, transposed=turned)


def _convert_both_ways(
    w: torch.Tensor, w_ENK: torch.Tensor, operand: OperandFormat
) -> NarrowWeight:
    """Convert with a scale for each block."""
    spread = torch.ones(1, device=w.device)
    group_scales: list[torch.Tensor | None] = [None, None]
    if operand.scale is ScaleFormat.E4M3:
        spread = low_precision.find_nvfp4_scales(_largest_of_experts(w_ENK))
        group_scales = [spread, spread.clone()]
    forward, turned = (
        _allocate_copy(part, operand, scales)
        for part, scales in zip((w, w.mT), group_scales, strict=True)
    )
    assert forward.scales is not None
    assert turned.scales is not None
    number, scale_dtype, _ = SCALES[operand.scale]
    mantissa, bias = SHAPES[operand.number]
    side = max(_SIDE, operand.block)
    _convert_weight[_count_squares(w_ENK, side)](
        w_ENK,
        forward.codes.view(torch.uint8),
        forward.scales.view(scale_dtype),
        turned.codes.view(torch.uint8),
        turned.scales.view(scale_dtype),
        spread,
        *w_ENK.shape[1:],
        len(forward.codes) // len(w_ENK),
        len(turned.codes) // len(w_ENK),
        *w_ENK.stride(),
        int(group_scales[0] is not None),
        TOP=operand.number.largest,
        MANTISSA=mantissa,
        BIAS=bias,
        SCALE=number,
        BLOCK=operand.block,
        TILED=operand.is_tiled,
        PACKED=operand.number is NarrowFormat.E2M1,
        TILES=forward.in_tiles,
        SIDE=side,
    )
    return NarrowWeight(forward=forward, transposed=turned)


def _count_squares(w_ENK: torch.Tensor, side: int) -> tuple[int, int, int]:
    experts, rows, columns = w_ENK.shape
    return triton.cdiv(rows, side), triton.cdiv(columns, side), experts


def _allocate_copy(
    w: torch.Tensor, operand: OperandFormat, group_scales: torch.Tensor | None
) -> NarrowTensor:
    """Make room for a weight [N,K] or [E,N,K] along its columns, as rows."""
    rows, groups = low_precision.place_experts(w, operand)
    columns = w.shape[-1]
    is_packed = operand.number is NarrowFormat.E2M1
    width = triton.cdiv(columns, 2) if is_packed else columns
    dtype = torch.uint8 if is_packed else CODES[operand.number]
    scales = None
    if operand.block:
        _, _, scale_type = SCALES[operand.scale]
        scales = w.new_empty(rows, triton.cdiv(columns, operand.block), dtype=scale_type)
    return NarrowTensor(
        codes=w.new_empty(rows, width, dtype=dtype),
        scales=scales,
        group_scales=group_scales,
        groups=groups,
        operand=operand,
        columns=columns,
        decode=widen,
        in_tiles=reads_tiles(operand, w.shape, w.device),
    )


def _largest_of_experts(w_ENK: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each expert [E]."""
    return _largest_of_lines(w_ENK.flatten(0, 1)).view(len(w_ENK), -1).amax(1)


def _largest_of_groups(x_RK: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return the largest magnitude of each group [G], by those of its rows or columns."""
    return groups.largest_of_lines(_largest_of_lines(x_RK.mT if groups.of_columns else x_RK))


def _largest_of_lines(lines_RK: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each row [R]."""
    rows, columns = lines_RK.shape
    largest = lines_RK.new_empty(rows, dtype=torch.float32)
    tile_rows = _TILE_NUMEL // _TILE_COLUMNS
    _largest_of_rows[(triton.cdiv(rows, tile_rows),)](
        lines_RK,
        largest,
        rows,
        columns,
        *lines_RK.stride(),
        ROWS=tile_rows,
        COLUMNS=_TILE_COLUMNS,
    )
    return largest


def _convert_by_blocks(
    x_RK: torch.Tensor,
    operand: OperandFormat,
    groups: Groups,
    generator: torch.Generator | None,
) -> NarrowTensor:
    """Convert with a scale for each block of columns."""
    rows, columns = x_RK.shape
    block = operand.block
    is_packed = operand.number is NarrowFormat.E2M1
    group_scales = None
    spread = torch.ones(1, 1, device=x_RK.device)
    if operand.scale is ScaleFormat.E4M3:
        group_scales = low_precision.find_nvfp4_scales(_largest_of_groups(x_RK, groups))
        spread = groups.spread(group_scales, x_RK)
        if spread.shape[1] > 1:
            spread = spread[:, ::block]
    draws = None
    if operand.rounds_at_random and generator is not None:
        draws = torch.rand(x_RK.shape, generator=generator, device=x_RK.device)
    number, scale_dtype, scale_type = SCALES[operand.scale]
    scales = x_RK.new_empty(rows, triton.cdiv(columns, block), dtype=scale_dtype)
    codes = x_RK.new_empty(
        rows, triton.cdiv(columns, 2) if is_packed else columns, dtype=torch.uint8
    )
    # Rows of experts begin tiles of their own, at rows that the host does not know.
    in_tiles = groups.ends is None and reads_tiles(operand, x_RK.shape, x_RK.device)
    mantissa, bias = SHAPES[operand.number]
    tile_rows = block if operand.is_tiled else _TILE_NUMEL // _TILE_COLUMNS
    _convert_blocks[triton.cdiv(rows, tile_rows), triton.cdiv(columns, _TILE_COLUMNS)](
        x_RK,
        codes,
        scales,
        spread,
        scales if draws is None else draws,
        rows,
        columns,
        *x_RK.stride(),
        *broadcast_strides(spread),
        TOP=operand.number.largest,
        MANTISSA=mantissa,
        BIAS=bias,
        SCALE=number,
        BLOCK=block,
        TILED=operand.is_tiled,
        PACKED=is_packed,
        RANDOM=draws is not None,
        TILES=in_tiles,
        ROWS=tile_rows,
        COLUMNS=_TILE_COLUMNS,
    )
    return NarrowTensor(
        codes=codes if is_packed else codes.view(CODES[operand.number]),
        scales=scales.view(scale_type),
        group_scales=group_scales,
        groups=groups,
        operand=operand,
        columns=columns,
        decode=widen,
        in_tiles=in_tiles,
    )
