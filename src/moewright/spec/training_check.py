"""How training in a layout compares with training in one process, figure by figure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moewright.spec.workload import Dtype


class ComparedKind(StrEnum):
    """What is compared of two trainings."""

    LOSS = "loss"
    AUX_LOSS = "auxiliary loss"
    NORM = "gradient norm"
    GRADIENT = "gradient"  # of the first step, reduced and before clipping
    # Of a gradient's part along that of one process, by expert: rounding is across it.
    GRADIENT_SIZE = "size of gradient"
    SLOPE = "slope of the loss"  # along a gradient, over the size of that
    WEIGHT = "weight"  # after the last step, over the way that it has gone


class CheckedRun(StrEnum):
    """What is compared with a plain run of one process."""

    LAYOUT = "layout"
    DOUBLED = "each micro-batch twice"  # of which losses and gradients are means: they stay
    RESTARTED = "saved and restored"  # after the first step, in the layout
    WRITTEN = "AdamW as it is written"  # in fp64, from the gradients of the run
    MOVED = "weights moved along a gradient"  # by which the losses fall as it says


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingLine:
    """One figure of both: how far the two are apart, over its size, and how far they may be.

    `name` is a parameter, or a step from 1. `rounding` is how far one process is apart from itself
    where its weights are off by a unit in the last place.
    """

    run: CheckedRun
    kind: ComparedKind
    name: str
    difference: float
    rounding: float
    bound: float
    holds: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingLine:
    """A setting of the job, and how many figures another value changes in one process.

    A figure changes where it is further apart than its bound. A setting that changes none is lost
    on its way, in every layout alike.
    """

    name: str
    compared: int
    changed: int

    @property
    def holds(self) -> bool:
        """Whether the setting changes anything."""
        return self.changed > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCheck:
    """The comparison of a few steps, in one format. `clipped_steps` are those that were clipped."""

    precision: Dtype
    steps: int
    clipped_steps: int
    lines: tuple[TrainingLine, ...]
    settings: tuple[SettingLine, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every figure is within its bound, and every setting changes some."""
        is_close = all(line.holds for line in self.lines)
        return is_close and all(line.holds for line in self.settings)
