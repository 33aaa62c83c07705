"""Products of converted operands, by torch's scaled products where a device has them.

Elsewhere the operands are widened and multiplied, which is the same to the rounding of the scaled
numbers to the result's dtype and to the order of the sums. torch offers, on CUDA alone:

- a scale a tensor, dense (8.9 and later; not of two operands in E5M2);
- a scale a row and expert, grouped, both in E4M3 (9.x);
- a scale for 128 numbers or for 128 x 128, dense (9.x, CUDA 12.9);
- MXFP8 and NVFP4, dense (10.x, CUDA 12.8).

The numbers of the contraction and the result's columns come in sixteens, or in whole blocks. What
torch asks for in layouts its own shape functions check (torch/_meta_registrations.py of 2.13).

Shapes: R rows, K contracted, N rows of the second operand, E experts.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

import torch
import torch.nn.functional as F

from moewright.engine.kernels.low_precision import NarrowTensor, decode_scales
from moewright.engine.kernels.matmul import grouped_matmul, matmul
from moewright.rules.low_precision import NarrowFormat, OperandFormat, ScaleFormat

_LINES = 16  # a dimension of an operand in memory is a multiple of so many bytes
# A tile of scales that tensor cores read at once: rows, and blocks of a row.
_TILE_ROWS = 128
_TILE_BLOCKS = 4
_TILE_LANES = 32
_LANE_GROUPS = _TILE_ROWS // _TILE_LANES


class ScaledProduct(StrEnum):
    """The kinds of scaled products that torch has."""

    TENSOR = "tensor"
    EXPERT_ROWS = "expert_rows"
    BLOCKS_128 = "blocks_128"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


def multiply(a_RK: NarrowTensor, b_NK: NarrowTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a b^T [R,N] of operands that are both converted along K."""
    product = find_product(a_RK, b_NK, dtype)
    if product is None:
        return matmul(a_RK.widen(dtype), b_NK.widen(dtype).T)
    return multiply_scaled(product, a_RK, b_NK, dtype)


