"""The load of the hottest expert rank, by what a job says of its routing."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from math import log, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewright.intake import catalogue
from moewright.rules import expert_placement
from moewright.rules.expert_load import (
    RankLoad,
    expected_load,
    expected_repeats,
    skewed_load_factor,
    step_rows,
)
from moewright.rules.job import Job
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import (
    RouterAssignment,
    RouterForce,
    RouterTraining,
    Routing,
    Workload,
)

QWEN = catalogue.model("Qwen3-235B-A22B")
DEEPSEEK = catalogue.model("DeepSeek-V3")
WORK = Workload(seq_len=4096, global_batch=2048)


def load(work: Workload = WORK, *, ep: int = 8, mbs: int = 1, model: ModelSpec = QWEN) -> RankLoad:
    layout = Layout(world_size=256, ep=ep, mbs=mbs)
    return expected_load(Job(model=model, workload=work, layout=layout))


def test_a_job_that_says_nothing_is_not_even() -> None:
    natural = load()
    assert natural.step > 1.5
    assert natural.peak > 1.1
    assert natural.step_p90 > natural.step
    assert natural.peak_p90 > natural.peak


@pytest.mark.parametrize(
    "even",
    [
        replace(WORK, routing=Routing.BALANCED),
        replace(WORK, router=RouterTraining(force=RouterForce.BALANCED)),
        replace(WORK, router=RouterTraining(assignment=RouterAssignment.SINKHORN)),
    ],
)
def test_what_forces_an_even_load_is_even(even: Workload) -> None:
    assert load(even) == RankLoad()


def test_a_stated_load_stands_in_steps_and_peaks() -> None:
    stated = load(replace(WORK, load_factor=1.3))
    assert stated == RankLoad(step=1.3, step_p90=1.3, peak=1.3, peak_p90=1.3)
    assert load(ep=1) == RankLoad()


def test_more_text_a_micro_batch_and_a_selection_bias_even_it_out() -> None:
    assert load(mbs=4).step < load().step
    assert load(ep=32).step > load(ep=8).step
    assert load(model=DEEPSEEK).step < load().step
    assert load(model=DEEPSEEK).peak == 1.0


@given(
    ep=st.sampled_from([2, 8, 32, 128]),
    mbs=st.sampled_from([1, 4]),
    seq_len=st.sampled_from([64, 4096, 131072]),
    scale=st.floats(0.1, 100),
    capacity=st.sampled_from([0.5, 1.0, 1.5, 3.0, 10.0]),
)
def test_no_rank_gets_more_rows_than_there_are(
    ep: int, mbs: int, seq_len: int, scale: float, capacity: float
) -> None:
    work = replace(WORK, seq_len=seq_len)
    job = Job(model=QWEN, workload=work, layout=Layout(world_size=256, ep=ep, mbs=mbs))
    natural = expected_load(job, scale=scale)
    most = ep * min(8, 128 // ep) / 8
    assert 1 <= natural.step <= natural.step_p90 <= most
    assert 1 <= natural.peak <= natural.peak_p90 <= most
    bounded = Job(model=QWEN, workload=work, layout=replace(job.layout, capacity=capacity))
    rows = step_rows(bounded, natural.step, natural.within)
    assert rows <= step_rows(job, natural.step, natural.within) + 1
    assert rows <= bounded.routed_rows(most)


def test_a_capacity_cuts_the_hottest_layers_off_first() -> None:
    """The rows of a rank grow with the capacity, and ever less."""
    rows = []
    for capacity in (1.0, 2.0, 3.0, 4.0, 8.0):
        layout = Layout(world_size=256, ep=8, capacity=capacity)
        job = Job(model=QWEN, workload=WORK, layout=layout)
        rows.append(step_rows(job, 2.5, 0.6))
    steps = [after - before for before, after in pairwise(rows)]
    assert (
        rows[0] == Job(model=QWEN, workload=WORK, layout=Layout(world_size=256, ep=8)).routed_rows()
    )
    assert steps == sorted(steps, reverse=True)
    assert min(steps) > 0


def test_expected_load_is_what_the_workload_says() -> None:
    layout = Layout(world_size=8, ep=8)

    def load(**fields: Any) -> float:
        workload = Workload(seq_len=1, global_batch=1, **fields)
        return expected_load(Job(model=QWEN, workload=workload, layout=layout)).step

    assert load(routing=Routing.BALANCED) == 1.0
    assert load(routing=Routing.LEARNED, load_factor=1.7) == 1.7
    assert load(routing=Routing.SKEWED, load_skew=0.0) == 1.0
    even = (1,) * 128
    hot = (2,) * 16 + (1,) * 112  # the first of eight ranks gets twice what the others do
    measured = load(routing=Routing.MEASURED, load_histogram=(even, hot))
    assert measured == pytest.approx((1.0 + 2 * 128 / 144) / 2)


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
    expected = skewed_load_factor(128, ep, 8, skew)
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
    expected = skewed_load_factor(128, ep, 8, 2.0, capacity=capacity)
    assert expected == pytest.approx(sum(hottest) / 1000 / min(1.0, capacity), abs=0.06)
    assert skewed_load_factor(128, 1, 8, 2.0, capacity=capacity) <= max(1.0, capacity)


def test_no_rank_gets_more_than_every_token_on_each_of_its_experts() -> None:
    assert skewed_load_factor(128, 128, 8, 100.0) == 128 / 8
    loads = [skewed_load_factor(128, 4, 8, skew) for skew in (0.0, 0.1, 1.0, 10.0, 100.0)]
    assert loads == sorted(loads)
    assert loads[-1] <= 4


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
    assert expected_repeats(job) == pytest.approx(repeats, abs=0.05)
    assert expected_repeats(replace(job, layout=replace(layout, rank_capacity=4.0))) == 0
    even = replace(workload, routing=Routing.BALANCED)
    assert expected_repeats(replace(job, workload=even)) == 0
