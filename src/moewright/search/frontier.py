"""The trade between memory and time: candidates that no other beats in both."""

from __future__ import annotations

from collections.abc import Iterable

from moewright.search.scout import Candidate


def frontier(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Fastest first, each slower one in less memory than all before it."""
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda one: (one.step_s, one.peak_bytes)):
        if not kept or candidate.peak_bytes < kept[-1].peak_bytes:
            kept.append(candidate)
    return tuple(kept)
