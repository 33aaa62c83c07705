"""What would lessen the cost of uneven routing, and from which load on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moewright.codec import format_layout_changes
from moewright.cost.estimate import estimate
from moewright.rules.job import plan_job
from moewright.rules.limits.legality import check_legality
from moewright.spec.layout import Layout
from moewright.spec.plan import Estimate, Plan
from moewright.spec.units import format_bytes, format_seconds

REMEDY = "Against imbalance"  # what sentences on remedies begin with
_CAPACITIES = (1.0, 1.5, 2.0)
_WORTH_SAYING = 0.01  # of an even step


def explain_imbalance(plan: Plan) -> tuple[str, ...]:
    """Say what a capacity and fewer or more expert ranks would make of a step that waits.

    Nothing is said where uneven routing costs less than 1 % of the step.
    """
    uneven = plan.estimate.imbalance
    if uneven.cost < _WORTH_SAYING:
        return ()
    lines = []
    if not plan.layout.capacity and not plan.layout.rank_capacity:
        texts = list(_price_capacities(plan))
        if texts:
            lines.append(f"{REMEDY}, capacities that drop rows: {', '.join(texts)}.")
    for ep in (plan.layout.ep // 2, plan.layout.ep * 2):
        layout = replace(plan.layout, ep=ep)
        if ep > 0 and _is_legal(plan, layout):
            lines.append(_explain_expert_ranks(plan, layout))
    lines.append(
        f"{REMEDY}, replicas and placement by a measured load (--load) save at most "
        f"{format_seconds(plan.estimate.step_s - uneven.even_step_s)} of the step."
    )
    return tuple(lines)


def _price_capacities(plan: Plan) -> Iterator[str]:
    for capacity in _CAPACITIES:
        layout = replace(plan.layout, capacity=capacity)
        if _is_legal(plan, layout):
            step_s = _estimate(plan, layout).step_s
            change = step_s / plan.estimate.step_s - 1
            yield f"{capacity:g} {format_seconds(step_s)} ({change:+.1%})"


def _explain_expert_ranks(plan: Plan, layout: Layout) -> str:
    """Say what other expert ranks make of the step, and from which load on they are faster.

    Steps are linear in the load of the hottest rank, and the excess of one number of ranks over
    that of another is the same at every load.
    """
    own = plan.estimate
    other = _estimate(plan, layout)
    changes = format_layout_changes(layout, plan.layout)
    change = other.step_s / own.step_s - 1
    text = f"{REMEDY}, {changes}: {format_seconds(other.step_s)} a step ({change:+.1%})"
    if other.margin_bytes < 0:
        text += f", {format_bytes(-other.margin_bytes)} over the memory"
    own_cost_s = own.step_s - own.imbalance.even_step_s
    other_cost_s = other.step_s - (other.imbalance.even_step_s or other.step_s)
    gained_s = other_cost_s - own_cost_s
    behind_s = own.imbalance.even_step_s - (other.imbalance.even_step_s or other.step_s)
    if gained_s and behind_s / gained_s > 0:
        load = 1 + (own.imbalance.load - 1) * behind_s / gained_s
        side = "above" if gained_s < 0 else "below"
        text += f"; faster {side} {load:.2f} x on the busiest rank"
    return f"{text}."


def _is_legal(plan: Plan, layout: Layout) -> bool:
    return not check_legality(replace(plan_job(plan), layout=layout))


def _estimate(plan: Plan, layout: Layout) -> Estimate:
    return estimate(plan.model, plan.workload, plan.hardware, layout)
