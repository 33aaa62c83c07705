"""fla-org's kernels of recurrent mixers against torch's, on a device that has them.

Skipped without a device, or without fla.
"""

from __future__ import annotations

import pytest
import torch

from moewright.engine.kernels.attention import Segments, build_segments
from moewright.engine.kernels.fused.scans import FLA_SCANS, TORCH_SCANS, ScanKernels

pytest.importorskip("fla", reason="needs fla-core")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Two sequences of Qwen3-Next's heads, a quarter of them.
ROWS, TOKENS, KEY_HEADS, HEADS, WIDTH, TAPS = 2, 1024, 4, 8, 128, 4
LENGTHS = (5, 1000, 1043)


def run(scans: ScanKernels, segments: Segments | None) -> list[torch.Tensor]:
    dice = torch.Generator("cuda").manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice, device="cuda")

    columns = 2 * WIDTH + HEADS // KEY_HEADS * WIDTH
    x = draw(ROWS, TOKENS, KEY_HEADS, columns).bfloat16()
    weight = 0.5 * draw(KEY_HEADS * columns, TAPS).bfloat16()
    decay = -draw(ROWS, TOKENS, HEADS).exp()
    beta = torch.sigmoid(draw(ROWS, TOKENS, HEADS))
    grad = draw(ROWS, TOKENS, HEADS, WIDTH).bfloat16()
    return [
        scans.causal_conv.forward(x, weight, segments),
        *scans.causal_conv.backward(x, x, weight, segments),
        scans.delta_rule.forward(x, decay, beta, WIDTH, segments),
        *scans.delta_rule.backward(grad, x, decay, beta, WIDTH, segments),
    ]


def run_state_space(scans: ScanKernels, segments: Segments | None) -> list[torch.Tensor]:
    """Two groups of Nemotron 3 Nano's."""
    dice = torch.Generator("cuda").manual_seed(6)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice, device="cuda")

    columns = 8 * 64 + 2 * WIDTH
    inputs = draw(ROWS, TOKENS, 2, columns).bfloat16()
    step = draw(ROWS, TOKENS, 16).bfloat16()
    weights = [0.5 * draw(2 * columns, TAPS), draw(16) - 3, draw(16), draw(16), draw(2 * columns)]
    weights = [weight.bfloat16() for weight in weights]
    grad = draw(ROWS, TOKENS, 16, 64).bfloat16()
    *grads, grad_weights = scans.state_space.backward(grad, inputs, step, weights, WIDTH, segments)
    out = scans.state_space.forward(inputs, step, weights, WIDTH, segments)
    return [out, *grads, *grad_weights]


@pytest.mark.parametrize("lengths", [(), LENGTHS])
def test_fla_computes_what_torch_computes(lengths: tuple[int, ...]) -> None:
    segments = build_segments(lengths, torch.device("cuda")) if lengths else None
    own_tensors = run(TORCH_SCANS, segments) + run_state_space(TORCH_SCANS, segments)
    fast_tensors = run(FLA_SCANS, segments) + run_state_space(FLA_SCANS, segments)
    for own, fast in zip(own_tensors, fast_tensors, strict=True):
        assert fast.dtype == own.dtype
        # fla multiplies in 16 bits what the reference multiplies in 32.
        error = (fast.float() - own.float()).norm() / own.float().norm()
        assert error < 2e-2
