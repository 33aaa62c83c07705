"""The state space of Mamba-2 in chunks against the recurrence of its paper, token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moewright.engine.kernels import state_space

SEQUENCES, TOKENS, GROUPS, SHARING, STATE, WIDTH, TAPS = 2, 150, 2, 3, 6, 5, 4
HEADS = GROUPS * SHARING
COLUMNS = SHARING * WIDTH + 2 * STATE
LENGTHS = (3, 64, 83, 1, 149)


def draw(*shape: int, seed: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=dice, dtype=torch.float64)


def draw_inputs() -> list[torch.Tensor]:
    """Draw the projected columns and steps, and the weights in their order."""
    shapes = (
        (SEQUENCES, TOKENS, GROUPS, COLUMNS),
        (SEQUENCES, TOKENS, HEADS),
        (GROUPS * COLUMNS, TAPS),
        (HEADS,),
        (HEADS,),
        (HEADS,),
        (GROUPS * COLUMNS,),
    )
    return [draw(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def recur(inputs: torch.Tensor, step: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Dao and Gu 2024 (arXiv 2405.21060), equation 1 in its discrete form, a token at a time."""
    conv, dt_bias, a_log, skip, conv_bias = weights
    rows = inputs.flatten(2).mT
    rows = F.conv1d(rows, conv[:, None], conv_bias, padding=TAPS - 1, groups=len(conv))
    mixed = F.silu(rows[..., : inputs.shape[1]]).mT.unflatten(2, (GROUPS, COLUMNS))
    x, keys, queries = mixed.split((SHARING * WIDTH, STATE, STATE), -1)
    x = x.reshape(*x.shape[:2], HEADS, WIDTH)
    keys, queries = (part.repeat_interleave(SHARING, 2) for part in (keys, queries))
    dt = F.softplus(step + dt_bias)
    decay = (-a_log.exp() * dt).exp()
    state = inputs.new_zeros(len(inputs), HEADS, WIDTH, STATE)
    outputs = []
    for t in range(inputs.shape[1]):
        written = dt[:, t, :, None, None] * x[:, t, :, :, None] * keys[:, t, :, None]
        state = decay[:, t, :, None, None] * state + written
        outputs.append((state @ queries[:, t, :, :, None])[..., 0] + skip[:, None] * x[:, t])
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("lengths", [(), LENGTHS])
def test_chunks_are_the_recurrence_in_outputs_and_gradients(lengths: tuple[int, ...]) -> None:
    tensors = [tensor.requires_grad_() for tensor in draw_inputs()]
    inputs, step, *weights = tensors
    parts = [(inputs, step)]
    if lengths:
        parts = list(
            zip(*(x.flatten(0, 1)[None].split(lengths, 1) for x in (inputs, step)), strict=True)
        )
    expected = torch.cat([recur(*part, *weights) for part in parts], 1)
    expected = expected.view(SEQUENCES, TOKENS, HEADS, WIDTH)
    grad = draw(*expected.shape, seed=9)
    expected_grads = torch.autograd.grad(expected, tensors, grad)
    with torch.no_grad():
        actual = state_space.STATE_SPACE(inputs, step, weights, STATE, lengths)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        grad_inputs, grad_step, grad_weights = state_space.STATE_SPACE_BACKWARD(
            grad, inputs, step, weights, STATE, lengths
        )
    for own, other in zip((grad_inputs, grad_step, *grad_weights), expected_grads, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-10)


def test_a_state_is_wide_whatever_the_inputs_are() -> None:
    """Of 16-bit inputs only the results are rounded: the recurrence in fp64 is as near."""
    narrow = [tensor.bfloat16() for tensor in draw_inputs()]
    inputs, step, *weights = narrow
    expected = recur(*(tensor.double() for tensor in narrow))
    actual = state_space.STATE_SPACE(inputs, step, weights, STATE, ())
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected.bfloat16(), rtol=2**-7, atol=1e-5)
