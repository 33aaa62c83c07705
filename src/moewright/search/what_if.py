"""What would change the best plan: more memory, a faster network, overlapped expert
communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moewright.search.candidates import Candidate
from moewright.search.search import Ranked, fastest_near
from moewright.search.space import Allowed, everything
from moewright.spec.layout import Overlap
from moewright.spec.plan import Gain
from moewright.spec.units import show_bytes

NETWORK_TIMES = 2.0
_WORTH_SAYING = 0.002  # of the step


def gains(ranked: Ranked, *, fixed: str = "", allowed: Allowed = everything) -> tuple[Gain, ...]:
    """Of the first plan of a search of `fixed` and `allowed`: the fastest layout under each change,
    where it is another or takes another time. Memory and overlap are read off the search; for the
    network everything near the best is searched again.
    """
    if not ranked.plans:
        return ()
    best = ranked.plans[0]
    found = [*_memory(ranked), *_network(ranked, fixed, allowed), *_overlap(ranked)]
    return tuple(
        gain for gain in found if abs(gain.step_s / best.estimate.step_s - 1) > _WORTH_SAYING
    )


def _memory(ranked: Ranked) -> Iterator[Gain]:
    for extra_bytes, candidate in ranked.with_more:
        yield _gain(f"{show_bytes(extra_bytes)} more memory a device", candidate)


def _network(ranked: Ranked, fixed: str, allowed: Allowed) -> Iterator[Gain]:
    have = ranked.plans[0].hardware
    fabric = have.fabric
    if fabric.domain_size >= have.count:
        return
    Bps = replace(fabric.network_Bps, value=NETWORK_TIMES * fabric.network_Bps.value)
    hardware = replace(have, fabric=replace(fabric, network_Bps=Bps))
    found = fastest_near(ranked, hardware, fixed=fixed, allowed=allowed)
    if found is not None:
        yield _gain(f"a network {NETWORK_TIMES:g} x as fast", found)


def _overlap(ranked: Ranked) -> Iterator[Gain]:
    """The best on the other side of the choice."""
    has = Overlap.EP in ranked.plans[0].layout.overlap
    for overlapped, candidate in ranked.by_overlap:
        if overlapped != has:
            yield _gain(
                f"expert communication {'overlapped' if overlapped else 'not overlapped'}",
                candidate,
            )


def _gain(change: str, candidate: Candidate) -> Gain:
    return Gain(change=change, layout=candidate.layout, step_s=candidate.step_s)
