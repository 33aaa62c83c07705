"""What would change the best plan: more memory, a faster network, or overlapped expert exchange."""

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
    """Return the fastest layout under each change that moves the step by more than _WORTH_SAYING.

    `result` is that of a search under `fixed` and `allowed`. What more memory and the overlap of
    expert communication change is read from it; for a faster network the degrees of the best
    candidates are searched again.
    """
    if not result.plans:
        return ()
    best_s = result.plans[0].estimate.step_s
    changes = [*_memory(result), *_network(result, fixed, allowed), *_overlap(result)]
    return tuple(change for change in changes if abs(change.step_s / best_s - 1) > _WORTH_SAYING)


def _memory(result: SearchResult) -> Iterator[WhatIf]:
    for extra_bytes, candidate in result.best_with_memory:
        yield _what_if(f"{format_bytes(extra_bytes)} more memory a device", candidate)


def _network(result: SearchResult, fixed: str, allowed: Objections) -> Iterator[WhatIf]:
    hardware = result.plans[0].hardware
    fabric = hardware.fabric
    if fabric.domain_size >= hardware.count:
        return
    network_Bps = replace(fabric.network_Bps, value=NETWORK_SPEEDUP * fabric.network_Bps.value)
    faster = replace(hardware, fabric=replace(fabric, network_Bps=network_Bps))
    candidate = search_near(result, faster, fixed=fixed, allowed=allowed)
    if candidate is not None:
        yield _what_if(f"a network {NETWORK_SPEEDUP:g} x as fast", candidate)


def _overlap(result: SearchResult) -> Iterator[WhatIf]:
    """Yield the best candidate whose expert communication is not treated as the best plan's is.

    That is the best with overlap where the plan has none, and the best without where it has.
    """
    has_overlap = Overlap.EP in result.plans[0].layout.overlap
    for overlaps, candidate in result.best_by_overlap:
        if overlaps != has_overlap:
            how = "overlapped" if overlaps else "not overlapped"
            yield _what_if(f"expert communication {how}", candidate)


def _what_if(change: str, candidate: Candidate) -> WhatIf:
    return WhatIf(change=change, layout=candidate.layout, step_s=candidate.step_s)
