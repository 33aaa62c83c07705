"""Rotary frequencies against those of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moewright.engine.model.rope import rope_frequencies, softmax_factor
from moewright.intake import hf
from moewright.spec.model import RopeSpec

utils = pytest.importorskip("transformers.modeling_rope_utils")

YARN = {
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3 = {
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def hf_frequencies(
    kind: str, table: dict[str, Any], theta: float, dim: int, **more: int
) -> tuple[torch.Tensor, float]:
    parameters = {"rope_type": kind, "rope_theta": theta, **table}
    config = SimpleNamespace(
        rope_parameters=parameters, head_dim=dim, hidden_size=4 * dim, num_attention_heads=4,
        max_position_embeddings=163840, standardize_rope_params=lambda: None, per_layer_config={},
    )  # fmt: skip
    frequencies, factor = utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **more)
    return frequencies, factor


@pytest.mark.parametrize(
    ("kind", "table", "spec"),
    [
        ("linear", {"factor": 4.0}, RopeSpec(scaling="linear", factor=4.0)),
        (
            "yarn",
            {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            RopeSpec(
                scaling="yarn",
                factor=40.0,
                original_max_position=4096,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        ),
        ("yarn", YARN, RopeSpec(scaling="yarn", factor=40.0, original_max_position=4096)),
        (
            "yarn",
            {**YARN, "factor": 32.0, "truncate": False},
            RopeSpec(scaling="yarn", factor=32.0, original_max_position=4096),
        ),
        (
            "llama3",
            LLAMA3,
            RopeSpec(
                scaling="llama3",
                factor=8.0,
                original_max_position=8192,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            ),
        ),
    ],
)
def test_frequencies_and_magnitude(kind: str, table: dict[str, Any], spec: RopeSpec) -> None:
    expected, expected_factor = hf_frequencies(kind, table, spec.theta, 64)
    frequencies, factor = rope_frequencies(
        spec, 64, seq_len=4096, rounded=table.get("truncate", True)
    )
    torch.testing.assert_close(frequencies.float(), expected, rtol=1e-5, atol=0)
    assert factor == pytest.approx(expected_factor)


@pytest.mark.parametrize("length", [4096, 4097])
def test_longrope_has_factors_of_short_and_of_long_sequences(length: int) -> None:
    table = {
        "short_factor": [1.0 + 0.02 * pair for pair in range(32)],
        "long_factor": [1.0 + 0.9 * pair for pair in range(32)],
        "original_max_position_embeddings": 4096,
    }
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_size": 256,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "vocab_size": 8,
        "max_position_embeddings": 163840,
        "rope_scaling": {"type": "longrope", **table},
    }
    model = hf.parse_config({"model_type": "phimoe", **config}, where="c", name="phi")
    expected, expected_factor = hf_frequencies("longrope", table, 10000.0, 64, seq_len=length)
    frequencies, factor = rope_frequencies(model.attention.rope, 64, seq_len=length)
    torch.testing.assert_close(frequencies.float(), expected, rtol=1e-5, atol=0)
    assert factor == pytest.approx(expected_factor)


def test_latent_attention_scales_its_softmax_under_yarn() -> None:
    """DeepSeek-V3 scales by 0.1 ln 40 + 1 = 1.369, squared."""
    deepseek = RopeSpec(scaling="yarn", factor=40.0, original_max_position=4096, mscale_all_dim=1.0)
    assert softmax_factor(deepseek) == pytest.approx(1.3689**2, rel=1e-4)
    assert softmax_factor(RopeSpec()) == 1.0
