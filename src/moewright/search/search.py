"""The search: closed forms price every legal layout, the best are estimated in full and ranked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from moewright.codec import fingerprint
from moewright.cost.constants import Constants
from moewright.cost.estimate import estimate
from moewright.cost.evidence import count_proofs
from moewright.cost.memory.host_memory import USABLE_SHARE, host_capacity
from moewright.cost.memory.model_states import least_state_bytes
from moewright.rules.grid import with_fabric_nodes
from moewright.rules.job import plan_job
from moewright.rules.limits.legality import (
    check_device,
    check_legality,
    check_positions,
    check_precision,
)
from moewright.search.candidates import (
    PICKED_FROM,
    BestPool,
    Candidate,
    CandidatePool,
    CandidateWish,
    layer_degrees,
    model_parallel_sizes,
)
from moewright.search.explain import explain_departure, explain_first
from moewright.search.heuristics import (
    LEAST_PARALLELISM,
    Guideline,
    GuidelineScope,
    find_departures,
    model_parallel_size,
)
from moewright.search.pipelines import PipelineCache
from moewright.search.ranking import NearBest, ProvenChoices, bound_s, is_safe
from moewright.search.screening import Screener
from moewright.search.space import (
    Objections,
    SearchSpace,
    build_search_space,
    no_objections,
    state_policies,
)
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout, Offload, Overlap
from moewright.spec.model import ModelSpec
from moewright.spec.plan import DEFAULT_RULE, Plan, RankingRule, Verdict
from moewright.spec.record import spread
from moewright.spec.units import GIB
from moewright.spec.workload import Workload

DOES_NOT_FIT = "does not fit in memory"
NO_HOST_MEMORY = "does not fit in host memory"
MAY_NOT_FIT = "may not fit in memory"
SLOWER = "slower than the layouts shown"

# Candidates kept beyond those that are shown: simulation of their pipelines, full estimates and a
# faster network (search_near) may change their order.
_SPARE = 8
_MAX_KEPT = 1000
_GAMBLES = 3  # shown
_EXTRA_BYTES = (GIB, 8 * GIB)  # more memory a device: what `with_memory` answers for
_WORTH_PROVING = 3.0  # a layout that somebody ran likewise
_WORTH_FINDING = 1.5  # a layout with another choice is sought up to so many times the best bound


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The best plans of a search, best first, and what else it found.

    All of `plans` fit with the probability that `rule` asks for; only where nothing does, the plan
    that is likeliest to fit stands there alone. `gambles` are plans with a lower bound than the
    first plan (or, where nothing is safe, others) that fit less probably. `rejected` counts the
    layouts that each rule excludes, and `scored` all layouts. `why` says why the first plan is
    first, and what a step would take under the guidelines that it departs from. `with_memory` pairs
    extra bytes a device with the best candidate that is safe with them, by bound and by step.
    `other_overlap` is the best candidate that overlaps expert communication where the first plan
    does not, or the other way round. `near_best` holds the best candidates of many combinations of
    degrees, whether they are shown or not. `nearest_miss` is the layout that lacks the fewest
    bytes, where nothing is safe. `proven` is the best plan whose combination of choices
    somebody ran on the part, None where nobody ran any that is nearly as fast. `optimism` is how
    far the predicted step of the first plan is expected to lie below its own, in logarithms, for it
    was picked from many (cost.selection); `proven_optimism` that of `proven`. `pipelines` are those
    that were screened.
    """

    plans: tuple[Plan, ...]
    gambles: tuple[Plan, ...]
    rule: RankingRule
    rejected: tuple[tuple[str, int], ...]
    why: tuple[str, ...]
    scored: int
    with_memory: tuple[tuple[float, tuple[Candidate, ...]], ...]
    other_overlap: Candidate | None
    near_best: tuple[Candidate, ...]
    nearest_miss: Plan | None = None
    proven: Plan | None = None
    optimism: float = 0.0
    proven_optimism: float = 0.0
    # Tables of this process, of which nothing is written.
    pipelines: PipelineCache = field(repr=False, compare=False, metadata=spread())


