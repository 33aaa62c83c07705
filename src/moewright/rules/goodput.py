"""The share of calendar time in which a job trains, and the best interval of its checkpoints.

How far apart checkpoints are saved, from how often a job fails and what a save costs it. Failures
come with a constant hazard, so that the seconds between them are exponential with a mean of
`mtbf_s`. `save_s` are the seconds of training that one save costs: all of it where training waits,
of an asynchronous save those in which training stands still. Sources: J. W. Young, "A first order
approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.

The share of calendar time in which a job trains: saves, failures, replay and planned stops.
Failures come with a constant hazard, also while the job recovers. A failure loses what was trained
since the start of the newest save that is durable. An asynchronous save stops training for `save_s`
and is durable `durable_s` after its start; while it is written, the job trains on. With g =
interval + save_s and L = durable_s - save_s <= g, the expected time of an interval solves two
linear equations, of intervals that begin with a durable save and with one that is still written:

    E = M exp((R + L)/M) (exp(g/M) - 1)

which is Daly's (2006, eq. 13) with the recovery R lengthened by L.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, exp, expm1, inf, log, log1p, sqrt

import numpy as np
import numpy.typing as npt

_NEWTON_STEPS = 60  # a bound; four or five are taken


def first_order_interval_s(mtbf_s: float, save_s: float) -> float:
    """Return Young's interval, the seconds of training between saves: sqrt(2 save_s mtbf_s)."""
    return sqrt(2 * save_s * mtbf_s)


def optimum_interval_s(mtbf_s: float, save_s: float) -> float:
    """Return the seconds of training between saves that lose the least time.

    It is where `expected_work_ratio` is least: t = M (1 + W(-exp(-1 - C/M))), with W Lambert's
    function, M the mean time between failures and C the cost of a save. Detection, restart and
    loading add the same to every failure and do not move it. A job that never fails (`mtbf_s` of
    infinity) need not save: infinity.
    """
    if mtbf_s == inf:
        return inf
    # With y = t/M, the zero of the derivative is -y - log(1 - y) = C/M, which rises from 0 at y = 0
    # to infinity at y = 1 and is convex: Newton's steps from above the root fall towards it.
    cost = save_s / mtbf_s
    # expm1 and log1p: with saves of seconds and failures of days 1 - exp(-x) loses its digits.
    y = -expm1(-sqrt(2 * cost) - cost)
    for _ in range(_NEWTON_STEPS):
        step = (-y - log1p(-y) - cost) * (1 - y) / y if 0 < y < 1 else 0.0
        y -= step
        # A step this small is the rounding of the terms above (2.2e-16 each).
        if abs(step) <= 1e-14 * y:
            break
    return mtbf_s * y


