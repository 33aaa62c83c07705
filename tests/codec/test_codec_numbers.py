"""Counts as people write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewright.codec import parse_count
from moewright.spec.errors import BadInput


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("0", 0),
        ("131,072", 131_072),
        ("1_000_000", 1_000_000),
        ("128k", 128_000),
        ("128K", 128_000),
        (" 8 k ", 8000),
        ("0.5k", 500),
        ("4Ki", 4096),
        ("2mi", 2**21),
        ("1.5M", 1_500_000),
        ("7B", 7 * 10**9),
        ("7G", 7 * 10**9),
        ("15T", 15 * 10**12),
        ("3e9", 3 * 10**9),
        ("1.5e3k", 1_500_000),
    ],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text, "--tokens") == count


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must be a whole number such as"),
        ("k", "must be a whole number such as"),
        (".", "must be a whole number such as"),
        ("12x", "must be a whole number such as"),
        ("1,00", "must be a whole number such as"),
        ("2Bi", "must be a whole number such as"),
        ("nan", "must be a whole number such as"),
        ("0x10", "must be a whole number such as"),
        ("9" * 40, "must be a whole number such as"),
        ("-5", "must not be negative; nearest legal value: 5"),
        ("1.5", "must be a whole number; nearest legal value: 2"),
        ("1e-999", "must be a whole number; nearest legal value: 1"),
        ("1e999", "must be below 2**63"),
        ("10000000T", "must be below 2**63"),
    ],
)
def test_what_is_no_count_is_refused_by_the_name_of_its_field(text: str, rule: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_count(text, "--tokens")
    assert str(caught.value).startswith("--tokens")
    assert rule in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_is_a_count_or_is_refused(text: str) -> None:
    with contextlib.suppress(BadInput):
        assert parse_count(text, "--tokens") >= 0


@given(st.integers(0, 2**63 - 1))
def test_plain_numbers_are_themselves(count: int) -> None:
    assert parse_count(str(count), "--tokens") == count
