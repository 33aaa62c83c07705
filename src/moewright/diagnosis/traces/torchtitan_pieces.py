"""Steps of large pieces of a log, as torchtitan prints them.

The three marks of a line are found by their colons, and its values are taken apart for all lines
at once. A piece with a line in which this would not be what the pattern of single lines reads is
left to it.

Shapes: N lines, W bytes behind a mark.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moewright.diagnosis.step_noise import Floats
from moewright.diagnosis.traces.megatron_log import STEP_DIGITS
from moewright.diagnosis.traces.megatron_pieces import PieceSteps, read_values, windows

TITAN_RATE = b"tps:"
_STEP, _LOSS = b"step:", b"loss:"
_REACH = 1000  # bytes between two marks of a line, at most
_BEHIND = 24  # bytes behind a mark in which its value ends
_COLON, _NEW_LINE, _RETURN = b":\n\r"
_WORD = 4  # letters of a mark before its colon, at most
_BLANKS = b" \t"
_DIGITS = b"0123456789"
_Places = NDArray[np.int64]


def read_titan_piece(piece: bytes) -> PieceSteps | None:
    """Return the steps of whole lines, with rates in place of seconds.

    None where a line with a rate is not as usual: a colour between a name and its value, a loss
    that is no number, a mark too many.
    """
    piece += b"\n" * _BEHIND
    text = np.frombuffer(piece, dtype=np.uint8)
    colons = np.flatnonzero(text == _COLON)
    colons = colons[colons >= _WORD]
    words = np.ndarray(shape=(len(piece) - _WORD + 1,), dtype="<u4", buffer=piece, strides=(1,))
    before = words[colons - _WORD]
    steps, losses = (colons[before == _number(name[:-1])] - _WORD for name in (_STEP, _LOSS))
    rates = colons[words[colons - len(TITAN_RATE) + 1] == _number(TITAN_RATE)] - len(TITAN_RATE) + 1
    is_end = text == _NEW_LINE
    if b"\r" in piece:
        is_end |= text == _RETURN
    ends = np.flatnonzero(is_end)
    lines_N = np.searchsorted(ends, rates)
    lines_N = lines_N[np.diff(lines_N, prepend=-1) > 0]
    ends_N = ends[lines_N]
    starts_N = np.where(lines_N > 0, ends[lines_N - 1] + 1, 0)
    steps_N = _find_next(steps, starts_N)
    has_step_N = steps_N < ends_N
    steps_N, ends_N = steps_N[has_step_N], ends_N[has_step_N]
    losses_N = _find_next(losses, steps_N)
    rates_N = _find_next(rates, losses_N)
    if not len(steps_N) or (rates_N >= ends_N).any():
        return None
    if max(int((losses_N - steps_N).max()), int((rates_N - losses_N).max())) > _REACH:
        return None
    numbers_N = _read_counts(piece, steps_N + len(_STEP), b"")
    rates_a_second_N = _read_counts(piece, rates_N + len(TITAN_RATE), b",")
    values_N = _read_losses(piece, losses_N + len(_LOSS))
    if numbers_N is None or rates_a_second_N is None or values_N is None:
        return None
    if not rates_a_second_N.all():
        return None
    return PieceSteps(
        numbers=numbers_N, steps_s=1 / rates_a_second_N, losses=values_N, offsets=steps_N
    )


def _number(word: bytes) -> int:
    """Return a word as its bytes read as a number."""
    return int.from_bytes(word, "little")


def _find_next(places: _Places, begins_N: _Places) -> _Places:
    """Return the first of rising places from each begin on; where there is none, one far behind."""
    far = np.iinfo(np.int64).max // 2
    return np.append(places, far)[np.searchsorted(places, begins_N)]


def _read_losses(piece: bytes, behind_N: _Places) -> Floats | None:
    begins_N, ends_N = _find_values(piece, behind_N, b".")
    try:
        return read_values(piece, begins_N, ends_N) if _end_words(piece, ends_N) else None
    except ValueError:  # two points
        return None


def _read_counts(piece: bytes, behind_N: _Places, between: bytes) -> _Places | None:
    """Return the whole numbers behind marks, without what stands between their digits."""
    begins_N, ends_N = _find_values(piece, behind_N, between)
    widths_N = ends_N - begins_N
    widest = int(widths_N.max())
    if int(widths_N.min()) <= 0 or widest > STEP_DIGITS or not _end_words(piece, ends_N):
        return None
    text = np.frombuffer(piece, dtype=np.uint8)
    counts_N = np.zeros(len(begins_N), dtype=np.int64)
    has_digit_N = np.zeros(len(begins_N), dtype=bool)
    for at in range(widest):
        letters_N = text[begins_N + at]
        is_digit_N = _IS_DIGIT[letters_N] & (at < widths_N)
        counts_N = np.where(is_digit_N, 10 * counts_N + letters_N - _DIGITS[0], counts_N)
        has_digit_N |= is_digit_N
    return counts_N if bool(has_digit_N.all()) else None


def _find_values(piece: bytes, behind_N: _Places, others: bytes) -> tuple[_Places, _Places]:
    """Return where the digits, and others, that follow the blanks behind a mark begin and end."""
    text_NW = windows(piece, _BEHIND)[behind_N].view(np.uint8).reshape(-1, _BEHIND)
    first_N = _among(_BLANKS)[text_NW].argmin(axis=1)
    is_value_NW = _among(_DIGITS + others)[text_NW] | (np.arange(_BEHIND) < first_N[:, None])
    return behind_N + first_N, behind_N + is_value_NW.argmin(axis=1)


def _end_words(piece: bytes, ends_N: _Places) -> bool:
    """Return whether a blank, a colour or the end of a line follows each value."""
    return bool(_among(_BLANKS + b"\x1b\r\n")[np.frombuffer(piece, dtype=np.uint8)[ends_N]].all())


def _among(letters: bytes) -> NDArray[np.bool_]:
    """Return of each byte whether it is one of these."""
    is_among = np.zeros(256, dtype=bool)
    is_among[list(letters)] = True
    return is_among


_IS_DIGIT = _among(_DIGITS)
