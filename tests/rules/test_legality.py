import time
from dataclasses import replace
from typing import Any

import pytest

from model_shapes import dense_model, moe_model, qwen3_235b
from moewright.intake import catalogue
from moewright.rules.grid import min_world_size
from moewright.rules.job import Job, micro_batches
from moewright.rules.limits.divisibility import divisors, nearest_legal
from moewright.rules.limits.legality import check_legality
from moewright.search.search import search
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import (
    CpComm,
    CudaGraphScope,
    DispatcherKind,
    Layout,
    Offload,
    Overlap,
    RankOrder,
    Recompute,
    Schedule,
)
from moewright.spec.model import ModelSpec, PositionKind
from moewright.spec.workload import Workload

JOB = Workload(seq_len=4096, global_batch=2048)
H800_256 = {
    "world_size": 256,
    "tp": 2,
    "sp": True,
    "ep": 8,
    "pp": 32,
    "vpp": 3,
    "schedule": Schedule.INTERLEAVED,
}


def broken(
    layout: Layout, *, model: ModelSpec | None = None, workload: Workload = JOB
) -> tuple[Reason, ...]:
    return check_legality(Job(model=model or moe_model(), workload=workload, layout=layout))


def only(layout: Layout, *, model: ModelSpec | None = None, workload: Workload = JOB) -> Reason:
    (reason,) = broken(layout, model=model, workload=workload)
    return reason


# docs/formulas.md 1 and 5


@pytest.mark.parametrize(
    ("degrees", "dp", "edp"),
    [
        ({"tp": 2, "sp": True, "ep": 8, "pp": 32}, 4, 1),
        ({"tp": 2, "sp": True, "ep": 8, "pp": 8}, 16, 4),
        ({"tp": 4, "sp": True, "ep": 8, "pp": 8}, 8, 4),
        ({"tp": 2, "sp": True, "ep": 32, "pp": 8}, 16, 1),
        ({"tp": 1, "ep": 8, "pp": 32}, 8, 1),
    ],
)
def test_data_parallel_degrees_are_what_is_left(degrees: dict[str, Any], dp: int, edp: int) -> None:
    layout = Layout(world_size=256, **degrees)
    assert broken(layout, model=qwen3_235b()) == ()
    assert (layout.dp, layout.edp) == (dp, edp)


def test_expert_tensor_parallel_is_not_tensor_parallel() -> None:
    """The published layouts of Qwen3-235B on 256 H800 exist with etp=1 only."""
    assert broken(Layout(**H800_256), model=qwen3_235b()) == ()
    reason = only(Layout(**H800_256, etp=2), model=qwen3_235b())
    assert (reason.field, reason.value, reason.nearest) == ("layout.etp", "2", "1, or ep 4")
    assert "must divide the 8 ranks" in reason.rule


@pytest.mark.parametrize(
    ("layout", "batch", "count"),
    [
        (Layout(world_size=256, tp=2, pp=32, ep=8), 2048, 512),
        (Layout(world_size=256, tp=2, pp=8, ep=8), 2048, 128),
        (Layout(world_size=256, tp=2, pp=32, ep=8, mbs=4), 4096, 256),
        (Layout(world_size=256, tp=2, pp=32, ep=8, mbs=4), 8192, 512),
    ],
)
def test_micro_batches(layout: Layout, batch: int, count: int) -> None:
    assert micro_batches(Workload(seq_len=4096, global_batch=batch), layout) == count


def test_the_fewest_ranks_are_enough_and_one_stage_less_is_not() -> None:
    degrees = {"tp": 2, "cp": 3, "pp": 1, "ep": 8, "etp": 1}
    world = min_world_size(Layout(world_size=1, **degrees))
    assert world == 24
    workload = Workload(seq_len=4104, global_batch=240)
    assert broken(Layout(world_size=world, sp=True, **degrees), workload=workload) == ()
    assert [
        reason.field
        for reason in broken(Layout(world_size=8, sp=True, **degrees), workload=workload)
    ] == ["layout.cp"]


