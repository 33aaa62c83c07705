"""Jobs drawn at random count what is predicted for them, and compute what one process does.

The draws are others each day. A failure names its day and its seed, and `DRAWS_OF=<day>` in the
environment draws them again.
"""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

import pytest

from job_draws import draw_job, plan_draw
from layout_proof import prove_job

pytestmark = pytest.mark.spawn

_DAY = os.environ.get("DRAWS_OF") or date.today().isoformat()
_IN_EVERY_TEST = 10
_IN_ALL_TESTS = 300


def list_draws() -> list[object]:
    """Return the numbers of the day's draws; those that not every `make test` proves are marked."""
    return [
        pytest.param(
            number,
            id=f"DRAWS_OF={_DAY} {number}",
            marks=() if number < _IN_EVERY_TEST else (pytest.mark.thorough,),
        )
        for number in range(_IN_ALL_TESTS)
    ]


@pytest.mark.parametrize("number", list_draws())
def test_a_drawn_job_is_exact(number: int, tmp_path: Path) -> None:
    draw = draw_job(f"{_DAY} {number}", worlds=(1, 2, 2, 4, 4))
    print(draw)
    prove_job(plan_draw(draw), tmp_path)
