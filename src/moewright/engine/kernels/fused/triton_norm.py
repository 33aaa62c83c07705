"""Triton kernels of RMSNorm, forward and backward.

All arithmetic is in fp32 but for the product with the weight, whose factor is rounded first, as in
the reference. A program goes over all columns of some rows twice: for their sums, and then out of
the cache for what comes of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moewright.engine.kernels.fused.triton_rows import flatten_rows, pointer_or, tile_shape

# Columns held at a time: the more rows, the fewer partial sums of the weight's gradient.
_MAX_COLUMNS = 512


@triton.jit
def _rms_norm(
    x, weight, out, scale, count, width, stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < count)[:, None] & (column < width)[None, :]
        wide = tl.load(x + row[:, None] * stride + column[None, :], inside, 0.0).to(tl.float32)
        squares += wide * wide
    row_scale = tl.rsqrt(tl.sum(squares, 1) / width + eps)
    tl.store(scale + row, row_scale, row < count)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < count)[:, None] & (column < width)[None, :]
        wide = tl.load(x + row[:, None] * stride + column[None, :], inside, 0.0).to(tl.float32)
        normed = (wide * row_scale[:, None]).to(x.dtype.element_ty).to(tl.float32)
        factor = tl.load(weight + column, column < width, 0.0).to(tl.float32)
        tl.store(out + row[:, None] * width + column[None, :], normed * factor[None, :], inside)


@triton.jit
def _rms_norm_backward(
    grad, x, weight, scale, grad_x, grad_weights,
    count, width, grad_stride, stride, eps, first, last,
    SCALED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write grad_x, and the program's part of the weight's gradient.

    A program's row of `grad_weights` [programs, width] is what its rows from `first` to `last` add.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    products = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < count)[:, None] & (column < width)[None, :]
        wide = tl.load(x + row[:, None] * stride + column[None, :], inside, 0.0).to(tl.float32)
        wide_grad = tl.load(grad + row[:, None] * grad_stride + column[None, :], inside, 0.0).to(
            tl.float32
        )
        factor = tl.load(weight + column, column < width, 0.0).to(tl.float32)
        products += wide_grad * factor[None, :] * wide
        if not SCALED:
            squares += wide * wide
    if SCALED:
        row_scale = tl.load(scale + row, row < count, 0.0)
    else:
        row_scale = tl.rsqrt(tl.sum(squares, 1) / width + eps)
    mean = tl.sum(products, 1) / width * row_scale
    counted = ((row >= first) & (row < last))[:, None]
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < count)[:, None] & (column < width)[None, :]
        normed = (
            tl.load(x + row[:, None] * stride + column[None, :], inside, 0.0).to(tl.float32)
            * row_scale[:, None]
        )
        wide_grad = tl.load(grad + row[:, None] * grad_stride + column[None, :], inside, 0.0).to(
            tl.float32
        )
        factor = tl.load(weight + column, column < width, 0.0).to(tl.float32)
        row_grad_x = (wide_grad * factor[None, :] - normed * mean[:, None]) * row_scale[:, None]
        tl.store(grad_x + row[:, None] * width + column[None, :], row_grad_x, inside)
        summed = tl.sum(tl.where(counted, wide_grad * normed, 0.0), 0)
        tl.store(
            grad_weights + tl.program_id(0).to(tl.int64) * width + column, summed, column < width
        )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute KernelSet.rms_norm."""
    x_NK = flatten_rows(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if out.numel():
        count, width = x_NK.shape
        rows, block = tile_shape(width, _MAX_COLUMNS)
        _rms_norm[(triton.cdiv(count, rows),)](
            x_NK,
            weight.contiguous(),
            out,
            scale,
            count,
            width,
            x_NK.stride(0),
            eps,
            ROWS=rows,
            BLOCK=block,
        )
    return out, scale


def rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    weight_rows: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute KernelSet.rms_norm_backward.

    The weight's gradient is a sum over programs of what each summed, without atomics.
    """
    x_NK = flatten_rows(x)
    grad_NK = flatten_rows(grad)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    count, width = x_NK.shape
    rows, block = tile_shape(width, _MAX_COLUMNS)
    programs = triton.cdiv(count, rows)
    grad_weights = weight.new_empty((programs, width), dtype=torch.float32)
    if programs:
        first, last, _ = weight_rows.indices(count)
        _rms_norm_backward[(programs,)](
            grad_NK,
            x_NK,
            weight.contiguous(),
            pointer_or(scale, grad_weights),
            grad_x,
            grad_weights,
            count,
            width,
            grad_NK.stride(0),
            x_NK.stride(0),
            eps,
            first,
            last,
            SCALED=scale is not None,
            ROWS=rows,
            BLOCK=block,
        )
    return grad_x, grad_weights.sum(0).to(weight.dtype)
