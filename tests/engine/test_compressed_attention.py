"""Attention to a window and to compressed blocks, and experts by the token's number."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from layout_space import SHAPES
from moewright.engine.kernels import compressed_attention
from moewright.engine.model.key_tables import bound_keys, find_keys
from moewright.engine.model.router import draw_expert_table
from moewright.rules.shapes import mixers

SEQUENCES, TOKENS, HEADS, WIDTH = 2, 24, 3, 8
WINDOW, RATE, TOP_K = 6, 4, 2
BLOCKS = TOKENS // RATE
LENGTHS = (24, 3, 10, 11)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def list_ended_blocks(
    lengths: tuple[int, ...],
) -> dict[tuple[int, int], tuple[int, list[int]]]:
    """Return where each query's document starts, and the blocks of it that have ended."""
    ended = {}
    for sequence in range(SEQUENCES):
        blocks: list[int] = []
        made = 0
        for query in range(TOKENS):
            total = sequence * TOKENS + query
            start = max(end for end in (0, *accumulate(lengths)) if end <= total)
            if start == total:
                blocks = []
            if (total - start + 1) % RATE == 0:
                blocks = [*blocks, made]
                made += 1
            ended[sequence, query] = start - sequence * TOKENS, blocks
    return ended


def read_naively(
    tensors: tuple[torch.Tensor, ...], chosen: torch.Tensor | None, lengths: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the probabilities of keys, a query and a key at a time."""
    ended = list_ended_blocks(lengths)
    q, k, blocks, sinks = tensors
    keys = torch.cat((k, blocks), 1)
    scores = torch.einsum("bqhd,bkd->bhqk", q, keys) * WIDTH**-0.5
    is_read = torch.zeros(SEQUENCES, TOKENS, TOKENS + BLOCKS, dtype=torch.bool)
    for (sequence, query), (start, blocks_read) in ended.items():
        is_read[sequence, query, max(start, query - WINDOW + 1) : query + 1] = True
        if chosen is not None:
            blocks_read = [int(block) for block in chosen[sequence, query] if block >= 0]
        is_read[sequence, query, [TOKENS + block for block in blocks_read]] = True
    scores = scores.masked_fill(~is_read[:, None], float("-inf"))
    sink_scores = sinks[None, :, None, None].expand(SEQUENCES, -1, TOKENS, 1)
    shares = torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1]
    return torch.einsum("bhqk,bkd->bqhd", shares, keys), shares


@pytest.mark.parametrize("lengths", [(TOKENS,) * SEQUENCES, LENGTHS])
@pytest.mark.parametrize("is_chosen", [True, False])
@pytest.mark.parametrize("block_scores", [1 << 26, SEQUENCES * HEADS * 900])
def test_windows_and_ended_blocks_are_read_beside_a_sink_and_so_are_gradients(
    is_chosen: bool, block_scores: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed_attention, "_BLOCK_SCORES", block_scores)
    shapes = ((SEQUENCES, TOKENS, HEADS, WIDTH), (SEQUENCES, TOKENS, WIDTH))
    tensors = tuple(
        draw(*shape, seed=seed).requires_grad_()
        for seed, shape in enumerate((*shapes, (SEQUENCES, BLOCKS, WIDTH), (HEADS,)))
    )
    q, k, blocks, sinks = tensors
    chosen = None
    if is_chosen:
        chosen = torch.full((SEQUENCES, TOKENS, TOP_K), -1, dtype=torch.int32)
        for place, (_, ended) in list_ended_blocks(lengths).items():
            picks = draw(len(ended), seed=sum(place)).argsort()[:TOP_K]
            chosen[place][: len(picks)] = torch.tensor(ended, dtype=torch.int32)[picks]
    expected, shares = read_naively(tensors, chosen, lengths)
    ends = torch.tensor([0, *accumulate(lengths)])
    bounds = bound_keys(ends, total=SEQUENCES * TOKENS, seq_len=TOKENS, rate=RATE)
    reach = bounds, (WINDOW, RATE)
    with torch.no_grad():
        out, lse = compressed_attention.COMPRESSED_ATTENTION(q, k, blocks, chosen, sinks, *reach)
    torch.testing.assert_close(out, expected)
    grad = draw(*out.shape, seed=7)
    dots = (grad * out).sum(-1).transpose(1, 2)
    grads = compressed_attention.COMPRESSED_ATTENTION_BACKWARD(
        grad, q, k, blocks, chosen, sinks, lse, dots, *reach
    )
    for own, other in zip(grads, torch.autograd.grad(expected, tensors, grad), strict=True):
        torch.testing.assert_close(own, other)
    if chosen is not None:
        sums = compressed_attention.SUM_BLOCK_SHARES(q, k, blocks, chosen, sinks, *reach)
        by_block = shares[..., TOKENS:].sum(1).gather(-1, chosen.clamp(min=0).long())
        torch.testing.assert_close(sums, by_block.masked_fill(chosen < 0, 0.0))


def test_blocks_are_of_tokens_of_one_document() -> None:
    """Of 24 tokens; of 3 and 10 and 11, of which 3, 2 and 3 are left over."""
    ends = torch.tensor([0, *accumulate(LENGTHS)])
    bounds = bound_keys(ends, total=SEQUENCES * TOKENS, seq_len=TOKENS, rate=RATE)
    begins, is_first = find_keys(bounds, RATE)
    # The places of two blocks stay empty.
    assert begins.tolist() == [[0, 4, 8, 12, 16, 20], [3, 7, 13, 17, 0, 0]]
    assert is_first[:, :4].tolist() == [[True, False, False, False], [True, False, True, False]]


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("window", [6, 100])
def test_counted_pairs_are_those_of_the_published_formula(layer: int, window: int) -> None:
    base = SHAPES["compressed"]
    model = replace(base, attention=replace(base.attention, sliding_window=window))
    spec = model.attention
    assert spec.indexer is not None
    core = mixers.attention_flops(model, layer, TOKENS, TOKENS)
    core -= mixers.scoring_flops(model, layer, TOKENS, TOKENS)
    rate = (TOKENS + 1, spec.sparse_rate, spec.heavy_rate, spec.sparse_rate)[layer]
    chosen = torch.empty(1, TOKENS, spec.indexer.top_k) if rate == spec.sparse_rate else None
    q = torch.empty(1, TOKENS, spec.heads, spec.head_dim)
    blocks = torch.empty(1, TOKENS // rate, spec.head_dim)
    count = compressed_attention.compressed_attention_flops
    assert count(q, blocks, chosen, window, rate) == core


def test_experts_by_the_number_of_a_token_are_different_and_evenly_many() -> None:
    table = draw_expert_table(3, 1, shape=(9000, 4), experts=16)
    assert torch.equal(table, draw_expert_table(3, 1, shape=(9000, 4), experts=16))
    assert not torch.equal(table, draw_expert_table(3, 2, shape=(9000, 4), experts=16))
    assert all(len(set(experts)) == 4 for experts in table.tolist())
    counts = table.flatten().bincount(minlength=16)
    assert counts.min() > 0.9 * counts.max()
