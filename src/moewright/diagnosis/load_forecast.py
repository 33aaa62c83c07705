"""The load of experts ahead, from the router statistics of a run, and what a new placement pays.

The level of the latest steps goes on, over as many of them as would have told the next best, unless
the run itself shows that something else comes nearer: even loads, to which balancing losses and
biases pull, or the line of its latest half. The run is forecast from earlier steps at the same
distance. Of the way from the level to the other one so much is gone as would have been best there,
less the more chance may explain. Their errors are those of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, sqrt

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
_LATEST = (0.1, 0.2, 1 / 3)  # of the history: how much of it a level may be of, or _FEWEST
_FEWEST = (12, 24)
_NEXT = 24  # records that a level is to tell
_TOLD = 100  # places of the latest half from which it has to
# Below it chance explains what another forecast gained on the level: as a square, two deviations.
_EVIDENCE = 4.0
_DEAD = 1e-6  # tokens of an expert that got none
_COUNTED = 1_000_000  # tokens that a forecast deals to the experts of a layer
_ORIGINS = 12  # earlier steps from which the run itself is forecast, of which most overlap
SURE = 1.476  # deviations: 8 of 10, by Student with five degrees of freedom
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


def forecast_line(history: Floats, ahead: float) -> Floats:
    """Return the shares of experts so many records ahead, along the line of the latest half.

    `history` is [records, experts]. A slope counts less the less sure it is, and the line ends
    where it is twice as long as what it was drawn through.
    """
    shares = history / history.sum(axis=1, keepdims=True)
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
    end = half.mean(axis=0) + slopes * sure * (centred[-1] + span)
    ahead_shares: Floats = np.exp(end - end.max())
    ahead_shares /= ahead_shares.sum()
    return ahead_shares


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outlook:
    """Shares of the experts ahead, and the logarithm of the hottest rank's rows over the mean."""

    shares: Floats
    log_factor: float


def _list_outlooks(history: Floats, ahead: float, ep: int) -> tuple[_Outlook, _Outlook, _Outlook]:
    """Return what goes on if the level of the latest records does, the line, and even loads.

    Single steps have more on the hottest rank than the mean of steps: as much more on the line as
    they had in the latest records.
    """
    shares = history / history.sum(axis=1, keepdims=True)
    singles = _log_factors(shares, ep)
    latest = _choose_latest(singles)
    level = _Outlook(
        shares=shares[-latest:].mean(axis=0), log_factor=float(singles[-latest:].mean())
    )
    line = forecast_line(history, ahead)
    recent = shares[-LEAST_RECORDS:]
    together, along = _log_factors(np.stack((recent.mean(axis=0), line)), ep)
    more = float(np.median(singles[-LEAST_RECORDS:])) - float(together)
    even = _Outlook(shares=np.full(len(line), 1 / len(line)), log_factor=0.0)
    return level, _Outlook(shares=line, log_factor=min(log(ep), float(along) + more)), even


def _choose_latest(singles: Floats) -> int:
    """Return of how many of the latest records the mean would have told the next ones best."""
    records = len(singles)
    counts = sorted({min(records, n) for n in (*_FEWEST, *(int(records * x) for x in _LATEST))})
    first = max(records // 2, max(_FEWEST))
    places = np.arange(first, records - LEAST_RECORDS + 1, max(1, records // _TOLD))
    counts = [count for count in counts if count >= LEAST_RECORDS] or [records]
    if not len(places):
        return counts[-1]
    sums = np.concatenate(([0.0], np.cumsum(singles)))
    ends = np.minimum(records, places + _NEXT)
    came = (sums[ends] - sums[places]) / (ends - places)

    def squares(count: int) -> float:
        begins = np.maximum(0, places - count)
        told = (sums[places] - sums[begins]) / (places - begins)
        return float(np.mean(np.square(told - came)))

    return min(counts, key=squares)


def _log_factors(shares: Floats, ep: int) -> Floats:
    """Return the logarithm of the hottest rank's rows over the mean of each record of shares."""
    ranks = shares.reshape(len(shares), ep, -1).sum(axis=2)
    factors: Floats = np.log(np.maximum(ranks.max(axis=1) * ep / ranks.sum(axis=1), 1.0))
    return factors


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


def forecast_history(history: Floats, ahead: float, ep: int) -> WeighedForecast:
    """Return the level of the latest records, moved as far as the run itself shows that it pays.

    The run is forecast from earlier records. Where it is shorter than the horizon, errors grow with
    its root, as those of a random walk.
    """
    span = int(min(ahead, max(1, len(history) // 3)))
    last = len(history) - span
    origins = np.unique(np.linspace(max(LEAST_RECORDS // 2, last // 2), last, _ORIGINS).astype(int))
    singles = _log_factors(history / history.sum(axis=1, keepdims=True), ep)
    outlooks = [_list_outlooks(history[:origin], span, ep) for origin in origins]
    factors = np.array([[item.log_factor for item in three] for three in outlooks])
    came = np.array(
        [
            np.median(singles[max(origin, origin + span - LEAST_RECORDS // 2) : origin + span])
            for origin in origins
        ]
    )
    rest = came - factors[:, 0]
    level, *others = _list_outlooks(history, ahead, ep)
    shares, log_factor = level.shares, level.log_factor
    # Lines through less than two levels' records are noise, whatever they would have gained.
    is_known = origins >= 2 * LEAST_RECORDS
    independent = 1 + (last - int(origins[0])) / span
    moves = factors[:, 1:] - factors[:, :1]
    changes = [
        (*_weigh_change(move[is_known], rest[is_known], independent), place)
        for place, move in enumerate(moves.T)
    ]
    evidence, weight, place = max(changes)
    if evidence > _EVIDENCE:
        weight *= 1 - _EVIDENCE / evidence
        other = others[place]
        shares = shares + weight * (other.shares - shares)
        log_factor += weight * (other.log_factor - log_factor)
        rest = rest - weight * moves[:, place]
    deviation = sqrt(float(np.mean(np.square(rest))))
    return WeighedForecast(
        shares=shares,
        factor=exp(log_factor),
        error=max(_LEAST_ERROR, deviation * sqrt(max(1.0, ahead / span))),
    )


def _weigh_change(change: Floats, rest: Floats, independent: float) -> tuple[float, float]:
    """Return how surely a change of the level explains what that left, and how much of it does.

    By least squares; `independent` is how many of the errors do not overlap.
    """
    square = float(change @ change)
    if not square:
        return 0.0, 0.0
    weight = float(change @ rest) / square
    left = float(np.mean(np.square(rest - weight * change)))
    evidence = weight**2 * square / len(change) * independent / max(left, _LEAST_ERROR**2)
    return (evidence, min(1.0, weight)) if weight > 0 else (0.0, 0.0)


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
    forecast = forecast_history(history, ahead, ep)
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
