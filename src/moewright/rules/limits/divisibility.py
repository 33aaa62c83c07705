"""Divisors, and the legal values nearest to an illegal one."""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number in ascending order."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def nearest_legal(value: int, legal: Iterable[int]) -> str:
    """Return the closest legal values on both sides of `value`, like "64 or 128".

    "" means that nothing is legal.
    """
    others = sorted(set(legal))
    below = [other for other in others if other < value][-1:]
    above = [other for other in others if other > value][:1]
    return " or ".join(str(other) for other in below + above)


def nearest_multiples(value: int, step: int) -> str:
    """Return the closest positive multiples of `step` on both sides of `value`."""
    below = value // step * step
    return nearest_legal(value, [n for n in (below, below + step) if n > 0])
