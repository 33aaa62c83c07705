"""What practitioners usually do: the orders of priority of published MoE tuning guides
(Megatron-LM's MoE guide, Megatron-Bridge's performance guide). A search follows none of them; where
its winner departs from one, the plan says what keeping to it would cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from moewright.search.pipeline_arrays import Array
from moewright.search.space import Keep, Pipe, Space, Work
from moewright.spec.layout import Layout, Offload, Recompute

_LONG_TOKENS = 8192  # from where attention's activations are said to dominate


class Level(Enum):
    """What of a layout a habit is about: what tells groups of candidates apart, or one of their
    axes."""

    CUT = ()
    PIPE = (0,)
    WORK = (1,)
    KEEP = (2,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Habit:
    """`kept` tells whether a layout, or the part of one that `level` names, keeps to it."""

    said: str
    level: Level
    kept: Callable[[Any, Space], bool]

    def mask(
        self,
        cut: Layout,
        pipes: tuple[Pipe, ...],
        works: tuple[Work, ...],
        keeps: tuple[Keep, ...],
        space: Space,
    ) -> Array:
        """Which of [pipelines, works, keeps] keep to it, in a shape that broadcasts."""
        if self.level is Level.CUT:
            return np.full((1, 1, 1), self.kept(cut, space))
        (axis,) = self.level.value
        shape = [1, 1, 1]
        shape[axis] = -1
        parts: tuple[Any, ...] = (pipes, works, keeps)[axis]
        return np.array([self.kept(part, space) for part in parts]).reshape(shape)


def _inside(cut: Layout, space: Space) -> bool:
    domain = space.hardware.fabric.domain_size
    return cut.tp <= domain and cut.ep * cut.etp <= domain


def _short_whole(cut: Layout, space: Space) -> bool:
    return cut.cp == 1 or space.workload.seq_len >= _LONG_TOKENS


HABITS = (
    Habit(
        said="keep tensor and expert parallelism inside the fast domain",
        level=Level.CUT,
        kept=_inside,
    ),
    Habit(said="cut experts by EP before ETP", level=Level.CUT, kept=lambda cut, _: cut.etp == 1),
    Habit(said="take context parallelism from 8K tokens on", level=Level.CUT, kept=_short_whole),
    Habit(
        said="interleave the stages",
        level=Level.PIPE,
        kept=lambda pipe, _: pipe.pp == 1 or pipe.vpp > 1,
    ),
    Habit(
        said="recompute modules, not whole layers",
        level=Level.WORK,
        kept=lambda work, _: Recompute.FULL not in work.recompute,
    ),
    Habit(
        said="recompute and split further before activations go to the host",
        level=Level.WORK,
        kept=lambda work, _: set(work.offload) <= {Offload.OPTIMIZER},
    ),
    Habit(
        said="keep the optimizer on the device",
        level=Level.KEEP,
        kept=lambda keep, _: Offload.OPTIMIZER not in keep.offload,
    ),
)
LEAST = "take the least model parallelism that fits"


def departed(layout: Layout, space: Space) -> tuple[Habit, ...]:
    """The habits that a layout does not keep to."""
    return tuple(habit for habit in HABITS if not habit.kept(layout, space))


def parallelism(layout: Layout) -> int:
    """Ranks that hold one copy of the dense part of a model."""
    return layout.tp * layout.cp * layout.pp
