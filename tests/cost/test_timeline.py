"""The closed forms of the pipeline against the timetable itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.cost.timeline import closed_s, pipeline_of, simulated_s
from moewright.intake import catalogue
from moewright.rules.events import StageSeconds
from moewright.rules.stages import layout_string, parse_stages
from moewright.spec.plan import Estimate, TimePart
from moewright.spec.workload import Workload


def both(text: str, lengths: list[float], *, micro_batches: int, back: float = 2.0) -> tuple[float, float]:
    """Seconds by the closed form and by the timetable, of stages of these lengths; backwards take `back` forwards."""
    layout = parse_layout(text, world_size=parse_layout(text, world_size=10**4).pp)
    forward = np.array(lengths) / (1 + back)
    stages = [StageSeconds(forward=f, input_backward=back * f / 2, weight_backward=back * f / 2) for f in forward]
    exact = simulated_s(layout, stages, micro_batches=micro_batches, transfer_s=0.0)
    return pipeline_of(layout, micro_batches).total_s(forward, back * forward, transfer_s=0.0), exact


@settings(max_examples=60, deadline=None)
@given(
    pp=st.sampled_from([1, 2, 3, 4, 8]),
    vpp=st.integers(1, 4),
    rounds=st.integers(1, 6),
    length=st.floats(0.01, 10),
    back=st.floats(0.5, 3.2),
)
def test_equal_chunks_take_the_closed_form(pp: int, vpp: int, rounds: int, length: float, back: float) -> None:
    text = f"pp{pp},vpp{vpp if pp > 1 else 1}"
    lengths = [length] * (pp * (vpp if pp > 1 else 1))
    closed, exact = both(text, lengths, micro_batches=rounds * pp, back=back)
    assert closed == pytest.approx(exact, rel=1e-9)
    slowest, whole = sum(lengths) / pp, sum(lengths)
    coarse = closed_s(slowest, whole, pp=pp, vpp=len(lengths) // pp, micro_batches=rounds * pp, transfer_s=0.0)
    assert float(coarse) == pytest.approx(exact, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(pp=st.sampled_from([2, 3, 4, 8]), micro_batches=st.integers(1, 12), length=st.floats(0.01, 10))
def test_few_micro_batches_of_equal_stages(pp: int, micro_batches: int, length: float) -> None:
    closed, exact = both(f"pp{pp}", [length] * pp, micro_batches=micro_batches)
    assert closed == pytest.approx(exact, rel=1e-9)


def spread(layers: int, stages: int, *, embedding: int, loss: int, head: float) -> list[float]:
    """Lengths of stages in layers, of a layout string as the search makes them; a head takes `head` layers."""
    found = parse_stages(layout_string(layers, mtp=0, stages=stages, embedding=embedding, loss=loss))
    return [letters.count("t") + 0.15 * letters.count("E") + head * letters.count("L") for letters in found]


@settings(max_examples=40, deadline=None)
@given(
    pp=st.sampled_from([2, 4, 8]),
    vpp=st.integers(1, 3),
    each=st.integers(2, 5),
    more=st.integers(0, 23),
    ends=st.tuples(st.sampled_from([-1, 0, 1]), st.sampled_from([1, 2]), st.floats(0.2, 1.2)),
    rounds=st.sampled_from([1, 2, 32]),
)
def test_layout_strings_take_no_less(
    pp: int, vpp: int, each: int, more: int, ends: tuple[int, int, float], rounds: int
) -> None:
    """One layer more on some stages, light and heavy ends. A path through the timetable is never longer than it; 1F1B
    is within 1 % at as many micro-batches a stage as published runs take. Virtual stages that differ stall each other
    in the steady state too, which no single path shows.
    """
    stages = pp * vpp
    lengths = spread(each * stages + more % stages, stages, embedding=ends[0], loss=ends[1], head=ends[2])
    closed, exact = both(f"pp{pp},vpp{vpp}", lengths, micro_batches=rounds * pp)
    near = 0.99 if (vpp, rounds) == (1, 32) else 0.96 if vpp == 1 else 0.85
    assert near * exact <= closed <= exact * (1 + 1e-9)


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
    lengths = [float(layers)] * (pp * vpp)
    lengths[0] += embedding - 1
    lengths[-1] += head - 1
    closed, exact = both(f"pp{pp},vpp{vpp}", lengths, micro_batches=32 * pp)
    assert closed == pytest.approx(exact, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.floats(0.3, 1.7), min_size=2, max_size=8),
    micro_batches=st.integers(1, 40),
    back=st.floats(1.0, 3.0),
)
def test_stages_of_any_length_take_no_less(lengths: list[float], micro_batches: int, back: float) -> None:
    """1F1B of any stages and any number of micro-batches: never above the timetable, and near it."""
    closed, exact = both(f"pp{len(lengths)}", lengths, micro_batches=micro_batches, back=back)
    assert 0.92 * exact <= closed <= exact * (1 + 1e-9)


def test_the_slowest_stage_sets_the_pace() -> None:
    """A path down to the slowest rank, its work, and the way back up; what comes after it fits between its rows."""
    closed, exact = both("pp3", [1.0, 3.0, 1.0], micro_batches=10)
    assert closed == pytest.approx(exact, rel=1e-12)
    assert closed == pytest.approx(1 + 10 * 3)


def test_interleaving_hides_transfers_but_for_fill_and_drain() -> None:
    def shown(text: str) -> float:
        layout = parse_layout(text, world_size=4)
        pipeline, ones = pipeline_of(layout, 8), np.ones(layout.pp * layout.vpp)
        return pipeline.total_s(ones, ones, transfer_s=0.1) - pipeline.total_s(ones, ones, transfer_s=0.0)

    # What a rank sends and what it receives pass each other on the wire.
    assert shown("pp4") == pytest.approx((4 + 7) * 2 * 0.1)
    assert shown("pp4,vpp2") == pytest.approx(2 * 4 * 0.1)


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
