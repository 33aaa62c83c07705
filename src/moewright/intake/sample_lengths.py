"""The lengths of a data set's samples, from a histogram in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from moewright.codec import read_text
from moewright.spec.errors import BadInput, Reason

Int64s = npt.NDArray[np.int64]

_HEADER = "tokens,samples"
_MOST_SAMPLES = 10_000_000  # packing them takes a minute


def read_sample_lengths(path: Path) -> Int64s:
    """Read the length of every sample, in tokens, from a .csv file with a histogram.

    Under the header tokens,samples, a line says how many samples have so many tokens.

    Raises:
        BadInput: there is no such file, or it holds something else.
    """
    header, *lines = read_text(path).splitlines() or [""]
    if header.replace(" ", "").casefold() != _HEADER:
        rule = f"must begin with the header {_HEADER}"
        raise BadInput(Reason(field=str(path), value=header[:40], rule=rule))
    lengths: list[int] = []
    counts: list[int] = []
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 2 or not all(_is_count(cell) for cell in cells):
            rule = "must be two whole numbers from 1, tokens and samples"
            raise BadInput(Reason(field=f"{path}:{number}", value=line[:40], rule=rule))
        lengths.append(int(cells[0]))
        counts.append(int(cells[1]))
    if not 1 <= sum(counts) <= _MOST_SAMPLES:
        rule = f"must have from 1 to {_MOST_SAMPLES:,} samples"
        nearest = "counts divided by a power of ten" if counts else ""
        reason = Reason(field=str(path), value=f"{sum(counts):,}", rule=rule, nearest=nearest)
        raise BadInput(reason)
    return np.repeat(np.array(lengths, dtype=np.int64), counts)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0
