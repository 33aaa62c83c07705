"""Triton kernels of cross-entropy over logits [T,V], of which V columns may be a part of the
vocabulary.

All arithmetic is in fp32, whatever the logits hold, and no copy of them is made. A program goes
over all columns of some rows, for most vocabularies one. Rows past the last one repeat it, so no
largest logit is minus infinity.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from moewright.engine.kernels.fused.triton_rows import flatten_rows, tile_shape

_WIDEST = 4096  # columns held at a time


@triton.jit
def _rows(count, ROWS: tl.constexpr):
    return tl.minimum(tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), count - 1)


@triton.jit
def _max_and_sum_exp(logits, row, width, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of each row the largest logit, and the sum of exp(logit - largest)."""
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(logits + row[:, None] * stride + column, column < width, float("-inf")).to(
            tl.float32
        )
        higher = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
        top = higher
    return top, total


@triton.jit
def _cross_entropy(
    logits, targets, out, count, width, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = _rows(count, ROWS)
    top, total = _max_and_sum_exp(logits, row, width, stride, ROWS, BLOCK)
    target = tl.maximum(tl.load(targets + row), 0)
    chosen = tl.load(logits + row * stride + target).to(tl.float32)
    tl.store(out + row, tl.log(total) - (chosen - top))


@triton.jit
def _sum_exp(logits, tops, out, count, width, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = _rows(count, ROWS)
    top, total = tl.load(tops + row), tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(logits + row[:, None] * stride + column, column < width, float("-inf")).to(
            tl.float32
        )
        total += tl.exp(x - top[:, None])
    tl.store(out + row, tl.sum(total, 1))


@triton.jit
def _cross_entropy_backward(
    grad, logits, columns, log_sums, out, count, width, stride, size,
    SUMMED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = _rows(count, ROWS)
    if SUMMED:
        top, total = tl.load(log_sums + row), tl.full((ROWS,), 1.0, tl.float32)
    else:
        top, total = _max_and_sum_exp(logits, row, width, stride, ROWS, BLOCK)
    wide, target = tl.load(grad + row), tl.load(columns + row)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(logits + row[:, None] * stride + column, column < size, float("-inf")).to(
            tl.float32
        )
        prob = tl.exp(x - top[:, None]) / total[:, None]
        back = (prob - tl.where(column == target[:, None], 1.0, 0.0)) * wide[:, None]
        tl.store(out + row[:, None] * width + column, back, column < width)


def cross_entropy(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """seam.Kernels.losses."""
    return _one_a_row(_cross_entropy, logits_TV, targets_T)


def sum_exp(logits_TV: torch.Tensor, top_T: torch.Tensor) -> torch.Tensor:
    """seam.Kernels.sums."""
    return _one_a_row(_sum_exp, logits_TV, top_T)


def _one_a_row(kernel: Any, logits_TV: torch.Tensor, beside_T: torch.Tensor) -> torch.Tensor:
    """One fp32 number of each row of logits and what stands beside it: [T]."""
    logits, (count, width) = flatten_rows(logits_TV), logits_TV.shape
    out = torch.empty(count, device=logits.device)
    if count:
        rows, block = tile_shape(width, _WIDEST)
        kernel[(triton.cdiv(count, rows),)](
            logits,
            beside_T.contiguous(),
            out,
            count,
            width,
            logits.stride(0),
            ROWS=rows,
            BLOCK=block,
        )
    return out


def cross_entropy_backward(
    grad_T: torch.Tensor,
    logits_TV: torch.Tensor,
    columns_T: torch.Tensor,
    log_sum_T: torch.Tensor | None,
    size: int,
) -> torch.Tensor:
    """seam.Kernels.losses_backward."""
    logits, (count, width) = flatten_rows(logits_TV), logits_TV.shape
    out = torch.empty_like(logits_TV, memory_format=torch.contiguous_format)
    if out.numel():
        rows, block = tile_shape(width, _WIDEST)
        _cross_entropy_backward[(triton.cdiv(count, rows),)](
            grad_T.contiguous(),
            logits,
            columns_T.contiguous(),
            grad_T if log_sum_T is None else log_sum_T.contiguous(),
            out,
            count,
            width,
            logits.stride(0),
            size,
            SUMMED=log_sum_T is not None,
            ROWS=rows,
            BLOCK=block,
        )
    return out
