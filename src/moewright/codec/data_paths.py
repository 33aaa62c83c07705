"""The paths of token files in a job: one corpus, or a blend of several by weight.

A blend is written as Megatron-LM's --data-path has it: "0.7 web/train 0.3 code/train".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moewright.spec.errors import BadInput, Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedPath:
    """The prefix of a .bin/.idx pair, and its share of the samples; shares sum to 1."""

    path: str
    share: float = 1.0
    weight: str = "1"  # as it was written


def parse_data_paths(text: str, field: str = "data.train") -> tuple[WeightedPath, ...]:
    """Read the corpora of a job; () where there is none.

    Text that does not begin with a number is one path, which may hold spaces.

    Raises:
        BadInput: naming `field`, where weights and paths do not take turns, or a weight is not
            positive.
    """
    words = text.split()
    if not words:
        return ()
    if len(words) == 1 or _read_number(words[0]) is None:
        return (WeightedPath(path=text),)
    weights = [_read_number(word) for word in words[::2]]
    paths = words[1::2]
    if len(weights) != len(paths) or None in weights:
        rule = "is a blend, in which weights and paths take turns"
        nearest = "0.7 web/train 0.3 code/train"
        raise BadInput(Reason(field=field, value=text[:60], rule=rule, nearest=nearest))
    for word, weight in zip(words[::2], weights, strict=True):
        if not weight or weight < 0 or not math.isfinite(weight):
            rule = "is no weight of a corpus: it must be positive"
            raise BadInput(Reason(field=field, value=word, rule=rule, nearest="1"))
    total = sum(weight for weight in weights if weight)
    return tuple(
        WeightedPath(path=path, share=(weight or 0) / total, weight=word)
        for path, weight, word in zip(paths, weights, words[::2], strict=True)
    )


def format_data_paths(parts: Sequence[WeightedPath]) -> str:
    """Write the corpora of a job as `parse_data_paths` reads them."""
    if len(parts) < 2:
        return "".join(part.path for part in parts)
    return " ".join(f"{part.weight} {part.path}" for part in parts)


def _read_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
