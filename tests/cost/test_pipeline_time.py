"""The rows of the pipeline as arrays, and its closed form, against the timetable itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.cost.pipeline_time import (
    TimetableRows,
    build_pipeline,
    closed_form_s,
    exposed_transfers,
    simulate_pipeline_s,
)
from moewright.intake import catalogue
from moewright.rules.simulate import StageSeconds
from moewright.rules.stages import even_layout_string, parse_stages
from moewright.spec.plan import Estimate, TimePart
from moewright.spec.workload import Workload


def both(
    text: str, forward: list[float], backward: list[float], *, micro_batches: int
) -> tuple[float, float]:
    """Seconds by the rows as arrays and by the timetable, row by row, of virtual stages of these
    lengths."""
    layout = parse_layout(text, world_size=parse_layout(text, world_size=10**4).pp)
    stages = [
        StageSeconds(forward=f, input_backward=b / 2, weight_backward=b / 2)
        for f, b in zip(forward, backward, strict=True)
    ]
    exact = simulate_pipeline_s(layout, stages, micro_batches=micro_batches, transfer_s=0.0)
    return build_pipeline(layout, micro_batches).total_s(
        np.array(forward), np.array(backward)
    ), exact


@settings(max_examples=60, deadline=None)
@given(
    pp=st.sampled_from([1, 2, 3, 4, 8]),
    vpp=st.integers(1, 4),
    rounds=st.integers(1, 6),
    length=st.floats(0.01, 10),
    back=st.floats(0.5, 3.2),
)
def test_equal_chunks_take_the_closed_form(
    pp: int, vpp: int, rounds: int, length: float, back: float
) -> None:
    stages = pp * (vpp if pp > 1 else 1)
    text = f"pp{pp},vpp{stages // pp}"
    found, exact = both(
        text, [length] * stages, [back * length] * stages, micro_batches=rounds * pp
    )
    assert found == pytest.approx(exact, rel=1e-9)
    whole = stages * (1 + back) * length
    coarse = closed_form_s(
        whole / pp, whole, pp=pp, vpp=stages // pp, micro_batches=rounds * pp, transfer_s=0.0
    )
    assert float(coarse) == pytest.approx(exact, rel=1e-9)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int]:
    """Layout text, micro-batches and virtual stages: with groups of any size, a last one that is
    smaller, and warm-ups of one forward more.
    """
    pp, vpp = draw(st.sampled_from([2, 3, 4, 8])), draw(st.integers(1, 4))
    if vpp == 1:
        return f"pp{pp}", draw(st.integers(1, 3 * pp)), pp
    group = draw(st.integers(pp, 2 * pp))
    rest = draw(st.sampled_from([0, *range(pp, group)]))
    paired = draw(st.sampled_from(["", ",overlap=ep"]))
    return (
        f"pp{pp},vpp{vpp},vpp_group{group}{paired}",
        draw(st.integers(1, 2)) * group + rest,
        pp * vpp,
    )


LENGTHS = st.lists(st.floats(0.0, 10.0), min_size=32, max_size=32)


@settings(max_examples=100, deadline=None)
@given(pipeline=pipelines(), forward=LENGTHS, backward=LENGTHS)
def test_rows_at_once_end_like_the_timetable(
    pipeline: tuple[str, int, int], forward: list[float], backward: list[float]
) -> None:
    """Stages of any length, in any 1F1B or interleaved timetable."""
    text, micro_batches, stages = pipeline
    found, exact = both(text, forward[:stages], backward[:stages], micro_batches=micro_batches)
    assert found == pytest.approx(exact, rel=1e-9)


def spread(layers: int, stages: int, *, embedding: int, loss: int, head: float) -> list[float]:
    """Lengths of stages in layers, of a layout string as the search makes them; a head takes `head`
    layers."""
    found = parse_stages(
        even_layout_string(layers, mtp=0, stages=stages, embedding=embedding, loss=loss)
    )
    return [
        letters.count("t") + 0.15 * letters.count("E") + head * letters.count("L")
        for letters in found
    ]


LONG = [(2, 1, 0), (4, 1, 0), (8, 1, 0), (2, 4, 3), (3, 2, 0), (4, 3, 6), (8, 2, 0), (8, 4, 0)]


@pytest.mark.parametrize(("pp", "vpp", "group"), LONG)
def test_groups_left_out_of_a_long_table_take_as_long_as_the_others(
    pp: int, vpp: int, group: int
) -> None:
    """Three times the rows that are worked out: layout strings with light and heavy ends, stages
    that differ by a little, and stages of any length. All of them within 1 %; equal ones exactly.
    """
    interleaved = f",vpp_group{group}" if group else ""
    layout = parse_layout(f"pp{pp},vpp{vpp}{interleaved}", world_size=pp)
    count = 3 * 512 // vpp // (group or pp) * (group or pp)
    pipeline, rows, stages, draw = (
        build_pipeline(layout, count),
        TimetableRows(layout, count),
        pp * vpp,
        np.random.default_rng(pp),
    )
    assert pipeline.groups_left_out
    ends = [
        spread(3 * stages + more, stages, embedding=embedding, loss=loss, head=head)
        for more in (0, 1, stages - 1)
        for embedding, loss, head in ((1, 1, 0.5), (-1, 2, 0.5), (0, 1, 1.1), (0, 2, 0.3))
    ]
    others = [draw.uniform(low, 1.0, stages) for low in (0.99, 0.9, 0.5, 0.01) for _ in range(5)]
    for lengths in [np.array(one) for one in (*ends, *others)]:
        forward, backward = lengths, draw.uniform(1.0, 3.0) * lengths
        found, exact = (
            pipeline.total_s(forward, backward),
            rows.end_s(np.concatenate([forward, backward])),
        )
        assert found == pytest.approx(exact, rel=0.01)
    same = np.ones(stages)
    assert pipeline.total_s(same, 2 * same) == pytest.approx(
        rows.end_s(np.repeat([1.0, 2.0], stages)), rel=1e-9
    )


@settings(max_examples=40, deadline=None)
@given(pipeline=pipelines(), forward=LENGTHS, backward=LENGTHS, seed=st.integers(0, 1000))
def test_paths_are_as_long_as_the_rows_where_found_and_never_longer(
    pipeline: tuple[str, int, int], forward: list[float], backward: list[float], seed: int
) -> None:
    text, micro_batches, stages = pipeline
    layout = parse_layout(text, world_size=parse_layout(text, world_size=10**4).pp)
    rows, here = (
        build_pipeline(layout, micro_batches),
        (np.array(forward[:stages]), np.array(backward[:stages])),
    )
    there = [each * np.random.default_rng(seed).uniform(0.5, 2.0, stages) for each in here]
    paths = rows.restrict_to_longest_paths(*(each[:, None] for each in here))
    assert paths.total_s(*here) == pytest.approx(rows.total_s(*here), rel=1e-9)
    assert paths.total_s(*there) <= rows.total_s(*there) * (1 + 1e-9)


def test_the_slowest_stage_sets_the_pace() -> None:
    """A path down to the slowest rank, its work, and the way back up; what comes after it fits
    between its rows."""
    found, exact = both("pp3", [1 / 3, 1.0, 1 / 3], [2 / 3, 2.0, 2 / 3], micro_batches=10)
    assert found == pytest.approx(exact, rel=1e-12)
    assert found == pytest.approx(1 + 10 * 3)


def test_interleaving_hides_transfers_but_for_fill_and_drain() -> None:
    # What a rank sends and what it receives pass each other on the wire.
    assert exposed_transfers(4, 1, 8) == (4 + 7) * 2
    assert exposed_transfers(4, 2, 8) == 2 * 4
    assert exposed_transfers(1, 1, 8) == 0


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv", "dualpipev"])
def test_a_split_backward_idles_less_than_1f1b(schedule: str) -> None:
    """Stages of equal layers on a model whose ends weigh little."""
    plain, split = (priced(f"pp4,ep4,tp1,schedule={name}") for name in ("1f1b", schedule))
    assert 0 < bubble_s(split) < bubble_s(plain)
    assert sum(share.seconds for share in split.shares) == pytest.approx(split.step_s)


def priced(text: str) -> Estimate:
    machine = catalogue.hardware("32xH800")
    work = Workload(seq_len=4096, global_batch=256)
    return estimate(
        catalogue.model("Qwen3-30B-A3B"),
        work,
        machine,
        parse_layout(text, world_size=machine.count),
    )


def bubble_s(found: Estimate) -> float:
    return sum(share.seconds for share in found.shares if share.part is TimePart.BUBBLE)