def expected_work_ratio(interval_s: float, mtbf_s: float, save_s: float, restart_s: float) -> float:
    """Return the expected seconds of a second of training (Daly 2006, eq. 13).

    A failure loses what was trained since the last save and takes `restart_s` until training goes
    on, in which the job may fail again.
    """
    if mtbf_s == inf:
        return 1 + save_s / interval_s
    failures = expm1((interval_s + save_s) / mtbf_s)
    return mtbf_s * exp(restart_s / mtbf_s) * failures / interval_s


Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruptions:
    """What keeps a whole job from training, in seconds; infinity: never.

    `recovery_s` goes from a failure to the first step after it: detection, replacement, start and
    loading. Planned stops save before they stop, so that nothing is trained twice.
    """

    mtbf_s: float
    recovery_s: float
    save_s: float  # that training stands still for a save
    durable_s: float = 0.0  # from the start of a save until the job can start from it
    planned_mtbf_s: float = inf  # mean time between planned stops
    planned_stop_s: float = 0.0

    @property
    def latency_s(self) -> float:
        """The seconds of training under which a save is still written."""
        return max(0.0, self.durable_s - self.save_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """The interval between saves, and the shares of calendar time, which sum to 1."""

    interval_s: float  # of training, between two saves
    training: float  # goodput: steps that are not done again
    saves: float
    recovery: float
    replay: float  # steps done again, and work that a failure cut off
    planned: float


def choose_interval_s(interruptions: Interruptions) -> float:
    """Return the interval that loses the least, no shorter than a save takes to be durable."""
    best_s = optimum_interval_s(interruptions.mtbf_s, interruptions.save_s)
    # L <= g of the module's text; and a save that costs nothing would be best every 0 seconds.
    return max(best_s, interruptions.latency_s - interruptions.save_s, 1.0)


def compute_goodput(interruptions: Interruptions, interval_s: float | None = None) -> Goodput:
    """Return the goodput with an interval, or with the best one.

    The interval and a save together have to be as long as a save takes to be durable.
    """
    if interval_s is None:
        interval_s = choose_interval_s(interruptions)
    mtbf_s = interruptions.mtbf_s
    running = 1 - min(1.0, interruptions.planned_stop_s / interruptions.planned_mtbf_s)
    if mtbf_s == inf:
        saves = 0.0 if interval_s == inf else interruptions.save_s / interval_s
        ratio, recovery = 1 + saves, 0.0
    else:
        restart_s = interruptions.recovery_s + interruptions.latency_s
        ratio = expected_work_ratio(interval_s, mtbf_s, interruptions.save_s, restart_s)
        saves = interruptions.save_s / interval_s
        # Of the time after a failure, until it is over or the next one comes.
        recovery = ratio * -expm1(-interruptions.recovery_s / mtbf_s)
    return Goodput(
        interval_s=interval_s,
        training=running / ratio,
        saves=running * saves / ratio,
        recovery=running * recovery / ratio,
        # What is left of the time, which rounding may leave just below 0.
        replay=running * max(0.0, ratio - 1 - saves - recovery) / ratio,
        planned=1 - running,
    )


DrawLives = Callable[[int], Array]


def simulate_failures(
    work_s: float,
    interruptions: Interruptions,
    interval_s: float,
    *,
    traces: int,
    draw_lives: DrawLives,
) -> Array:
    """Return the calendar seconds of so many histories of a job [traces].

    `work_s` are its seconds of training. Planned stops are left out. `draw_lives(n)` are the
    seconds until each of n jobs fails next [n]. Every history goes from failure to failure: it
    keeps what was durable and begins again after a recovery, in which it may fail too.
    """
    save_s = interruptions.save_s
    segment_s = interval_s + save_s
    total_s = np.zeros(traces)
    kept_s = np.zeros(traces)
    open_traces = np.arange(traces)
    while len(open_traces):
        left_s = work_s - kept_s[open_traces]
        # None at the end of the work, which 1e-9 keeps rounding from adding.
        saves = np.maximum(np.ceil(left_s / interval_s - 1e-9) - 1, 0)
        finish_s = left_s + saves * save_s
        life_s = draw_lives(len(open_traces))
        fails = life_s < finish_s
        total_s[open_traces] += np.minimum(life_s, finish_s)
        open_traces, life_s = open_traces[fails], life_s[fails]
        # A save that was still being written when the job failed is lost with it.
        durable = np.floor((life_s - interruptions.latency_s) / segment_s)
        kept_s[open_traces] += interval_s * np.maximum(durable, 0)
        recovering = open_traces
        while len(recovering):
            life_s = draw_lives(len(recovering))
            total_s[recovering] += np.minimum(life_s, interruptions.recovery_s)
            recovering = recovering[life_s < interruptions.recovery_s]
    return total_s


def waiting_share(failing: float, spares: int) -> float:
    """Return the share of time in which a job waits for a part, with so many spares.

    `failing` is how many units fail in the time of a repair. A job runs with up to `spares` units
    in repair and stands still with one more, in which nothing else fails: Erlang's loss formula,
    which holds for repairs of any distribution with that mean.
    """
    blocked = 1.0
    # B(n) = a B(n - 1) / (n + a B(n - 1)): no power or factorial that could overflow.
    for units in range(1, spares + 2):
        blocked = failing * blocked / (units + failing * blocked)
    return blocked


def shrunk_throughput(failing: float, spares: int, replicas: int, units_a_replica: float) -> float:
    """Return the mean throughput over that of a whole job which runs on with fewer replicas.

    Units in repair are Poisson with mean `failing`; those beyond the spares are missing, and the
    units that are left make up whole data-parallel replicas.
    """
    if failing == 0:
        return 1.0
    # What a Poisson variable has beyond 12 deviations and 50 is less than rounding.
    most = ceil(failing + 12 * sqrt(failing)) + 50
    units = np.arange(most + 1)
    # By logarithms: n! overflows from n = 171 on.
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(units[1:]))])
    probability = np.exp(units * log(failing) - failing - log_factorial)
    lost = np.ceil(np.maximum(0, units - spares) / units_a_replica)
    return float(np.sum(probability * np.maximum(0.0, 1 - lost / replicas)))