@lru_cache(maxsize=16)  # the pages and the tools of a session ask about the same job
def search(
    model: ModelSpec,
    workload: Workload,
    hardware: Hardware,
    *,
    fixed: str = "",
    top: int = 10,
    allowed: Objections = no_objections,
    rule: RankingRule = DEFAULT_RULE,
) -> SearchResult:
    """Return the `top` best layouts that are safe, as far as possible of other degrees.

    Each plan is the best of its degrees (Candidate.degrees); further layouts of the same degrees
    are shown only where fewer than `top` combinations of degrees are safe. `fixed` is layout text
    whose keys are pinned; `allowed` returns the reasons against a layout that is legal but cannot
    be run.

    Raises:
        BadInput: `fixed` is no layout, or the devices have no matrix products in the job's
            precision, or not what `fixed` asks for.
    """
    if reasons := check_precision(workload, hardware) or check_positions(model, workload):
        raise BadInput(*reasons)
    space = build_search_space(model, workload, hardware, fixed, allowed=allowed)
    if reasons := check_device(space.base, hardware):
        raise BadInput(*reasons)
    spaces = _list_spaces(space)
    if not _may_hold_states(spaces, rule):
        spaces = spaces[-1:]  # nothing in any is safe: the last one says what is nearest
    space, screener, pool = _screen(
        spaces, rule, keep=top + _SPARE, extra_bytes=_EXTRA_BYTES, proves=True
    )
    rejected: Counter[str] = Counter(pool.refused)
    rejected[DOES_NOT_FIT] += pool.without_room
    rejected[NO_HOST_MEMORY] += pool.without_host_room
    plans: list[Plan] = []
    gambles: list[Plan] = []
    ranked = pool.ranked()
    near_best = NearBest(space, pool.picked_from())
    for candidate in near_best.put_simplest_first(ranked):
        if len(plans) == top:
            break
        plan = _build_legal_plan(space, candidate, rejected)
        if plan:
            # A full estimate rounds bytes, which may turn the verdict on the very margin.
            (plans if is_safe(plan.estimate, rule) else gambles).append(plan)
    # The pick stays in front, although another may have a bound that ties with it.
    plans[1:] = sorted(plans[1:], key=lambda plan: bound_s(plan.estimate, rule))
    least_s = bound_s(plans[0].estimate, rule) if plans else np.inf
    for candidate in pool.gambles():
        if len(gambles) >= _GAMBLES or candidate.bound_s >= least_s:
            continue
        plan = _build_legal_plan(space, candidate, rejected)
        if plan and plan.estimate.verdict is not Verdict.OOM:
            gambles.append(plan)
    if not plans:
        plans, gambles = gambles[:1], gambles[1:]
    shown = len(plans) + len(gambles)
    # Where nothing fits, what was not priced has no room either.
    rejected[SLOWER if plans else DOES_NOT_FIT] += max(
        0, pool.scored - sum(rejected.values()) - shown
    )
    why = explain_first(tuple(plans), rule)
    other_overlap = None
    proven = None
    if plans:
        proven = _find_proven(plans[0], pool, space, rule)
        why = (*why, *_departures(plans[0], pool, space, rule))
        other_overlap = _find_other_overlap(plans[0], pool, rule)
    return SearchResult(
        plans=tuple(plans),
        gambles=tuple(gambles),
        rule=rule,
        rejected=tuple((name, count) for name, count in rejected.most_common() if count),
        why=why,
        scored=pool.scored,
        with_memory=tuple(
            (extra, (candidate, pool.fastest_with_more[extra]))
            for extra, candidate in pool.with_more.items()
        ),
        other_overlap=other_overlap,
        near_best=tuple(ranked),
        nearest_miss=_build_nearest_miss(space, pool),
        proven=proven,
        optimism=near_best.optimism(),
        proven_optimism=near_best.optimism_of_proven(),
        pipelines=screener.pipelines,
    )


@lru_cache(maxsize=64)  # a judgement and a list of changes compare with the same best plan
def find_best_plan(
    model: ModelSpec,
    workload: Workload,
    hardware: Hardware,
    *,
    fixed: str = "",
    allowed: Objections = no_objections,
    rule: RankingRule = DEFAULT_RULE,
) -> Plan | None:
    """Return the best safe layout alone; None where none is safe.

    It leaves out what else a search tells, and so takes less time.

    Raises:
        BadInput: as for `search`.
    """
    if reasons := check_precision(workload, hardware) or check_positions(model, workload):
        raise BadInput(*reasons)
    space = build_search_space(model, workload, hardware, fixed, allowed=allowed)
    if reasons := check_device(space.base, hardware):
        raise BadInput(*reasons)
    spaces = _list_spaces(space)
    if not _may_hold_states(spaces, rule):
        return None
    for tried in spaces:
        candidates = _pick_candidates(tried, Screener(tried, rule))
        if candidates:
            break
    ordered = NearBest(tried, candidates).put_simplest_first(candidates)
    plans = (_build_legal_plan(tried, candidate, Counter()) for candidate in ordered)
    return next((plan for plan in plans if plan and is_safe(plan.estimate, rule)), None)


