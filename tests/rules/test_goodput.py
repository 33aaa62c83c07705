"""Goodput: the closed form beside drawn histories, shares that sum to 1, spares by Erlang."""

from __future__ import annotations

from functools import partial
from math import exp, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewright.cost.calendar_time import read_reliability
from moewright.rules.goodput import (
    Interruptions,
    choose_interval_s,
    compute_goodput,
    shrunk_throughput,
    simulate_failures,
    waiting_share,
)

HOUR_S = 3600.0
TRACES = 10_000


@pytest.mark.parametrize(
    ("mtbf_hours", "save_s", "durable_s", "recovery_s"),
    [
        (3.1, 8.0, 8.0, 600.0),  # synchronous
        (3.1, 2.0, 300.0, 600.0),  # asynchronous
        (0.3, 5.0, 60.0, 600.0),  # 100,000 devices: failures in recoveries count
        (48.0, 60.0, 60.0, 1800.0),
    ],
)
def test_the_closed_form_is_that_of_ten_thousand_drawn_histories(
    mtbf_hours: float, save_s: float, durable_s: float, recovery_s: float
) -> None:
    interruptions = Interruptions(
        mtbf_s=mtbf_hours * HOUR_S, recovery_s=recovery_s, save_s=save_s, durable_s=durable_s
    )
    interval_s = choose_interval_s(interruptions)
    # A whole number of intervals, so many that the last one, which no save follows, is lost in 1 %.
    work_s = 400 * interval_s
    draw_lives = partial(np.random.default_rng(0).exponential, interruptions.mtbf_s)
    drawn_s = simulate_failures(
        work_s, interruptions, interval_s, traces=TRACES, draw_lives=draw_lives
    )
    goodput = compute_goodput(interruptions, interval_s)
    assert work_s / drawn_s.mean() == pytest.approx(goodput.training, rel=0.01)


@given(
    mtbf_s=st.floats(600.0, 1e7),
    save_s=st.floats(0.1, 300.0),
    durable_s=st.floats(0.0, 3000.0),
    recovery_s=st.floats(0.0, 3600.0),
)
def test_shares_sum_to_1_and_no_other_interval_has_more_goodput(
    mtbf_s: float, save_s: float, durable_s: float, recovery_s: float
) -> None:
    interruptions = Interruptions(
        mtbf_s=mtbf_s,
        recovery_s=recovery_s,
        save_s=save_s,
        durable_s=durable_s,
        planned_mtbf_s=1e6,
        planned_stop_s=600.0,
    )
    best = compute_goodput(interruptions)
    shares = (best.training, best.saves, best.recovery, best.replay, best.planned)
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) >= 0.0
    longer = compute_goodput(interruptions, 1.5 * best.interval_s)
    assert longer.training <= best.training * (1 + 1e-9)


def test_a_job_that_never_fails_only_stops_as_planned() -> None:
    interruptions = Interruptions(
        mtbf_s=inf, recovery_s=600.0, save_s=5.0, planned_mtbf_s=1e5, planned_stop_s=1e3
    )
    goodput = compute_goodput(interruptions)
    assert goodput.training == pytest.approx(0.99)
    assert goodput.interval_s == inf


def test_the_closed_form_is_meta_s_expression_where_losses_are_small() -> None:
    """E[ETTR] = (1 - N r (u + t/2)) / (1 + w/t) (arXiv 2410.21680), to first order."""
    mtbf_s, recovery_s, save_s, interval_s = 200 * HOUR_S, 300.0, 10.0, 3600.0
    expected = (1 - (recovery_s + interval_s / 2) / mtbf_s) / (1 + save_s / interval_s)
    interruptions = Interruptions(mtbf_s=mtbf_s, recovery_s=recovery_s, save_s=save_s)
    goodput = compute_goodput(interruptions, interval_s)
    assert goodput.training == pytest.approx(expected, rel=1e-4)


