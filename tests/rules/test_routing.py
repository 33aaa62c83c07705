"""Loads of experts and ranks: what a plan expects, and what is measured."""

from __future__ import annotations

import random
from dataclasses import replace
from math import log, sqrt
from typing import Any

import numpy as np
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


def test_expected_load_is_what_the_workload_says() -> None:
    layout = Layout(world_size=8, ep=8)

    def load(**fields: Any) -> float:
        workload = Workload(seq_len=1, global_batch=1, **fields)
        return routing.expected_load_factor(Job(model=QWEN, workload=workload, layout=layout))

    assert load() == 1.0
    assert load(routing=Routing.LEARNED, load_factor=1.7) == 1.7
    assert load(routing=Routing.SKEWED, load_skew=0.0) == 1.0
    even = (1,) * 128
    hot = (2,) * 16 + (1,) * 112  # the first of eight ranks gets twice what the others do
    measured = load(routing=Routing.MEASURED, load_histogram=(even, hot))
    assert measured == pytest.approx((1.0 + 2 * 128 / 144) / 2)


def test_expected_repeats_are_those_of_drawn_rows() -> None:
    """Rows of every rank drawn one by one, in each layer and micro-batch of a step."""
    layout = Layout(world_size=4, ep=4, rank_capacity=1.09)
    workload = Workload(
        seq_len=512, global_batch=8, routing=Routing.MEASURED, load_histogram=((1,) * 128,) * 94
    )
    job = Job(model=QWEN, workload=workload, layout=layout)
    rows = np.random.default_rng(5).binomial(512 * 8, 1 / 4, size=(2000, 94 * 8))
    repeats = float((rows > 1117).any(axis=1).mean())
    assert 0.1 < repeats < 0.9
    assert routing.expected_repeats(job) == pytest.approx(repeats, abs=0.05)
    assert routing.expected_repeats(replace(job, layout=replace(layout, rank_capacity=4.0))) == 0
    even = replace(workload, routing=Routing.BALANCED)
    assert routing.expected_repeats(replace(job, workload=even)) == 0


@pytest.mark.parametrize("ep", [2, 8, 32, 128])
@pytest.mark.parametrize("skew", [0.2, 1.0])
def test_skewed_load_is_that_of_shuffled_experts(ep: int, skew: float) -> None:
    draw = random.Random(ep)
    sigma = sqrt(log(1 + skew**2))
    hottest = []
    for _ in range(1000):
        weights = [draw.lognormvariate(0, sigma) for _ in range(128)]
        hottest.append(
            expert_placement.rank_load_factor([round(1e6 * weight) for weight in weights], ep)
        )
    expected = routing.skewed_load_factor(128, ep, 8, skew)
    assert expected - 1 == pytest.approx(sum(hottest) / 1000 - 1, rel=0.15)


@pytest.mark.parametrize("capacity", [0.5, 1.0, 2.0, 5.0])
def test_a_capacity_cuts_skewed_loads_expert_by_expert(capacity: float) -> None:
    """The result is over the balanced load that a capacity keeps.

    Drawn loads of 1000 layers are within 0.02 of their expectation.
    """
    draw = random.Random(7)
    sigma = sqrt(log(1 + 2.0**2))
    ep = 8
    hottest = []
    for _ in range(1000):
        loads = [min(draw.lognormvariate(-(sigma**2) / 2, sigma), capacity) for _ in range(128)]
        hottest.append(max(sum(loads[rank * 16 : (rank + 1) * 16]) / 16 for rank in range(ep)))
    expected = routing.skewed_load_factor(128, ep, 8, 2.0, capacity=capacity)
    assert expected == pytest.approx(sum(hottest) / 1000 / min(1.0, capacity), abs=0.06)
    assert routing.skewed_load_factor(128, 1, 8, 2.0, capacity=capacity) <= max(1.0, capacity)


def test_no_rank_gets_more_than_every_token_on_each_of_its_experts() -> None:
    assert routing.skewed_load_factor(128, 128, 8, 100.0) == 128 / 8
    loads = [routing.skewed_load_factor(128, 4, 8, skew) for skew in (0.0, 0.1, 1.0, 10.0, 100.0)]
    assert loads == sorted(loads)
    assert loads[-1] <= 4


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
