"""What would change the best plan: more memory, a faster network, overlapped expert
communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moewright.search.candidates import Candidate
from moewright.search.search import SearchResult, search_near
from moewright.search.space import Objections, no_objections
from moewright.spec.layout import Overlap
from moewright.spec.plan import WhatIf
from moewright.spec.units import format_bytes

NETWORK_SPEEDUP = 2.0
_WORTH_SAYING = 0.002  # of the step


def find_gains(
    result: SearchResult, *, fixed: str = "", allowed: Objections = no_objections
) -> tuple[WhatIf, ...]:
    """Of the first plan of a search of `fixed` and `allowed`: the fastest layout under each change,
    where it is another or takes another time. Memory and overlap are read off the search; for the
    network everything near the best is searched again.
    """
    if not result.plans:
        return ()
    best = result.plans[0]
    found = [*_memory(result), *_network(result, fixed, allowed), *_overlap(result)]
    return tuple(
        gain for gain in found if abs(gain.step_s / best.estimate.step_s - 1) > _WORTH_SAYING
    )


def _memory(ranked: SearchResult) -> Iterator[WhatIf]:
    for extra_bytes, candidate in ranked.best_with_memory:
        yield _gain(f"{format_bytes(extra_bytes)} more memory a device", candidate)


def _network(ranked: SearchResult, fixed: str, allowed: Objections) -> Iterator[WhatIf]:
    have = ranked.plans[0].hardware
    fabric = have.fabric
    if fabric.domain_size >= have.count:
        return
    Bps = replace(fabric.network_Bps, value=NETWORK_SPEEDUP * fabric.network_Bps.value)
    hardware = replace(have, fabric=replace(fabric, network_Bps=Bps))
    found = search_near(ranked, hardware, fixed=fixed, allowed=allowed)
    if found is not None:
        yield _gain(f"a network {NETWORK_SPEEDUP:g} x as fast", found)


def _overlap(ranked: SearchResult) -> Iterator[WhatIf]:
    """The best on the other side of the choice."""
    has = Overlap.EP in ranked.plans[0].layout.overlap
    for overlapped, candidate in ranked.best_by_overlap:
        if overlapped != has:
            yield _gain(
                f"expert communication {'overlapped' if overlapped else 'not overlapped'}",
                candidate,
            )


def _gain(change: str, candidate: Candidate) -> WhatIf:
    return WhatIf(change=change, layout=candidate.layout, step_s=candidate.step_s)
