"""What the kind of network and the number of devices cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.cost.time.collective_time import CollectiveModel, GroupSpan
from moewright.cost.time.layer_collectives import tp_exchange_s
from moewright.cost.time.op_time import DeviceRates
from moewright.cost.time.step_tail import StepTail, TailSeconds, exchange_window
from moewright.intake import catalogue
from moewright.spec.hardware import Collective, Constant, Hardware
from moewright.spec.layout import DispatcherKind, Layout, Overlap
from moewright.spec.ledger import StepPhase
from moewright.spec.plan import Estimate, TimePart
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import Workload

QWEN = catalogue.model("Qwen3-30B-A3B")


def model_of(hardware: str, network: str = "") -> CollectiveModel:
    machines = catalogue.hardware(hardware, network)
    return CollectiveModel(machines, DeviceRates(machines).constants)


def dispatch_s(network: str, ep: int, dispatcher: DispatcherKind, tokens: int = 2048) -> float:
    """Return the seconds of both directions of a dispatch on H100, with the host's wait."""
    assert QWEN.moe is not None
    layout = Layout(world_size=64, ep=ep, dispatcher=dispatcher)
    collectives = model_of("64xH100", network)
    moving_s = collectives.dispatch_s(
        layout, tokens=tokens, router=QWEN.moe.router, row_bytes=4096, load=1.0
    )
    return 2 * moving_s + sum(collectives.dispatch_waits_s(layout)) / 2


@pytest.mark.parametrize(
    ("network", "ep", "faster"),
    [
        ("ib", 8, DispatcherKind.DEEPEP),
        ("ib", 32, DispatcherKind.DEEPEP),
        ("efa", 8, DispatcherKind.DEEPEP),
        ("efa", 16, DispatcherKind.ALL_TO_ALL),
        ("efa", 32, DispatcherKind.ALL_TO_ALL),
    ],
)
def test_the_network_decides_which_dispatcher_is_faster(
    network: str, ep: int, faster: DispatcherKind
) -> None:
    """On EFA DeepEP wins inside a node, and loses where a CPU thread posts its messages."""
    seconds = {
        kind: dispatch_s(network, ep, kind)
        for kind in (DispatcherKind.ALL_TO_ALL, DispatcherKind.DEEPEP)
    }
    assert min(seconds, key=lambda kind: seconds[kind]) is faster


def test_messages_of_a_proxy_grow_with_the_tokens() -> None:
    few, many = (dispatch_s("efa", 32, DispatcherKind.DEEPEP, tokens) for tokens in (512, 2048))
    assert 3 < many / few < 4


def test_small_messages_of_a_library_cost_a_call_a_node() -> None:
    """Nothing is faster than a call, however few tokens it moves."""
    inside, between = (dispatch_s("ib", ep, DispatcherKind.DEEPEP, 8) for ep in (8, 32))
    assert between - inside > 2 * 3 * 3.4e-5  # three more nodes in each direction


def spans(domains: int) -> GroupSpan:
    return GroupSpan(size=8 * domains, ranks_per_domain=8, domains=domains)


def test_rings_over_many_nodes_take_a_step_a_node_and_trees_a_level() -> None:
    collectives = model_of("2048xH100")
    few, many = (
        collectives.seconds(Collective.REDUCE_SCATTER, spans(domains), 8.0) for domains in (16, 256)
    )
    assert many - few == pytest.approx(240e-5, rel=0.01)
    few, many = (
        collectives.seconds(Collective.ALL_REDUCE, spans(domains), 8.0) for domains in (16, 256)
    )
    assert many - few == pytest.approx(2 * 4e-5, rel=0.01)


def _estimate(devices: int) -> Estimate:
    workload = Workload(seq_len=4096, global_batch=8 * devices)
    layout = parse_layout("tp2,ep8,mbs1", world_size=devices)
    return estimate(QWEN, workload, catalogue.hardware(f"{devices}xH100"), layout)


def test_all_devices_wait_for_the_slowest() -> None:
    """At the same work a device, more devices are slower, by less for each eightfold."""
    steps = [_estimate(devices).step_s for devices in (16, 128, 1024)]
    growth = [after / before for before, after in pairwise(steps)]
    assert 1.05 > growth[0] > growth[1] > 1.003


