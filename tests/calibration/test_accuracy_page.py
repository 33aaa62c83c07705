"""The page of accuracy shows every timed run with its interval, and names what is far off."""

from __future__ import annotations

from typing import Any

from docs.tools.accuracy import (
    render_blind,
    render_own_runs,
    render_page,
    render_picture,
    render_runs,
    render_unexplained,
)


def row(name: str, measured: float, predicted: float | None) -> dict[str, Any]:
    return {
        "id": name,
        "publisher": name[0],
        "measured_tokens_per_s_per_gpu": measured,
        "predicted_tokens_per_s_per_gpu": predicted,
        "interval_80": (90.0, 110.0),
    }


MEMORY = {
    "peaks": 2,
    "median_error": 0.05,
    "p90_error": 0.1,
    "coverage_80": 0.5,
    "coverage_95": None,
    "ran": 3,
    "ran_fits": 2,
    "ran_uncertain": 1,
}
SPLIT: dict[str, Any] = {
    "by": "moe",
    "name": "all",
    "speeds": {"rows": 3, "median_error": 0.1, "p90_error": 0.2, "bias": -0.01},
    "coverage_80": 0.8,
    "coverage_95": 0.95,
    "rank_correlation": 0.9,
    "regret": 0.01,
}
CHOICES: dict[str, Any] = {
    "jobs": [{}, {}],
    "regret_by_prediction": 0.01,
    "regret_by_bound": 0.02,
    "error_by_prediction": 0.03,
    "biases": [{"name": "moe", "jobs": 4, "error": 0.21, "job_error": 0.1, "expected": 0.05}],
}
REPORT = {
    "summary": {"splits": [SPLIT], "memory": MEMORY, "choices": CHOICES},
    "rows": [row("a-1", 100, 105), row("b-1", 1000, 500), row("b-2", 1000, None)],
}

OWN_SPLIT: dict[str, Any] = {**SPLIT, "speeds": {**SPLIT["speeds"], "median_error": 0.05}}
OWN_REPORT = {"summary": {"splits": [OWN_SPLIT, {**OWN_SPLIT, "name": "publisher a"}]}}


def test_the_page_has_every_timed_run() -> None:
    cells = {"a-1": {"model": "org/M", "num_gpus": "8", "hardware": "H100"}}
    page = render_page(REPORT, OWN_REPORT)
    assert "of 2 jobs with five" in page
    assert "| moe | 4 | +21.0 % | +10.0 % | +10.0 % | +5.0 % |" in page
    runs = render_runs(REPORT, cells)
    assert "| a-1 | M | 8 H100 |  | 100 | 105 | 90-110 | +5.0 % |" in runs["a"]
    assert "| [b](accuracy/b.md) | 1 |" in page
    assert "b-2" not in page + runs["b"]
    assert "| moe | all | 3 | 10.0 % | 20.0 % | -1.0 % | 80.0 % | 95.0 % | 0.90 | 1.0 % |" in page
    stacks = page[page.index("neither the framework") : page.index("## Peaks")]
    assert "| moe | all | 3 | 5.0 % |" in stacks
    assert "publisher a" not in stacks


def test_pages_beside_it_have_one_idea_each() -> None:
    """Own runs, runs that nothing was fitted to, and what is far off."""
    own = render_own_runs(REPORT, OWN_REPORT)
    alike = own[own.index("same model and part") : own.index("publisher's own rows")]
    assert "| moe | all | 3 | 5.0 % |" in alike
    assert "| moe | all | 3 | 10.0 % |" in own[own.index("publisher's own rows") :]
    rows = [row("mlperf-1", 100, 150), row("maxblack-1", 100, 120), row("kempner-1", 100, 130)]
    blind = render_blind(
        {"summary": {"splits": [OWN_SPLIT], "memory": MEMORY}, "rows": rows},
        {"mlperf-1", "maxblack-1"},
    )
    assert "| 17 | 24.6 % | 74.5 % | 1 | 50.0 % | 50.0 % |" in blind
    assert "| 19 | 9.6 % | 27.2 % | 1 | 20.0 % | 20.0 % |" in blind
    assert "| 14 | 23.2 % | 25.2 % | 1 | 30.0 % | 30.0 % |" in blind
    assert "| moe | all | 3 | 5.0 % |" in blind
    assert "Of 3 runs that ran, 2 are said to fit" in blind
    unexplained = render_unexplained(REPORT)
    assert "b-1" in unexplained
    assert "a-1" not in unexplained


def test_the_picture_has_a_point_a_run() -> None:
    picture = render_picture(REPORT)
    assert picture.count('r="3"') == 2
    assert picture.startswith("<svg")
