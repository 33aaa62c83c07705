"""The search: every legal layout priced by closed forms, the best ones estimated in full, ranked by step time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from moewright.codec import fingerprint
from moewright.cost.estimate import estimate
from moewright.rules.legality import illegal
from moewright.search.explain import why_first
from moewright.search.frontier import frontier
from moewright.search.scout import Candidate, Scout
from moewright.search.space import Allowed, groups, space_of
from moewright.spec.errors import Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan, Verdict
from moewright.spec.workload import Workload

# Predictions closer than this do not order two plans (time_model_findings, section 8), so a plan that may not fit has
# to be that much faster to come before one that fits.
RESOLVED = 1.05
DOES_NOT_FIT = "does not fit in memory"
SLOWER = "slower than the layouts shown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """Plans, best first; what was rejected, by rule; why the first is first; memory against time over all that fit;
    and how many layouts were scored.
    """

    plans: tuple[Plan, ...]
    rejected: tuple[tuple[str, int], ...]
    why: tuple[str, ...]
    frontier: tuple[Candidate, ...]
    scored: int


def everything(_: Layout) -> tuple[Reason, ...]:
    """The predicate that allows every layout."""
    return ()


def search(
    model: ModelSpec,
    workload: Workload,
    hardware: Hardware,
    *,
    fixed: str = "",
    top: int = 10,
    allowed: Allowed = everything,
) -> Ranked:
    """The `top` fastest layouts that may fit. `fixed` is layout text whose keys are pinned; `allowed` gives the
    reasons against a layout that is legal but cannot be run. Raises BadInput when `fixed` is wrong.
    """
    space = space_of(model, workload, hardware, fixed)
    scout = Scout(space)
    rejected: Counter[str] = Counter()

    def counted(layout: Layout) -> tuple[Reason, ...]:
        reasons = allowed(layout)
        rejected.update({reason.rule for reason in reasons})
        return reasons

    fitting: list[Candidate] = []
    for group in groups(space):
        fitting += scout.candidates(group, allowed=counted)
    rejected[DOES_NOT_FIT] += scout.without_room
    fitting.sort(key=lambda candidate: candidate.step_s)
    plans: list[Plan] = []
    for candidate in fitting:
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
    rejected[SLOWER] = max(0, len(fitting) - len(plans)) + scout.dominated
    plans.sort(key=_order)
    return Ranked(
        plans=tuple(plans),
        rejected=tuple((rule, count) for rule, count in rejected.most_common() if count),
        why=why_first(tuple(plans)),
        frontier=frontier(fitting),
        scored=len(fitting) + scout.without_room + scout.dominated,
    )


def plan_of(model: ModelSpec, workload: Workload, hardware: Hardware, layout: Layout) -> Plan:
    """A plan of one layout with its full estimate. Raises BadInput when the layout is illegal."""
    return Plan(
        model=model,
        workload=workload,
        hardware=hardware,
        layout=layout,
        estimate=estimate(model, workload, hardware, layout),
        fingerprint=fingerprint(model, workload, hardware, layout),
    )


def _order(plan: Plan) -> float:
    return plan.estimate.step_s * (RESOLVED if plan.estimate.verdict is Verdict.UNCERTAIN else 1.0)
