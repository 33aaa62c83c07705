"""The panel of a run: drawn from the run's records, never wider than its terminal, never an end."""

from __future__ import annotations

import os
import pty
import re
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest

import sample_run
from moewright.codec import STEPS_FILE, format_record
from moewright.codec.run_files import RecordTail
from moewright.report.run_panel import RunPanel, draw_curve, format_duration
from moewright.spec.run import GroupWait
from moewright.spec.units import format_figures

RECORD = sample_run.record(steps=8)
PLAN = replace(
    RECORD.plan,
    estimate=replace(RECORD.plan.estimate, step_interval_80=(0.1, 9.0)),
)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A terminal of some size, and what was written on it."""

    def __init__(self, columns: int, lines: int) -> None:
        self._reader, writer = pty.openpty()
        termios.tcsetwinsize(writer, (lines, columns))
        os.set_blocking(self._reader, False)
        self.stream = os.fdopen(writer, "w", encoding="utf-8")

    def read(self) -> str:
        text = b""
        try:
            while data := os.read(self._reader, 65536):
                text += data
        except OSError:
            pass
        return text.decode()

    def close(self) -> None:
        os.close(self._reader)


@pytest.fixture(autouse=True)
def _no_size_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return


def write_records(folder: Path, steps: int) -> None:
    parts = (*RECORD.sessions, *RECORD.steps[:steps])
    (folder / STEPS_FILE).write_text("".join(map(format_record, parts)))


@pytest.mark.parametrize(("columns", "lines"), [(40, 24), (80, 24), (200, 50), (80, 6), (12, 4)])
def test_the_panel_fits_its_terminal_and_is_drawn_over_itself(
    columns: int, lines: int, tmp_path: Path
) -> None:
    terminal = Terminal(columns, lines)
    panel = RunPanel(terminal.stream)
    panel.begin(PLAN, tmp_path, 8)
    for steps in (0, 3, 8):
        write_records(tmp_path, steps)
        panel._drawn_s = 0.0
        panel.refresh()
    first, second, third = re.split(r"\x1b\[\d+A\r", terminal.read())
    heights = [len(text.splitlines()) for text in (first, second, third)]
    shown = [ESCAPES.sub("", line) for line in f"{second}{third}".splitlines()]
    assert max(map(len, shown)) < columns
    assert max(heights) <= lines
    if columns >= 80 and lines >= 24:
        text = ESCAPES.sub("", third)
        assert f"loss     {RECORD.steps[-1].loss:.4f}" in text
        assert "step 8/8" in text
        assert f"predicted {format_figures(RECORD.steps[0].tokens / 9)} to " in text
        assert len(third.splitlines()) > 10


@pytest.mark.parametrize("columns", range(30, 130, 7))
def test_a_narrow_panel_leaves_parts_out_and_cuts_no_word(columns: int, tmp_path: Path) -> None:
    def draw(width: int) -> list[str]:
        terminal = Terminal(width, 40)
        panel = RunPanel(terminal.stream)
        panel.begin(PLAN, tmp_path, 8)
        panel.refresh()
        text = ESCAPES.sub("", terminal.read())
        return [line.rstrip() for line in text.splitlines() if line[:9].strip().isalpha()]

    write_records(tmp_path, 8)
    whole, narrow = draw(400), draw(columns)
    assert len(whole) == len(narrow) > 4
    for line, shown in zip(whole, narrow, strict=True):
        assert line.startswith(shown)
        assert len(shown) < columns
        assert line[len(shown) :][:1] in ("", " ")


def test_a_panel_says_all_that_is_known_of_a_run(tmp_path: Path) -> None:
    waits = (GroupWait(group="ep", seconds=RECORD.steps[-1].step_s / 4),)
    steps = [replace(step, waits=waits) for step in RECORD.steps]
    (tmp_path / STEPS_FILE).write_text("".join(map(format_record, (*RECORD.sessions, *steps))))
    terminal = Terminal(120, 40)
    panel = RunPanel(terminal.stream)
    panel.begin(PLAN, tmp_path, 9)
    panel.refresh()
    text = ESCAPES.sub("", terminal.read())
    names = {line.split(maxsplit=1)[0] for line in text.splitlines()}
    assert {"loss", "speed", "time", "waits", "experts", "memory", "saved"} <= names
    assert " left" in text
    assert "predicted" in text
    assert re.search("[\u2801-\u28ff]", text)  # the curve


def test_a_terminal_without_a_size_is_taken_for_a_usual_one(tmp_path: Path) -> None:
    write_records(tmp_path, 8)
    terminal = Terminal(0, 0)
    panel = RunPanel(terminal.stream)
    panel.begin(PLAN, tmp_path, 8)
    panel.refresh()
    assert "step 8/8" in ESCAPES.sub("", terminal.read())


def test_a_terminal_that_is_gone_and_a_damaged_record_end_nothing(tmp_path: Path) -> None:
    write_records(tmp_path, 3)
    terminal = Terminal(80, 24)
    panel = RunPanel(terminal.stream)
    panel.begin(RECORD.plan, tmp_path, 8)
    terminal.close()
    panel.refresh()
    panel.end()

    terminal = Terminal(80, 24)
    panel = RunPanel(terminal.stream)
    panel.begin(RECORD.plan, tmp_path, 8)
    with (tmp_path / STEPS_FILE).open("a") as file:
        file.write('{"kind": "step"}\n')
    panel.refresh()
    panel.end()
    assert terminal.read() == ""


def test_a_panel_of_a_trial_is_taken_away(tmp_path: Path) -> None:
    write_records(tmp_path, 3)
    terminal = Terminal(80, 24)
    panel = RunPanel(terminal.stream, is_kept=False)
    panel.begin(RECORD.plan, tmp_path, 8)
    panel.refresh()
    panel.end()
    assert terminal.read().endswith("\r\x1b[J")


def test_a_drawing_takes_a_few_milliseconds(tmp_path: Path) -> None:
    write_records(tmp_path, 8)
    terminal = Terminal(100, 40)
    panel = RunPanel(terminal.stream)
    panel.begin(RECORD.plan, tmp_path, 8)
    panel.refresh()
    started_s = time.thread_time()
    for _ in range(5):
        terminal.read()
        panel._draw()
    # Twice a second: 1.1 ms were measured, a fifth of a percent of one core.
    assert (time.thread_time() - started_s) / 5 < 0.03


def test_a_tail_gives_each_line_once_and_all_of_a_file_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = RecordTail(path)
    assert tail.read_lines() == ([], False)
    path.write_text("a\nb\nhalf")
    assert tail.read_lines() == (["a", "b"], True)
    with path.open("a") as file:
        file.write(" a line\nc\n")
    assert tail.read_lines() == (["half a line", "c"], False)
    assert tail.read_lines() == ([], False)
    (tmp_path / "new").write_text("a\n")
    (tmp_path / "new").replace(path)
    assert tail.read_lines() == (["a"], True)


@pytest.mark.parametrize("is_ascii", [True, False])
def test_a_curve_falls_from_the_left_above_to_the_right_below(is_ascii: bool) -> None:
    rows, low, high = draw_curve([8.0, 6.0, 5.0, 4.5], 20, 4, is_ascii=is_ascii)
    assert (low, high) == (4.5, 8.0)
    assert [len(row) for row in rows] == [20] * 4
    blank = " " if is_ascii else chr(0x2800)
    assert rows[0][0] != blank
    assert rows[-1][0] == blank
    assert rows[-1].strip(blank)
    flat, *_ = draw_curve([1.0, 1.0, 1.0], 5, 3, is_ascii=is_ascii)
    assert flat[0].strip(blank)


def test_a_loss_that_is_no_number_is_said(tmp_path: Path) -> None:
    steps = [replace(step, loss=float("inf"), skipped=True) for step in RECORD.steps]
    lines = map(format_record, (*RECORD.sessions, *steps))
    (tmp_path / STEPS_FILE).write_text("".join(lines))
    terminal = Terminal(120, 40)
    panel = RunPanel(terminal.stream)
    panel.begin(RECORD.plan, tmp_path, 8)
    panel.refresh()
    assert "not finite" in terminal.read()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7.2, "7 s"), (720, "12 min"), (12_000, "3 h 20 min"), (216_000, "2.5 days")],
)
def test_durations_are_said_as_people_do(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
