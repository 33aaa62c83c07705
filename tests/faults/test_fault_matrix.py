"""A case of the fault matrix, chosen by the source, and a few mutated inputs; see `make faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import fuzz, harness
from faults.program import (
    FAULTS,
    LAYOUTS,
    Copies,
    Laboratory,
    Launcher,
    Moment,
    Outcome,
    Try,
    draw,
    find_section,
    format_section,
    replace_section,
)
from faults.run import Bench, read_matrix
from moewright.api.reporting import build_report, write_page
from moewright.codec import read_incidents

pytestmark = pytest.mark.spawn

# What needs no rights of its own, takes a few seconds, and leaves an incident.
QUICK = (
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


def test_a_cell_is_drawn_again_by_its_number_and_all_are_drawn() -> None:
    cells = [draw(0, number) for number in range(900)]
    assert cells[17] == draw(0, 17)
    assert {cell.fault for cell in cells} == set(FAULTS)
    assert {cell.layout for cell in cells} == {layout for _, layout in LAYOUTS}
    assert {(cell.moment, cell.launcher) for cell in cells} == {
        (moment, launcher) for moment in Moment for launcher in Launcher
    }


@pytest.mark.turns
@pytest.mark.parametrize(
    ("fault", "moment", "copies", "peer_every"),
    [
        ("kill_rank", Moment.STEP, Copies.FOLDER, 0),
        ("kill_rank", Moment.SAVE, Copies.NONE, 1),
        ("damage_newest", Moment.STEP, Copies.NONE, 3),
        ("refuse_credentials", Moment.START, Copies.BUCKET, 0),
        ("remove_bucket", Moment.STEP, Copies.BUCKET, 0),
        ("turn_clock", Moment.START, Copies.NONE, 0),
    ],
)
def test_the_real_program_goes_on_after_a_fault(
    fault: str, moment: Moment, copies: Copies, peer_every: int, tmp_path: Path
) -> None:
    """Try a cell of two ranks under our launcher, by the command line."""
    cell = Try(
        fault=fault,
        layout="ep2,mbs1",
        world_size=2,
        moment=moment,
        launcher=Launcher.OWN,
        is_elastic=False,
        copies=copies,
        peer_every=peer_every,
    )
    laboratory = Laboratory(tmp_path)
    try:
        assert laboratory.try_cell(cell, "try") == "", str(cell)
    finally:
        laboratory.close()


def test_the_page_takes_the_tries_by_the_command_line_and_keeps_the_rest() -> None:
    outcome = Outcome(seed=0, number=4, cell=draw(0, 4), verdict="held", seconds=1.0)
    page = "# Faults\n\n| a | b |\n\n## What others promise\n\n| c |\n"
    first = replace_section(page, format_section([outcome]))
    assert "1 of 1 tries that bit held" in first
    again = replace_section(first, format_section([outcome, outcome]))
    assert "2 of 2 tries that bit held" in again
    assert "1 of 1" not in again
    assert again.startswith("# Faults")
    assert again.endswith("## What others promise\n\n| c |\n")
    assert find_section(again) == format_section([outcome, outcome])


@pytest.mark.parametrize("reader", fuzz.READERS, ids=lambda reader: reader.key)
def test_mutated_inputs_are_answered_or_refused(reader: fuzz.Reader, tmp_path: Path) -> None:
    """Take a few inputs of each reader; `make faults` takes thousands."""
    faults = [fuzz.try_input(reader, number, tmp_path) for number in range(25)]
    assert not any(faults), faults
