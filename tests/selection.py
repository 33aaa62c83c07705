"""Which tests `make test` runs, and which are for `make test-slow` or `make test-all`."""

from __future__ import annotations

import resource
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parent
# Of the cases of a test marked `turns`, `make test` runs one in this many.
_EVERY = 10
# The tests that took as long or longer when they were last measured, one of two workers each: all
# shorter ones together take ten minutes. `make durations` writes the file.
_SLOW_S = 1.2
_DURATIONS_FILE = _TESTS / "durations.tsv"


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


def find_slow(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield what `make test` leaves to `make test-slow`: long tests that are not marked `core`."""
    durations = _read_durations()
    for item in items:
        if item.nodeid in durations and not item.get_closest_marker("core"):
            yield item


def write_durations(cpu_s: Mapping[str, float]) -> None:
    """Write the long ones of these tests, each with its seconds of CPU; others keep their line.

    `cpu_s` has no test that is marked by hand, of which the file says nothing.
    """
    lines = {name: f"{taken_s:.1f}" for name, taken_s in cpu_s.items() if taken_s >= _SLOW_S}
    for name, taken_s in _read_durations().items():
        if name not in cpu_s:
            lines[name] = taken_s
    text = "".join(f"{lines[name]}\t{name}\n" for name in sorted(lines))
    _DURATIONS_FILE.write_text(text, encoding="utf-8")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def find_missing(items: Sequence[pytest.Item]) -> Iterator[str]:
    """Yield the tests of mutants, in files that were collected whole, that CI does not run."""
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
def _read_durations() -> dict[str, str]:
    """Return the seconds of each long test."""
    lines = _DURATIONS_FILE.read_text(encoding="utf-8").splitlines()
    return {name: taken_s for taken_s, _, name in (line.partition("\t") for line in lines)}


@cache
def _tests_of_mutants() -> frozenset[str]:
    mutants = tomllib.loads((_TESTS / "mutants" / "mutants.toml").read_text(encoding="utf-8"))
    return frozenset(f"tests/{test}" for mutant in mutants["mutant"] for test in mutant["tests"])


def _prefixes(node_id: str) -> tuple[str, str]:
    """Return the file and the function of a test."""
    return node_id.partition("::")[0], node_id.partition("[")[0]
