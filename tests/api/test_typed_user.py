"""A user's file is checked against the types that the package ships."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

USER_FILE = """
from typing import assert_type

import moewright as mw

plans = mw.plan("Qwen3-30B-A3B", on="8xH100", top=3)
assert plans.best is not None
assert_type(plans.best.layout.ep, int)
assert_type(plans.best.estimate.step_s, float)
own = mw.estimate("Qwen3-30B-A3B", "tp2,ep8", on="16xH100")
assert_type(own.estimate.fit_probability, float)
shown = mw.watch("run.log", on="H100")
assert_type([alarm.text for alarm in shown.alarms], list[str])
change = mw.check("before.toml", "after.toml")
assert_type(change.title(), str)
replays = mw.what_if("trace.json", "gemm=2x")
assert_type([replay.low_s for replay in replays.replays], list[float])
diagnosis = mw.diagnose("runs/x")
assert_type(diagnosis.findings[0].title, str)
mw.plan(17)  # type: ignore[arg-type]
"""


@pytest.mark.thorough
def test_a_users_file_has_no_unknown_types(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(USER_FILE)
    command = [sys.executable, "-m", "mypy", "--strict", "--disallow-any-expr", str(file)]
    command += ["--config-file", "", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout
