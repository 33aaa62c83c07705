"""The panel of a run on a terminal: what its records say so far, drawn over itself.

The process that starts the ranks draws it, from the lines of steps.jsonl, so that it takes nothing
from a step and cannot end one.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TextIO

from rich.console import Console, ConsoleDimensions
from rich.text import Text

from moewright.codec import STEPS_FILE, FloatPolicy, from_data
from moewright.codec.run_files import RecordTail
from moewright.report.console import spell
from moewright.report.document import draw_bar
from moewright.report.run_sections import is_number
from moewright.spec.plan import Estimate, Plan
from moewright.spec.run import DeviceSample, EvalRecord, LayerLoad, StepRecord
from moewright.spec.units import (
    DAY_S,
    format_bytes,
    format_figures,
    format_seconds,
    mention,
    plural,
)

# The bits of braille's dots, by column and row.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800


def draw_curve(
    values: Sequence[float], width: int, height: int, *, is_ascii: bool = False
) -> tuple[list[str], float, float]:
    """Return `height` rows of `width` letters, the highest first, and the range that they span.

    More values than there are columns of dots are averaged; neighbours are joined.
    """
    across, down = (1, 1) if is_ascii else (2, 4)
    means = _average(values, width * across)
    low, high = min(means), max(means)
    rows = height * down
    scale = (rows - 1) / (high - low) if high > low else 0.0
    places = [round((high - mean) * scale) for mean in means]
    cells = [[0] * width for _ in range(height)]
    for column, place in enumerate(places):
        before = places[column - 1] if column else place
        # From the neighbour's place, which is its own, to this one.
        step = 1 if place > before else -1
        for row in range(before + step if place != before else place, place + step, step):
            bit = 1 if is_ascii else _DOTS[column % 2][row % 4]
            cells[row // down][column // across] |= bit
            if place == before:
                break
    if is_ascii:
        return ["".join(" *"[bit] for bit in row) for row in cells], low, high
    return ["".join(chr(_BRAILLE + bits) for bits in row) for row in cells], low, high


def _average(values: Sequence[float], columns: int) -> list[float]:
    """Return at most `columns` means of equal parts of the values."""
    count = len(values)
    parts = min(columns, count)
    means = []
    for part in range(parts):
        chunk = values[part * count // parts : (part + 1) * count // parts]
        means.append(sum(chunk) / len(chunk))
    return means


_EVERY_S = 0.5  # between two drawings
_NAME_WIDTH = 9
_CURVE_ROWS = 5
_RECENT_STEPS = 20  # whose median is the pace
_MOST_LOSSES = 20_000  # that are kept for the curve
_CHECKPOINT = re.compile(r"step-(\d+)")
_SMALLEST_HEIGHT = 16  # of a terminal that has room for the curve
_SMALLEST_WIDTH = 30
_WIDEST_CURVE = 100
_BAR_WIDTH = 16
_LEAST_SHARE = 0.01  # of a step that is worth a word
_USUAL_SIZE = os.terminal_size((80, 24))
_CLEAR_LINE = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"


@dataclass(kw_only=True, slots=True)
class RunProgress:
    """What is known of a run so far; the newest record of each kind, and every loss."""

    plan: Plan
    name: str
    last_step: int
    losses: list[float] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)
    record: StepRecord | None = None
    loads: tuple[LayerLoad, ...] = ()
    evaluation: EvalRecord | None = None
    saved_step: int = 0

    def add_lines(self, lines: list[str]) -> None:
        """Take up lines of steps.jsonl; of steps only the last is read whole."""
        last: dict[str, object] | None = None
        for line in lines:
            data = json.loads(line)
            kind = data.pop("kind", "")
            if kind == "step":
                last = data
                if is_number(data["loss"]):
                    self.losses.append(data["loss"])
                self.paces.append(data["step_s"])
            elif kind == "eval":
                self.evaluation = from_data(
                    EvalRecord, data, where=STEPS_FILE, floats=FloatPolicy.NON_FINITE
                )
        del self.losses[:-_MOST_LOSSES], self.paces[:-_RECENT_STEPS]
        if last is not None:
            self.record = from_data(
                StepRecord, last, where=STEPS_FILE, floats=FloatPolicy.NON_FINITE
            )
            # Not every step has loads: the newest that had them are shown.
            self.loads = self.record.loads or self.loads


class RunPanel:
    """A display of a run (`engine.observe.display`) that draws a panel on a terminal.

    It falls silent where the terminal is gone or a record is not understood. When a run has ended,
    its last drawing stays, or not where it is not `is_kept`.
    """

    def __init__(self, stream: TextIO, *, is_kept: bool = True) -> None:
        # A number of its own: standard output may be sent elsewhere meanwhile.
        self._stream = os.fdopen(os.dup(stream.fileno()), "w", encoding=stream.encoding)
        self._console = Console(file=self._stream, highlight=False)
        self._is_kept = is_kept
        self._progress: RunProgress | None = None
        self._folder = Path()
        self._tail = RecordTail(Path())
        self._drawn_lines = 0
        self._drawn_s = 0.0
        self._is_broken = False

    @property
    def prints_steps(self) -> bool:
        """Whether rank 0 prints a line a step: this shows them all."""
        return False

    def begin(self, plan: Plan, run_dir: Path, last_step: int) -> None:
        """Show the run of this folder from now on."""
        self._progress = RunProgress(plan=plan, name=run_dir.name, last_step=last_step)
        self._folder = run_dir
        self._tail = RecordTail(run_dir / STEPS_FILE)
        self._drawn_lines = 0

    def refresh(self) -> None:
        """Draw what is new, where the last drawing is old enough and the terminal takes it."""
        if time.monotonic() - self._drawn_s >= _EVERY_S:
            self._draw()

    def end(self) -> None:
        """Draw the last state, or take the panel away."""
        if self._is_kept:
            self._draw()
        elif not self._is_broken and self._drawn_lines:
            with suppress(OSError, ValueError):
                self._stream.write(f"\x1b[{self._drawn_lines}A\r{_CLEAR_BELOW}")
                self._stream.flush()
        self._drawn_lines = 0
        self._progress = None

    def _draw(self) -> None:
        if self._is_broken or self._progress is None:
            return
        self._drawn_s = time.monotonic()
        try:
            # A terminal that was stopped (Ctrl-S) takes nothing, and would make a write wait.
            if select.select([], [self._stream], [], 0)[1]:
                self._read(self._progress)
                self._write(self._progress)
        except Exception:
            # Whatever it is, a display must not end a run.
            self._is_broken = True

    def _read(self, progress: RunProgress) -> None:
        lines, is_new = self._tail.read_lines()
        # The file was written anew: all its steps come again.
        if is_new:
            progress.losses.clear()
        progress.add_lines(lines)
        progress.saved_step = _find_saved_step(self._folder / "checkpoints")

    def _write(self, progress: RunProgress) -> None:
        size = os.get_terminal_size(self._stream.fileno())
        if not size.columns or not size.lines:  # a terminal that was not told
            size = _USUAL_SIZE
        self._console.size = ConsoleDimensions(size.columns, size.lines)
        width = size.columns - 1  # a full line would make some terminals begin the next
        has_curve = size.lines >= _SMALLEST_HEIGHT and width >= _SMALLEST_WIDTH
        lines = list(draw_progress(progress, self._console, width, has_curve=has_curve))
        # The cursor stands on a line of its own, below them.
        lines = lines[: size.lines - 1]
        with self._console.capture() as capture:
            for line in lines:
                self._console.print(_fit_parts(line, width), no_wrap=True, crop=False)
        text = capture.get().replace("\n", f"{_CLEAR_LINE}\n")
        back = mention("\x1b[{}A\r", self._drawn_lines)
        self._stream.write(f"{back}{text}{_CLEAR_BELOW}")
        self._stream.flush()
        self._drawn_lines = len(lines)


def _fit_parts(line: Text, width: int) -> Text:
    """Return a line without the parts that a terminal is too narrow for, and without half a word.

    Parts stand two spaces apart, where a line has several.
    """
    if line.cell_len <= width:
        return line
    shown = line.plain[: width + 1]
    end = shown.rfind("  ", _NAME_WIDTH)
    if end < 0:
        end = shown.rfind(" ", _NAME_WIDTH)
    return line[:end] if end > _NAME_WIDTH else line[:width]


def _find_saved_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, 0 without one; a rename has committed it."""
    if not folder.is_dir():
        return 0
    names = (_CHECKPOINT.fullmatch(name) for name in os.listdir(folder))
    return max((int(match[1]) for match in names if match), default=0)


