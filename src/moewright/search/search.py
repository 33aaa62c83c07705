"""The search: closed forms price every legal layout, the best are estimated in full and ranked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moewright.codec import fingerprint
from moewright.cost.estimate import estimate
from moewright.rules.grid import with_fabric_nodes
from moewright.rules.legality import check_legality, check_precision
from moewright.search.candidates import RESOLUTION, Candidate, CandidatePool, layer_degrees
from moewright.search.explain import explain_departure, explain_first
from moewright.search.heuristics import LEAST_PARALLELISM, find_departures, model_parallel_size
from moewright.search.screening import Screener
from moewright.search.space import Objections, SearchSpace, build_search_space, no_objections
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan, Verdict
from moewright.spec.units import GIB
from moewright.spec.workload import Workload

DOES_NOT_FIT = "does not fit in memory"
SLOWER = "slower than the layouts shown"

# Candidates kept beyond those that are shown: a full estimate may find that some do not fit, and
# a faster network (search_near) may change their order.
_SPARE = 14
_EXTRA_BYTES = (GIB, 8 * GIB)  # more memory a device: what `best_with_memory` answers for


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The best plans of a search, best first, and what else it found.

    `rejected` counts the layouts that each rule excludes, and `scored` all layouts that were
    scored. `why` says why the first plan is first, and what a step would take under the guidelines
    that it departs from. `best_with_memory` pairs extra bytes a device with the fastest candidate
    that fits with them; `best_by_overlap` pairs False and True with the fastest candidate without
    and with overlapped expert communication. `near_best` holds the best candidates of many
    combinations of degrees, whether they are shown or not.
    """

    plans: tuple[Plan, ...]
    rejected: tuple[tuple[str, int], ...]
    why: tuple[str, ...]
    scored: int
    best_with_memory: tuple[tuple[float, Candidate], ...]
    best_by_overlap: tuple[tuple[bool, Candidate], ...]
    near_best: tuple[Candidate, ...]


def search(
    model: ModelSpec,
    workload: Workload,
    hardware: Hardware,
    *,
    fixed: str = "",
    top: int = 10,
    allowed: Objections = no_objections,
) -> SearchResult:
    """Return the `top` fastest layouts that may fit in memory, as far as possible of other degrees.

    Each plan is the best of its degrees (Candidate.degrees); further layouts of the same degrees
    are shown only where fewer than `top` combinations of degrees fit. `fixed` is layout text whose
    keys are pinned; `allowed` returns the reasons against a layout that is legal but cannot be run.

    Raises:
        BadInput: `fixed` is no layout, or the devices have no matrix products in the job's
            precision.
    """
    if reasons := check_precision(workload, hardware):
        raise BadInput(*reasons)
    space = build_search_space(model, workload, hardware, fixed, allowed=allowed)
    pool = CandidatePool(space, Screener(space), keep=2 * top + _SPARE, extra_bytes=_EXTRA_BYTES)
    pool.screen_all()
    rejected: Counter[str] = Counter(pool.refused)
    rejected[DOES_NOT_FIT] += pool.without_room
    plans: list[Plan] = []
    for candidate in pool.ranked():
        if len(plans) == top:
            break
        reasons = check_legality(model, workload, candidate.layout)
        if reasons:
            rejected.update({reason.rule for reason in reasons})
            continue
        plan = build_plan(model, workload, hardware, candidate.layout)
        if plan.estimate.verdict is Verdict.OOM:
            rejected[DOES_NOT_FIT] += 1
        else:
            plans.append(plan)
    rejected[SLOWER] = max(0, pool.scored - sum(rejected.values()) - len(plans))
    plans.sort(key=_ranking_s)
    why = explain_first(tuple(plans))
    if plans:
        why = (*why, *_departures(plans[0], pool, space))
    return SearchResult(
        plans=tuple(plans),
        rejected=tuple((rule, count) for rule, count in rejected.most_common() if count),
        why=why,
        scored=pool.scored,
        best_with_memory=tuple(pool.with_more.items()),
        best_by_overlap=tuple(pool.by_overlap.items()),
        near_best=tuple(pool.ranked()),
    )


def search_near(
    result: SearchResult, hardware: Hardware, *, fixed: str, allowed: Objections
) -> Candidate | None:
    """Return the fastest layout on other hardware, among the degrees of a search's best layouts.

    `result` is the search on the hardware of its plans; its `near_best` names the degrees. Return
    None where no layout fits by more than a standard deviation.
    """
    first = result.plans[0]
    space = build_search_space(first.model, first.workload, hardware, fixed, allowed=allowed)
    pool = CandidatePool(space, Screener(space), keep=_SPARE, extra_bytes=())
    pool.screen_all({layer_degrees(candidate.layout) for candidate in result.near_best})
    return next((candidate for candidate in pool.ranked() if candidate.fits_surely), None)


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


def _departures(plan: Plan, pool: CandidatePool, space: SearchSpace) -> Iterator[str]:
    """Yield a sentence on what it would take to follow the guidelines that the plan departs from.

    Guidelines whose fastest layout is the same share a sentence.
    """
    followers = [  # (text of a guideline, the fastest candidate that follows it)
        (guideline.text, pool.usual.get(guideline))
        for guideline in find_departures(plan.layout, space)
    ]
    parallel = model_parallel_size(plan.layout)
    if 0 < pool.least < parallel:
        text = f"{LEAST_PARALLELISM}: tp x cp x pp of {pool.least}, not {parallel}"
        followers.insert(0, (text, pool.least_parallel.get(pool.least)))
    texts: dict[Layout | None, list[str]] = {}
    for text, candidate in followers:
        if candidate is not None:
            texts.setdefault(candidate.layout, []).append(text)
        elif np.isfinite(pool.below_s):
            texts.setdefault(None, []).append(text)
    for layout, guidelines in texts.items():
        yield explain_departure(plan, "; ".join(guidelines), layout, more_than_s=pool.below_s)


def _ranking_s(plan: Plan) -> float:
    """Return the seconds by which a plan is ranked: its step, longer where it may not fit."""
    is_uncertain = plan.estimate.verdict is Verdict.UNCERTAIN
    return plan.estimate.step_s * (RESOLUTION if is_uncertain else 1.0)
