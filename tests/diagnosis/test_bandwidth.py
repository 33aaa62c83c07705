"""Bandwidths of collectives, and the links that are slow among the others."""

from dataclasses import replace
from pathlib import Path

import pytest

from moewright.codec import read_toml
from moewright.diagnosis.bandwidth import compute_bandwidths, find_slow_links
from moewright.spec.hardware import Collective, CollectiveTime, Curve, Hardware, Link
from moewright.spec.units import Sourced, SourceKind

MACHINE = Path(__file__).parents[1] / "golden" / "machine_2cpu.toml"


def machine(**seconds):
    """Return hardware whose collectives of 8 ranks take so many seconds for 1 GB handed in."""
    base = read_toml(Hardware, MACHINE)
    times = tuple(
        CollectiveTime(
            op=Collective(op),
            group_size=8,
            curve=Curve(points=((1e9, s),), kind=SourceKind.MEASURED, source="test"),
        )
        for op, s in seconds.items()
    )
    return replace(base, fabric=replace(base.fabric, times=times))


def test_bus_bandwidth_is_that_of_nccl_tests():
    hardware = machine(all_reduce=1.0, reduce_scatter=1.0, all_gather=8.0, p2p=1.0)
    measured = {bandwidth.op: bandwidth for bandwidth in compute_bandwidths(hardware)}
    assert measured[Collective.ALL_REDUCE].bus_Bps == pytest.approx(1e9 * 2 * 7 / 8)
    assert measured[Collective.REDUCE_SCATTER].bus_Bps == pytest.approx(1e9 * 7 / 8)
    # 1 GB from each of 8 ranks in 8 s.
    assert measured[Collective.ALL_GATHER].algorithm_Bps == pytest.approx(1e9)
    assert measured[Collective.P2P].bus_Bps == pytest.approx(1e9)


def test_the_collective_whose_bus_is_far_below_the_others_is_pointed_out():
    uneven = machine(all_reduce=1.0, reduce_scatter=1.0, all_gather=8.0, all_to_all=4.0)
    even = machine(all_reduce=1.0, reduce_scatter=1.0)
    slow = [bandwidth.op for bandwidth in compute_bandwidths(uneven) if bandwidth.is_slow]
    assert slow == [Collective.ALL_TO_ALL]
    assert not any(bandwidth.is_slow for bandwidth in compute_bandwidths(even))


def test_slow_links_are_named_with_the_rank_that_is_on_most_of_them():
    base = machine()
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]

    def links(slow):
        fabric_links = tuple(
            Link(
                first=a,
                second=b,
                Bps=Sourced(
                    value=1e9 if (a, b) in slow else 9e9, kind=SourceKind.MEASURED, source="test"
                ),
            )
            for a, b in pairs
        )
        return find_slow_links(replace(base, fabric=replace(base.fabric, links=fabric_links)))

    assert links([]) == find_slow_links(base) == ()
    (slow,) = links([(1, 3)])
    assert (slow.link.first, slow.link.second, slow.rank) == (1, 3, -1)
    assert [slow.rank for slow in links([(0, 2), (1, 2)])] == [2, 2]
