"""Layouts whose combination of choices somebody ran on the part: the mask of a group's candidates.

A run proves a layout where it made all its choices, so that it holds those of the degrees, of the
pipeline and of both policies: whether it does is worked out for each of the four by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from moewright.cost.evidence import job_choices, layout_choices, read_measured_choices
from moewright.cost.stage_parts import Array
from moewright.search.candidates import CandidateWish
from moewright.search.screening import BoundedGroup, GroupScores, Screener, with_dp_overlap
from moewright.search.space import PipelineShapes, SearchSpace, with_pipeline, without_policies
from moewright.spec.layout import Layout


class ProvenChoices:
    """A finder of the candidates of one space that published runs on the part prove."""

    def __init__(self, space: SearchSpace, screener: Screener) -> None:
        self._space = space
        of_job = job_choices(space.model, space.workload, space.hardware)
        self._runs = [made for made, _ in read_measured_choices().select_alike(of_job).runs]
        alone = Layout(world_size=1)
        self._activations = self._holders(
            policy.apply_to(alone) for policy in screener.activation_policies
        )
        self._states = self._holders(
            replace(alone, zero=policy.zero, offload=policy.offload)
            for policy in screener.state_policies
        )
        self._pipelines: dict[PipelineShapes, Array] = {}

    def wish(self) -> CandidateWish:
        """Return the wish for a candidate that a run proves."""
        return CandidateWish(mask=self._mask, may_hold=self._may_hold)

    def _may_hold(self, bounded: BoundedGroup) -> bool:
        return bool(self._holders([without_policies(bounded.base)]).any())

    def _mask(self, scores: GroupScores) -> Array:
        """Return the mask [pipelines, activation policies, state policies]."""
        base = without_policies(scores.base)
        plain, overlapped = (
            self._mask_under(cut, scores.pipelines) for cut in (base, with_dp_overlap(base))
        )
        return np.where(scores.dp_overlap, overlapped, plain)

    def _mask_under(self, cut: Layout, pipelines: PipelineShapes) -> Array:
        if pipelines not in self._pipelines:
            self._pipelines[pipelines] = self._holders(
                with_pipeline(
                    Layout(world_size=shape.pp, vpp_group=self._space.base.vpp_group),
                    shape,
                    self._space,
                )
                for shape in pipelines.shapes
            )
        degrees = self._pipelines[pipelines] * self._holders([cut])
        counts = np.einsum("pr,ar,sr->pas", degrees, self._activations, self._states)
        return np.asarray(counts > 0)

    def _holders(self, layouts: Iterable[Layout]) -> Array:
        """Return 1 where a run made all choices of a layout, [layouts, runs]."""
        sets = [set(layout_choices(layout, self._space.hardware)) for layout in layouts]
        rows = [[float(made.issuperset(names)) for made in self._runs] for names in sets]
        return np.array(rows).reshape(len(sets), len(self._runs))