def draw_progress(
    progress: RunProgress, console: Console, width: int, *, has_curve: bool
) -> Iterator[Text]:
    """Yield the lines of the panel: progress, loss, speed, time by part, experts, memory, saves."""
    record = progress.record
    if record is None:
        yield Text(f"{progress.name}: {progress.last_step:,} steps; starting", style="bold")
        return
    yield _draw_head(progress, record, console)
    yield _name("loss", _describe_loss(progress, record))
    if has_curve and len(progress.losses) > 1:
        yield from _draw_losses(progress.losses, console, width)
    yield _name("speed", _describe_speed(progress, record))
    yield _name("time", _describe_time(record))
    if record.waits:
        yield _name("waits", _describe_waits(record))
    if progress.loads:
        yield _name("experts", _describe_loads(progress.loads))
    yield _name("memory", _describe_memory(progress.plan.estimate, record.device))
    yield _name("saved", _describe_saves(progress, record))


def _name(name: str, text: str | Text) -> Text:
    line = Text(f"{name:{_NAME_WIDTH}}", style="dim")
    line.append(text if isinstance(text, Text) else Text(text, style="not dim"))
    return line


def _draw_head(progress: RunProgress, record: StepRecord, console: Console) -> Text:
    share = record.step / max(1, progress.last_step)
    head = Text(f"{progress.name} ", style="bold")
    head.append(f"step {record.step:,}/{progress.last_step:,} ")
    head.append(spell(console, draw_bar(share, _BAR_WIDTH)), style="cyan")
    left_s = (progress.last_step - record.step) * median(progress.paces)
    if left_s:
        head.append(f" {share:.0%}, {format_duration(left_s)} left")
    else:
        head.append(" done")
    return head


