"""The best candidates seen so far, and what else a search has to remember."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
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
    """A layout with its seconds a step and device bytes by closed forms; at the end of a search the
    pipelines of those that are left have been run row by row.
    """

    layout: Layout
    step_s: float
    peak_bytes: float
    sd_bytes: float
    fits_surely: bool  # fits by more than the spread

    @property
    def ranking_s(self) -> float:
        """What it is ranked by."""
        return self.step_s * (1.0 if self.fits_surely else RESOLUTION)

    @property
    def degrees(self) -> tuple[int, ...]:
        """What tells plans apart at first sight; the rest is how well these are done."""
        one = self.layout
        return one.tp, one.cp, one.pp, one.ep, one.etp, one.mbs


LayerDegrees = tuple[int, int, int, int, int]


def layer_degrees(layout: Layout) -> LayerDegrees:
    """What tells groups apart."""
    return layout.tp, layout.cp, layout.ep, layout.etp, layout.mbs


class CandidatePool:
    """Collects scores. `keep` is how many different degrees, and how many candidates, must not be
    lost; `extra_bytes` how much more room is looked at too.
    """

    def __init__(
        self, space: SearchSpace, scout: Screener, *, keep: int, extra_bytes: tuple[float, ...]
    ) -> None:
        self._space, self._scout, self._keep = space, scout, keep
        self._limit = space.hardware.device.memory_bytes.value
        self._found: list[Candidate] = []
        self.below_s = np.inf
        self.scored = self.without_room = 0
        self.refused: Counter[str] = Counter()
        self.with_more: dict[float, Candidate] = {}
        self.by_overlap: dict[bool, Candidate] = {}
        self.usual: dict[Guideline, Candidate] = {}
        self.least_parallel: dict[int, Candidate] = {}
        self.least = 0  # ranks that the model must be cut over at least to fit; 0: nothing fits
        self._extra_bytes = extra_bytes

    @property
    def room_bytes(self) -> float:
        """Up to where time is worth pricing."""
        return self._limit + max(self._extra_bytes, default=0.0)

    def screen_all(self, cuts: Collection[LayerDegrees] | None = None) -> None:
        """Go through the whole space, or the groups of these cuts alone, and simulate what is
        left.
        """
        for group in degree_groups(self._space):
            if cuts is not None and layer_degrees(group.layout) not in cuts:
                continue
            for scores in self._scout.screen(
                group, room_bytes=self.room_bytes, below_s=self.below_s
            ):
                self.add_scores(scores)
        self._trim()
        self._found = [self._simulated(one) for one in self._found]
        self.with_more, self.by_overlap = (
            self._all_simulated(self.with_more),
            self._all_simulated(self.by_overlap),
        )
        self.usual, self.least_parallel = (
            self._all_simulated(self.usual),
            self._all_simulated(self.least_parallel),
        )

    def add_scores(self, scores: GroupScores) -> None:
        """Remember what is good of a group."""
        fits = scores.legal & (scores.peak_bytes <= self._limit + scores.sd_bytes)
        legal = int(np.count_nonzero(scores.legal))
        self.scored += legal
        self.without_room += legal - int(np.count_nonzero(fits))
        self._note_least(scores)
        usable = self._allowed(scores, np.isfinite(scores.step_s))
        if not usable.any():
            return
        firm = usable & (scores.peak_bytes < self._limit - scores.sd_bytes)
        for mask, ranked in ((firm, 1.0), (usable & fits & ~firm, RESOLUTION)):
            self._take_pipes(
                scores, np.where(mask, scores.step_s, np.inf), ranked, firm=ranked == 1.0
            )
        for extra in self._extra_bytes:
            roomy = usable & (scores.peak_bytes < self._limit + extra - scores.sd_bytes)
            self._keep_fastest(self.with_more, extra, scores, roomy)
        self._keep_fastest(self.by_overlap, Overlap.EP in scores.base.overlap, scores, firm)
        self._keep_usual(scores, firm)

    def _keep_usual(self, scores: GroupScores, firm: Array) -> None:
        """The fastest that keeps to each habit, and at the least model parallelism."""
        fastest = np.where(firm, scores.step_s, np.inf).min(initial=np.inf)
        for habit in GUIDELINES:
            if fastest < (self.usual[habit].step_s if habit in self.usual else np.inf):
                mask = habit.mask(
                    scores.base,
                    scores.pipelines.shapes,
                    self._scout.activation_policies,
                    self._scout.state_policies,
                    self._space,
                )
                self._keep_fastest(self.usual, habit, scores, firm & mask)
        parallel = self._parallel(scores)
        if self.least in parallel:
            self._keep_fastest(
                self.least_parallel,
                self.least,
                scores,
                firm & (parallel == self.least)[:, None, None],
            )

    def _note_least(self, scores: GroupScores) -> None:
        parallel = self._parallel(scores)
        few = np.flatnonzero(parallel < self.least) if self.least else np.arange(len(parallel))
        room = self._limit - scores.sd_bytes[few]
        fits = scores.legal[few] & (scores.peak_bytes[few] < room)
        fitting = parallel[few][fits.any(axis=(1, 2))]
        if len(fitting):
            self.least = int(fitting.min())

    def _parallel(self, scores: GroupScores) -> Array:
        """[pipelines] ranks that the model is cut over."""
        cut = scores.base.tp * scores.base.cp
        return np.array([cut * pipe.pp for pipe in scores.pipelines.shapes])

    def ranked(self) -> list[Candidate]:
        """The best of each set of degrees first, best first; then the others."""
        seen: set[tuple[int, ...]] = set()
        first: list[Candidate] = []
        rest: list[Candidate] = []
        for candidate in sorted(self._found, key=lambda one: one.ranking_s):
            (rest if candidate.degrees in seen else first).append(candidate)
            seen.add(candidate.degrees)
        return [*first, *rest]

    def _take_pipes(self, scores: GroupScores, steps: Array, factor: float, *, firm: bool) -> None:
        """The fastest way to run each pipeline."""
        flat = steps.reshape(len(steps), -1)
        places = flat.argmin(axis=1)
        fastest = flat[np.arange(len(flat)), places]
        for pipe in np.flatnonzero(fastest * factor < self.below_s):
            work, keep = np.unravel_index(places[pipe], steps.shape[1:])
            self._found.append(
                self._candidate(scores, (int(pipe), int(work), int(keep)), firm=firm)
            )
        if len(self._found) > 4 * self._keep:
            self._trim()

    def _trim(self) -> None:
        """Let go of all but the best, and the best of each of the best degrees."""
        kept: list[Candidate] = []
        seen: set[tuple[int, ...]] = set()
        for place, one in enumerate(sorted(self._found, key=lambda one: one.ranking_s)):
            new = one.degrees not in seen and len(seen) < self._keep
            if new or place < self._keep:
                kept.append(one)
                seen.add(one.degrees)
            if new and len(seen) == self._keep:
                self.below_s = min(self.below_s, one.ranking_s)
        self._found = kept

    def _all_simulated(self, table: dict[Key, Candidate]) -> dict[Key, Candidate]:
        return {key: self._simulated(one) for key, one in table.items()}

    def _simulated(self, one: Candidate) -> Candidate:
        return replace(one, step_s=one.step_s + self._scout.stall_s(one.layout))

    def _candidate(self, scores: GroupScores, place: tuple[int, ...], *, firm: bool) -> Candidate:
        return Candidate(
            layout=self._scout.layout(scores, *place),
            step_s=float(scores.step_s[place]),
            peak_bytes=float(scores.peak_bytes[place]),
            sd_bytes=float(scores.sd_bytes[place]),
            fits_surely=firm,
        )

    def _keep_fastest(
        self, table: dict[Key, Candidate], key: Key, scores: GroupScores, mask: Array
    ) -> None:
        steps = np.where(mask, scores.step_s, np.inf)
        place = np.unravel_index(int(steps.argmin()), steps.shape)
        if steps[place] < (table[key].step_s if key in table else np.inf):
            table[key] = self._candidate(scores, tuple(int(i) for i in place), firm=True)

    def _allowed(self, scores: GroupScores, mask: Array) -> Array:
        """Of the entries in `mask`, those that nothing speaks against."""
        if self._space.allowed is no_objections:
            return mask
        found = mask.copy()
        for place in np.argwhere(mask):
            reasons = self._space.allowed(self._scout.layout(scores, *place.tolist()))
            self.refused.update({reason.rule for reason in reasons})
            found[tuple(place)] = not reasons
        return found
