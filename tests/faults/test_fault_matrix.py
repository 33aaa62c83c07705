"""A case of the fault matrix, chosen by the source, and a few mutated inputs; see `make faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import fuzz, harness
from faults.run import Bench, read_matrix
from moewright.api.reporting import build_report, write_page
from moewright.codec import read_incidents

pytestmark = pytest.mark.spawn

# What needs no rights of its own, takes a few seconds, and leaves an incident.
QUICK = (
    "kill_rank",
    "kill_all_ranks",
    "kill_rank_in_save",
    "damage_payload",
    "cut_payload",
    "swap_payloads",
    "damage_index",
    "flip_index",
    "delete_payload",
    "damage_plan",
    "damage_journal",
)


def test_every_row_of_the_matrix_names_a_fault() -> None:
    cases = read_matrix()
    assert {case.fault for case in cases} == set(harness.FAULTS)
    assert len({case.name for case in cases}) == len(cases)
    assert all(bool(case.incident) == bool(case.notice_s) for case in cases)


@pytest.mark.turns
@pytest.mark.parametrize("fault", QUICK)
def test_a_case_of_the_matrix_holds(fault: str, tmp_path: Path) -> None:
    seed = QUICK.index(fault)
    (case,) = (case for case in read_matrix() if case.fault == fault)
    outcome = Bench(tmp_path).try_case(case, seed)
    assert not outcome.broken, (fault, seed)
    run_dir = tmp_path / f"{fault}-{seed}"
    (incident,) = read_incidents(run_dir)
    page = write_page(build_report(run_dir), tmp_path / "report.html").read_text()
    assert "1 incident; " in page
    assert incident.message in page


@pytest.mark.parametrize("reader", fuzz.READERS, ids=lambda reader: reader.key)
def test_mutated_inputs_are_answered_or_refused(reader: fuzz.Reader, tmp_path: Path) -> None:
    """Take a few inputs of each reader; `make faults` takes thousands."""
    faults = [fuzz.try_input(reader, number, tmp_path) for number in range(25)]
    assert not any(faults), faults
