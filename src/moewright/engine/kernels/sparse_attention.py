"""Attention to the keys that an indexer chooses (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

Plain products in blocks of queries, on any device: the indexer's scores of all keys up to each
query, and attention whose other scores are hidden. These are operations of their own, so that
their FLOPs count by the published formula on any device (docs/formulas.md 13).

Shapes: B sequences of S tokens, T = B*S, of which t are this rank's; I heads of the indexer, W
wide; H heads of attention, queries and keys D wide and values V; K keys chosen for each query.
The keys that an indexer scores are of tokens, or one of every `rate` tokens, S / rate in a
sequence (DeepSeek-V4): those that end before the next token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from moewright.engine.kernels.operations import OperationWork, define_operation
from moewright.spec.ledger import FlopOp

# Scores that lie in memory at a time.
_BLOCK_SCORES = 1 << 26


def _choose_keys(
    q_tIW: torch.Tensor,
    k_TW: torch.Tensor,
    heads_tI: torch.Tensor,
    place: Sequence[int],
    top_k: int,
    bounds: torch.Tensor,
) -> torch.Tensor:
    """Return the keys with the highest scores of each query: [t,K] int32, places in its sequence.

    A query's keys are those of its document up to itself; where they are fewer than K, the rest
    is -1. `place` is the token at which this rank's begin, S and the tokens of a key; `bounds`
    [B,S,3] are those of all tokens (kernels.documents).
    """
    first, seq_len, rate = place
    width = min(top_k, seq_len // rate)
    chosen = q_tIW.new_full((len(q_tIW), width), -1, dtype=torch.int32)
    first_key, stop_key = (
        bounds[..., 1:].flatten(0, 1)[first : first + len(q_tIW), :, None].unbind(1)
    )
    for rows, keys in _blocks(place, *q_tIW.shape[:2]):
        scores = index_scores(q_tIW[rows], k_TW[keys], heads_tI[rows])
        columns = torch.arange(scores.shape[1], device=scores.device)
        hidden = (columns < first_key[rows]) | (columns >= stop_key[rows])
        scores.masked_fill_(hidden, float("-inf"))
        best = choose_best(scores, top_k)
        chosen[rows, : best.shape[1]] = best
    return chosen


def choose_best(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the columns of the highest scores of each row, int32; -1 for scores of -inf.

    Of equal scores the first columns are taken, in any layout: those of keys whose products with a
    query are all negative are 0.
    """
    # Not topk, which takes any of equal scores.
    best, columns = scores.sort(dim=1, descending=True, stable=True)
    best, columns = best[:, :top_k], columns[:, :top_k]
    return columns.int().masked_fill_(best == float("-inf"), -1)


