"""Rates of a device and times of collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.cost.symbols import build_symbols
from moewright.cost.time.collective_time import CollectiveModel, GroupSpan, group_span
from moewright.cost.time.layer_collectives import cp_exchange, tp_exchange_s, tp_heads_s
from moewright.cost.time.op_time import DeviceRates, OpRow, find_uncovered_rates, interpolate
from moewright.cost.time.ops import expert_ops
from moewright.intake import catalogue
from moewright.intake.devices import read_devices
from moewright.rules import grid
from moewright.rules.expert_load import RankLoad
from moewright.rules.job import Job
from moewright.spec.hardware import (
    Collective,
    CollectiveTime,
    Constant,
    Curve,
    DeviceKind,
    Hardware,
    Op,
    OpRate,
)
from moewright.spec.layout import CpComm, DispatcherKind
from moewright.spec.model import MixerKind, RouterSpec
from moewright.spec.plan import TimePart
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import Dtype, Routing, TensorScaling, Workload


def measured_curve(*points: tuple[float, float]) -> Curve:
    return Curve(points=points, kind=SourceKind.MEASURED, source="test")


def h800(*constants: tuple[str, float]) -> Hardware:
    hardware = catalogue.hardware("256xH800")
    overrides = tuple(
        Constant(name=name, value=Sourced(value=value, kind=SourceKind.MEASURED, source="t"))
        for name, value in constants
    )
    return replace(hardware, constants=(*hardware.constants, *overrides))


def collective_model(hardware: Hardware) -> CollectiveModel:
    return CollectiveModel(hardware, DeviceRates(hardware).constants)


def op_row(op: Op, x: float) -> OpRow:
    return OpRow(name="a row", part=TimePart.DENSE, op=op, amount=1.0, x=x, dtype=Dtype.BF16)


def test_interpolation_is_log_log_and_flat_outside() -> None:
    line = measured_curve((1.0, 10.0), (100.0, 1000.0))
    assert interpolate(line, 10.0) == pytest.approx(100.0)
    assert interpolate(line, 0.1) == 10.0
    assert interpolate(line, 1e9) == 1000.0


def test_wide_shards_off_whole_cache_lines_cost_more() -> None:
    """Hidden 14,400 over TP 8 gives shards of 1,800; BLOOM's chronicles measured 1.3 of a step."""
    model = catalogue.model("Meta-Llama-3-70B")
    hardware = catalogue.hardware("8xA100-80GB")
    workload = Workload(seq_len=2048, global_batch=8)
    layout = parse_layout("tp8,recompute=full", world_size=8)
    seconds = {}
    for width in (28608, 28672, 28800):  # a shard of 3,576, 3,584 and 3,600
        wider = replace(model, dense_ffn_size=width)
        seconds[width] = estimate(wider, workload, hardware, layout).step_s / width
    assert seconds[28608] > 1.08 * seconds[28672] < seconds[28800]


def test_misses_name_what_the_file_lacks() -> None:
    hardware = h800()
    rates = (OpRate(op=Op.GEMM, dtype=Dtype.BF16, curve=measured_curve((1e6, 1e12), (1e9, 2e12))),)
    assumptions = find_uncovered_rates(
        DeviceRates(replace(hardware, device=replace(hardware.device, rates=rates))),
        [op_row(Op.GEMM, 1e7), op_row(Op.GEMM, 1e12), op_row(Op.ATTENTION, 4096)],
    )
    assert [assumption.name for assumption in assumptions] == [
        "rate gemm bf16 at a row",
        "rate attention bf16",
    ]
    assert "held flat" in assumptions[0].value


def test_experts_with_few_rows_multiply_slowly() -> None:
    """Without a rate in the file, experts of 60 rows reach half the rate of large ones."""
    hardware = h800(("grouped_rolloff_rows", 60.0))
    rates = DeviceRates(replace(hardware, device=replace(hardware.device, rates=())))
    few_s, many_s = (rates.seconds(op_row(Op.GROUPED_GEMM, rows)) for rows in (60, 1e9))
    assert few_s / many_s == pytest.approx(2)


def test_the_hardware_file_wins_over_defaults() -> None:
    fast, slow = (
        DeviceRates(h800(("gemm_time_scale", scale))).seconds(op_row(Op.GEMM, 1e12))
        for scale in (1.0, 2.0)
    )
    assert slow / fast == pytest.approx(2)


