"""Triton kernels over rows: copies to slots, sums over slots, gated activations with the weight of a row.

All arithmetic is in fp32, whatever the tensors hold. Tensors are contiguous. A program works on some rows, in a piece
of their columns or in all of them, so every sum has one fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WIDEST = 1024  # columns that a program holds at a time
_HELD = 4096  # elements


@triton.jit
def _spread(x, tokens, out, count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (column < width)[None, :]
    token = tl.load(tokens + row, row < count, 0)
    found = tl.load(x + token[:, None] * width + column[None, :], inside, 0.0)
    tl.store(out + row[:, None] * width + column[None, :], found, inside)


@triton.jit
def _sum_slots(rows, rows_of, out, count, tokens, width, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (column < width)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for slot in range(SLOTS):
        row = tl.load(rows_of + token * SLOTS + slot, token < tokens, 0)
        there = inside & (row < count)[:, None]
        total += tl.load(rows + row[:, None] * width + column[None, :], there, 0.0).to(tl.float32)
    tl.store(out + token[:, None] * width + column[None, :], total, inside)


@triton.jit
def _swiglu(x, weight, out, count, width, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (column < width)[None, :]
    at = row[:, None] * 2 * width + column[None, :]
    gate = tl.load(x + at, inside, 0.0).to(tl.float32)
    act = gate / (1.0 + tl.exp(-gate)) * tl.load(x + at + width, inside, 0.0).to(tl.float32)
    if WEIGHTED:
        act = act * tl.load(weight + row, row < count, 0.0)[:, None]
    tl.store(out + row[:, None] * width + column[None, :], act, inside)


@triton.jit
def _swiglu_backward(
    grad, x, weight, grad_x, grad_weight, count, width,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All columns of the rows: the gradient of a weight is a sum over them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    of_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < count)[:, None] & (column < width)[None, :]
        at = row[:, None] * 2 * width + column[None, :]
        gate = tl.load(x + at, inside, 0.0).to(tl.float32)
        up = tl.load(x + at + width, inside, 0.0).to(tl.float32)
        wide = tl.load(grad + row[:, None] * width + column[None, :], inside, 0.0).to(tl.float32)
        opened = 1.0 / (1.0 + tl.exp(-gate))
        act = gate * opened
        if WEIGHTED:
            of_weight += wide * act * up
            wide = wide * tl.load(weight + row, row < count, 0.0)[:, None]
        tl.store(grad_x + at, wide * up * opened * (1.0 + gate * (1.0 - opened)), inside)
        tl.store(grad_x + at + width, wide * act, inside)
    if WEIGHTED:
        tl.store(grad_weight + row, tl.sum(of_weight, 1), row < count)


def spread(x_TH: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
    """seam.Kernels.spread."""
    x, out = x_TH.contiguous(), x_TH.new_empty((len(tokens_R), x_TH.shape[1]))
    if out.numel():
        rows, block = _tile(x.shape[1])
        grid = (triton.cdiv(len(out), rows), triton.cdiv(x.shape[1], block))
        _spread[grid](x, tokens_R.contiguous(), out, len(out), x.shape[1], ROWS=rows, BLOCK=block)
    return out


def sum_slots(rows_RH: torch.Tensor, rows_Tk: torch.Tensor) -> torch.Tensor:
    """seam.Kernels.sum_slots; slots without a row are told by their number."""
    routed, (tokens, slots), width = rows_RH.contiguous(), rows_Tk.shape, rows_RH.shape[1]
    out = routed.new_empty((tokens, width))
    if out.numel():
        rows, block = _tile(width)
        grid = (triton.cdiv(tokens, rows), triton.cdiv(width, block))
        _sum_slots[grid](
            routed, rows_Tk.contiguous(), out, len(routed), tokens, width, SLOTS=slots, ROWS=rows, BLOCK=block
        )
    return out


def swiglu(x_R2F: torch.Tensor, weight_R: torch.Tensor | None) -> torch.Tensor:
    """seam.Kernels.swiglu."""
    x, (count, width) = x_R2F.contiguous(), (len(x_R2F), x_R2F.shape[1] // 2)
    out = x.new_empty((count, width))
    if out.numel():
        weight, weighted = (x, False) if weight_R is None else (weight_R.contiguous(), True)
        rows, block = _tile(width)
        grid = (triton.cdiv(count, rows), triton.cdiv(width, block))
        _swiglu[grid](x, weight, out, count, width, WEIGHTED=weighted, ROWS=rows, BLOCK=block)
    return out


def swiglu_backward(
    grad_RF: torch.Tensor, x_R2F: torch.Tensor, weight_R: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """seam.Kernels.swiglu_backward."""
    x, grad, (count, width) = x_R2F.contiguous(), grad_RF.contiguous(), grad_RF.shape
    grad_x, grad_weight = torch.empty_like(x), None
    weight, of_weight = x, x
    if weight_R is not None:
        weight, of_weight = weight_R.contiguous(), torch.empty_like(weight_R, memory_format=torch.contiguous_format)
        grad_weight = of_weight
    if grad.numel():
        rows, block = _tile(width)
        _swiglu_backward[(triton.cdiv(count, rows),)](
            grad, x, weight, grad_x, of_weight, count, width, WEIGHTED=weight_R is not None, ROWS=rows, BLOCK=block
        )
    return grad_x, grad_weight


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns that a program holds of rows of `width`."""
    block = min(_WIDEST, triton.next_power_of_2(width))
    return _HELD // block, block
