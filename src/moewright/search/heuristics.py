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

from moewright.cost.activations import ActivationPolicy
from moewright.cost.stage_parts import Array
from moewright.search.space import PipelineShape, SearchSpace, StatePolicy
from moewright.spec.layout import Layout, Offload, Recompute

_LONG_TOKENS = 8192  # from where attention's activations are said to dominate


class GuidelineScope(Enum):
    """What of a layout a habit is about: what tells groups of candidates apart, or one of their
    axes.
    """

    DEGREES = ()
    PIPELINE = (0,)
    ACTIVATIONS = (1,)
    STATES = (2,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Guideline:
    """`kept` tells whether a layout, or the part of one that `level` names, keeps to it."""

    text: str
    scope: GuidelineScope
    is_followed: Callable[[Any, SearchSpace], bool]

    def mask(
        self,
        cut: Layout,
        pipes: tuple[PipelineShape, ...],
        works: tuple[ActivationPolicy, ...],
        keeps: tuple[StatePolicy, ...],
        space: SearchSpace,
    ) -> Array:
        """Which of [pipelines, works, keeps] keep to it, in a shape that broadcasts."""
        if self.scope is GuidelineScope.DEGREES:
            return np.full((1, 1, 1), self.is_followed(cut, space))
        (axis,) = self.scope.value
        shape = [1, 1, 1]
        shape[axis] = -1
        parts: tuple[Any, ...] = (pipes, works, keeps)[axis]
        return np.array([self.is_followed(part, space) for part in parts]).reshape(shape)


def _inside(cut: Layout, space: SearchSpace) -> bool:
    domain = space.hardware.fabric.domain_size
    return cut.tp <= domain and cut.ep * cut.etp <= domain


def _short_whole(cut: Layout, space: SearchSpace) -> bool:
    return cut.cp == 1 or space.workload.seq_len >= _LONG_TOKENS


GUIDELINES = (
    Guideline(
        text="keep tensor and expert parallelism inside the fast domain",
        scope=GuidelineScope.DEGREES,
        is_followed=_inside,
    ),
    Guideline(
        text="cut experts by EP before ETP",
        scope=GuidelineScope.DEGREES,
        is_followed=lambda cut, _: cut.etp == 1,
    ),
    Guideline(
        text="take context parallelism from 8K tokens on",
        scope=GuidelineScope.DEGREES,
        is_followed=_short_whole,
    ),
    Guideline(
        text="interleave the stages",
        scope=GuidelineScope.PIPELINE,
        is_followed=lambda pipe, _: pipe.pp == 1 or pipe.vpp > 1,
    ),
    Guideline(
        text="recompute modules, not whole layers",
        scope=GuidelineScope.ACTIVATIONS,
        is_followed=lambda work, _: Recompute.FULL not in work.recompute,
    ),
    Guideline(
        text="recompute and split further before activations go to the host",
        scope=GuidelineScope.ACTIVATIONS,
        is_followed=lambda work, _: set(work.offload) <= {Offload.OPTIMIZER},
    ),
    Guideline(
        text="keep the optimizer on the device",
        scope=GuidelineScope.STATES,
        is_followed=lambda keep, _: Offload.OPTIMIZER not in keep.offload,
    ),
)
LEAST_PARALLELISM = "take the least model parallelism that fits"


def find_departures(layout: Layout, space: SearchSpace) -> tuple[Guideline, ...]:
    """The habits that a layout does not keep to."""
    return tuple(habit for habit in GUIDELINES if not habit.is_followed(layout, space))


def model_parallel_size(layout: Layout) -> int:
    """Ranks that hold one copy of the dense part of a model."""
    return layout.tp * layout.cp * layout.pp
