"""Invariants of grids, stages, timetables and buckets over drawn layouts."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from math import lcm

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from model_shapes import moe_model
from moewright.codec import format_layout
from moewright.codec.layout_words import describe_changes, describe_layout, summarize_changes
from moewright.rules.grid import (
    GROUPS,
    all_groups,
    axis_size,
    coordinate,
    group_ranks,
    group_size,
    min_world_size,
)
from moewright.rules.job import Job, micro_batches
from moewright.rules.limits.divisibility import divisors
from moewright.rules.limits.legality import check_legality
from moewright.rules.shapes.buckets import plan_buckets, shard_range
from moewright.rules.shapes.fsdp import fsdp_groups
from moewright.rules.shapes.shards import GRADIENT_GROUPS
from moewright.rules.timetable.schedule import (
    bubble_fraction,
    check_schedule,
    max_in_flight,
    peak_live_chunks,
    timetable,
)
from moewright.rules.timetable.simulate import StageSeconds, row_end_times
from moewright.rules.timetable.stages import (
    EvenSplit,
    check_stages,
    even_layout_string,
    pipeline_chunks,
    vpp_choices,
)
from moewright.rules.timetable.timetable_row import RowKind
from moewright.spec.layout import (
    CpComm,
    CudaGraphScope,
    DispatcherKind,
    Layout,
    Offload,
    Overlap,
    Recompute,
    Schedule,
)
from moewright.spec.workload import Workload

HYBRID = {"shard", "copies", "edp_shard", "edp_copies"}

# A busy machine is not a finding: no deadlines, and pipelines filter what has no timetable.
unhurried = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
small = st.integers(1, 4)


@st.composite
def folded(draw: st.DrawFn) -> Layout:
    degrees = {name: draw(small) for name in ("tp", "cp", "pp", "ep", "etp")}
    exchange = draw(st.sampled_from(CpComm))
    node = draw(st.sampled_from([0, *divisors(degrees["ep"])]))
    world = min_world_size(Layout(world_size=1, **degrees)) * draw(st.integers(1, 3))
    return Layout(world_size=world, cp_comm=exchange, ep_node=node, **degrees)


@unhurried
@given(folded())
def test_groups_partition_the_world(layout: Layout) -> None:
    for group in GROUPS:
        groups = all_groups(layout, group)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(layout.world_size))
        assert {len(ranks) for ranks in groups} == {group_size(layout, group)}


@unhurried
@given(folded(), st.data())
def test_a_group_varies_its_axes_and_no_other(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    plain_groups = [group for group in sorted(GROUPS) if not {*GROUPS[group]} & HYBRID]
    group = data.draw(st.sampled_from(plain_groups))
    ranks = group_ranks(layout, group, rank)
    assert rank in ranks
    assert ranks in all_groups(layout, group)
    grids = {"dense": ("tp", "cp", "dp", "pp"), "expert": ("etp", "ep", "edp", "pp")}
    parts = {"cp": ("cp_a2a", "cp_kv"), "ep": ("ep_near", "ep_far")}
    is_expert = bool(set(GROUPS[group]) - {*grids["dense"], *parts["cp"]})
    grid = grids["expert" if is_expert else "dense"]
    divided = "ep" if is_expert else "cp"
    varied = {*GROUPS[group], *(parts[divided] if divided in GROUPS[group] else ())}
    for axis in (*grid, *parts[divided]):
        if axis == divided and group in parts[divided]:
            continue
        coordinates = {coordinate(layout, other, axis) for other in ranks}
        if axis in varied:
            assert coordinates == set(range(axis_size(layout, axis)))
        else:
            assert len(coordinates) == 1


@unhurried
@given(folded(), st.data())
def test_hybrid_sharding_cuts_inside_blocks_and_copies_across(
    layout: Layout, data: st.DataObject
) -> None:
    """Shard group x replica group is the group that sums the gradients, each rank of it once."""
    workload = Workload(seq_len=64, global_batch=64)
    sharded = [replace(layout, zero=3, shard=n) for n in divisors(layout.dp * layout.cp) if n > 1]
    legal = [
        candidate
        for candidate in sharded
        if all(
            reason.field != "layout.shard"
            for reason in check_legality(
                Job(model=moe_model(), workload=workload, layout=candidate)
            )
        )
    ]
    assume(legal)
    hybrid = data.draw(st.sampled_from(legal))
    rank = data.draw(st.integers(0, layout.world_size - 1))
    for group in GRADIENT_GROUPS:
        groups = fsdp_groups(hybrid, group)
        shard_ranks = group_ranks(hybrid, groups.shard_group, rank)
        all_ranks = [
            replica
            for holder in shard_ranks
            for replica in group_ranks(hybrid, groups.replica_group, holder)
        ]
        assert sorted(all_ranks) == sorted(group_ranks(layout, group, rank))
        block_ranks = hybrid.tp * hybrid.shard
        assert {holder // block_ranks for holder in shard_ranks} == {rank // block_ranks}
        blocks = {replica // block_ranks for replica in all_ranks}
        spans_stage = len(blocks) * block_ranks * layout.pp == layout.world_size
        assert spans_stage or shard_ranks == (rank,)


@unhurried
@given(st.integers(1, 130), small, small, st.integers(0, 2))
def test_every_legal_split_holds_every_layer_once(layers: int, pp: int, vpp: int, mtp: int) -> None:
    model = moe_model(layers=layers, mtp=mtp)
    layout = Layout(world_size=pp, pp=pp, vpp=vpp)
    text = even_layout_string(layers, mtp=mtp, stages=pp * vpp)
    assert check_stages(model, replace(layout, stages=text)) == ()
    for stages in ("", text):
        chosen = replace(layout, stages=stages)
        if check_stages(model, chosen):
            assert stages == ""
            continue
        split = pipeline_chunks(model, chosen)
        assert [layer for chunk in split for layer in chunk.layers] == list(range(layers))
        assert sum(chunk.has_embedding for chunk in split) == 1
        assert sum(chunk.has_loss for chunk in split) == 1
        assert sum(chunk.mtp_layers for chunk in split) == mtp
        assert [(chunk.vpp_rank, chunk.pp_rank) for chunk in split] == [
            (v, r) for v in range(vpp) for r in range(pp)
        ]
    counts = [
        len(chunk.layers) + chunk.has_embedding + chunk.has_loss + chunk.mtp_layers
        for chunk in split
    ]
    assert max(counts) - min(counts) <= 1 + mtp


@unhurried
@given(st.integers(1, 100), st.integers(2, 12), st.integers(1, 12), st.sampled_from(EvenSplit))
def test_vpp_choices_are_the_legal_ones(layers: int, pp: int, vpp: int, split: EvenSplit) -> None:
    legal = (layers + split.value) % (pp * vpp) == 0
    assert (vpp in vpp_choices(layers, pp, split=split)) == legal
    if legal:
        layout = Layout(world_size=pp, pp=pp, vpp=vpp)
        assert check_stages(moe_model(layers=layers), layout) == ()


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Layout, int]:
    pp = draw(st.integers(1, 6))
    vpp = draw(st.integers(1, 4))
    m = draw(st.integers(1, 20))
    assume(pp > 1 or vpp == 1)
    group = draw(st.integers(pp, max(pp, m))) if vpp > 1 else 0
    overlap = draw(st.sampled_from([(), (Overlap.EP,)])) if vpp > 1 or pp == 1 else ()
    schedule = Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B
    layout = Layout(
        world_size=pp, pp=pp, vpp=vpp, vpp_group=group, schedule=schedule, overlap=overlap
    )
    assume(not check_schedule(layout, m))
    return layout, m


@unhurried
@given(pipelines(), st.sampled_from([(1.0, 1.0), (1.0, 2.0), (3.0, 1.0)]))
def test_no_legal_table_deadlocks_or_idles_more_than_the_closed_form(
    pipeline: tuple[Layout, int], times: tuple[float, float]
) -> None:
    layout, m = pipeline
    chunk = StageSeconds(forward=times[0], input_backward=times[1], weight_backward=0.0)
    chunks = [chunk] * (layout.pp * layout.vpp)
    span = max(row_end_times(layout, timetable(layout, m), chunks).values())
    busy = m * layout.vpp * sum(times)
    assert abs(1 - busy / span - bubble_fraction(layout, m)) < 1e-12


@unhurried
@given(pipelines())
def test_every_rank_runs_each_row_once_and_holds_what_the_closed_form_says(
    pipeline: tuple[Layout, int],
) -> None:
    layout, m = pipeline
    every = {
        (kind, mb, chunk)
        for kind in (RowKind.F, RowKind.B)
        for mb in range(m)
        for chunk in range(layout.vpp)
    }
    for rank, rows in enumerate(timetable(layout, m)):
        assert len(rows) == len(every)
        assert {(row.kind, row.micro_batch, row.chunk) for row in rows} == every
        assert peak_live_chunks(rows) == max_in_flight(layout, m, rank)


@unhurried
@given(
    st.lists(st.integers(1, 5000), max_size=30),
    st.integers(1, 12),
    st.integers(1, 20_000),
)
def test_buckets_keep_every_parameter_apart(
    sizes: list[int], shards: int, bucket_elements: int
) -> None:
    params = [(f"p{index}", numel) for index, numel in enumerate(sizes)]
    buckets = plan_buckets(params, shards=shards, bucket_elements=bucket_elements)
    assert [(entry.name, entry.numel) for bucket in buckets for entry in bucket.entries] == params
    for bucket in buckets:
        assert bucket.numel % lcm(shards, 128) == 0
        end = 0
        for entry in bucket.entries:
            assert entry.start % 64 == 0
            assert end <= entry.start < end + 64
            end = entry.start + entry.numel
        assert end <= bucket.numel < end + lcm(shards, 128)
        ranges = [shard_range(bucket, shards, index) for index in range(shards)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == bucket.numel
        assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert all(
        bucket.entries[-1].start + bucket.entries[-1].numel >= bucket_elements
        for bucket in buckets[:-1]
    )


absurd = st.sampled_from([-1, 0, 3, 7, 64, 10**9])
degree = st.one_of(st.sampled_from([1, 2, 4]), absurd)
usual = st.sampled_from([1, 2, 3, 4, 5, 8])


def layouts(
    degree: st.SearchStrategy[int], world: st.SearchStrategy[int]
) -> st.SearchStrategy[Layout]:
    return st.builds(
        Layout,
        world_size=world,
        tp=degree,
        sp=st.booleans(),
        cp=degree,
        pp=degree,
        vpp=degree,
        ep=degree,
        etp=degree,
        mbs=degree,
        vpp_group=st.sampled_from([0, 0, 0, 1, 4, 10**9]),
        schedule=st.sampled_from(list(Schedule)),
    )


@unhurried
@given(
    layouts(degree, st.sampled_from([0, 1, 6, 16, 64, 256, 10**9])),
    st.sampled_from([0, 24, 256, 2048, 10**9]),
)
def test_legality_answers_for_every_layout(layout: Layout, batch: int) -> None:
    """A refusal names a field and a rule in one line; what is not refused has a timetable."""
    model = moe_model(layers=8, shared=64)
    workload = Workload(seq_len=4096, global_batch=batch)
    reasons = check_legality(Job(model=model, workload=workload, layout=layout))
    for reason in reasons:
        assert reason.field.split(".")[0] in ("layout", "workload")
        assert reason.rule
        assert reason.nearest
        assert "\n" not in str(reason)
    if not reasons:
        assert len(pipeline_chunks(model, layout)) == layout.pp * layout.vpp
        assert len(timetable(layout, micro_batches(workload, layout))) == layout.pp


@unhurried
@given(
    layouts(usual, st.sampled_from([8, 16, 24, 64, 250])),
    st.sampled_from([256, 240]),
    st.sampled_from([4096, 4095]),
)
def test_the_nearest_value_named_mends_its_rule(layout: Layout, batch: int, seq_len: int) -> None:
    model = moe_model(layers=10, shared=64)
    workload = Workload(seq_len=seq_len, global_batch=batch)
    for reason in check_legality(Job(model=model, workload=workload, layout=layout)):
        owner, name = reason.field.split(".")
        named = re.match(r"(\d+)(?: or (\d+))?(?=$|,)", reason.nearest)
        for value in map(int, filter(None, named.groups() if named else ())):
            if owner == "layout":
                mended = check_legality(
                    Job(model=model, workload=workload, layout=replace(layout, **{name: value}))
                )
            else:
                mended = check_legality(
                    Job(model=model, workload=replace(workload, **{name: value}), layout=layout)
                )
            broken = {(other.field, re.sub(r"\d+", "#", other.rule)) for other in mended}
            assert (reason.field, re.sub(r"\d+", "#", reason.rule)) not in broken, (reason, value)


wordy_layouts = st.builds(
    Layout,
    world_size=st.just(64),
    tp=usual,
    ep=usual,
    mbs=usual,
    zero=st.sampled_from([0, 1, 2, 3]),
    dispatcher=st.sampled_from(list(DispatcherKind)),
    recompute=st.sets(st.sampled_from(list(Recompute))).map(lambda some: tuple(sorted(some))),
    offload=st.sets(st.sampled_from(list(Offload))).map(lambda some: tuple(sorted(some))),
    overlap=st.sets(st.sampled_from(list(Overlap))).map(lambda some: tuple(sorted(some))),
    graphs=st.sets(st.sampled_from(list(CudaGraphScope))).map(lambda some: tuple(sorted(some))),
    capacity=st.sampled_from([0.0, 1.25]),
)


@unhurried
@given(wordy_layouts, wordy_layouts)
def test_labels_of_a_layout_say_all_that_its_text_says(one: Layout, other: Layout) -> None:
    same_labels = describe_layout(one).labels == describe_layout(other).labels
    assert same_labels == (format_layout(one) == format_layout(other))
    assert "_" not in describe_layout(one).sentence


@unhurried
@given(wordy_layouts, wordy_layouts)
def test_changes_in_words_are_told_where_the_texts_differ(one: Layout, other: Layout) -> None:
    changes = describe_changes(one, other)
    assert (changes == ()) == (format_layout(one) == format_layout(other))
    labels = describe_layout(other).labels
    assert not any(change in labels for change in changes)
    assert bool(summarize_changes(one, other)) == bool(changes)
