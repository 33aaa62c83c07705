"""The planner's own speed is measured on whole searches."""

from __future__ import annotations

import pytest

from moewright.bench import search_speed
from moewright.cli.main import main


def test_rates_are_of_whole_searches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search_speed, "CASES", (("Qwen3-30B-A3B", "16xH100"),))
    assert main(["bench", "search"]) == 0
    lines = capsys.readouterr().out.splitlines()
    case = next(line for line in lines if line.startswith("Qwen3-30B-A3B on 16xH100"))
    layouts, per_core = (float(word.replace(",", "")) for word in case.split()[-2:])
    assert layouts > 1000
    assert per_core > 1000
    assert any(line.startswith("SimuMax") for line in lines)
