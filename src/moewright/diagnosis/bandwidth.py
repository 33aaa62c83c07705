"""Algorithm and bus bandwidth of measured collectives, as nccl-tests defines them (PERFORMANCE.md):
bytes of the larger buffer over time, and that times what of it each rank's link must carry; and the
links that are slow beside the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from moewright.spec.hardware import Collective, Hardware, Link

SLOW_SHARE = 0.5  # of the median bus bandwidth over the collectives of as many ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveBandwidth:
    """Of the largest message measured."""

    op: Collective
    group_size: int
    payload_bytes: float  # handed in by a rank
    seconds: float
    algorithm_Bps: float
    bus_Bps: float
    is_slow: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLink:
    """`rank` is the one on more of the slow pairs, its own port rather than this pair; -1: neither
    is."""

    link: Link
    typical_Bps: float  # median of all pairs
    rank: int


def find_slow_links(hardware: Hardware) -> tuple[SlowLink, ...]:
    """Pairs of ranks that move less than SLOW of what the median pair does, the slowest first."""
    links = hardware.fabric.links
    if not links:
        return ()
    typical = median(link.Bps.value for link in links)
    slow = sorted(
        (link for link in links if link.Bps.value < SLOW_SHARE * typical),
        key=lambda link: link.Bps.value,
    )
    on = Counter(rank for link in slow for rank in (link.first, link.second))
    return tuple(SlowLink(link=link, typical_Bps=typical, rank=_ported(link, on)) for link in slow)


def _ported(link: Link, on: Counter[int]) -> int:
    first, second = on[link.first], on[link.second]
    return -1 if first == second else link.first if first > second else link.second


def compute_bandwidths(hardware: Hardware) -> tuple[CollectiveBandwidth, ...]:
    """One a collective and group size that the hardware file holds a curve of."""
    found = [
        _of(time.op, time.group_size, *time.curve.points[-1]) for time in hardware.fabric.times
    ]
    return tuple(_marked(found))


def _of(
    op: Collective, ranks: int, payload: float, seconds: float
) -> tuple[Collective, int, float, float, float, float]:
    whole = payload * ranks if op is Collective.ALL_GATHER else payload
    carried = {
        Collective.ALL_REDUCE: 2 * (ranks - 1) / ranks,
        Collective.BROADCAST: 1.0,
        Collective.P2P: 1.0,
    }
    share = carried.get(op, (ranks - 1) / ranks)
    return op, ranks, payload, seconds, whole / seconds, whole / seconds * share


def _marked(
    found: list[tuple[Collective, int, float, float, float, float]],
) -> Iterator[CollectiveBandwidth]:
    for op, ranks, payload, seconds, algorithm, bus in found:
        typical = median(one[5] for one in found if one[1] == ranks)
        yield CollectiveBandwidth(
            op=op,
            group_size=ranks,
            payload_bytes=payload,
            seconds=seconds,
            algorithm_Bps=algorithm,
            bus_Bps=bus,
            is_slow=bus < SLOW_SHARE * typical,
        )
