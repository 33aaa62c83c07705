"""Attention as each device's kernel computes it, with its log-sum: whole, of runs of tokens, under
a sliding window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moewright.engine.kernels.matmul import widen
from moewright.engine.kernels.sliding_window import window_blocks

_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Tokens that attend only each other, in the order in which they lie in a micro-batch, row
    after row: the lengths of the runs, and where each starts and the last one ends, int32 [runs +
    1] on the device.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor

    @property
    def slices(self) -> Iterator[slice]:
        stop = 0
        for length in self.lengths:
            start, stop = stop, stop + length
            yield slice(start, stop)


def varlen_attention(
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGD: torch.Tensor,
    runs: Segments,
    others: Segments | None = None,
    *,
    window: int = 0,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """`attention` inside each run; no work is done for pairs of different runs. The log-sum is
    [1,H,T].

    With `others` the keys are not those of the queries' tokens: each run of queries attends all of
    the run of keys in the same place.
    """
    q, k, v = (x.flatten(0, 1) for x in (q_BSHD, k_BSGD, v_BSGD))
    shape, seen = (*q_BSHD.shape[:3], v.shape[-1]), others or runs
    if q.device.type == "cpu":
        out, lse = v.new_empty((*q.shape[:2], v.shape[-1])), torch.empty(1, q.shape[1], q.shape[0])
        for part, keys in zip(runs.slices, seen.slices, strict=True):
            made, (lse[:, :, part],) = attention(
                q[None, part], k[None, keys], v[None, keys], causal=others is None, window=window
            )
            out[part] = made[0]
        return out.view(shape), (lse,)
    longest, furthest = max(runs.lengths), max(seen.lengths)
    sides = _sides(window, causal=others is None)
    out, lse, seed, offset, _ = _aten._flash_attention_forward(
        q,
        k,
        _as_wide(v, q),
        runs.cu_seqlens,
        seen.cu_seqlens,
        longest,
        furthest,
        0.0,
        others is None,
        False,
        **sides,
    )
    return out[..., : v.shape[-1]].contiguous().view(shape), (lse[None], seed, offset)


def varlen_attention_backward(
    grad_BSHD: torch.Tensor,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGD: torch.Tensor,
    out_BSHD: torch.Tensor,
    rest: tuple[torch.Tensor, ...],
    runs: Segments,
    others: Segments | None = None,
    *,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, in their shapes and dtypes; `out` and the log-sum as for
    `attention_backward`."""
    grad, q, k, v, out = (x.flatten(0, 1) for x in (grad_BSHD, q_BSHD, k_BSGD, v_BSGD, out_BSHD))
    seen = others or runs
    if q.device.type == "cpu":
        grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for part, keys in zip(runs.slices, seen.slices, strict=True):
            of_part, asking, given = (x[None, part] for x in (grad, q, out))
            lse = rest[0][:, :, part].contiguous()
            made = attention_backward(
                of_part,
                asking,
                k[None, keys],
                v[None, keys],
                given,
                (lse,),
                causal=others is None,
                window=window,
            )
            for whole, place, piece in zip(grads, (part, keys, keys), made, strict=True):
                whole[place] = piece[0]
    else:
        lse, seed, offset = rest
        longest, furthest = max(runs.lengths), max(seen.lengths)
        wide, causal = (_as_wide(x, q) for x in (v, out)), others is None
        sides = _sides(window, causal=causal)
        starts, ends = (runs.cu_seqlens, seen.cu_seqlens), (longest, furthest)
        dq, dk, dv = _aten._flash_attention_backward(
            _as_wide(grad, q),
            q,
            k,
            *wide,
            lse[0],
            *starts,
            *ends,
            0.0,
            causal,
            seed,
            offset,
            **sides,
        )
        grads = (dq, dk, dv[..., : v.shape[-1]])
    dq, dk, dv = (g.view(x.shape) for g, x in zip(grads, (q_BSHD, k_BSGD, v_BSGD), strict=True))
    return dq, dk, dv