@pytest.mark.parametrize(
    ("text", "group", "expected"),
    [
        ("tp2,ep8,pp8", "tp", (2, 2, 1)),
        ("tp2,ep8,pp8", "dp_cp", (16, 4, 4)),
        ("tp2,ep32,pp8", "ep", (32, 8, 4)),
        ("tp2,ep8,pp8", "edp", (4, 1, 4)),
        ("tp1,ep8,pp32", "edp", (1, 1, 1)),
        ("tp2,ep4,etp2,pp8", "ep", (4, 4, 1)),
        ("tp2,ep8,pp8", "pp", (8, 1, 8)),
        ("tp4,etp4,pp2,order=tp-cp-ep-pp-dp", "pp", (2, 2, 1)),
        ("tp2,cp2,ep4,pp2,order=tp-cp-ep-pp-dp", "dp_cp", (64, 2, 32)),
        ("tp2,ep2,pp2,order=tp-cp-ep-pp-dp", "edp", (64, 2, 32)),
    ],
)
def test_span(text: str, group: str, expected: tuple[int, int, int]) -> None:
    """Compare with the ranks: how many share the first one's node, and how many nodes there are."""
    layout = parse_layout(text, world_size=256)
    ranks = grid.group_ranks(layout, group, 0)
    nodes = [rank // 8 for rank in ranks]
    assert (len(ranks), nodes.count(0), len(set(nodes))) == expected
    span = group_span(layout, group, 8)
    assert (span.size, span.ranks_per_domain, span.domains) == expected


def test_all_to_all_uses_both_levels_in_turn() -> None:
    scales = (("alltoall_inside_time_scale", 1.0), ("alltoall_between_time_scale", 1.0))
    seconds = collective_model(h800(*scales)).seconds(
        Collective.ALL_TO_ALL, GroupSpan(size=32, ranks_per_domain=8, domains=4), 1e9
    )
    # A quarter of the payload stays in the node, 7/8 of it leaves the rank at 140 GB/s; 3/4 leaves
    # at 45 GB/s.
    assert seconds == pytest.approx(1e9 / 4 * 7 / 8 / 140e9 + 0.75e9 / 45e9, rel=1e-2)


def test_ring_collectives() -> None:
    near = GroupSpan(size=8, ranks_per_domain=8, domains=1)
    collectives = collective_model(h800())
    scatter = collectives.seconds(Collective.REDUCE_SCATTER, near, 8e9)
    assert scatter == pytest.approx(7e9 / 140e9, rel=1e-3)
    assert collectives.seconds(Collective.ALL_GATHER, near, 1e9) == pytest.approx(scatter)
    assert collectives.seconds(Collective.ALL_REDUCE, near, 8e9) == pytest.approx(2 * scatter)
    assert (
        collectives.seconds(
            Collective.ALL_REDUCE, GroupSpan(size=1, ranks_per_domain=1, domains=1), 8e9
        )
        == 0.0
    )


def test_a_measured_curve_wins_for_its_operation_and_size() -> None:
    hardware = h800()
    measured = CollectiveTime(
        op=Collective.ALL_TO_ALL, group_size=2, curve=measured_curve((1e3, 1e-4), (1e6, 1e-3))
    )
    collectives = collective_model(
        replace(hardware, fabric=replace(hardware.fabric, times=(measured,)))
    )
    pair = GroupSpan(size=2, ranks_per_domain=2, domains=1)
    assert collectives.seconds(Collective.ALL_TO_ALL, pair, 1e6) == pytest.approx(1e-3)
    assert collectives.seconds(Collective.ALL_TO_ALL, pair, 4e6) == pytest.approx(
        4e-3
    )  # by bytes beyond the last point
    assert collectives.seconds(Collective.ALL_GATHER, pair, 1e6) != pytest.approx(1e-3)
    four = GroupSpan(size=4, ranks_per_domain=4, domains=1)
    assert collectives.seconds(Collective.ALL_TO_ALL, four, 1e6) < 1e-4


TOP_8 = RouterSpec(top_k=8)
SCALES = ("alltoall_inside", "alltoall_between", "dedup_inside", "dedup_between")


def test_deduplication_pays_between_nodes() -> None:
    """Send 3.6 copies to nodes instead of 8 rows to ranks: 32 ranks over 4 nodes, top 8.

    See docs/formulas.md 3.
    """
    plain = parse_layout("tp2,ep32,pp8", world_size=256)
    dedup = replace(plain, dispatcher=DispatcherKind.DEEPEP)
    scales = ((f"{kind}_time_scale", 1.0) for kind in SCALES)
    collectives = collective_model(h800(("library_call_s", 0.0), *scales))
    slow, fast = (
        collectives.dispatch_s(layout, tokens=2048, router=TOP_8, row_bytes=8192, load=1.0)
        for layout in (plain, dedup)
    )
    assert 1.15 < slow / fast < 2
    inside = 2048 * 32 * (1 - (31 / 32) ** 8) * 8192 / (0.58 * 200e9)
    between = 2048 * 4 * (1 - 0.75**8) * 0.75 * 8192 / 45e9
    assert fast == pytest.approx(inside + between, rel=0.01)


def test_nodes_that_a_layout_names_are_priced_for_domains() -> None:
    """Price the fabric's own nodes as the fabric, and more nodes with more copies between them."""
    dedup = parse_layout("ep32,pp8,dispatcher=dedup", world_size=256)
    collectives = collective_model(h800())

    def seconds(node: int) -> float:
        layout = replace(dedup, ep_node=node)
        return collectives.dispatch_s(layout, tokens=2048, router=TOP_8, row_bytes=8192, load=1.0)

    assert grid.with_fabric_nodes(dedup, 8).ep_node == 8
    assert seconds(8) == seconds(0) < seconds(4) < seconds(2)
    inside = parse_layout("ep8,dispatcher=dedup", world_size=8)
    near = [
        collectives.dispatch_s(
            replace(inside, ep_node=node), tokens=2048, router=TOP_8, row_bytes=8192, load=1.0
        )
        for node in (0, 4)
    ]
    assert near[0] < near[1] < 2 * near[0]  # a detour, at the speed of the domain


def test_a_ring_is_as_slow_as_its_slowest_hop() -> None:
    one_node = GroupSpan(size=4, ranks_per_domain=4, domains=1)
    two_nodes = GroupSpan(size=16, ranks_per_domain=8, domains=2)
    fast, slow = (
        collective_model(h800()).seconds(Collective.P2P, span, 1e9)
        for span in (one_node, two_nodes)
    )
    assert slow > 2 * fast
    assert slow == pytest.approx(1e9 / (50e9 * 0.9), rel=0.01)


def test_context_over_nodes_is_cheapest_where_only_keys_cross_them() -> None:
    """Exchange heads inside each of two nodes, and run a ring of two between them.

    Inside one node the two-level exchange is plain a2a.
    """
    model = catalogue.model("Qwen3-235B-A22B")
    hardware = catalogue.hardware("256xH100")
    work = Workload(routing=Routing.BALANCED, seq_len=65536, global_batch=256)

    def context_s(comm: str, cp: int) -> float:
        layout = parse_layout(
            f"cp{cp},ep8,pp8,vpp4,mbs1,recompute=full,cp_comm={comm}", world_size=256
        )
        shares = estimate(model, work, hardware, layout).shares
        return sum(
            share.seconds + share.hidden_s for share in shares if share.part is TimePart.CP_COMM
        )

    assert context_s("a2a+p2p", 16) < context_s("a2a", 16)
    assert context_s("a2a+p2p", 8) == pytest.approx(context_s("a2a", 8))


@pytest.mark.parametrize(
    ("comm", "cp"),
    [
        (CpComm.P2P, 2),
        (CpComm.P2P, 16),
        (CpComm.ALL_GATHER, 16),
        (CpComm.A2A, 8),
        (CpComm.A2A_P2P, 16),
    ],
)
def test_only_a_ring_runs_beside_its_attention(comm: CpComm, cp: int) -> None:
    """Heads that go before and after a mixer wait for it, and backward sends as many gradients.

    A ring and a gather move keys and values again in backward, beside their gradients.
    """
    model = catalogue.model("Qwen3.5-35B-A3B")
    hardware = catalogue.hardware("64xH100")
    layout = parse_layout(f"tp2,cp{cp},ep8,mbs1,cp_comm={comm}", world_size=64)
    work = Workload(routing=Routing.BALANCED, seq_len=131072, global_batch=64)
    job = Job(model=model, workload=work, layout=layout)
    sym = build_symbols(job, device_kind=DeviceKind.CUDA, load=RankLoad(), router_efficiency=1.0)
    collectives = collective_model(hardware)
    heads = cp_exchange(collectives, sym, MixerKind.RECURRENT)
    keys = cp_exchange(collectives, sym, MixerKind.ATTENTION)
    assert heads.backward_s == heads.forward_s > 0
    assert not heads.is_ring
    assert keys.is_ring is (comm is CpComm.P2P)
    if comm in (CpComm.P2P, CpComm.ALL_GATHER):
        assert keys.backward_s == 2 * keys.forward_s
    elif comm is CpComm.A2A:
        assert keys.backward_s == keys.forward_s
    shares = {share.part: share for share in estimate(model, work, hardware, layout).shares}
    recurrent_layers = sum(
        model.mixer(layer) is MixerKind.RECURRENT for layer in range(model.layers)
    )
    passes = recurrent_layers * work.global_batch // (64 // (2 * cp))
    waited_s = shares[TimePart.CP_COMM].seconds
    assert waited_s >= 0.999 * passes * (heads.forward_s + heads.backward_s)


GPUS = tuple(
    device.aliases[0] for device in read_devices() if catalogue.hardware(f"8x{device.aliases[0]}")
)


@pytest.mark.parametrize("name", GPUS)
def test_no_product_of_a_part_is_faster_than_its_peak_allows(name: str) -> None:
    """A scale fitted to runs never lets products exceed 0.8 of the peak of their dtype."""
    hardware = catalogue.hardware(f"8x{name}")
    rates = DeviceRates(hardware)
    for dtype in [peak.dtype for peak in hardware.device.peaks]:
        for op, x in ((Op.GEMM, 1e13), (Op.GROUPED_GEMM, 1e5)):
            row = replace(op_row(op, x), dtype=dtype)
            assert 1 / rates.seconds(row) <= 0.8001 * rates.peak_flops(dtype)


def test_a_scale_that_leaves_the_peak_behind_is_not_believed() -> None:
    slow, believed, capped = (
        DeviceRates(h800(("gemm_time_scale", scale))).seconds(op_row(Op.GEMM, 1e13))
        for scale in (1.2, 1.0, 0.5)
    )
    assert slow == pytest.approx(1.2 * believed)
    assert 0.9 * believed < capped < believed


def expert_seconds(hardware: Hardware, workload: Workload) -> float:
    """Return the seconds of large experts, forward and backward, with what quantises for them."""
    model = catalogue.model("mistralai/Mixtral-8x22B-v0.1")
    layout = parse_layout("ep8,mbs1,dispatcher=deepep", world_size=8)
    sym = build_symbols(
        Job(model=model, workload=workload, layout=layout),
        device_kind=DeviceKind.CUDA,
        load=RankLoad(),
        router_efficiency=0.3,
    )
    rates = DeviceRates(hardware)
    ops = expert_ops(sym)
    return sum(rates.seconds(row) for row in (*ops.forward, *ops.backward))


@pytest.mark.parametrize("name", GPUS)
def test_large_experts_are_faster_in_8_bits(name: str) -> None:
    """Casts and transposes included, in every recipe; published runs gained 20 to 40 %."""
    hardware = catalogue.hardware(f"8x{name}")
    if not any(peak.dtype.is_narrow for peak in hardware.device.peaks):
        pytest.skip("no 8-bit products")
    wide = Workload(routing=Routing.BALANCED, seq_len=8192, global_batch=64)
    recipes = [
        replace(wide, precision=Dtype.FP8, tensor_scaling=TensorScaling.DELAYED),
        replace(wide, precision=Dtype.FP8),
        replace(wide, precision=Dtype.MXFP8),
    ]
    delayed_s, current_s, block_s = (expert_seconds(hardware, recipe) for recipe in recipes)
    assert delayed_s < current_s < expert_seconds(hardware, wide)
    assert block_s < 0.95 * expert_seconds(hardware, wide)


def heads_s(tp: int) -> float:
    layout = parse_layout(f"tp{tp},ep8", world_size=64)
    work = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=256)
    hardware = catalogue.hardware("64xH100")
    job = Job(model=catalogue.model("Qwen3-30B-A3B"), workload=work, layout=layout)
    sym = build_symbols(job, device_kind=DeviceKind.CUDA, load=RankLoad(), router_efficiency=1.0)
    return tp_heads_s(collective_model(hardware), sym, MixerKind.ATTENTION)


def test_more_tp_ranks_than_key_heads_gather_queries_keys_and_values() -> None:
    assert heads_s(4) == 0  # 4 key heads: each rank has its own
    collectives = collective_model(catalogue.hardware("64xH100"))
    layout = parse_layout("tp8,ep8", world_size=64)
    columns = 4096 + 2 * 512
    assert heads_s(8) == tp_exchange_s(collectives, layout, 2 * 4096 * columns)
