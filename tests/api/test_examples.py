"""Every script in examples/ runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# A line that each prints when it has come to its point.
SHOWN = {
    "diagnose_a_trace": "to try: ",
    "own_hardware_file": "wrote ",
    "plan_a_cluster": " s a step in place of ",
    "read_a_megatron_script": "the planner's own layout is ",
    "train_and_change_layout": "step 20: loss ",
    "why_not_this_layout": "seconds by part, GiB by component",
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SHOWN.keys()


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert SHOWN[name] in done.stdout