def _describe_loss(progress: RunProgress, record: StepRecord) -> str:
    loss = f"{record.loss:.4f}" if is_number(record.loss) else "not finite"
    norm = "skipped: gradient not finite" if record.skipped else f"{record.grad_norm:.3g}"
    text = f"{loss}  lr {record.lr:.2e}  grad-norm {norm}"
    if record.rewards.pairs:
        text += f"  accuracy {record.rewards.accuracy:.0%}"
    if progress.evaluation is not None:
        heldout = progress.evaluation.heldout_loss
        text += f"  held-out {heldout:.4f} after {progress.evaluation.step:,} steps"
    return text


def _draw_losses(losses: list[float], console: Console, width: int) -> Iterator[Text]:
    is_ascii = console.options.ascii_only
    columns = min(_WIDEST_CURVE, width - _NAME_WIDTH)
    rows, low, high = draw_curve(losses, columns, _CURVE_ROWS, is_ascii=is_ascii)
    for number, row in enumerate(rows):
        label = {0: f"{high:.4g}", len(rows) - 1: f"{low:.4g}"}.get(number, "")
        yield _name(f"{label:>{_NAME_WIDTH - 1}}", Text(row, style="not dim cyan"))


def _describe_speed(progress: RunProgress, record: StepRecord) -> Text:
    """Return tokens a second of the recent steps beside the band that was predicted."""
    pace_s = median(progress.paces)
    text = Text(f"{format_figures(record.tokens / pace_s)} tokens/s", style="not dim")
    estimate = progress.plan.estimate
    low_s, high_s = estimate.step_interval_80
    # While the batch grows, steps are shorter than the one that was predicted.
    is_full = record.tokens == progress.plan.workload.tokens_per_step
    if low_s and is_full and not estimate.untimed:
        band = (
            f"{format_figures(record.tokens / high_s)} to {format_figures(record.tokens / low_s)}"
        )
        style = "yellow" if pace_s > high_s else "green"
        text.append(f", predicted {band}", style=style)
    return text.append(f"; {format_seconds(pace_s)} a step, MFU {record.mfu:.1%}")


def _describe_time(record: StepRecord) -> str:
    rows = sorted(record.phases, key=lambda row: -row.seconds)
    # Not 0, which is divided by.
    total_s = sum(row.seconds for row in rows) or math.inf
    return "  ".join(
        f"{row.phase.value.replace('_', ' ')} {row.seconds / total_s:.0%}"
        for row in rows
        if row.seconds / total_s >= _LEAST_SHARE
    )


def _describe_waits(record: StepRecord) -> str:
    waits = sorted(record.waits, key=lambda wait: -wait.seconds)
    total_s = sum(wait.seconds for wait in waits)
    groups = ", ".join(
        f"{wait.group} {wait.seconds / record.step_s:.0%}"
        for wait in waits
        if wait.seconds >= _LEAST_SHARE * record.step_s
    )
    text = f"{total_s / record.step_s:.0%} of the step for other ranks"
    return text + mention(": {}", groups)


def _describe_loads(loads: tuple[LayerLoad, ...]) -> str:
    worst = max(loads, key=lambda load: load.max_over_mean)
    expert = worst.counts.index(max(worst.counts))
    text = f"hottest: {expert} of layer {worst.layer}, {worst.max_over_mean:.2f} x its share"
    dead = sum(load.dead_experts for load in loads)
    if dead:
        text += f"; {dead} got no token"
    dropped = max(load.dropped_share for load in loads)
    if dropped:
        text += f"; up to {dropped:.1%} dropped"
    return text


def _describe_memory(estimate: Estimate, device: DeviceSample | None) -> str:
    """Return what rank 0 holds; what the fullest rank should, where no device counts it."""
    capacity = format_bytes(estimate.capacity_bytes)
    if device is None:
        peak = format_bytes(estimate.peak_bytes)
        return f"{peak} of {capacity} predicted on rank {estimate.peak_rank}; not measured"
    busy = f"the device {device.resident_share:.0%} busy"
    return f"{format_bytes(device.used_bytes)} of {capacity} on rank 0; {busy}"


def _describe_saves(progress: RunProgress, record: StepRecord) -> str:
    text = "no checkpoint yet"
    if progress.saved_step:
        age = max(0, record.step - progress.saved_step)
        text = f"step {progress.saved_step:,}, {plural(age, 'step')} ago" if age else "this step"
    if record.copied_step >= 0:
        copy = mention("step {:,}", record.copied_step) or "none yet"
        text += f"; copy elsewhere: {copy}"
    return text


def format_duration(value_s: float) -> str:
    """Return seconds as people say how long it will take: 45 s, 12 min, 3 h 20 min, 2.5 days."""
    minutes = round(value_s / 60)
    if value_s < 100:
        return f"{value_s:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{value_s / DAY_S:.1f} days"
