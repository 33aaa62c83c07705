"""Triton kernels of cross-entropy over logits [T,V].

V columns may be a part of the vocabulary. All arithmetic is in fp32, whatever the logits hold, and
no copy of them is made. A program goes over all columns of some rows, of one row for most
vocabularies. Rows past the last one repeat it, so that every row has a finite largest logit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from moewright.engine.kernels.fused.triton_rows import flatten_rows, pointer_or, tile_shape

_MAX_COLUMNS = 4096  # held at a time


@triton.jit
def _rows(count, ROWS: tl.constexpr):
    return tl.minimum(tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), count - 1)


@triton.jit
def _max_and_sum_exp(logits, row, width, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return each row's largest logit, and its sum of exp(logit - largest)."""
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(logits + row[:, None] * stride + column, column < width, float("-inf")).to(
            tl.float32
        )
        higher = tl.maximum(row_max, tl.max(x, 1))
        # The sum so far is of exp(x - row_max); at first the factor is exp(-inf).
        total = total * tl.exp(row_max - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
        row_max = higher
    return row_max, total


@triton.jit
def _cross_entropy(
    logits, targets, out, count, width, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = _rows(count, ROWS)
    row_max, total = _max_and_sum_exp(logits, row, width, stride, ROWS, BLOCK)
    # Any column for a negative target, whose loss the caller sets to 0.
    target = tl.maximum(tl.load(targets + row), 0)
    chosen = tl.load(logits + row * stride + target).to(tl.float32)
    tl.store(out + row, tl.log(total) - (chosen - row_max))


@triton.jit
def _sum_exp(logits, row_maxes, out, count, width, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = _rows(count, ROWS)
    row_max = tl.load(row_maxes + row)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(logits + row[:, None] * stride + column, column < width, float("-inf")).to(
            tl.float32
        )
        total += tl.exp(x - row_max[:, None])
    tl.store(out + row, tl.sum(total, 1))


@triton.jit
def _cross_entropy_backward(
    grad, logits, columns, log_sums, out, count, width, stride, size,
    SUMMED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = _rows(count, ROWS)
    if SUMMED:
        row_max = tl.load(log_sums + row)
        # exp(x - log-sum) is the probability already.
        total = tl.full((ROWS,), 1.0, tl.float32)
    else:
        row_max, total = _max_and_sum_exp(logits, row, width, stride, ROWS, BLOCK)
    row_grad = tl.load(grad + row)
    target = tl.load(columns + row)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        # Columns from `size` on are padding, of probability 0.
        x = tl.load(logits + row[:, None] * stride + column, column < size, float("-inf")).to(
            tl.float32
        )
        prob = tl.exp(x - row_max[:, None]) / total[:, None]
        grad_logit = (prob - tl.where(column == target[:, None], 1.0, 0.0)) * row_grad[:, None]
        tl.store(out + row[:, None] * width + column, grad_logit, column < width)


def cross_entropy(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """Compute KernelSet.cross_entropy."""
    return _reduce_rows(_cross_entropy, logits_TV, targets_T)


def sum_exp(logits_TV: torch.Tensor, max_T: torch.Tensor) -> torch.Tensor:
    """Compute KernelSet.sum_exp."""
    return _reduce_rows(_sum_exp, logits_TV, max_T)


def _reduce_rows(kernel: Any, logits_TV: torch.Tensor, operand_T: torch.Tensor) -> torch.Tensor:
    """Run a kernel that makes one fp32 number of each row of logits and its `operand`: [T]."""
    logits = flatten_rows(logits_TV)
    count, width = logits_TV.shape
    out = torch.empty(count, device=logits.device)
    if count:
        rows, block = tile_shape(width, _MAX_COLUMNS)
        kernel[(triton.cdiv(count, rows),)](
            logits,
            operand_T.contiguous(),
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
    """Compute KernelSet.cross_entropy_backward."""
    logits = flatten_rows(logits_TV)
    count, width = logits_TV.shape
    out = torch.empty_like(logits_TV, memory_format=torch.contiguous_format)
    if out.numel():
        rows, block = tile_shape(width, _MAX_COLUMNS)
        _cross_entropy_backward[(triton.cdiv(count, rows),)](
            grad_T.contiguous(),
            logits,
            columns_T.contiguous(),
            pointer_or(log_sum_T, grad_T),
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
