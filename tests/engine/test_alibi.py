"""Linear position biases: the slopes of transformers, and the scores of their definition."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from moewright.engine.kernels.attention import (
    AttentionMask,
    LinearBias,
    Segments,
    attention,
    attention_backward,
)
from moewright.engine.model.attention import alibi_slopes

HEADS, KEY_HEADS, WIDTH, LENGTH = 6, 2, 32, 48


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 16, 112])
def test_slopes_are_those_of_bloom(heads: int) -> None:
    """Its biases [heads, 1, keys] are slope times position."""
    biases = build_alibi_tensor(torch.ones(1, 3, dtype=torch.int64), heads, torch.float32)
    torch.testing.assert_close(biases[:, 0, 1], torch.tensor(alibi_slopes(heads)))


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: int, lengths: tuple[int, ...]
) -> torch.Tensor:
    """Attend by the definition, in fp64: scores lose their head's slope times the distance."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    place = torch.arange(LENGTH)
    distance = place[:, None] - place
    slopes = torch.tensor(alibi_slopes(HEADS), dtype=torch.float64)[:, None, None]
    scores = q @ k.mT * WIDTH**-0.5 - slopes * distance
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    hidden = (distance < 0) | (document[:, None] != document)
    if window:
        hidden |= distance >= window
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("lengths", [(LENGTH,), (20, 1, 27)])
@pytest.mark.parametrize(
    ("first", "dtype", "tolerance"),
    [(0, torch.float32, 2e-6), (8000, torch.float32, 2e-4), (8000, torch.bfloat16, 1e-2)],
)
def test_attention_with_a_bias_is_that_of_its_definition(
    window: int, lengths: tuple[int, ...], first: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Far into a sequence too, where 16 bits hold neither position nor slope; and gradients.

    The sums of a score are as large as slope times position there, and round at that size.
    """
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (
        torch.randn(1, LENGTH, heads, WIDTH, generator=generator).to(dtype)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    segments = None
    if len(lengths) > 1:
        ends = torch.tensor((0, *lengths)).cumsum(0).int()
        segments = Segments(lengths=lengths, cu_seqlens=ends)
    bias = LinearBias(
        slopes=torch.tensor(alibi_slopes(HEADS)), positions=first + torch.arange(LENGTH)
    )
    mask = AttentionMask(window=window, segments=segments, bias=bias)
    out, state = attention(q, k, v, mask)
    gradients = attention_backward(grad, q, k, v, out, state, mask)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = exact_attention(*leaves, window=window, lengths=lengths)
    exact.backward(grad.double())
    for result, expected in zip((out, *gradients), (exact, *(x.grad for x in leaves)), strict=True):
        assert result.dtype == dtype
        assert expected is not None
        error = (result.double() - expected).detach().norm() / expected.detach().norm()
        assert float(error) < tolerance
