"""How far apart checkpoints are saved, from how often a job fails and what a save costs it.

Failures come with a constant hazard, so that the seconds between them are exponential with a mean
of `mtbf_s`. `save_s` are the seconds of training that one save costs: all of it where training
waits, of an asynchronous save those in which training stands still. Sources: J. W. Young, "A first
order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
"""

from __future__ import annotations

from math import exp, expm1, inf, log1p, sqrt

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
    y = -expm1(-sqrt(2 * cost) - cost)
    for _ in range(_NEWTON_STEPS):
        step = (-y - log1p(-y) - cost) * (1 - y) / y if 0 < y < 1 else 0.0
        y -= step
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