def attention(
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGD: torch.Tensor,
    *,
    causal: bool = True,
    window: int = 0,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Attention, G key heads shared by H query heads; returns the output [B,S,H,D] and what
    backward needs.

    The first of the latter is the natural-log sum of exponentials [B,H,S] in fp32; CUDA adds its
    random state. Without `causal` every query attends every key, and there may be more keys than
    queries, or fewer. With a `window` a query attends of these the last so many up to its own
    place, which is the last key's for the last query.
    """
    if (
        window and q_BSHD.device.type != "cpu"
    ):  # the kernel of runs has windows; the log-sum is as there
        others = None if causal else _rows(k_BSGD)
        return varlen_attention(q_BSHD, k_BSGD, v_BSGD, _rows(q_BSHD), others, window=window)
    q, k, v = (widen(x).transpose(1, 2) for x in (q_BSHD, k_BSGD, v_BSGD))
    width = v.shape[-1]
    if q.device.type == "cpu":
        out, lse = _forward_on_cpu(q, k, _as_wide(v, q), causal, window)
        return out[..., :width].transpose(1, 2).to(q_BSHD.dtype).contiguous(), (lse,)
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    out, *rest = _aten._scaled_dot_product_flash_attention(q, k, _as_wide(v, q), 0.0, causal)
    lse, seed, offset = rest[0], rest[5], rest[6]
    return out[..., :width].transpose(1, 2).contiguous(), (lse, seed, offset)


def _forward_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum of [B,heads,S,D]."""
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu
    if not window:
        out, lse = kernel(q, k, v, 0.0, causal)
        return out, lse
    parts = []
    for block in window_blocks(q.shape[2], k.shape[2], window, causal=causal):
        keys, values = (_cut(x, block.keys) for x in (k, v))
        parts.append(
            kernel(_cut(q, block.queries), keys, values, 0.0, False, attn_mask=block.build_mask(q))
        )
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _backward_on_cpu(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    window: int,
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v [B,heads,S,D]."""
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    if not window:
        return tuple(kernel(grad, q, k, v, out, lse, 0.0, causal))
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    for block in window_blocks(q.shape[2], k.shape[2], window, causal=causal):
        asking, given, made = (_cut(x, block.queries) for x in (q, grad, out))
        keys, values = (_cut(x, block.keys) for x in (k, v))
        seen = lse[:, :, block.queries].contiguous()
        found = kernel(
            given, asking, keys, values, made, seen, 0.0, False, attn_mask=block.build_mask(q)
        )
        for sums, places, part in zip(
            (of_q, of_k, of_v), (block.queries, *2 * (block.keys,)), found, strict=True
        ):
            sums[:, :, places] += part
    return of_q, of_k, of_v


def _cut(x: torch.Tensor, places: slice) -> torch.Tensor:
    """Places of [B,heads,S,D], and what is known of how wide it truly is."""
    part = x[:, :, places]
    if hasattr(x, "true_width"):
        part.true_width = x.true_width  # type: ignore[attr-defined]
    return part


def _sides(window: int, *, causal: bool) -> dict[str, int]:
    """How far from a query's own place its keys lie, as the kernel of runs wants it: -1 is any
    distance."""
    return (
        {"window_size_left": window - 1, "window_size_right": 0 if causal else -1} if window else {}
    )


def _rows(x_BSHD: torch.Tensor) -> Segments:
    """Whole sequences, each a run."""
    count, length = x_BSHD.shape[:2]
    starts = torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=x_BSHD.device)
    return Segments(lengths=(length,) * count, cu_seqlens=starts)


def _as_wide(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x with columns of zeros up to the width of `like`: the kernels want one head size.
    `true_width` tells whoever counts their FLOPs how many columns are no padding.
    """
    missing = like.shape[-1] - x.shape[-1]
    if missing:
        x = F.pad(x, (0, missing))
        x.true_width = x.shape[-1] - missing  # type: ignore[attr-defined]
    return x


def attention_backward(
    grad_BSHD: torch.Tensor,
    q_BSHD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGD: torch.Tensor,
    out_BSHD: torch.Tensor,
    rest: tuple[torch.Tensor, ...],
    *,
    causal: bool = True,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, in their shapes and dtypes. Where the keys given are only some of
    those attended, `out` and the log-sum in `rest` are over all of them, and so the gradients are
    these keys' part.
    """
    if window and q_BSHD.device.type != "cpu":
        rows, others = _rows(q_BSHD), None if causal else _rows(k_BSGD)
        return varlen_attention_backward(
            grad_BSHD, q_BSHD, k_BSGD, v_BSGD, out_BSHD, rest, rows, others, window=window
        )
    grad, q, k, v, out = (
        widen(x).transpose(1, 2) for x in (grad_BSHD, q_BSHD, k_BSGD, v_BSGD, out_BSHD)
    )
    width = v.shape[-1]
    grad, v, out = (_as_wide(x, q) for x in (grad, v, out))
    if q.device.type == "cpu":
        got = _backward_on_cpu(grad, q, k, v, out, rest[0], causal, window)
    else:
        lse, seed, offset = rest
        heads, share = k.shape[1], q.shape[1] // k.shape[1]
        wide_k, wide_v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            wide_k,
            wide_v,
            out,
            lse,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            seed,
            offset,
        )
        got = (dq, *(g.unflatten(1, (heads, share)).sum(2) for g in (dk, dv)))
    dq, dk, dv = (g.transpose(1, 2) for g in (got[0], got[1], got[2][..., :width]))
    return dq.to(q_BSHD.dtype), dk.to(k_BSGD.dtype), dv.to(v_BSGD.dtype)