def _pick_candidates(space: SearchSpace, screener: Screener) -> list[Candidate]:
    """Return the candidates that a plan is picked from, as `_fill_pool` does, and no others."""
    picked_from = PICKED_FROM
    while True:
        pool = BestPool(space, screener, keep=picked_from, picked_from=picked_from)
        pool.screen_all()
        candidates = pool.picked_from()
        best_s = min((candidate.bound_s for candidate in candidates), default=0.0)
        if best_s <= pool.picked_below_s or picked_from > _MAX_KEPT:
            return candidates
        picked_from *= 4


def _list_spaces(space: SearchSpace) -> list[SearchSpace]:
    """Return a space, and the one with what saves memory combined where that is another."""
    combined = replace(space, combines_savings=True)
    if state_policies(combined) == state_policies(space):
        return [space]
    return [space, combined]


def _screen(
    spaces: Sequence[SearchSpace],
    rule: RankingRule,
    *,
    keep: int,
    extra_bytes: tuple[float, ...],
    proves: bool = False,
) -> tuple[SearchSpace, Screener, CandidatePool]:
    """Screen spaces, the next one only where nothing in those before is safe.

    With `proves` the pool notes the best candidate that published runs prove.
    """
    for tried in spaces:
        screener = Screener(tried, rule)
        wish = ProvenChoices(tried, screener).wish() if proves else None
        pool = _fill_pool(tried, screener, keep=keep, extra_bytes=extra_bytes, wish=wish)
        screened = tried, screener, pool
        if pool.ranked():
            break
    return screened


def _may_hold_states(spaces: Sequence[SearchSpace], rule: RankingRule) -> bool:
    """Return whether all devices, with their hosts, may hold the states of the job at all.

    Where they do not, no layout is safe, whatever it is.
    """
    if rule.fit_probability < 0.5:  # layouts whose mean peak is over the capacity count as safe
        return True
    space = spaces[-1]
    rank_bytes = space.hardware.device.memory_bytes.value
    if any(Offload.OPTIMIZER in policy.offload for policy in state_policies(space)):
        rank_bytes += USABLE_SHARE * host_capacity(space.hardware, Constants(space.hardware))
    least_bytes = least_state_bytes(space.model, space.workload)
    return least_bytes <= space.hardware.count * rank_bytes


def _build_nearest_miss(space: SearchSpace, pool: CandidatePool) -> Plan | None:
    """Return the plan that lacks the fewest bytes; None where a layout is safe."""
    if pool.nearest_miss is None or pool.ranked():
        return None
    return _build_legal_plan(space, pool.nearest_miss, Counter())


def _fill_pool(
    space: SearchSpace,
    screener: Screener,
    *,
    keep: int,
    extra_bytes: tuple[float, ...],
    wish: CandidateWish | None,
) -> CandidatePool:
    """Screen a space, again with a larger pool while simulation lifts the best over its limit."""
    picked_from = PICKED_FROM
    while True:
        pool = CandidatePool(
            space,
            screener,
            keep=max(picked_from, keep),
            picked_from=picked_from,
            extra_bytes=extra_bytes,
            wish=wish,
        )
        pool.screen_all()
        best_s = min((candidate.bound_s for candidate in pool.picked_from()), default=0.0)
        # Others were left out by closed forms, to which simulation adds as a rule.
        if best_s <= pool.picked_below_s or picked_from > _MAX_KEPT:
            return pool
        picked_from *= 4


def _build_legal_plan(
    space: SearchSpace, candidate: Candidate, rejected: Counter[str]
) -> Plan | None:
    """Return the plan of a candidate; None where it is illegal, which `rejected` counts."""
    reasons = check_legality(space.job(candidate.layout))
    if reasons:
        rejected.update({reason.rule for reason in reasons})
        return None
    return build_plan(space.model, space.workload, space.hardware, candidate.layout)


def search_near(
    result: SearchResult, hardware: Hardware, *, fixed: str, allowed: Objections
) -> tuple[Candidate, ...]:
    """Return the safe layouts on other hardware, of the degrees of a search's best; best first.

    `result` is the search on the hardware of its plans, from which the other differs in its speeds
    alone; its `near_best` names the degrees, and pipelines hold there what they hold here.
    """
    first = result.plans[0]
    space = build_search_space(first.model, first.workload, hardware, fixed, allowed=allowed)
    screener = Screener(space, result.rule, pipelines=result.pipelines)
    pool = CandidatePool(space, screener, keep=_SPARE, extra_bytes=())
    pool.screen_all({layer_degrees(candidate.layout) for candidate in result.near_best})
    return tuple(pool.ranked())


