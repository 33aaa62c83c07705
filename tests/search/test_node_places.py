"""Nodes of a scheduler get ranks in the order that is fastest over levels of switches."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import tomli_w

import moewright as mw
from moewright.cli.main import main
from moewright.codec import parse_layout
from moewright.search.node_places import NodePlaces, place_nodes
from moewright.search.search import build_plan
from moewright.spec.errors import BadInput
from moewright.spec.layout import RankOrder
from moewright.spec.plan import Plan


def build(network: str, layout: str, placement: tuple[int, ...], devices: int = 32) -> Plan:
    machine = mw.hardware(f"{devices}xH100", network=network)
    machine = replace(machine, fabric=replace(machine.fabric, placement=placement))
    workload = mw.estimate("Qwen3-30B-A3B", "ep8,mbs1", on="8xH100").workload
    workload = replace(workload, global_batch=4 * devices)
    chosen = parse_layout(layout, world_size=devices)
    return build_plan(mw.model("Qwen3-30B-A3B"), workload, machine, chosen)


def with_order(plan: Plan, order: RankOrder, places: tuple[int, ...]) -> float:
    """Return the step under an order and places; infinite where the order is illegal."""
    fabric = replace(plan.hardware.fabric, placement=places)
    try:
        layout = replace(plan.layout, order=order)
        hardware = replace(plan.hardware, fabric=fabric)
        return build_plan(plan.model, plan.workload, hardware, layout).estimate.step_s
    except BadInput:
        return float("inf")


def check_places(plan: Plan, found: NodePlaces) -> None:
    """Check that an answer is of the scheduler's nodes and takes what it says."""
    given = plan.hardware.fabric.placement
    assert sorted(found.places) == sorted(given)
    assert with_order(plan, found.layout.order, found.places) == found.step_s
    assert found.given_s == plan.estimate.step_s
    assert found.step_s <= found.given_s


@pytest.mark.parametrize(
    ("network", "layout", "placement"),
    [
        ("tree:16:4", "ep16,mbs1", (0, 2, 1, 3)),
        ("tree:16:7", "tp2,pp2,ep2,mbs1", (0, 4, 1, 5)),
        ("tree:16:2+tree:32:8", "pp2,ep16,mbs1", (7, 0, 5, 1)),
        ("rail:16:4", "ep32,mbs1", (0, 3, 1, 6)),
        ("dragonfly:16", "pp4,ep8,mbs1", (0, 2, 4, 1)),
    ],
)
def test_no_permutation_of_few_nodes_is_faster(
    network: str, layout: str, placement: tuple[int, ...]
) -> None:
    plan = build(network, layout, placement)
    found = place_nodes(plan)
    check_places(plan, found)
    assert found.is_exact
    fastest = min(
        with_order(plan, order, places) for order in RankOrder for places in permutations(placement)
    )
    assert found.step_s == fastest


def test_scattered_nodes_are_put_together() -> None:
    plan = build("tree:16:8", "ep16,mbs1", (0, 2, 1, 3))
    found = place_nodes(plan)
    assert found.step_s < 0.8 * found.given_s
    # Each pair of nodes that exchanges tokens is below one switch.
    assert found.places[0] // 2 == found.places[1] // 2


def test_many_scattered_nodes_are_put_together_too() -> None:
    """Sixteen nodes, two a switch: too many orders to try all."""
    placement = tuple(place // 8 + 2 * (place % 8) for place in range(16))
    plan = build("tree:16:8", "ep16,mbs1", placement, devices=128)
    found = place_nodes(plan)
    check_places(plan, found)
    assert not found.is_exact
    together = with_order(plan, RankOrder.PP_LAST, tuple(range(16)))
    assert found.step_s == together < 0.8 * found.given_s


def test_blocks_stay_below_switches_that_have_unequal_rooms() -> None:
    """Racks of five, four and seven free nodes hold whole groups of four where they can."""
    placement = (*range(5), *range(8, 12), *range(16, 23))
    plan = build("tree:64:8", "ep32,mbs1", placement, devices=128)
    found = place_nodes(plan)
    check_places(plan, found)
    assert found.step_s < 0.95 * found.given_s


@pytest.mark.thorough
def test_a_hundred_thousand_ranks_take_less_than_a_minute() -> None:
    placement = tuple(sorted(range(12288), key=lambda place: (place * 7919) % 12289))
    plan = build("tree:128+tree:3072:7", "ep64,pp16,mbs1", placement, devices=98304)
    began_s = time.process_time()
    found = place_nodes(plan)
    assert time.process_time() - began_s < 60
    assert found.step_s < 0.9 * found.given_s


def test_places_are_written_a_line_each_and_told_with_their_gain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = build("tree:16:8", "ep16,mbs1", (0, 2, 1, 3))
    machine, file = tmp_path / "machine.toml", tmp_path / "places.txt"
    machine.write_text(tomli_w.dumps(plan.hardware.to_dict()))
    words = ["estimate", "Qwen3-30B-A3B", "--layout", "ep16,mbs1", "--on", str(machine)]
    assert main([*words, "--places", str(file)]) == 0
    found = mw.place(plan)
    assert file.read_text() == "".join(f"{row['place']}\n" for row in found.to_rows())
    assert "% less" in capsys.readouterr().out
    assert "no order is faster" in found.title()


def test_a_network_without_levels_has_no_places_to_choose() -> None:
    with pytest.raises(BadInput, match=r"network.*needs levels of switches"):
        mw.place(build("", "ep16,mbs1", (0, 2, 1, 3)))
