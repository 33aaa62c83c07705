"""Linear position biases: Press et al., "Train Short, Test Long" (ALiBi, arXiv 2108.12409)."""

from __future__ import annotations


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return what a score of each head loses with every token between query and key.

    For a power of two they are 2^(-8 i / heads), i from 1. Other numbers of heads take the slopes
    of the power of two below, then every second one of the power above.
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = _geometric(below)
    return slopes + _geometric(2 * below)[::2][: heads - below]


def _geometric(heads: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8 * number / heads) for number in range(1, heads + 1))
