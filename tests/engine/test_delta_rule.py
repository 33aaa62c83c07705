"""The gated delta rule in chunks against the recurrence of its paper, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from moewright.engine.kernels import causal_conv, delta_rule

SEQUENCES, TOKENS, KEY_HEADS, SHARING, KEY_DIM, VALUE_DIM, TAPS = 2, 150, 2, 3, 6, 5, 4
HEADS = KEY_HEADS * SHARING
LENGTHS = (3, 64, 83, 1, 149)


def draw(*shape: int, seed: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=dice, dtype=torch.float64)


def draw_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = 2 * KEY_DIM + SHARING * VALUE_DIM
    return (
        draw(SEQUENCES, TOKENS, KEY_HEADS, width, seed=1).requires_grad_(),
        -draw(SEQUENCES, TOKENS, HEADS, seed=2).exp().requires_grad_(),
        torch.sigmoid(draw(SEQUENCES, TOKENS, HEADS, seed=3)).requires_grad_(),
    )


def recur(mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Yang et al. 2024 (arXiv 2412.06464), equation 10, a token at a time."""
    q, k, v = mixed.split((KEY_DIM, KEY_DIM, SHARING * VALUE_DIM), -1)
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(SHARING, 2)
        for x in (q, k)
    )
    v = v.unflatten(-1, (SHARING, VALUE_DIM)).flatten(2, 3)
    state = mixed.new_zeros(len(mixed), HEADS, VALUE_DIM, KEY_DIM)
    unit = torch.eye(KEY_DIM, dtype=mixed.dtype)
    outputs = []
    for t in range(mixed.shape[1]):
        step = beta[:, t, :, None, None]
        key = k[:, t, :, None, :]
        state = state @ (decay[:, t, :, None, None].exp() * (unit - step * key.mT * key))
        state = state + step * v[:, t, :, :, None] * key
        outputs.append((state @ q[:, t, :, :, None])[..., 0] / KEY_DIM**0.5)
    return torch.stack(outputs, 1)


def split_documents(x: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    return list(x.flatten(0, 1)[None].split(list(lengths), 1)) if lengths else [x]


@pytest.mark.parametrize("lengths", [(), LENGTHS])
def test_chunks_are_the_recurrence_in_outputs_and_gradients(lengths: tuple[int, ...]) -> None:
    inputs = draw_inputs()
    documents = zip(*(split_documents(x, lengths) for x in inputs), strict=True)
    parts = [recur(*document) for document in documents]
    expected = torch.cat(parts, 1).view(SEQUENCES, TOKENS, HEADS, VALUE_DIM)
    with torch.no_grad():
        actual = delta_rule.DELTA_RULE(*inputs, KEY_DIM, lengths)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    grad = draw(*expected.shape, seed=4)
    expected_grads = torch.autograd.grad(expected, inputs, grad)
    with torch.no_grad():
        grads = delta_rule.DELTA_RULE_BACKWARD(grad, *inputs, KEY_DIM, lengths)
    for own, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)


def test_a_state_is_wide_whatever_the_inputs_are() -> None:
    """Of 16-bit inputs only the results are rounded: the recurrence in fp64 is as near."""
    mixed, decay, beta = (x.detach() for x in draw_inputs())
    narrow = mixed.bfloat16()
    expected = recur(narrow.double(), decay.float().double(), beta.float().double())
    actual = delta_rule.DELTA_RULE(narrow, decay.float(), beta.float(), KEY_DIM, ())
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected.bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("lengths", [(), LENGTHS])
def test_the_convolution_sees_the_tokens_before_inside_a_document(
    lengths: tuple[int, ...],
) -> None:
    x = draw_inputs()[0]
    weight = draw(KEY_HEADS * x.shape[3], TAPS, seed=5).requires_grad_()

    def convolve(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(2).mT
        out = F.conv1d(rows, weight[:, None], padding=TAPS - 1, groups=len(weight))
        return F.silu(out[..., : rows.shape[2]]).mT.reshape(x.shape)

    expected = torch.cat(list(map(convolve, split_documents(x, lengths))), 1).view(x.shape)
    grad = draw(*x.shape, seed=6)
    expected_grads = torch.autograd.grad(expected, (x, weight), grad)
    with torch.no_grad():
        torch.testing.assert_close(causal_conv.CAUSAL_CONV(x, weight, lengths), expected)
        grads = causal_conv.CAUSAL_CONV_BACKWARD(grad, x, weight, lengths)
    for own, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(own, other)
