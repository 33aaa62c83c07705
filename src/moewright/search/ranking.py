"""What candidates are ranked by, the best of them side by side, and those that somebody ran.

Layouts whose combination of choices somebody ran on the part: the mask of a group's candidates. A
run proves a layout where it made all its choices, so that it holds those of the degrees, of the
pipeline and of both policies: whether it does is worked out for each of the four by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.evidence import (
    error_covariance,
    expected_optimism,
    find_simplest,
    job_choices,
    layout_choices,
    read_measured_choices,
    step_bound,
)
from moewright.cost.stage_parts import Array
from moewright.search.candidates import PICKED_FROM, Candidate, CandidateWish
from moewright.search.screening import BoundedGroup, GroupScores, Screener, with_dp_overlap
from moewright.search.space import PipelineShapes, SearchSpace, with_pipeline, without_policies
from moewright.spec.layout import Layout
from moewright.spec.plan import Estimate, Plan, RankedLayout, RankingRule


def is_safe(estimate: Estimate, rule: RankingRule) -> bool:
    """Return whether a layout fits with the probability that the rule asks for."""
    return estimate.fit_probability >= rule.fit_probability


def bound_s(estimate: Estimate, rule: RankingRule) -> float:
    """Return the seconds by which an estimate is ranked."""
    return float(step_bound(estimate.step_s, estimate.step_sd, rule.risk))


def to_ranked_layout(plan: Plan, rule: RankingRule) -> RankedLayout:
    """Return a plan in short, as the plan that was chosen over it lists it."""
    estimate = plan.estimate
    return RankedLayout(
        layout=plan.layout,
        step_s=estimate.step_s,
        step_bound_s=bound_s(estimate, rule),
        peak_bytes=estimate.peak_bytes,
        fit_probability=estimate.fit_probability,
        grade=estimate.evidence.grade,
    )


class NearBest:
    """The candidates that a plan may be picked from, the best first, with their choices.

    Where nobody published runs of a kind of device, as of CPUs, no choice lacks evidence.
    """

    def __init__(self, space: SearchSpace, candidates: Sequence[Candidate]) -> None:
        self._candidates = tuple(candidates[:PICKED_FROM])
        self._hardware = space.hardware
        of_job = tuple(job_choices(space.model, space.workload, space.hardware))
        self._alike = read_measured_choices().select_alike(of_job)
        self._of_layouts = [
            tuple(layout_choices(candidate.layout, space.hardware))
            for candidate in self._candidates
        ]
        self._choices = [(*of_job, *names) for names in self._of_layouts]
        self._unproven: list[tuple[str, ...]] = [() for _ in self._candidates]
        if space.hardware.device.kind.is_accelerator:
            measured = read_measured_choices()
            self._unproven = [measured.support(names).formula for names in self._choices]

    def put_simplest_first(self, ranked: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Return candidates with the simplest of those that tie with the best in front.

        `ranked` are these and others, best first.
        """
        if not self._candidates:
            return ()
        burdens = [
            len(names) + len(missing)
            for names, missing in zip(self._of_layouts, self._unproven, strict=True)
        ]
        bounds_s = [candidate.bound_s for candidate in self._candidates]
        first = self._candidates[find_simplest(bounds_s, self._choices, burdens)]
        return first, *(candidate for candidate in ranked if candidate is not first)

    def optimism(self) -> float:
        """Return how far the step of the pick lies above its prediction, in logarithms."""
        return self._optimism(range(len(self._candidates)))

    def optimism_of_proven(self) -> float:
        """Return that of the best of the candidates that published runs on the part prove."""
        return self._optimism(
            [place for place, names in enumerate(self._of_layouts) if self._alike.count_runs(names)]
        )

    def _optimism(self, places: Sequence[int]) -> float:
        if not places:
            return 0.0
        steps_s = [self._candidates[place].step_s for place in places]
        return expected_optimism(steps_s, self._covariance(places))

    def _covariance(self, places: Sequence[int]) -> Array:
        return error_covariance(
            [self._choices[place] for place in places],
            [self._unproven[place] for place in places],
            Constants(self._hardware),
        )


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
        # A run proves a layout where it made the choices of all parts at once.
        counts = np.einsum("pr,ar,sr->pas", degrees, self._activations, self._states)
        return np.asarray(counts > 0)

    def _holders(self, layouts: Iterable[Layout]) -> Array:
        """Return 1 where a run made all choices of a layout, [layouts, runs]."""
        sets = [set(layout_choices(layout, self._space.hardware)) for layout in layouts]
        rows = [[float(made.issuperset(names)) for made in self._runs] for names in sets]
        return np.array(rows).reshape(len(sets), len(self._runs))
