"""Which cases `make test` runs of what `make test-all` runs whole."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parent
# Of the cases of a test marked `turns`, `make test` runs one in this many.
_EVERY = 10


def thorough(*values: object) -> object:
    """Return a case of a parametrized test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def leave_out(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases marked `turns` that `make test` leaves to `make test-all`.

    It runs the first case of each test and every tenth after it, and what catches a mutant: the
    same ones for every tree.
    """
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("turns"):
            function = item.nodeid.partition("[")[0]
            names = {item.nodeid, *_prefixes(item.nodeid)}
            if seen[function] % _EVERY and not _tests_of_mutants() & names:
                yield item
            seen[function] += 1


def find_missing(items: Sequence[pytest.Item]) -> Iterator[str]:
    """Yield the tests of mutants, in files that were collected whole, that `make test` lacks."""
    names = {
        name
        for item in items
        if not item.get_closest_marker("thorough")
        for name in (item.nodeid, *_prefixes(item.nodeid))
    }
    files = {_prefixes(item.nodeid)[0] for item in items}
    for test in sorted(_tests_of_mutants() - names):
        if _prefixes(test)[0] in files:
            yield test


@cache
def _tests_of_mutants() -> frozenset[str]:
    mutants = tomllib.loads((_TESTS / "mutants" / "mutants.toml").read_text(encoding="utf-8"))
    return frozenset(f"tests/{test}" for mutant in mutants["mutant"] for test in mutant["tests"])


def _prefixes(node_id: str) -> tuple[str, str]:
    """Return the file and the function of a test."""
    return node_id.partition("::")[0], node_id.partition("[")[0]
