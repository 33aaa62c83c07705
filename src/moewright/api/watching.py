"""A run watched by its log: what it shows as it grows, beside what its plan expects."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from moewright.api.launch_scripts import read_flags, read_logged_flags
from moewright.api.planning import estimate_request
from moewright.codec import PLAN_FILE, STEPS_FILE, read_json
from moewright.diagnosis.rank_records import RECORDS, measure_imbalance, read_rank_records
from moewright.diagnosis.run_watch import (
    LoggedFacts,
    RunWatch,
    WatchedChange,
    find_grown_part,
    list_timers,
    raise_alarms,
    watch_steps,
)
from moewright.diagnosis.traces.event_files import EVENT_FILES, EventReader, is_event_file
from moewright.diagnosis.traces.log_facts import (
    read_clock,
    read_head,
    read_lines_between,
    read_step_memory,
)
from moewright.diagnosis.traces.megatron_log import MegatronLog, MemoryReport, parse_log
from moewright.diagnosis.traces.megatron_timers import TimerBlock, read_timers
from moewright.diagnosis.traces.step_lines import (
    SortedSteps,
    StepSeries,
    lacks_seconds,
    read_new_steps,
)
from moewright.report.watch_document import build_watch_document
from moewright.spec.errors import BadInput, Reason
from moewright.spec.options import WorkloadOptions
from moewright.spec.plan import Plan
from moewright.view.watch_view import WatchView

_TRAINERS = ("Megatron-LM", "Bridge", "NeMo", "GPT-NeoX", "torchtitan", "MLPerf")
_TIMED_STEPS = 60  # on either side of a change whose timers are compared
_RECORDS_FOLDER = "records"  # of the step recorder, beside a log
_PIECE_BYTES = 1 << 20
_MEMORY_BYTES = 1 << 18  # at the end of a log, in which the newest report of memory is looked for


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedJob:
    """What states the job of a log: a plan or a job, a script, or a model and a layout.

    Without any of them it is that of the arguments that the log has printed, where `on` says the
    hardware; `on` is count x device, or the device alone.
    """

    plan: Path | None = None
    script: Path | None = None
    model: str = ""
    on: str = ""
    layout: str = ""
    options: WorkloadOptions = field(default_factory=WorkloadOptions)


class LogWatcher:
    """Reads a log as it grows, and says what it shows; `name` is what the log is called."""

    def __init__(self, path: Path, job: WatchedJob, *, name: str = "") -> None:
        self._path = find_log(path)
        self._name = name or str(self._path)
        self._job = job
        self._series = StepSeries()
        self._events = EventReader(self._path)
        self._head = _read_head_of(self._path)
        self._has_head = is_event_file(self._path) or bool(self._head.iterations)
        self._plan = _state_plan(self._path, self._head, job)
        self._parts: dict[int, tuple[str, float]] = {}

    @property
    def is_over(self) -> bool:
        """Whether the last step that the log announces is there."""
        numbers = self._series.numbers
        # Not the last one alone: a line may come late.
        return bool(numbers) and 0 < self._series.total <= max(numbers[-_TIMED_STEPS:])

    def look(self) -> RunWatch:
        """Return what the log shows now.

        Raises:
            BadInput: it has no step.
        """
        if is_event_file(self._path):
            self._events.read_new(self._series)
        else:
            read_new_steps(self._path, self._series)
        if not self._series.numbers:
            rule = "holds no step of " + ", ".join(_TRAINERS) + " or moewright"
            nearest = "the console output of a trainer, or a run folder"
            if not is_event_file(self._path) and lacks_seconds(self._path):
                rule = "has steps of NeMo without their seconds"
                nearest = "a log with train_step_timing (exp_manager.log_step_timing=true)"
            raise BadInput(Reason(field=self._name, rule=rule, nearest=nearest))
        if not self._has_head:  # what comes before the first step had not come yet
            self._has_head = True
            self._head = _read_head_of(self._path)
            self._plan = _state_plan(self._path, self._head, self._job)
        steps = self._series.sort()
        total = self._series.total
        if not total and self._plan is not None:
            total = self._plan.workload.steps
        ranks = read_rank_records(self._path.parent / _RECORDS_FOLDER)
        if self._path.match(RECORDS):
            ranks = read_rank_records(self._path.parent)
        watch = watch_steps(
            self._name,
            self._series.trainer,
            steps,
            LoggedFacts(
                arguments=dict(self._head.arguments),
                memory=self._find_memory(),
                elapsed_s=self._find_elapsed(steps),
            ),
            self._plan,
            total=total,
            has_rates=self._series.has_rates,
        )
        ep = 0 if self._plan is None else self._plan.layout.ep
        count = len(steps.numbers)
        watch = replace(
            watch,
            ranks=ranks,
            imbalance=measure_imbalance(ranks, ep),
            timers=list_timers(self._read_timers(steps, count - _TIMED_STEPS, count)),
            # 0, for max takes no single number.
            peak_bytes=max(watch.peak_bytes, *(rank.peak_bytes for rank in ranks), 0),
        )
        return raise_alarms(self._name_parts(watch, steps), steps)

    def _find_memory(self) -> MemoryReport | None:
        """Return the fullest device of the newest reports, those of the log's end or beginning."""
        if is_event_file(self._path):
            return None
        end = self._series.end
        text = read_lines_between(self._path, max(0, end - _MEMORY_BYTES), end)
        reports = parse_log(text).memory_reports or self._head.memory_reports
        return max(
            (*reports, *read_step_memory(text)),
            key=lambda report: report.peak_bytes,
            default=None,
        )

    def _find_elapsed(self, steps: SortedSteps) -> float:
        """Return the seconds between the lines of the first and the last step; 0: not said."""
        if is_event_file(self._path) or not steps.offsets:
            return 0.0
        ends = [read_clock(self._path, place) for place in (steps.offsets[0], steps.offsets[-1])]
        return ends[1] - ends[0] if all(ends) else 0.0

    def _name_parts(self, watch: RunWatch, steps: SortedSteps) -> RunWatch:
        """Return the watch with the parts that grew at its changes."""
        changes = tuple(self._name_part(change, steps) for change in watch.changes)
        return replace(watch, changes=changes)

    def _name_part(self, change: WatchedChange, steps: SortedSteps) -> WatchedChange:
        # A change is looked into once: what it follows from does not change any more.
        if change.step not in self._parts:
            place = bisect_left(steps.numbers, change.step)
            sighting = bisect_left(steps.numbers, change.sighting)
            before = self._read_timers(steps, place - _TIMED_STEPS, place)
            after = self._read_timers(steps, place + 1, sighting + 1)
            self._parts[change.step] = ("", 0.0)
            if before and after:
                self._parts[change.step] = find_grown_part(before, after, change.before_s)
        part, growth_s = self._parts[change.step]
        return replace(change, part=part, part_growth_s=growth_s)

    def _read_timers(self, steps: SortedSteps, first: int, end: int) -> tuple[TimerBlock, ...]:
        """Return the timers between two steps, by their places in the file."""
        offsets = steps.offsets[max(0, first) : end + 1]
        if len(offsets) < 2 or is_event_file(self._path):
            return ()
        text = read_lines_between(self._path, min(offsets), max(offsets))
        return read_timers(text)


