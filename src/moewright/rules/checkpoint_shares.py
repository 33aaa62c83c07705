"""Which part of a state that several ranks hold alike each of them saves, and what a save takes.

What the same ranks hold, of elements of one width, lies in one row, and each of them saves an equal
range of it. So what a rank writes, and copies for an asynchronous save, follows from a sum.
"""

from __future__ import annotations

# A file of a checkpoint is written through a buffer, aligned as devices ask for.
WRITE_BUFFER_BYTES = 1 << 21
WRITE_ALIGNMENT = 4096


def share_range(numel: int, holders: int, place: int) -> tuple[int, int]:
    """Return the elements [start, stop) of `numel` that the holder at `place` saves."""
    return numel * place // holders, numel * (place + 1) // holders
