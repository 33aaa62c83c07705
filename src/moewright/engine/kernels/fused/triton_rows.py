"""Triton kernels over rows: permute, unpermute, gated activations, rotation.

The gated activations include the weight of a row. All arithmetic is in fp32, whatever the tensors
hold. A program works on some rows, in a piece of their columns or in all of them, so every sum has
one fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moewright.engine.kernels.fused.reference import SWIGLU_ALPHA, SWIGLU_LIMIT

_PROGRAM_NUMEL = 4096  # elements that a program holds at a time
_MAX_COLUMNS = 1024  # columns of these elements
_ALPHA = tl.constexpr(SWIGLU_ALPHA)
_LIMIT = tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def _permute(x, tokens, out, count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # In 64 bits: a row times the width may pass 2**31.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (column < width)[None, :]
    token = tl.load(tokens + row, row < count, 0)
    value = tl.load(x + token[:, None] * width + column[None, :], inside, 0.0)
    tl.store(out + row[:, None] * width + column[None, :], value, inside)


@triton.jit
def _unpermute(
    rows,
    row_of_slot,
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
        row = tl.load(row_of_slot + token * SLOTS + slot, token < tokens, 0)
        has_row = inside & (row < count)[:, None]
        total += tl.load(rows + row[:, None] * width + column[None, :], has_row, 0.0).to(tl.float32)
    tl.store(out + token[:, None] * width + column[None, :], total, inside)


@triton.jit
def _clamp(x, least, most):
    """Clamp as torch does: a NaN stays one, which the minimum and maximum of a GPU drop."""
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
    address = row[:, None] * 2 * width + column[None, :]
    gate = tl.load(x + address, inside, 0.0).to(tl.float32)
    up = tl.load(x + address + width, inside, 0.0).to(tl.float32)
    if CLAMPED:
        gate = _clamp(gate, float("-inf"), _LIMIT)
        up = _clamp(up, -_LIMIT, _LIMIT) + 1.0
        act = gate / (1.0 + tl.exp(gate * -_ALPHA)) * up
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
    """Go over all columns of some rows: the gradient of a weight is a sum over them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    weight_sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < count)[:, None] & (column < width)[None, :]
        address = row[:, None] * 2 * width + column[None, :]
        raw_gate = tl.load(x + address, inside, 0.0).to(tl.float32)
        raw_up = tl.load(x + address + width, inside, 0.0).to(tl.float32)
        wide = tl.load(grad + row[:, None] * width + column[None, :], inside, 0.0).to(tl.float32)
        if CLAMPED:
            gate = _clamp(raw_gate, float("-inf"), _LIMIT)
            up = _clamp(raw_up, -_LIMIT, _LIMIT) + 1.0
            sigmoid = 1.0 / (1.0 + tl.exp(gate * -_ALPHA))
            act = gate * sigmoid
            slope = sigmoid + act * (1.0 - sigmoid) * _ALPHA
        else:
            gate = raw_gate
            up = raw_up
            sigmoid = 1.0 / (1.0 + tl.exp(-gate))
            act = gate * sigmoid
            slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        if WEIGHTED:
            weight_sums += wide * act * up
            wide = wide * tl.load(weight + row, row < count, 0.0)[:, None]
        grad_gate = wide * up * slope
        grad_up = wide * act
        if CLAMPED:
            # By what lies beyond, so that a NaN stays one.
            grad_gate = tl.where(raw_gate > _LIMIT, 0.0, grad_gate)
            grad_up = tl.where(tl.abs(raw_up) > _LIMIT, 0.0, grad_up)
        tl.store(grad_x + address, grad_gate, inside)
        tl.store(grad_x + address + width, grad_up, inside)
    if WEIGHTED:
        tl.store(grad_weight + row, tl.sum(weight_sums, 1), row < count)


