"""Layouts over the whole legal space equal one process: see layout_proof for what that means,
layout_space for which.

`make test` proves some corners and a part of the sweep that changes with the source; `make
verify-layouts` proves every corner and the whole sweep.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from layout_proof import prove_layout
from layout_space import CORNERS, DRAWN_SHAPES, SHAPES, Case, draw_sweep, plan_case, rotate_cases

pytestmark = pytest.mark.spawn

_CORE = 4
_ROTATED = 2
_RANKS = 4  # at most, of those: eight ranks on the cores of two take a minute


def cases() -> list[object]:
    """All corners and the sweep; what not every `make test` proves is marked."""
    corners, drawn = (
        [case for case in all_cases if not case.refusals and case.layout.world_size <= _RANKS]
        for all_cases in (CORNERS, draw_sweep())
    )
    often = {case.id for case in (*rotate_cases(corners, _CORE), *rotate_cases(drawn, _ROTATED))}
    return [
        pytest.param(case, id=case.id, marks=() if case.id in often else (pytest.mark.thorough,))
        for case in (*CORNERS, *draw_sweep())
    ]


@pytest.mark.parametrize("case", cases())
def test_a_layout_equals_one_process_and_its_ledger_the_prediction(
    case: Case, tmp_path: Path
) -> None:
    if case.refusals:
        pytest.skip(str(case.refusals[0]))
    prove_layout(plan_case(case), tmp_path)


def test_the_sweep_covers_the_space() -> None:
    """At least forty layouts, different ones, over every shape."""
    assert len({case.id for case in (*CORNERS, *draw_sweep())}) == len(CORNERS) + len(draw_sweep()) >= 40
    assert {case.shape for case in draw_sweep()} == set(DRAWN_SHAPES)
    assert {case.shape for case in CORNERS} == set(SHAPES)
