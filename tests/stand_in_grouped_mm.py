"""A stand-in of torch.nn.functional.scaled_grouped_mm: its documented checks and meaning, slowly.

Written from aten/src/ATen/native/cuda/GroupedBlas.cpp, ScaledGroupMM.cu and MSLK's kernels
(mx8mx8bf16_grouped, f4f4bf16_grouped): where a group's numbers and scales begin, and what is left
unwritten. Tiles of scales are read by the formula of the cuBLAS manual.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PACKED = torch.float4_e2m1fn_x2
_TILE = [F.SwizzleType.SWIZZLE_32_4_4]
_RECIPES = {
    (F.ScalingType.RowWise,): (0, torch.float8_e4m3fn, torch.float32),
    (F.ScalingType.BlockWise1x32,): (32, torch.float8_e4m3fn, torch.float8_e8m0fnu),
    (F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise): (16, _PACKED, torch.float8_e4m3fn),
}


def multiply_by_groups(*args: Any, offs: torch.Tensor, output_dtype: torch.dtype) -> torch.Tensor:
    """Return [R,K] x [E,K,N], or [M,R] x [R,N] by groups of R, rounded to bf16 once."""
    a, b, a_scales, a_recipe, b_scales, b_recipe, a_swizzle, b_swizzle = args
    block, number, scale = _RECIPES[tuple(a_recipe)]
    assert a_recipe == b_recipe
    assert output_dtype is torch.bfloat16
    assert offs.dtype is torch.int32
    assert a.dtype is b.dtype is number
    assert a_scales[0].dtype is b_scales[0].dtype is scale
    if block:
        assert a_swizzle[:1] == b_swizzle[:1] == _TILE
    assert a.is_contiguous()
    assert b.mT.is_contiguous()
    for length in (a.shape[1], b.shape[-2], b.shape[-1]):
        assert length % 16 == 0
    _check_by_torch(a, b, a_scales, b_scales, offs)
    wide_a, wide_b = _widen(a), _widen(b.mT)
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    if b.dim() == 3:
        return _multiply_rows(wide_a, wide_b, a_scales, b_scales, sizes, block)
    return _contract(wide_a, wide_b, a_scales, b_scales, sizes, block)


def _check_by_torch(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: list[torch.Tensor],
    b_scales: list[torch.Tensor],
    offs: torch.Tensor,
) -> None:
    """Hold layouts against torch's shape function, which knows 8-bit numbers alone."""
    if a.dtype is _PACKED:
        for scales in (a_scales, b_scales):
            assert scales[1].dtype is torch.float32
            assert scales[1].shape == offs.shape
        _check_blocked(a, a_scales[0], 0)
        _check_blocked(b, b_scales[0], 1)
        return
    on_gpu: list[Any] = [tensor.to("meta") for tensor in (a, b, a_scales[0], b_scales[0])]
    torch._scaled_grouped_mm(*on_gpu, offs=offs.to("meta"), out_dtype=torch.bfloat16)


def _check_blocked(tensor: torch.Tensor, scale: torch.Tensor, side: int) -> None:
    assert scale.is_contiguous()
    assert scale.dim() == 2
    if tensor.dim() == 2:
        assert len(scale) >= tensor.shape[side]
        return
    experts, packed, columns = tensor.shape
    assert scale.shape == (experts, _round_up(2 * packed // 16, 4) * _round_up(columns, 128))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _widen(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype is not _PACKED:
        return codes.double()
    packed = codes.view(torch.uint8)
    numbers = torch.tensor((*_E2M1, *(-number for number in _E2M1)), dtype=torch.float64)
    return torch.stack((numbers[(packed & 15).int()], numbers[(packed >> 4).int()]), -1).flatten(-2)


def _read_tiles(flat: torch.Tensor, first: int, rows: int, blocks: int) -> torch.Tensor:
    """Return the scales [rows, blocks] of a group whose tiles begin at `first`."""
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None]
    tile = row // 128 * _round_up(blocks, 4) // 4 + block // 4
    inside = row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    return flat.flatten()[first + 512 * tile + inside].double()


def _multiply_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: list[torch.Tensor],
    b_scales: list[torch.Tensor],
    sizes: list[int],
    block: int,
) -> torch.Tensor:
    out = torch.full((len(a), b.shape[1]), torch.nan, dtype=torch.float64)
    start = first = 0
    for group, size in enumerate(sizes):
        rows, weights = a[start : start + size], b[group]
        if block:
            blocks = a.shape[1] // block
            of_rows = _read_tiles(a_scales[0], first, size, blocks)
            of_weights = _read_tiles(b_scales[0][group], 0, len(weights), blocks)
            rows = rows * of_rows.repeat_interleave(block, 1)
            weights = weights * of_weights.repeat_interleave(block, 1)
            first += _round_up(size, 128) * _round_up(blocks, 4)
            for scales in (a_scales, b_scales):
                rows = rows * scales[1][group] if scales[1:] else rows
        else:
            rows = rows * a_scales[0][start : start + size, None]
            weights = weights * b_scales[0][group, :, None]
        out[start : start + size] = rows @ weights.T
        start += size
    return out.to(torch.bfloat16)


def _contract(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: list[torch.Tensor],
    b_scales: list[torch.Tensor],
    sizes: list[int],
    block: int,
) -> torch.Tensor:
    out = torch.full((len(sizes), len(a), len(b)), torch.nan, dtype=torch.float64)
    start = 0
    columns = 0  # of scales before this group, in whole tiles
    for group, size in enumerate(sizes):
        assert size % 16 == 0
        parts = []
        for side, scales in ((a, a_scales), (b, b_scales)):
            if not block:  # a scale a row, those of all rows anew for each group
                of_rows = scales[0].view(len(sizes), len(side))[group]
                parts.append(side[:, start : start + size] * of_rows[:, None])
                continue
            first = _round_up(len(side), 128) * columns
            read = _read_tiles(scales[0], first, len(side), size // block)
            part = side[:, start : start + size] * read.repeat_interleave(block, 1)
            parts.append(part * scales[1][group] if scales[1:] else part)
        if size:
            out[group] = parts[0] @ parts[1].T
        start += size
        columns += _round_up(size // block, 4) if block else 0
    return out.to(torch.bfloat16)