def find_log(path: Path) -> Path:
    """Return what grows: steps.jsonl of a run folder, the newest log of another.

    Of event files it is the folder with the newest, at any depth, as TensorBoard looks for them.

    Raises:
        BadInput: there is none.
    """
    if not path.exists():
        raise BadInput(Reason(field=str(path), rule="no such log or run folder"))
    if not path.is_dir():
        return path
    if (path / STEPS_FILE).is_file():
        return path / STEPS_FILE
    recorded = sorted(path.glob(RECORDS))
    if recorded:
        return recorded[0]
    names = ("*.log", "*.out", "*.txt", EVENT_FILES)
    logs = [file for name in names for file in path.glob(name)]
    logs = logs or list(path.rglob(EVENT_FILES))
    if not logs:
        rule = f"holds no {STEPS_FILE} and no .log, .out, .txt or event file of TensorBoard"
        raise BadInput(Reason(field=str(path), rule=rule))
    newest = max(logs, key=lambda file: file.stat().st_mtime)
    return newest.parent if is_event_file(newest) else newest


def _read_head_of(path: Path) -> MegatronLog:
    if is_event_file(path):
        return parse_log("")
    if not path.is_file():
        raise BadInput(Reason(field=str(path), rule="is not a regular file"))
    return parse_log(read_head(path))


