"""The best candidates of a search side by side: the simplest, and how far a pick deceives."""

from __future__ import annotations

from collections.abc import Sequence

from moewright.cost.constants import Constants
from moewright.cost.evidence import job_choices, layout_choices, read_measured_choices
from moewright.cost.selection import error_covariance, expected_optimism, find_simplest
from moewright.cost.stage_parts import Array
from moewright.search.candidates import Candidate
from moewright.search.space import SearchSpace


class NearBest:
    """The best candidates of a space, the best first, with the choices of each.

    Where nobody published runs of a kind of device, as of CPUs, no choice lacks evidence.
    """

    def __init__(self, space: SearchSpace, candidates: Sequence[Candidate]) -> None:
        self._candidates = tuple(candidates)
        self._hardware = space.hardware
        of_job = tuple(job_choices(space.model, space.workload, space.hardware))
        self._alike = read_measured_choices().select_alike(of_job)
        self._of_layouts = [
            tuple(layout_choices(candidate.layout, space.hardware)) for candidate in candidates
        ]
        self._choices = [(*of_job, *names) for names in self._of_layouts]
        self._unproven: list[tuple[str, ...]] = [() for _ in candidates]
        if space.hardware.device.kind.is_accelerator:
            measured = read_measured_choices()
            self._unproven = [measured.support(names).formula for names in self._choices]

    def put_simplest_first(self) -> tuple[Candidate, ...]:
        """Return the candidates with the simplest of those that tie with the best in front."""
        if not self._candidates:
            return ()
        burdens = [
            len(names) + len(missing)
            for names, missing in zip(self._of_layouts, self._unproven, strict=True)
        ]
        bounds_s = [candidate.bound_s for candidate in self._candidates]
        first = self._candidates[find_simplest(bounds_s, self._choices, burdens)]
        return first, *(candidate for candidate in self._candidates if candidate is not first)

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
