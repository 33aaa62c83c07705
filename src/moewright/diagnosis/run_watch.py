"""What is told of a run that goes on: its speed beside the plan, what changed, and what is left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf, isfinite

import numpy as np

from moewright.diagnosis.change_points import (
    WARM_UP_STEPS,
    ChangeKind,
    LevelChange,
    Recurrence,
    find_changes,
    find_least_shift,
    find_recurrences,
)
from moewright.diagnosis.rank_records import RankRecord, find_stragglers, is_hot
from moewright.diagnosis.step_noise import Floats, measure_spread
from moewright.diagnosis.thresholds import MEMORY_SHARE
from moewright.diagnosis.traces.megatron_log import MemoryReport
from moewright.diagnosis.traces.megatron_timers import TimerBlock, median_timers
from moewright.diagnosis.traces.step_lines import SortedSteps
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row
from moewright.spec.units import DAY_S, format_bytes, format_seconds, plural

_LATEST = 50  # steps, of which the speed now is the median
_RECENT = 400  # steps that a view draws
_LOSS_WINDOW = 100  # steps of each of the two windows that a rising loss is seen in
_TREND_WINDOWS = 5  # whose medians a trend goes through
_TREND_DEVIATIONS = 3.182  # of Student's t with 3 degrees of freedom: 95 in 100
_MEDIAN_ERROR = 1.2533  # of a median over that of a mean, under normal noise
_LOSS_RISE = 0.05  # of the loss, and beyond its noise
_LOSS_SURE = 4.0  # deviations of the medians' difference
_TELLING_SHARE = 0.02  # of a part's growth over the step, from which on it is named
# Arguments of Megatron-LM that say how often something is done.
PERIODS: Mapping[str, str] = {
    "save_interval": "checkpoint",
    "eval_interval": "evaluation",
    "manual_gc_interval": "garbage collection",
    "tensorboard_log_interval": "TensorBoard",
}


class AlarmKind(StrEnum):
    """What an alarm is about."""

    SLOWER = "slower"
    DRIFT = "drift"
    SLOW = "slow"  # beyond the plan's interval
    LOSS = "loss"
    MEMORY = "memory"
    STRAGGLER = "straggler"
    IMBALANCE = "imbalance"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """Something that somebody should look at, from which step on, in a sentence."""

    kind: AlarmKind
    step: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedChange:
    """A change of the level by the numbers of its iterations, and the part that grew most.

    `part` is a timer of Megatron-LM, "" where none was printed or grew.
    """

    kind: ChangeKind
    step: int
    sighting: int
    before_s: float
    after_s: float
    part: str = ""
    part_growth_s: float = 0.0

    @property
    def growth(self) -> float:
        """Return the change over the level before."""
        return self.after_s / self.before_s - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LatestTimer:
    """A timer of Megatron-LM: the median of its latest printings, of the slowest rank."""

    name: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunWatch(Record):
    """A run as its log stands.

    `step_s` is the median of the latest steps, of a token of a device where `has_rates`.
    `predicted_s` and `band_s` are the plan's step with the interval of 95 %, zeros without a plan.
    `least_shift` is the least change of the level that is found within 50 steps, as a share;
    infinite where the steps are too noisy for any. `goodput` is the share of the time between the
    first step and the last in which steps that count were made, by the clock of their lines; 0
    where they have none. `days_left` goes by it, and is 0 where the length is not known.
    `peak_band_bytes` is the plan's interval of 95 % of the peak. `latest_loss` is the median of 100
    steps, and `loss_band` where the trend of the 500 before takes it in 95 of 100 cases; zeros
    where there are fewer.
    `ranks` are what the step recorder wrote, and `imbalance` the rows of the hottest expert rank
    over the mean, 0 where nobody counted; `recent_s` are the latest steps, of the `recent` numbers,
    and `timers` what was printed of them, the longest first.
    """

    source: str
    trainer: str
    steps: int
    latest: int
    total: int
    step_s: float
    predicted_s: float
    band_s: tuple[float, float]
    has_rates: bool
    changes: tuple[WatchedChange, ...]
    recurrences: tuple[Recurrence, ...]
    least_shift: float
    loss: float
    peak_bytes: int
    predicted_peak_bytes: int
    capacity_bytes: int
    days_left: float
    alarms: tuple[Alarm, ...]
    goodput: float = 0.0
    peak_band_bytes: tuple[float, float] = (0.0, 0.0)
    latest_loss: float = 0.0
    loss_band: tuple[float, float] = (0.0, 0.0)
    ranks: tuple[RankRecord, ...] = ()
    imbalance: float = 0.0
    recent_s: tuple[float, ...] = ()
    recent: tuple[int, ...] = ()
    timers: tuple[LatestTimer, ...] = ()

    def title(self) -> str:
        """Return the step, the speed, and how many alarms there are."""
        alarms = plural(len(self.alarms), "alarm")
        return f"step {self.latest}: {format_seconds(self.step_s)} {self.unit}, {alarms}"

    @property
    def unit(self) -> str:
        """What `step_s` is the time of, in words."""
        return "a token of a device" if self.has_rates else "a step"

    def to_rows(self) -> list[Row]:
        """Return a row for each alarm."""
        return [{"alarm": item.kind, "step": item.step, "text": item.text} for item in self.alarms]

    def frame_rows(self) -> list[Row]:
        """Return a row for each of the latest steps, with the alarm that was seen at it."""
        seen = {item.step: item.text for item in self.alarms}
        return [
            {"step": step, "step_s": seconds, "alarm": seen.get(step, "")}
            for step, seconds in zip(self.recent, self.recent_s, strict=True)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedFacts:
    """What a log says besides its steps: arguments, the fullest device's memory, and its clock.

    `elapsed_s` is the time between the lines of the first and the last step; 0: they have no clock.
    """

    arguments: Mapping[str, str]
    memory: MemoryReport | None = None
    elapsed_s: float = 0.0


def watch_steps(
    source: str,
    trainer: str,
    steps: SortedSteps,
    facts: LoggedFacts,
    plan: Plan | None,
    *,
    total: int = 0,
    has_rates: bool = False,
) -> RunWatch:
    """Return what the steps of a log show, beside a plan where there is one, without alarms.

    `total` is how many steps there will be, 0 where that is not known.
    """
    steps_s = _scale_rates(steps.steps_s, plan) if has_rates else steps.steps_s
    has_seconds = not has_rates or plan is not None
    steady = steps_s[WARM_UP_STEPS:] if len(steps_s) > 2 * WARM_UP_STEPS else steps_s
    step_s = float(np.median(steady[-_LATEST:])) if len(steady) else 0.0
    level_changes = find_changes(steps_s)
    changes = tuple(_name_steps(level_changes, steps.numbers))
    since = level_changes[-1].start if level_changes else WARM_UP_STEPS
    estimate = None if plan is None or plan.estimate.untimed else plan.estimate
    band_s = (0.0, 0.0)
    if estimate is not None:
        band_s = estimate.step_interval_95
    peak_bytes = 0 if facts.memory is None else facts.memory.peak_bytes
    latest = steps.numbers[-1] if steps.numbers else 0
    goodput = _measure_goodput(steps, steps_s, facts.elapsed_s) if has_seconds else 0.0
    days_left = 0.0
    if has_seconds and total > latest and len(steady):
        days_left = (total - latest) * float(steady[-10 * _LATEST :].mean()) / DAY_S
        days_left /= goodput or 1.0
    latest_loss, loss_band = expect_loss(steps)
    return RunWatch(
        source=source,
        trainer=trainer,
        steps=len(steps.numbers),
        latest=latest,
        total=total,
        step_s=step_s,
        predicted_s=0.0 if estimate is None else estimate.step_s,
        band_s=band_s,
        has_rates=not has_seconds,
        changes=changes,
        recurrences=find_recurrences(
            steps.numbers, steps_s, read_periods(facts.arguments), level_changes
        ),
        least_shift=find_least_shift(steps_s[since:]),
        loss=float(steps.losses[-1]) if len(steps.losses) else float("nan"),
        peak_bytes=peak_bytes,
        predicted_peak_bytes=0 if plan is None else plan.estimate.peak_bytes,
        capacity_bytes=0 if plan is None else plan.estimate.capacity_bytes,
        days_left=days_left,
        alarms=(),
        goodput=goodput,
        peak_band_bytes=(0.0, 0.0) if plan is None else plan.estimate.peak_interval_95,
        latest_loss=latest_loss,
        loss_band=loss_band,
        recent_s=tuple(steps_s[-_RECENT:].tolist()),
        recent=tuple(map(int, steps.numbers[-_RECENT:])),
    )


def _measure_goodput(steps: SortedSteps, steps_s: Floats, elapsed_s: float) -> float:
    """Return the share of the time that went into the steps that count; 0 where it is not known.

    A line stands for all steps since the line before it. What is lost are evaluations, checkpoints,
    restarts, and steps that a start went back behind.
    """
    if elapsed_s <= 0:
        return 0.0
    worked_s = float(np.diff(np.array(steps.numbers)) @ steps_s[1:])
    # Clocks of lines have whole seconds.
    return min(1.0, worked_s / elapsed_s)


def expect_loss(steps: SortedSteps) -> tuple[float, tuple[float, float]]:
    """Return the median loss of the latest 100 steps, and where their past takes it.

    The past are the medians of the five windows before, of 100 steps each, and a line through them
    over the logarithm of the step. Its error is the larger of what they scatter about it and of
    what the noise of steps lets medians scatter. Zeros where the losses are too few.
    """
    is_finite = np.isfinite(steps.losses)
    count = (_TREND_WINDOWS + 1) * _LOSS_WINDOW
    losses = steps.losses[is_finite][-count:]
    if len(losses) < count:
        return 0.0, (0.0, 0.0)
    numbers = np.array(steps.numbers, dtype=float)[is_finite][-count:]
    windows = losses.reshape(-1, _LOSS_WINDOW)
    medians = np.median(windows, axis=1)
    places = np.log(np.maximum(numbers, 1.0)).reshape(-1, _LOSS_WINDOW).mean(axis=1)
    past, now = places[:-1] - places[:-1].mean(), places[-1] - places[:-1].mean()
    spread = float(past @ past)
    slope = float(past @ medians[:-1]) / spread
    level = float(medians[:-1].mean())
    residuals = medians[:-1] - level - slope * past
    scatter = float(residuals @ residuals) / (_TREND_WINDOWS - 2)
    # Of neighbours, which a trend within a window leaves alone.
    noise = measure_spread(np.diff(losses)) / 2**0.5
    scatter = max(scatter, (_MEDIAN_ERROR * noise) ** 2 / _LOSS_WINDOW)
    error = (scatter * (1 + 1 / _TREND_WINDOWS + now**2 / spread)) ** 0.5
    expected = level + slope * now
    reach = _TREND_DEVIATIONS * error
    return float(medians[-1]), (expected - reach, expected + reach)


def _scale_rates(seconds_a_token: Floats, plan: Plan | None) -> Floats:
    """Return the seconds of steps by those of a token of a device."""
    if plan is None:
        return seconds_a_token
    return seconds_a_token * (plan.workload.tokens_per_step / plan.layout.world_size)


def read_periods(arguments: Mapping[str, str]) -> dict[str, int]:
    """Return how often something is done, by its name, as arguments say."""
    return {
        name: int(arguments[argument])
        for argument, name in PERIODS.items()
        if arguments.get(argument, "").isdecimal() and int(arguments[argument]) > 1
    }


def _name_steps(changes: Sequence[LevelChange], numbers: Sequence[int]) -> Iterator[WatchedChange]:
    for change in changes:
        yield WatchedChange(
            kind=change.kind,
            step=numbers[change.start],
            sighting=numbers[change.sighting],
            before_s=change.before_s,
            after_s=change.after_s,
        )


def list_timers(blocks: Sequence[TimerBlock]) -> tuple[LatestTimer, ...]:
    """Return the medians of timers, the longest first."""
    medians = median_timers(blocks, 0) if blocks else {}
    timers = (LatestTimer(name=name, seconds=timer.max_s) for name, timer in medians.items())
    return tuple(sorted(timers, key=lambda timer: -timer.seconds))


def find_grown_part(
    before: Sequence[TimerBlock], after: Sequence[TimerBlock], step_s: float
) -> tuple[str, float]:
    """Return the timer that grew most between two times, and by how many seconds; "" for none."""
    was, now = median_timers(before, 0), median_timers(after, 0)
    growth_s = {name: now[name].max_s - was[name].max_s for name in now if name in was}
    # Of timers that lie inside each other the innermost that grew as much says more.
    order = sorted(growth_s, key=lambda name: (-round(growth_s[name], 4), now[name].max_s))
    if not order or growth_s[order[0]] < _TELLING_SHARE * step_s:
        return "", 0.0
    most_s = growth_s[order[0]]
    alike = [name for name in order if growth_s[name] >= 0.9 * most_s]
    name = min(alike, key=lambda name: now[name].max_s)
    return name, growth_s[name]


def raise_alarms(watch: RunWatch, steps: SortedSteps) -> RunWatch:
    """Return the watch with the alarms that its changes, its plan and its losses call for."""
    alarms = [*_list_alarms(watch), *_watch_loss(steps)]
    return replace(watch, alarms=tuple(sorted(alarms, key=lambda alarm: alarm.step)))


def _list_alarms(watch: RunWatch) -> Iterator[Alarm]:
    for change in watch.changes:
        if change.kind is ChangeKind.FASTER:
            continue
        kind = AlarmKind.DRIFT if change.kind is ChangeKind.DRIFT else AlarmKind.SLOWER
        yield Alarm(kind=kind, step=change.step, text=describe_change(change))
    low, high = watch.band_s
    if high and watch.steps > 2 * WARM_UP_STEPS and watch.step_s > high:
        text = (
            f"steps take {format_seconds(watch.step_s)}, the plan expects {format_seconds(low)} to "
            f"{format_seconds(high)} in 95 of 100 cases"
        )
        yield Alarm(kind=AlarmKind.SLOW, step=watch.latest, text=text)
    if watch.capacity_bytes and watch.peak_bytes > MEMORY_SHARE * watch.capacity_bytes:
        text = (
            f"the fullest device holds {format_bytes(watch.peak_bytes)} of "
            f"{format_bytes(watch.capacity_bytes)}"
        )
        yield Alarm(kind=AlarmKind.MEMORY, step=watch.latest, text=text)
    for _, sentence in find_stragglers(watch.ranks):
        yield Alarm(kind=AlarmKind.STRAGGLER, step=watch.latest, text=sentence)
    if is_hot(watch.imbalance):
        text = f"the hottest expert rank has {watch.imbalance:.2f} times the mean rows"
        yield Alarm(kind=AlarmKind.IMBALANCE, step=watch.latest, text=text)


def describe_change(change: WatchedChange) -> str:
    """Say a change of the level in a sentence, with the part that grew."""
    verb = {
        ChangeKind.SLOWER: "steps are slower",
        ChangeKind.FASTER: "steps are faster",
        ChangeKind.DRIFT: "steps get slower and slower",
    }[change.kind]
    part = ""
    if change.part:
        part = f"; {change.part} grew by {format_seconds(change.part_growth_s)}"
    levels = f"{format_seconds(change.before_s)} to {format_seconds(change.after_s)}"
    seen = f"seen at step {change.sighting}{part}"
    return f"from step {change.step} on {verb}: {levels} ({change.growth:+.1%}), {seen}"


def _watch_loss(steps: SortedSteps) -> Iterator[Alarm]:
    """Yield an alarm where the loss is no number, or rises over the latest steps."""
    losses = steps.losses
    # A step without a loss among others that have one is a log that was cut, not a divergence.
    lost = np.isinf(losses)
    if lost.any():
        number = steps.numbers[int(np.argmax(lost))]
        yield Alarm(kind=AlarmKind.LOSS, step=number, text=f"the loss of step {number} is infinite")
    finite = losses[np.isfinite(losses)]
    if len(finite) and not np.isfinite(losses[-_LOSS_WINDOW:]).any():
        number = steps.numbers[-1]
        yield Alarm(kind=AlarmKind.LOSS, step=number, text="the latest losses are no numbers")
        return
    if len(finite) < 2 * _LOSS_WINDOW:
        return
    before, after = finite[-2 * _LOSS_WINDOW : -_LOSS_WINDOW], finite[-_LOSS_WINDOW:]
    level, latest = float(np.median(before)), float(np.median(after))
    noise = 1.4826 * float(np.median(np.abs(before - level)))
    least = max(_LOSS_RISE * abs(level), _LOSS_SURE * noise * 1.25 * (2 / _LOSS_WINDOW) ** 0.5)
    if latest - level > least:
        text = f"the loss rises: from {level:.4g} to {latest:.4g} over {2 * _LOSS_WINDOW} steps"
        yield Alarm(kind=AlarmKind.LOSS, step=steps.numbers[-1], text=text)


def describe_least_shift(share: float) -> str:
    """Say which change of the level is found within 50 steps."""
    if share == inf or not isfinite(share):
        return "steps are too noisy, or too few, for a change to be found within 50 steps"
    return f"a change of {share:.0%} is found within 50 steps"