def _state_plan(path: Path, head: MegatronLog, job: WatchedJob) -> Plan | None:
    if job.plan is not None:
        return estimate_request(job.plan, "", on="", options=job.options)[0]
    if job.script is not None:
        return read_flags(job.script, on=job.on, model=job.model).plan
    if job.model:
        options = replace(
            job.options,
            # What the log says goes before defaults.
            global_batch=job.options.global_batch or head.find_size("global_batch_size") or None,
            seq_len=job.options.seq_len or head.find_size("seq_length") or None,
        )
        return estimate_request(job.model, job.layout, on=job.on, options=options)[0]
    if (path.parent / PLAN_FILE).is_file():
        return read_json(Plan, path.parent / PLAN_FILE)
    if job.on and head.arguments:
        reading = read_logged_flags(head.arguments, path, model="", on=job.on)
        return None if reading is None else reading.plan
    return None


def watch(
    log: Path | str,
    *,
    plan: Path | str | None = None,
    script: Path | str | None = None,
    model: str = "",
    on: str = "",
    layout: str = "",
) -> RunWatch:
    """Say what a log shows so far: changes of its speed, what recurs, and what the plan expects.

    Args:
        log: a console log of Megatron-LM, Megatron Bridge, NeMo, GPT-NeoX or torchtitan; the
            records of MLPerf; the folder of a run of this engine; an event file of TensorBoard;
            the folder of a step recorder; or a folder with logs, of which the newest is taken, or
            with event files, which are read together.
        plan: a plan.json or a job .toml, which says what is expected.
        script: the launch script, in place of a plan.
        model: the model, beside `on` and `layout`, in place of a plan.
        on: the hardware; alone, of the arguments that the log has printed.
        layout: the layout.

    Raises:
        BadInput: there is no step to read, or the job cannot be planned.

    Example:
        >>> import moewright as mw
        >>> shown = mw.watch("runs/quickstart")
        >>> shown.trainer
        'moewright'
    """
    job = WatchedJob(
        plan=None if plan is None else Path(plan),
        script=None if script is None else Path(script),
        model=model,
        on=on,
        layout=layout,
    )
    return LogWatcher(Path(log), job).look()


def view_watch(log: Path, job: WatchedJob) -> WatchView:
    """Return what a log shows so far, as a page draws it.

    Raises:
        BadInput: there is no step to read, or the job cannot be planned.
    """
    shown = LogWatcher(log, job).look()
    return WatchView(document=build_watch_document(shown), watch=shown)


def follow(
    watcher: LogWatcher,
    *,
    interval_s: float,
    patience_s: float = 0.0,
    has_ended: Callable[[], bool] | None = None,
) -> Iterator[RunWatch]:
    """Yield what a log shows whenever it has new steps, until its last step.

    It ends too when nothing has come for `patience_s` seconds, 0: it waits for ever; and when the
    writer `has_ended`.

    Raises:
        BadInput: it ends, and the log has no step.
    """
    told_steps = -1
    changed_s = time.monotonic()
    while True:
        # Asked before the look, so that what comes between the two is read.
        is_last = has_ended is not None and has_ended()
        is_last = is_last or (0 < patience_s < time.monotonic() - changed_s)
        try:
            shown = watcher.look()
        except BadInput:
            # A log that has just begun has no step yet.
            if is_last:
                raise
        else:
            if shown.steps != told_steps:
                told_steps, changed_s = shown.steps, time.monotonic()
                yield shown
            if watcher.is_over or is_last:
                return
        time.sleep(interval_s)


def copy_stream(stream: BinaryIO, path: Path) -> None:
    """Write what comes from a stream into a file, until it ends, as it comes."""
    with path.open("wb", buffering=0) as file:
        while piece := os.read(stream.fileno(), _PIECE_BYTES):
            file.write(piece)
