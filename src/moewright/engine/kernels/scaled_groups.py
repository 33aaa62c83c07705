"""Products of converted operands by experts, by torch's scaled grouped products.

Rows of experts lie one after another, and the host does not know how many each has. torch has two
forms (`F.scaled_grouped_mm`): [R,K] x [E,K,N] -> [R,N], and [N,R] x [R,K] -> [E,N,K], a weight
gradient. Both operands are E4M3 or both E2M1, the result is bf16. By rows (9.x) a scale is that of
a row's expert; MXFP8 and NVFP4 (10.0) take scales in tiles of 128 rows and 4 blocks, those of each
expert in tiles of its own. There is none for blocks of 128 on 9.x, nor for E5M2.

A weight gradient contracts the rows that fill an expert's last tile too: they are zeros. By rows a
tile is 16 of them. An expert without rows gets one, as torch leaves the result of an empty group
unwritten.

Shapes: R rows, K contracted, N rows of the second operand, E experts; in a weight gradient N out
and K in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from moewright.engine.kernels.columns import NarrowInput
from moewright.engine.kernels.low_precision import (
    GroupPadding,
    NarrowTensor,
    group_numbers,
    pad_groups,
)
from moewright.engine.kernels.matmul import grouped_matmul
from moewright.engine.kernels.operations import OperationWork, define_operation
from moewright.engine.kernels.scale_tiles import TILE_BLOCKS, TILE_ROWS, tile_scales
from moewright.engine.kernels.scaled_products import (
    LINES,
    MX_BLOCK,
    ScaledProduct,
    block_scales,
    codes_of,
    has_product,
    recipes_of,
    swizzles_of,
)
from moewright.rules.low_precision import NarrowFormat, OperandFormat, ScaleFormat
from moewright.spec.ledger import FlopOp


def multiply_groups(
    x_RK: NarrowTensor, w: NarrowTensor, shape: torch.Size, ends: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return x w^T [R,N] of the rows of experts, which end at `ends` [E].

    `w` holds the weights of `shape` [E,N,K] as rows, with as many more after each expert's as
    fill its last tile.
    """
    experts, rows, _ = shape
    product = find_group_product(x_RK, w, shape, dtype)
    if product is None:
        wide = w.widen(dtype).unflatten(0, (experts, -1))[:, :rows]
        return grouped_matmul(x_RK.widen(dtype), wide.mT, ends)
    # Without the rows that fill tiles, which the product does not expect.
    weights = codes_of(w).unflatten(0, (experts, -1))[:, :rows].contiguous()
    scales = _scales_of_rows(product, x_RK, ends), _scales_of_weights(product, w, experts, rows)
    return _multiply(product, (codes_of(x_RK), weights.mT), scales, ends)


def _multiply(
    product: ScaledProduct,
    codes: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    ends: torch.Tensor,
) -> torch.Tensor:
    recipes = recipes_of(product)
    swizzles = swizzles_of(product)
    return F.scaled_grouped_mm(  # type: ignore[attr-defined]
        codes[0],
        codes[1],
        list(scales[0]),
        recipes,
        list(scales[1]),
        recipes,
        swizzles,
        swizzles,
        offs=ends,
        output_dtype=torch.bfloat16,
    )


def find_group_product(
    x: NarrowTensor, w: NarrowTensor, shape: torch.Size, dtype: torch.dtype
) -> ScaledProduct | None:
    """Return torch's product of rows with the weights of their experts; None where it has none.

    `shape` [E,N,K] is that of the weights. N comes in sixteens, K too or in whole blocks of 32.
    """
    product = _find_kind(x.operand, w.operand, x.codes.device, dtype)
    if product is None or not len(x.codes):
        return None
    unit = LINES if product is ScaledProduct.EXPERT_ROWS else MX_BLOCK
    if shape[1] % LINES or shape[2] % unit:
        return None
    return product


