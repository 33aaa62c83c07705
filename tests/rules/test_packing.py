"""Samples packed into sequences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.rules.packing import filled_share, pack_lengths, packed_share


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=60))
def test_packing_keeps_every_sample_whole_and_wastes_little(lengths: list[int]) -> None:
    packs = pack_lengths(np.array(lengths), 32)
    assert sorted(packs.samples.tolist()) == list(range(len(lengths)))
    filled = [sum(lengths[s] for s in packs.sequence(i)) for i in range(packs.count)]
    assert max(filled) <= 32
    # Johnson 1973: at most 11/9 of the best number, and 4 more.
    assert packs.count <= 11 / 9 * -(-sum(lengths) // 32) + 4 or min(lengths) > 10


def test_shares_by_hand() -> None:
    """Samples of 6, 5 and 3 in sequences of 8: 6 alone with 2 of padding, 5 and 3 together."""
    lengths = np.array([5, 6, 3])
    packs = pack_lengths(lengths, 8)
    assert packs.count == 2
    assert filled_share(lengths, packs) == pytest.approx(14 / 16)
    assert packed_share(lengths, lengths, packs) == pytest.approx((36 + 4 + 25 + 9) / (2 * 64))
