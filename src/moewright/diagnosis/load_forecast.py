"""The load of experts ahead, from the router statistics of a run, and what a new placement pays.

Shares of the experts stay as they are, return to what they were over a longer time, or go on along
the line of the latest half of the run, or along a part of it: balancing losses and biases pull most
loads back. How far each such forecast is off is measured on the run itself: it is forecast from
earlier steps, and held beside what came. The answer is their mean, weighted by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, sqrt
from statistics import median

import numpy as np
from numpy.typing import NDArray

from moewright.cost.estimate import estimate
from moewright.cost.ledger import predict_rank_ledger
from moewright.rules.expert_placement import (
    place_balanced,
    place_with_replicas,
    rank_load_factor,
)
from moewright.rules.job import Job, plan_job
from moewright.rules.limits.legality import check_legality
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import ExpertPlacement, Layout
from moewright.spec.ledger import Component, Module
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row
from moewright.spec.run import RunRecord
from moewright.spec.workload import Routing, Workload

Floats = NDArray[np.float64]

LEAST_RECORDS = 12  # steps with loads, from which on something is forecast
_FLOOR = 0.02  # of the mean share, so that dead experts have a logarithm
_LATEST = 0.1  # of the history
# How much of a line is followed, and of the history, to its end, whose level is taken.
_METHODS = ((0.0, _LATEST), (0.0, 1 / 3), (0.0, 1.0), (0.3, _LATEST), (1.0, _LATEST))
_SHARPNESS = 4  # weights fall with this power of the error: two would let bad ones spoil a line
_DEAD = 1e-6  # tokens of an expert that got none
_COUNTED = 1_000_000  # tokens that a forecast deals to the experts of a layer
_ORIGINS = 6  # earlier steps from which the run itself is forecast
SURE = 1.476  # deviations: 8 of 10, by Student with one less than _ORIGINS degrees of freedom
_LEAST_ERROR = 0.005
_EXPERT_STATES = (Component.WEIGHTS, Component.MASTER, Component.MOMENTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerForecast:
    """The hottest rank's rows over the mean in a layer: now, ahead, and under other placements.

    `low` and `high` hold 8 of 10 outcomes; `balanced` and `replicated` are what is expected of a
    placement that is made for the forecast, without and with a replica on each rank.
    """

    layer: int
    hottest_rank: int
    now: float
    expected: float
    low: float
    high: float
    balanced: float
    replicated: float
    counts: tuple[int, ...]  # that are expected, of a million tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementOffer:
    """What a placement of the experts for the forecast gains, and what the move costs.

    `pays_after` is how many steps gain what the move takes; infinite where nothing is gained.
    """

    layout: str
    step_s: float
    gain_s: float  # of a step, on the placement that the run has
    moved_experts: int  # of all layers and ranks
    moved_bytes: int  # that the busiest rank receives
    move_s: float
    pays_after: float


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LoadForecast(Record):
    """The load of the experts of a run some steps ahead, and placements that pay, best first."""

    steps: int
    horizon: int
    step_s: float  # predicted under the forecast, with the run's placement
    layers: tuple[LayerForecast, ...]
    offers: tuple[PlacementOffer, ...]

    def title(self) -> str:
        """Return the hottest rank's rows now and ahead, of the worst layer."""
        worst = max(self.layers, key=lambda layer: layer.expected)
        return (
            f"in {self.horizon:,} steps the hottest rank of layer {worst.layer} has "
            f"{worst.expected:.2f} times the mean rows ({worst.low:.2f} to {worst.high:.2f}); now "
            f"{worst.now:.2f}"
        )

    def to_rows(self) -> list[Row]:
        """Return a row for each layer."""
        return [
            {
                "layer": layer.layer,
                "hottest_rank": layer.hottest_rank,
                "now": layer.now,
                "expected": layer.expected,
                "low": layer.low,
                "high": layer.high,
                "balanced": layer.balanced,
                "replicated": layer.replicated,
            }
            for layer in self.layers
        ]