def test_folding_lets_experts_use_every_rank_of_a_stage() -> None:
    layout = Layout(world_size=256, tp=4, sp=True, cp=2, pp=4, ep=64)
    model = moe_model(experts=64)
    assert broken(layout, model=model) == ()
    assert (layout.dp, layout.edp) == (8, 1)
    assert only(replace(layout, ep=128), model=moe_model(experts=128)).nearest == "64"


@pytest.mark.parametrize(("pp", "legal"), [(8, (1, 2, 3, 4, 6, 12)), (32, (1, 3))])
def test_virtual_stages_of_94_layers(pp: int, legal: tuple[int, ...]) -> None:
    """94 layers divide only when embedding and loss are counted too."""
    for vpp in range(1, 14):
        schedule = Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B
        layout = Layout(world_size=256, pp=pp, vpp=vpp, ep=8, schedule=schedule)
        assert (broken(layout, model=qwen3_235b()) == ()) == (vpp in legal)


def test_cutting_sequences() -> None:
    workload = Workload(seq_len=4100, global_batch=64)
    reason = only(Layout(world_size=8, cp=4), workload=workload)
    assert (reason.field, reason.nearest) == ("layout.cp", "2, or seq_len 4096 or 4104")
    reason = only(
        Layout(world_size=8, tp=8, sp=True), model=moe_model(kv_heads=8), workload=workload
    )
    assert (reason.field, reason.nearest) == ("layout.tp", "4, or seq_len 4096 or 4104")
    reason = only(Layout(world_size=2, sp=True))
    assert (reason.field, reason.nearest) == ("layout.sp", "false")
    reason = only(Layout(world_size=2, tp=2))
    assert (reason.field, reason.nearest) == ("layout.sp", "true")
    assert broken(Layout(world_size=2, tp=2), model=dense_model()) == ()


@pytest.mark.parametrize("rows", [0, 1, 4095, 4096])
@pytest.mark.parametrize("position", list(PositionKind))
def test_a_sequence_has_a_row_of_the_table_for_each_token(
    rows: int, position: PositionKind
) -> None:
    model = replace(dense_model(), position=position, max_position=rows)
    reasons = broken(Layout(world_size=8), model=model)
    if position is not PositionKind.LEARNED or rows == JOB.seq_len:
        assert not reasons
        return
    (reason,) = reasons
    assert reason.field == "workload.seq_len"
    assert reason.nearest == str(max(1, rows))
    with pytest.raises(BadInput, match=f"has {rows} learned positions"):
        search(model, JOB, catalogue.hardware("8xH100"))


def test_experts_divide() -> None:
    reason = only(Layout(world_size=32, ep=32), model=moe_model(experts=48))
    assert (reason.field, reason.value, reason.nearest) == ("layout.ep", "32", "16")
    assert str(reason) == "layout.ep=32: must divide the 48 experts; nearest legal value: 16"
    reason = only(
        Layout(world_size=96, ep=6),
        model=moe_model(experts=64),
        workload=replace(JOB, global_batch=96),
    )
    assert reason.nearest == "4 or 8"


def test_interleaved_groups() -> None:
    """The table's own rules are tested with it."""
    layout = Layout(world_size=4, pp=4, vpp=2, schedule=Schedule.INTERLEAVED)
    model = moe_model(layers=8)
    reason = only(layout, model=model, workload=Workload(seq_len=64, global_batch=6))
    assert (reason.field, reason.value, reason.nearest) == ("layout.vpp_group", "4", "6")
    reason = only(layout, model=model, workload=Workload(seq_len=64, global_batch=2))
    assert (reason.field, reason.value, reason.nearest) == ("workload.global_batch", "2", "4")


# Grids, heads, batch


