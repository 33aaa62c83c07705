"""LayerNorm of hidden states against torch's, alone and where ranks share out its rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from moewright.engine.comm.collectives import Group
from moewright.engine.kernels.fused.table import torch_kernels
from moewright.engine.model.autograd import LayerNorm, NormSettings
from moewright.engine.observe.counters import Counters

WIDTH = 24


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def run_norm(
    dtype: torch.dtype, *, keeps_scale: bool, group: Group | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the output, and the gradients of x, weight and bias."""
    x, weight, bias = (
        draw(*shape, dtype=dtype, seed=seed)
        for seed, shape in enumerate(((3, 5, WIDTH), (WIDTH,), (WIDTH,)))
    )
    settings = NormSettings(
        eps=1e-3, kernels=torch_kernels(), keeps_scale=keeps_scale, replica_group=group
    )
    out = LayerNorm.apply(x, weight, bias, settings)
    grad = draw(3, 5, WIDTH, dtype=dtype, seed=9).detach()
    return out.detach(), *torch.autograd.grad(out, (x, weight, bias), grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keeps_scale", [True, False])
def test_equals_torch(dtype: torch.dtype, keeps_scale: bool) -> None:
    x, weight, bias = (
        draw(*shape, dtype=dtype, seed=seed).detach().double().requires_grad_()
        for seed, shape in enumerate(((3, 5, WIDTH), (WIDTH,), (WIDTH,)))
    )
    expected = functional.layer_norm(x, (WIDTH,), weight, bias, 1e-3)
    grad = draw(3, 5, WIDTH, dtype=dtype, seed=9).detach().double()
    gradients = torch.autograd.grad(expected, (x, weight, bias), grad)
    tolerance = 2e-6 if dtype is torch.float32 else 4e-3
    results = run_norm(dtype, keeps_scale=keeps_scale)
    for result, exact in zip(results, (expected, *gradients), strict=True):
        assert result.dtype == dtype
        assert (result - exact).norm() <= tolerance * exact.norm()


def test_ranks_that_hold_the_same_rows_add_up_to_the_gradients_of_all() -> None:
    whole = run_norm(torch.float32, keeps_scale=True)
    parts = [
        run_norm(
            torch.float32,
            keeps_scale=True,
            group=Group(name="tp", ranks=(0, 1), index=index, handle=None, counters=Counters()),
        )
        for index in range(2)
    ]
    for part in parts:
        assert torch.equal(part[0], whole[0])
        assert torch.equal(part[1], whole[1])
    for first, second, total in zip(parts[0][2:], parts[1][2:], whole[2:], strict=True):
        torch.testing.assert_close(first + second, total)
