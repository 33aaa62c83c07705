"""Attention without a flash kernel: plain products for fp32, and sliding windows on a CPU.

Attention by plain products: for devices whose flash kernel does not take fp32. It has the arguments
of torch's flash attention on a CPU, and the attended pairs of its masks. It is an operation of its
own, so that its FLOPs count as those of attention on any device.

Shapes: q [B,H,S,D], k and v [B,G,K,*] of G key heads, which H / G query heads share.

Sliding windows in attention on a CPU, whose kernel takes a mask. The band of attended pairs is
computed in blocks of queries. The last query and the last key given are of one position, so query i
attends the keys from i + K - Q - window + 1 on, and causally none after i + K - Q, where Q and K
count the queries and the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moewright.engine.kernels.operations import OperationWork, define_operation
from moewright.spec.ledger import FlopOp

# Scores that lie in memory at a time.
_BLOCK_SCORES = 1 << 26


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the natural log of the sum of exponentials."""
    sharing = q.shape[1] // k.shape[1]
    scale = scale or q.shape[3] ** -0.5
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3])
    for rows in _row_blocks(q, k):
        scores = _scores(q, k, rows, causal, attn_mask, scale)
        block_lse = scores.logsumexp(-1)
        # By the log-sum-exp, as backward makes the shares again.
        shares = torch.exp(scores - block_lse[..., None])
        out[:, :, rows] = _split(shares, sharing).matmul(v[:, :, None]).flatten(1, 2)
        lse[:, :, rows] = block_lse
    return out, lse


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: Any,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v; `rest` are out, lse, dropout and causal."""
    out, lse, _, causal = rest
    sharing = q.shape[1] // k.shape[1]
    scale = scale or q.shape[3] ** -0.5
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for rows in _row_blocks(q, k):
        scores = _scores(q, k, rows, causal, attn_mask, scale)
        shares = _split(torch.exp(scores - lse[:, :, rows, None]), sharing)
        block_grad = _split(grad[:, :, rows], sharing)
        dv += shares.mT.matmul(block_grad).sum(2)
        # The slope of a softmax takes off what all shares have in common: sum(grad * out).
        own = (grad[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True)
        share_grads = block_grad.matmul(v[:, :, None].mT) - _split(own, sharing)
        score_grads = shares * share_grads * scale
        dq[:, :, rows] = score_grads.matmul(k[:, :, None]).flatten(1, 2)
        dk += score_grads.mT.matmul(_split(q[:, :, rows], sharing)).sum(2)
    return dq, dk, dv


def _row_blocks(q: torch.Tensor, k: torch.Tensor) -> list[slice]:
    step = max(1, _BLOCK_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(start, start + step) for start in range(0, q.shape[2], step)]


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    rows: slice,
    causal: bool,
    attn_mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    queries = _split(q[:, :, rows], q.shape[1] // k.shape[1])
    scores = queries.matmul(k[:, :, None].mT).flatten(1, 2) * scale
    if causal:
        hidden = scores.new_ones(scores.shape[2:], dtype=torch.bool).triu(rows.start + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if attn_mask is None:
        return scores
    return scores + attn_mask[rows]


def _split(x: torch.Tensor, sharing: int) -> torch.Tensor:
    """Group query heads by the key head that they share: [B,H,...] -> [B,G,sharing,...]."""
    return x.unflatten(1, (-1, sharing))


def _forward_shapes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3])


def _backward_shapes(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *_: Any,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def attention_flops(q: Any, v: Any, causal: bool, mask: Any) -> int:
    """Count the scores and values of q [B,heads,S,Dq] over v [B,kv_heads,K,Dv].

    All pairs of a query and a key count, or the causal half of them, or those that a mask leaves.
    """
    batch, heads, queries, q_dim = q.shape
    q_dim = getattr(q, "true_width", q_dim)
    v_dim = getattr(v, "true_width", v.shape[3])
    twice_pairs = (1 if causal else 2) * int(queries) * int(v.shape[2])
    if mask is not None:
        twice_pairs = mask.twice_pairs
    # A pair costs two FLOPs in each dim of its score and of its value.
    return int(twice_pairs) * int(batch) * int(heads) * (int(q_dim) + int(v_dim))


EXACT_ATTENTION = define_operation(
    "exact_attention(Tensor q, Tensor k, Tensor v, float dropout, bool causal, *, "
    "Tensor? attn_mask=None, float? scale=None) -> (Tensor, Tensor)",
    _forward,
    _forward_shapes,
    OperationWork(
        op=FlopOp.ATTENTION,
        count=lambda q, k, v, dropout, causal, *, attn_mask=None, scale=None: attention_flops(
            q, v, causal, attn_mask
        ),
    ),
)
EXACT_ATTENTION_BACKWARD = define_operation(
    "exact_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "float dropout, bool causal, *, Tensor? attn_mask=None, float? scale=None) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_shapes,
    OperationWork(
        op=FlopOp.ATTENTION,
        count=lambda grad, q, k, v, out, lse, dropout, causal, *, attn_mask=None, scale=None: (
            2 * attention_flops(q, v, causal, attn_mask)
        ),
    ),
)


_MIN_QUERIES = 128  # of a block: fewer would leave the kernel little to do


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowBlock:
    """A slice of queries and the slice of keys they may attend.

    Query i attends key j where low <= j - i <= high.
    """

    queries: slice
    keys: slice
    low: int
    high: int

    def build_mask(self, like: torch.Tensor) -> torch.Tensor:
        """Build what is added to the scores: 0, or -inf where a query does not attend a key.

        Its attribute `twice_pairs` tells the FLOP counter the number of attended pairs, which it
        may not be able to read from the values.
        """
        rows = self.queries.stop - self.queries.start
        columns = self.keys.stop - self.keys.start
        ones = like.new_ones(rows, columns, dtype=torch.bool)
        hidden = ones.triu(self.high + 1) | ones.tril(self.low - 1)
        mask = torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
        mask.twice_pairs = self._count_twice_pairs(rows, columns)  # type: ignore[attr-defined]
        return mask

    def _count_twice_pairs(self, rows: int, columns: int) -> int:
        """Return twice the attended pairs; a query's own key is a half (rules.context_parallel).

        A query's own key is among its keys where the mask hides the keys after it.
        """
        attended = sum(
            min(columns, row + self.high + 1) - max(0, row + self.low) for row in range(rows)
        )
        own = rows if self.high < columns else 0
        return 2 * attended - own


def window_blocks(queries: int, keys: int, window: int, *, causal: bool) -> Iterator[WindowBlock]:
    """Yield the blocks of `queries` queries over `keys` keys; every query attends at least one."""
    step = max(window, _MIN_QUERIES)
    shift = keys - queries
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        # Keys come before queries by `shift`, as the last of both have one position.
        first = max(0, start + shift - window + 1)
        last = stop + shift if causal else keys
        own_key = start + shift - first  # the place of the first query's own key in the block
        yield WindowBlock(
            queries=slice(start, stop),
            keys=slice(first, last),
            low=own_key - window + 1,
            high=own_key if causal else last - first,
        )
