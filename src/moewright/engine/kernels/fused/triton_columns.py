"""Triton kernels of backward's conversions: a gradient, or a kept input, is read once.

What a weight gradient contracts is converted along the rows of a tensor, where the rows of experts
are spread over whole blocks on the way. A gradient is written along its columns too, for the
product beside it, where scales are powers of two; an input that was kept in 8 bits with such scales
is read so. The bits are those of kernels.columns and
kernels.low_precision.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from moewright.engine.kernels import columns, low_precision
from moewright.engine.kernels.columns import ColumnForm, NarrowGradient, NarrowInput
from moewright.engine.kernels.fused import triton_convert
from moewright.engine.kernels.fused.triton_convert import (
    encode_rows,
    encode_scales,
    round_to_byte,
    scale_blocks,
)
from moewright.engine.kernels.fused.triton_widen import (
    CODES,
    ROUNDS,
    SCALES,
    SHAPES,
    decode_scales,
    number_of_code,
    place_scales,
    round_to_bf16,
    widen,
)
from moewright.engine.kernels.low_precision import ONE_GROUP, NarrowTensor
from moewright.engine.kernels.scaled_products import reads_tiles
from moewright.rules.low_precision import NarrowFormat, OperandFormat, ScaleFormat

_SIDE = 64  # of a square tile; blocks of 128 take one of theirs


@triton.jit
def _round_along_columns(
    value, TOP: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, TO_BF16: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Return numbers [SIDE, SIDE] as they are when they were kept in blocks of columns."""
    value = value.reshape(SIDE, SIDE // BLOCK, BLOCK)
    largest = tl.max(tl.abs(value), 2)
    unit = tl.full(largest.shape, 1.0, tl.float32)
    _, decoded = encode_scales(largest, unit, TOP, SCALE)
    code = round_to_byte(scale_blocks(value, decoded, TOP, SIDE, SIDE), MANTISSA, BIAS)
    return _decode_blocks(code, decoded, MANTISSA, BIAS, BLOCK, TO_BF16, SIDE)


@triton.jit
def _decode_blocks(
    code, decoded, MANTISSA: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    TO_BF16: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Return the numbers of codes [SIDE, SIDE] times the scales of their blocks."""
    number = number_of_code(code.to(tl.int32), MANTISSA, BIAS).reshape(SIDE, SIDE // BLOCK, BLOCK)
    number = (number * decoded[:, :, None]).reshape(SIDE, SIDE)
    if TO_BF16:
        number = (round_to_bf16(number) << 16).to(tl.float32, bitcast=True)
    return number


@triton.jit
def _add_pairs(lines, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Return sums and differences of numbers of lines [COUNT, 16] that lie WIDTH apart."""
    pairs = lines.reshape(COUNT, 8 // WIDTH, 2, WIDTH)
    low, high = tl.split(pairs.permute(0, 1, 3, 2))
    return tl.join(low + high, low - high).permute(0, 1, 3, 2).reshape(COUNT, 16)


@triton.jit
def _rotate(value, SIGNS: tl.constexpr, LINES: tl.constexpr):
    """Rotate each sixteen numbers of lines [LINES, n] by a Hadamard matrix with signs.

    Bit i of SIGNS is set where the sign of number i is negative.
    """
    count: tl.constexpr = value.numel // 16
    is_negative = (SIGNS >> tl.arange(0, 16)) & 1
    out = value.reshape(count, 16)
    out = tl.where(is_negative[None, :] > 0, -1.0 * out, out)
    for power in tl.static_range(4):
        out = _add_pairs(out, count, 1 << power)
    return (out * 0.25).reshape(LINES, value.numel // LINES)


@triton.jit
def find_rows(sources, place, rows, padded_rows, IS_SPREAD: tl.constexpr):
    """Return the rows that lie at places; -1 for zeros."""
    if IS_SPREAD:
        row = tl.load(sources + place, place < padded_rows, -1).to(tl.int64)
    else:
        row = tl.where(place < rows, place, -1)
    return row


@triton.jit
def _load_places(
    x, sources, first_place, first_column, rows, columns, padded_rows, row_stride, column_stride,
    IS_SPREAD: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Return a square tile in fp32 of the tensor with its rows at their places, and these rows."""
    place = first_place + tl.arange(0, SIDE)
    column = first_column + tl.arange(0, SIDE)
    row = find_rows(sources, place, rows, padded_rows, IS_SPREAD)
    inside = (row >= 0)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None] * row_stride + column[None, :] * column_stride, inside, 0.0)
    return value.to(tl.float32), row


@triton.jit
def _largest_of_places(
    x, sources, out, rows, columns, padded_rows, row_stride, column_stride,
    SIGNS: tl.constexpr, IS_SPREAD: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Return the largest magnitude of each sixteen places, in a tile of columns, when rotated."""
    first_place = tl.program_id(0).to(tl.int64) * SIDE
    first_column = tl.program_id(1).to(tl.int64) * SIDE
    value, _ = _load_places(
        x, sources, first_place, first_column, rows, columns, padded_rows,
        row_stride, column_stride, IS_SPREAD, SIDE,
    )  # fmt: skip
    value = tl.abs(_rotate(tl.trans(value), SIGNS, SIDE))
    largest = tl.max(tl.max(value.reshape(SIDE, SIDE // 16, 16), 2), 0)
    sixteen = first_place // 16 + tl.arange(0, SIDE // 16)
    count = padded_rows // 16
    tl.store(out + tl.program_id(1) * count + sixteen, largest, sixteen < count)


@triton.jit
def _convert_columns(
    x, sources, codes, scales, row_codes, row_scales, spread, block_spread, draws,
    rows, columns, padded_rows, row_stride, column_stride,
    TOP: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, IS_SPREAD: tl.constexpr, ROUNDS: tl.constexpr, TO_BF16: tl.constexpr,
    BOTH: tl.constexpr, SIGNS: tl.constexpr, PACKED: tl.constexpr, RANDOM: tl.constexpr,
    TILES: tl.constexpr, ROW_TILES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Convert a square tile along its rows; of the tensor with its rows at their places.

    With BOTH it is written along its columns too, each row where it came from. `spread` has the
    scale of the group of each block of places; with SIGNS they are rotated (0: none).
    """
    first_place = tl.program_id(0).to(tl.int64) * SIDE
    first_column = tl.program_id(1).to(tl.int64) * SIDE
    column = first_column + tl.arange(0, SIDE)
    value, row = _load_places(
        x, sources, first_place, first_column, rows, columns, padded_rows,
        row_stride, column_stride, IS_SPREAD, SIDE,
    )  # fmt: skip
    has_row = row >= 0
    if BOTH:
        encode_rows(
            value, row_codes, row_scales, spread, spread,
            row, has_row, first_column, columns, 0, 0,
            TOP, MANTISSA, BIAS, SCALE, BLOCK, False, False, False, ROW_TILES, SIDE, SIDE,
        )  # fmt: skip
    if ROUNDS:
        value = _round_along_columns(value, TOP, MANTISSA, BIAS, SCALE, BLOCK, TO_BF16, SIDE)
    value = tl.trans(value)
    if SIGNS:
        value = _rotate(value, SIGNS, SIDE)
    encode_rows(
        value, codes, scales, spread, draws,
        column, column < columns, first_place, padded_rows, 0, block_spread,
        TOP, MANTISSA, BIAS, SCALE, BLOCK, False, PACKED, RANDOM, TILES, SIDE, SIDE,
    )  # fmt: skip


@triton.jit
def _turn_codes(
    kept, kept_scales, sources, codes, scales, unit, rows, columns, padded_rows,
    TOP: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, IS_SPREAD: tl.constexpr, TO_BF16: tl.constexpr, KEPT_TILES: tl.constexpr,
    TILES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Convert a square tile of what was kept along its columns along its rows, at their places."""
    first_place = tl.program_id(0).to(tl.int64) * SIDE
    first_column = tl.program_id(1).to(tl.int64) * SIDE
    place = first_place + tl.arange(0, SIDE)
    column = first_column + tl.arange(0, SIDE)
    row = find_rows(sources, place, rows, padded_rows, IS_SPREAD)
    has_row = row >= 0
    inside = has_row[:, None] & (column < columns)[None, :]
    code = tl.load(kept + row[:, None] * columns + column[None, :], inside, 0)
    block = first_column // BLOCK + tl.arange(0, SIDE // BLOCK)
    row_blocks = tl.cdiv(columns, BLOCK)
    is_block = has_row[:, None] & (block < row_blocks)[None, :]
    kept_place = place_scales(row, block, row_blocks, KEPT_TILES)
    scale = tl.load(kept_scales + kept_place, is_block, 0)
    decoded = decode_scales(scale, SCALE)
    value = tl.trans(_decode_blocks(code, decoded, MANTISSA, BIAS, BLOCK, TO_BF16, SIDE))
    encode_rows(
        value, codes, scales, unit, unit,
        column, column < columns, first_place, padded_rows, 0, 0,
        TOP, MANTISSA, BIAS, SCALE, BLOCK, False, False, False, TILES, SIDE, SIDE,
    )  # fmt: skip


def convert_columns(
    x_RK: torch.Tensor | NarrowInput, form: ColumnForm, generator: torch.Generator | None = None
) -> NarrowTensor:
    """Compute KernelSet.convert_columns."""
    operand = form.operand
    if isinstance(x_RK, NarrowInput):
        is_alike = x_RK.rows.operand == operand and x_RK.dtype in ROUNDS
        if is_alike and _has_powers(operand) and not operand.is_tiled and x_RK.rows.codes.numel():
            return _turn(x_RK, form)
        x_RK = x_RK.widen()
    if not operand.block or not x_RK.numel() or form.kept not in (None, operand):
        return columns.convert_columns(x_RK, form, generator, triton_convert.convert)
    if x_RK.dtype not in ROUNDS:
        return columns.convert_columns(x_RK, form, generator, triton_convert.convert)
    places = form.padded_rows(len(x_RK))
    group_scales, spread = None, torch.ones(1, device=x_RK.device)
    if operand.scale is ScaleFormat.E4M3:
        group_scales = low_precision.find_nvfp4_scales(_largest_of_groups(x_RK, form))
        lines = x_RK.new_empty(1, places)
        spread = form.groups.spread(group_scales, lines).flatten()
        spread = spread[:: operand.block] if len(spread) > 1 else spread
    narrow = _allocate(x_RK.mT, form, places)
    narrow = replace(narrow, groups=form.groups, group_scales=group_scales)
    draws = spread
    is_random = operand.rounds_at_random and generator is not None
    if is_random:
        shape = x_RK.shape[1], places
        draws = torch.rand(shape, generator=generator, device=x_RK.device)
    _launch(x_RK, form, narrow, None, spread, draws if is_random else None)
    return narrow


def _has_powers(operand: OperandFormat) -> bool:
    return operand.scale in (ScaleFormat.POWER_OF_TWO, ScaleFormat.E8M0)


def _turn(x_RK: NarrowInput, form: ColumnForm) -> NarrowTensor:
    """Convert what was kept of an input along its rows."""
    operand = form.operand
    kept = x_RK.rows
    places = form.padded_rows(len(x_RK))
    number, scale_dtype, _ = SCALES[operand.scale]
    mantissa, bias = SHAPES[operand.number]
    side = max(_SIDE, operand.block)
    narrow = replace(_allocate(kept.codes.mT, form, places), groups=form.groups)
    assert kept.scales is not None
    assert narrow.scales is not None
    _turn_codes[triton.cdiv(places, side), triton.cdiv(kept.columns, side)](
        kept.codes.contiguous().view(torch.uint8),
        kept.scales.contiguous().view(scale_dtype),
        kept.codes if form.padding is None else form.padding.sources,
        narrow.codes.view(torch.uint8),
        narrow.scales.view(scale_dtype),
        torch.ones(1, device=kept.codes.device),
        *x_RK.shape,
        places,
        TOP=operand.number.largest,
        MANTISSA=mantissa,
        BIAS=bias,
        SCALE=number,
        BLOCK=operand.block,
        IS_SPREAD=form.padding is not None,
        TO_BF16=ROUNDS[x_RK.dtype],
        KEPT_TILES=kept.in_tiles,
        TILES=narrow.in_tiles,
        SIDE=side,
    )
    return narrow


def _largest_of_groups(x_RK: torch.Tensor, form: ColumnForm) -> torch.Tensor:
    """Return the largest magnitude of each group of places [G], when they are rotated."""
    places = form.padded_rows(len(x_RK))
    tiles = triton.cdiv(places, _SIDE), triton.cdiv(x_RK.shape[1], _SIDE)
    largest = x_RK.new_empty(tiles[1], places // form.hadamard_rows, dtype=torch.float32)
    _largest_of_places[tiles](
        x_RK,
        _sources(x_RK, form),
        largest,
        *x_RK.shape,
        places,
        *x_RK.stride(),
        SIGNS=low_precision.HADAMARD_BITS,
        IS_SPREAD=form.padding is not None,
        SIDE=_SIDE,
    )
    lines = largest.amax(0).repeat_interleave(form.hadamard_rows)
    return form.groups.largest_of_lines(lines)


def convert_gradient(g_RN: torch.Tensor, form: ColumnForm) -> NarrowGradient | None:
    """Compute KernelSet.convert_gradient."""
    operand = form.operand
    if not _has_powers(operand) or not g_RN.numel() or g_RN.dtype not in ROUNDS:
        return None
    rows = _allocate(g_RN, form, g_RN.shape[1])
    narrow = _allocate(g_RN.mT, form, form.padded_rows(len(g_RN)))
    narrow = replace(narrow, groups=form.groups)
    _launch(g_RN, form, narrow, rows, torch.ones(1, device=g_RN.device), None)
    return NarrowGradient(dtype=g_RN.dtype, rows=rows, columns=narrow, padding=form.padding)


def _allocate(x: torch.Tensor, form: ColumnForm, width: int) -> NarrowTensor:
    """Make room for a tensor that is converted along columns, as many as `width`."""
    operand = form.operand
    _, _, scale_type = SCALES[operand.scale]
    is_packed = operand.number is NarrowFormat.E2M1
    lines = len(x)
    return NarrowTensor(
        codes=x.new_empty(
            lines,
            triton.cdiv(width, 2) if is_packed else width,
            dtype=torch.uint8 if is_packed else CODES[operand.number],
        ),
        scales=x.new_empty(lines, triton.cdiv(width, operand.block), dtype=scale_type),
        group_scales=None,
        groups=ONE_GROUP,
        operand=operand,
        columns=width,
        decode=widen,
        in_tiles=form.padding is None
        and reads_tiles(operand, torch.Size((lines, width)), x.device),
    )


def _sources(x_RK: torch.Tensor, form: ColumnForm) -> torch.Tensor:
    """Return the rows at the places; anything where they are the same."""
    return x_RK if form.padding is None else form.padding.sources


def _launch(
    x_RK: torch.Tensor,
    form: ColumnForm,
    narrow: NarrowTensor,
    rows: NarrowTensor | None,
    spread: torch.Tensor,
    draws: torch.Tensor | None,
) -> None:
    """Write `narrow` along the rows and, where they are wanted, `rows` along the columns."""
    operand = form.operand
    number, scale_dtype, _ = SCALES[operand.scale]
    mantissa, bias = SHAPES[operand.number]
    side = max(_SIDE, operand.block)
    by_rows = narrow if rows is None else rows
    assert narrow.scales is not None
    assert by_rows.scales is not None
    _convert_columns[triton.cdiv(narrow.columns, side), triton.cdiv(x_RK.shape[1], side)](
        x_RK,
        _sources(x_RK, form),
        narrow.codes.view(torch.uint8),
        narrow.scales.view(scale_dtype),
        by_rows.codes.view(torch.uint8),
        by_rows.scales.view(scale_dtype),
        spread,
        spread.stride(0) if len(spread) > 1 else 0,
        spread if draws is None else draws,
        *x_RK.shape,
        narrow.columns,
        *x_RK.stride(),
        TOP=operand.number.largest,
        MANTISSA=mantissa,
        BIAS=bias,
        SCALE=number,
        BLOCK=operand.block,
        IS_SPREAD=form.padding is not None,
        ROUNDS=form.kept is not None,
        TO_BF16=ROUNDS[x_RK.dtype],
        BOTH=rows is not None,
        SIGNS=low_precision.HADAMARD_BITS if form.hadamard_rows else 0,
        PACKED=operand.number is NarrowFormat.E2M1,
        RANDOM=draws is not None,
        TILES=narrow.in_tiles,
        ROW_TILES=by_rows.in_tiles,
        SIDE=side,
    )
