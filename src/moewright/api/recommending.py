"""The two answers of a search, the fastest layout and the fastest that somebody ran, in short."""

from __future__ import annotations

from math import exp

from moewright.api.running import list_trainers
from moewright.cost.evidence import count_proofs
from moewright.diagnosis.published import Nearness, find_fastest_run, find_nearest_runs
from moewright.rules.job import plan_job
from moewright.search.search import SearchResult
from moewright.spec.plan import Plan, PublishedFigure, Recommendation


def recommend_fast(plan: Plan, result: SearchResult) -> Recommendation:
    """Return what to expect of the first plan of a search."""
    return _recommend(plan, result.optimism)


def recommend_proven(result: SearchResult) -> Recommendation | None:
    """Return what to expect of the layout that somebody ran on the part; None where nobody did."""
    if result.proven is None:
        return None
    is_first = result.proven.layout == result.plans[0].layout
    return _recommend(result.proven, result.optimism if is_first else result.proven_optimism)


def _recommend(plan: Plan, optimism: float) -> Recommendation:
    """Return a plan in short whose step is expected to be longer by a factor of exp(optimism)."""
    estimate = plan.estimate
    tokens_per_s = estimate.tokens_per_s_per_device / exp(optimism)
    return Recommendation(
        layout=plan.layout,
        step_s=estimate.step_s,
        expected_step_s=estimate.step_s * exp(optimism),
        tokens_per_s_per_device=tokens_per_s,
        peak_bytes=estimate.peak_bytes,
        fit_probability=estimate.fit_probability,
        grade=estimate.evidence.grade,
        runs=count_proofs(plan_job(plan), plan.hardware),
        trainers=list_trainers(plan),
        published=find_published_figure(plan, tokens_per_s),
    )


def find_published_figure(plan: Plan, tokens_per_s: float) -> PublishedFigure | None:
    """Return the published run nearest to a plan of that speed (tokens/s a device).

    None where nobody published one of its model on its part.
    """
    (run,) = find_nearest_runs(plan, 1)
    if run.nearness not in (Nearness.SAME, Nearness.NEAR):
        return None
    fastest = find_fastest_run(plan)
    ratio = tokens_per_s / run.measured
    uneven = plan.estimate.imbalance
    even_ratio = 0.0
    if run.is_balanced and uneven.even_step_s:
        even_ratio = ratio * plan.estimate.step_s / uneven.even_step_s
    return PublishedFigure(
        id=run.id,
        model=run.model,
        device=run.device,
        devices=run.devices,
        layout=run.layout,
        tokens_per_s_per_device=run.measured,
        ratio=ratio,
        differs=run.differs,
        source=run.source,
        best_tokens_per_s_per_device=fastest.measured if fastest else 0.0,
        ratio_of_best=tokens_per_s / fastest.measured if fastest else 0.0,
        even_ratio=even_ratio,
    )
