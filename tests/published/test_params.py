"""Parameter counts and FLOPs of every catalogue model against published and independent figures."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from moewright.intake import catalogue
from moewright.rules.shapes import flops, parameters

DATA = Path(__file__).parent / "data"
ROWS = tuple(csv.DictReader((DATA / "model_params.csv").open(encoding="utf-8")))
EXACT = 5e-4

# Differences between hyper-parameters and the published round totals; Kimi-K2's is known and
# unexplained.
PUBLISHED_TOTAL = {"moonshotai/Kimi-K2": 0.016}
# Moonlight's; "active" is with or without the input embedding, whichever the source counts.
PUBLISHED_ACTIVE = 0.0285

# Total and active, billions.
ALSO_PUBLISHED = {
    "allenai/OLMoE-1B-7B-0924": (6.92, 1.3),
    "Qwen/Qwen3-32B": (32.8, 32.8),
    "Qwen/Qwen3-14B": (14.8, 14.8),
    "Qwen/Qwen3-4B": (4.02, 4.02),
    "Qwen/Qwen3-1.7B": (1.72, 1.72),
    "Qwen/Qwen3-0.6B": (0.596, 0.596),
    "Qwen/Qwen1.5-MoE-A2.7B": (14.3, 2.7),
    "Qwen/Qwen2.5-7B": (7.61, 7.61),
    "mistralai/Mistral-7B-v0.1": (7.24, 7.24),
    "meta-llama/Llama-3.1-8B": (8.03, 8.03),
    "meta-llama/Llama-3.1-70B": (70.6, 70.6),
    "meta-llama/Llama-3.2-1B": (1.24, 1.24),
    # its card says 7B: 32 x (4 x 4096^2 + 3 x 4096 x 11,008) + 2 x 103,168 x 4096
    "internlm/internlm-7b": (7.32, 7.32),
}

WINDOWED = ("openai/gpt-oss-120b", "openai/gpt-oss-20b")


def test_every_catalogue_model_has_a_row() -> None:
    counts = csv.DictReader((DATA / "model_counts.csv").open(encoding="utf-8"))
    listed = {row["model"] for row in (*ROWS, *counts)}
    assert set(catalogue.model_names()) - listed == set(ALSO_PUBLISHED)


@pytest.mark.parametrize("name", ALSO_PUBLISHED)
def test_models_outside_the_table_have_their_published_counts(name: str) -> None:
    """Totals are in billions as reports and model cards print them, rounded there."""
    counted = parameters.count_parameters(catalogue.model(name))
    total, active = ALSO_PUBLISHED[name]
    assert counted.total / 1e9 == pytest.approx(total, rel=0.006)
    assert counted.active / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("row", ROWS, ids=[row["model"] for row in ROWS])
def test_counts_equal_the_independent_ones(row: dict[str, str]) -> None:
    counted = parameters.count_parameters(catalogue.model(row["model"]))
    for field in ("total", "active", "active_without_embedding", "mtp", "embedding"):
        expected = float(row[f"{field}_b"])
        # The figures are printed to 1e-3 billion.
        assert getattr(counted, field) / 1e9 == pytest.approx(expected, rel=EXACT, abs=5.1e-4), (
            field
        )


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row["published_total_b"]], ids=lambda row: row["model"]
)
def test_counts_equal_the_published_totals(row: dict[str, str]) -> None:
    counted = parameters.count_parameters(catalogue.model(row["model"]))
    total = float(row["published_total_b"]) * 1e9
    active = float(row["published_active_b"]) * 1e9
    assert counted.total == pytest.approx(total, rel=PUBLISHED_TOTAL.get(row["model"], 0.0075))
    nearest = min(
        abs(counted.active / active - 1), abs(counted.active_without_embedding / active - 1)
    )
    assert nearest <= PUBLISHED_ACTIVE


def test_the_mtp_module_of_deepseek_v3_explains_its_published_total() -> None:
    """DeepSeek-V3's checkpoint of 685B repeats embedding and head in the MTP module: 2 x 0.927B."""
    counted = parameters.count_parameters(catalogue.model("DeepSeek-V3"))
    assert counted.total + counted.mtp + 2 * counted.embedding == pytest.approx(685e9, rel=1e-3)


def test_olmoe_has_its_published_totals() -> None:
    """The OLMoE paper prints 6.9B total and 1.3B active parameters."""
    counted = parameters.count_parameters(catalogue.model("OLMoE-1B-7B-0924"))
    assert counted.total == pytest.approx(6.9e9, rel=5e-3)
    assert counted.active == pytest.approx(1.3e9, rel=2e-2)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row["seq_len"]], ids=lambda row: row["model"]
)
def test_flops_per_token_equal_the_independent_ones(row: dict[str, str]) -> None:
    model = catalogue.model(row["model"])
    if row["model"] in WINDOWED:
        model = replace(model, attention=replace(model.attention, sliding_window=0, window_every=0))
    seq_len = int(row["seq_len"])
    with_mtp = flops.model_flops_per_token(model, seq_len) / 1e9
    without = flops.model_flops_per_token(replace(model, mtp_layers=0), seq_len) / 1e9
    assert with_mtp == pytest.approx(float(row["gflop_per_token"]), rel=EXACT)
    assert without == pytest.approx(float(row["gflop_per_token_without_mtp"]), rel=EXACT)


def test_flops_of_gpt_oss_count_its_window() -> None:
    """Megatron-Bridge from 26.06 on counts three matrices and the window.

    That is 32.63 GFLOP per token at 4096.
    """
    per_token = flops.model_flops_per_token(catalogue.model("gpt-oss-120b"), 4096)
    assert per_token / 1e9 == pytest.approx(32.63, rel=EXACT)
