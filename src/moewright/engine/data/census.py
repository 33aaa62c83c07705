"""The documents of a source, counted before anything is written: which of them are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moewright.engine.data.source import SkipReason
from moewright.spec.errors import BadInput, Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentCensus:
    """The documents of a source as their first 64 hash bits and their characters [documents]."""

    hashes: npt.NDArray[np.uint64]
    chars: npt.NDArray[np.int64]
    files: int
    text_bytes: int
    skipped: Mapping[SkipReason, int]


def find_heldout_limit(
    hashes: npt.NDArray[np.uint64], chars: npt.NDArray[np.int64], fraction: float, root: str
) -> int:
    """Return the hash below which documents are held out.

    They are the documents with the smallest hashes whose characters are `fraction` of all, one at
    least; equal documents have one hash. 0 where the fraction is 0.

    Raises:
        BadInput: when one side would be empty.
    """
    unique, inverse = np.unique(hashes, return_inverse=True)
    if fraction == 0 and len(unique):
        return 0
    if len(unique) < 2:
        rule = (
            "needs two different documents of UTF-8 text at least, one to train on and one to "
            "hold out"
        )
        raise BadInput(Reason(field="source", rule=rule, value=f"{root} with {len(unique)}"))
    sums = np.cumsum(np.bincount(inverse, weights=chars))
    heldout = 1 + int(np.searchsorted(sums, fraction * sums[-1]))
    return int(unique[min(heldout, len(unique) - 1)])


def check_heldout_fraction(fraction: float) -> None:
    """Raise BadInput for a share of the text that cannot be held out."""
    if not 0 <= fraction <= 0.5:
        rule = "must be at least 0 (nothing is held out) and at most 0.5"
        value = f"{fraction:g}"
        raise BadInput(Reason(field="heldout_fraction", rule=rule, value=value, nearest="0.05"))


def hash_document(document: str) -> int:
    """Return the first 64 bits of a document's SHA-256."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big")
