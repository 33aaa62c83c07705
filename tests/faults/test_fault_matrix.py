"""A few cells of the fault matrix, and a few mutated inputs; see `make faults`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from faults import fuzz
from faults.catalogue import CELLS, FAULTS, draw
from faults.cells import LAYOUTS, Copies, Launcher, Moment, Try
from faults.laboratory import Laboratory, Result
from faults.page import format_page
from faults.tries import Outcome, read_log

pytestmark = pytest.mark.spawn


def test_a_cell_is_drawn_again_by_its_number_and_all_are_drawn() -> None:
    cells = [draw(0, number) for number in range(1500)]
    assert cells[17] == draw(0, 17)
    assert {cell.fault for cell in cells} == set(FAULTS)
    assert {cell.layout for cell in cells} == {layout for _, layout in LAYOUTS}
    assert {(cell.moment, cell.launcher) for cell in cells} == {
        (moment, launcher) for moment in Moment for launcher in Launcher
    }
    assert all(fault.__doc__ for fault in CELLS)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("fault", "moment", "copies", "peer_every"),
    [
        ("kill_rank", Moment.STEP, Copies.FOLDER, 0),
        ("kill_rank", Moment.SAVE, Copies.NONE, 1),
        ("flip_payload", Moment.STEP, Copies.NONE, 3),
        ("cut_index", Moment.STEP, Copies.NONE, 0),
        ("swap_payloads", Moment.STEP, Copies.NONE, 0),
        ("damage_plan", Moment.STEP, Copies.NONE, 0),
        ("damage_journal", Moment.STEP, Copies.NONE, 0),
        ("flip_moment", Moment.STEP, Copies.NONE, 0),
        ("start_twice", Moment.START, Copies.NONE, 0),
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
        assert laboratory.try_cell(cell, "try").verdict == "held", str(cell)
    finally:
        laboratory.close()


def test_the_page_counts_what_bit_and_what_held_by_fault_moment_and_layout() -> None:
    cell = replace(draw(0, 4), fault="kill_rank", moment=Moment.SAVE, launcher=Launcher.OWN)
    held, broken, missed = (
        Outcome(seed=0, number=number, cell=cell, result=Result(verdict=verdict), seconds=60.0)
        for number, verdict in enumerate(("held", "losses differ", "no bite"))
    )
    page = format_page([held, missed])
    assert "**1 of 1 tries that bit held**; 1 others did not bite (seed 0: 0 to 2;" in page
    assert "| Kill a rank | 1 | 1 |" in page
    page = format_page([held, broken])
    assert "**1 of 2 tries that bit held**" in page
    assert "| Kill a rank | 1/2 | 1/2 |" in page
    assert "| kill rank |  |  |  |  | 1/2 |  |  |" in page
    assert "What others promise" in page


def test_a_log_of_tries_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = Result(verdict="held", notice_s=0.1, down_s=0.5, repeated_steps=2)
    outcome = Outcome(seed=0, number=4, cell=draw(0, 4), result=result, seconds=1.0)
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(asdict(outcome)) + "\n")
    assert read_log(path) == [outcome]
    assert read_log(tmp_path / "none") == []


@pytest.mark.parametrize("reader", fuzz.READERS, ids=lambda reader: reader.key)
def test_mutated_inputs_are_answered_or_refused(reader: fuzz.Reader, tmp_path: Path) -> None:
    """Take a few inputs of each reader; `make faults` takes thousands."""
    faults = [fuzz.try_input(reader, number, tmp_path) for number in range(25)]
    assert not any(faults), faults