@lru_cache(maxsize=128)  # what judges a job and what changes it ask for the same layouts
def build_plan(model: ModelSpec, workload: Workload, hardware: Hardware, layout: Layout) -> Plan:
    """Return the plan of one layout on the nodes of a hardware, with its full estimate.

    Raises:
        BadInput: The layout is illegal.
    """
    layout = with_fabric_nodes(layout, hardware.fabric.domain_size)
    return Plan(
        model=model,
        workload=workload,
        hardware=hardware,
        layout=layout,
        estimate=estimate(model, workload, hardware, layout),
        fingerprint=fingerprint(model, workload, hardware, layout),
    )


def _departures(
    plan: Plan, pool: CandidatePool, space: SearchSpace, rule: RankingRule
) -> Iterator[str]:
    """Yield a sentence on what it would take to follow the guidelines that the plan departs from.

    Guidelines whose best layout is the same share a sentence.
    """
    below_s = _WORTH_FINDING * bound_s(plan.estimate, rule)
    guidelines = find_departures(plan.layout, space)
    wishes = [
        _wish_for(guideline, pool, space) for guideline in guidelines if guideline not in pool.usual
    ]
    texts_of_followers = [guideline.text for guideline in guidelines]
    parallel = model_parallel_size(plan.layout)
    least = pool.least
    departs_from_least = 0 < least < parallel
    if departs_from_least:
        texts_of_followers.insert(
            0, f"{LEAST_PARALLELISM}: tp x cp x pp of {least}, not {parallel}"
        )
        wishes.insert(0, _wish_for_least(least))
    # All wishes at once: a group that may hold what several of them ask for is scored once.
    results = iter(pool.find_each(wishes, below_s=below_s))
    followers = [next(results)] if departs_from_least else []
    followers += [
        pool.usual[guideline] if guideline in pool.usual else next(results)
        for guideline in guidelines
    ]
    texts: dict[Layout | None, list[str]] = {}
    for text, candidate in zip(texts_of_followers, followers, strict=True):
        texts.setdefault(None if candidate is None else candidate.layout, []).append(text)
    for layout, joined in texts.items():
        yield explain_departure(plan, "; ".join(joined), layout, more_than=_WORTH_FINDING)


def _wish_for(guideline: Guideline, pool: CandidatePool, space: SearchSpace) -> CandidateWish:
    """Return the wish for a candidate that follows a guideline."""
    is_of_degrees = guideline.scope is GuidelineScope.DEGREES
    return CandidateWish(
        mask=lambda scores: pool.follows(guideline, scores),
        may_hold=lambda bounded: not is_of_degrees or guideline.is_followed(bounded.base, space),
    )


def _wish_for_least(least: int) -> CandidateWish:
    """Return the wish for a candidate of so much model parallelism."""
    return CandidateWish(
        mask=lambda scores: (model_parallel_sizes(scores.base, scores.pipelines.shapes) == least)[
            :, None, None
        ],
        may_hold=lambda bounded: least % (bounded.base.tp * bounded.base.cp) == 0,
    )


def _find_proven(
    first: Plan, pool: CandidatePool, space: SearchSpace, rule: RankingRule
) -> Plan | None:
    """Return the best safe plan that published runs prove; None where none is nearly as fast."""
    if count_proofs(plan_job(first), first.hardware):
        return first
    candidate = pool.find_wished(below_s=_WORTH_PROVING * bound_s(first.estimate, rule))
    if candidate is None:
        return None
    return _build_legal_plan(space, candidate, Counter())


def _find_other_overlap(plan: Plan, pool: CandidatePool, rule: RankingRule) -> Candidate | None:
    """Return the best candidate whose expert communication is not treated as the plan's is."""
    overlaps = Overlap.EP not in plan.layout.overlap
    if overlaps in pool.by_overlap:
        return pool.by_overlap[overlaps]
    wish = CandidateWish(
        mask=lambda scores: np.isfinite(scores.step_s),
        may_hold=lambda bounded: (Overlap.EP in bounded.base.overlap) == overlaps,
    )
    below_s = _WORTH_FINDING * bound_s(plan.estimate, rule)
    return pool.find_each([wish], below_s=below_s)[0]
