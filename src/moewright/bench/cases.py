"""All cases that a machine is measured by, in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from moewright.bench.case import Case, Probe
from moewright.bench.collective_cases import build_collective_cases, build_link_cases
from moewright.bench.compute_cases import build_compute_cases
from moewright.spec.hardware import DeviceKind


def build_cases(kind: DeviceKind, ranks: int) -> tuple[Case, ...]:
    """Build every case for a machine of so many ranks, the indispensable ones first.

    First comes what a hardware file cannot be without: launches, tiny steps, the smallest point of
    each curve. Then come all of the collectives, then the other rates by rounds. When time runs
    out, what is missing are the largest points of the rates.
    """
    curves: dict[tuple[str, str, int], list[Case]] = {}
    for case in _all_cases(kind, ranks):
        curves.setdefault(case.curve_key, []).append(case)
    indispensable: list[Case] = []
    communication: list[Case] = []
    rates: list[list[Case]] = []
    for cases in curves.values():
        curve = sorted(cases, key=lambda case: case.x)
        needed = _count_indispensable(curve)
        indispensable += curve[:needed]
        if curve[0].is_communication:
            communication += curve[needed:]
        else:
            rates.append(curve[needed:])
    rounds = zip_longest(*rates)
    return (
        *indispensable,
        *communication,
        *(case for cases in rounds for case in cases if case is not None),
    )


def _all_cases(kind: DeviceKind, ranks: int) -> Iterator[Case]:
    yield from build_compute_cases(kind)
    yield from build_collective_cases(ranks)
    yield from build_link_cases(ranks)


def _count_indispensable(curve: Sequence[Case]) -> int:
    """Return how many of a curve's first points must be measured."""
    if curve[0].op is Probe.STEP:
        return len(curve)
    # A launch says nothing alone: the first point that works must be measured as well.
    return 1 if curve[0].work else 2
