"""The pool of the best candidates that a search has seen, and what it counts on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from moewright.cost.stage_parts import Array
from moewright.search.heuristics import GUIDELINES, Guideline
from moewright.search.screening import GroupScores, Screener
from moewright.search.space import SearchSpace, degree_groups, no_objections
from moewright.spec.layout import Layout, Overlap

# Predictions closer than this do not order two plans (docs/findings.md 4), so a plan that may not
# fit has to be that much faster to come before one that fits.
RESOLUTION = 1.05

Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout with its seconds a step, its device bytes and their standard deviation.

    During a search `step_s` takes the bubble from a closed form; at the end of the search it is
    replaced, for the candidates that are left, by that of the simulated timetable.
    """

    layout: Layout
    step_s: float
    peak_bytes: float
    sd_bytes: float
    fits_surely: bool  # with more than a standard deviation to spare

    @property
    def ranking_s(self) -> float:
        """Return the seconds by which the candidate is ranked: more than a step's if it may OOM."""
        return self.step_s * (1.0 if self.fits_surely else RESOLUTION)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Return the degrees and micro-batch size, of which a ranking shows each set once.

        Layouts that share them differ in how memory and communication are handled.
        """
        layout = self.layout
        return layout.tp, layout.cp, layout.pp, layout.ep, layout.etp, layout.mbs


LayerDegrees = tuple[int, int, int, int, int]


def layer_degrees(layout: Layout) -> LayerDegrees:
    """Return the key of a layout's DegreeGroup: (tp, cp, ep, etp, mbs)."""
    return layout.tp, layout.cp, layout.ep, layout.etp, layout.mbs


