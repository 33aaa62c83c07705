"""What plans are ranked by: the probability that they fit, and the bound of their step."""

from __future__ import annotations

from moewright.cost.uncertainty import step_bound
from moewright.spec.plan import Estimate, Plan, RankedLayout, RankingRule


def is_safe(estimate: Estimate, rule: RankingRule) -> bool:
    """Return whether a layout fits with the probability that the rule asks for."""
    return estimate.fit_probability >= rule.fit_probability


def bound_s(estimate: Estimate, rule: RankingRule) -> float:
    """Return the seconds by which an estimate is ranked."""
    return float(step_bound(estimate.step_s, estimate.step_sd, rule.risk))


def to_ranked_layout(plan: Plan, rule: RankingRule) -> RankedLayout:
    """Return a plan in short, as the plan that was chosen over it lists it."""
    estimate = plan.estimate
    return RankedLayout(
        layout=plan.layout,
        step_s=estimate.step_s,
        step_bound_s=bound_s(estimate, rule),
        peak_bytes=estimate.peak_bytes,
        fit_probability=estimate.fit_probability,
        grade=estimate.evidence.grade,
    )