@pytest.mark.parametrize(
    ("layout", "field", "near"),
    [
        (Layout(world_size=256, pp=3), "layout.pp", "2 or 4, or world_size 255 or 258"),
        (Layout(world_size=8, tp=3, sp=True), "layout.tp", "2 or 4"),
        (Layout(world_size=8, cp=3), "layout.cp", "2 or 4"),
        (Layout(world_size=8, tp=4, sp=True, cp=4), "layout.tp", "2, or cp 2"),
        (Layout(world_size=8, ep=16), "layout.ep", "8"),
        (Layout(world_size=8, tp=3, sp=True, cp=3), "layout.world_size", "9"),
        (Layout(world_size=20, tp=3, sp=True, cp=3), "layout.world_size", "18 or 27"),
    ],
)
def test_the_world_divides_by_both_grids(layout: Layout, field: str, near: str) -> None:
    reason = broken(layout)[0]
    assert (reason.field, reason.nearest) == (field, near)


@pytest.mark.parametrize(
    ("model", "layout", "says", "near"),
    [
        (
            moe_model(heads=12, kv_heads=4),
            Layout(world_size=8, tp=8, sp=True),
            "12 attention heads",
            "4",
        ),
        (moe_model(heads=12, kv_heads=4), Layout(world_size=6, tp=6, sp=True), "4 kv heads", "2"),
        (
            moe_model(shared=36),
            Layout(world_size=8, tp=8, sp=True),
            "shared experts' ffn width 36",
            "4",
        ),
        (
            replace(dense_model(), dense_ffn_size=36),
            Layout(world_size=8, tp=8, sp=True),
            "dense ffn width 36",
            "4",
        ),
        (moe_model(ffn=36), Layout(world_size=8, etp=8), "expert ffn width 36", "4"),
    ],
)
def test_dims_divide(model: ModelSpec, layout: Layout, says: str, near: str) -> None:
    found = [
        reason
        for reason in broken(layout, model=model, workload=replace(JOB, global_batch=24))
        if says in reason.rule
    ]
    assert [reason.nearest for reason in found] == [near]


def test_kv_heads_may_be_replicated() -> None:
    assert broken(Layout(world_size=8, tp=8, sp=True), model=moe_model(heads=8, kv_heads=2)) == ()


def test_the_batch_divides() -> None:
    workload = Workload(seq_len=64, global_batch=12)
    reason = only(Layout(world_size=8), workload=workload)
    assert (reason.field, reason.nearest) == ("workload.global_batch", "8 or 16")
    reason = only(Layout(world_size=4, mbs=2), workload=workload)
    assert (reason.field, reason.nearest) == ("layout.mbs", "1 or 3, or global_batch 8 or 16")
    with pytest.raises(BadInput, match=r"mbs \* dp = 2 \* 4 must divide global_batch=12"):
        micro_batches(workload, Layout(world_size=4, mbs=2))
    with pytest.raises(BadInput, match="world_size=2 is less than"):
        micro_batches(workload, Layout(world_size=2, pp=4))


@pytest.mark.parametrize(
    ("change", "rule", "near"),
    [
        ({"zero": 0, "shard": 4}, "zero=0 shards no states: shard needs zero=1, 2 or 3", "0"),
        (
            {"zero": 3, "shard": 3},
            "must divide the 8 ranks of dp * cp, and be more than 1",
            "2 or 4",
        ),
        ({"zero": 3, "shard": 1}, "must divide the 8 ranks of dp * cp, and be more than 1", "2"),
    ],
)
def test_hybrid_sharding_goes_with_whole_blocks(
    change: dict[str, Any], rule: str, near: str
) -> None:
    reason = only(Layout(world_size=8, **change))
    assert (reason.field, reason.rule, reason.nearest) == ("layout.shard", rule, near)


def test_a_block_of_hybrid_sharding_holds_experts_whole() -> None:
    reason = only(
        Layout(world_size=12, zero=3, shard=6, ep=4), workload=replace(JOB, global_batch=24)
    )
    assert reason.rule == "tp * shard = 6 ranks must be a multiple of etp * ep = 4, or fewer"
    assert reason.nearest == "4 or 12"
    assert not broken(
        Layout(world_size=12, zero=3, shard=3, ep=4), workload=replace(JOB, global_batch=24)
    )