def _find_kind(
    a: OperandFormat, b: OperandFormat, device: torch.device, dtype: torch.dtype
) -> ScaledProduct | None:
    """Return the grouped product of two formats that a device has."""
    kinds = {
        (NarrowFormat.E4M3, False): ScaledProduct.EXPERT_ROWS,
        (NarrowFormat.E4M3, True): ScaledProduct.EXPERT_MXFP8,
        (NarrowFormat.E2M1, True): ScaledProduct.EXPERT_NVFP4,
    }
    product = kinds.get((a.number, a.block > 0))
    is_alike = (a.number, a.scale, a.block) == (b.number, b.scale, b.block)
    if product is None or not is_alike or dtype is not torch.bfloat16:
        return None
    if has_product(product, device):
        return product
    return None


def _scales_of_rows(
    product: ScaledProduct, x: NarrowTensor, ends: torch.Tensor
) -> list[torch.Tensor]:
    """Return the scales of rows: each row's, or tiles that begin anew with each expert."""
    if product is ScaledProduct.EXPERT_ROWS:
        return [_row_scales(x)]
    scales = block_scales(x)
    padding = pad_groups(ends, len(scales), TILE_ROWS)
    tiles = tile_scales(padding.pad(scales.view(torch.uint8)))
    return _with_group_scales(x, tiles.view(scales.dtype).view(padding.rows, -1))


def _scales_of_weights(
    product: ScaledProduct, w: NarrowTensor, experts: int, rows: int
) -> list[torch.Tensor]:
    """Return the scales of weights, a line for each expert."""
    if product is ScaledProduct.EXPERT_ROWS:
        return [_row_scales(w).view(experts, rows)]
    if w.in_tiles:
        assert w.scales is not None
        return _with_group_scales(w, w.scales.view(experts, -1))
    scales = block_scales(w)
    by_expert = scales.view(torch.uint8).unflatten(0, (experts, -1))[:, :rows]
    padded = F.pad(by_expert, (0, 0, 0, -rows % TILE_ROWS)).flatten(0, 1)
    tiles = tile_scales(padded).view(scales.dtype)
    return _with_group_scales(w, tiles.view(experts, -1))


def _row_scales(narrow: NarrowTensor) -> torch.Tensor:
    """Return the scale of each row [R], that of its group."""
    assert narrow.group_scales is not None
    return narrow.groups.spread(narrow.group_scales, narrow.codes)[:, 0]


def _with_group_scales(narrow: NarrowTensor, tiles: torch.Tensor) -> list[torch.Tensor]:
    if narrow.group_scales is None:
        return [tiles]
    return [tiles, narrow.group_scales]


def find_gradient_product(
    g: OperandFormat, x: OperandFormat, width: int, x_RK: torch.Tensor | NarrowInput
) -> ScaledProduct | None:
    """Return torch's product for the weight gradients of experts, of formats along their rows.

    Gradients have `width` columns.
    """
    product = _find_kind(g, x, x_RK.device, x_RK.dtype)
    is_ragged = width % LINES or x_RK.shape[1] % LINES
    return None if is_ragged else product


def pad_to_tiles(ends: torch.Tensor, rows: int, operand: OperandFormat) -> GroupPadding:
    """Plan the padding of the rows of a weight gradient to whole tiles of scales, one at least."""
    if not operand.block:
        return pad_groups(ends, rows, LINES, least=LINES)
    is_fours = operand.scale is ScaleFormat.POWER_OF_TWO
    tile = operand.block if is_fours else TILE_BLOCKS * operand.block
    return pad_groups(ends, rows, tile, least=tile)