class CandidatePool:
    """The best candidates of a space so far, with counts and the best under other conditions.

    The pool keeps at least the `keep` best candidates, and the best candidate of each of the `keep`
    best sets of degrees. `extra_bytes` are amounts of additional device memory, for each of which
    the fastest candidate that would fit is kept too.
    """

    def __init__(
        self, space: SearchSpace, screener: Screener, *, keep: int, extra_bytes: tuple[float, ...]
    ) -> None:
        self._space = space
        self._screener = screener
        self._keep = keep
        self._limit = space.hardware.device.memory_bytes.value
        self._candidates: list[Candidate] = []
        self._extra_bytes = extra_bytes
        self.below_s = np.inf  # a slower candidate cannot be among those that are kept
        self.scored = 0  # legal layouts
        self.without_room = 0  # of them, those that do not fit
        self.refused: Counter[str] = Counter()  # layouts by the rule of the space's objections
        self.with_more: dict[float, Candidate] = {}  # fastest, by bytes of additional memory
        self.by_overlap: dict[bool, Candidate] = {}  # fastest, by whether EP communication overlaps
        self.usual: dict[Guideline, Candidate] = {}  # fastest that follows each guideline
        self.least_parallel: dict[int, Candidate] = {}  # fastest, by tp x cp x pp when it was least
        self.least = 0  # smallest tp x cp x pp that surely fits; 0: nothing fits

    @property
    def room_bytes(self) -> float:
        """Return the bytes up to which a layout's time is worth pricing."""
        return self._limit + max(self._extra_bytes, default=0.0)

    def screen_all(self, degrees: Collection[LayerDegrees] | None = None) -> None:
        """Screen the whole space, or the groups of `degrees`, and simulate what is left."""
        for group in degree_groups(self._space):
            if degrees is not None and layer_degrees(group.layout) not in degrees:
                continue
            for scores in self._screener.screen(
                group, room_bytes=self.room_bytes, below_s=self.below_s
            ):
                self.add_scores(scores)
        self._trim()
        self._candidates = [self._simulate(candidate) for candidate in self._candidates]
        self.with_more = self._simulate_all(self.with_more)
        self.by_overlap = self._simulate_all(self.by_overlap)
        self.usual = self._simulate_all(self.usual)
        self.least_parallel = self._simulate_all(self.least_parallel)

    def add_scores(self, scores: GroupScores) -> None:
        """Count the candidates of a group, and keep its best ones."""
        fits = scores.legal & (scores.peak_bytes <= self._limit + scores.sd_bytes)
        legal = int(np.count_nonzero(scores.legal))
        self.scored += legal
        self.without_room += legal - int(np.count_nonzero(fits))
        self._note_least(scores)
        usable = self._without_objections(scores, np.isfinite(scores.step_s))
        if not usable.any():
            return
        fits_surely = usable & (scores.peak_bytes < self._limit - scores.sd_bytes)
        may_fit = usable & fits & ~fits_surely
        self._add_pipelines(scores, np.where(fits_surely, scores.step_s, np.inf), fits_surely=True)
        self._add_pipelines(scores, np.where(may_fit, scores.step_s, np.inf), fits_surely=False)
        for extra in self._extra_bytes:
            has_room = usable & (scores.peak_bytes < self._limit + extra - scores.sd_bytes)
            self._keep_fastest(self.with_more, extra, scores, has_room)
        overlaps = Overlap.EP in scores.base.overlap
        self._keep_fastest(self.by_overlap, overlaps, scores, fits_surely)
        self._keep_usual(scores, fits_surely)

    def _keep_usual(self, scores: GroupScores, mask: Array) -> None:
        """Keep the fastest in `mask` under each guideline, and at the least model parallelism."""
        fastest = np.where(mask, scores.step_s, np.inf).min(initial=np.inf)
        for guideline in GUIDELINES:
            if fastest < _step_s(self.usual, guideline):
                follows = guideline.mask(
                    scores.base,
                    scores.pipelines.shapes,
                    self._screener.activation_policies,
                    self._screener.state_policies,
                    self._space,
                )
                self._keep_fastest(self.usual, guideline, scores, mask & follows)
        parallel = self._model_parallel_sizes(scores)
        if self.least in parallel:
            is_least = (parallel == self.least)[:, None, None]
            self._keep_fastest(self.least_parallel, self.least, scores, mask & is_least)

    def _note_least(self, scores: GroupScores) -> None:
        """Lower `least` where a group fits with less model parallelism than any before."""
        parallel = self._model_parallel_sizes(scores)
        fewer = np.arange(len(parallel))
        if self.least:
            fewer = np.flatnonzero(parallel < self.least)
        room = self._limit - scores.sd_bytes[fewer]
        fits = scores.legal[fewer] & (scores.peak_bytes[fewer] < room)
        fitting = parallel[fewer][fits.any(axis=(1, 2))]
        if len(fitting):
            self.least = int(fitting.min())

    def _model_parallel_sizes(self, scores: GroupScores) -> Array:
        """Return the model parallelism tp x cp x pp of each pipeline [pipelines]."""
        cut = scores.base.tp * scores.base.cp
        return np.array([cut * shape.pp for shape in scores.pipelines.shapes])

    def ranked(self) -> list[Candidate]:
        """Return the best of each set of degrees first, best first; then the others."""
        seen: set[tuple[int, ...]] = set()
        first: list[Candidate] = []
        rest: list[Candidate] = []
        for candidate in sorted(self._candidates, key=_ranking_s):
            if candidate.degrees in seen:
                rest.append(candidate)
            else:
                first.append(candidate)
            seen.add(candidate.degrees)
        return [*first, *rest]

    def _add_pipelines(self, scores: GroupScores, steps: Array, *, fits_surely: bool) -> None:
        """Add the fastest way to run each pipeline."""
        flat = steps.reshape(len(steps), -1)
        places = flat.argmin(axis=1)
        fastest = flat[np.arange(len(flat)), places]
        factor = 1.0 if fits_surely else RESOLUTION
        for pipeline in np.flatnonzero(fastest * factor < self.below_s):
            activations, states = np.unravel_index(places[pipeline], steps.shape[1:])
            place = int(pipeline), int(activations), int(states)
            self._candidates.append(self._candidate(scores, place, fits_surely=fits_surely))
        if len(self._candidates) > 4 * self._keep:
            self._trim()

    def _trim(self) -> None:
        """Drop all but the `keep` best, and the best of each of the `keep` best sets of degrees.

        Once there are `keep` sets of degrees, `below_s` becomes the time of the slowest of them.
        """
        kept: list[Candidate] = []
        seen: set[tuple[int, ...]] = set()
        for place, candidate in enumerate(sorted(self._candidates, key=_ranking_s)):
            is_new = candidate.degrees not in seen and len(seen) < self._keep
            if is_new or place < self._keep:
                kept.append(candidate)
                seen.add(candidate.degrees)
            if is_new and len(seen) == self._keep:
                self.below_s = min(self.below_s, candidate.ranking_s)
        self._candidates = kept

    def _simulate_all(self, table: dict[Key, Candidate]) -> dict[Key, Candidate]:
        return {key: self._simulate(candidate) for key, candidate in table.items()}

    def _simulate(self, candidate: Candidate) -> Candidate:
        stall_s = self._screener.stall_s(candidate.layout)
        return replace(candidate, step_s=candidate.step_s + stall_s)

    def _candidate(
        self, scores: GroupScores, place: tuple[int, ...], *, fits_surely: bool
    ) -> Candidate:
        """Return the candidate at indices (pipeline, activation policy, state policy)."""
        return Candidate(
            layout=self._screener.layout(scores, *place),
            step_s=float(scores.step_s[place]),
            peak_bytes=float(scores.peak_bytes[place]),
            sd_bytes=float(scores.sd_bytes[place]),
            fits_surely=fits_surely,
        )

    def _keep_fastest(
        self, table: dict[Key, Candidate], key: Key, scores: GroupScores, mask: Array
    ) -> None:
        """Put the fastest candidate in `mask` into `table[key]` if it beats the one there."""
        steps = np.where(mask, scores.step_s, np.inf)
        place = np.unravel_index(int(steps.argmin()), steps.shape)
        if steps[place] < _step_s(table, key):
            indices = tuple(int(index) for index in place)
            table[key] = self._candidate(scores, indices, fits_surely=True)

    def _without_objections(self, scores: GroupScores, mask: Array) -> Array:
        """Return `mask` without the layouts that the space's `allowed` objects to.

        Objections are counted in `refused`.
        """
        if self._space.allowed is no_objections:
            return mask
        allowed = mask.copy()
        for place in np.argwhere(mask):
            reasons = self._space.allowed(self._screener.layout(scores, *place.tolist()))
            self.refused.update({reason.rule for reason in reasons})
            allowed[tuple(place)] = not reasons
        return allowed


def _ranking_s(candidate: Candidate) -> float:
    return candidate.ranking_s


def _step_s(table: Mapping[Key, Candidate], key: Key) -> float:
    """Return the seconds of a table's candidate; infinite where it has none."""
    return table[key].step_s if key in table else np.inf
