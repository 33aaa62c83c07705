"""What levels of switches do to collectives: max-min fair flows over their links.

Every device has a port of the network, and above the ports lie the levels of a fabric, each of
units of devices whose traffic to other units shares the unit's links. All groups of a name exchange
at once and the flows of a collective are equally long, so that the collective ends with the flow of
the least share. Progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2) raises the rates
of all flows alike until a link is full: the least share is that of the link with the most flows
over its capacity. The flows of a link are counted from the members that each group has in each
unit, which takes a time linear in the ranks, not in their pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from moewright.rules import grid
from moewright.spec.hardware import Fabric, TopologyLevel, Wiring
from moewright.spec.layout import Layout
from moewright.spec.units import divide

Array = np.ndarray[Any, np.dtype[Any]]
_MOST_CELLS = 1 << 24  # of a matrix of groups by units
PORTS = -1  # below the levels
# Shapes: G groups of S members, P pairs of a group and a unit that has members of it, F flows.


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """What levels add to a group's collectives: factors of the time between domains, and seconds.

    `ring` is the factor of rings over domains, `exchange` that of messages to every peer.
    `latency_s` is that of one message, `ring_latency_s` that of the messages around a ring. The
    levels are those whose links bound the two, as an index; PORTS where those of devices do.
    """

    ring: float = 1.0
    exchange: float = 1.0
    ring_level: int = PORTS
    exchange_level: int = PORTS
    latency_s: float = 0.0
    ring_latency_s: float = 0.0


NO_CROSSING = Crossing()


def find_crossing(fabric: Fabric, layout: Layout, group: str, ranks_per_domain: int) -> Crossing:
    """Return what the levels of a fabric add to the collectives of a group.

    Rank r is on device r, or where the fabric's placement puts the domain of device r.
    `ranks_per_domain` members of a group follow each other in a fast domain.
    """
    if not fabric.levels or grid.group_size(layout, group) == 1:
        return NO_CROSSING
    axes = tuple(
        (grid.stride(layout, axis), grid.axis_size(layout, axis)) for axis in grid.GROUPS[group]
    )
    return _find_crossing(
        fabric.levels,
        (fabric.domain_size, ranks_per_domain),
        fabric.placement,
        layout.world_size,
        axes,
    )


@lru_cache(maxsize=4096)
def _find_crossing(
    levels: tuple[TopologyLevel, ...],
    domain: tuple[int, int],
    placement: tuple[int, ...],
    world: int,
    axes: tuple[tuple[int, int], ...],
) -> Crossing:
    domain_size, ranks_per_domain = domain
    ranks = _list_members(world, axes)
    places = _list_places(placement, -(-world // domain_size))
    members = places[ranks // domain_size] * domain_size + ranks % domain_size
    peers = np.roll(members, -ranks_per_domain, axis=1)
    latencies = [
        (level.latency_s, hops)
        for level in levels
        if (hops := _count_hops(level, members, peers)) > 0
    ]
    ring, ring_level = _ring_slowdown(levels, domain_size, members, peers)
    exchange, exchange_level = _exchange_slowdown(levels, domain_size, members)
    return Crossing(
        ring=ring,
        exchange=exchange,
        ring_level=ring_level,
        exchange_level=exchange_level,
        latency_s=sum(latency_s for latency_s, _ in latencies),
        ring_latency_s=sum(latency_s * hops for latency_s, hops in latencies),
    )


def count_units(fabric: Fabric, world: int) -> tuple[int, ...]:
    """Return how many units of each level have devices of so many ranks."""
    size = fabric.domain_size
    devices = _list_places(fabric.placement, -(-world // size)) * size
    return tuple(len(np.unique(devices // level.devices)) for level in fabric.levels)


def _list_members(world: int, axes: tuple[tuple[int, int], ...]) -> Array:
    """Return the ranks of every group [G, S], in group order."""
    offsets: Array = np.zeros(1, dtype=np.int64)
    first: Array = np.arange(world, dtype=np.int64)
    for step, size in sorted(axes):
        offsets = (offsets + (np.arange(size) * step)[:, None]).ravel()
        first = first[first // step % size == 0]
    members: Array = first[:, None] + offsets
    return members


def _list_places(placement: tuple[int, ...], domains: int) -> Array:
    """Return the place of each of so many domains; those that are not listed follow the last."""
    first = max(placement, default=-1) + 1
    further = np.arange(first, first + domains)
    places: Array = np.append(np.array(placement, dtype=np.int64), further)
    return places[:domains]


def _count_hops(level: TopologyLevel, members: Array, peers: Array) -> int:
    """Return how many messages of a ring go from unit to unit, in the group that has the most."""
    crosses = members // level.devices != peers // level.devices
    return int(crosses.sum(axis=1).max())


def _ring_slowdown(
    levels: tuple[TopologyLevel, ...], domain_size: int, members: Array, peers: Array
) -> tuple[float, int]:
    """Return how much longer it takes than over ports alone that members send to one peer [G, S].

    The peer is in the next domain. Beside it stands the level that bounds it, or PORTS.
    """
    source, target = members.ravel(), peers.ravel()
    leaves = source // domain_size != target // domain_size
    source, target = source[leaves], target[leaves]
    if not len(source):
        return 1.0, PORTS
    ports = source
    if levels[0].wiring is Wiring.RAIL:
        ports = source // domain_size * domain_size + target % domain_size
    port_flows = int(np.bincount(ports).max())
    most, bound = float(port_flows), PORTS
    for index, level in enumerate(levels):
        crosses = source // level.devices != target // level.devices
        if not crosses.any():
            continue
        sender, receiver = source[crosses] // level.devices, target[crosses] // level.devices
        flows = float(np.bincount(sender).max())
        match level.wiring:
            case Wiring.RAIL:
                rail = target[crosses] % domain_size
                up, down = (unit * domain_size + rail for unit in (sender, receiver))
                flows = float(max(np.bincount(up).max(), np.bincount(down).max())) * domain_size
            case Wiring.DRAGONFLY:
                pairs = np.unique(sender * (receiver.max() + 1) + receiver, return_counts=True)[1]
                flows = _choose_routes(flows, pairs, _count_units(level, members))
        if flows / _unit_ports(level) > most:
            most, bound = flows / _unit_ports(level), index
    return most / port_flows, bound


def _exchange_slowdown(
    levels: tuple[TopologyLevel, ...], domain_size: int, members: Array
) -> tuple[float, int]:
    """Return how much longer it takes than over ports alone that all members send to each other.

    Beside it stands the level that bounds it, or PORTS.
    """
    is_rail = levels[0].wiring is Wiring.RAIL
    if is_rail:
        port_flows = int(_count_rail_flows(members, domain_size, domain_size)[0].max())
    else:
        port_flows = members.shape[1] - int(_Counts.of(members // domain_size).members.min())
    most, bound = float(port_flows), PORTS
    for index, level in enumerate(levels):
        units = members // level.devices
        counts = _Counts.of(units)
        leaving = counts.members * (members.shape[1] - counts.members)
        flows = float(np.bincount(counts.unit, weights=leaving).max())
        match level.wiring:
            case Wiring.RAIL:
                rails = _count_rail_flows(members, domain_size, level.devices)
                flows = float(np.append(*rails).max()) * domain_size
            case Wiring.DRAGONFLY:
                flows = _choose_routes(flows, _count_pairs(units), _count_units(level, members))
        if flows / _unit_ports(level) > most:
            most, bound = flows / _unit_ports(level), index
    return divide(most, port_flows, otherwise=1.0), bound


def _choose_routes(leaving: float, pairs: Array, units: int) -> float:
    """Return the flows over all links of a dragonfly's unit by the better of its two routes.

    The direct one takes the one link to the target's unit; by the other every message makes a
    detour over a unit at random, so that all links carry twice what leaves (Kim et al., Technology-
    Driven, Highly-Scalable Dragonfly Topology, ISCA 2008).
    """
    return min(float(pairs.max()) * (units - 1), 2 * leaving)


def _count_units(level: TopologyLevel, members: Array) -> int:
    return int(members.max()) // level.devices + 1


def _unit_ports(level: TopologyLevel) -> float:
    """Return what all links of a unit to others carry, in ports.

    A unit of a tree has one link, a unit of rails one for each place in a domain, and a dragonfly's
    one to every other unit.
    """
    return level.devices / level.oversubscription * (1 - level.background)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counts:
    """How many members [P] of a group [P] are in a unit [P]; `pair` is that of each member."""

    group: Array
    unit: Array
    members: Array
    pair: Array

    @classmethod
    def of(cls, units: Array) -> _Counts:
        """Count the members of groups from the unit of each [G, S]."""
        width = int(units.max()) + 1
        keys = np.arange(len(units))[:, None] * width + units
        pairs, pair, members = np.unique(keys, return_inverse=True, return_counts=True)
        return cls(
            group=pairs // width,
            unit=pairs % width,
            members=members,
            pair=pair.reshape(units.shape),
        )


def _count_rail_flows(members: Array, domain_size: int, devices: int) -> tuple[Array, Array]:
    """Return the flows up and down of every rail [units * places] of units of so many devices.

    A message goes up and down by the rail of its target's place in its domain, to which the nodes
    of the sender move it over their own links.
    """
    counts = _Counts.of(members // devices)
    groups, size = members.shape
    place = members % domain_size
    on_place = np.bincount(
        (np.arange(groups)[:, None] * domain_size + place).ravel(), minlength=groups * domain_size
    ).reshape(groups, domain_size)
    on_pair = np.bincount(
        (counts.pair * domain_size + place).ravel(), minlength=len(counts.unit) * domain_size
    ).reshape(-1, domain_size)
    up = counts.members[:, None] * (on_place[counts.group] - on_pair)
    down = on_pair * (size - counts.members)[:, None]
    rails = (counts.unit[:, None] * domain_size + np.arange(domain_size)).ravel()
    sent, received = (np.bincount(rails, weights=flows.ravel()) for flows in (up, down))
    return sent, received


def _count_pairs(units: Array) -> Array:
    """Return the flows from every unit to every other [units, units], from those of members [G, S].

    Groups whose members are in the same units are one class.
    """
    classes, alike = np.unique(np.sort(units, axis=1), axis=0, return_counts=True)
    width = int(units.max()) + 1
    flows = np.zeros((width, width))
    # A matrix of all groups by all units would not fit in memory for tens of thousands of ranks.
    chunk = max(1, _MOST_CELLS // width)
    for first in range(0, len(classes), chunk):
        part = classes[first : first + chunk]
        keys = np.arange(len(part))[:, None] * width + part
        members = np.bincount(keys.ravel(), minlength=len(part) * width).reshape(-1, width)
        flows += members.T @ (members * alike[first : first + chunk, None]).astype(float)
    np.fill_diagonal(flows, 0.0)
    return flows