def contract_rows(
    g_RN: NarrowTensor, x_RK: NarrowTensor, ends: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return g^T x [E,N,K] of the rows of experts, which have a scale for each expert."""
    kept = NarrowInput(dtype=dtype, rows=x_RK)
    product = find_gradient_product(g_RN.operand, x_RK.operand, g_RN.columns, kept)
    if product is None:
        return grouped_matmul(g_RN.widen(dtype).T, x_RK.widen(dtype), ends)
    padding = pad_to_tiles(ends, len(kept), x_RK.operand)
    g, x = (_pad_codes(narrow.codes, padding).T.contiguous() for narrow in (g_RN, x_RK))
    g_scales, x_scales = (_column_scales(narrow) for narrow in (g_RN, x_RK))
    return SCALED_WEIGHT_GRAD(g, x, [g_scales], [x_scales], padding.ends, len(kept))


def _pad_codes(codes: torch.Tensor, padding: GroupPadding) -> torch.Tensor:
    # torch copies rows of bytes, but none of 8-bit floats, on a CPU. A byte of 0 is a zero.
    return padding.pad(codes.view(torch.uint8)).view(codes.dtype)


def _column_scales(narrow: NarrowTensor) -> torch.Tensor:
    """Return the scale of each column, for all columns of an expert, then those of the next."""
    assert narrow.group_scales is not None
    return narrow.group_scales.repeat_interleave(narrow.columns)


def contract_groups(
    product: ScaledProduct, g: NarrowTensor, x: NarrowTensor, rows: int
) -> torch.Tensor:
    """Return g x^T [E,N,K] over the columns of experts, which end at whole tiles.

    `rows` of the columns are rows of experts, the others zeros that fill tiles.
    """
    ends = x.groups.ends
    assert ends is not None
    block = MX_BLOCK if product is ScaledProduct.EXPERT_MXFP8 else x.operand.block
    tile_ends = ends // (TILE_BLOCKS * block)
    g_scales, x_scales = (_scales_of_columns(narrow, tile_ends) for narrow in (g, x))
    return SCALED_WEIGHT_GRAD(g.codes, x.codes, g_scales, x_scales, ends, rows)


def _scales_of_columns(narrow: NarrowTensor, tile_ends: torch.Tensor) -> list[torch.Tensor]:
    """Return the scales of columns: tiles of all rows of an expert, then those of the next.

    `tile_ends` [E] are the ends of the experts among the tiles of a row.
    """
    scales = block_scales(narrow)
    down = -(-scales.shape[0] // TILE_ROWS)
    tiles = tile_scales(scales).view(torch.uint8).view(down, -1, TILE_ROWS * TILE_BLOCKS)
    along = tiles.shape[1]
    columns = torch.arange(along, device=tiles.device)
    edges = torch.cat((tile_ends.new_zeros(1), tile_ends, tile_ends.new_full((1,), along))).long()
    groups = group_numbers(tile_ends, along)
    starts = edges[groups]
    widths = edges.diff()[groups]
    # Where the tile of each row and column goes.
    lines = torch.arange(down, device=tiles.device)[:, None]
    # All tiles of the experts before, the lines above in this one, then those before in the line.
    places = down * starts + lines * widths + columns - starts
    ordered = torch.empty_like(tiles).view(down * along, -1)
    ordered.index_copy_(0, places.flatten(), tiles.flatten(0, 1))
    return _with_group_scales(narrow, ordered.view(down * TILE_ROWS, -1).view(scales.dtype))


def _scaled_weight_grad(
    g_NR: torch.Tensor,
    x_KR: torch.Tensor,
    g_scales: Sequence[torch.Tensor],
    x_scales: Sequence[torch.Tensor],
    ends: torch.Tensor,
    rows: int,
) -> torch.Tensor:
    """Contract codes over the columns of each expert."""
    is_packed = len(g_scales) > 1
    if is_packed:
        product = ScaledProduct.EXPERT_NVFP4
    elif g_scales[0].dtype is torch.float32:
        product = ScaledProduct.EXPERT_ROWS
    else:
        product = ScaledProduct.EXPERT_MXFP8
    g_NR, x_KR = g_NR.contiguous(), x_KR.contiguous()
    if is_packed:
        g_NR, x_KR = (codes.view(torch.float4_e2m1fn_x2) for codes in (g_NR, x_KR))
    return _multiply(product, (g_NR, x_KR.T), (g_scales, x_scales), ends)


# An operation of its own, so that the FLOP counter sees the real rows, not those that fill tiles.
SCALED_WEIGHT_GRAD = define_operation(
    "scaled_weight_grad(Tensor g, Tensor x, Tensor[] g_scales, Tensor[] x_scales, Tensor ends, "
    "int rows) -> Tensor",
    _scaled_weight_grad,
    lambda g, x, g_scales, x_scales, ends, rows: g.new_empty(
        (len(ends), len(g), len(x)), dtype=torch.bfloat16
    ),
    OperationWork(
        op=FlopOp.GROUPED_GEMM,
        count=lambda g, x, g_scales, x_scales, ends, rows: 2 * int(rows) * len(g) * len(x),
    ),
)