def index_scores(q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Return the scores of q [n,I,W] for keys k [m,W], heads weighted [n,I]: [n,m] fp32."""
    products = torch.relu(q.float() @ k.float().T)
    return torch.einsum("ni,nim->nm", heads.float(), products)


def _blocks(place: Sequence[int], count: int, heads: int) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of `count` queries, each with the keys it may score; `place` as in the choice.

    The queries of a block are of one sequence and number from 0; its keys are all before the last.
    """
    first, seq_len, rate = place
    keys = seq_len // rate
    start = 0
    while start < count:
        sequence, token = divmod(first + start, seq_len)
        step = max(1, _BLOCK_SCORES // (heads * seq_len))
        stop = min(start + step, count, start + seq_len - token)
        begin = sequence * keys
        visible = (first + stop - sequence * seq_len) // rate
        yield slice(start, stop), slice(begin, begin + visible)
        start = stop


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, counted_width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B,S,H,V] of attention to chosen keys [B,S,K], and the log-sums [B,H,S].

    FLOPs are counted as those of pairs of `counted_width`.
    """
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    values = v.transpose(1, 2).float()
    for rows in _row_blocks(q):
        scores = attention_scores(q, k, chosen, rows)
        lse[:, :, rows] = scores.logsumexp(-1)
        shares = torch.exp(scores - lse[:, :, rows, None])
        out[:, rows] = (shares @ values[:, :, : rows.stop]).transpose(1, 2).to(q.dtype)
    return out, lse


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v; `rest` are out, lse, chosen and the counted width."""
    out, lse, chosen, _ = rest
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    keys, values = (x.transpose(1, 2).float() for x in (k, v))
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for rows in _row_blocks(q):
        shares = torch.exp(attention_scores(q, k, chosen, rows) - lse[:, :, rows, None])
        block_grad = grad[:, rows].transpose(1, 2).float()
        block_out = out[:, rows].transpose(1, 2).float()
        dv[:, :, : rows.stop] += shares.mT @ block_grad
        share_grads = block_grad @ values[:, :, : rows.stop].mT
        share_grads -= (block_grad * block_out).sum(-1, keepdim=True)
        score_grads = shares.mul_(share_grads).mul_(q.shape[3] ** -0.5)
        dq[:, rows] = (score_grads @ keys[:, :, : rows.stop]).transpose(1, 2).to(q.dtype)
        dk[:, :, : rows.stop] += score_grads.mT @ q[:, rows].transpose(1, 2).float()
    dk, dv = (x.transpose(1, 2).to(k.dtype).contiguous() for x in (dk, dv))
    return dq, dk, dv


def _sum_shares(q: torch.Tensor, k: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the shares of chosen keys in attention, summed over heads: [B,S,K] fp32."""
    sums = q.new_zeros(chosen.shape, dtype=torch.float32)
    for rows in _row_blocks(q):
        shares = attention_scores(q, k, chosen, rows).softmax(-1).sum(1)
        sums[:, rows] = _at_places(shares, chosen[:, rows], 0.0)
    return sums


def _diverge(
    q_tIW: torch.Tensor,
    k_TW: torch.Tensor,
    heads_tI: torch.Tensor,
    chosen_tK: torch.Tensor,
    target_tK: torch.Tensor,
    place: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence [t] of the scores' softmax from a target, and its slope [t,K].

    Both distributions are over the chosen keys; the slope is by the score of each. A query without
    a key has none.
    """
    slopes = torch.zeros_like(target_tK)
    divergences = target_tK.new_zeros(len(target_tK))
    for rows, keys in _blocks(place, *q_tIW.shape[:2]):
        if keys.start == keys.stop:
            continue
        scores = index_scores(q_tIW[rows], k_TW[keys], heads_tI[rows])
        logs = _at_places(scores, chosen_tK[rows], float("-inf")).log_softmax(-1)
        target = target_tK[rows]
        # 0 log 0 is 0: no term comes of a key that attention does not read.
        terms = torch.xlogy(target, target) - target * logs.masked_fill(target == 0, 0.0)
        is_empty = (chosen_tK[rows] < 0).all(-1)
        divergences[rows] = terms.sum(-1).masked_fill(is_empty, 0.0)
        slopes[rows] = (logs.exp() - target).masked_fill(is_empty[:, None], 0.0)
    return divergences, slopes


def _score_gradients(
    slopes_tK: torch.Tensor,
    q_tIW: torch.Tensor,
    k_TW: torch.Tensor,
    heads_tI: torch.Tensor,
    chosen_tK: torch.Tensor,
    place: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and heads, given those of the scores of chosen keys."""
    dq, dheads = torch.empty_like(q_tIW), torch.empty_like(heads_tI)
    dk = torch.zeros_like(k_TW, dtype=torch.float32)
    for rows, keys in _blocks(place, *q_tIW.shape[:2]):
        q, k = q_tIW[rows].float(), k_TW[keys].float()
        places = torch.where(chosen_tK[rows] < 0, len(k), chosen_tK[rows]).long()
        slopes = q.new_zeros(len(q), len(k) + 1).scatter_(1, places, slopes_tK[rows])[:, :-1]
        products = torch.relu(q @ k.T)
        dheads[rows] = torch.einsum("nim,nm->ni", products, slopes)
        # The slope of a relu, which is 0 at 0.
        slopes = heads_tI[rows].float()[:, :, None] * slopes[:, None] * (products > 0)
        dq[rows] = (slopes @ k).to(dq.dtype)
        dk[keys] += torch.einsum("nim,niw->mw", slopes, q)
    return dq, dk.to(k_TW.dtype), dheads


def _at_places(x: torch.Tensor, places: torch.Tensor, elsewhere: float) -> torch.Tensor:
    """Return the columns of x at places, and a number for the places of -1."""
    picked = x.gather(-1, places.clamp(min=0).long())
    return picked.masked_fill(places < 0, elsewhere)


def _row_blocks(q: torch.Tensor) -> Iterator[slice]:
    sequences, length, heads = q.shape[:3]
    step = max(1, _BLOCK_SCORES // (sequences * heads * length))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def attention_scores(
    q: torch.Tensor, k: torch.Tensor, chosen: torch.Tensor, rows: slice
) -> torch.Tensor:
    """Return the scaled scores [B,H,rows,keys] of some queries, -inf for keys not chosen.

    The keys are those up to the last of the queries.
    """
    keys = k[:, : rows.stop].permute(0, 2, 3, 1).float()
    scores = q[:, rows].transpose(1, 2).float() @ keys * q.shape[3] ** -0.5
    # A column more than there are keys takes what is no key.
    places = torch.where(chosen[:, rows] < 0, rows.stop, chosen[:, rows]).long()
    hidden = scores.new_ones((len(q), places.shape[1], rows.stop + 1), dtype=torch.bool)
    hidden.scatter_(-1, places, False)
    return scores.masked_fill_(hidden[:, None, :, :-1], float("-inf"))


def choice_flops(q_tIW: Any, place: Sequence[int]) -> int:
    """Count the indexer's scores of the causal half of all pairs."""
    _, seq_len, rate = place
    queries, heads, width = q_tIW.shape
    return int(queries) * int(heads) * int(width) * (seq_len // rate)


def sparse_attention_flops(q: Any, chosen: Any, counted_width: int) -> int:
    """Count the pairs of queries and chosen keys in whole sequences, a query's own key a half."""
    sequences, length, heads = (int(size) for size in q.shape[:3])
    keys = int(chosen.shape[2])
    twice_pairs = keys * (keys + 1) + 2 * (length - keys) * keys - length
    return sequences * heads * counted_width * twice_pairs


def _empty_outputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, counted_width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _empty_like(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors)


CHOOSE_KEYS = define_operation(
    "choose_keys(Tensor q, Tensor k, Tensor heads, int[] place, int top_k, "
    "Tensor bounds) -> Tensor",
    _choose_keys,
    lambda q, k, heads, place, top_k, bounds: q.new_empty(
        (len(q), min(top_k, place[1] // place[2])), dtype=torch.int32
    ),
    OperationWork(
        op=FlopOp.GEMM, count=lambda q, k, heads, place, top_k, bounds: choice_flops(q, place)
    ),
)
SPARSE_ATTENTION = define_operation(
    "sparse_attention(Tensor q, Tensor k, Tensor v, Tensor chosen, int counted_width) "
    "-> (Tensor, Tensor)",
    _forward,
    _empty_outputs,
    OperationWork(
        op=FlopOp.ATTENTION,
        count=lambda q, k, v, chosen, counted_width: sparse_attention_flops(
            q, chosen, counted_width
        ),
    ),
)
SPARSE_ATTENTION_BACKWARD = define_operation(
    "sparse_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor chosen, int counted_width) -> (Tensor, Tensor, Tensor)",
    _backward,
    lambda grad, q, k, v, *_: _empty_like(q, k, v),
    OperationWork(
        op=FlopOp.ATTENTION,
        count=lambda grad, q, k, v, out, lse, chosen, counted_width: (
            2 * sparse_attention_flops(q, chosen, counted_width)
        ),
    ),
)
SUM_SHARES = define_operation(
    "sum_shares(Tensor q, Tensor k, Tensor chosen) -> Tensor",
    _sum_shares,
    lambda q, k, chosen: q.new_empty(chosen.shape, dtype=torch.float32),
    work=None,
)
DIVERGE = define_operation(
    "diverge(Tensor q, Tensor k, Tensor heads, Tensor chosen, Tensor target, "
    "int[] place) -> (Tensor, Tensor)",
    _diverge,
    lambda q, k, heads, chosen, target, *_: (
        target.new_empty(len(target)),
        torch.empty_like(target),
    ),
    work=None,
)
SCORE_GRADIENTS = define_operation(
    "score_gradients(Tensor slopes, Tensor q, Tensor k, Tensor heads, Tensor chosen, "
    "int[] place) -> (Tensor, Tensor, Tensor)",
    _score_gradients,
    lambda slopes, q, k, heads, *_: _empty_like(q, k, heads),
    OperationWork(
        op=FlopOp.GEMM,
        count=lambda slopes, q, k, heads, chosen, place: 2 * choice_flops(q, place),
    ),
)
