"""A curve in letters: dots of braille, or stars where a terminal has no more than ASCII."""

from __future__ import annotations

from collections.abc import Sequence

# The bits of braille's dots, by column and row.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800


def draw_curve(
    values: Sequence[float], width: int, height: int, *, is_ascii: bool = False
) -> tuple[list[str], float, float]:
    """Return `height` rows of `width` letters, the highest first, and the range that they span.

    More values than there are columns of dots are averaged; neighbours are joined.
    """
    across, down = (1, 1) if is_ascii else (2, 4)
    means = _average(values, width * across)
    low, high = min(means), max(means)
    rows = height * down
    scale = (rows - 1) / (high - low) if high > low else 0.0
    places = [round((high - mean) * scale) for mean in means]
    cells = [[0] * width for _ in range(height)]
    for column, place in enumerate(places):
        before = places[column - 1] if column else place
        # From the neighbour's place, which is its own, to this one.
        step = 1 if place > before else -1
        for row in range(before + step if place != before else place, place + step, step):
            bit = 1 if is_ascii else _DOTS[column % 2][row % 4]
            cells[row // down][column // across] |= bit
            if place == before:
                break
    if is_ascii:
        return ["".join(" *"[bit] for bit in row) for row in cells], low, high
    return ["".join(chr(_BRAILLE + bits) for bits in row) for row in cells], low, high


def _average(values: Sequence[float], columns: int) -> list[float]:
    """Return at most `columns` means of equal parts of the values."""
    count = len(values)
    parts = min(columns, count)
    means = []
    for part in range(parts):
        chunk = values[part * count // parts : (part + 1) * count // parts]
        means.append(sum(chunk) / len(chunk))
    return means
