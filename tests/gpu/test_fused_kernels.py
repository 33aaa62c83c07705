"""Triton's kernels compiled: in 16 bits against fp32, and beside the reference on the clock.

Skipped without a device. In fp32 tests/engine/test_fused_triton.py compiles them where there is one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moewright.engine.env import interprets_triton
from moewright.engine.fused.plain import Plain
from moewright.spec.model import RouterSpec, ScoreFunction

pytest.importorskip("triton", reason="the Triton kernels need the package triton, which torch brings on CUDA alone")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or interprets_triton(), reason="needs a CUDA device"),
]

from moewright.engine.fused.compiled import Compiled  # noqa: E402 - which needs Triton

PLAIN, FUSED = Plain(), Compiled()
# A layer of Qwen3-30B-A3B on one device: 4096 tokens, 8 of 128 experts, hidden 2048, expert width 768.
TOKENS, TOP_K, EXPERTS, HIDDEN, WIDTH = 4096, 8, 128, 2048, 768


def dice() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(3)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=dice(), device="cuda").to(dtype)


def assert_rounded_once(found: torch.Tensor, wide: torch.Tensor) -> None:
    """Half a unit of the last place, of the largest number there is; and what fp32 sums and exponentials are off."""
    unit = torch.finfo(found.dtype).eps
    assert float((found.float() - wide).abs().max()) <= (0.5 * unit + 1e-5) * float(wide.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x, rows = normal(TOKENS, HIDDEN, dtype=dtype), normal(TOKENS * TOP_K, HIDDEN, dtype=dtype)
    slots = torch.randperm(TOKENS * TOP_K, generator=dice(), device="cuda").view(TOKENS, TOP_K)
    tokens = slots.flatten() // TOP_K
    assert torch.equal(FUSED.spread(x, tokens), PLAIN.spread(x, tokens))
    assert_rounded_once(FUSED.sum_slots(rows, slots, True), PLAIN.sum_slots(rows.float(), slots, True))
    gated, weight = normal(TOKENS, 2 * WIDTH, dtype=dtype), normal(TOKENS).sigmoid()
    grad = normal(TOKENS, WIDTH, dtype=dtype)
    assert_rounded_once(FUSED.swiglu(gated, weight), PLAIN.swiglu(gated.float(), weight))
    found, of_weight = FUSED.swiglu_backward(grad, gated, weight)
    wanted, wanted_weight = PLAIN.swiglu_backward(grad.float(), gated.float(), weight)
    assert_rounded_once(found, wanted)
    assert of_weight is not None
    assert wanted_weight is not None
    torch.testing.assert_close(of_weight, wanted_weight, rtol=1e-4, atol=1e-4 * float(wanted_weight.abs().max()))


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
    x, rows = normal(TOKENS, HIDDEN, dtype=bf16), normal(TOKENS * TOP_K, HIDDEN, dtype=bf16)
    slots = torch.randperm(TOKENS * TOP_K, generator=dice(), device="cuda").view(TOKENS, TOP_K)
    tokens, weight = slots.flatten() // TOP_K, normal(TOKENS * TOP_K).sigmoid()
    gated, grad = normal(TOKENS * TOP_K, 2 * WIDTH, dtype=bf16), normal(TOKENS * TOP_K, WIDTH, dtype=bf16)
    logits = normal(TOKENS, EXPERTS).requires_grad_()
    for kernels in (FUSED, PLAIN):

        def weighed(kernels: Plain | Compiled = kernels) -> None:
            _, weights, scores = kernels.weigh(logits, spec, None, None)
            (weights.sum() + scores.square().sum()).backward()

        works: dict[str, Callable[[], object]] = {
            "spread": lambda kernels=kernels: kernels.spread(x, tokens),
            "sum_slots": lambda kernels=kernels: kernels.sum_slots(rows, slots, True),
            "sum_some_slots": lambda kernels=kernels: kernels.sum_slots(rows, slots, False),
            "swiglu": lambda kernels=kernels: kernels.swiglu(gated, weight),
            "swiglu_backward": lambda kernels=kernels: kernels.swiglu_backward(grad, gated, weight),
            "router": weighed,
        }
        for name, work in works.items():
            taken = _milliseconds(work)
            record_property(f"{type(kernels).__name__} {name} ms", taken)
            print(f"{type(kernels).__name__:9} {name:16} {taken:8.3f} ms")
            assert taken > 0