def test_an_exchange_hides_no_longer_than_the_work_beside_it() -> None:
    """Over EFA DeepEP takes longer than the rest of the layer: overlap hides a part alone."""
    text = "tp8,pp2,vpp2,ep32,mbs4,dispatcher=deepep,overlap=ep"
    layout = parse_layout(text, world_size=64)
    workload = Workload(seq_len=4096, global_batch=256)
    steps = {
        network: estimate(QWEN, workload, catalogue.hardware("64xH100", network), layout)
        for network in ("ib", "efa")
    }
    shares = {
        network: next(share for share in step.shares if share.part is TimePart.EP_COMM)
        for network, step in steps.items()
    }
    hidden = {
        network: share.hidden_s / (share.hidden_s + share.seconds)
        for network, share in shares.items()
    }
    assert hidden["efa"] < 0.6 < 0.65 < hidden["ib"]
    assert steps["efa"].step_s > 1.5 * steps["ib"].step_s


def test_the_efa_constants_are_listed_where_they_count() -> None:
    layout = parse_layout("ep8", world_size=8)
    workload = Workload(seq_len=4096, global_batch=64)
    hardware = catalogue.hardware("8xH100")
    plain = estimate(QWEN, workload, hardware, layout)
    efa = estimate(QWEN, workload, catalogue.hardware("8xH100", "efa"), replace(layout))
    names = [{item.name for item in answer.assumptions} for answer in (plain, efa)]
    assert "proxy_message_s" not in names[0]
    assert "proxy_message_s" in names[1]


def test_split_sizes_are_waited_for_in_forward_alone() -> None:
    """Backward knows them; older software makes up longer, another micro-batch hides a share."""
    machines = catalogue.hardware("64xH100")

    def waits_s(layout: Layout, *, age_years: float = 0.0) -> tuple[float, float]:
        age = Constant(
            name="stack_age_years",
            value=Sourced(value=age_years, kind=SourceKind.ASSUMED, source="age"),
        )
        aged = replace(machines, constants=(*machines.constants, age))
        return CollectiveModel(aged, DeviceRates(aged).constants).dispatch_waits_s(layout)

    constants = DeviceRates(machines).constants
    plain = Layout(world_size=64, ep=8)
    forward_s, backward_s = waits_s(plain)
    assert forward_s > 0
    assert backward_s == 0
    assert waits_s(plain, age_years=1)[0] == pytest.approx(constants["host_per_year"] * forward_s)
    hidden = replace(plain, overlap=(Overlap.EP,))
    assert waits_s(hidden)[0] == pytest.approx((1 - constants["ep_overlap_hidden"]) * forward_s)
    library_s = waits_s(replace(plain, dispatcher=DispatcherKind.DEEPEP))
    assert library_s[1] < library_s[0] < forward_s


def test_deepep_waits_for_the_counts_of_its_peers_in_forward() -> None:
    """In older software longer; HybridEP, and rows of a fixed number, have no such wait."""
    catalogued = catalogue.hardware("64xH100")

    def with_constants(**values: float) -> Hardware:
        changed = tuple(
            Constant(name=name, value=Sourced(value=value, kind=SourceKind.ASSUMED, source="test"))
            for name, value in values.items()
        )
        return replace(catalogued, constants=(*catalogued.constants, *changed))

    machines = with_constants(sync_s_deepep=0.0)
    slower = with_constants(sync_s_deepep=1e-3, host_per_year=1.5, stack_age_years=1.0)

    def added_s(**changes: object) -> tuple[float, float]:
        layout = replace(Layout(world_size=64, ep=8), **changes)
        waits = [
            CollectiveModel(hardware, DeviceRates(hardware).constants).dispatch_waits_s(layout)
            for hardware in (machines, slower)
        ]
        return waits[1][0] - waits[0][0], waits[1][1] - waits[0][1]

    deepep = DispatcherKind.DEEPEP
    assert added_s(dispatcher=deepep) == pytest.approx((1.5e-3, 0.0))
    assert added_s(dispatcher=deepep, rank_capacity=1.0) == pytest.approx((0.0, 0.0))
    assert added_s(dispatcher=DispatcherKind.HYBRIDEP) == pytest.approx((0.0, 0.0))


