"""Parameters and FLOPs of today's models against published counts, each with its source."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from moewright.calibration.speed import megatron_flops_per_token
from moewright.intake import catalogue
from moewright.rules.shapes import flops, parameters
from moewright.spec.errors import BadInput

ROWS = tuple(
    csv.DictReader((Path(__file__).parent / "data" / "model_counts.csv").open(encoding="utf-8"))
)
BILLION = 1e9


def is_near(counted: float, printed: str, *, rel: float) -> bool:
    """Whether a count is the printed number of billions, to `rel` or to its last digit."""
    digits = printed.partition("e")[0].partition(".")[2]
    scale = float(f"1e{printed.partition('e')[2] or 0}")
    half_digit = 0.5 * scale / 10 ** len(digits)
    value = float(printed)
    return abs(counted / BILLION - value) <= max(rel * value, half_digit)


@pytest.mark.parametrize("row", ROWS, ids=[row["model"] for row in ROWS])
def test_counts_are_the_published_ones(row: dict[str, str]) -> None:
    """Sources count active parameters with or without the embedding, or without the head too."""
    counted = parameters.count_parameters(catalogue.model(row["model"]))
    assert is_near(counted.total, row["total_b"], rel=0.0085)
    if not row["active_b"]:
        return
    inner = counted.active - 2 * counted.embedding  # without the head as well
    spellings = (counted.active, counted.active_without_embedding, inner)
    assert any(is_near(active, row["active_b"], rel=0.03) for active in spellings)


@pytest.mark.parametrize(
    ("spelling", "name", "layers"),
    [
        ("PrimeIntellect/INTELLECT-3", "zai-org/GLM-4.5-Air", 46),
        ("kimi-k2.5", "moonshotai/Kimi-K2", 61),
        ("Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B", 36),
        ("Llama-4-Scout-17B-16E-Instruct", "meta-llama/Llama-4-Scout", 48),
        ("grok-1 (8 layers)", "xai-org/grok-1 (8 layers)", 8),
    ],
)
def test_models_are_known_by_the_names_that_people_type(
    spelling: str, name: str, layers: int
) -> None:
    model = catalogue.model(spelling)
    assert (model.name, model.layers) == (name, layers)


def test_a_cut_model_keeps_the_pattern_of_its_first_layers() -> None:
    whole = catalogue.model("Nemotron-3-Nano-30B-A3B")
    cut = catalogue.model("Nemotron-3-Nano-30B-A3B (5 layers)")
    assert cut.mixers == whole.mixers[:5]
    assert cut.moe_layers == (False, True, False, True, False)
    with pytest.raises(BadInput, match="has 52 layers"):
        catalogue.model("Nemotron-3-Nano-30B-A3B (53 layers)")


# GFLOP a token that the TFLOP/s and tokens/s of published runs imply, with their sequence length.
# The tables of Megatron-Bridge round the tokens/s of Ultra to whole sequences of the job.
IMPLIED = {
    "nvidia/Nemotron-3-Nano-30B-A3B": (8192, 22.28, 0.001),
    "nvidia/Nemotron-3-Super-120B-A12B": (8192, 84.73, 0.001),
    "nvidia/Nemotron-3-Ultra-550B": (8192, 360.6, 0.01),
    "nvidia/Nemotron-3-Nano-4B": (4096, 20.556, 0.001),
    "zai-org/GLM-5.2": (4096, 304.04, 0.01),
    "deepseek-ai/DeepSeek-V4-Flash": (4096, 90.8, 0.006),
}


@pytest.mark.parametrize("name", IMPLIED)
def test_flops_of_new_mixers_are_those_that_published_runs_imply(name: str) -> None:
    seq_len, gflops, rel = IMPLIED[name]
    counted = megatron_flops_per_token(catalogue.model(name), seq_len) / BILLION
    assert counted == pytest.approx(gflops, rel=rel)


def test_model_flops_take_the_width_that_mamba_layers_have() -> None:
    """Nano has 64 heads of 64, which Megatron counts as twice the hidden size, 7 % too much."""
    model = catalogue.model("Nemotron-3-Nano-30B-A3B")
    assert flops.model_flops_per_token(model, 8192) / BILLION == pytest.approx(20.77, rel=1e-3)
