"""Triton's kernels compiled: in 16 bits against fp32, and beside the reference on the clock.

Skipped without a device. In fp32 tests/engine/test_fused_triton.py compiles them where there is
one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moewright.engine.kernels.fused.reference import TorchKernels
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

from moewright.engine.kernels.fused.triton import TritonKernels  # noqa: E402 - which needs Triton

PLAIN, FUSED = TorchKernels(), TritonKernels()
# Qwen3-30B-A3B on one device: 4096 tokens, 8 of 128 experts, hidden 2048, expert width 768, 32
# heads of 128.
TOKENS, TOP_K, EXPERTS, HIDDEN, WIDTH, HEADS, HEAD, VOCABULARY = (
    4096,
    8,
    128,
    2048,
    768,
    32,
    128,
    151936,
)
EPS = 1e-6


def dice() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(3)


def draw_normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=dice(), device="cuda").to(dtype)


def assert_rounded_once(found: torch.Tensor, wide: torch.Tensor) -> None:
    """Half a unit of the last place, of the largest number there is; and what fp32 sums and
    exponentials are off."""
    unit = torch.finfo(found.dtype).eps
    assert float((found.float() - wide).abs().max()) <= (0.5 * unit + 1e-5) * float(
        wide.abs().max()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x, rows = (
        draw_normal(TOKENS, HIDDEN, dtype=dtype),
        draw_normal(TOKENS * TOP_K, HIDDEN, dtype=dtype),
    )
    slots = torch.randperm(TOKENS * TOP_K, generator=dice(), device="cuda").view(TOKENS, TOP_K)
    tokens = slots.flatten() // TOP_K
    assert torch.equal(FUSED.permute(x, tokens), PLAIN.permute(x, tokens))
    assert_rounded_once(
        FUSED.unpermute(rows, slots, True), PLAIN.unpermute(rows.float(), slots, True)
    )
    x_BSHD, angle = (
        draw_normal(2, TOKENS // 2, HEADS, HEAD, dtype=dtype),
        9 * draw_normal(TOKENS // 2, HEAD // 2),
    )
    cos, sin = angle.cos(), angle.sin()
    assert_rounded_once(FUSED.rotate(x_BSHD, cos, sin), PLAIN.rotate(x_BSHD.float(), cos, sin))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clamped", [True, False])
def test_half_precision_activations_are_rounded_once(dtype: torch.dtype, clamped: bool) -> None:
    gated, weight = 4 * draw_normal(TOKENS, 2 * WIDTH, dtype=dtype), draw_normal(TOKENS).sigmoid()
    grad = draw_normal(TOKENS, WIDTH, dtype=dtype)
    assert_rounded_once(
        FUSED.swiglu(gated, weight, clamped), PLAIN.swiglu(gated.float(), weight, clamped)
    )
    found, of_weight = FUSED.swiglu_backward(grad, gated, weight, clamped)
    wanted, wanted_weight = PLAIN.swiglu_backward(grad.float(), gated.float(), weight, clamped)
    assert_rounded_once(found, wanted)
    assert of_weight is not None
    assert wanted_weight is not None
    torch.testing.assert_close(
        of_weight, wanted_weight, rtol=1e-4, atol=1e-4 * float(wanted_weight.abs().max())
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [HEAD, HIDDEN])
def test_half_precision_norms(dtype: torch.dtype, width: int) -> None:
    """Forward rounds twice, as the reference does: before the weight and after. The weight's
    gradient repeats."""
    x, grad = draw_normal(2, TOKENS, width, dtype=dtype)
    weight = (1 + draw_normal(width) / 8).to(dtype)
    found, scale = FUSED.rms_norm(x, weight, EPS)
    wanted, wanted_scale = PLAIN.rms_norm(x, weight, EPS)
    torch.testing.assert_close(scale, wanted_scale, rtol=1e-5, atol=0.0)
    # a scale one fp32 rounding apart may round to the 16-bit neighbour, and so may what is made of
    # that
    torch.testing.assert_close(
        found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny
    )
    for kept in (scale, None):
        given = (weight, EPS, kept, slice(TOKENS // 4, TOKENS))
        of_x, of_weight = FUSED.rms_norm_backward(grad, x, *given)
        wide_weight, *rest = given
        wanted_x, wanted_weight = PLAIN.rms_norm_backward(
            grad.float(), x.float(), wide_weight.float(), *rest
        )
        assert_rounded_once(of_x, wanted_x)
        assert_rounded_once(of_weight, wanted_weight)
        assert torch.equal(of_weight, FUSED.rms_norm_backward(grad, x, *given)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_losses(dtype: torch.dtype) -> None:
    """Of a whole vocabulary, and of a part of one whose last columns are padding."""
    tokens, size = 64, VOCABULARY - 3
    logits, grad = 4 * draw_normal(tokens, VOCABULARY, dtype=dtype), draw_normal(tokens)
    targets = torch.randint(0, size, (tokens,), generator=dice(), device="cuda")
    targets[::5] = -1
    meant = targets >= 0
    wanted = PLAIN.cross_entropy(logits.float(), targets)
    torch.testing.assert_close(
        FUSED.cross_entropy(logits, targets)[meant], wanted[meant], rtol=1e-5, atol=1e-5
    )
    top = logits[:, :size].amax(-1).float()
    summed = PLAIN.sum_exp(logits[:, :size].float(), top)
    torch.testing.assert_close(FUSED.sum_exp(logits[:, :size], top), summed, rtol=1e-5, atol=0.0)
    for log_sum, columns in ((None, VOCABULARY), (top + summed.log(), size)):
        found = FUSED.cross_entropy_backward(grad, logits, targets, log_sum, columns)
        assert_rounded_once(
            found, PLAIN.cross_entropy_backward(grad, logits.float(), targets, log_sum, columns)
        )


def _milliseconds(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 20


def test_times_beside_the_reference(record_property: Callable[[str, object], None]) -> None:
    """Reported, not judged: forward and backward of each chain, in bf16."""
    bf16, spec = torch.bfloat16, RouterSpec(top_k=TOP_K, score=ScoreFunction.SOFTMAX)
    x, rows = (
        draw_normal(TOKENS, HIDDEN, dtype=bf16),
        draw_normal(TOKENS * TOP_K, HIDDEN, dtype=bf16),
    )
    slots = torch.randperm(TOKENS * TOP_K, generator=dice(), device="cuda").view(TOKENS, TOP_K)
    tokens, weight = slots.flatten() // TOP_K, draw_normal(TOKENS * TOP_K).sigmoid()
    gated, grad = (
        draw_normal(TOKENS * TOP_K, 2 * WIDTH, dtype=bf16),
        draw_normal(TOKENS * TOP_K, WIDTH, dtype=bf16),
    )
    x_BSHD, angle, of_norm = (
        draw_normal(1, TOKENS, HEADS, HEAD, dtype=bf16),
        draw_normal(TOKENS, HEAD // 2),
        draw_normal(HIDDEN),
    )
    of_norm, grad_x = of_norm.to(bf16), draw_normal(TOKENS, HIDDEN, dtype=bf16)
    words, of_words, grad_words = (
        draw_normal(TOKENS, VOCABULARY, dtype=bf16),
        tokens[:TOKENS],
        draw_normal(TOKENS),
    )
    logits = draw_normal(TOKENS, EXPERTS).requires_grad_()
    for kernels in (FUSED, PLAIN):

        def weighed(kernels: TorchKernels | TritonKernels = kernels) -> None:
            _, weights, scores = kernels.route_tokens(logits, spec, None, None)
            (weights.sum() + scores.square().sum()).backward()

        works: dict[str, Callable[[], object]] = {
            "spread": lambda kernels=kernels: kernels.permute(x, tokens),
            "sum_slots": lambda kernels=kernels: kernels.unpermute(rows, slots, True),
            "sum_some_slots": lambda kernels=kernels: kernels.unpermute(rows, slots, False),
            "swiglu": lambda kernels=kernels: kernels.swiglu(gated, weight, False),
            "swiglu_backward": lambda kernels=kernels: kernels.swiglu_backward(
                grad, gated, weight, False
            ),
            "norm": lambda kernels=kernels: kernels.rms_norm(x, of_norm, EPS),
            "norm_backward": lambda kernels=kernels: kernels.rms_norm_backward(
                grad_x, x, of_norm, EPS, None, slice(None)
            ),
            "rotate": lambda kernels=kernels: kernels.rotate(x_BSHD, angle, angle),
            "losses": lambda kernels=kernels: kernels.cross_entropy(words, of_words),
            "losses_backward": lambda kernels=kernels: kernels.cross_entropy_backward(
                grad_words, words, of_words, None, VOCABULARY
            ),
            "router": weighed,
        }
        for name, work in works.items():
            taken = _milliseconds(work)
            record_property(f"{type(kernels).__name__} {name} ms", taken)
            print(f"{type(kernels).__name__:9} {name:16} {taken:8.3f} ms")
            assert taken > 0