def test_a_recomputed_layer_waits_for_split_sizes_again() -> None:
    machines = catalogue.hardware("16xH100")
    longer = Constant(
        name="sync_s_alltoall",
        value=Sourced(value=2e-3, kind=SourceKind.ASSUMED, source="longer"),
    )
    slower = replace(machines, constants=(*machines.constants, longer))
    work = Workload(seq_len=4096, global_batch=64)

    def added_s(text: str) -> float:
        layout = parse_layout(text, world_size=16)
        return (
            estimate(QWEN, work, slower, layout).step_s
            - estimate(QWEN, work, machines, layout).step_s
        )

    assert added_s("ep8") > 0
    for recompute in ("full", "moe"):
        assert added_s(f"ep8,recompute={recompute}") == pytest.approx(2 * added_s("ep8"), rel=1e-6)


@pytest.mark.parametrize("op", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_part_of_a_mesh_has_a_part_of_its_links(op: Collective, ranks: int) -> None:
    """Six of a GH200's 18 links lead to each of the other three; a switch gives all to any."""
    board = catalogue.hardware("8xGH200", "nvl4+ib")
    switched = replace(board, fabric=replace(board.fabric, domain="nvlink"))
    span = GroupSpan(size=ranks, ranks_per_domain=ranks, domains=1)
    large = 1e15  # beside which a latency is nothing
    mesh_s, switch_s = (
        CollectiveModel(hardware, DeviceRates(hardware).constants).seconds(op, span, large)
        for hardware in (board, switched)
    )
    assert mesh_s / switch_s == pytest.approx(3 / (ranks - 1), rel=1e-6)


def test_a_ring_of_products_has_the_links_to_one_neighbour() -> None:
    """Overlapped TP goes around a ring: a third of what NCCL's rings over all links have."""
    board = model_of("8xGH200", "nvl4+ib")
    plain, overlapped = (
        tp_exchange_s(board, Layout(world_size=8, tp=4, sp=True, overlap=overlap), 1e15)
        for overlap in ((), (Overlap.TP,))
    )
    shown = 1 - board.constants["tp_overlap_hidden"]
    assert overlapped / plain == pytest.approx(3 * shown, rel=1e-6)
    pair = GroupSpan(size=2, ranks_per_domain=2, domains=1)
    assert board.neighbour_share(pair) == 1.0
    assert model_of("8xH100").neighbour_share(GroupSpan(size=8, ranks_per_domain=8, domains=1)) == 1


def test_a_port_of_jupiter_has_200_gigabits() -> None:
    assert catalogue.hardware("8xGH200", "nvl4+ib").fabric.network_Bps.value == 25e9
    assert catalogue.hardware("8xGH200").fabric.network_Bps.value == 50e9  # a server of its own


@pytest.mark.parametrize("seed", range(8))
def test_what_a_step_does_once_hides_beside_little_of_it(seed: int) -> None:
    """Gradients wait for the last micro-batch: beside the others none is there to be reduced."""
    random = Random(seed)
    pp, vpp, m = random.choice((1, 2, 4)), random.choice((1, 2, 4)), random.choice((4, 8, 64))
    vpp = vpp if pp > 1 else 1
    window = exchange_window(1, pp=pp, vpp=vpp, micro_batches=m)
    assert 1 / (vpp * m) <= window <= min(1.0, pp / m + 1e-9)
    assert exchange_window(3, pp=pp, vpp=vpp, micro_batches=m) == 1.0
    term = TailSeconds(
        phase=StepPhase.GRAD_REDUCE,
        part=TimePart.DP_COMM,
        exposed_s=random.random(),
        hidden_s=random.random(),
    )
    tail = StepTail(terms=(term,), beside_share=float(window))
    steps = [tail.step_s(pipeline_s) for pipeline_s in (0.0, 1.0, 1e3)]
    assert steps[0] == pytest.approx(tail.least_s)
    assert steps[1] >= 1.0 + term.exposed_s
    assert steps[2] == pytest.approx(1e3 + term.exposed_s + tail.uncovered_s(1e3))
