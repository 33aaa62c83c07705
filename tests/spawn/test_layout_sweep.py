"""Layouts at the corners of the legal space equal one process.

See layout_proof for what that means and layout_space for which layouts. `make test` proves one;
`make verify-layouts` proves every corner.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from layout_proof import prove_layout
from layout_space import CORNERS, SHAPES, Case, plan_case
from selection import choose_cases

pytestmark = pytest.mark.spawn

_IN_EVERY_TEST = 1
_MAX_RANKS = 4  # of those in every test: eight ranks on two cores take a minute


def mark_cases() -> list[object]:
    """Return all corners; what not every `make test` proves is marked."""
    runnable = [
        case for case in CORNERS if not case.refusals and case.layout.world_size <= _MAX_RANKS
    ]
    chosen_ids = {case.id for case in choose_cases(runnable, _IN_EVERY_TEST)}
    return [
        pytest.param(
            case, id=case.id, marks=() if case.id in chosen_ids else (pytest.mark.thorough,)
        )
        for case in CORNERS
    ]


@pytest.mark.parametrize("case", mark_cases())
def test_a_layout_equals_one_process_and_its_ledger_the_prediction(
    case: Case, tmp_path: Path
) -> None:
    if case.refusals:
        pytest.skip(str(case.refusals[0]))
    prove_layout(plan_case(case), tmp_path)


def test_the_corners_cover_every_shape() -> None:
    assert len({case.id for case in CORNERS}) == len(CORNERS)
    assert {case.shape for case in CORNERS} == set(SHAPES)