def test_llama_3_trained_over_90_percent_of_the_time() -> None:
    """419 interruptions in 54 days on 16,384 GPUs, 2 TB/s of storage, ten minutes a recovery."""
    state_bytes = 405e9 * 12
    write_s = state_bytes / 2e12
    for save_s, durable_s in ((write_s + 5, write_s + 5), (1.0, write_s + 5)):
        interruptions = Interruptions(
            mtbf_s=54 * 24 * HOUR_S / 419,
            recovery_s=600.0 + write_s,
            save_s=save_s,
            durable_s=durable_s,
        )
        assert 0.90 < compute_goodput(interruptions).training < 0.95


@pytest.mark.parametrize(
    ("devices", "state_bytes", "recovery_s", "published"),
    [
        # MegaScale (arXiv 2402.15627): hundreds of billions of parameters on over 10,000 GPUs, over
        # 90 % effective time; it is where it was within 15 minutes of a failure.
        (12_288, 530e9 * 12, 15 * 60.0, 0.90),
        # ByteRobust (arXiv 2509.16293): three months on 9,600 GPUs, 97 %, with standby machines
        # and the state in the memory of peers; a minute and a half of recovery is assumed.
        (9_600, 200e9 * 12, 90.0, 0.97),
    ],
)
def test_published_effective_times_lie_within_the_range_of_published_rates(
    devices: int, state_bytes: float, recovery_s: float, published: float
) -> None:
    facts = read_reliability()
    write_s = state_bytes / (facts.storage_Bps_a_device.value * devices)
    least, most = (
        compute_goodput(
            Interruptions(
                mtbf_s=1 / (rate * devices),
                recovery_s=recovery_s + write_s,
                save_s=1.0,
                durable_s=write_s + 5,
            )
        ).training
        for rate in reversed(facts.rate_range)
    )
    assert least < published < most


def test_a_synchronous_job_on_98304_gpus_trains_44_percent_of_the_time() -> None:
    """A failure every 18 minutes and ten minutes to recover (arXiv 2602.00277).

    The paper does not say what a save costs: from one second to a minute the model has 38 to 55 %.
    """
    training = [
        compute_goodput(
            Interruptions(mtbf_s=1080.0, recovery_s=600.0, save_s=save_s, durable_s=save_s)
        ).training
        for save_s in (60.0, 1.0)
    ]
    assert training[0] < 0.44 < training[1]
    assert training[1] < exp(-600 / 1080)


@pytest.mark.parametrize(("failing", "spares"), [(0.5, 0), (3.0, 2), (30.0, 40)])
def test_waiting_for_parts_is_erlang_s_loss(failing: float, spares: int) -> None:
    terms = [1.0]
    for units in range(1, spares + 2):
        terms.append(terms[-1] * failing / units)
    assert waiting_share(failing, spares) == pytest.approx(terms[-1] / sum(terms))


def test_waiting_is_that_of_drawn_repairs_of_one_length() -> None:
    """Erlang's formula holds for any distribution of repairs: here they all take as long."""
    draws = np.random.default_rng(1)
    spares, repair_s, mtbf_s = 2, 1.0, 0.5
    now_s = waiting_s = 0.0
    returns: list[float] = []
    for _ in range(60_000):
        now_s += draws.exponential(mtbf_s)
        returns = [time_s for time_s in returns if time_s > now_s]
        returns.append(now_s + repair_s)
        if len(returns) > spares:
            waiting_s += min(returns) - now_s
            now_s = min(returns)
    assert waiting_s / now_s == pytest.approx(waiting_share(repair_s / mtbf_s, spares), rel=0.02)


def test_a_job_that_shrinks_loses_the_replicas_of_the_missing_units() -> None:
    # Without spares, one unit a replica of ten: each unit in repair costs a tenth.
    assert shrunk_throughput(0.5, 0, 10, 1.0) == pytest.approx(1 - 0.05, rel=1e-3)
    assert shrunk_throughput(0.5, 5, 10, 1.0) > 0.9999
    assert shrunk_throughput(0.0, 0, 10, 1.0) == 1.0
    assert shrunk_throughput(900.0, 1000, 100, 2.0) == pytest.approx(1.0, rel=1e-3)
