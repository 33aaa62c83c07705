"""Products of converted operands, by torch's scaled products where a device has them.

Elsewhere the operands are widened and multiplied, which is the same to the rounding of the scaled
numbers to the result's dtype and to the order of the sums. torch offers, on CUDA alone:

- a scale a tensor, dense (8.9 and later; not of two operands in E5M2);
- a scale a row and expert, grouped, both in E4M3 (9.x), and so a weight gradient of experts;
- a scale for 128 numbers or for 128 x 128, dense (9.x, CUDA 12.9);
- MXFP8 and NVFP4, dense (10.x, CUDA 12.8);
- MXFP8 and NVFP4, grouped (10.0, builds of torch with MSLK; kernels.scaled_groups).

A power of two for 128 numbers is four of MXFP8's for 32: such operands are MXFP8's where a device
has no product of blocks of 128. The numbers of the contraction and the result's columns come in
sixteens, or in whole blocks. What torch asks for in layouts its own shape functions check
(torch/_meta_registrations.py of 2.13).

Shapes: R rows, K contracted, N rows of the second operand.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

import torch
import torch.nn.functional as F

from moewright.engine.kernels.low_precision import NarrowTensor, decode_scales
from moewright.engine.kernels.matmul import matmul
from moewright.engine.kernels.scale_tiles import TILE_BLOCKS, TILE_ROWS, tile_scales
from moewright.rules.low_precision import NarrowFormat, OperandFormat, ScaleFormat

LINES = 16  # a dimension of an operand in memory is a multiple of so many bytes
MX_BLOCK = 32


class ScaledProduct(StrEnum):
    """The kinds of scaled products that torch has; those of experts are grouped by rows."""

    TENSOR = "tensor"
    BLOCKS_128 = "blocks_128"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    EXPERT_ROWS = "expert_rows"
    EXPERT_MXFP8 = "expert_mxfp8"
    EXPERT_NVFP4 = "expert_nvfp4"


def multiply(a_RK: NarrowTensor, b_NK: NarrowTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a b^T [R,N] of operands that are both converted along K."""
    product = find_product(a_RK, b_NK, dtype)
    if product is None:
        return matmul(a_RK.widen(dtype), b_NK.widen(dtype).T)
    return multiply_scaled(product, a_RK, b_NK, dtype)


def products_of_device(
    capability: tuple[int, int], cuda: tuple[int, ...], build: str
) -> frozenset[ScaledProduct]:
    """Return what a GPU of this compute capability has under a version of CUDA.

    `build` is torch.__config__.show(): the grouped products of 10.0 are MSLK's, which torch may be
    built without. Their kernels are compiled for 10.0 alone, those by rows for 9.0 alone.
    """
    major = capability[0]
    has_blackwell = major == 10 and cuda >= (12, 8)
    has_mslk = capability == (10, 0) and cuda >= (12, 8) and "USE_MSLK" in build
    has = {
        ScaledProduct.TENSOR: capability >= (8, 9),
        ScaledProduct.BLOCKS_128: major == 9 and cuda >= (12, 9),
        ScaledProduct.MXFP8: has_blackwell,
        ScaledProduct.NVFP4: has_blackwell,
        ScaledProduct.EXPERT_ROWS: major == 9,
        ScaledProduct.EXPERT_MXFP8: has_mslk,
        ScaledProduct.EXPERT_NVFP4: has_mslk,
    }
    return frozenset(product for product, is_there in has.items() if is_there)


@cache
def _products_of(device: torch.device) -> frozenset[ScaledProduct]:
    if device.type != "cuda" or torch.version.cuda is None:
        return frozenset()
    cuda = tuple(int(part) for part in torch.version.cuda.split("."))
    capability = torch.cuda.get_device_capability(device)
    return products_of_device(capability, cuda, torch.__config__.show())


def has_product(product: ScaledProduct, device: torch.device) -> bool:
    """Tell whether torch has a product on a device."""
    return product in _products_of(device)


def find_product(a: NarrowTensor, b: NarrowTensor, dtype: torch.dtype) -> ScaledProduct | None:
    """Return torch's product of two dense operands; None where there is none on their device."""
    for product in _kinds_of(a.operand):
        if has_product(product, a.codes.device) and fits(product, a, b, dtype):
            return product
    return None


def reads_tiles(operand: OperandFormat, shape: torch.Size, device: torch.device) -> bool:
    """Tell whether a device's product reads the scales of an operand in tiles, all of them whole.

    `shape` is [R,K], or [E,R,K] of experts, each of which has tiles of its own.
    """
    is_dense = len(shape) == 2
    kinds = {
        ScaleFormat.E8M0: ScaledProduct.MXFP8 if is_dense else ScaledProduct.EXPERT_MXFP8,
        ScaleFormat.E4M3: ScaledProduct.NVFP4 if is_dense else ScaledProduct.EXPERT_NVFP4,
    }
    product = kinds.get(operand.scale)
    if product is None or not has_product(product, device):
        return False
    return not (shape[-2] % TILE_ROWS or shape[-1] % (TILE_BLOCKS * operand.block))


