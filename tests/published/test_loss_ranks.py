"""Predicted and printed losses of published families: how well the laws order their shapes.

Losses are compared within a family alone, which has one corpus and one tokenizer.
"""

from __future__ import annotations

import tomllib
from itertools import combinations
from pathlib import Path
from statistics import correlation, fmean
from typing import Any

import pytest

from moewright.cost.loss_laws import Shape, predict_losses

FAMILIES = tomllib.loads((Path(__file__).parent / "data" / "loss_families.toml").read_text())
ROOT = Path(__file__).parents[2]
NOISE = 0.01  # nats, that a second run of the same model may lie apart


def predict(family: dict[str, Any]) -> list[float]:
    shapes = [
        Shape(**{key: float(value) for key, value in row.items() if key not in ("name", "loss")})
        for row in family["shapes"]
    ]
    # Equal shapes are equal, whatever the order of sums.
    return [round(prediction.loss, 6) for prediction in predict_losses(shapes, shapes[0])]


def rank(values: list[float]) -> list[float]:
    """Rank values from 0, those that are equal by their mean rank."""
    ordered = sorted(values)
    return [
        fmean(place for place, other in enumerate(ordered) if other == value) for value in values
    ]


def count_ordered_pairs(family: dict[str, Any]) -> tuple[int, int]:
    """Count the pairs that are ordered as printed, and those that lie apart by more than noise."""
    losses = [row["loss"] for row in family["shapes"]]
    apart = [
        (mine[1] - other[1]) * (mine[0] - other[0]) > 0
        for mine, other in combinations(zip(losses, predict(family), strict=True), 2)
        if abs(mine[0] - other[0]) > NOISE
    ]
    return sum(apart), len(apart)


@pytest.mark.parametrize(
    ("name", "least"),
    [("DeepSeekMoE 2B", 0.7), ("DeepSeekMoE 145B", 0.75), ("Switch Transformer", 0.95)],
)
def test_laws_rank_the_shapes_of_a_family_nearly_as_it_printed_them(
    name: str, least: float
) -> None:
    (family,) = (family for family in FAMILIES["family"] if family["name"] == name)
    printed = [row["loss"] for row in family["shapes"]]
    rho = correlation(rank(predict(family)), rank(printed))
    assert least < rho <= 1
    ordered, apart = count_ordered_pairs(family)
    row = f"| {name} | {len(printed)} | {rho:.2f} | {ordered} of {apart} |"
    assert row in (ROOT / "docs" / "how_to" / "design_a_model.md").read_text()
