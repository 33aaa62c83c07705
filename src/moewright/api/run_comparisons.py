"""A run beside published runs, beside another run, and beside itself with parts made faster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moewright.api.diagnosing import (
    Diagnosis,
    diagnose,
    is_engine_run,
    is_trace,
    read_run,
)
from moewright.codec import read_json
from moewright.codec.run_files import PLAN_FILE, TRACE_FOLDER
from moewright.diagnosis.load_forecast import LoadForecast, forecast_run
from moewright.diagnosis.run_comparison import RunComparison, compare_with_published
from moewright.diagnosis.traces.megatron_log import read_log
from moewright.diagnosis.traces.rank_replay import can_replay_ranks
from moewright.diagnosis.traces.run_what_if import replay_run
from moewright.diagnosis.traces.step_details import (
    ChangeLevel,
    StepChange,
    compare_traces,
    list_changes,
)
from moewright.diagnosis.traces.trace_changes import parse_change
from moewright.diagnosis.traces.trace_files import read_captures
from moewright.diagnosis.traces.what_if_trace import TraceWhatIf, replay_trace
from moewright.rules.steady_steps import median_phase_seconds, median_step_s
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row
from moewright.spec.units import format_seconds


def compare_run(
    path: Path | str,
    *,
    plan: Plan | None = None,
    script: Path | str | None = None,
    on: str | Hardware = "",
    model: str = "",
    network: str = "",
) -> RunComparison:
    """Put a run beside the nearest published runs and its prediction, and say what closes the gap.

    Args:
        path: the folder of a run of this engine; a trace, or a folder of them; or a console log of
            Megatron-LM.
        plan: the job of a trace or a log, as `estimate` returns it.
        script: the Megatron-LM launch script of a trace or a log, in place of a plan.
        on: the hardware of the script or of the log.
        model: the model of a script or a log that gives no sizes.
        network: kinds of network of the script or of the log, in place of the hardware's own.

    Raises:
        BadInput: there is nothing to read, or the job is not known.

    Example:
        >>> import moewright as mw
        >>> comparison = mw.compare_run("runs/quickstart")
        >>> comparison.nearest[0].run.source != ""
        True
    """
    diagnosis = diagnose(path, plan=plan, script=script, on=on, model=model, network=network)
    job = diagnosis.job
    if job is None:
        rule = "does not say its job, without which nothing is near it"
        nearest = "--script RUN.sh --on DEVICE, or --model, --on and --layout"
        # What could not be read may be why the job is not known.
        raise BadInput(Reason(field=str(path), rule=rule, nearest=nearest), *_reasons(diagnosis))
    measured_s = diagnosis.measured_step_s
    if not measured_s:
        rule = "holds no timed step to compare"
        raise BadInput(Reason(field=str(path), rule=rule, nearest="a run that trained"))
    notes = tuple(note for note in (*diagnosis.notes, diagnosis.hint) if note)
    return compare_with_published(job, measured_s, diagnosis.waterfall, diagnosis.advice, notes)


def _reasons(diagnosis: Diagnosis) -> tuple[Reason, ...]:
    return tuple(Reason(field="read", rule=note) for note in diagnosis.notes)


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
        # Of the slowest rank, for which the others wait.
        parts = [{name: timer.max_s for name, timer in log.timers.items()} for log in logs]
        level = ChangeLevel.TIMER
    step = StepChange(level=ChangeLevel.PART, name="step", before_s=steps_s[0], after_s=steps_s[1])
    return StepChanges(changes=(step, *list_changes(level, parts)))


def _name_kind(path: Path) -> str:
    if is_engine_run(path):
        return "run"
    return "trace" if is_trace(path) else "log"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TraceReplays(Record):
    """The replays of a change, of each rank that has a trace."""

    change: str
    replays: tuple[TraceWhatIf, ...]

    def title(self) -> str:
        """Return the change in words."""
        return self.replays[0].title()

    def to_rows(self) -> list[Row]:
        """Return a row for each rank."""
        return [row for item in self.replays for row in item.to_rows()]


def what_if(path: Path | str, change: str) -> TraceReplays:
    """Say what a step of a trace would take under a change, between two bounds.

    The ranks of a run of this engine on CPUs are replayed together, so that a faster one is waited
    for less; other traces one by one.

    Args:
        path: a trace of the PyTorch profiler, an Nsight Systems export, a folder of them, or the
            folder of a run with traces.
        change: parts with how many times as fast they are ("gemm=2x,network=1.5x,host=inf");
            "graphs=on", "overlap=grad"; of a run with the traces of all ranks also another degree
            of expert parallelism ("ep=4") or another schedule ("schedule=1f1b").

    Raises:
        BadInput: there is no trace, it marks no steps, or it does not carry the change.

    Example:
        >>> import moewright as mw
        >>> mw.what_if.__name__  # docs/how_to/diagnose.md has an answer
        'what_if'
    """
    parsed = parse_change(change)
    folder = Path(path)
    plan: Plan | None = None
    if is_engine_run(folder) and (folder / TRACE_FOLDER).is_dir():
        plan = read_json(Plan, folder / PLAN_FILE)
        folder = folder / TRACE_FOLDER
    # A run without traces is still its own folder here.
    if not folder.exists() or is_engine_run(folder) or not is_trace(folder):
        rule = "needs a trace: a log and the record of a run have no times of kernels"
        raise BadInput(Reason(field="--what-if", value=change[:40], rule=rule))
    captures = read_captures(folder)
    if plan is not None and can_replay_ranks(captures, plan.layout):
        return TraceReplays(change=change, replays=(replay_run(captures, plan, parsed),))
    return TraceReplays(
        change=change, replays=tuple(replay_trace(capture, parsed) for capture in captures)
    )


def forecast_loads(run: Path | str, horizon: int = 1000) -> LoadForecast:
    """Forecast the load of a run's experts, and say which placement of them would pay.

    Args:
        run: the folder of a run of this engine that has recorded the loads of its routers.
        horizon: steps ahead.

    Raises:
        BadInput: there is no such run, it has too few records, or all experts lie on every rank.

    Example:
        >>> import moewright as mw
        >>> mw.forecast_loads.__name__  # docs/how_to/place_experts.md has an answer
        'forecast_loads'
    """
    if horizon < 1:
        rule = "must be at least one step"
        raise BadInput(Reason(field="--horizon", value=str(horizon), rule=rule, nearest="1000"))
    return forecast_run(read_run(Path(run)), horizon)
