"""How far the bounds of a group's candidates lie above their predicted steps.

Counts equal those of an estimate's evidence: pairs of choices are counted within and between the
parts of a layout that vary apart (degrees, pipeline, activation policy, state policy).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.evidence import (
    choice_distance,
    job_choices,
    layout_choices,
    own_run_factor,
    read_measured_choices,
    step_bound,
    step_deviation,
)
from moewright.cost.memory.activations import ActivationPolicy
from moewright.cost.stage_parts import Array
from moewright.search.space import (
    PipelineShapes,
    SearchSpace,
    StatePolicy,
    with_pipeline,
    without_policies,
)
from moewright.spec.layout import Layout
from moewright.spec.record import copy_with

Place = tuple[slice | None, ...]  # where the rows of a block stand among three axes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChoiceRows:
    """Sets of choices as rows.

    `made` [rows, measured choices] is 1 where a set holds a choice that runs made; `missing` [rows]
    counts the choices of a set that no run made. `length` [rows] is the distance of a set from an
    empty one (cost.own_runs), `shared` [rows, own runs] that of the choices that one's own runs
    made too.
    """

    made: Array
    missing: Array
    length: Array
    shared: Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyFactors:
    """The factors of bounds over steps, which pipelines of the same choices share.

    `of_class` broadcasts to [classes, activation policies, state policies]; it is of the bound over
    the seconds that constants predict, and `own` of the step, which own runs move (cost.own_runs).
    `class_of_pipeline` [pipelines] are indices of classes.
    """

    of_class: Array
    own: Array
    class_of_pipeline: Array

    def spread(self) -> Array:
        """Return the factors [pipelines, activation policies, state policies], to broadcast."""
        return np.asarray(self.of_class[self.class_of_pipeline])

    def spread_own(self) -> Array:
        """Return `own` likewise."""
        return np.asarray(self.own[self.class_of_pipeline])

    def least_by_pipeline(self) -> Array:
        """Return the least factor of each pipeline [pipelines]."""
        return np.asarray(self.of_class.min(axis=(1, 2))[self.class_of_pipeline])


class ScreeningRisk:
    """A calculator of the factors by which bounds exceed predicted steps in one space."""

    def __init__(
        self,
        space: SearchSpace,
        constants: Constants,
        activations: Sequence[ActivationPolicy],
        states: Sequence[StatePolicy],
        risk: float,
    ) -> None:
        self._space, self._constants, self._risk = space, constants, risk
        self._counts_evidence = space.hardware.device.kind.is_accelerator
        self._own_runs = space.hardware.own_runs
        self._own_choices = [frozenset(run.choices) for run in self._own_runs]
        if not self._counts_evidence and not self._own_runs:
            return
        measured = read_measured_choices()
        self._column = {name: column for column, name in enumerate(measured.list_names())}
        self._apart = measured.tabulate_missing_pairs()
        alone = Layout(world_size=1)
        self._job = frozenset(job_choices(space.model, space.workload, space.hardware))
        self._activations = self._encode(
            self._names(policy.apply_to(alone)) for policy in activations
        )
        self._states = self._encode(
            self._names(copy_with(alone, zero=policy.zero, offload=policy.offload))
            for policy in states
        )
        self._classes: dict[PipelineShapes, tuple[ChoiceRows, Array]] = {}
        self._factors: dict[tuple[PipelineShapes, frozenset[str]], PolicyFactors] = {}

    def factors(self, base: Layout, pipelines: PipelineShapes) -> PolicyFactors:
        """Return bound over step of a group's candidates."""
        if not self._counts_evidence and not self._own_runs:
            return PolicyFactors(
                of_class=np.full((1, 1, 1), step_bound(1.0, self._deviation(0, 0), self._risk)),
                own=np.ones((1, 1, 1)),
                class_of_pipeline=np.zeros(len(pipelines.shapes), dtype=int),
            )
        names = self._names(without_policies(base))
        key = pipelines, names
        if key not in self._factors:
            self._factors[key] = self._count(names, pipelines)
        return self._factors[key]

    def _count(self, names: frozenset[str], pipelines: PipelineShapes) -> PolicyFactors:
        if pipelines not in self._classes:
            self._classes[pipelines] = self._classify(pipelines)
        classes, class_of_pipeline = self._classes[pipelines]
        group = self._encode([self._job | names])
        blocks: tuple[tuple[ChoiceRows, Place], ...] = (
            (classes, (slice(None), None, None)),
            (self._activations, (None, slice(None), None)),
            (self._states, (None, None, slice(None))),
        )
        missing: Array = group.missing[0]
        # Half: the table is symmetric, so that each pair within a set counts twice.
        pairs: Array = 0.5 * (group.made @ self._apart @ group.made.T)[0, 0]
        for rows, place in blocks:
            within = 0.5 * np.einsum("ij,ij->i", rows.made @ self._apart, rows.made)
            with_group = rows.made @ self._apart @ group.made[0]
            missing = missing + rows.missing[place]
            pairs = pairs + (within + with_group)[place]
        shape = {0: (slice(None), slice(None), None), 1: (slice(None), None, slice(None))}
        between = classes.made @ self._apart
        pairs = pairs + (between @ self._activations.made.T)[shape[0]]
        pairs = pairs + (between @ self._states.made.T)[shape[1]]
        pairs = pairs + (self._activations.made @ self._apart @ self._states.made.T)[None]
        deviation = self._deviation(missing, pairs)
        if not self._counts_evidence:
            # Times 0 for the shape alone.
            deviation = self._deviation(0 * missing, 0)
        own = self._own_factors(group, blocks)
        return PolicyFactors(
            of_class=own * step_bound(1.0, deviation, self._risk),
            own=own,
            class_of_pipeline=class_of_pipeline,
        )

    def _own_factors(self, group: ChoiceRows, blocks: Sequence[tuple[ChoiceRows, Place]]) -> Array:
        """Return what own runs make of a group's steps, to broadcast as `of_class`.

        The choices of a layout are those of its group and of a row of each block, none in two.
        """
        classes, _ = blocks[0]
        if not self._own_runs:
            return np.ones((len(classes.length), 1, 1))
        length: Array = group.length[0]
        shared: Array = group.shared[0]
        for rows, place in blocks:
            length = length + rows.length[place]
            shared = shared + rows.shared[place]
        of_runs = np.array([choice_distance(choices) for choices in self._own_choices])
        # The size of a symmetric difference: |A| + |B| - 2 |A and B|.
        return own_run_factor(self._own_runs, length[..., None] + of_runs - 2 * shared)

    def _deviation(self, missing: Array | int, pairs: Array | int) -> Array:
        return step_deviation(self._constants, missing, pairs)

    def _classify(self, pipelines: PipelineShapes) -> tuple[ChoiceRows, Array]:
        """Return the distinct choices of pipelines, and the index of the class of each."""
        names = []
        for shape in pipelines.shapes:
            alone = Layout(world_size=shape.pp, vpp_group=self._space.base.vpp_group)
            names.append(self._names(with_pipeline(alone, shape, self._space)))
        classes = list(dict.fromkeys(names))
        return self._encode(classes), np.array([classes.index(choices) for choices in names])

    def _names(self, layout: Layout) -> frozenset[str]:
        return frozenset(layout_choices(layout, self._space.hardware))

    def _encode(self, sets: Iterable[Iterable[str]]) -> ChoiceRows:
        rows = [list(names) for names in sets]
        made = np.zeros((len(rows), len(self._column)))
        missing = np.zeros(len(rows))
        for place, names in enumerate(rows):
            columns = [self._column[name] for name in names if name in self._column]
            made[place, columns] = 1
            missing[place] = len(names) - len(columns)
        return ChoiceRows(
            made=made,
            missing=missing,
            length=np.array([choice_distance(set(names)) for names in rows], dtype=float),
            shared=np.array(
                [
                    [choice_distance(own.intersection(names)) for own in self._own_choices]
                    for names in rows
                ],
                dtype=float,
            ).reshape(len(rows), len(self._own_choices)),
        )
