"""How far steps lie apart on levels of switches: ranks and links differ, and a barrier waits.

A rank computes for its own time and its port takes its own; a link that bounds a transfer keeps all
ranks of its unit waiting. A step ends with the slowest of all (`rules.slow_workers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import hypot

from moewright.cost.calendar_time import read_reliability
from moewright.cost.constants import FITTED_DEVICES
from moewright.cost.time.collective_time import CollectiveModel
from moewright.cost.time.topology import PORTS, count_units
from moewright.rules.routing import largest_of
from moewright.rules.slow_workers import Siblings, find_slowest
from moewright.spec.hardware import Fabric
from moewright.spec.layout import Layout
from moewright.spec.plan import Estimate, StepSpread, TimePart

# The groups whose rings take a part's seconds; those of experts are exchanged.
_RINGS = {
    TimePart.TP_COMM: ("tp",),
    TimePart.CP_COMM: ("cp",),
    TimePart.PP_COMM: ("pp",),
    TimePart.DP_COMM: ("dp_cp", "edp"),
}


def estimate_spread(
    fabric: Fabric, collectives: CollectiveModel, layout: Layout, estimate: Estimate
) -> StepSpread | None:
    """Return how far the steps of an estimate lie apart; None where a fabric has no levels.

    The predicted step is the mean of runs of FITTED_DEVICES, whose slowest rank and port are in its
    rates, and waits for the slowest of further ranks (`DeviceRates`). What more links than those
    runs had add is beside it; fewer take nothing away.
    """
    if not fabric.levels:
        return None
    facts = read_reliability()
    rank_deviation, link_deviation = hypot(*facts.worker_spread), hypot(*facts.link_spread)
    shares = _share_transfers(collectives, layout, estimate)
    moving = sum(shares.values())
    units = (*count_units(fabric, layout.world_size), 1)
    siblings = [
        Siblings(
            count=layout.world_size / units[0],
            deviation=hypot(rank_deviation * (1 - moving), link_deviation * shares.get(PORTS, 0.0)),
        )
    ]
    siblings += [
        Siblings(
            count=units[level] / units[level + 1],
            deviation=link_deviation * shares.get(level, 0.0),
        )
        for level in range(len(fabric.levels))
    ]
    own = rank_deviation * (1 - moving)
    fitted = Siblings(count=FITTED_DEVICES, deviation=hypot(own, link_deviation * moving))
    further = own * (largest_of(layout.world_size) - largest_of(FITTED_DEVICES))
    slowest = find_slowest(siblings)
    # What the predicted step has waited for already, so that it is not counted twice.
    predicted = min(slowest.mean, find_slowest([fitted]).mean + max(0.0, further))
    step_s = estimate.step_s / (1 + predicted)
    return StepSpread(
        mean_s=step_s * (1 + slowest.mean),
        median_s=step_s * (1 + slowest.median),
        p90_s=step_s * (1 + slowest.p90),
    )


def _share_transfers(
    collectives: CollectiveModel, layout: Layout, estimate: Estimate
) -> dict[int, float]:
    """Return the share of a step that links of each level bound, and ports."""
    shares: dict[int, float] = {}
    for level, seconds in _list_transfers(collectives, layout, estimate):
        shares[level] = shares.get(level, 0.0) + seconds / estimate.step_s
    return shares


def _list_transfers(
    collectives: CollectiveModel, layout: Layout, estimate: Estimate
) -> Iterator[tuple[int, float]]:
    """Yield what bounds the transfers of each part of a step, and their seconds."""
    for share in estimate.shares:
        if share.part is TimePart.EP_COMM:
            yield collectives.span(layout, "ep").crossing.exchange_level, share.seconds
        elif share.part in _RINGS:
            crossings = [collectives.span(layout, group).crossing for group in _RINGS[share.part]]
            yield max(crossings, key=lambda crossing: crossing.ring).ring_level, share.seconds
