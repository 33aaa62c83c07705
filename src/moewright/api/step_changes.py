"""What changed between two runs, two traces or two logs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moewright.api.diagnosing import is_engine_run, is_trace, read_captures, read_run
from moewright.diagnosis.traces.megatron_log import read_log
from moewright.diagnosis.traces.trace_changes import (
    ChangeLevel,
    StepChange,
    compare_traces,
    list_changes,
)
from moewright.rules.steady_steps import median_phase_seconds, median_step_s
from moewright.spec.errors import BadInput, Reason
from moewright.spec.record import Record, Row
from moewright.spec.units import format_seconds


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StepChanges(Record):
    """What a step takes more or less than before, the whole step in front.

    Within a level (timer, part, phase, layer, kernel) the largest change comes first.
    """

    changes: tuple[StepChange, ...]

    def title(self) -> str:
        """Return the change of the step in one line."""
        step = self.changes[0]
        share = 0.0
        if step.before_s:
            share = step.change_s / step.before_s
        before, after = format_seconds(step.before_s), format_seconds(step.after_s)
        return f"a step takes {after}, before {before}: {share:+.1%}"

    def to_rows(self) -> list[Row]:
        """Return a row for each change."""
        return [
            {
                "level": change.level,
                "name": change.name,
                "before_s": change.before_s,
                "after_s": change.after_s,
                "change_s": change.change_s,
            }
            for change in self.changes
        ]


def compare_steps(before: Path | str, after: Path | str) -> StepChanges:
    """Say what changed between two runs of this engine, two traces or two logs.

    Args:
        before: a run's folder, a trace, an export of Nsight Systems, a folder of them, or a log.
        after: the same kind, later.

    Raises:
        BadInput: one of them cannot be read, or they are of different kinds.

    Example:
        >>> import moewright as mw
        >>> mw.compare_steps("runs/quickstart", "runs/quickstart").changes[0].change_s
        0.0
    """
    paths = (Path(before), Path(after))
    for path in paths:
        if not path.exists():
            raise BadInput(Reason(field=str(path), rule="no such run folder, trace or log"))
    kinds = [_name_kind(path) for path in paths]
    if kinds[0] != kinds[1]:
        rule = f"is a {kinds[1]}, and {paths[0].name} is a {kinds[0]}: both must be of one kind"
        raise BadInput(Reason(field=str(paths[1]), rule=rule))
    if kinds[0] == "trace":
        captures = [read_captures(path) for path in paths]
        return StepChanges(changes=compare_traces(*captures))
    if kinds[0] == "run":
        runs = [read_run(path) for path in paths]
        steps_s = [median_step_s(run) for run in runs]
        parts = [{str(phase): s for phase, s in median_phase_seconds(run)} for run in runs]
        level = ChangeLevel.PART
    else:
        logs = [read_log(path) for path in paths]
        steps_s = [log.step_s for log in logs]
        parts = [{name: timer.max_s for name, timer in log.timers.items()} for log in logs]
        level = ChangeLevel.TIMER
    step = StepChange(level=ChangeLevel.PART, name="step", before_s=steps_s[0], after_s=steps_s[1])
    return StepChanges(changes=(step, *list_changes(level, parts)))


def _name_kind(path: Path) -> str:
    if is_engine_run(path):
        return "run"
    return "trace" if is_trace(path) else "log"
