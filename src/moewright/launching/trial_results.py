"""Where trials run, and what their folders show: figures, findings, and why they failed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import median

from moewright.codec import read_run
from moewright.codec.megatron_options import LAYOUT_OPTIONS
from moewright.diagnosis.traces.log_findings import find_log_walls
from moewright.diagnosis.traces.megatron_log import MegatronLog, parse_log
from moewright.diagnosis.traces.megatron_timers import measure_parts
from moewright.diagnosis.waterfall import build_log_waterfall
from moewright.exporters.slurm import OUTPUT_FILE, RUN_FOLDER, TrialStart
from moewright.rules.steady_steps import steady_steps
from moewright.spec.errors import BadInput, Reason, Verbatim, escape_controls
from moewright.spec.options import Launcher, TrialPlace, TrialTrainer
from moewright.spec.plan import Plan
from moewright.tuning.trials import (
    VALIDATE_STEPS,
    VALIDATION_WINDOW,
    WARM_UP_STEPS,
    TrialFailure,
    TrialLength,
    TrialOutcome,
    ValidationCheck,
    build_outcome,
    without_fixes,
)

_MAX_AT_ONCE = 64  # jobs of one tuning in a queue that others share


def plan_start(place: TrialPlace) -> TrialStart:
    """Return how each trial is started.

    Raises:
        BadInput: the options contradict each other, or pretrain_gpt.py is not there.
    """
    if not 1 <= place.at_once <= _MAX_AT_ONCE:
        nearest = str(min(max(place.at_once, 1), _MAX_AT_ONCE))
        rule = f"must be in 1..{_MAX_AT_ONCE}"
        value = str(place.at_once)
        raise BadInput(Reason(field="--at-once", value=value, rule=rule, nearest=nearest))
    is_scheduled = place.launcher is Launcher.SLURM
    if place.at_once > 1 and not is_scheduled:
        rule = "trials of one machine would slow each other"
        raise BadInput(Reason(field="--at-once", value=str(place.at_once), rule=rule, nearest="1"))
    if place.sbatch and not is_scheduled:
        rule = "needs --launcher slurm"
        raise BadInput(Reason(field="--sbatch", value=place.sbatch, rule=rule))
    return TrialStart(
        trainer_script=_find_trainer(place),
        trainer_flags=place.megatron_args,
        setup=place.setup,
        sbatch=place.sbatch,
        is_scheduled=is_scheduled,
    )


def _find_trainer(place: TrialPlace) -> str:
    if place.trainer is TrialTrainer.OURS:
        if place.megatron or place.megatron_args:
            rule = "needs --trainer megatron"
            raise BadInput(Reason(field="--megatron", rule=rule))
        return ""
    rule = "is needed: pretrain_gpt.py, or the checkout of Megatron-LM that holds it"
    if place.megatron is None:
        raise BadInput(Reason(field="--megatron", rule=rule))
    path = place.megatron / "pretrain_gpt.py" if place.megatron.is_dir() else place.megatron
    if not path.is_file():
        raise BadInput(Reason(field="--megatron", value=str(place.megatron), rule=rule))
    return str(path.resolve())


# What allocators, the kernel and the launcher say when there is no memory left, in lower case.
_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "memoryerror",
    "killed by sigkill",
    "signal 9 (sigkill)",
    "oom-kill",
)
_MAX_MESSAGE = 200
_MAX_OUTPUT = 64 * 2**20  # of an output, from its end
_ERROR = re.compile(r"(?:^|[\s:\]])((?:\w+\.)*\w*(?:Error|Exception)\b.*)")
# Degrees that Megatron-LM dumps among its arguments, which show what ran.
_DUMPED = ("tp", "pp", "cp", "ep", "mbs")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialProgress:
    """The steady steps of a trial so far, and their median seconds."""

    steps: int = 0
    step_s: float = 0.0


def read_output(folder: Path) -> str:
    """Return what a trial printed so far, the end of it where it is much; "" before it began."""
    path = folder / OUTPUT_FILE
    if not path.exists():
        return ""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _MAX_OUTPUT))
        return stream.read().decode("utf-8", errors="replace")


def classify_failure(output: str) -> TrialFailure:
    """Tell a trial that had no memory left from another failure."""
    lowered = output.lower()
    if any(words in lowered for words in _NO_MEMORY):
        return TrialFailure.MEMORY
    return TrialFailure.OTHER


def describe_failure(output: str, default: str) -> str:
    """Return the line that says best why a trial failed."""
    lines = output.splitlines()
    # Our launcher says in such a line which rank failed, and of what.
    told = [line for line in lines if line.startswith("rank ")]
    if not told:
        # Where memory ran out, that is the cause; else the last error, which the others led to.
        errors = [match[1] for line in lines if (match := _ERROR.search(line))]
        memory = [line for line in errors if classify_failure(line) is TrialFailure.MEMORY]
        told = memory[:1] or errors[-1:]
    return shorten_message(next(iter(told), default))


def shorten_message(line: str) -> str:
    """Return a line that a trial printed as an outcome and its report show it."""
    return escape_controls(line.strip())[:_MAX_MESSAGE]


def read_engine_progress(folder: Path) -> TrialProgress:
    """Return how far a trial of our engine is."""
    try:
        record = read_run(folder / RUN_FOLDER)
    except (BadInput, OSError):
        return TrialProgress()
    if len(record.planned_steps) <= WARM_UP_STEPS:
        return TrialProgress()
    seconds = [step.step_s for step in steady_steps(record)]
    return TrialProgress(steps=len(seconds), step_s=median(seconds))


def read_megatron_progress(folder: Path) -> TrialProgress:
    """Return how far a trial of Megatron-LM is."""
    seconds = _steady_seconds(parse_log(read_output(folder)))
    return TrialProgress(steps=len(seconds), step_s=median(seconds or [0.0]))


def _steady_seconds(log: MegatronLog) -> list[float]:
    """Return the seconds of the iterations after the warm-up of a trial."""
    timed = [iteration for iteration in log.iterations if iteration.step_s > 0]
    return [iteration.step_s for iteration in timed[WARM_UP_STEPS:] if not iteration.skipped]


def read_engine_outcome(folder: Path, length: TrialLength) -> TrialOutcome:
    """Return what a trial of our engine showed."""
    return build_outcome(read_run(folder / RUN_FOLDER), length)


def read_megatron_outcome(folder: Path, plan: Plan, length: TrialLength) -> TrialOutcome:
    """Return what a trial of Megatron-LM showed by its log.

    A log without a steady iteration, or with a failed allocation, is a failure.
    """
    output = read_output(folder)
    log = parse_log(output)
    if log.failures:
        message = describe_failure(output, "out of memory")
        return TrialOutcome(failure=TrialFailure.MEMORY, said=Verbatim(message))
    seconds = _steady_seconds(log)
    if not seconds:
        message = describe_failure(output, "printed no iteration after warm-up")
        return TrialOutcome(failure=TrialFailure.OTHER, said=Verbatim(message))
    step_s = median(seconds)
    outcome = TrialOutcome(
        step_s=step_s,
        wall_step_s=median(seconds[-VALIDATION_WINDOW:]),
        steps=len(seconds),
        loss=log.iterations[-1].loss,
        peak_bytes=max((report.peak_bytes for report in log.memory_reports), default=0),
        findings=without_fixes(find_log_walls(log, plan)),
        waterfall=build_log_waterfall(plan, step_s, measure_parts(log.timers)),
    )
    if length is TrialLength.VALIDATE:
        outcome = replace(outcome, checks=_check_log(log, plan, len(seconds), outcome.peak_bytes))
    return outcome


def _check_log(
    log: MegatronLog, plan: Plan, steps: int, peak_bytes: int
) -> tuple[ValidationCheck, ...]:
    """Check a validation by its log, as `check_winner` does by the records of our engine."""
    skipped = sum(iteration.skipped for iteration in log.iterations)
    return (
        ValidationCheck(
            name="length", passed=steps >= VALIDATE_STEPS, said=f"{steps} steady steps"
        ),
        _check_losses(log),
        ValidationCheck(name="skipped steps", passed=not skipped, said=str(skipped)),
        _check_peak(plan, peak_bytes),
        _check_arguments(log, plan),
    )


def _check_losses(log: MegatronLog) -> ValidationCheck:
    broken = [
        iteration.number
        for iteration in log.iterations
        if iteration.nan_losses or not isfinite(iteration.loss)
    ]
    if broken:
        message = f"no number at iteration {broken[0]}"
        return ValidationCheck(name="loss", passed=False, said=message)
    message = f"{log.iterations[0].loss:.4f} to {log.iterations[-1].loss:.4f}"
    return ValidationCheck(name="loss", passed=True, said=message)


def _check_peak(plan: Plan, peak_bytes: int) -> ValidationCheck:
    capacity_bytes = plan.estimate.capacity_bytes
    message = f"{peak_bytes} of {capacity_bytes} bytes held by the fullest rank"
    if not peak_bytes:
        message = "the log reports no memory; no allocation failed"
    return ValidationCheck(name="memory", passed=peak_bytes <= capacity_bytes, said=message)


def _check_arguments(log: MegatronLog, plan: Plan) -> ValidationCheck:
    """Check that the arguments that the trainer dumped are those of the layout."""
    differing = []
    agreeing = 0
    for key in _DUMPED:
        name = LAYOUT_OPTIONS[key].removeprefix("--").replace("-", "_")
        dumped = log.find_argument(name)
        wanted = str(getattr(plan.layout, key))
        # What a log does not dump contradicts nothing.
        if dumped and dumped != wanted:
            differing.append(f"{name} is {dumped}, not {wanted}")
        agreeing += dumped == wanted
    message = ", ".join(differing) or f"{agreeing} degrees as planned"
    return ValidationCheck(name="what ran", passed=not differing and agreeing > 0, said=message)
