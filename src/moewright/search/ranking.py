"""What a ranking allows to go wrong: a peak beyond capacity, a step longer than predicted."""

from __future__ import annotations

from dataclasses import dataclass

from moewright.cost.uncertainty import step_bound
from moewright.spec.plan import Estimate, Plan

# A step is ranked by the time that nine of ten such steps stay below, and a layout is safe that
# fits in nine of ten cases.
DEFAULT_RISK = 0.1
DEFAULT_FIT_PROBABILITY = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingRule:
    """The risks that a ranking takes.

    Layouts that fit with at least `fit_probability` are safe and come first. They are ranked by
    their bound: the seconds that a step exceeds with a probability of `risk`. At a risk of 0.5 that
    is the predicted step itself.
    """

    fit_probability: float = DEFAULT_FIT_PROBABILITY
    risk: float = DEFAULT_RISK

    def is_safe(self, estimate: Estimate) -> bool:
        """Return whether a layout fits with the probability that the rule asks for."""
        return estimate.fit_probability >= self.fit_probability

    def bound_s(self, plan: Plan) -> float:
        """Return the seconds by which a plan is ranked."""
        estimate = plan.estimate
        return float(step_bound(estimate.step_s, estimate.step_sd, self.risk))