def multiply_groups(
    x_RK: NarrowTensor, w: NarrowTensor, shape: torch.Size, ends: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return x w^T [R,N] of the rows of experts, which end at `ends` [E].

    `w` holds the weights of `shape` [E,N,K] as rows, with as many more after each expert's as
    fill its last tile.
    """
    experts, rows, columns = shape
    if has_expert_product(x_RK, w, shape, dtype):
        return torch._scaled_grouped_mm(
            x_RK.codes.contiguous(),
            w.codes.contiguous().view(experts, rows, columns).mT,
            _group_scales(x_RK),
            _group_scales(w).view(experts, rows),
            offs=ends,
            out_dtype=dtype,
        )
    wide = w.widen(dtype).unflatten(0, (experts, -1))[:, :rows]
    return grouped_matmul(x_RK.widen(dtype), wide.mT, ends)


def _group_scales(narrow: NarrowTensor) -> torch.Tensor:
    """Return the scale of each row [R], that of its group."""
    assert narrow.group_scales is not None
    return narrow.groups.spread(narrow.group_scales, narrow.codes)[:, 0]


@cache
def products_of_device(
    capability: tuple[int, int], cuda: tuple[int, ...]
) -> frozenset[ScaledProduct]:
    """Return what a GPU of this compute capability has under a version of CUDA."""
    major = capability[0]
    has = {
        ScaledProduct.TENSOR: capability >= (8, 9),
        ScaledProduct.EXPERT_ROWS: major == 9,
        ScaledProduct.BLOCKS_128: major == 9 and cuda >= (12, 9),
        ScaledProduct.MXFP8: major == 10 and cuda >= (12, 8),
        ScaledProduct.NVFP4: major == 10 and cuda >= (12, 8),
    }
    return frozenset(product for product, is_there in has.items() if is_there)


def _products_of(device: torch.device) -> frozenset[ScaledProduct]:
    if device.type != "cuda" or torch.version.cuda is None:
        return frozenset()
    cuda = tuple(int(part) for part in torch.version.cuda.split("."))
    return products_of_device(torch.cuda.get_device_capability(device), cuda)


def find_product(a: NarrowTensor, b: NarrowTensor, dtype: torch.dtype) -> ScaledProduct | None:
    """Return torch's product of two dense operands; None where there is none on their device."""
    product = _kind_of(a.operand)
    if product not in _products_of(a.codes.device) or not fits(product, a, b, dtype):
        return None
    return product


def _kind_of(operand: OperandFormat) -> ScaledProduct:
    if not operand.block:
        return ScaledProduct.TENSOR
    return {
        ScaleFormat.POWER_OF_TWO: ScaledProduct.BLOCKS_128,
        ScaleFormat.E8M0: ScaledProduct.MXFP8,
        ScaleFormat.E4M3: ScaledProduct.NVFP4,
    }[operand.scale]


def fits(product: ScaledProduct, a: NarrowTensor, b: NarrowTensor, dtype: torch.dtype) -> bool:
    """Tell whether the shapes and formats of dense operands are those of torch's product."""
    if a.groups.ends is not None or b.groups.ends is not None or not len(a.codes):
        return False
    is_twice_e5m2 = a.operand.number is b.operand.number is NarrowFormat.E5M2
    is_whole = not (a.codes.shape[1] % _LINES or len(b.codes) % _LINES)
    if a.operand.block:
        is_whole &= not a.columns % a.operand.block and dtype is torch.bfloat16
    if product is ScaledProduct.BLOCKS_128 and b.operand.is_tiled:
        is_whole &= not len(b.codes) % b.operand.block
    return is_whole and not is_twice_e5m2 and not a.operand.is_tiled


def has_expert_product(
    x: NarrowTensor, w: NarrowTensor, shape: torch.Size, dtype: torch.dtype
) -> bool:
    """Tell whether torch multiplies these rows of experts on their device."""
    return (
        ScaledProduct.EXPERT_ROWS in _products_of(x.codes.device)
        and x.operand == w.operand
        and x.operand.number is NarrowFormat.E4M3
        and not x.operand.block
        and dtype is torch.bfloat16
        and len(x.codes) > 0
        and not (shape[1] % _LINES or shape[2] % _LINES)
    )


def multiply_scaled(
    product: ScaledProduct, a: NarrowTensor, b: NarrowTensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return a b^T [R,N] by a product of torch that fits the operands.

    Sums are in fp32 throughout: `use_fast_accum` is off.
    """
    codes = [_codes_of(operand) for operand in (a, b)]
    scales = [_scales_of(product, operand) for operand in (a, b)]
    recipes = [_recipes_of(product, operand) for operand in (a, b)]
    swizzles = [F.SwizzleType.NO_SWIZZLE]
    if product in (ScaledProduct.MXFP8, ScaledProduct.NVFP4):
        swizzles = [F.SwizzleType.SWIZZLE_32_4_4]
        if product is ScaledProduct.NVFP4:
            swizzles.append(F.SwizzleType.NO_SWIZZLE)
    return F.scaled_mm(
        codes[0],
        codes[1].T,
        scales[0],
        recipes[0],
        scales[1],
        recipes[1],
        swizzles,
        swizzles,
        output_dtype=dtype,
    )


def _codes_of(operand: NarrowTensor) -> torch.Tensor:
    """Return the numbers, row by row; pairs of 4 bits as torch's own type."""
    codes = operand.codes.contiguous()
    is_packed = operand.operand.number is NarrowFormat.E2M1
    return codes.view(torch.float4_e2m1fn_x2) if is_packed else codes


def _scales_of(product: ScaledProduct, operand: NarrowTensor) -> list[torch.Tensor]:
    """Return the scales of an operand as torch's product reads them."""
    if product is ScaledProduct.TENSOR:
        assert operand.group_scales is not None
        return [operand.group_scales[0]]
    assert operand.scales is not None
    if product is ScaledProduct.BLOCKS_128:
        scales = decode_scales(operand.scales, operand.operand.scale)
        if operand.operand.is_tiled:
            scales = scales[:: operand.operand.block]
            scales = F.pad(scales, (0, -scales.shape[1] % _TILE_BLOCKS))
            return [scales.contiguous().T]
        return [scales.T.contiguous().T]
    tiles = [tile_scales(operand.scales)]
    if operand.group_scales is not None:
        tiles.append(operand.group_scales[0])
    return tiles


def tile_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales of 8 bits [R, blocks] in the order in which tensor cores read them.

    They lie in tiles of 128 rows and 4 blocks, tile after tile along a row; in a tile the scales of
    rows r, r + 32, r + 64 and r + 96 lie beside each other, 4 blocks of each. What a tile lacks is
    zero. (cuBLAS manual, 1D block scaling factors layout.)
    """
    rows, blocks = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -blocks % _TILE_BLOCKS, 0, -rows % _TILE_ROWS))
    lanes = padded.unflatten(1, (-1, _TILE_BLOCKS)).unflatten(0, (-1, _LANE_GROUPS, _TILE_LANES))
    return lanes.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def _recipes_of(product: ScaledProduct, operand: NarrowTensor) -> list[F.ScalingType]:
    scaling = F.ScalingType
    if product is ScaledProduct.BLOCKS_128:
        is_tiled = operand.operand.is_tiled
        return [scaling.BlockWise128x128 if is_tiled else scaling.BlockWise1x128]
    return {
        ScaledProduct.TENSOR: [scaling.TensorWise],
        ScaledProduct.MXFP8: [scaling.BlockWise1x32],
        ScaledProduct.NVFP4: [scaling.BlockWise1x16, scaling.TensorWise],
    }[product]
