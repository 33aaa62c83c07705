"""The closed forms of the pipeline against the timetable itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.cost.timeline import pipeline_s, simulated_s
from moewright.intake import catalogue
from moewright.rules.events import StageSeconds
from moewright.spec.plan import Estimate, TimePart
from moewright.spec.workload import Workload


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), [(1, 1, 5), (2, 1, 7), (4, 1, 8), (4, 2, 8), (8, 3, 16)])
def test_even_stages_take_the_makespan_of_the_table(pp: int, vpp: int, micro_batches: int) -> None:
    text = f"pp{pp},vpp{vpp}"
    layout = parse_layout(text, world_size=pp)
    unit = StageSeconds(forward=1.0, input_backward=1.0, weight_backward=1.0)
    exact = simulated_s(layout, [unit] * (pp * vpp), micro_batches=micro_batches, transfer_s=0.0)
    closed = pipeline_s([3.0 * vpp] * pp, vpp=vpp, micro_batches=micro_batches, transfer_s=0.0)
    assert closed == pytest.approx(exact, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(pp=st.sampled_from([2, 3, 4, 8]), vpp=st.integers(1, 4), rounds=st.integers(1, 6), length=st.floats(0.01, 10))
def test_equal_chunks_take_the_closed_form(pp: int, vpp: int, rounds: int, length: float) -> None:
    layout = parse_layout(f"pp{pp},vpp{vpp}", world_size=pp)
    chunk = StageSeconds(forward=length, input_backward=1.3 * length, weight_backward=0.9 * length)
    exact = simulated_s(layout, [chunk] * (pp * vpp), micro_batches=rounds * pp, transfer_s=0.0)
    closed = pipeline_s([3.2 * length * vpp] * pp, vpp=vpp, micro_batches=rounds * pp, transfer_s=0.0)
    assert closed == pytest.approx(exact, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    pp=st.sampled_from([2, 4]),
    vpp=st.sampled_from([1, 2, 3]),
    embedding=st.floats(0.0, 0.3),
    head=st.floats(0.0, 1.0),
    layers=st.sampled_from([2, 4]),
)
def test_uneven_ends_stay_within_a_hundredth(pp: int, vpp: int, embedding: float, head: float, layers: int) -> None:
    """The embedding and the head in the place of a layer each, at as many micro-batches a stage as published runs."""
    layout, micro_batches = parse_layout(f"pp{pp},vpp{vpp}", world_size=pp), 32 * pp
    lengths = [float(layers)] * (pp * vpp)
    lengths[0] += embedding - 1
    lengths[-1] += head - 1
    stages = [StageSeconds(forward=one, input_backward=one, weight_backward=one) for one in lengths]
    exact = simulated_s(layout, stages, micro_batches=micro_batches, transfer_s=0.0)
    totals = [3 * sum(lengths[rank::pp]) for rank in range(pp)]
    closed = pipeline_s(totals, vpp=vpp, micro_batches=micro_batches, transfer_s=0.0)
    assert closed == pytest.approx(exact, rel=0.01)


def test_the_slowest_stage_sets_the_pace() -> None:
    assert pipeline_s([1.0, 3.0, 1.0], vpp=1, micro_batches=10, transfer_s=0.0) == pytest.approx(5 + 9 * 3)
    assert pipeline_s([1.0, 3.0, 2.0], vpp=2, micro_batches=9, transfer_s=0.0) == pytest.approx(9 * 3 + 2 / 2 * 2)


def test_interleaving_hides_transfers_but_for_fill_and_drain() -> None:
    plain, hidden = (
        pipeline_s([1.0] * 4, vpp=vpp, micro_batches=8, transfer_s=0.1)
        - pipeline_s([1.0] * 4, vpp=vpp, micro_batches=8, transfer_s=0.0)
        for vpp in (1, 2)
    )
    # What a rank sends and what it receives pass each other on the wire.
    assert plain == pytest.approx((4 + 7) * 2 * 0.1)
    assert hidden == pytest.approx(2 * 4 * 0.1)


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv", "dualpipev"])
def test_a_split_backward_idles_less_than_1f1b(schedule: str) -> None:
    """Stages of equal layers on a model whose ends weigh little."""
    plain, split = (priced(f"pp4,ep4,tp1,schedule={name}") for name in ("1f1b", schedule))
    assert 0 < bubble_s(split) < bubble_s(plain)
    assert sum(share.seconds for share in split.shares) == pytest.approx(split.step_s)


def priced(text: str) -> Estimate:
    machine = catalogue.hardware("32xH800")
    work = Workload(seq_len=4096, global_batch=256)
    return estimate(catalogue.model("Qwen3-30B-A3B"), work, machine, parse_layout(text, world_size=machine.count))


def bubble_s(found: Estimate) -> float:
    return sum(share.seconds for share in found.shares if share.part is TimePart.BUBBLE)
