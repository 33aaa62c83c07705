"""Compiled Triton kernels: 16 bits against fp32, and their time against the reference's.

The tests are skipped without a device. tests/engine/test_fused_triton.py compiles the kernels in
fp32 on a machine with a device.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.kernels.fused.table import torch_kernels, triton_kernels
from moewright.engine.run.env import is_triton_interpreted
from moewright.spec.model import RouterSpec, ScoreFunction

pytest.importorskip(
    "triton", reason="the Triton kernels need the package triton, which torch brings on CUDA alone"
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or is_triton_interpreted(), reason="needs a CUDA device"
    ),
]

PLAIN = torch_kernels()
FUSED = triton_kernels()
# Qwen3-30B-A3B on one device: 4096 tokens, 8 of 128 experts, hidden 2048, expert width 768, 32
# heads of 128.
TOKENS = 4096
TOP_K = 8
EXPERTS = 128
HIDDEN = 2048
WIDTH = 768
HEADS = 32
HEAD_DIM = 128
VOCABULARY = 151936
EPS = 1e-6


def build_generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(3)


def draw_normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=build_generator(), device="cuda").to(dtype)


def assert_rounded_once(result: torch.Tensor, wide: torch.Tensor) -> None:
    """Assert that an error is at most half a unit of the last place of the largest number.

    The errors of fp32 sums and exponentials come on top.
    """
    unit = torch.finfo(result.dtype).eps
    assert float((result.float() - wide).abs().max()) <= (0.5 * unit + 1e-5) * float(
        wide.abs().max()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x = draw_normal(TOKENS, HIDDEN, dtype=dtype)
    rows = draw_normal(TOKENS * TOP_K, HIDDEN, dtype=dtype)
    slots = torch.randperm(TOKENS * TOP_K, generator=build_generator(), device="cuda").view(
        TOKENS, TOP_K
    )
    tokens = slots.flatten() // TOP_K
    assert torch.equal(FUSED.permute(x, tokens), PLAIN.permute(x, tokens))
    assert_rounded_once(
        FUSED.unpermute(rows, slots, True), PLAIN.unpermute(rows.float(), slots, True)
    )
    x_BSHD = draw_normal(2, TOKENS // 2, HEADS, HEAD_DIM, dtype=dtype)
    angle = 9 * draw_normal(TOKENS // 2, HEAD_DIM // 2)
    cos = angle.cos()
    sin = angle.sin()
    assert_rounded_once(FUSED.rotate(x_BSHD, cos, sin), PLAIN.rotate(x_BSHD.float(), cos, sin))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clamped", [True, False])
def test_half_precision_activations_are_rounded_once(dtype: torch.dtype, clamped: bool) -> None:
    gated = 4 * draw_normal(TOKENS, 2 * WIDTH, dtype=dtype)
    weight = draw_normal(TOKENS).sigmoid()
    grad = draw_normal(TOKENS, WIDTH, dtype=dtype)
    assert_rounded_once(
        FUSED.swiglu(gated, weight, clamped), PLAIN.swiglu(gated.float(), weight, clamped)
    )
    result, result_weight = FUSED.swiglu_backward(grad, gated, weight, clamped)
    expected, expected_weight = PLAIN.swiglu_backward(grad.float(), gated.float(), weight, clamped)
    assert_rounded_once(result, expected)
    assert result_weight is not None
    assert expected_weight is not None
    torch.testing.assert_close(
        result_weight, expected_weight, rtol=1e-4, atol=1e-4 * float(expected_weight.abs().max())
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [HEAD_DIM, HIDDEN])
def test_half_precision_norms_are_rounded_once(dtype: torch.dtype, width: int) -> None:
    """Forward rounds twice, as the reference does; the weight's gradient is the same every time."""
    x, grad = draw_normal(2, TOKENS, width, dtype=dtype)
    weight = (1 + draw_normal(width) / 8).to(dtype)
    result, scale = FUSED.rms_norm(x, weight, EPS)
    expected, expected_scale = PLAIN.rms_norm(x, weight, EPS)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0.0)
    # A scale that is one fp32 rounding apart may round to the 16-bit neighbour, and so may what is
    # computed from it.
    torch.testing.assert_close(
        result, expected, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny
    )
    for kept in (scale, None):
        settings = (EPS, kept, slice(TOKENS // 4, TOKENS))
        result_x, result_weight = FUSED.rms_norm_backward(grad, x, weight, *settings)
        expected_x, expected_weight = PLAIN.rms_norm_backward(
            grad.float(), x.float(), weight.float(), *settings
        )
        assert_rounded_once(result_x, expected_x)
        assert_rounded_once(result_weight, expected_weight)
        assert torch.equal(result_weight, FUSED.rms_norm_backward(grad, x, weight, *settings)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_losses_are_rounded_once(dtype: torch.dtype) -> None:
    """The losses are of a whole vocabulary, and of a part of one whose last columns are padding."""
    tokens = 64
    size = VOCABULARY - 3
    logits = 4 * draw_normal(tokens, VOCABULARY, dtype=dtype)
    grad = draw_normal(tokens)
    targets = torch.randint(0, size, (tokens,), generator=build_generator(), device="cuda")
    targets[::5] = -1
    has_target = targets >= 0
    expected = PLAIN.cross_entropy(logits.float(), targets)
    torch.testing.assert_close(
        FUSED.cross_entropy(logits, targets)[has_target], expected[has_target], rtol=1e-5, atol=1e-5
    )
    top = logits[:, :size].amax(-1).float()
    summed = PLAIN.sum_exp(logits[:, :size].float(), top)
    torch.testing.assert_close(FUSED.sum_exp(logits[:, :size], top), summed, rtol=1e-5, atol=0.0)
    for log_sum, columns in ((None, VOCABULARY), (top + summed.log(), size)):
        result = FUSED.cross_entropy_backward(grad, logits, targets, log_sum, columns)
        assert_rounded_once(
            result, PLAIN.cross_entropy_backward(grad, logits.float(), targets, log_sum, columns)
        )


def _measure_ms(function: Callable[[], object]) -> float:
    for _ in range(3):
        function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 20


def test_times_of_the_kernels_and_the_reference_are_reported(
    record_property: Callable[[str, object], None],
) -> None:
    """Times are reported, not judged: forward and backward of each chain, in bf16."""
    bf16 = torch.bfloat16
    spec = RouterSpec(top_k=TOP_K, score=ScoreFunction.SOFTMAX)
    x = draw_normal(TOKENS, HIDDEN, dtype=bf16)
    rows = draw_normal(TOKENS * TOP_K, HIDDEN, dtype=bf16)
    slots = torch.randperm(TOKENS * TOP_K, generator=build_generator(), device="cuda").view(
        TOKENS, TOP_K
    )
    tokens = slots.flatten() // TOP_K
    weight = draw_normal(TOKENS * TOP_K).sigmoid()
    gated = draw_normal(TOKENS * TOP_K, 2 * WIDTH, dtype=bf16)
    grad = draw_normal(TOKENS * TOP_K, WIDTH, dtype=bf16)
    x_BSHD = draw_normal(1, TOKENS, HEADS, HEAD_DIM, dtype=bf16)
    angle = draw_normal(TOKENS, HEAD_DIM // 2)
    norm_weight = draw_normal(HIDDEN).to(bf16)
    grad_x = draw_normal(TOKENS, HIDDEN, dtype=bf16)
    vocab_logits = draw_normal(TOKENS, VOCABULARY, dtype=bf16)
    targets = tokens[:TOKENS]
    grad_losses = draw_normal(TOKENS)
    router_logits = draw_normal(TOKENS, EXPERTS).requires_grad_()
    for kernels in (FUSED, PLAIN):

        def route(kernels: KernelSet = kernels) -> None:
            _, weights, scores = kernels.route_tokens(router_logits, spec, None, None)
            (weights.sum() + scores.square().sum()).backward()

        functions: dict[str, Callable[[], object]] = {
            "permute": lambda kernels=kernels: kernels.permute(x, tokens),
            "unpermute": lambda kernels=kernels: kernels.unpermute(rows, slots, True),
            "unpermute_some": lambda kernels=kernels: kernels.unpermute(rows, slots, False),
            "swiglu": lambda kernels=kernels: kernels.swiglu(gated, weight, False),
            "swiglu_backward": lambda kernels=kernels: kernels.swiglu_backward(
                grad, gated, weight, False
            ),
            "rms_norm": lambda kernels=kernels: kernels.rms_norm(x, norm_weight, EPS),
            "rms_norm_backward": lambda kernels=kernels: kernels.rms_norm_backward(
                grad_x, x, norm_weight, EPS, None, slice(None)
            ),
            "rotate": lambda kernels=kernels: kernels.rotate(x_BSHD, angle, angle),
            "cross_entropy": lambda kernels=kernels: kernels.cross_entropy(vocab_logits, targets),
            "cross_entropy_backward": lambda kernels=kernels: kernels.cross_entropy_backward(
                grad_losses, vocab_logits, targets, None, VOCABULARY
            ),
            "router": route,
        }
        for name, function in functions.items():
            time_ms = _measure_ms(function)
            record_property(f"{type(kernels).__name__} {name} ms", time_ms)
            print(f"{type(kernels).__name__:9} {name:22} {time_ms:8.3f} ms")
            assert time_ms > 0
