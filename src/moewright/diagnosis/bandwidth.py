"""Bandwidths of measured collectives, and the links that are slow among the others.

Algorithm and bus bandwidth are as nccl-tests defines them (PERFORMANCE.md): the bytes of the larger
buffer over time, and that times the share of it that each rank's link must carry.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median

from moewright.spec.hardware import Collective, CollectiveTime, Hardware, Link

SLOW_SHARE = 0.5  # of the median bus bandwidth over the collectives of as many ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveBandwidth:
    """The bandwidth of a collective at the largest message measured."""

    op: Collective
    group_size: int
    payload_bytes: float  # handed in by a rank
    seconds: float
    algorithm_Bps: float
    bus_Bps: float
    is_slow: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLink:
    """A link between two ranks that is slow among the others.

    `rank` is the rank of the two that is on more slow links: its own port is slow rather than this
    link. It is -1 where both are on as many.
    """

    link: Link
    typical_Bps: float  # median of all pairs
    rank: int


def find_slow_links(hardware: Hardware) -> tuple[SlowLink, ...]:
    """Return pairs of ranks that move less than SLOW_SHARE of the median pair, slowest first."""
    links = hardware.fabric.links
    if not links:
        return ()
    typical_Bps = median(link.Bps.value for link in links)
    slow = sorted(
        (link for link in links if link.Bps.value < SLOW_SHARE * typical_Bps),
        key=lambda link: link.Bps.value,
    )
    slow_pairs = Counter(rank for link in slow for rank in (link.first, link.second))
    return tuple(
        SlowLink(link=link, typical_Bps=typical_Bps, rank=_rank_of_slow_port(link, slow_pairs))
        for link in slow
    )


def _rank_of_slow_port(link: Link, slow_pairs: Counter[int]) -> int:
    first = slow_pairs[link.first]
    second = slow_pairs[link.second]
    if first == second:
        return -1
    return link.first if first > second else link.second


def compute_bandwidths(hardware: Hardware) -> tuple[CollectiveBandwidth, ...]:
    """Return the bandwidth of each collective and group size that has a measured curve."""
    times = hardware.fabric.times
    typical_Bps = {
        size: median(_bus_bandwidth(time) for time in times if time.group_size == size)
        for size in {time.group_size for time in times}
    }
    return tuple(_bandwidth(time, typical_Bps[time.group_size]) for time in times)


def _bandwidth(time: CollectiveTime, typical_Bps: float) -> CollectiveBandwidth:
    payload_bytes, seconds = time.curve.points[-1]
    bus_Bps = _bus_bandwidth(time)
    return CollectiveBandwidth(
        op=time.op,
        group_size=time.group_size,
        payload_bytes=payload_bytes,
        seconds=seconds,
        algorithm_Bps=_algorithm_bandwidth(time),
        bus_Bps=bus_Bps,
        is_slow=bus_Bps < SLOW_SHARE * typical_Bps,
    )


def _algorithm_bandwidth(time: CollectiveTime) -> float:
    payload_bytes, seconds = time.curve.points[-1]
    if time.op is Collective.ALL_GATHER:
        return payload_bytes * time.group_size / seconds
    return payload_bytes / seconds


def _bus_bandwidth(time: CollectiveTime) -> float:
    return _algorithm_bandwidth(time) * link_share(time.op, time.group_size)


def link_share(op: Collective, ranks: int) -> float:
    """Return the share of the larger buffer that each rank's link carries."""
    if op in (Collective.BROADCAST, Collective.P2P):
        return 1.0
    if op is Collective.ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks
