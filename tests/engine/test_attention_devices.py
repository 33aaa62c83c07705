"""Attention where a GPU's kernels run: which kernel takes what, and in which shapes.

Meta tensors go the way of a device that is not a CPU, with stand-ins for torch's flash kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moewright.engine.kernels import attention as module
from moewright.engine.kernels.attention import AttentionMask, attention, attention_backward
from moewright.engine.kernels.exact_attention import EXACT_ATTENTION, EXACT_ATTENTION_BACKWARD
from moewright.engine.observe.flop_counter import FlopCounter
from moewright.engine.observe.module_scopes import ObservingMode

CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def draw_heads(*shapes: tuple[int, ...], device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("is_masked", [True, False])
def test_exact_attention_is_that_of_the_kernel_of_a_cpu(is_causal: bool, is_masked: bool) -> None:
    """Four query heads share two key heads; keys may be more than queries without a causal mask."""
    keys = 24 if is_causal else 40
    q, k, v, grad = draw_heads((2, 4, 24, 16), (2, 2, keys, 16), (2, 2, keys, 16), (2, 4, 24, 16))
    mask = None
    if is_masked:
        if is_causal:
            pytest.skip("the kernel of a CPU takes one or the other")
        mask = torch.zeros(24, keys).masked_fill_(torch.ones(24, keys).tril(-6).bool(), -torch.inf)
    out, lse = CPU_FORWARD(q, k, v, 0.0, is_causal, attn_mask=mask)
    exact = EXACT_ATTENTION(q, k, v, 0.0, is_causal, attn_mask=mask)
    for actual, expected in zip(exact, (out, lse), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    grads = CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask)
    exact = EXACT_ATTENTION_BACKWARD(grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask)
    for actual, expected in zip(exact, grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_blocks_of_scores_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from moewright.engine.kernels import exact_attention

    q, k, v, grad = draw_heads((2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16), (2, 4, 24, 16))
    out, lse = EXACT_ATTENTION(q, k, v, 0.0, True)
    grads = EXACT_ATTENTION_BACKWARD(grad, q, k, v, out, lse, 0.0, True)
    monkeypatch.setattr(exact_attention, "_BLOCK_SCORES", 5 * 2 * 4 * 24)
    block_out, block_lse = EXACT_ATTENTION(q, k, v, 0.0, True)
    torch.testing.assert_close((block_out, block_lse), (out, lse))
    torch.testing.assert_close(EXACT_ATTENTION_BACKWARD(grad, q, k, v, out, lse, 0.0, True), grads)


def test_fp32_on_a_gpu_does_not_come_to_the_16_bit_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted as the attention that it is."""
    for kernel in ("FLASH", "FLASH_BACKWARD", "FLASH_FOR_CPU", "FLASH_FOR_CPU_BACKWARD"):
        monkeypatch.setattr(module, kernel, None)  # no kernel of torch's is there
    q, k, v = draw_heads((2, 24, 4, 16), (2, 24, 2, 16), (2, 24, 2, 12), device="meta")
    flops: list[tuple[Any, int]] = []
    counter = FlopCounter(lambda op, count: flops.append((op, count)))
    with ObservingMode(before=(counter.count,)):
        out, state = attention(q, k, v)
        grads = attention_backward(torch.empty_like(out), q, k, v, out, state)
    assert out.shape == (2, 24, 4, 12)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    pairs = 2 * 4 * 24 * 24
    assert [count for _, count in flops] == [pairs * 28, 2 * pairs * 28]


def test_the_16_bit_kernel_gets_key_heads_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither expanded for every query head, nor without the mark of their padding (MLA)."""
    taken: list[torch.Tensor] = []

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        taken.extend((k, v))
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        return torch.empty_like(q), lse, None, None, 0, 0, q.new_empty(()), q.new_empty(()), None

    def backward(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, ...]:
        taken.extend((k, v))
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    monkeypatch.setattr(module, "FLASH", forward)
    monkeypatch.setattr(module, "FLASH_BACKWARD", backward)
    q, k, v = (
        x.bfloat16()
        for x in draw_heads((2, 24, 4, 16), (2, 24, 2, 16), (2, 24, 2, 12), device="meta")
    )
    out, state = attention(q, k, v)
    _, dk, dv = attention_backward(torch.empty_like(out), q, k, v, out, state)
    assert [x.shape[1] for x in taken] == [2, 2, 2, 2]
    assert [getattr(x, "true_width", 0) for x in taken] == [0, 12, 0, 12]
    assert (dk.shape, dv.shape) == (k.shape, v.shape)


@pytest.mark.parametrize("rows", [1, 2])
def test_windows_by_segments_give_states_by_rows(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Context parallelism merges them with those of other blocks, row by row."""
    q, k, v, grad = draw_heads(
        (rows, 24, 4, 16), (rows, 24, 2, 16), (rows, 24, 2, 16), (rows, 24, 4, 16)
    )
    mask = AttentionMask(window=5)
    out, state = attention(q, k, v, mask)
    grads = attention_backward(grad, q, k, v, out, state, mask)
    by_segments = module._attend_rows_as_segments(q, k, v, mask)
    torch.testing.assert_close(by_segments, (out, state))
    # The other way as on a GPU, whose kernel of segments stands here for itself on the CPU.
    is_block = iter([False, *[True] * 100])
    monkeypatch.setattr(module, "_runs_in_blocks", lambda x: next(is_block))
    actual = attention_backward(grad, q, k, v, *by_segments, mask)
    torch.testing.assert_close(actual, grads)