def _kinds_of(operand: OperandFormat) -> tuple[ScaledProduct, ...]:
    """Return the dense products of a format, the one of its own blocks first."""
    if not operand.block:
        return (ScaledProduct.TENSOR,)
    kinds = {
        ScaleFormat.POWER_OF_TWO: (ScaledProduct.BLOCKS_128, ScaledProduct.MXFP8),
        ScaleFormat.E8M0: (ScaledProduct.MXFP8,),
        ScaleFormat.E4M3: (ScaledProduct.NVFP4,),
    }
    return kinds[operand.scale]


def fits(product: ScaledProduct, a: NarrowTensor, b: NarrowTensor, dtype: torch.dtype) -> bool:
    """Tell whether the shapes and formats of dense operands are those of torch's product."""
    if a.groups.ends is not None or b.groups.ends is not None or not len(a.codes):
        return False
    is_twice_e5m2 = a.operand.number is b.operand.number is NarrowFormat.E5M2
    is_whole = not (a.codes.shape[1] % LINES or len(b.codes) % LINES)
    if a.operand.block:
        # torch gives the result of block scales in bf16 alone.
        is_whole &= not a.columns % a.operand.block and dtype is torch.bfloat16
    if product is ScaledProduct.BLOCKS_128 and b.operand.is_tiled:
        is_whole &= not len(b.codes) % b.operand.block
    return is_whole and not is_twice_e5m2 and not a.operand.is_tiled


def multiply_scaled(
    product: ScaledProduct, a: NarrowTensor, b: NarrowTensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return a b^T [R,N] by a product of torch that fits the operands.

    Sums are in fp32 throughout: `use_fast_accum` is off.
    """
    codes = [codes_of(operand) for operand in (a, b)]
    scales = [_scales_of(product, operand) for operand in (a, b)]
    recipes = [_recipes_of_operand(product, operand) for operand in (a, b)]
    swizzles = swizzles_of(product)
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


def codes_of(operand: NarrowTensor) -> torch.Tensor:
    """Return the numbers, row by row; pairs of 4 bits as torch's own type."""
    codes = operand.codes.contiguous()
    is_packed = operand.operand.number is NarrowFormat.E2M1
    if is_packed:
        return codes.view(torch.float4_e2m1fn_x2)
    return codes


def _scales_of(product: ScaledProduct, operand: NarrowTensor) -> list[torch.Tensor]:
    """Return the scales of a dense operand as torch's product reads them."""
    if product is ScaledProduct.TENSOR:
        assert operand.group_scales is not None
        return [operand.group_scales[0]]
    if product is ScaledProduct.BLOCKS_128:
        assert operand.scales is not None
        scales = decode_scales(operand.scales, operand.operand.scale)
        if operand.operand.is_tiled:
            scales = scales[:: operand.operand.block]
            scales = F.pad(scales, (0, -scales.shape[1] % TILE_BLOCKS))
            return [scales.contiguous().T]
        return [scales.T.contiguous().T]
    scales = block_scales(operand)
    tiles = [scales.view(-1) if operand.in_tiles else tile_scales(scales)]
    if operand.group_scales is not None:
        tiles.append(operand.group_scales[0])
    return tiles


def block_scales(operand: NarrowTensor) -> torch.Tensor:
    """Return scales of 8 bits for 32 or 16 numbers [R, blocks]; a power of two for 128 as four."""
    assert operand.scales is not None
    if operand.operand.scale is not ScaleFormat.POWER_OF_TWO:
        return operand.scales
    # A positive power of two is its exponent alone, as E8M0 holds it.
    exponents = (operand.scales.view(torch.int32) >> 23).to(torch.uint8)
    fours = exponents.repeat_interleave(operand.operand.block // MX_BLOCK, 1)
    return fours[:, : -(-operand.columns // MX_BLOCK)].view(torch.float8_e8m0fnu)


def _recipes_of_operand(product: ScaledProduct, operand: NarrowTensor) -> list[F.ScalingType]:
    if product is ScaledProduct.BLOCKS_128 and operand.operand.is_tiled:
        return [F.ScalingType.BlockWise128x128]
    return recipes_of(product)


def recipes_of(product: ScaledProduct) -> list[F.ScalingType]:
    """Return torch's names of the scales of operands that are not in tiles of 128 x 128."""
    scaling = F.ScalingType
    by_sixteens = [scaling.BlockWise1x16, scaling.TensorWise]
    return {
        ScaledProduct.TENSOR: [scaling.TensorWise],
        ScaledProduct.BLOCKS_128: [scaling.BlockWise1x128],
        ScaledProduct.MXFP8: [scaling.BlockWise1x32],
        ScaledProduct.NVFP4: by_sixteens,
        ScaledProduct.EXPERT_ROWS: [scaling.RowWise],
        ScaledProduct.EXPERT_MXFP8: [scaling.BlockWise1x32],
        ScaledProduct.EXPERT_NVFP4: by_sixteens,
    }[product]


def swizzles_of(product: ScaledProduct) -> list[F.SwizzleType]:
    """Return torch's names of the orders in which an operand's scales lie."""
    plain, tiled = F.SwizzleType.NO_SWIZZLE, F.SwizzleType.SWIZZLE_32_4_4
    if product in (ScaledProduct.MXFP8, ScaledProduct.EXPERT_MXFP8):
        return [tiled]
    if product in (ScaledProduct.NVFP4, ScaledProduct.EXPERT_NVFP4):
        return [tiled, plain]
    return [plain]
