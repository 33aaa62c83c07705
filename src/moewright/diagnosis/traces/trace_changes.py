"""What changed between two traced runs: by part of the step, phase, layer and kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from moewright.diagnosis.traces.breakdown import Breakdown, break_down_step
from moewright.diagnosis.traces.capture import Capture
from moewright.diagnosis.traces.step_details import StepDetails, detail_step, sum_kernels

_SAME_S = 1e-7  # less is no change


class ChangeLevel(StrEnum):
    """How finely a step is split."""

    TIMER = "timer"  # of a log
    PART = "part"
    PHASE = "phase"
    LAYER = "layer"
    KERNEL = "kernel"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepChange:
    """Seconds a step of one item before and after, means over the ranks."""

    level: ChangeLevel
    name: str
    before_s: float
    after_s: float

    @property
    def change_s(self) -> float:
        """Return what it takes more; negative: less."""
        return self.after_s - self.before_s


def compare_traces(before: Sequence[Capture], after: Sequence[Capture]) -> tuple[StepChange, ...]:
    """Return what changed, the step first; within a level the largest change in front.

    Parts of the step sum to it; kernels and phases overlap.
    """
    both = (before, after)
    breakdowns = [[break_down_step(capture) for capture in captures] for captures in both]
    steps_s = [fmean(rank.step_s for rank in ranks) for ranks in breakdowns]
    step = StepChange(level=ChangeLevel.PART, name="step", before_s=steps_s[0], after_s=steps_s[1])
    parts = [_mean_seconds([dict(_parts(rank)) for rank in ranks]) for ranks in breakdowns]
    details = [[detail_step(capture) for capture in captures] for captures in both]
    phases = [_mean_seconds([_phases(rank) for rank in ranks]) for ranks in details]
    layers = [_mean_seconds([_layers(rank) for rank in ranks]) for ranks in details]
    kernels = [_mean_seconds([sum_kernels(capture) for capture in captures]) for captures in both]
    return (
        step,
        *list_changes(ChangeLevel.PART, parts),
        *list_changes(ChangeLevel.PHASE, phases),
        *list_changes(ChangeLevel.LAYER, layers),
        *list_changes(ChangeLevel.KERNEL, kernels),
    )


def _parts(rank: Breakdown) -> Iterator[tuple[str, float]]:
    yield "compute", rank.compute_s
    for time in rank.comm_times:
        yield f"exposed {time.comm}", time.exposed_s
    yield "copies not hidden", rank.copies_s
    for cause, seconds in rank.idle_times:
        yield f"idle: {cause}", seconds


def _phases(rank: StepDetails) -> dict[str, float]:
    return {str(row.phase): row.seconds for row in rank.phases}


def _layers(rank: StepDetails) -> dict[str, float]:
    return {f"layer {row.layer}": row.seconds for row in rank.layers}


def _mean_seconds(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: fmean(rank.get(name, 0.0) for rank in ranks) for name in names}


def list_changes(level: ChangeLevel, both: Sequence[Mapping[str, float]]) -> list[StepChange]:
    """Return what changed between two tables of seconds, the largest change in front."""
    before, after = both
    changes = [
        StepChange(
            level=level, name=name, before_s=before.get(name, 0.0), after_s=after.get(name, 0.0)
        )
        for name in {**before, **after}
    ]
    changed = [change for change in changes if abs(change.change_s) > _SAME_S]
    return sorted(changed, key=lambda change: -abs(change.change_s))
