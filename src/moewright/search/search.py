"""The search: every legal layout priced by closed forms, the best ones estimated in full, ranked by
step time.
"""

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

# beyond what is shown: some turn out not to fit when estimated in full; another network may turn
# the order
_SPARE = 14
_EXTRA_BYTES = (GIB, 8 * GIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """Plans, best first; what was rejected, by rule; why the first is first, and what keeping to
    what is usual would take; and how many layouts were scored.

    `with_more` is the fastest candidate with so many more bytes a device, `by_overlap` the fastest
    without and with overlapped expert communication; `near` are the best candidates of many
    degrees, whether shown or not.
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
    """The `top` fastest layouts that may fit, each the best of its degrees where there are so many.

    `fixed` is layout text whose keys are pinned; `allowed` gives the reasons against a layout that
    is legal but cannot be run. Raises BadInput when `fixed` is wrong.
    """
    if reasons := check_precision(workload, hardware):
        raise BadInput(*reasons)
    space = build_search_space(model, workload, hardware, fixed, allowed=allowed)
    best = CandidatePool(space, Screener(space), keep=2 * top + _SPARE, extra_bytes=_EXTRA_BYTES)
    best.screen_all()
    rejected: Counter[str] = Counter(best.refused)
    rejected[DOES_NOT_FIT] += best.without_room
    plans: list[Plan] = []
    for candidate in best.ranked():
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
    rejected[SLOWER] = max(0, best.scored - sum(rejected.values()) - len(plans))
    plans.sort(key=_order)
    return SearchResult(
        plans=tuple(plans),
        rejected=tuple((rule, count) for rule, count in rejected.most_common() if count),
        why=(*explain_first(tuple(plans)), *(_departures(plans[0], best, space) if plans else ())),
        scored=best.scored,
        best_with_memory=tuple(best.with_more.items()),
        best_by_overlap=tuple(best.by_overlap.items()),
        near_best=tuple(best.ranked()),
    )


def search_near(
    result: SearchResult, hardware: Hardware, *, fixed: str, allowed: Objections
) -> Candidate | None:
    """The fastest layout on another hardware among all that cut a layer like one of the best on
    this one.
    """
    first = result.plans[0]
    space = build_search_space(first.model, first.workload, hardware, fixed, allowed=allowed)
    best = CandidatePool(space, Screener(space), keep=_SPARE, extra_bytes=())
    best.screen_all(cuts={layer_degrees(candidate.layout) for candidate in result.near_best})
    firm = [candidate for candidate in best.ranked() if candidate.fits_surely]
    return firm[0] if firm else None


def build_plan(model: ModelSpec, workload: Workload, hardware: Hardware, layout: Layout) -> Plan:
    """A plan of one layout on the nodes of a hardware, with its full estimate. Raises BadInput when
    it is illegal.
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


def _departures(plan: Plan, best: CandidatePool, space: SearchSpace) -> Iterator[str]:
    """What keeping to the habits that the plan departs from would take, a sentence for each layout
    that does.
    """
    usual = [(habit.text, best.usual.get(habit)) for habit in find_departures(plan.layout, space)]
    if 0 < best.least < model_parallel_size(plan.layout):
        said = f"{LEAST_PARALLELISM}: tp x cp x pp of {best.least}, not {model_parallel_size(plan.layout)}"
        usual.insert(0, (said, best.least_parallel.get(best.least)))
    together: dict[Layout | None, list[str]] = {}
    for said, candidate in usual:
        if candidate is not None or np.isfinite(best.below_s):
            together.setdefault(candidate.layout if candidate else None, []).append(said)
    for layout, habits in together.items():
        yield explain_departure(plan, "; ".join(habits), layout, more_than_s=best.below_s)


def _order(plan: Plan) -> float:
    return plan.estimate.step_s * (
        RESOLUTION if plan.estimate.verdict is Verdict.UNCERTAIN else 1.0
    )