# Numbers that are none


@pytest.mark.parametrize(
    ("change", "field", "near"),
    [
        ({"tp": 0}, "layout.tp", "1"),
        ({"ep": -4}, "layout.ep", "1"),
        ({"ep": True}, "layout.ep", "1"),
        ({"pp": 2.0}, "layout.pp", "1"),
        ({"world_size": 10**9}, "layout.world_size", "1048576"),
        ({"tp": 10**30}, "layout.tp", "1"),
        ({"zero": 4}, "layout.zero", "1"),
        ({"zero": True}, "layout.zero", "1"),
        ({"mbs": 0}, "layout.mbs", "1"),
        ({"vpp_group": -1}, "layout.vpp_group", "0"),
        ({"capacity": -0.5}, "layout.capacity", "0"),
        ({"capacity": float("nan")}, "layout.capacity", "0"),
        ({"capacity": float("inf")}, "layout.capacity", "0"),
        ({"rank_capacity": 0.5}, "layout.rank_capacity", "1"),
        ({"rank_capacity": 2.0, "capacity": 1.0}, "layout.rank_capacity", "0"),
    ],
)
def test_numbers_of_the_layout_are_sane(change: dict[str, Any], field: str, near: str) -> None:
    reason = only(Layout(**{"world_size": 8, **change}))
    assert (reason.field, reason.nearest) == (field, near)


@pytest.mark.parametrize(
    ("change", "field", "near"),
    [
        ({"seq_len": 0}, "workload.seq_len", "8"),
        ({"global_batch": 0}, "workload.global_batch", "2"),
        ({"global_batch": -5}, "workload.global_batch", "2"),
        ({"global_batch": 10**9}, "workload.global_batch", "16777216"),
        ({"seq_len": 10**12}, "workload.seq_len", "134217728"),
    ],
)
def test_numbers_of_the_workload_are_sane(change: dict[str, int], field: str, near: str) -> None:
    layout = Layout(world_size=8, tp=2, sp=True, cp=4, mbs=2)
    reason = only(layout, workload=replace(JOB, **change))
    assert (reason.field, reason.nearest) == (field, near)
    assert broken(layout, workload=replace(JOB, **{field.split(".")[1]: int(near)})) == ()


@pytest.mark.parametrize("name", ["tp", "cp", "pp", "vpp", "ep", "etp", "mbs", "vpp_group"])
def test_absurd_degrees_are_refused_fast(name: str) -> None:
    start = time.perf_counter()
    layout = Layout(**{"world_size": 2**20, name: 10**9})
    assert any(
        reason.field in (f"layout.{name}", "layout.schedule")
        for reason in broken(layout, model=qwen3_235b())
    )
    assert time.perf_counter() - start < 0.5


# What cannot stand together


@pytest.mark.parametrize(
    ("change", "field", "near"),
    [
        ({"ep": 2}, "layout.ep", "1"),
        ({"etp": 2}, "layout.etp", "1"),
        ({"capacity": 1.5}, "layout.capacity", "0"),
        ({"dispatcher": DispatcherKind.DEEPEP}, "layout.dispatcher", "alltoall"),
        ({"recompute": (Recompute.LAYERNORM, Recompute.MOE_ACT)}, "layout.recompute", "layernorm"),
        ({"offload": (Offload.EXPERT_FC1,)}, "layout.offload", "none"),
        ({"graphs": (CudaGraphScope.ATTN, CudaGraphScope.MOE_ROUTER)}, "layout.graphs", "attn"),
    ],
)
def test_a_dense_model_has_no_use_for_expert_settings(
    change: dict[str, Any], field: str, near: str
) -> None:
    reason = only(Layout(**{"world_size": 2, **change}), model=dense_model())
    assert (reason.field, reason.nearest) == (field, near)


EP_OVERLAP = {"world_size": 4, "ep": 4, "overlap": (Overlap.EP,)}


