"""One case of the fault matrix, chosen by the source; `make faults` runs all at several moments."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from faults import harness
from faults.run import Bench, read_matrix

pytestmark = pytest.mark.spawn

SOURCE = Path(__file__).resolve().parents[2] / "src/moewright/engine"
# What needs no rights of its own, and takes a few seconds.
QUICK = ("kill_rank", "kill_all_ranks", "damage_payload", "damage_index", "kill_supervisor")


def test_every_row_of_the_matrix_names_a_fault() -> None:
    cases = read_matrix()
    assert {case.fault for case in cases} == set(harness.FAULTS)
    assert len({case.name for case in cases}) == len(cases)
    assert all(bool(case.incident) == bool(case.go_on_s) for case in cases)


def test_a_case_of_the_matrix_holds(tmp_path: Path) -> None:
    digest = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        digest.update(path.read_bytes())
    seed = int.from_bytes(digest.digest()[:4])
    fault = QUICK[seed % len(QUICK)]
    (case,) = (case for case in read_matrix() if case.fault == fault)
    outcome = Bench(tmp_path).try_case(case, seed)
    assert not outcome.broken, (fault, seed)
