"""Counts with their nouns."""

import pytest

from moewright.spec.units import plural


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "step", "1 step"),
        (0, "step", "0 steps"),
        (1.2, "call", "1 call"),
        (1258.4, "launch", "1,258 launches"),
        (2, "micro-batch", "2 micro-batches"),
    ],
)
def test_a_count_of_one_has_its_noun_in_the_singular(count: float, noun: str, text: str) -> None:
    assert plural(count, noun) == text
