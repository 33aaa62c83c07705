"""Attention as each device's kernel computes it, with its log-sum-exp.

It runs over whole sequences, inside segments of packed documents, and under a sliding window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F

from moewright.engine.kernels.exact_attention import (
    EXACT_ATTENTION,
    EXACT_ATTENTION_BACKWARD,
    window_blocks,
)
from moewright.engine.kernels.matmul import widen
from moewright.engine.torch_private import (
    FLASH,
    FLASH_BACKWARD,
    FLASH_FOR_CPU,
    FLASH_FOR_CPU_BACKWARD,
    FLASH_ROWS,
    FLASH_ROWS_BACKWARD,
)

_SLOPE_TERMS = 3  # three of 8 bits hold the 24 of an fp32 slope
_POSITION_BASE = 256  # integers up to it are exact in bf16
_BIAS_COLUMNS = 8  # flash attention takes heads of a multiple of eight columns

# The log-sum-exp of the scores and, on CUDA, the kernel's random state: what backward needs beside
# the inputs and the output.
AttentionState = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Segments of tokens that attend only each other, in the order of a micro-batch, row after row.

    `lengths` counts their tokens; `cu_seqlens`, int32 [segments + 1] on the device, holds where
    each starts and the last one ends.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor

    @property
    def slices(self) -> Iterator[slice]:
        stop = 0
        for length in self.lengths:
            start, stop = stop, stop + length
            yield slice(start, stop)


def build_segments(lengths: Sequence[int], device: torch.device) -> Segments:
    """Return the segments of these lengths."""
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return Segments(lengths=tuple(lengths), cu_seqlens=cu_seqlens)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearBias:
    """A bias of scores: slope [H] fp32 of the query's head times the position of the key.

    `positions` int64 are those of a row of keys, the same in all rows, or of all rows in order.

    A softmax does not see what all keys of a query have in common, so it is the same as minus the
    slope times the distance between query and key (engine.model.attention), in blocks of keys too.
    """

    slopes: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMask:
    """A rule that says which keys each query attends.

    With `segments` each segment of queries attends the segment of the same index in `key_segments`,
    or itself where these are None: then, and only then, the mask is causal inside segments. With a
    `window` a query attends the last `window` keys up to its own position, where the last query and
    the last key have the same position; 0 is no window. Of the columns of queries and keys the last
    `bias_columns` carry a bias and are no part of the head.
    """

    causal: bool = True
    window: int = 0
    segments: Segments | None = None
    key_segments: Segments | None = None
    bias: LinearBias | None = None
    bias_columns: int = 0


CAUSAL = AttentionMask()


def attention(
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGD: torch.Tensor,
    mask: AttentionMask = CAUSAL,
) -> tuple[torch.Tensor, AttentionState]:
    """Return the output [B,S,H,D] of H query heads over G key heads, and the state for backward.

    The state begins with the natural-log sum of exponentials in fp32, [B,H,S], or [1,H,T] over
    T = B*S tokens with segments. Without a causal mask every query attends every key, and there may
    be more keys than queries, or fewer.
    """
    if mask.bias is not None:
        return attention(*_append_bias(q_BSHD, k_BSGD, mask.bias), v_BSGD, _carry_bias(mask))
    if mask.segments is not None:
        return _varlen_attention(q_BSHD, k_BSGD, v_BSGD, mask)
    if mask.window and not _runs_in_blocks(q_BSHD):  # only the kernel of segments takes windows
        return _attend_rows_as_segments(q_BSHD, k_BSGD, v_BSGD, mask)
    q, k, v = (widen(x).transpose(1, 2) for x in (q_BSHD, k_BSGD, v_BSGD))
    v_width = v.shape[-1]
    q = _mark_width(q, mask)
    if _runs_in_blocks(q):
        out, lse = _forward_in_blocks(q, k, _pad_columns(v, q), mask)
        return out[..., :v_width].transpose(1, 2).to(q_BSHD.dtype).contiguous(), (lse,)
    out, lse, _, _, _, _, seed, offset, *_ = FLASH(
        q, k, _pad_columns(v, q), 0.0, mask.causal, **_scale(q, mask)
    )
    return out[..., :v_width].transpose(1, 2).contiguous(), (lse, seed, offset)


def attention_backward(
    grad_BSHD: torch.Tensor,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGD: torch.Tensor,
    out_BSHD: torch.Tensor,
    state: AttentionState,
    mask: AttentionMask = CAUSAL,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, in their shapes and dtypes.

    Where `k` and `v` hold only some of the keys that the queries attended, `out` and the
    log-sum-exp in `state` are over all of them; the gradients are then the part of these keys.
    """
    if mask.bias is not None:
        width = q_BSHD.shape[-1]
        q_BSHD, k_BSGD = _append_bias(q_BSHD, k_BSGD, mask.bias)
        dq, dk, dv = attention_backward(
            grad_BSHD, q_BSHD, k_BSGD, v_BSGD, out_BSHD, state, _carry_bias(mask)
        )
        return dq[..., :width].contiguous(), dk[..., :width].contiguous(), dv
    # Before the window: in segments it is the kernel's, or that of each segment.
    if mask.segments is not None:
        return _varlen_attention_backward(grad_BSHD, q_BSHD, k_BSGD, v_BSGD, out_BSHD, state, mask)
    if mask.window and not _runs_in_blocks(q_BSHD):
        lse, *random_state = state
        rows = _rows_as_segments(q_BSHD, k_BSGD, mask)
        # The kernel of segments has the log-sum-exp by head and row after row, [1,H,B*S].
        state = (lse.transpose(0, 1).flatten(1)[None].contiguous(), *random_state)
        return _varlen_attention_backward(grad_BSHD, q_BSHD, k_BSGD, v_BSGD, out_BSHD, state, rows)
    inputs = (grad_BSHD, q_BSHD, k_BSGD, v_BSGD, out_BSHD)
    grad, q, k, v, out = (widen(x).transpose(1, 2) for x in inputs)
    v_width = v.shape[-1]
    q = _mark_width(q, mask)
    grad, v, out = (_pad_columns(x, q) for x in (grad, v, out))
    if _runs_in_blocks(q):
        dq, dk, dv = _backward_in_blocks(grad, q, k, v, out, state[0], mask)
    else:
        dq, dk, dv = _flash_backward(grad, q, k, v, out, state, mask)
    dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv[..., :v_width]))
    return dq.to(q_BSHD.dtype), dk.to(k_BSGD.dtype), dv.to(v_BSGD.dtype)


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    state: AttentionState,
    mask: AttentionMask,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v [B,heads,S,D] on CUDA; its kernel takes shared key heads."""
    lse, seed, offset = state
    dq, dk, dv = FLASH_BACKWARD(
        grad,
        q,
        k,
        v,
        out,
        lse,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        mask.causal,
        seed,
        offset,
        **_scale(q, mask),
    )
    return dq, dk, dv


def _runs_in_blocks(x: torch.Tensor) -> bool:
    """Tell whether kernels without windows and segments run: on a CPU, and in fp32.

    Flash attention takes 16-bit operands alone.
    """
    return x.device.type == "cpu" or x.dtype == torch.float32


def _attend_rows_as_segments(
    q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor, mask: AttentionMask
) -> tuple[torch.Tensor, AttentionState]:
    """Attend inside whole sequences by the kernel of segments; the log-sum-exp is [B,H,S]."""
    rows, length = q_BSHD.shape[:2]
    segments = _rows_as_segments(q_BSHD, k_BSGD, mask)
    out, (lse, *random_state) = _varlen_attention(q_BSHD, k_BSGD, v_BSGD, segments)
    lse_BHS = lse[0].unflatten(1, (rows, length)).transpose(0, 1).contiguous()
    return out, (lse_BHS, *random_state)


def _forward_in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp of q, k, v [B,heads,S,D]."""
    kernel = EXACT_ATTENTION
    if q.device.type == "cpu":
        kernel = FLASH_FOR_CPU
    if not mask.window:
        out, lse = kernel(q, k, v, 0.0, mask.causal, **_scale(q, mask))
        return out, lse
    outs, lses = [], []
    for block in window_blocks(q.shape[2], k.shape[2], mask.window, causal=mask.causal):
        queries = _slice_positions(q, block.queries)
        keys, values = (_slice_positions(x, block.keys) for x in (k, v))
        hidden = block.build_mask(q)
        out, lse = kernel(queries, keys, values, 0.0, False, attn_mask=hidden, **_scale(q, mask))
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _backward_in_blocks(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: AttentionMask,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v [B,heads,S,D]."""
    kernel = EXACT_ATTENTION_BACKWARD
    if q.device.type == "cpu":
        kernel = FLASH_FOR_CPU_BACKWARD
    if not mask.window:
        return tuple(kernel(grad, q, k, v, out, lse, 0.0, mask.causal, **_scale(q, mask)))
    # In fp32, because a key is in the window of several blocks, whose parts are summed.
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    for block in window_blocks(q.shape[2], k.shape[2], mask.window, causal=mask.causal):
        block_grad, queries, block_out = (
            _slice_positions(x, block.queries) for x in (grad, q, out)
        )
        keys, values = (_slice_positions(x, block.keys) for x in (k, v))
        block_lse = lse[:, :, block.queries].contiguous()
        block_dq, block_dk, block_dv = kernel(
            block_grad,
            queries,
            keys,
            values,
            block_out,
            block_lse,
            0.0,
            False,
            attn_mask=block.build_mask(q),
            **_scale(q, mask),
        )
        dq[:, :, block.queries] += block_dq
        dk[:, :, block.keys] += block_dk
        dv[:, :, block.keys] += block_dv
    return dq, dk, dv


def _varlen_attention(
    q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor, mask: AttentionMask
) -> tuple[torch.Tensor, AttentionState]:
    """Attend inside each segment; no work is done for pairs of different segments."""
    assert mask.segments is not None  # whoever calls this has segments
    queries, keys = mask.segments, mask.key_segments or mask.segments
    q, k, v = (x.flatten(0, 1) for x in (q_BSHD, k_BSGD, v_BSGD))
    shape = (*q_BSHD.shape[:3], v.shape[-1])
    if _runs_in_blocks(q):
        inside = replace(mask, segments=None, key_segments=None)
        out = v.new_empty((*q.shape[:2], v.shape[-1]))
        lse = q.new_empty((1, q.shape[1], q.shape[0]), dtype=torch.float32)
        for q_slice, k_slice in zip(queries.slices, keys.slices, strict=True):
            segment_out, (lse[:, :, q_slice],) = attention(
                q[None, q_slice], k[None, k_slice], v[None, k_slice], inside
            )
            out[q_slice] = segment_out[0]
        return out.view(shape), (lse,)
    out, lse, seed, offset, _ = FLASH_ROWS(
        _mark_width(q, mask),
        k,
        _pad_columns(v, q),
        queries.cu_seqlens,
        keys.cu_seqlens,
        max(queries.lengths),
        max(keys.lengths),
        0.0,
        mask.causal,
        False,
        **_window_sizes(mask),
        **_scale(q, mask),
    )
    return out[..., : v.shape[-1]].contiguous().view(shape), (lse[None], seed, offset)


def _varlen_attention_backward(
    grad_BSHD: torch.Tensor,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGD: torch.Tensor,
    out_BSHD: torch.Tensor,
    state: AttentionState,
    mask: AttentionMask,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert mask.segments is not None  # whoever calls this has segments
    queries, keys = mask.segments, mask.key_segments or mask.segments
    inputs = (grad_BSHD, q_BSHD, k_BSGD, v_BSGD, out_BSHD)
    grad, q, k, v, out = (x.flatten(0, 1) for x in inputs)
    if _runs_in_blocks(q):
        inside = replace(mask, segments=None, key_segments=None)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for q_slice, k_slice in zip(queries.slices, keys.slices, strict=True):
            segment_dq, segment_dk, segment_dv = attention_backward(
                grad[None, q_slice],
                q[None, q_slice],
                k[None, k_slice],
                v[None, k_slice],
                out[None, q_slice],
                (state[0][:, :, q_slice].contiguous(),),
                inside,
            )
            dq[q_slice] = segment_dq[0]
            dk[k_slice] = segment_dk[0]
            dv[k_slice] = segment_dv[0]
    else:
        lse, seed, offset = state
        dq, dk, dv = FLASH_ROWS_BACKWARD(
            _pad_columns(grad, q),
            _mark_width(q, mask),
            k,
            _pad_columns(v, q),
            _pad_columns(out, q),
            lse[0],
            queries.cu_seqlens,
            keys.cu_seqlens,
            max(queries.lengths),
            max(keys.lengths),
            0.0,
            mask.causal,
            seed,
            offset,
            **_window_sizes(mask),
            **_scale(q, mask),
        )
        dv = dv[..., : v.shape[-1]]
    return dq.view(q_BSHD.shape), dk.view(k_BSGD.shape), dv.view(v_BSGD.shape)


def _window_sizes(mask: AttentionMask) -> dict[str, int]:
    """Return how far from a query its keys may lie, as flash attention wants it.

    -1 is any distance.
    """
    if not mask.window:
        return {}
    # The query's own key is one of the window.
    return {"window_size_left": mask.window - 1, "window_size_right": 0 if mask.causal else -1}


def _rows_as_segments(
    q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, mask: AttentionMask
) -> AttentionMask:
    """Return the same mask with every whole sequence as a segment."""
    key_segments = None if mask.causal else _row_segments(k_BSGD)
    return replace(mask, segments=_row_segments(q_BSHD), key_segments=key_segments)


def _row_segments(x_BSHD: torch.Tensor) -> Segments:
    rows, length = x_BSHD.shape[:2]
    starts = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=x_BSHD.device)
    return Segments(lengths=(length,) * rows, cu_seqlens=starts)


def _append_bias(
    q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, bias: LinearBias
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append columns to queries and keys whose products are the bias, so that any kernel adds it.

    Numbers of 16 bits cannot hold a slope, nor a position: the slope is a sum of three of them, and
    the position has two digits to the base 256. Two columns of zeros make a multiple of eight.
    """
    # In fp32: each term takes what the ones before have left.
    rest = bias.slopes * q_BSHD.shape[-1] ** 0.5  # which the kernel divides by
    query_columns = []
    for _ in range(_SLOPE_TERMS):
        term = rest.to(q_BSHD.dtype)
        query_columns += [term * _POSITION_BASE, term]
        rest = rest - term.float()
    digits = [bias.positions // _POSITION_BASE, bias.positions % _POSITION_BASE]
    key_columns = [digit.to(k_BSGD.dtype) for digit in digits] * _SLOPE_TERMS
    zeros = _BIAS_COLUMNS - 2 * _SLOPE_TERMS
    query_columns += [torch.zeros_like(query_columns[0])] * zeros
    key_columns += [torch.zeros_like(key_columns[0])] * zeros
    of_heads = torch.stack(query_columns, -1).expand(*q_BSHD.shape[:3], -1)
    of_keys = torch.stack(key_columns, -1).view(-1, k_BSGD.shape[1], 1, _BIAS_COLUMNS)
    of_keys = of_keys.expand(*k_BSGD.shape[:3], -1)
    return torch.cat((q_BSHD, of_heads), -1), torch.cat((k_BSGD, of_keys), -1)


def _carry_bias(mask: AttentionMask) -> AttentionMask:
    """Return the mask of queries and keys to which the bias has been appended."""
    return replace(mask, bias=None, bias_columns=_BIAS_COLUMNS)


def _scale(q: torch.Tensor, mask: AttentionMask) -> dict[str, float]:
    """Return the factor of scores where it is not that of the width of `q`."""
    if not mask.bias_columns:
        return {}
    return {"scale": (q.shape[-1] - mask.bias_columns) ** -0.5}


def _mark_width(q: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """Tell the FLOP counter how many columns of queries are those of a head."""
    if mask.bias_columns:
        q.true_width = q.shape[-1] - mask.bias_columns  # type: ignore[attr-defined]
    return q


def _slice_positions(x: torch.Tensor, positions: slice) -> torch.Tensor:
    """Slice [B,heads,S,D] by positions and keep `true_width` (see `_pad_columns`)."""
    part = x[:, :, positions]
    if hasattr(x, "true_width"):
        part.true_width = x.true_width  # type: ignore[attr-defined]
    return part


def _pad_columns(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Pad x with zero columns to the width of `like`: the kernels want one head size.

    The attribute `true_width` tells the FLOP counter how many columns are not padding.
    """
    missing = like.shape[-1] - x.shape[-1]
    if missing:
        x = F.pad(x, (0, missing))
        x.true_width = x.shape[-1] - missing  # type: ignore[attr-defined]
    return x
