"""Which cases `make test` runs of what `make test-all` runs whole."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

_TESTS = Path(__file__).resolve().parent
# A test marked `turns` runs for one source tree in this many.
_TURNS = 1


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=_HasId)


def thorough(*values: object) -> object:
    """Return a case of a parametrized test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def is_in_turn(node_id: str) -> bool:
    """Return whether a test marked `turns` runs in `make test` on this source.

    Others run with the next change of the package; the same source always has the same. What
    catches a mutant runs always.
    """
    return _hash(node_id)[0] % _TURNS == 0 or bool(
        _tests_of_mutants() & {node_id, *_prefixes(node_id)}
    )


def rotate_cases(cases: Sequence[T], count: int) -> tuple[T, ...]:
    """Pick `count` of the cases, which have an `id`, by a hash of the source of the package."""
    return tuple(sorted(cases, key=lambda case: _hash(case.id))[:count])


@cache
def _tests_of_mutants() -> frozenset[str]:
    mutants = tomllib.loads((_TESTS / "mutants" / "mutants.toml").read_text(encoding="utf-8"))
    return frozenset(f"tests/{test}" for mutant in mutants["mutant"] for test in mutant["tests"])


def _prefixes(node_id: str) -> tuple[str, str]:
    """Return the file and the function of a test."""
    return node_id.partition("::")[0], node_id.partition("[")[0]


@cache
def source_digest() -> bytes:
    """Return a hash of every Python file of the package."""
    tree = hashlib.sha256()
    for path in sorted((_TESTS.parent / "src" / "moewright").rglob("*.py")):
        tree.update(path.read_bytes())
    return tree.digest()


def _hash(name: str) -> bytes:
    return hashlib.sha256(source_digest() + name.encode()).digest()
