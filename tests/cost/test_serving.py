"""Serving by the roofline: caches, unique experts of a batch, bytes and FLOPs by hand."""

from __future__ import annotations

import random

import pytest

from moewright.cost.serving import cache_bytes_per_token, estimate_serving, unique_experts
from moewright.intake import catalogue


def test_unique_experts_are_those_of_drawn_tokens() -> None:
    draws = random.Random(1)
    chosen = [
        len({expert for _ in range(32) for expert in draws.sample(range(128), 8)})
        for _ in range(400)
    ]
    assert unique_experts(128, 8, 32) == pytest.approx(sum(chosen) / len(chosen), rel=0.01)
    assert unique_experts(128, 8, 1) == pytest.approx(8)


def test_caches_are_of_heads_or_of_latents() -> None:
    # 48 layers, keys and values of 4 heads of 128, two bytes each.
    assert cache_bytes_per_token(catalogue.model("Qwen3-30B-A3B")) == 48 * 2 * 4 * 128 * 2
    # DeepSeek-V3: 61 layers of 512 + 64, as its paper counts.
    assert cache_bytes_per_token(catalogue.model("DeepSeek-V3")) == 61 * 576 * 2


def test_one_sequence_reads_its_active_weights_and_its_cache() -> None:
    model, hardware = catalogue.model("Qwen3-30B-A3B"), catalogue.hardware("1xH100")
    served = estimate_serving(model, hardware, batch=1, context=4096)
    # 3.35B active, of which the input embedding of 151,936 x 2,048 is looked up and not read.
    read_bytes = 2 * (3.353e9 - 151936 * 2048) + 4096 * 98304
    assert served.step_s == pytest.approx(read_bytes / hardware.device.memory_Bps.value, rel=0.01)
    assert served.weight_bytes == pytest.approx(61.1e9, rel=0.01)


def test_large_batches_are_bound_by_flops_and_read_every_expert() -> None:
    model, hardware = catalogue.model("Qwen3-30B-A3B"), catalogue.hardware("8xH100")
    small = estimate_serving(model, hardware, batch=8, context=16)
    large = estimate_serving(model, hardware, batch=8192, context=16)
    assert large.unique_experts == pytest.approx(128)
    assert large.tokens_per_s > 50 * small.tokens_per_s
    peak = 8 * 989e12
    assert large.tokens_per_s == pytest.approx(peak / (2 * (3.353e9 - 151936 * 2048)), rel=0.02)
