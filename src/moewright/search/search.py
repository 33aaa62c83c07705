"""The search: every legal layout priced by closed forms, the best ones estimated in full, ranked by
step time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moewright.codec import fingerprint
from moewright.cost.estimate import estimate
from moewright.rules.grid import on_fabric
from moewright.rules.legality import illegal, unmultiplied
from moewright.search.candidates import RESOLVED, Best, Candidate, cut_of
from moewright.search.explain import departure, why_first
from moewright.search.heuristics import LEAST, departed, parallelism
from moewright.search.screening import Scout
from moewright.search.space import Allowed, Space, everything, space_of
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
class Ranked:
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
    with_more: tuple[tuple[float, Candidate], ...]
    by_overlap: tuple[tuple[bool, Candidate], ...]
    near: tuple[Candidate, ...]


def search(
    model: ModelSpec,
    workload: Workload,
    hardware: Hardware,
    *,
    fixed: str = "",
    top: int = 10,
    allowed: Allowed = everything,
) -> Ranked:
    """The `top` fastest layouts that may fit, each the best of its degrees where there are so many.

    `fixed` is layout text whose keys are pinned; `allowed` gives the reasons against a layout that
    is legal but cannot be run. Raises BadInput when `fixed` is wrong.
    """
    if reasons := unmultiplied(workload, hardware):
        raise BadInput(*reasons)
    space = space_of(model, workload, hardware, fixed, allowed=allowed)
    best = Best(space, Scout(space), keep=2 * top + _SPARE, extra_bytes=_EXTRA_BYTES)
    best.take_all()
    rejected: Counter[str] = Counter(best.refused)
    rejected[DOES_NOT_FIT] += best.without_room
    plans: list[Plan] = []
    for candidate in best.ranked():
        if len(plans) == top:
            break
        reasons = illegal(model, workload, candidate.layout)
        if reasons:
            rejected.update({reason.rule for reason in reasons})
            continue
        plan = plan_of(model, workload, hardware, candidate.layout)
        if plan.estimate.verdict is Verdict.OOM:
            rejected[DOES_NOT_FIT] += 1
        else:
            plans.append(plan)
    rejected[SLOWER] = max(0, best.scored - sum(rejected.values()) - len(plans))
    plans.sort(key=_order)
    return Ranked(
        plans=tuple(plans),
        rejected=tuple((rule, count) for rule, count in rejected.most_common() if count),
        why=(*why_first(tuple(plans)), *(_departures(plans[0], best, space) if plans else ())),
        scored=best.scored,
        with_more=tuple(best.with_more.items()),
        by_overlap=tuple(best.by_overlap.items()),
        near=tuple(best.ranked()),
    )


def fastest_near(
    ranked: Ranked, hardware: Hardware, *, fixed: str, allowed: Allowed
) -> Candidate | None:
    """The fastest layout on another hardware among all that cut a layer like one of the best on
    this one."""
    first = ranked.plans[0]
    space = space_of(first.model, first.workload, hardware, fixed, allowed=allowed)
    best = Best(space, Scout(space), keep=_SPARE, extra_bytes=())
    best.take_all(cuts={cut_of(candidate.layout) for candidate in ranked.near})
    firm = [candidate for candidate in best.ranked() if candidate.firm]
    return firm[0] if firm else None


def plan_of(model: ModelSpec, workload: Workload, hardware: Hardware, layout: Layout) -> Plan:
    """A plan of one layout on the nodes of a hardware, with its full estimate. Raises BadInput when
    it is illegal."""
    layout = on_fabric(layout, hardware.fabric.domain_size)
    return Plan(
        model=model,
        workload=workload,
        hardware=hardware,
        layout=layout,
        estimate=estimate(model, workload, hardware, layout),
        fingerprint=fingerprint(model, workload, hardware, layout),
    )


def _departures(plan: Plan, best: Best, space: Space) -> Iterator[str]:
    """What keeping to the habits that the plan departs from would take, a sentence for each layout
    that does."""
    usual = [(habit.said, best.usual.get(habit)) for habit in departed(plan.layout, space)]
    if 0 < best.least < parallelism(plan.layout):
        said = f"{LEAST}: tp x cp x pp of {best.least}, not {parallelism(plan.layout)}"
        usual.insert(0, (said, best.least_parallel.get(best.least)))
    together: dict[Layout | None, list[str]] = {}
    for said, candidate in usual:
        if candidate is not None or np.isfinite(best.below_s):
            together.setdefault(candidate.layout if candidate else None, []).append(said)
    for layout, habits in together.items():
        yield departure(plan, "; ".join(habits), layout, more_than_s=best.below_s)


def _order(plan: Plan) -> float:
    return plan.estimate.step_s * (RESOLVED if plan.estimate.verdict is Verdict.UNCERTAIN else 1.0)
