"""Layouts at the corners of the legal space equal one process.

See layout_proof for what that means and layout_space for which layouts. `make test` proves one;
`make verify-layouts` proves every corner.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from layout_proof import prove_layout
from layout_space import CORNERS, SHAPES, Case, plan_case

pytestmark = pytest.mark.spawn

_IN_EVERY_TEST = "zero-bubble: qwen-4x-tp1,pp4,ep1,mbs1,schedule=zb-h1"


def mark_cases() -> list[object]:
    """Return all corners; what not every `make test` proves is marked."""
    return [
        pytest.param(
            case, id=case.id, marks=() if case.id == _IN_EVERY_TEST else (pytest.mark.thorough,)
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
    ids = {case.id for case in CORNERS}
    assert len(ids) == len(CORNERS)
    assert _IN_EVERY_TEST in ids
    assert {case.shape for case in CORNERS} == set(SHAPES)
