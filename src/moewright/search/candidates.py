"""The pool of the best candidates that a search has seen, and what it counts on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import numpy as np

from moewright.cost.evidence import fit_probability
from moewright.cost.stage_parts import Array
from moewright.search.heuristics import GUIDELINES, Guideline
from moewright.search.screening import BoundedGroup, GroupScores, Screener
from moewright.search.space import PipelineShape, SearchSpace, degree_groups, no_objections
from moewright.spec.layout import Layout, Overlap

# The candidates among which the first plan is picked, and from which its optimism follows: the same
# ones however many are shown.
PICKED_FROM = 18
_GAMBLES = 8  # kept of the layouts that may not fit

Key = TypeVar("Key")
CandidateMask = Callable[[GroupScores], Array]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout with its seconds a step, its device bytes and their standard deviation.

    During a search `step_s` takes the bubble from a closed form; at the end of the search it is
    replaced, for the candidates that are left, by that of the simulated timetable. `bound_s` is
    what candidates are ranked by (RankingRule), `uncovered_s` as in GroupScores.
    """

    layout: Layout
    step_s: float
    bound_s: float
    uncovered_s: float
    peak_bytes: float
    sd_bytes: float
    is_safe: bool

    @property
    def degrees(self) -> tuple[int, ...]:
        """Return the degrees and micro-batch size, of which a ranking shows each set once.

        Layouts that share them differ in how memory and communication are handled.
        """
        layout = self.layout
        return layout.tp, layout.cp, layout.pp, layout.ep, layout.etp, layout.mbs

    def fit_probability(self, capacity_bytes: float) -> float:
        """Return the probability that the layout fits devices of that memory."""
        return fit_probability(capacity_bytes - self.peak_bytes, self.sd_bytes)


LayerDegrees = tuple[int, int, int, int, int]


def layer_degrees(layout: Layout) -> LayerDegrees:
    """Return the key of a layout's DegreeGroup: (tp, cp, ep, etp, mbs)."""
    return layout.tp, layout.cp, layout.ep, layout.etp, layout.mbs


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateWish:
    """Candidates of which the best is wanted: those in a mask of a group's scores.

    `may_hold` tells whether the mask can hold a candidate of a group.
    """

    mask: CandidateMask
    may_hold: Callable[[BoundedGroup], bool]