@triton.jit
def _rotate(
    x, cos, sin, out, count, tokens, heads, half,
    sequence_stride, token_stride, head_stride, angle_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate rows, each a head of a token.

    x comes with the strides of its sequences, tokens and heads, the angles with that of a sequence.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (column < half)[None, :]
    sequence = (row // heads // tokens).to(tl.int64)
    position = (row // heads % tokens).to(tl.int64)
    head = (row % heads).to(tl.int64)
    address = (sequence * sequence_stride + position * token_stride + head * head_stride)[
        :, None
    ] + column[None, :]
    angle = (sequence * angle_stride + position * half)[:, None] + column[None, :]
    c = tl.load(cos + angle, inside, 0.0)
    s = tl.load(sin + angle, inside, 0.0)
    first = tl.load(x + address, inside, 0.0).to(tl.float32)
    second = tl.load(x + address + half, inside, 0.0).to(tl.float32)
    out_address = row.to(tl.int64)[:, None] * 2 * half + column[None, :]
    tl.store(out + out_address, first * c - second * s, inside)
    tl.store(out + out_address + half, second * c + first * s, inside)


def permute(x_TH: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
    """Compute KernelSet.permute."""
    x = x_TH.contiguous()
    out = x_TH.new_empty((len(tokens_R), x_TH.shape[1]))
    if out.numel():
        rows, block = tile_shape(x.shape[1])
        grid = (triton.cdiv(len(out), rows), triton.cdiv(x.shape[1], block))
        _permute[grid](x, tokens_R.contiguous(), out, len(out), x.shape[1], ROWS=rows, BLOCK=block)
    return out


def unpermute(rows_RH: torch.Tensor, rows_Tk: torch.Tensor, is_complete: bool) -> torch.Tensor:
    """Compute KernelSet.unpermute; a slot without a row is known by its row number R."""
    routed = rows_RH.contiguous()
    tokens, slots = rows_Tk.shape
    width = rows_RH.shape[1]
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
    """Compute KernelSet.swiglu."""
    x = x_R2F.contiguous()
    count, width = len(x_R2F), x_R2F.shape[1] // 2
    out = x.new_empty((count, width))
    if out.numel():
        rows, block = tile_shape(width)
        grid = (triton.cdiv(count, rows), triton.cdiv(width, block))
        _swiglu[grid](
            x,
            pointer_or(weight_R, x),
            out,
            count,
            width,
            CLAMPED=clamped,
            WEIGHTED=weight_R is not None,
            ROWS=rows,
            BLOCK=block,
        )
    return out


def swiglu_backward(
    grad_RF: torch.Tensor, x_R2F: torch.Tensor, weight_R: torch.Tensor | None, clamped: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute KernelSet.swiglu_backward."""
    x = x_R2F.contiguous()
    grad = grad_RF.contiguous()
    count, width = grad_RF.shape
    grad_x = torch.empty_like(x)
    grad_weight = None
    if weight_R is not None:
        grad_weight = torch.empty_like(weight_R, memory_format=torch.contiguous_format)
    if grad.numel():
        rows, block = tile_shape(width)
        _swiglu_backward[(triton.cdiv(count, rows),)](
            grad,
            x,
            pointer_or(weight_R, x),
            grad_x,
            pointer_or(grad_weight, x),
            count,
            width,
            CLAMPED=clamped,
            WEIGHTED=weight_R is not None,
            ROWS=rows,
            BLOCK=block,
        )
    return grad_x, grad_weight


def rotate(x_BSHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Compute KernelSet.rotate."""
    x = x_BSHD if x_BSHD.stride(-1) == 1 else x_BSHD.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        _, tokens, heads, width = x.shape
        count = out.numel() // width
        half = width // 2
        rows, block = tile_shape(half)
        # A program holds two numbers, two angles and their addresses for each element: registers
        # hold no more than half as many elements.
        rows //= 2
        # Angles that all sequences share get the stride 0.
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


def pointer_or(tensor: torch.Tensor | None, placeholder: torch.Tensor) -> torch.Tensor:
    """Return a tensor in place of None, which kernels do not take; they never read it."""
    return placeholder if tensor is None else tensor.contiguous()


def tile_shape(width: int, max_columns: int = _MAX_COLUMNS) -> tuple[int, int]:
    """Return how many rows and columns a program holds of rows of `width`."""
    block = min(max_columns, triton.next_power_of_2(width))
    return _PROGRAM_NUMEL // block, block


def flatten_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [...,K] as [N,K] with adjacent columns and one stride of rows.

    It is a view where it can be.
    """
    rows = x.flatten(0, -2)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
