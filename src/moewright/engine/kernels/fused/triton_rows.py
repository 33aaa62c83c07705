"""Triton kernels over rows: copies to slots, sums over slots, gated activations with the weight of
a row, rotation.

All arithmetic is in fp32, whatever the tensors hold. A program works on some rows, in a piece of
their columns or in all of them, so every sum has one fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moewright.engine.kernels.fused.reference import SWIGLU_ALPHA, SWIGLU_LIMIT

_HELD = 4096  # elements that a program holds at a time
_WIDEST = 1024  # columns of them
_SLOPE, _LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def _permute(x, tokens, out, count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (column < width)[None, :]
    token = tl.load(tokens + row, row < count, 0)
    found = tl.load(x + token[:, None] * width + column[None, :], inside, 0.0)
    tl.store(out + row[:, None] * width + column[None, :], found, inside)


@triton.jit
def _unpermute(
    rows,
    rows_of,
    out,
    count,
    tokens,
    width,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
def _clamp(x, least, most):
    """As in torch a NaN stays one, which the minimum and maximum of a GPU drop."""
    return tl.where(x > most, most, tl.where(x < least, least, x))


@triton.jit
def _swiglu(
    x,
    weight,
    out,
    count,
    width,
    CLAMPED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (column < width)[None, :]
    at = row[:, None] * 2 * width + column[None, :]
    gate = tl.load(x + at, inside, 0.0).to(tl.float32)
    up = tl.load(x + at + width, inside, 0.0).to(tl.float32)
    if CLAMPED:
        gate, up = _clamp(gate, float("-inf"), _LIMIT), _clamp(up, -_LIMIT, _LIMIT) + 1.0
        act = gate / (1.0 + tl.exp(gate * -_SLOPE)) * up
    else:
        act = gate / (1.0 + tl.exp(-gate)) * up
    if WEIGHTED:
        act = act * tl.load(weight + row, row < count, 0.0)[:, None]
    tl.store(out + row[:, None] * width + column[None, :], act, inside)


@triton.jit
def _swiglu_backward(
    grad, x, weight, grad_x, grad_weight, count, width,
    CLAMPED: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All columns of the rows: the gradient of a weight is a sum over them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    of_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < count)[:, None] & (column < width)[None, :]
        at = row[:, None] * 2 * width + column[None, :]
        whole_gate = tl.load(x + at, inside, 0.0).to(tl.float32)
        whole_up = tl.load(x + at + width, inside, 0.0).to(tl.float32)
        wide = tl.load(grad + row[:, None] * width + column[None, :], inside, 0.0).to(tl.float32)
        if CLAMPED:
            gate, up = (
                _clamp(whole_gate, float("-inf"), _LIMIT),
                _clamp(whole_up, -_LIMIT, _LIMIT) + 1.0,
            )
            opened = 1.0 / (1.0 + tl.exp(gate * -_SLOPE))
            act = gate * opened
            slope = opened + act * (1.0 - opened) * _SLOPE
        else:
            gate, up = whole_gate, whole_up
            opened = 1.0 / (1.0 + tl.exp(-gate))
            act = gate * opened
            slope = opened * (1.0 + gate * (1.0 - opened))
        if WEIGHTED:
            of_weight += wide * act * up
            wide = wide * tl.load(weight + row, row < count, 0.0)[:, None]
        of_gate, of_up = wide * up * slope, wide * act
        if CLAMPED:
            of_gate = tl.where(whole_gate > _LIMIT, 0.0, of_gate)
            of_up = tl.where(tl.abs(whole_up) > _LIMIT, 0.0, of_up)
        tl.store(grad_x + at, of_gate, inside)
        tl.store(grad_x + at + width, of_up, inside)
    if WEIGHTED:
        tl.store(grad_weight + row, tl.sum(of_weight, 1), row < count)


@triton.jit
def _rotate(
    x, cos, sin, out, count, tokens, heads, half, of_sequence, of_token, of_head, of_angles,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row is a head of a token; x comes with the strides of its sequences, tokens and heads, the
    angles with that of a sequence.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (column < half)[None, :]
    sequence, place = (row // heads // tokens).to(tl.int64), (row // heads % tokens).to(tl.int64)
    head = (row % heads).to(tl.int64)
    at = (sequence * of_sequence + place * of_token + head * of_head)[:, None] + column[None, :]
    angle = (sequence * of_angles + place * half)[:, None] + column[None, :]
    c, s = tl.load(cos + angle, inside, 0.0), tl.load(sin + angle, inside, 0.0)
    first = tl.load(x + at, inside, 0.0).to(tl.float32)
    second = tl.load(x + at + half, inside, 0.0).to(tl.float32)
    into = row.to(tl.int64)[:, None] * 2 * half + column[None, :]
    tl.store(out + into, first * c - second * s, inside)
    tl.store(out + into + half, second * c + first * s, inside)


def permute(x_TH: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
    """seam.Kernels.spread."""
    x, out = x_TH.contiguous(), x_TH.new_empty((len(tokens_R), x_TH.shape[1]))
    if out.numel():
        rows, block = tile_shape(x.shape[1])
        grid = (triton.cdiv(len(out), rows), triton.cdiv(x.shape[1], block))
        _permute[grid](x, tokens_R.contiguous(), out, len(out), x.shape[1], ROWS=rows, BLOCK=block)
    return out


def unpermute(rows_RH: torch.Tensor, rows_Tk: torch.Tensor) -> torch.Tensor:
    """seam.Kernels.sum_slots; slots without a row are told by their number."""
    routed, (tokens, slots), width = rows_RH.contiguous(), rows_Tk.shape, rows_RH.shape[1]
    out = routed.new_empty((tokens, width))
    if out.numel():
        rows, block = tile_shape(width)
        grid = (triton.cdiv(tokens, rows), triton.cdiv(width, block))
        _unpermute[grid](
            routed,
            rows_Tk.contiguous(),
            out,
            len(routed),
            tokens,
            width,
            SLOTS=slots,
            ROWS=rows,
            BLOCK=block,
        )
    return out


def swiglu(x_R2F: torch.Tensor, weight_R: torch.Tensor | None, clamped: bool) -> torch.Tensor:
    """seam.Kernels.swiglu."""
    x, (count, width) = x_R2F.contiguous(), (len(x_R2F), x_R2F.shape[1] // 2)
    out = x.new_empty((count, width))
    if out.numel():
        weight, weighted = (x, False) if weight_R is None else (weight_R.contiguous(), True)
        rows, block = tile_shape(width)
        grid = (triton.cdiv(count, rows), triton.cdiv(width, block))
        _swiglu[grid](
            x, weight, out, count, width, CLAMPED=clamped, WEIGHTED=weighted, ROWS=rows, BLOCK=block
        )
    return out


def swiglu_backward(
    grad_RF: torch.Tensor, x_R2F: torch.Tensor, weight_R: torch.Tensor | None, clamped: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """seam.Kernels.swiglu_backward."""
    x, grad, (count, width) = x_R2F.contiguous(), grad_RF.contiguous(), grad_RF.shape
    grad_x, grad_weight = torch.empty_like(x), None
    weight, of_weight = x, x
    if weight_R is not None:
        weight, of_weight = (
            weight_R.contiguous(),
            torch.empty_like(weight_R, memory_format=torch.contiguous_format),
        )
        grad_weight = of_weight
    if grad.numel():
        rows, block = tile_shape(width)
        _swiglu_backward[(triton.cdiv(count, rows),)](
            grad,
            x,
            weight,
            grad_x,
            of_weight,
            count,
            width,
            CLAMPED=clamped,
            WEIGHTED=weight_R is not None,
            ROWS=rows,
            BLOCK=block,
        )
    return grad_x, grad_weight


def rotate(x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """seam.Kernels.rotate."""
    x = x_BSHD if x_BSHD.stride(-1) == 1 else x_BSHD.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        _, tokens, heads, width = x.shape
        count, half = out.numel() // width, width // 2
        rows, block = tile_shape(half)
        # of an element a program has two numbers, two angles and their addresses: more do not fit
        # registers
        rows //= 2
        cos, sin = (angles.contiguous().expand(len(x), tokens, half) for angles in (cos, sin))
        _rotate[(triton.cdiv(count, rows), triton.cdiv(half, block))](
            x,
            cos,
            sin,
            out,
            count,
            tokens,
            heads,
            half,
            *x.stride()[:3],
            cos.stride(0),
            ROWS=rows,
            BLOCK=block,
        )
    return out


def tile_shape(width: int, widest: int = _WIDEST) -> tuple[int, int]:
    """Rows and columns that a program holds of rows of `width`."""
    block = min(widest, triton.next_power_of_2(width))
    return _HELD // block, block


def flatten_rows(x: torch.Tensor) -> torch.Tensor:
    """x [...,K] as [N,K] with columns side by side: it is copied only where that, and one stride of
    rows, is not so."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
