"""Steps of large pieces of a log, as Megatron-LM prints them: a hundred thousand lines a second.

Where the lines of a piece that have a step have the same fields, as in logs of gigabytes, these are
taken apart for all lines at once; where some lack a loss, by one pattern. A piece that holds a step
in any other order of fields is left to the reader of single lines.

Shapes: N lines, F bars of a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from moewright.diagnosis.step_noise import Floats
from moewright.diagnosis.traces.megatron_log import STEP_DIGITS

ELAPSED_MS = b"elapsed time per iteration (ms): "
_LOSS = b" lm loss: "
_ANY_LOSS = b"loss: "
_NUMBER = b"iteration "
_NEW_LINE, _BAR, _SLASH = b"\n|/"
_WIDEST = 32  # bytes of a value
_WORD = 8  # bytes
# A line from its number on, with its milliseconds and its loss, where it has one.
_OTHER_FIELD = rb"(?:(?! (?:lm loss|loss|reduced.train.loss): )[^|\n]*\|)"
_LINE = re.compile(
    rb"iteration +(\d{1,%d})/ *\d+ \|" % STEP_DIGITS
    + _OTHER_FIELD
    + rb"{0,3}? elapsed time per iteration \(ms\): +([\d.]+)(?:/[\d.]+)? \|"
    + _OTHER_FIELD
    + rb"*(?: lm loss: +([^ \n]+) \||[^|\n]*$)",
    re.MULTILINE,
)
_Places = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceSteps:
    """The steps of a piece of a log; offsets are those of their lines in it."""

    numbers: _Places
    steps_s: Floats
    losses: Floats
    offsets: _Places


def read_piece(piece: bytes) -> PieceSteps | None:
    """Return the steps of whole lines; None where a line with a step is not as usual."""
    count = piece.count(ELAPSED_MS)
    try:
        steps = _read_table(piece, count) or _read_lines(piece, count)
    except ValueError:  # a value that is no number
        return None
    if steps is None or not bool(((steps.steps_s > 0) & np.isfinite(steps.steps_s)).all()):
        return None
    return steps


def _read_table(piece: bytes, count: int) -> PieceSteps | None:
    """Return the steps where their lines have as many fields each; None where it is not so."""
    text = np.frombuffer(piece, dtype=np.uint8)
    ends = np.flatnonzero(text == _NEW_LINE)
    lines_N = np.arange(count)
    if count != len(ends):
        lines_N = np.searchsorted(ends, np.array(list(_find_all(piece, ELAPSED_MS))))
    if not count or (np.diff(lines_N) == 0).any():  # two steps of a line
        return None
    ends_N = ends[lines_N]
    starts_N = np.where(lines_N > 0, ends[lines_N - 1] + 1, 0)
    bars = np.flatnonzero(text == _BAR)
    firsts_N = np.searchsorted(bars, starts_N)
    counts_N = np.searchsorted(bars, ends_N) - firsts_N
    if int(counts_N.min()) != int(counts_N.max()):
        return None
    bars_NF = bars[firsts_N[:, None] + np.arange(int(counts_N[0]))]
    fields = piece[int(starts_N[0]) : int(ends_N[0])].split(b"|")
    elapsed = _find_field(fields, b" " + ELAPSED_MS)
    loss = _find_field(fields, _LOSS)
    if elapsed < 0 or (loss < 0 and _ANY_LOSS in piece):
        return None
    first = fields[0]
    slash = first.rfind(b"/")
    digits = slash - first.find(_NUMBER) - len(_NUMBER)
    slashes_N = bars_NF[:, 0] - (len(first) - slash)
    begins_N = slashes_N - digits
    if not 0 < digits <= STEP_DIGITS or (begins_N - len(_NUMBER) < starts_N).any():
        return None
    if not (text[slashes_N] == _SLASH).all():
        return None
    if not _has_text(piece, begins_N - len(_NUMBER), _NUMBER):
        return None
    numbers_N = read_values(piece, begins_N, slashes_N)
    steps_N = _read_field(piece, bars_NF, elapsed, b" " + ELAPSED_MS)
    losses_N: Floats | None = np.full(count, nan)
    if loss >= 0:
        losses_N = _read_field(piece, bars_NF, loss, _LOSS)
    if numbers_N is None or steps_N is None or losses_N is None:
        return None
    return PieceSteps(
        numbers=numbers_N.astype(np.int64), steps_s=steps_N / 1e3, losses=losses_N, offsets=starts_N
    )


def _find_all(piece: bytes, name: bytes) -> Iterator[int]:
    place = piece.find(name)
    while place >= 0:
        yield place
        place = piece.find(name, place + len(name))


def _find_field(fields: list[bytes], name: bytes) -> int:
    """Return which field between two bars begins so; -1: none does."""
    places = (at for at, text in enumerate(fields[1:-1], 1) if text.startswith(name))
    return next(places, -1)


def _read_field(piece: bytes, bars_NF: _Places, field: int, name: bytes) -> Floats | None:
    begins_N = bars_NF[:, field - 1] + 1
    if int((bars_NF[:, field] - begins_N).min()) < len(name):
        return None
    if not _has_text(piece, begins_N, name):
        return None
    return read_values(piece, begins_N + len(name), bars_NF[:, field])


def _has_text(piece: bytes, begins_N: _Places, name: bytes) -> bool:
    """Return whether a name of at least a word stands at each place."""
    places = (*range(0, len(name) - _WORD, _WORD), len(name) - _WORD)
    return all(
        bool((windows(piece, _WORD)[begins_N + at] == name[at : at + _WORD]).all()) for at in places
    )


def windows(piece: bytes, width: int) -> NDArray[np.bytes_]:
    """Return so many bytes from each place of a piece on, which is not copied."""
    count = len(piece) - width + 1
    return np.ndarray(shape=(count,), dtype=f"S{width}", buffer=piece, strides=(1,))


def read_values(piece: bytes, begins_N: _Places, ends_N: _Places) -> Floats | None:
    """Return the numbers between two places of each line; None where one is too long."""
    widths_N = ends_N - begins_N
    widest = int(widths_N.max())
    if int(widths_N.min()) <= 0 or widest > _WIDEST:
        return None
    if int(begins_N.max()) + widest > len(piece):
        return None
    texts_N = windows(piece, widest)[begins_N]
    if int(widths_N.min()) < widest:
        letters = texts_N.view(np.uint8).reshape(-1, widest)
        letters[np.arange(widest) >= widths_N[:, None]] = 0
    answer: Floats = texts_N.astype(np.float64)
    return answer


def _read_lines(piece: bytes, count: int) -> PieceSteps | None:
    """Return the steps by one pattern; None where it does not fit all lines that have a step."""
    matches = list(_LINE.finditer(piece))
    if len(matches) != count:
        return None
    return PieceSteps(
        numbers=np.array([int(match[1]) for match in matches], dtype=np.int64),
        steps_s=np.array([float(match[2]) for match in matches]) / 1e3,
        losses=np.array([float(match[3] or nan) for match in matches]),
        offsets=np.array(
            [piece.rfind(b"\n", 0, match.start()) + 1 for match in matches], dtype=np.int64
        ),
    )
