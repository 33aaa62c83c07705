"""The file of a run's steps, when a run goes on from an earlier step."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moewright.codec import STEPS_FILE
from moewright.engine.observe.record import JsonLinesWriter
from moewright.spec.errors import BadInput


def write_steps(run_dir: Path) -> str:
    text = "".join(json.dumps({"kind": "step", "step": step}) + "\n" for step in range(1, 6))
    (run_dir / STEPS_FILE).write_text(text)
    return text


def test_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    text = write_steps(tmp_path)
    JsonLinesWriter(tmp_path, first_step=4).close()
    kept = (tmp_path / STEPS_FILE).read_text()
    assert kept.count("\n") == 3
    assert text.startswith(kept)


def test_a_kill_while_steps_are_dropped_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_steps(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match="No space left on device"):
        JsonLinesWriter(tmp_path, first_step=4)
    assert (tmp_path / STEPS_FILE).read_text() == text


def test_steps_without_a_record_are_known(tmp_path: Path) -> None:
    write_steps(tmp_path)
    for first_step, missing in ((4, ()), (6, ()), (9, ((6, 8),))):
        writer = JsonLinesWriter(tmp_path, first_step=first_step)
        writer.close()
        assert writer.missing == missing
        write_steps(tmp_path)
    lines = (tmp_path / STEPS_FILE).read_text().splitlines(keepends=True)
    (tmp_path / STEPS_FILE).write_text("".join((lines[1], *lines[3:])))
    assert JsonLinesWriter(tmp_path, first_step=6).missing == ((1, 1), (3, 3))