class CandidatePool:
    """The best candidates of a space so far, with counts and the best under other conditions.

    The pool keeps at least the `keep` best safe candidates, and the best candidate of each of the
    `keep` best sets of degrees. Those of the `picked_from` best, by closed forms, are the ones of
    which a plan is picked: the same ones however many more are kept. `extra_bytes` are amounts of
    additional device memory, for each of which the best candidates that would be safe are kept too;
    so is the best of those that `wish` asks for.
    """

    def __init__(
        self,
        space: SearchSpace,
        screener: Screener,
        *,
        keep: int,
        picked_from: int = PICKED_FROM,
        extra_bytes: tuple[float, ...] = (),
        wish: CandidateWish | None = None,
    ) -> None:
        self._space = space
        self._screener = screener
        self._keep = keep
        self._picked_from = min(picked_from, keep)
        self._limit = space.hardware.device.memory_bytes.value
        self._candidates: list[Candidate] = []
        self._picked: list[Candidate] = []
        self._gambles: list[Candidate] = []
        self._extra_bytes = extra_bytes
        self._wish = wish
        self._wished: Candidate | None = None  # before simulation
        self._groups: list[BoundedGroup] = []
        self.below_s = np.inf  # a candidate with a higher bound cannot be among those kept
        self.picked_below_s = np.inf  # likewise among those that a plan is picked from
        self.scored = 0  # legal layouts
        self.without_host_room = 0  # of these, those whose states host memory does not hold
        self.without_room = 0  # of those whose bytes were worked out, those that do not fit
        self.refused: Counter[str] = Counter()  # layouts by the rule of the space's objections
        self.with_more: dict[float, Candidate] = {}  # least bound, by bytes of additional memory
        self.fastest_with_more: dict[float, Candidate] = {}  # least step, likewise
        self.by_overlap: dict[bool, Candidate] = {}  # best, by whether EP communication overlaps
        self.usual: dict[Guideline, Candidate] = {}  # best that follows each guideline
        self.least = 0  # smallest tp x cp x pp that is safe; 0: nothing is
        # Where nothing is safe, the candidate that lacks the fewest bytes; its time is not priced.
        self.nearest_miss: Candidate | None = None

    @property
    def room_bytes(self) -> float:
        """Return the bytes up to which a layout's time is worth pricing."""
        return self._limit + max(self._extra_bytes, default=0.0)

    def screen_all(self, degrees: Collection[LayerDegrees] | None = None) -> None:
        """Screen the whole space, or the groups of `degrees`, and simulate what is left.

        Groups with the lowest floor come first, so that later ones need not be scored.
        """
        for group in degree_groups(self._space):
            if degrees is None or layer_degrees(group.layout) in degrees:
                self._groups += self._screener.bound(group)
        # The overlaps of a group in a row: the screener keeps the memory of the last group alone.
        for _, bounded_groups in groupby(self._order_groups(), key=lambda item: id(item.group)):
            self._screen_group(bounded_groups)
        # Before the last trim lowers `below_s`, by which groups that were scored are told apart.
        self._note_unscored_least()
        self._trim()
        picked, self.picked_below_s = select_best(self._candidates, self._picked_from)
        simulated = {id(candidate): self._simulate(candidate) for candidate in self._candidates}
        self._picked = [simulated[id(candidate)] for candidate in picked]
        self._candidates = list(simulated.values())
        self._gambles = [self._simulate(candidate) for candidate in self._gambles]
        self.with_more = self._simulate_all(self.with_more)
        self.fastest_with_more = self._simulate_all(self.fastest_with_more)
        self.by_overlap = self._simulate_all(self.by_overlap)
        self.usual = self._simulate_all(self.usual)

    def _order_groups(self) -> list[BoundedGroup]:
        """Return the groups by the lowest floor of their overlaps, which stay neighbours."""
        floors: dict[int, float] = {}
        for bounded in self._groups:
            key = id(bounded.group)
            floors[key] = min(floors.get(key, np.inf), bounded.floor_bound_s)
        return sorted(self._groups, key=lambda bounded: floors[id(bounded.group)])

    def _screen_group(self, bounded_groups: Iterable[BoundedGroup]) -> None:
        """Score a group under each overlap of expert communication that may be fast enough."""
        for bounded in bounded_groups:
            self.scored += bounded.legal_count
            if self._screener.lacks_room(bounded, self.room_bytes):
                self.without_room += bounded.legal_count
                continue
            scores = self._score(bounded)
            if scores is not None:
                self.add_scores(scores)

    def _score(self, bounded: BoundedGroup) -> GroupScores | None:
        """Return the scores of a group that may be fast enough."""
        return self._screener.score(bounded, room_bytes=self.room_bytes, below_s=self.below_s)

    def add_scores(self, scores: GroupScores) -> None:
        """Count the candidates of a group, and keep its best ones."""
        # Within one deviation the verdict of an estimate is uncertain (cost.memory.peak).
        may_fit = scores.legal & (scores.peak_bytes <= self._limit + scores.sd_bytes)
        is_safe = scores.legal & (scores.peak_bytes <= self._screener.safe_bytes(scores.sd_bytes))
        # Infinite bytes stand for states that host memory does not hold (screening_memory).
        overflows = scores.legal & np.isinf(scores.peak_bytes)
        self.without_host_room += int(np.count_nonzero(overflows))
        self.without_room += int(np.count_nonzero(scores.legal & ~may_fit & ~overflows))
        self._note_least(scores, is_safe)
        self._note_nearest_miss(scores)
        usable = self._without_objections(scores, np.isfinite(scores.step_s))
        if not usable.any():
            return
        self._add_pipelines(scores, usable & is_safe)
        self._add_gambles(scores, usable & may_fit & ~is_safe)
        for extra in self._extra_bytes:
            has_room = usable & (
                scores.peak_bytes <= self._screener.safe_bytes(scores.sd_bytes, extra)
            )
            self._keep_best(self.with_more, extra, scores, has_room, scores.bound_s)
            self._keep_best(self.fastest_with_more, extra, scores, has_room, scores.step_s)
        safe = usable & is_safe
        overlaps = Overlap.EP in scores.base.overlap
        self._keep_best(self.by_overlap, overlaps, scores, safe, scores.bound_s)
        least_s = np.where(safe, scores.bound_s, np.inf).min(initial=np.inf)
        self._note_wished(scores, safe, least_s)
        for guideline in GUIDELINES:
            if guideline not in self.usual or least_s < self.usual[guideline].bound_s:
                follows = safe & self.follows(guideline, scores)
                self._keep_best(self.usual, guideline, scores, follows, scores.bound_s)

    def _note_wished(self, scores: GroupScores, safe: Array, least_s: float) -> None:
        """Keep the best candidate that the pool's wish asks for, where a group may have it."""
        if self._wish is None or (self._wished is not None and self._wished.bound_s <= least_s):
            return
        bounds = np.where(safe & self._wish.mask(scores), scores.bound_s, np.inf)
        place = tuple(map(int, np.unravel_index(int(bounds.argmin()), bounds.shape)))
        known_s = np.inf if self._wished is None else self._wished.bound_s
        if bounds[place] < known_s:
            self._wished = self._candidate(scores, place)

    def find_wished(self, *, below_s: float) -> Candidate | None:
        """Return the best safe candidate of the pool's wish; None where no bound is below that.

        All below `self.below_s` were scored on the way, so that the best of those was noted.
        """
        noted = self._wished
        if self._wish is None or (noted is not None and noted.bound_s <= self.below_s):
            return None if noted is None or noted.bound_s >= below_s else self._simulate(noted)
        limit_s = below_s if noted is None else min(below_s, noted.bound_s)
        (better,) = self.find_each([self._wish], below_s=limit_s)
        if better is None and noted is not None and noted.bound_s < below_s:
            return self._simulate(noted)
        return better

    def follows(self, guideline: Guideline, scores: GroupScores) -> Array:
        """Return the mask of a group's candidates that follow a guideline."""
        return guideline.mask(
            scores.base,
            scores.pipelines.shapes,
            self._screener.activation_policies,
            self._screener.state_policies,
            self._space,
        )

    def find_each(
        self, wishes: Sequence[CandidateWish], *, below_s: float
    ) -> tuple[Candidate | None, ...]:
        """Return the best safe candidate of each wish; None where no bound is below `below_s`.

        A group that several wishes may find theirs in is scored once.
        """
        limits_s = [below_s] * len(wishes)
        best: list[Candidate | None] = [None] * len(wishes)
        for bounded in self._order_groups():
            open_wishes = [
                place
                for place, wish in enumerate(wishes)
                if bounded.floor_bound_s < limits_s[place] and wish.may_hold(bounded)
            ]
            if not open_wishes:
                continue
            scores = self._screener.score(
                bounded,
                room_bytes=self._limit,
                below_s=max(limits_s[place] for place in open_wishes),
            )
            if scores is None:
                continue
            is_safe = np.isfinite(scores.step_s)
            is_safe &= scores.peak_bytes <= self._screener.safe_bytes(scores.sd_bytes)
            for place in open_wishes:
                wanted = self._without_objections(scores, wishes[place].mask(scores) & is_safe)
                bounds = np.where(wanted, scores.bound_s, np.inf)
                cell = np.unravel_index(int(bounds.argmin()), bounds.shape)
                if bounds[cell] < limits_s[place]:
                    candidate = self._candidate(scores, tuple(map(int, cell)))
                    best[place], limits_s[place] = candidate, candidate.bound_s
        return tuple(None if candidate is None else self._simulate(candidate) for candidate in best)

    def _note_least(self, scores: GroupScores, is_safe: Array) -> None:
        """Lower `least` where a group fits with less model parallelism than any before."""
        parallel = model_parallel_sizes(scores.base, scores.pipelines.shapes)
        fitting = parallel[is_safe.any(axis=(1, 2))]
        if len(fitting) and not 0 < self.least <= fitting.min():
            self.least = int(fitting.min())

    def _note_nearest_miss(self, scores: GroupScores) -> None:
        """Keep the candidate that lacks the fewest bytes, until one is safe."""
        if self.least:
            self.nearest_miss = None
            return
        peak_bytes = np.where(scores.legal, scores.peak_bytes, np.inf)
        least_bytes = np.inf if self.nearest_miss is None else self.nearest_miss.peak_bytes
        while True:
            place = tuple(map(int, np.unravel_index(int(peak_bytes.argmin()), peak_bytes.shape)))
            if peak_bytes[place] >= least_bytes:
                return
            candidate = self._candidate(scores, place)
            if not self._space.allowed(candidate.layout):
                self.nearest_miss = candidate
                return
            peak_bytes[place] = np.inf

    def _note_unscored_least(self) -> None:
        """Lower `least` by groups that were too slow to score, of the smallest micro-batch."""
        if not self.least:
            return
        smallest = min(bounded.base.mbs for bounded in self._groups)
        for bounded in self._groups:
            if bounded.floor_bound_s < self.below_s or bounded.base.mbs > smallest:
                continue
            parallel = model_parallel_sizes(bounded.base, bounded.group.pipelines.shapes)
            if Overlap.EP in bounded.base.overlap or parallel.min() >= self.least:
                continue
            fitting = parallel[self._screener.fits(bounded).any(axis=(1, 2))]
            self.least = min(self.least, int(fitting.min(initial=self.least)))

    def ranked(self) -> list[Candidate]:
        """Return the best of each set of degrees first, best first; then the others.

        All are safe.
        """
        return _rank(self._candidates)

    def picked_from(self) -> list[Candidate]:
        """Return the candidates that a plan is picked from, as `ranked` does.

        They do not depend on `keep`.
        """
        return _rank(self._picked)

    def gambles(self) -> list[Candidate]:
        """Return the best candidates that may not fit, best first.

        Where nothing is safe, the likeliest to fit comes first.
        """
        if self._candidates:
            return sorted(self._gambles, key=_bound_s)
        return sorted(self._gambles, key=lambda candidate: -candidate.fit_probability(self._limit))

    def _add_pipelines(self, scores: GroupScores, mask: Array) -> None:
        """Add the best way to run each pipeline."""
        for place in self._list_best(scores, mask, below_s=self.below_s):
            self._candidates.append(self._candidate(scores, place))
        # Now and then: to sort after every group would cost more than the candidates it drops.
        if len(self._candidates) > 4 * self._keep:
            self._trim()

    def _add_gambles(self, scores: GroupScores, mask: Array) -> None:
        """Keep the best candidates that may not fit, and the likeliest to fit."""
        if not mask.any():
            return
        below_s = np.inf
        if len(self._gambles) >= _GAMBLES:
            below_s = sorted(map(_bound_s, self._gambles))[_GAMBLES - 1]
        places = list(self._list_best(scores, mask, below_s=below_s))
        if not self._candidates:
            sd = np.maximum(scores.sd_bytes, 1.0)
            spare = np.where(mask, (self._limit - scores.peak_bytes) / sd, -np.inf)
            likeliest = np.unravel_index(int(spare.argmax()), spare.shape)
            places.append(tuple(map(int, likeliest)))
        added = [self._candidate(scores, place) for place in dict.fromkeys(places)]
        gambles = sorted((*self._gambles, *added), key=_bound_s)
        kept: dict[tuple[int, ...], Candidate] = {}
        for candidate in gambles:
            # Sorted before: the first of each set of degrees is its best.
            kept.setdefault(candidate.degrees, candidate)
        likeliest_gamble = max(
            gambles, key=lambda candidate: candidate.fit_probability(self._limit)
        )
        self._gambles = list(kept.values())[:_GAMBLES]
        if likeliest_gamble not in self._gambles:
            self._gambles.append(likeliest_gamble)

    def _list_best(
        self, scores: GroupScores, mask: Array, *, below_s: float
    ) -> Iterator[tuple[int, ...]]:
        """Yield the indices of the best candidate in a mask on each pipeline."""
        bounds = np.where(mask, scores.bound_s, np.inf)
        flat = bounds.reshape(len(bounds), -1)
        places = flat.argmin(axis=1)
        least = flat[np.arange(len(flat)), places]
        for pipeline in np.flatnonzero(least < below_s):
            activations, states = np.unravel_index(places[pipeline], bounds.shape[1:])
            yield int(pipeline), int(activations), int(states)

    def _trim(self) -> None:
        """Drop all but the `keep` best, and the best of each of the `keep` best sets of degrees.

        Once there are `keep` sets of degrees, `below_s` becomes the bound of the last of them.
        """
        self._candidates, last_s = select_best(self._candidates, self._keep)
        self.below_s = min(self.below_s, last_s)

    def _simulate_all(self, table: dict[Key, Candidate]) -> dict[Key, Candidate]:
        return {key: self._simulate(candidate) for key, candidate in table.items()}

    def _simulate(self, candidate: Candidate) -> Candidate:
        stall_s = self._screener.stall_s(candidate.layout)
        covered_s = self._screener.covered_by_stall_s(candidate.layout, candidate.uncovered_s)
        step_s = candidate.step_s + stall_s - covered_s
        # It depends on choices alone, which simulation does not change.
        factor = candidate.bound_s / candidate.step_s
        return replace(candidate, step_s=step_s, bound_s=step_s * factor)

    def _candidate(self, scores: GroupScores, place: tuple[int, ...]) -> Candidate:
        """Return the candidate at indices (pipeline, activation policy, state policy)."""
        pipeline, activations, states = place
        safe_bytes = self._screener.safe_bytes(scores.sd_bytes[place])
        return Candidate(
            layout=self._screener.layout(scores, pipeline, activations, states),
            step_s=float(scores.step_s[place]),
            bound_s=float(scores.bound_s[place]),
            uncovered_s=float(scores.uncovered_s[place]),
            peak_bytes=float(scores.peak_bytes[place]),
            sd_bytes=float(scores.sd_bytes[place]),
            is_safe=bool(scores.peak_bytes[place] <= safe_bytes),
        )

    def _keep_best(
        self,
        table: dict[Key, Candidate],
        key: Key,
        scores: GroupScores,
        mask: Array,
        seconds: Array,
    ) -> None:
        """Put the candidate in `mask` with the least `seconds` into `table[key]` if it is better.

        `seconds` are the steps or the bounds of the scores.
        """
        masked = np.where(mask, seconds, np.inf)
        place = tuple(map(int, np.unravel_index(int(masked.argmin()), masked.shape)))
        known_s = np.inf
        if key in table:
            # By identity: bounds and steps may be equal arrays.
            known_s = table[key].bound_s if seconds is scores.bound_s else table[key].step_s
        if masked[place] < known_s:
            table[key] = self._candidate(scores, place)

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