@pytest.mark.parametrize(
    ("change", "says", "near"),
    [
        (
            {"recompute": (Recompute.FULL, Recompute.MOE_ACT)},
            "full recomputes every module",
            "full",
        ),
        (
            {"recompute": (Recompute.FULL, Recompute.LOSS, Recompute.MOE)},
            "full recomputes every module",
            "full+loss",
        ),
        ({"recompute": (Recompute.MLP,)}, "mlp needs a layer with a dense MLP", "none"),
        (
            {"recompute": (Recompute.LAYERNORM, Recompute.SHARED_EXPERTS)},
            "needs a shared expert",
            "layernorm",
        ),
        ({"recompute": (Recompute.MLA_UP_PROJ,)}, "needs multi-latent attention", "none"),
        (
            {"recompute": (Recompute.MOE,), "offload": (Offload.MOE_ACT, Offload.OPTIMIZER)},
            "recomputed",
            "optimizer",
        ),
        (
            {"recompute": (Recompute.FULL,), "offload": (Offload.CORE_ATTN,)},
            "keeps no activation",
            "none",
        ),
        ({"offload": (Offload.ATTN_PROJ,)}, "only together with core_attn", "none"),
        ({"offload_layers": 0.5}, "needs activations to offload", "1"),
        (
            {"offload": (Offload.CORE_ATTN,), "offload_layers": 1.5},
            "above 0, at most 1",
            "1",
        ),
        ({"offload_chunks": 1}, "chunks need activations to offload", "0"),
        ({"offload": (Offload.CORE_ATTN,), "offload_chunks": 2}, "of the vpp=1 chunks", "1"),
        ({"overlap": (Overlap.PARAM,)}, "param needs grad", "none"),
        (
            {"overlap": (Overlap.GRAD, Overlap.PARAM), "zero": 0},
            "zero=0 gathers no parameters",
            "grad",
        ),
        ({"overlap": (Overlap.TP,)}, "needs tp > 1", "none"),
        ({"overlap": (Overlap.P2P,), "pp": 2}, "needs pp > 1 with vpp > 1", "none"),
        ({**EP_OVERLAP, "ep": 1}, "ep needs ep > 1", "none"),
        (
            {**EP_OVERLAP, "dispatcher": DispatcherKind.ALL_GATHER},
            "needs an all-to-all dispatcher",
            "none",
        ),
        ({**EP_OVERLAP, "ep": 2, "pp": 2}, "needs vpp > 1", "none"),
        (
            {"graphs": (CudaGraphScope.FULL, CudaGraphScope.ATTN), "capacity": 1.0},
            "cannot be combined with others",
            "full",
        ),
        ({"graphs": (CudaGraphScope.MOE_PREPROCESS,)}, "needs moe_router", "none"),
        (
            {"graphs": (CudaGraphScope.ATTN,), "recompute": (Recompute.FULL,)},
            "only be combined with graphs=full",
            "none",
        ),
        (
            {
                "graphs": (CudaGraphScope.ATTN, CudaGraphScope.MOE_ROUTER),
                "recompute": (Recompute.MOE,),
            },
            "half inside",
            "attn",
        ),
        (
            {**EP_OVERLAP, "zero": 3, "graphs": (CudaGraphScope.ATTN,)},
            "gathers weights between the parts",
            "none",
        ),
        (
            {**EP_OVERLAP, "zero": 3, "ep": 2, "pp": 2, "vpp": 2, "schedule": Schedule.INTERLEAVED},
            "ep with zero=3 needs vpp=1",
            "none",
        ),
        ({"graphs": (CudaGraphScope.FULL,), "ep": 2}, "static shapes", "none"),
        ({"dispatcher": DispatcherKind.DEEPEP}, r"needs etp * ep > 1", "alltoall"),
        ({"dispatcher": DispatcherKind.DEDUP}, r"needs etp * ep > 1", "alltoall"),
        ({"ep": 4, "ep_node": 2}, "goes with dispatcher=dedup or hybridep", "0"),
        (
            {"ep": 4, "ep_node": 4, "dispatcher": DispatcherKind.DEDUP},
            "into several nodes of several ranks",
            "2",
        ),
        (
            {"ep": 2, "ep_node": 1, "dispatcher": DispatcherKind.DEDUP},
            "into several nodes of several ranks",
            "0",
        ),
        ({"cp_comm": CpComm.A2A}, "needs cp > 1", "p2p"),
        ({"order": RankOrder.DP_LAST, "ep": 2}, "needs pp > 1 and dp > 1", "tp-cp-ep-dp-pp"),
        (
            {"order": RankOrder.DP_LAST, "pp": 2, "ep": 2},
            "tp * cp = 1 must be etp * ep = 2",
            "tp-cp-ep-dp-pp",
        ),
        ({"cp": 3, "world_size": 3, "cp_comm": CpComm.A2A}, "must divide the 8 heads", "p2p"),
    ],
)
def test_exclusions(change: dict[str, Any], says: str, near: str) -> None:
    reason = only(
        Layout(**{"world_size": 4, **change}), workload=Workload(seq_len=96, global_batch=96)
    )
    assert says in reason.rule
    assert reason.nearest == near


