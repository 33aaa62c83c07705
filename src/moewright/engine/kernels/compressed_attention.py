"""Attention to a window of tokens and to compressed blocks of them (DeepSeek-V4).

All heads share one key, which is also the value, of every token and of every block; a sink for
each head takes a share of every query. Plain products in blocks of queries, on any device, as
operations of their own, so that their FLOPs count by the published formula (docs/formulas.md 13).

Shapes: B sequences of S tokens, M blocks of `rate` tokens each, H heads, keys D wide; K blocks
chosen for each query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from moewright.engine.kernels.operations import OperationWork, define_operation
from moewright.spec.ledger import FlopOp

# Scores that lie in memory at a time, and queries that share the keys of their windows.
_BLOCK_SCORES = 1 << 26
_MIN_ROWS = 128


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    blocks: torch.Tensor,
    chosen: torch.Tensor | None,
    sinks: torch.Tensor,
    bounds: torch.Tensor,
    reach: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B,S,H,D] of q for keys k [B,S,D] and blocks [B,M,D], and lse [B,H,S].

    A query reads a window of the last tokens of its document, its own included, and the blocks that
    `chosen` [B,S,K] names (-1 names none), or where that is None all of its document that end
    before the next token; `bounds` [B,S,3] say which these are (kernels.documents). `reach` are the
    window and the tokens of a block. The log-sum-exps hold the sinks [H].
    """
    window, rate = reach
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    for rows in _row_blocks(q, blocks, window):
        keys = _gather_keys(k, blocks, rows, window, rate)
        scores = _attention_scores(q, keys, chosen, bounds, rows, window)
        # A sink is one more logit, whose value is zero.
        lse[:, :, rows] = torch.logaddexp(scores.logsumexp(-1), sinks.float()[:, None])
        shares = torch.exp(scores - lse[:, :, rows, None])
        out[:, rows] = (shares @ keys[:, None]).transpose(1, 2).to(q.dtype)
    return out, lse


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    blocks: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k, blocks and sinks.

    `rest` are chosen, sinks, lse, the dot products [B,H,S] of grad and out, bounds and
    reach.
    """
    chosen, sinks, lse, dots, bounds, (window, rate) = rest
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dblocks = (torch.zeros_like(x, dtype=torch.float32) for x in (k, blocks))
    for rows in _row_blocks(q, blocks, window):
        keys = _gather_keys(k, blocks, rows, window, rate)
        scores = _attention_scores(q, keys, chosen, bounds, rows, window)
        shares = torch.exp(scores - lse[:, :, rows, None])
        block_grad = grad[:, rows].transpose(1, 2).float()
        share_grads = block_grad @ keys[:, None].mT - dots[:, :, rows, None]
        score_grads = share_grads.mul_(shares).mul_(q.shape[3] ** -0.5)
        dq[:, rows] = (score_grads @ keys[:, None]).transpose(1, 2).to(q.dtype)
        queries = q[:, rows].transpose(1, 2).float()
        dkeys = (shares.mT @ block_grad + score_grads.mT @ queries).sum(1)
        tokens = _window_tokens(rows, window)
        dk[:, tokens] += dkeys[:, : tokens.stop - tokens.start]
        # Blocks that end after the last of these queries are among no keys.
        dblocks[:, : rows.stop // rate] += dkeys[:, tokens.stop - tokens.start :]
    dsinks = -(torch.exp(sinks.float()[:, None] - lse) * dots).sum((0, 2))
    return dq, dk.to(k.dtype), dblocks.to(blocks.dtype), dsinks.to(sinks.dtype)


def _sum_block_shares(
    q: torch.Tensor,
    k: torch.Tensor,
    blocks: torch.Tensor,
    chosen: torch.Tensor,
    sinks: torch.Tensor,
    bounds: torch.Tensor,
    reach: Sequence[int],
) -> torch.Tensor:
    """Return the shares of chosen blocks in attention, summed over heads: [B,S,K] fp32."""
    window, rate = reach
    sums = q.new_zeros(chosen.shape, dtype=torch.float32)
    for rows in _row_blocks(q, blocks, window):
        visible = rows.stop // rate
        if not visible:
            continue
        keys = _gather_keys(k, blocks, rows, window, rate)
        scores = _attention_scores(q, keys, chosen, bounds, rows, window)
        lse = torch.logaddexp(scores.logsumexp(-1), sinks.float()[:, None])
        shares = torch.exp(scores[..., -visible:] - lse[..., None]).sum(1)
        places = chosen[:, rows]
        picked = shares.gather(-1, places.clamp(min=0).long())
        sums[:, rows] = picked.masked_fill(places < 0, 0.0)
    return sums


def _row_blocks(q: torch.Tensor, blocks: torch.Tensor, window: int) -> Iterator[slice]:
    sequences, length, heads = q.shape[:3]
    most = max(_MIN_ROWS, window)
    # Counted for the most rows of a block, whose windows reach over as many tokens.
    step = _BLOCK_SCORES // (sequences * heads * (window + most + blocks.shape[1]))
    step = max(1, min(step, most))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _window_tokens(rows: slice, window: int) -> slice:
    """Return the tokens that lie in the window of any of the queries."""
    return slice(max(0, rows.start - window + 1), rows.stop)


def _gather_keys(
    k: torch.Tensor, blocks: torch.Tensor, rows: slice, window: int, rate: int
) -> torch.Tensor:
    """Return the keys that queries may read, fp32: tokens of windows, then complete blocks."""
    return torch.cat(
        (k[:, _window_tokens(rows, window)], blocks[:, : rows.stop // rate]), 1
    ).float()


def _attention_scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    chosen: torch.Tensor | None,
    bounds: torch.Tensor,
    rows: slice,
    window: int,
) -> torch.Tensor:
    """Return the scaled scores [B,H,rows,keys] of some queries, -inf where they may not read."""
    scores = q[:, rows].transpose(1, 2).float() @ keys[:, None].mT * q.shape[3] ** -0.5
    tokens = _window_tokens(rows, window)
    visible = keys.shape[1] - (tokens.stop - tokens.start)
    places = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    start, first, stop = bounds[:, rows, :, None].unbind(2)
    numbers = torch.arange(tokens.start, tokens.stop, device=q.device)
    hidden = (numbers > places) | (numbers <= places - window) | (numbers < start)
    if chosen is None:
        columns = torch.arange(visible, device=q.device)
        is_left_out = (columns < first) | (columns >= stop)
    else:
        # A column more than there are blocks takes what is no block.
        picked = torch.where(chosen[:, rows] < 0, visible, chosen[:, rows]).long()
        is_left_out = scores.new_ones((len(q), len(places), visible + 1), dtype=torch.bool)
        is_left_out = is_left_out.scatter_(-1, picked, False)[..., :-1]
    hidden = torch.cat((hidden, is_left_out), -1)
    return scores.masked_fill_(hidden[:, None], float("-inf"))


def compressed_attention_flops(q: Any, blocks: Any, chosen: Any, window: int, rate: int) -> int:
    """Count the pairs of queries and keys, a query's own token and its last block a half.

    Each pair costs two FLOPs in every dim of its score, and of its value.
    """
    sequences, length, heads, width = (int(size) for size in q.shape)
    count = int(blocks.shape[1])
    twice_pairs = _twice_last_pairs(length, min(window, length))
    if chosen is None:
        twice_pairs += rate * count**2
    else:
        twice_pairs += rate * _twice_last_pairs(count, int(chosen.shape[2]))
    return 2 * sequences * heads * width * twice_pairs


def _twice_last_pairs(length: int, keys: int) -> int:
    """Return twice the pairs of `length` queries with their last `keys`, their own a half."""
    return keys * (keys + 1) + 2 * (length - keys) * keys - length


def _empty_outputs(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=torch.float32)


def _count_flops(
    q: Any, k: Any, blocks: Any, chosen: Any, sinks: Any, bounds: Any, reach: Sequence[int]
) -> int:
    return compressed_attention_flops(q, blocks, chosen, *reach)


COMPRESSED_ATTENTION = define_operation(
    "compressed_attention(Tensor q, Tensor k, Tensor blocks, Tensor? chosen, Tensor sinks, "
    "Tensor bounds, int[] reach) -> (Tensor, Tensor)",
    _forward,
    _empty_outputs,
    OperationWork(op=FlopOp.ATTENTION, count=_count_flops),
)
COMPRESSED_ATTENTION_BACKWARD = define_operation(
    "compressed_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor blocks, "
    "Tensor? chosen, Tensor sinks, Tensor lse, Tensor dots, Tensor bounds, int[] reach) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    lambda grad, q, k, blocks, chosen, sinks, *_: tuple(
        x.new_empty(x.shape) for x in (q, k, blocks, sinks)
    ),
    OperationWork(
        op=FlopOp.ATTENTION,
        count=lambda grad, q, k, blocks, chosen, sinks, lse, dots, bounds, reach: (
            2 * compressed_attention_flops(q, blocks, chosen, *reach)
        ),
    ),
)
SUM_BLOCK_SHARES = define_operation(
    "sum_block_shares(Tensor q, Tensor k, Tensor blocks, Tensor chosen, Tensor sinks, "
    "Tensor bounds, int[] reach) -> Tensor",
    _sum_block_shares,
    lambda q, k, blocks, chosen, *_: q.new_empty(chosen.shape, dtype=torch.float32),
    work=None,
)
