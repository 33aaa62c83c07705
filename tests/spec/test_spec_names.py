"""The nearest name is of the family first, and has the letters second."""

from __future__ import annotations

import pytest

from moewright.intake import catalogue
from moewright.intake.megatron.options import option_table
from moewright.spec.names import closest_match

MODELS = [name.rpartition("/")[2] for name in catalogue.model_names()]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("qwen3-30b", "Qwen3-30B-A3B"),
        ("qwen3-30", "Qwen3-30B-A3B"),
        ("qwn3-30b", "Qwen3-30B-A3B"),
        ("Qwen3-235", "Qwen3-235B-A22B"),
        ("qwen-235b", "Qwen3-235B-A22B"),
        ("Qwen3-235B-A22B-Instruct-2507", "Qwen3-235B-A22B"),
        ("deepseekv3", "DeepSeek-V3"),
        ("deepseek-v3.1", "DeepSeek-V3.2"),
        ("deepsek-v3", "DeepSeek-V3"),
        ("deepseek-v2-light", "DeepSeek-V2-Lite"),
        ("mixtral", "Mixtral-8x7B-v0.1"),
        ("mixtral-8x22b", "Mixtral-8x22B-v0.1"),
        ("mistral-7b", "Mistral-7B-v0.1"),
        ("llama3-70b", "Meta-Llama-3-70B"),
        ("llama-3.1-70", "Llama-3.1-70B"),
        ("llama2-7b", "Llama-2-7b"),
        ("gptoss-120b", "gpt-oss-120b"),
        ("kimi-k2-instruct", "Kimi-K2"),
        ("olmoe", "OLMoE-1B-7B-0924"),
        ("phi-3", "Phi-3.5-MoE"),
        ("falcon-180b", ""),
        ("", ""),
    ],
)
def test_models(name: str, nearest: str) -> None:
    assert closest_match(name, MODELS) == nearest


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("H800x", "H800"),
        ("H80", "H800"),
        ("h10", "H100"),
        ("H100-PCI", "H100-PCIe"),
        ("A80", "A800"),
        ("GB2000", "GB200"),
        ("B201", "B200"),
        ("TPU", "TPU7x"),
        ("RTX6000", "RTX-PRO-6000"),
        ("Gaudi", ""),
    ],
)
def test_devices(name: str, nearest: str) -> None:
    assert closest_match(name, catalogue.hardware_names()) == nearest


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("--micro-batchsize", "--micro-batch-size"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--expert-paralel-size", "--expert-model-parallel-size"),
        ("--moe-topk", "--moe-router-topk"),
        ("--seqlen", "--seq-length"),
        ("--n-layers", "--num-layers"),
        ("--zzz", ""),
    ],
)
def test_options(name: str, nearest: str) -> None:
    assert closest_match(name, option_table()) == nearest
