"""Levels of switches: beside progressive filling over every flow, and by closed forms."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

import moewright as mw
from moewright.codec import fingerprint, parse_layout, to_data
from moewright.cost.time.collective_time import CollectiveModel, group_span
from moewright.cost.time.op_time import DeviceRates
from moewright.cost.time.topology import Crossing, find_crossing
from moewright.rules import grid
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Collective, Fabric, Hardware, TopologyLevel, Wiring
from moewright.spec.layout import Layout

_FABRIC = mw.hardware("8xH100").fabric
GROUPS = ("ep", "edp", "dp_cp", "pp", "tp_cp", "etp", "world")


def share_fairly(paths: list[list[object]], capacities: dict[object, float]) -> list[float]:
    """Return the max-min fair rates of flows by progressive filling, flow by flow."""
    left, rates = dict(capacities), [-1.0] * len(paths)
    while -1.0 in rates:
        growing = [flow for flow, rate in enumerate(rates) if rate < 0]
        flows: dict[object, int] = {}
        for flow in growing:
            for link in paths[flow]:
                flows[link] = flows.get(link, 0) + 1
        full = min(flows, key=lambda link: left[link] / flows[link])
        rate = left[full] / flows[full]
        for flow in growing:
            if full in paths[flow]:
                rates[flow] = rate
                for link in paths[flow]:
                    left[link] -= rate
    return rates


def slow_down(fabric: Fabric, flows: list[tuple[int, int]]) -> float:
    """Return how much longer the slowest flow takes over the levels than over ports alone.

    Dragonflies take their direct links, or detours by which all links carry twice what leaves:
    whichever is faster.
    """
    dragonflies = sum(level.wiring is Wiring.DRAGONFLY for level in fabric.levels)
    routes = product((False, True), repeat=dragonflies)
    return min(slow_down_by(fabric, flows, iter(detours)) for detours in routes)


def slow_down_by(fabric: Fabric, flows: list[tuple[int, int]], detours: Iterator[bool]) -> float:
    size, levels = fabric.domain_size, fabric.levels
    units = [max(max(flow) for flow in flows) // level.devices + 1 for level in levels]
    has_detours = [level.wiring is Wiring.DRAGONFLY and next(detours) for level in levels]
    paths: list[list[object]] = []
    capacities: dict[object, float] = {}
    for source, target in flows:
        if source // size == target // size:
            continue
        is_rail = levels[0].wiring is Wiring.RAIL
        port = ("port", source // size * size + target % size) if is_rail else ("port", source)
        capacities[port] = 1.0
        path: list[object] = [port]
        for index, level in enumerate(levels):
            first, last = source // level.devices, target // level.devices
            if first == last:
                continue
            ports = level.devices / level.oversubscription * (1 - level.background)
            links: list[tuple[object, ...]] = [(index, first, "up"), (index, last, "down")]
            if level.wiring is Wiring.RAIL:
                ports /= size
                links = [(*link, target % size) for link in links]
            elif has_detours[index]:
                ports /= 2
            elif level.wiring is Wiring.DRAGONFLY:
                ports /= max(1, units[index] - 1)
                links = [(index, first, last)]
            capacities |= dict.fromkeys(links, ports)
            path += links
        paths.append(path)
    if not paths:
        return 1.0
    alone = min(share_fairly([path[:1] for path in paths], capacities))
    return alone / min(share_fairly(paths, capacities))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Fabric, Layout]:
    size = draw(st.sampled_from((1, 2, 4)))
    levels = []
    unit = size
    for index in range(draw(st.integers(1, 2))):
        unit *= draw(st.sampled_from((1, 2, 3, 4)))
        wirings = [wiring for wiring in Wiring if not index or wiring is not Wiring.RAIL]
        levels.append(
            TopologyLevel(
                wiring=draw(st.sampled_from(wirings)),
                devices=unit,
                oversubscription=draw(st.sampled_from((0.5, 1.0, 2.0, 7.0))),
                background=draw(st.sampled_from((0.0, 0.25))),
            )
        )
    tp, cp, ep, pp = (draw(st.sampled_from((1, 2, 3))) for _ in range(4))
    degrees = Layout(world_size=1, tp=tp, cp=cp, pp=pp, ep=ep)
    world = grid.min_world_size(degrees) * draw(st.integers(1, 2))
    order = draw(st.sampled_from(("", ",order=tp-cp-ep-pp-dp")))
    if order and tp * cp != ep:
        order = ""
    layout = parse_layout(f"tp{tp},cp{cp},ep{ep},pp{pp}{order}", world_size=world)
    domains = -(-world // size)
    placement = draw(st.just(()) | st.permutations(range(domains + 2)).map(tuple))
    fabric = replace(_FABRIC, domain_size=size, levels=tuple(levels), placement=placement)
    return fabric, layout


@settings(max_examples=50)
@given(case=cases(), group=st.sampled_from(GROUPS))
def test_levels_slow_a_collective_as_progressive_filling_says(
    case: tuple[Fabric, Layout], group: str
) -> None:
    fabric, layout = case
    size = fabric.domain_size
    places = fabric.placement or range(layout.world_size)
    device = [places[rank // size] * size + rank % size for rank in range(layout.world_size)]
    groups = grid.all_groups(layout, group)
    inside = group_span(layout, group, size).ranks_per_domain
    found = find_crossing(fabric, layout, group, inside)
    exchange = [
        (device[source], device[target])
        for ranks in groups
        for source in ranks
        for target in ranks
        if source != target
    ]
    ring = [
        (device[rank], device[ranks[(place + inside) % len(ranks)]])
        for ranks in map(sorted, groups)
        for place, rank in enumerate(ranks)
    ]
    if len(groups[0]) > 1:
        assert found.exchange == pytest.approx(slow_down(fabric, exchange))
        assert found.ring == pytest.approx(slow_down(fabric, ring))


def cross(text: str, world: int, *levels: TopologyLevel, group: str = "ep") -> Crossing:
    layout = parse_layout(text, world_size=world)
    return _model(levels, world).span(layout, group).crossing


def _hardware(levels: tuple[TopologyLevel, ...], world: int) -> Hardware:
    flat = mw.hardware(f"{world}xH100")
    return replace(flat, fabric=replace(flat.fabric, levels=levels))


def _model(levels: tuple[TopologyLevel, ...], world: int) -> CollectiveModel:
    hardware = _hardware(levels, world)
    return CollectiveModel(hardware, DeviceRates(hardware).constants)


def tree(devices: int, oversubscription: float = 1.0, **numbers: float) -> TopologyLevel:
    return TopologyLevel(
        wiring=Wiring.TREE, devices=devices, oversubscription=oversubscription, **numbers
    )


@pytest.mark.parametrize("text", ["ep64", "tp4,ep16,pp2", "tp2,cp2,ep8"])
def test_a_network_that_carries_what_all_ports_send_changes_nothing(text: str) -> None:
    layout = parse_layout(text, world_size=256)
    today, other = _model((), 256), _model((tree(32), tree(128)), 256)
    for group in ("ep", "edp", "dp_cp", "pp", "tp_cp"):
        for op in Collective:
            seconds = [
                model.seconds(op, model.span(layout, group), 1e8) for model in (today, other)
            ]
            assert seconds[1] == pytest.approx(seconds[0], rel=1e-9)


@pytest.mark.parametrize("k", [1.5, 2, 7])
def test_an_exchange_across_links_of_a_kth_is_k_times_as_slow(k: float) -> None:
    # Units are domains, so that all that leaves a domain crosses the level.
    assert cross("ep32", 128, tree(8, k)).exchange == pytest.approx(k)
    # In units of two domains a third of what leaves a domain of four stays inside the unit.
    assert cross("ep32", 128, tree(16, k)).exchange == pytest.approx(max(1, k * 2 / 3))


def test_groups_that_stay_below_a_switch_do_not_see_it() -> None:
    assert cross("ep64", 256, tree(64, 8)) == Crossing()
    assert cross("ep64", 256, tree(64, 8), group="edp").ring == pytest.approx(8)


def test_rails_keep_what_a_tree_sends_up() -> None:
    # A unit of 16 nodes has a switch for each of 8 places; a message takes the rail of its target.
    rail = TopologyLevel(wiring=Wiring.RAIL, devices=128, oversubscription=4)
    assert cross("ep128", 256, rail).exchange == 1
    assert cross("ep128", 256, tree(64, 4)).exchange > 2


def test_rings_make_detours_in_a_dragonfly_and_exchanges_do_not() -> None:
    level = TopologyLevel(wiring=Wiring.DRAGONFLY, devices=8)
    # A ring would use one link of a unit's seven, so it makes detours; an exchange uses all alike.
    assert cross("ep64", 64, level).ring == pytest.approx(2)
    assert cross("ep64", 64, level).exchange == pytest.approx(1)


def test_two_sites_cost_latency_and_links_to_what_crosses_them() -> None:
    sites = tree(128, 64, latency_s=5e-3)
    inside, between = (cross("ep32,pp2", 256, sites, group=group) for group in ("edp", "pp"))
    assert inside == Crossing()
    assert (between.ring, between.latency_s) == (pytest.approx(64), 5e-3)
    # A message goes around a ring of all ranks over both of the links between the sites.
    ring = cross("ep32", 256, sites, group="edp")
    assert ring.ring_latency_s == pytest.approx(10e-3)


def test_nodes_that_a_scheduler_scattered_cross_what_those_of_one_rack_do_not() -> None:
    layout = parse_layout("ep32", world_size=64)
    fabric = replace(_hardware((tree(32, 4),), 64).fabric, placement=(0, 4, 1, 5, 2, 6, 3, 7))
    assert find_crossing(fabric, layout, "ep", 8).exchange == pytest.approx(4 * 2 / 3)
    assert find_crossing(replace(fabric, placement=()), layout, "ep", 8).exchange == 1


def test_a_step_is_slower_where_the_plan_crosses_an_oversubscribed_level() -> None:
    options = ("", "tree:16:4", "ib+tree:16:4:0.5")
    machines = [mw.hardware("64xH100", network=network) for network in options]
    flat, slow, shared = (
        mw.estimate("Qwen3-30B-A3B", "ep64,mbs1", on=machine).estimate for machine in machines
    )
    assert slow.step_s > 1.1 * flat.step_s
    assert shared.step_s > 1.1 * slow.step_s
    assert slow.peak_bytes == flat.peak_bytes


@pytest.mark.parametrize(
    ("network", "rule"),
    [
        ("tree", "must be one of"),
        ("star:16:2", "tree, rail, dragonfly"),
        ("tree:lots", "needs a number"),
        ("tree:12:2", "multiple of 8.*16"),
        ("tree:16:0", "oversubscription must be in"),
        ("tree:64:2+tree:16:2", "multiple of 64"),
        ("tree:16:2:1.5", "background must be in"),
        ("tree:16+rail:32", "lowest"),
    ],
)
def test_levels_that_cannot_be_are_refused(network: str, rule: str) -> None:
    with pytest.raises(BadInput, match=f"(?s)network.*{rule}"):
        mw.hardware("64xH100", network=network)


def test_a_hardware_file_has_levels_and_older_ones_stay_what_they_were(tmp_path: Path) -> None:
    flat, slow = _hardware((), 64), _hardware((tree(16, 4),), 64)
    assert not {"levels", "placement"} & set(to_data(flat)["fabric"])
    assert fingerprint(flat) != fingerprint(slow)
    path = tmp_path / "cluster.toml"
    path.write_text(tomli_w.dumps(slow.to_dict()))
    assert mw.hardware(str(path)) == slow
    path.write_text(tomli_w.dumps(_hardware((tree(16, 0.0),), 64).to_dict()))
    with pytest.raises(BadInput, match=r"fabric.levels\[0\].oversubscription"):
        mw.hardware(str(path))


def test_a_hundred_thousand_ranks_take_seconds() -> None:
    layout = parse_layout("ep64,pp16", world_size=98304)
    levels = (
        tree(128),
        tree(3072, 7.0),  # Llama 3's pods, arXiv 2407.21783
    )
    fabric = _hardware(levels, 98304).fabric
    began_s = time.perf_counter()
    found = {
        group: find_crossing(fabric, layout, group, 8) for group in ("ep", "edp", "dp_cp", "pp")
    }
    assert time.perf_counter() - began_s < 10
    assert found["ep"].exchange == 1  # 64 ranks of one rack
    assert found["pp"].ring == pytest.approx(7)  # stages are pods apart
