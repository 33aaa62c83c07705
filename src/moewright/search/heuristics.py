"""Guidelines of practitioners, in the order of published MoE tuning guides.

The guides are Megatron-LM's MoE guide and Megatron-Bridge's performance guide. A search does not
follow guidelines; where its winner departs from one, the plan says what following it would cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from moewright.cost.memory.activations import ActivationPolicy
from moewright.cost.stage_parts import Array
from moewright.search.space import PipelineShape, SearchSpace, StatePolicy
from moewright.spec.layout import Layout, Offload, Recompute

_LONG_TOKENS = 8192  # from where attention's activations are said to dominate


class GuidelineScope(Enum):
    """The part of a layout that a guideline is about.

    It is the degrees, or the index of an axis of GroupScores' arrays.
    """

    DEGREES = ()
    PIPELINE = (0,)
    ACTIVATIONS = (1,)
    STATES = (2,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Guideline:
    """A piece of advice, with the test of whether a layout follows it.

    `is_followed` takes a layout, or the part of one that `scope` names, and the search space.
    """

    text: str
    scope: GuidelineScope
    is_followed: Callable[[Any, SearchSpace], bool]

    def mask(
        self,
        cut: Layout,
        pipelines: tuple[PipelineShape, ...],
        activations: tuple[ActivationPolicy, ...],
        states: tuple[StatePolicy, ...],
        space: SearchSpace,
    ) -> Array:
        """Return the mask of a group's candidates that follow the guideline.

        It broadcasts to [pipelines, activation policies, state policies].
        """
        if self.scope is GuidelineScope.DEGREES:
            return np.full((1, 1, 1), self.is_followed(cut, space))
        (axis,) = self.scope.value
        shape = [1, 1, 1]
        shape[axis] = -1
        choices: tuple[Any, ...] = (pipelines, activations, states)[axis]
        follows = [self.is_followed(choice, space) for choice in choices]
        return np.array(follows).reshape(shape)


def _stays_in_domain(cut: Layout, space: SearchSpace) -> bool:
    domain = space.hardware.fabric.domain_size
    return cut.tp <= domain and cut.ep * cut.etp <= domain


def _cuts_long_sequences_alone(cut: Layout, space: SearchSpace) -> bool:
    return cut.cp == 1 or space.workload.seq_len >= _LONG_TOKENS


GUIDELINES = (
    Guideline(
        text="keep tensor and expert parallelism inside the fast domain",
        scope=GuidelineScope.DEGREES,
        is_followed=_stays_in_domain,
    ),
    Guideline(
        text="cut experts by EP before ETP",
        scope=GuidelineScope.DEGREES,
        is_followed=lambda cut, _: cut.etp == 1,
    ),
    Guideline(
        text="take context parallelism from 8K tokens on",
        scope=GuidelineScope.DEGREES,
        is_followed=_cuts_long_sequences_alone,
    ),
    Guideline(
        text="interleave the stages",
        scope=GuidelineScope.PIPELINE,
        is_followed=lambda shape, _: shape.pp == 1 or shape.vpp > 1,
    ),
    Guideline(
        text="recompute modules, not whole layers",
        scope=GuidelineScope.ACTIVATIONS,
        is_followed=lambda policy, _: Recompute.FULL not in policy.recompute,
    ),
    Guideline(
        text="recompute and split further before activations go to the host",
        scope=GuidelineScope.ACTIVATIONS,
        is_followed=lambda policy, _: set(policy.offload) <= {Offload.OPTIMIZER},
    ),
    Guideline(
        text="keep the optimizer on the device",
        scope=GuidelineScope.STATES,
        is_followed=lambda policy, _: Offload.OPTIMIZER not in policy.offload,
    ),
)
LEAST_PARALLELISM = "take the least model parallelism that fits"


def find_departures(layout: Layout, space: SearchSpace) -> tuple[Guideline, ...]:
    """Return the guidelines that a layout does not follow."""
    return tuple(guideline for guideline in GUIDELINES if not guideline.is_followed(layout, space))


def model_parallel_size(layout: Layout) -> int:
    """Return the ranks that hold one copy of the dense part of a model."""
    return layout.tp * layout.cp * layout.pp
