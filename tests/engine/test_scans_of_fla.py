"""fla-org's kernels beside this package's operations: the same scans, and the same FLOPs.

The package fla is stood in for by its published recurrences, a token at a time, so that what hands
its kernels their tensors is run where there is no GPU.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moewright.engine.kernels.fused.scans import FLA_SCANS, TORCH_SCANS, ScanKernels
from moewright.engine.observe.flop_counter import FlopCounter
from moewright.engine.observe.module_scopes import ObservingMode

ROWS, TOKENS, GROUPS, SHARING, WIDTH, TAPS = 2, 5, 2, 3, 4, 4


def convolve(x: Any, weight: Any, bias: Any, activation: str, cu_seqlens: Any) -> tuple[Any, None]:
    """Stand in for fla.modules.convolution.causal_conv1d: x [B,T,D], weight [D,K]."""
    assert (activation, cu_seqlens) == ("silu", None)
    padded = F.pad(x.mT, (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).mT, None


def run_delta_rule(
    q: Any, k: Any, v: Any, *, g: Any, beta: Any, use_qk_l2norm_in_kernel: bool, cu_seqlens: Any
) -> tuple[Any, None]:
    """Stand in for fla.ops.gated_delta_rule.chunk_gated_delta_rule (arXiv 2412.06464, (10))."""
    assert use_qk_l2norm_in_kernel
    assert cu_seqlens is None
    sharing = v.shape[2] // q.shape[2]
    q, k = (
        (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(sharing, 2)
        for x in (q, k)
    )
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs = []
    for token in range(q.shape[1]):
        state = state * g[:, token, :, None, None].exp()
        read_out = torch.einsum("bhk,bhkv->bhv", k[:, token], state)
        written = (v[:, token] - read_out) * beta[:, token, :, None]
        state = state + k[:, token, ..., None] * written[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, token], state) * q.shape[3] ** -0.5)
    return torch.stack(outputs, 1), None


def run_linear_attention(
    q: Any, k: Any, v: Any, *, g: Any, scale: float, cu_seqlens: Any
) -> tuple[Any, None]:
    """Stand in for fla.ops.simple_gla.chunk_simple_gla."""
    assert cu_seqlens is None
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs = []
    for token in range(q.shape[1]):
        state = state * g[:, token, :, None, None].exp()
        state = state + k[:, token, ..., None] * v[:, token, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, token], state) * scale)
    return torch.stack(outputs, 1), None


@pytest.fixture(autouse=True)
def _fla(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in (
        ("modules.convolution.causal_conv1d", convolve),
        ("ops.gated_delta_rule.chunk_gated_delta_rule", run_delta_rule),
        ("ops.simple_gla.chunk_simple_gla", run_linear_attention),
    ):
        path, _, attribute = f"fla.{name}".rpartition(".")
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            package = ".".join(parts[:depth])
            if depth < len(parts) and package in sys.modules:
                continue
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        setattr(sys.modules[path], attribute, function)


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def run_all(scans: ScanKernels) -> tuple[list[torch.Tensor], list[tuple[str, int]]]:
    """Return what each scan and its backward give, and the FLOPs that are counted of them."""
    dice = torch.Generator().manual_seed(3)
    columns = (2 + SHARING) * WIDTH
    heads = GROUPS * SHARING
    x = draw(dice, ROWS, TOKENS, GROUPS, columns)
    conv = draw(dice, GROUPS * columns, TAPS)
    decay = -draw(dice, ROWS, TOKENS, heads).exp()
    beta = torch.sigmoid(draw(dice, ROWS, TOKENS, heads))
    step = draw(dice, ROWS, TOKENS, heads)
    weights = [conv, draw(dice, heads) - 3, draw(dice, heads), draw(dice, heads)]
    grad = draw(dice, ROWS, TOKENS, heads, WIDTH)
    counted: list[tuple[str, int]] = []
    counter = FlopCounter(lambda op, flops: counted.append((op.value, flops)))
    with ObservingMode(before=[counter.count]):
        outputs = [
            scans.causal_conv.forward(x, conv, None),
            *scans.causal_conv.backward(x, x, conv, None),
            scans.delta_rule.forward(x, decay, beta, WIDTH, None),
            *scans.delta_rule.backward(grad, x, decay, beta, WIDTH, None),
            scans.state_space.forward(x, step, weights, WIDTH, None),
        ]
        *grads, grad_weights = scans.state_space.backward(grad, x, step, weights, WIDTH, None)
    return [*outputs, *grads, *grad_weights], [item for item in counted if item[0] == "scan"]


def test_fla_gets_the_tensors_of_the_operations_and_counts_their_flops() -> None:
    own, own_flops = run_all(TORCH_SCANS)
    fast, fast_flops = run_all(FLA_SCANS)
    assert len(own) == len(fast) == 14
    for expected, result in zip(own, fast, strict=True):
        # Sums of fp32 in another order: chunks of 64 tokens there, a token at a time here.
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert fast_flops == own_flops
    assert len(own_flops) == 6