@pytest.mark.parametrize(
    "change",
    [
        {"recompute": (Recompute.LAYERNORM, Recompute.MOE_ACT)},
        {"recompute": (Recompute.FULL, Recompute.LOSS), "recompute_block": 1},
        {**EP_OVERLAP, "recompute": (Recompute.LOSS,)},
        {"offload": (Offload.ATTN_PROJ, Offload.CORE_ATTN, Offload.OPTIMIZER)},
        {"overlap": (Overlap.GRAD, Overlap.PARAM)},
        {**EP_OVERLAP, "dispatcher": DispatcherKind.HYBRIDEP, "graphs": (CudaGraphScope.FULL,)},
        {"graphs": (CudaGraphScope.FULL,)},
        {"graphs": (CudaGraphScope.FULL,), "recompute": (Recompute.FULL,), "capacity": 1.0},
        {
            "graphs": (
                CudaGraphScope.ATTN,
                CudaGraphScope.MOE_PREPROCESS,
                CudaGraphScope.MOE_ROUTER,
            ),
            "recompute": (Recompute.MOE_ACT,),
        },
        {"ep": 4, "dispatcher": DispatcherKind.DEEPEP, "capacity": 1.0},
        {"cp": 4, "cp_comm": CpComm.A2A},
        {"zero": 3, "ep": 4},
    ],
)
def test_choices_that_go_together(change: dict[str, Any]) -> None:
    assert broken(Layout(**{"world_size": 4, **change})) == ()


def test_graphs_of_attention_hold_no_delayed_gradients_of_biases_under_overlapped_sums() -> None:
    overlap = (Overlap.EP, Overlap.GRAD, Overlap.WGRAD)
    layout = Layout(**{**EP_OVERLAP, "overlap": overlap}, graphs=(CudaGraphScope.ATTN,))
    model = moe_model()
    biased = replace(model, attention=replace(model.attention, qkv_bias=True))
    assert not broken(layout)
    reason = only(layout, model=biased)
    assert (reason.field, reason.nearest) == ("layout.graphs", "none")
    assert not broken(replace(layout, overlap=(Overlap.EP, Overlap.WGRAD)), model=biased)


def test_every_broken_rule_is_reported() -> None:
    layout = Layout(world_size=8, tp=3, ep=3, vpp=2, overlap=(Overlap.PARAM,))
    fields = {reason.field for reason in broken(layout)}
    assert fields >= {"layout.tp", "layout.ep", "layout.sp", "layout.overlap"}


# Helpers


def test_divisors_and_nearest() -> None:
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(1) == (1,)
    assert nearest_legal(96, (1, 32, 64, 128)) == "64 or 128"
    assert nearest_legal(1, (2,)) == "2"
    assert nearest_legal(5, ()) == ""
