"""Attention to a window and to compressed blocks, and experts by the token's number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layout_space import SHAPES
from moewright.engine.kernels import compressed_attention
from moewright.engine.model.router import draw_expert_table
from moewright.rules import mixer_flops

SEQUENCES, TOKENS, HEADS, WIDTH = 2, 24, 3, 8
WINDOW, RATE, TOP_K = 6, 4, 2
BLOCKS = TOKENS // RATE


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def read_naively(
    tensors: tuple[torch.Tensor, ...], chosen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the probabilities of keys, a query and a key at a time."""
    q, k, blocks, sinks = tensors
    keys = torch.cat((k, blocks), 1)
    scores = torch.einsum("bqhd,bkd->bhqk", q, keys) * WIDTH**-0.5
    is_read = torch.zeros(SEQUENCES, TOKENS, TOKENS + BLOCKS, dtype=torch.bool)
    for sequence in range(SEQUENCES):
        for query in range(TOKENS):
            is_read[sequence, query, max(0, query - WINDOW + 1) : query + 1] = True
            ended = [block for block in range(BLOCKS) if (block + 1) * RATE <= query + 1]
            if chosen is not None:
                ended = [int(block) for block in chosen[sequence, query] if block >= 0]
            is_read[sequence, query, [TOKENS + block for block in ended]] = True
    scores = scores.masked_fill(~is_read[:, None], float("-inf"))
    sink_scores = sinks[None, :, None, None].expand(SEQUENCES, -1, TOKENS, 1)
    shares = torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1]
    return torch.einsum("bhqk,bkd->bqhd", shares, keys), shares


@pytest.mark.parametrize("is_chosen", [True, False])
@pytest.mark.parametrize("block_scores", [1 << 26, SEQUENCES * HEADS * 900])
def test_windows_and_ended_blocks_are_read_beside_a_sink_and_so_are_gradients(
    is_chosen: bool, block_scores: int, monkeypatch: pytest.MonkeyPatch
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
        ended = (torch.arange(TOKENS) + 1) // RATE
        picks = draw(SEQUENCES, TOKENS, BLOCKS, seed=5).argsort(-1)[..., :TOP_K].int()
        chosen = picks.masked_fill(picks >= ended[:, None], -1)
    expected, shares = read_naively(tensors, chosen)
    reach = WINDOW, RATE
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


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("window", [6, 100])
def test_counted_pairs_are_those_of_the_published_formula(layer: int, window: int) -> None:
    base = SHAPES["compressed"]
    model = replace(base, attention=replace(base.attention, sliding_window=window))
    spec = model.attention
    assert spec.indexer is not None
    core = mixer_flops.attention_flops(model, layer, TOKENS, TOKENS)
    core -= mixer_flops.scoring_flops(model, layer, TOKENS, TOKENS)
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
