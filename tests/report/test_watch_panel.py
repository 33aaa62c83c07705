"""The live view of a watched run."""

from __future__ import annotations

import io

from rich.console import Console

from moewright.diagnosis.change_points import ChangeKind
from moewright.diagnosis.run_watch import Alarm, AlarmKind, RunWatch, WatchedChange
from moewright.report.watch_document import WatchPanel, build_panel

WATCH = RunWatch(
    source="run.log",
    trainer="Megatron-LM",
    steps=200,
    latest=200,
    total=1000,
    step_s=2.1,
    predicted_s=2.0,
    band_s=(1.5, 2.6),
    has_rates=False,
    changes=(
        WatchedChange(kind=ChangeKind.SLOWER, step=150, sighting=160, before_s=2.0, after_s=2.1),
    ),
    recurrences=(),
    least_shift=0.03,
    loss=2.5,
    peak_bytes=0,
    predicted_peak_bytes=0,
    capacity_bytes=0,
    days_left=0.1,
    alarms=(Alarm(kind=AlarmKind.SLOWER, step=150, text="from step 150 on steps are slower"),),
    recent_s=tuple(2.0 + 0.1 * (step > 150) for step in range(200)),
)


def render(width: int, *, is_ascii: bool) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(build_panel(WATCH, width, is_ascii=is_ascii))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def test_the_panel_shows_the_curve_the_facts_and_the_alarms() -> None:
    for width in (40, 80, 200):
        lines = render(width, is_ascii=True)
        assert lines[0] == "step 200: 2.1 s a step, 1 alarm"
        assert lines[1].rstrip().endswith("2.1 s")
        assert "*" in lines[1]
        assert any(line.startswith("trainer   Megatron-LM") for line in lines)
        assert any(line.startswith("slower    from step 150") for line in lines)
        assert all(len(line) <= width for line in lines)


def test_states_are_drawn_in_the_same_place() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    panel = WatchPanel(console)
    panel.draw(WATCH)
    panel.draw(WATCH)
    panel.close()
    assert file.getvalue().count("\x1b[1A") > 5  # the cursor went back up to the first line