def forecast_shares(history: Floats, ahead: float, trend: float, part: float = _LATEST) -> Floats:
    """Return the shares of experts so many records ahead; `history` is [records, experts].

    `trend` is how much of the line is followed: without any the level of the last `part` of the
    history goes on.
    """
    shares = history / history.sum(axis=1, keepdims=True)
    if not trend:
        level: Floats = shares[-max(LEAST_RECORDS, int(len(shares) * part)) :].mean(axis=0)
        return level
    logs = np.log(np.maximum(shares, _FLOOR / shares.shape[1]))
    half = logs[len(logs) // 2 :] if len(logs) >= 2 * LEAST_RECORDS else logs
    places = np.arange(len(half), dtype=float)
    centred = places - places.mean()
    spread = float(centred @ centred)
    slopes = centred @ half / spread
    rest = half - half.mean(axis=0) - np.outer(centred, slopes)
    errors = np.sqrt((rest**2).sum(axis=0) / max(1, len(half) - 2) / spread)
    sure = slopes**2 / np.maximum(slopes**2 + errors**2, 1e-30)
    span = min(ahead, float(len(half)))
    end = half.mean(axis=0) + slopes * sure * (centred[-1] + trend * span)
    ahead_shares: Floats = np.exp(end - end.max())
    ahead_shares /= ahead_shares.sum()
    return ahead_shares


def forecast_factor(
    history: Floats, ahead: float, ep: int, trend: float, part: float = _LATEST
) -> float:
    """Return the hottest rank's rows over the mean so many records ahead, by one method.

    What single steps have more than the mean of steps is what they had in the history.
    """
    count = LEAST_RECORDS
    if part > _LATEST:
        count = max(count, int(len(history) * part))
    recent = history[-count:]
    together = rank_load_factor(_deal(recent.sum(axis=0)), ep)
    factor = rank_load_factor(_deal(forecast_shares(history, ahead, trend, part)), ep)
    return min(float(ep), factor * _single_factor(recent, ep) / together)


def _single_factor(records: Floats, ep: int) -> float:
    """Return the hottest rank's rows over the mean in a step, the median of these."""
    return median(rank_load_factor(_deal(row), ep) for row in records)


def _deal(shares: Floats) -> tuple[int, ...]:
    return tuple(round(_COUNTED * float(share)) for share in shares / shares.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class WeighedForecast:
    """The shares of experts ahead, the hottest rank's rows over the mean, and how far it is off.

    `error` is the deviation of the logarithm of `factor`.
    """

    shares: Floats
    factor: float
    error: float


def weigh_forecasts(history: Floats, ahead: float, ep: int) -> WeighedForecast:
    """Return the mean of all methods, weighted by how far each was off in the run itself.

    The run is forecast from earlier records by each. Where the run is shorter than the horizon,
    errors grow with its root, as those of a random walk.
    """
    span = int(min(ahead, max(1, len(history) // 3)))
    last = len(history) - span
    origins = np.unique(np.linspace(max(LEAST_RECORDS // 2, last // 2), last, _ORIGINS).astype(int))
    deviations = []
    for method in _METHODS:
        errors = []
        for origin in origins:
            told = forecast_factor(history[:origin], span, ep, *method)
            came = history[max(origin, origin + span - LEAST_RECORDS // 2) : origin + span]
            errors.append(log(told / _single_factor(came, ep)))
        deviations.append(sqrt(float(np.mean(np.square(errors)))))
    weights = np.maximum(deviations, _LEAST_ERROR) ** -float(_SHARPNESS)
    weights /= weights.sum()
    factors = [forecast_factor(history, ahead, ep, *method) for method in _METHODS]
    shares = np.array([forecast_shares(history, ahead, *method) for method in _METHODS])
    deviation = sqrt(float(weights @ np.square(deviations)))
    return WeighedForecast(
        shares=weights @ shares,
        factor=exp(float(weights @ np.log(factors))),
        error=max(_LEAST_ERROR, deviation * sqrt(max(1.0, ahead / span))),
    )


def forecast_run(record: RunRecord, horizon: int) -> LoadForecast:
    """Forecast the load of the experts of a run, and price placements for it.

    Raises:
        BadInput: its experts are not spread over ranks, or too few steps have recorded their loads.
    """
    plan = record.plan
    ep = plan.layout.ep
    if plan.model.moe is None or ep == 1:
        rule = "has all experts on every rank: no placement of them helps"
        raise BadInput(Reason(field="layout.ep", value=str(ep), rule=rule, nearest="2"))
    if any(step.moves.experts for step in record.steps):
        rule = "has moved experts in this run: a forecast is of a placement that stays"
        value = str(plan.workload.rebalance_every)
        raise BadInput(Reason(field="train.rebalance_every", value=value, rule=rule, nearest="0"))
    logged = [step for step in record.steps if step.loads]
    if len(logged) < LEAST_RECORDS:
        rule = f"has the loads of {len(logged)} steps, a forecast needs {LEAST_RECORDS}"
        nearest = "train.router_log_every_steps = 1"
        raise BadInput(Reason(field="router statistics", rule=rule, nearest=nearest))
    every = max(1.0, (logged[-1].step - logged[0].step) / (len(logged) - 1))
    layers = []
    for index, load in enumerate(logged[-1].loads):
        rows = [
            step.loads[index].counts
            for step in logged
            if len(step.loads) > index and any(step.loads[index].counts)
        ]
        layers.append(_forecast_layer(load.layer, rows, horizon / every, ep))
    workload = replace(
        plan.workload,
        routing=Routing.MEASURED,
        load_histogram=tuple(layer.counts for layer in layers),
    )
    step_s, offers = _price_placements(plan, workload)
    return LoadForecast(
        steps=logged[-1].step,
        horizon=horizon,
        step_s=step_s,
        layers=tuple(layers),
        offers=offers,
    )


def _forecast_layer(
    layer: int, rows: Sequence[Sequence[int]], ahead: float, ep: int
) -> LayerForecast:
    history = np.array(rows, dtype=float) + _DEAD
    forecast = weigh_forecasts(history, ahead, ep)
    counts = _deal(forecast.shares)
    expected = forecast.factor
    placed = tuple(counts[expert] for expert in place_balanced(counts, ep))
    local = len(counts) // ep
    ranks = [sum(counts[rank * local : (rank + 1) * local]) for rank in range(ep)]
    return LayerForecast(
        layer=layer,
        hottest_rank=ranks.index(max(ranks)),
        now=rank_load_factor(_deal(history[-LEAST_RECORDS:].sum(axis=0)), ep),
        expected=expected,
        low=max(1.0, expected * exp(-SURE * forecast.error)),
        high=min(float(ep), expected * exp(SURE * forecast.error)),
        balanced=rank_load_factor(placed, ep),
        replicated=place_with_replicas(counts, ep, 1).load_factor,
        counts=counts,
    )


def _price_placements(plan: Plan, workload: Workload) -> tuple[float, tuple[PlacementOffer, ...]]:
    """Return the step with the run's placement, and the placements that are faster."""
    base = replace(plan.layout, expert_placement=ExpertPlacement.CONTIGUOUS, spare=0)
    step_s = estimate(plan.model, workload, plan.hardware, base).step_s
    offers = []
    for text, spare in (
        ("expert_placement=balanced", 0),
        ("expert_placement=balanced,spare=1", 1),
    ):
        layout = replace(base, expert_placement=ExpertPlacement.BALANCED, spare=spare)
        if check_legality(Job(model=plan.model, workload=workload, layout=layout)):
            continue
        predicted = estimate(plan.model, workload, plan.hardware, layout)
        moved, nbytes = _count_moves(plan, workload, layout)
        move_s = nbytes / _slowest_rate(plan)
        gain_s = step_s - predicted.step_s
        offers.append(
            PlacementOffer(
                layout=text,
                step_s=predicted.step_s,
                gain_s=gain_s,
                moved_experts=moved,
                moved_bytes=nbytes,
                move_s=move_s,
                pays_after=move_s / gain_s if gain_s > 0 else inf,
            )
        )
    return step_s, tuple(sorted(offers, key=lambda offer: offer.step_s))


def _count_moves(plan: Plan, workload: Workload, layout: Layout) -> tuple[int, int]:
    """Return the experts that change their rank, and the bytes that the busiest rank receives."""
    ep = layout.ep
    received = [0] * ep
    for counts in workload.load_histogram:
        slots: Sequence[int] = place_balanced(counts, ep)
        if layout.spare:
            slots = place_with_replicas(counts, ep, layout.spare).slots
        local, block = len(slots) // ep, len(counts) // ep
        for slot, expert in enumerate(slots):
            received[slot // local] += expert // block != slot // local
    states = predict_rank_ledger(plan_job(plan), rank=0, selection=None)
    held_bytes = sum(
        row.bytes
        for row in states.memory
        if row.module is Module.EXPERTS and row.component in _EXPERT_STATES
    )
    assert plan.model.moe is not None
    layers = max(1, len(workload.load_histogram) // layout.pp)
    expert_bytes = held_bytes / (layers * (plan.model.moe.experts // ep))
    return sum(received), round(max(received) / layout.pp * expert_bytes)


def _slowest_rate(plan: Plan) -> float:
    """Return the bytes a second of the slowest link that a group of experts' ranks crosses."""
    fabric = plan.hardware.fabric
    crosses = plan.layout.ep * plan.layout.etp > fabric.domain_size
    return fabric.network_Bps.value if crosses else fabric.domain_Bps.value
