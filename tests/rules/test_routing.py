"""Loads of experts and ranks: what a plan expects, and what is measured."""

from __future__ import annotations

import random
from dataclasses import replace
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewright.intake import catalogue
from moewright.rules import expert_placement, routing
from moewright.rules.job import Job
from moewright.spec.layout import Layout
from moewright.spec.workload import Routing, Workload

QWEN = catalogue.model("Qwen3-235B-A22B")
WORKLOAD = Workload(seq_len=4096, global_batch=2048)


def test_a_histogram_must_be_of_the_model() -> None:
    work = Workload(
        seq_len=1, global_batch=1, routing=Routing.MEASURED, load_histogram=((1,) * 128,)
    )
    (reason,) = routing.check_load_histogram(
        Job(model=QWEN, workload=work, layout=Layout(world_size=1))
    )
    assert "layers with experts" in str(reason)
    rows = ((1,) * 127,) * QWEN.moe_layer_count
    (reason,) = routing.check_load_histogram(
        Job(
            model=QWEN,
            workload=replace(work, load_histogram=rows),
            layout=Layout(world_size=1),
        )
    )
    assert "128 counts" in str(reason)


def test_random_balance_matches_the_published_ten_per_cent() -> None:
    """docs/formulas.md 4: E = 128 at 1024 tokens each is about 10 % over the mean."""
    assert routing.random_max_over_mean(128, 1024) == pytest.approx(1.10, abs=0.003)
    draw = random.Random(7)
    counts = [0] * 128
    for _ in range(128 * 1024):
        counts[draw.randrange(128)] += 1
    seen = routing.measure_load_balance(counts).max_over_mean
    assert seen == pytest.approx(routing.random_max_over_mean(128, 1024), rel=0.03)


def test_distinct_places() -> None:
    """docs/formulas.md 3: k = 8 over N = 4 nodes reaches 3.6 of them."""
    assert routing.expected_distinct(4, 8) == pytest.approx(3.6, abs=0.01)
    assert routing.expected_distinct(1, 8) == 1.0
    assert routing.expected_distinct(64, 1) == pytest.approx(1.0)


def test_load_balance_of_counts() -> None:
    load = routing.measure_load_balance([4, 0, 0, 4])
    assert load.max_over_mean == 2.0
    assert load.dead_experts == 2
    assert load.entropy == pytest.approx(log(2) / log(4))
    assert routing.measure_load_balance([3, 3, 3]).entropy == pytest.approx(1.0)
    empty = routing.measure_load_balance([0, 0])
    assert (empty.max_over_mean, empty.dead_experts) == (1.0, 2)


def test_the_95th_percentile_is_of_the_least_expert_that_95_in_100_do_not_exceed() -> None:
    assert routing.measure_load_balance([1] * 95 + [2] * 5).p95_over_mean == pytest.approx(1 / 1.05)
    assert routing.measure_load_balance([1] * 94 + [2] * 6).p95_over_mean == pytest.approx(2 / 1.06)
    assert routing.measure_load_balance([1, 3]).p95_over_mean == 1.5


def test_rank_load() -> None:
    assert expert_placement.rank_loads([5, 1, 1, 1], ep=2) == (6, 2)
    assert expert_placement.rank_load_factor([5, 1, 1, 1], ep=2) == 1.5
    assert expert_placement.rank_load_factor([0, 0, 0, 0], ep=2) == 1.0


def test_rank_rows_sum_the_sources() -> None:
    layout = Layout(world_size=2, ep=2)
    sources = [[1] * 128, [2] * 128]
    assert routing.rank_rows(QWEN, layout, sources, 1, range(128)) == 64 * 3


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=64))
def test_load_stays_in_bounds(counts: list[int]) -> None:
    load = routing.measure_load_balance(counts)
    assert 1.0 - 1e-12 <= load.max_over_mean <= len(counts) + 1e-12
    assert -1e-12 <= load.entropy <= 1 + 1e-12
