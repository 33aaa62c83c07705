"""Layouts over the whole legal space equal one process: see layout_proof for what that means,
layout_space for which.

`make test` proves some corners and a part of the sweep that changes with the source; `make
verify-layouts` proves every corner and the whole sweep.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from layout_proof import prove
from layout_space import CORNERS, DRAWN, SHAPES, Case, job, rotated, sweep

pytestmark = pytest.mark.spawn

_CORE = 4
_ROTATED = 2
_RANKS = 4  # at most, of those: eight ranks on the cores of two take a minute


def cases() -> list[object]:
    """All corners and the sweep; what not every `make test` proves is marked."""
    corners, drawn = (
        [case for case in all_cases if not case.refusals and case.layout.world_size <= _RANKS]
        for all_cases in (CORNERS, sweep())
    )
    often = {case.id for case in (*rotated(corners, _CORE), *rotated(drawn, _ROTATED))}
    return [
        pytest.param(case, id=case.id, marks=() if case.id in often else (pytest.mark.thorough,))
        for case in (*CORNERS, *sweep())
    ]


@pytest.mark.parametrize("case", cases())
def test_a_layout_equals_one_process_and_its_ledger_the_prediction(
    case: Case, tmp_path: Path
) -> None:
    if case.refusals:
        pytest.skip(str(case.refusals[0]))
    prove(job(case), tmp_path)


def test_the_sweep_covers_the_space() -> None:
    """At least forty layouts, different ones, over every shape."""
    assert len({case.id for case in (*CORNERS, *sweep())}) == len(CORNERS) + len(sweep()) >= 40
    assert {case.shape for case in sweep()} == set(DRAWN)
    assert {case.shape for case in CORNERS} == set(SHAPES)
