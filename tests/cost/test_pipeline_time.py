"""The rows of the pipeline as arrays, and its closed form, against the timetable itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.cost.time.pipeline_time import (
    TimetableRows,
    build_pipeline,
    closed_form_s,
    exposed_transfers,
    simulate_pipeline_s,
)
from moewright.intake import catalogue
from moewright.rules.timetable.simulate import StageSeconds
from moewright.rules.timetable.stages import even_layout_string
from moewright.spec.plan import Estimate, TimePart
from moewright.spec.stage_string import parse_stages
from moewright.spec.workload import Workload


def simulate_both_ways(
    text: str, forward: list[float], backward: list[float], *, micro_batches: int
) -> tuple[float, float]:
    """Return the seconds by arrays of rows, and by the timetable row by row.

    The virtual stages take `forward` and `backward` seconds.
    """
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
    from_arrays, exact = simulate_both_ways(
        text, [length] * stages, [back * length] * stages, micro_batches=rounds * pp
    )
    assert from_arrays == pytest.approx(exact, rel=1e-9)
    whole = stages * (1 + back) * length
    coarse = closed_form_s(
        whole / pp, whole, pp=pp, vpp=stages // pp, micro_batches=rounds * pp, transfer_s=0.0
    )
    assert float(coarse) == pytest.approx(exact, rel=1e-9)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int]:
    """Draw layout text, micro-batches and virtual stages.

    Groups have any size, the last may be smaller, and warm-ups may have one forward more.
    """
    pp = draw(st.sampled_from([2, 3, 4, 8]))
    vpp = draw(st.integers(1, 4))
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
    """Take stages of any length, in any 1F1B or interleaved timetable."""
    text, micro_batches, stages = pipeline
    from_arrays, exact = simulate_both_ways(
        text, forward[:stages], backward[:stages], micro_batches=micro_batches
    )
    assert from_arrays == pytest.approx(exact, rel=1e-9)


def spread(layers: int, stages: int, *, embedding: int, loss: int, head: float) -> list[float]:
    """Return the lengths of stages in layers, of a layout string as the search makes them.

    A head takes as long as `head` layers.
    """
    text = even_layout_string(layers, mtp=0, stages=stages, embedding=embedding, loss=loss)
    return [
        letters.count("t") + 0.15 * letters.count("E") + head * letters.count("L")
        for letters in parse_stages(text)
    ]


LONG = [(2, 1, 0), (4, 1, 0), (8, 1, 0), (2, 4, 3), (3, 2, 0), (4, 3, 6), (8, 2, 0), (8, 4, 0)]


@pytest.mark.parametrize(("pp", "vpp", "group"), LONG)
def test_groups_left_out_of_a_long_table_take_as_long_as_the_others(
    pp: int, vpp: int, group: int
) -> None:
    """Take three times the rows that are worked out: within 1 %, and equal stages exactly.

    The stages are of layout strings with light and heavy ends, differ by a little, or have any
    length.
    """
    interleaved = f",vpp_group{group}" if group else ""
    layout = parse_layout(f"pp{pp},vpp{vpp}{interleaved}", world_size=pp)
    count = 3 * 512 // vpp // (group or pp) * (group or pp)
    pipeline = build_pipeline(layout, count)
    rows = TimetableRows(layout, count)
    stages = pp * vpp
    draw = np.random.default_rng(pp)
    assert pipeline.groups_left_out
    ends = [
        spread(3 * stages + more, stages, embedding=embedding, loss=loss, head=head)
        for more in (0, 1, stages - 1)
        for embedding, loss, head in ((1, 1, 0.5), (-1, 2, 0.5), (0, 1, 1.1), (0, 2, 0.3))
    ]
    others = [draw.uniform(low, 1.0, stages) for low in (0.99, 0.9, 0.5, 0.01) for _ in range(5)]
    for lengths in [np.array(case) for case in (*ends, *others)]:
        backward = draw.uniform(1.0, 3.0) * lengths
        shortened = pipeline.total_s(lengths, backward)
        exact = rows.end_s(np.concatenate([lengths, backward]))
        assert shortened == pytest.approx(exact, rel=0.01)
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
    rows = build_pipeline(layout, micro_batches)
    lengths = (np.array(forward[:stages]), np.array(backward[:stages]))
    others = [
        of_pass * np.random.default_rng(seed).uniform(0.5, 2.0, stages) for of_pass in lengths
    ]
    paths = rows.restrict_to_longest_paths(*(of_pass[:, None] for of_pass in lengths))
    assert paths.total_s(*lengths) == pytest.approx(rows.total_s(*lengths), rel=1e-9)
    assert paths.total_s(*others) <= rows.total_s(*others) * (1 + 1e-9)


def test_the_slowest_stage_sets_the_pace() -> None:
    """Take a path down to the slowest rank, its work, and the way back up.

    What comes after it fits between its rows.
    """
    from_arrays, exact = simulate_both_ways(
        "pp3", [1 / 3, 1.0, 1 / 3], [2 / 3, 2.0, 2 / 3], micro_batches=10
    )
    assert from_arrays == pytest.approx(exact, rel=1e-12)
    assert from_arrays == pytest.approx(1 + 10 * 3)


def test_interleaving_hides_transfers_but_for_fill_and_drain() -> None:
    # What a rank sends and what it receives pass each other on the wire.
    assert exposed_transfers(4, 1, 8) == (4 + 7) * 2
    assert exposed_transfers(4, 2, 8) == 2 * 4
    assert exposed_transfers(1, 1, 8) == 0


# V-Half and V-Min trade idle time for memory where passes take unequal times.
@pytest.mark.parametrize("schedule", ["zb-h1", "zbv", "dualpipev"])
def test_a_split_backward_idles_less_than_1f1b(schedule: str) -> None:
    """Cut a model whose ends weigh little into stages of equal layers."""
    plain, split = (estimate_layout(f"pp4,ep4,tp1,schedule={name}") for name in ("1f1b", schedule))
    assert 0 < bubble_s(split) < bubble_s(plain)
    assert sum(share.seconds for share in split.shares) == pytest.approx(split.step_s)


def estimate_layout(text: str) -> Estimate:
    machine = catalogue.hardware("32xH800")
    work = Workload(seq_len=4096, global_batch=256)
    return estimate(
        catalogue.model("Qwen3-30B-A3B"),
        work,
        machine,
        parse_layout(text, world_size=machine.count),
    )


def bubble_s(result: Estimate) -> float:
    return sum(share.seconds for share in result.shares if share.part is TimePart.BUBBLE)