class BestPool(CandidatePool):
    """The candidates that a plan is picked from, and nothing else that a search tells.

    What is not safe is not priced, nor what is too slow to be kept by its micro-batches alone.
    """

    def _score(self, bounded: BoundedGroup) -> GroupScores | None:
        """Return the scores of a group, of what may be picked alone."""
        return self._screener.score(
            bounded, room_bytes=self.room_bytes, below_s=self.below_s, is_best=True
        )

    def add_scores(self, scores: GroupScores) -> None:
        """Keep the best candidates of a group."""
        is_safe = scores.legal & (scores.peak_bytes <= self._screener.safe_bytes(scores.sd_bytes))
        usable = self._without_objections(scores, np.isfinite(scores.step_s))
        self._add_pipelines(scores, usable & is_safe)


def model_parallel_sizes(cut: Layout, shapes: Iterable[PipelineShape]) -> Array:
    """Return the model parallelism tp x cp x pp of pipelines under a layout `cut` [pipelines]."""
    return np.array([cut.tp * cut.cp * shape.pp for shape in shapes])


def _bound_s(candidate: Candidate) -> float:
    return candidate.bound_s


def _rank(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the best of each set of degrees first, best first; then the others."""
    seen: set[tuple[int, ...]] = set()
    first: list[Candidate] = []
    rest: list[Candidate] = []
    for candidate in sorted(candidates, key=_bound_s):
        (rest if candidate.degrees in seen else first).append(candidate)
        seen.add(candidate.degrees)
    return [*first, *rest]


def select_best(candidates: Iterable[Candidate], count: int) -> tuple[list[Candidate], float]:
    """Return the `count` best, with the best of each of the `count` best sets of degrees.

    The second is the bound of the last of these sets; infinite where there are fewer. What is left
    out of so many is left out of fewer too, so that one selection can be taken from another.
    """
    kept: list[Candidate] = []
    seen: set[tuple[int, ...]] = set()
    last_s = np.inf
    for place, candidate in enumerate(sorted(candidates, key=_bound_s)):
        is_new = candidate.degrees not in seen and len(seen) < count
        if is_new or place < count:
            kept.append(candidate)
            seen.add(candidate.degrees)
        if is_new and len(seen) == count:
            last_s = candidate.bound_s
    return kept, last_s
