"""Chosen keys and attention to them equal whole matrices of scores, in documents too."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from moewright.engine.kernels import sparse_attention
from moewright.engine.model.key_tables import bound_keys
from moewright.rules.shapes import mixers
from moewright.spec.model import IndexerSpec
from tiny_jobs import MODEL

SEQUENCES, TOKENS, HEADS, WIDTH, VALUES, TOP_K = 2, 24, 3, 8, 6, 5
LENGTHS = (24, 3, 10, 11)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def may_read(lengths: tuple[int, ...]) -> torch.Tensor:
    """Return which tokens of the micro-batch each may read: [T, T]."""
    documents = torch.repeat_interleave(
        torch.arange(len(lengths) or SEQUENCES), torch.tensor(lengths or (TOKENS,) * SEQUENCES)
    )
    return (documents[:, None] == documents).tril()


@pytest.mark.parametrize("lengths", [(), LENGTHS])
@pytest.mark.parametrize("block", [1 << 26, 7 * TOKENS])
def test_the_best_keys_up_to_a_query_are_chosen_on_any_part_of_the_tokens(
    lengths: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_attention, "_BLOCK_SCORES", block)
    total = SEQUENCES * TOKENS
    q, k, heads = draw(total, 16, WIDTH), draw(total, WIDTH, seed=1), draw(total, 16, seed=2)
    scores = (torch.relu(torch.einsum("tiw,sw->tis", q, k)) * heads[:, :, None]).sum(1)
    scores = scores.masked_fill(~may_read(lengths), float("-inf"))
    ends = torch.tensor([0, *accumulate(lengths or (TOKENS,) * SEQUENCES)])
    bounds = bound_keys(ends, total=total, seq_len=TOKENS, rate=1)
    for first, count in ((0, total), (0, 16), (16, 16), (32, 16), (20, 9)):
        rows = slice(first, first + count)
        chosen = sparse_attention.CHOOSE_KEYS(
            q[rows], k, heads[rows], (first, TOKENS, 1), TOP_K, bounds
        )
        assert chosen.shape == (count, TOP_K)
        for row, keys in zip(range(first, first + count), chosen, strict=True):
            best, found = scores[row].topk(TOP_K)
            expected = found[~best.isinf()] % TOKENS
            assert sorted(keys[keys >= 0].tolist()) == sorted(expected.tolist())


def test_of_equal_scores_the_first_are_taken() -> None:
    nothing = float("-inf")
    scores = torch.tensor([[0.0, 2, 0, -1, 0, 2], [1, -0.0, 0, 0, nothing, nothing]])
    wide = torch.cat((scores, torch.zeros(2, 2000)), 1)
    wide[1, 4:] = nothing
    assert sparse_attention.choose_best(wide, 4).tolist() == [[1, 5, 0, 2], [0, 1, 2, 3]]
    assert sparse_attention.choose_best(wide[1:], 5).tolist() == [[0, 1, 2, 3, -1]]


@pytest.mark.parametrize("block", [1 << 26, 9 * SEQUENCES * HEADS * TOKENS])
def test_attention_to_chosen_keys_is_a_masked_softmax_and_so_are_its_gradients(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_attention, "_BLOCK_SCORES", block)
    q, k = draw(SEQUENCES, TOKENS, HEADS, WIDTH), draw(SEQUENCES, TOKENS, HEADS, WIDTH, seed=1)
    v = draw(SEQUENCES, TOKENS, HEADS, VALUES, seed=2)
    for x in (q, k, v):
        x.requires_grad_()
    scores = draw(SEQUENCES, TOKENS, TOKENS, seed=3)
    scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    best, chosen = scores.topk(TOP_K)
    is_read = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, ~best.isinf())
    chosen = chosen.int().masked_fill_(best.isinf(), -1)
    products = torch.einsum("bqhd,bkhd->bhqk", q, k) * WIDTH**-0.5
    products = products.masked_fill(~is_read[:, None], float("-inf"))
    expected = torch.einsum("bhqk,bkhv->bqhv", products.softmax(-1), v)
    with torch.no_grad():
        out, lse = sparse_attention.SPARSE_ATTENTION(q, k, v, chosen, 20)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, products.logsumexp(-1))
    grad = draw(*out.shape, seed=4)
    expected_grads = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        grads = sparse_attention.SPARSE_ATTENTION_BACKWARD(grad, q, k, v, out, lse, chosen, 20)
    for own, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("top_k", [1, 5, 24, 100])
def test_counted_pairs_are_those_of_the_published_formula(top_k: int) -> None:
    attention = MODEL.attention
    indexer = IndexerSpec(heads=2, head_dim=3, top_k=top_k)
    model = replace(MODEL, attention=replace(attention, indexer=indexer))
    scores = mixers.scoring_flops(model, 0, TOKENS, TOKENS)
    core = mixers.attention_flops(model, 0, TOKENS, TOKENS) - scores
    q = torch.empty(1, TOKENS, attention.heads, 1)
    chosen = torch.empty(1, TOKENS, min(top_k, TOKENS))
    width = attention.head_dim + attention.v_head_dim
    assert sparse_attention.sparse_attention_flops(q, chosen, width) == core
    assert sparse_attention.choice_flops(torch.empty(TOKENS, 2, 3), (0, TOKENS, 1)) == scores
