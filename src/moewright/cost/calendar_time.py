"""What a training takes by the calendar: failures, saves, stops, spare parts, energy.

The seconds of its steps are those of a plan. What keeps the devices from them has a closed form
(`rules.goodput`), whose figures are published ones (`reliability`) or the user's own.

What was published of failures, repairs, storage and power, for a job on any number of devices.
`data/reliability.toml` has every figure with its source. A rate is of failures a device-hour: the
hazard of a job is that of its devices together, as Meta's study finds it above 32 of them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from math import ceil, hypot, inf, log, sqrt
from pathlib import Path
from statistics import median
from typing import Any

from moewright.cost.memory.model_states import state_bytes_per_parameter
from moewright.rules.adapters import trained_share
from moewright.rules.goodput import (
    Goodput,
    Interruptions,
    choose_interval_s,
    compute_goodput,
    shrunk_throughput,
    waiting_share,
)
from moewright.rules.shapes.parameters import count_parameters
from moewright.rules.slow_workers import delayed_interval
from moewright.spec.hardware import Fabric, NetworkKind
from moewright.spec.ledger import Component
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan, TimePart
from moewright.spec.units import DAY_S, HOUR_S, Sourced, SourceKind, divide
from moewright.spec.workload import SaveMode, Workload

_DATA = Path(__file__).parent / "data" / "reliability.toml"
# Seconds that a save stands still beside its bytes: a barrier, names and sizes, a commit.
SAVE_OVERHEAD_S = 5.0
# An asynchronous save stops while a rank's state is copied to its host.
COPY_OVERHEAD_S = 1.0
HOST_COPY_BPS = 2e10  # bytes a second from a device to its host, over PCIe 4 or 5


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRate:
    """A published number of failures of so many devices in so many hours."""

    name: str
    failures: float
    devices: int
    hours: float
    source: str

    @property
    def per_device_s(self) -> float:
        """Failures in a second of one device."""
        return self.failures / (self.devices * self.hours * HOUR_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reliability:
    """The published figures; `parts` are shares of failures by part."""

    rates: tuple[FailureRate, ...]
    parts: tuple[tuple[str, float], ...]
    parts_source: str
    hardware_share: Sourced
    planned: FailureRate
    # Deviations between workers, and within one from step to step.
    worker_spread: tuple[float, float]
    link_spread: tuple[float, float]
    mean_delay: Sourced  # share, by what slows jobs for a while
    recovery_s: Sourced
    storage_Bps_a_device: Sourced
    node_power_share: Sourced
    idle_power_share: Sourced
    board_watts: tuple[tuple[str, float], ...]

    @property
    def middle_rate(self) -> float:
        """The median of the published rates, failures in a second of one device."""
        return median(rate.per_device_s for rate in self.rates)

    @property
    def rate_range(self) -> tuple[float, float]:
        """The least and the most failures in a second of one device that were published."""
        rates = [rate.per_device_s for rate in self.rates]
        return min(rates), max(rates)


@cache
def read_reliability() -> Reliability:
    """Read the published figures."""
    data = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    parts = {name: count for name, count in data["parts"].items() if name != "source"}
    watts = {name: value for name, value in data["board_watts"].items() if name != "source"}
    total = sum(parts.values())
    return Reliability(
        rates=tuple(FailureRate(**rate) for rate in data["failure_rate"]),
        parts=tuple((name, count / total) for name, count in parts.items()),
        parts_source=data["parts"]["source"],
        hardware_share=_read_sourced(data["hardware_share"], "value"),
        planned=FailureRate(
            name="planned stops",
            failures=data["planned"]["stops"],
            devices=data["planned"]["devices"],
            hours=data["planned"]["hours"],
            source=data["planned"]["source"],
        ),
        worker_spread=(data["worker_spread"]["between"], data["worker_spread"]["within"]),
        link_spread=(data["link_spread"]["between"], data["link_spread"]["within"]),
        mean_delay=_read_sourced(data["delay"], "share"),
        recovery_s=_read_sourced(data["recovery"], "seconds"),
        storage_Bps_a_device=_read_sourced(data["storage"], "Bps_a_device"),
        node_power_share=_read_sourced(data["node_power"], "share"),
        idle_power_share=_read_sourced(data["idle_power"], "share"),
        board_watts=tuple(watts.items()),
    )


def _read_sourced(table: dict[str, Any], key: str) -> Sourced:
    return Sourced(value=float(table[key]), kind=SourceKind.MEASURED, source=table["source"])


def checkpoint_bytes(model: ModelSpec, workload: Workload) -> float:
    """Return the bytes of a checkpoint: fp32 weights and moments of every parameter that trains.

    Frozen weights are not written.
    """
    parameters = count_parameters(model)
    per_parameter = state_bytes_per_parameter(workload)
    nbytes = per_parameter[Component.MASTER] + per_parameter[Component.MOMENTS]
    return (parameters.total + parameters.mtp) * trained_share(model, workload) * nbytes


_INTERVAL = 0.8  # as every band of the planner
# Domains whose ranks are of no use without the others: a failure takes all of them out.
_WHOLE_DOMAINS = (NetworkKind.NVL36, NetworkKind.NVL72)
_MOST_SPARES = 4096
# Parts of a step in which devices wait.
_WAITS = frozenset(
    {
        TimePart.OFFLOAD,
        TimePart.EP_COMM,
        TimePart.TP_COMM,
        TimePart.CP_COMM,
        TimePart.PP_COMM,
        TimePart.DP_COMM,
        TimePart.BUBBLE,
        TimePart.HOST,
    }
)
_FORWARD_SHARE = 1 / 3  # of a step, that an evaluation of one global batch takes


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """How a job is run: what fails, how it recovers and saves, and what its power is.

    `rate_per_device_s` are failures in a second of one device, with the least and the most that is
    thought of. Zeros leave a choice to the model: `save_every_s` the best interval, `storage_Bps`
    the published one.
    """

    rate_per_device_s: float
    rate_range: tuple[float, float]
    mode: SaveMode = SaveMode.ASYNC
    save_every_s: float = 0.0
    recovery_s: float = 600.0  # from a failure to where loading begins
    storage_Bps: float = 0.0  # of the whole job
    spares: int = -1  # units; -1: as many as cost least
    repair_s: float = 24 * HOUR_S
    # The share that stragglers add to a step; None: that of links, and the published delays in the
    # interval.
    slowdown: float | None = None
    board_watts: float = 0.0  # 0: not known
    price: float | None = None  # of an hour of a device
    pue: float = 1.2
    grid_kg_per_kWh: float = 0.0  # 0: not said


class WhenShort(StrEnum):
    """What a job does while more units are in repair than it has spares."""

    WAIT = "wait"
    SHRINK = "shrink"


@dataclass(frozen=True, kw_only=True, slots=True)
class CalendarTime:
    """A training by the calendar, with shares of it; `goodput` is that of training alone.

    `running` is the share of a whole job's throughput that missing parts leave, `slowdown` what
    stragglers add to a step, and `days_80` holds the days with a probability of 80 % as far as
    steps, failure rates, luck and `mean_delay` go, the delays of jobs by slow spells.
    `node_watts` are those of a device with its share of the node, in the mean over the calendar, of
    which it computes in `computing`; energy has the data centre's overhead too, and that of idle
    spares. It is 0 where the power of the part is not known.
    """

    devices: int
    mtbf_s: float
    mtbf_range_s: tuple[float, float]
    failures: float  # expected over the training
    checkpoint_bytes: float
    save_s: float  # that training stands still
    durable_s: float
    recovery_s: float
    save_every_steps: int
    shares: Goodput
    goodput: float
    goodput_range: tuple[float, float]
    evaluation_days: float
    unit_devices: int  # that are replaced together
    spares: int  # units
    when_short: WhenShort
    running: float
    slowdown: float
    mean_delay: float
    days: float
    days_80: tuple[float, float]
    device_hours: float  # spares too
    cost: float | None  # of them, None without a price
    computing: float
    node_watts: float
    energy_kWh: float
    co2_kg: float  # 0 without the grid's intensity


def estimate_calendar(
    plan: Plan, training_s: float, steps: int, step_log_deviation: float, operations: Operations
) -> CalendarTime:
    """Estimate the calendar time of so many seconds of steps under a plan.

    `step_log_deviation` is the deviation of the logarithm of the predicted step.
    """
    facts = read_reliability()
    devices = plan.hardware.count
    stopped = _list_interruptions(plan, operations, facts)
    rate = operations.rate_per_device_s * devices
    slowdown, mean_delay = _read_slowdown(plan, operations, facts)
    step_s = training_s / max(1, steps) * (1 + slowdown)
    interval_s = _choose_interval_s(stopped, operations.save_every_s, step_s, training_s)
    shares = compute_goodput(stopped, interval_s)
    unit = unit_devices(plan.hardware.fabric, devices)
    spares, running, when_short = _choose_spares(plan, rate, unit, operations, facts)
    work_s = training_s * (1 + slowdown)
    evaluation_s = _evaluation_s(plan.workload, steps, step_s)
    goodput = shares.training * running
    total_s = (work_s + evaluation_s) / goodput
    # Most failures first: they leave the least goodput.
    low, high = (_goodput_at(stopped, operations, bound, devices, running) for bound in (1, 0))
    spread = _log_deviation(total_s, stopped, interval_s, (low, high), step_log_deviation)
    shortest, longest = delayed_interval(spread, mean_delay, _INTERVAL)
    days = total_s / DAY_S
    device_hours = (devices + spares * unit) * total_s / HOUR_S
    # Steps that are done again draw the power of steps.
    computing = (shares.training + shares.replay) * running * _computing_share(plan)
    idle_watts = operations.board_watts * facts.idle_power_share.value
    busy_watts = operations.board_watts * facts.node_power_share.value
    node_watts = idle_watts + (busy_watts - idle_watts) * computing
    watts = devices * node_watts + spares * unit * idle_watts
    energy_kWh = watts / 1000 * total_s / HOUR_S * operations.pue
    least_rate, most_rate = operations.rate_range
    return CalendarTime(
        devices=devices,
        mtbf_s=stopped.mtbf_s,
        mtbf_range_s=(divide(1, most_rate * devices, inf), divide(1, least_rate * devices, inf)),
        failures=rate * total_s,
        checkpoint_bytes=checkpoint_bytes(plan.model, plan.workload),
        save_s=stopped.save_s,
        durable_s=stopped.durable_s,
        recovery_s=stopped.recovery_s,
        save_every_steps=max(1, round(interval_s / step_s)),
        shares=shares,
        goodput=goodput,
        goodput_range=(low, high),
        evaluation_days=evaluation_s / DAY_S,
        unit_devices=unit,
        spares=spares,
        when_short=when_short,
        running=running,
        slowdown=slowdown,
        mean_delay=mean_delay,
        days=days,
        days_80=(days * shortest, days * longest),
        device_hours=device_hours,
        cost=None if operations.price is None else operations.price * device_hours,
        computing=computing,
        node_watts=node_watts,
        energy_kWh=energy_kWh,
        co2_kg=energy_kWh * operations.grid_kg_per_kWh,
    )


def _read_slowdown(plan: Plan, operations: Operations, facts: Reliability) -> tuple[float, float]:
    """Return the share that stragglers add to a predicted step, and the mean delay of a job.

    The slowest of a plan's devices is in its step already; on levels of switches, the slowest of
    its links counts beside it.
    """
    if operations.slowdown is not None:
        return operations.slowdown, 0.0
    spread, slowdown = plan.estimate.spread, 0.0
    if spread is not None:
        slowdown = max(0.0, spread.mean_s / plan.estimate.step_s - 1)
    return slowdown, facts.mean_delay.value


def _computing_share(plan: Plan) -> float:
    """Return the share of a step in which devices compute."""
    waits_s = sum(share.seconds for share in plan.estimate.shares if share.part in _WAITS)
    return max(0.0, 1 - waits_s / plan.estimate.step_s)


def unit_devices(fabric: Fabric, devices: int) -> int:
    """Return the devices that are replaced together: a node, or a whole NVLink domain of racks."""
    whole = fabric.domain in _WHOLE_DOMAINS
    return min(devices, fabric.domain_size if whole else fabric.devices_per_node)


def _list_interruptions(plan: Plan, operations: Operations, facts: Reliability) -> Interruptions:
    devices = plan.hardware.count
    nbytes = checkpoint_bytes(plan.model, plan.workload)
    storage_Bps = operations.storage_Bps or facts.storage_Bps_a_device.value * devices
    write_s = nbytes / storage_Bps
    save_s = SAVE_OVERHEAD_S + write_s
    if operations.mode is SaveMode.ASYNC:
        save_s = COPY_OVERHEAD_S + nbytes / devices / HOST_COPY_BPS
    planned_rate = facts.planned.per_device_s * devices
    is_interrupted = operations.rate_per_device_s > 0
    recovery_s = operations.recovery_s + write_s
    return Interruptions(
        mtbf_s=divide(1, operations.rate_per_device_s * devices, otherwise=inf),
        recovery_s=recovery_s,
        save_s=save_s,
        # The write of an asynchronous save runs beside training, which its copy alone stops.
        durable_s=max(save_s, SAVE_OVERHEAD_S + write_s),
        # A rate of 0 asks for a calendar without any interruption, planned ones too.
        planned_mtbf_s=1 / planned_rate if is_interrupted else inf,
        planned_stop_s=save_s + recovery_s,
    )


def _choose_interval_s(
    stopped: Interruptions, save_every_s: float, step_s: float, training_s: float
) -> float:
    """Return whole steps between saves, as asked for or the best; at most the whole training."""
    wanted_s = save_every_s or choose_interval_s(stopped)
    least_steps = ceil(max(0.0, stopped.latency_s - stopped.save_s) / step_s)
    return max(1, least_steps, round(min(wanted_s, training_s) / step_s)) * step_s


def _choose_spares(
    plan: Plan, rate: float, unit: int, operations: Operations, facts: Reliability
) -> tuple[int, float, WhenShort]:
    """Return units to spare, the throughput that they leave, and what the job does when short.

    Without a number, it is that with the fewest device-hours for the same steps.
    """
    devices = plan.hardware.count
    failing = facts.hardware_share.value * rate * operations.repair_s
    replicas = plan.layout.dp
    units_a_replica = devices / replicas / unit
    if operations.spares >= 0:
        counts = range(operations.spares, operations.spares + 1)
    else:
        # Units in repair are Poisson: spares beyond six deviations are never used, and cost.
        counts = range(min(_MOST_SPARES, ceil(failing + 6 * sqrt(failing))) + 2)
    best = (inf, 0, 0.0, WhenShort.WAIT)
    for spares in counts:
        waiting = 1 - waiting_share(failing, spares)
        shrunk = shrunk_throughput(failing, spares, replicas, units_a_replica)
        running = max(waiting, shrunk)
        when_short = WhenShort.SHRINK if shrunk > waiting else WhenShort.WAIT
        hours = (devices + spares * unit) / max(running, 1e-9)
        # Tuples: of equal hours the fewest spares.
        best = min(best, (hours, spares, running, when_short))
    return best[1:]


def _goodput_at(
    stopped: Interruptions, operations: Operations, bound: int, devices: int, running: float
) -> float:
    """Return the goodput at the least (0) or the most (1) failures, with its own best interval."""
    mtbf_s = divide(1, operations.rate_range[bound] * devices, otherwise=inf)
    changed = replace(stopped, mtbf_s=mtbf_s)
    interval_s = operations.save_every_s or choose_interval_s(changed)
    return compute_goodput(changed, interval_s).training * running


def _log_deviation(
    total_s: float,
    stopped: Interruptions,
    interval_s: float,
    goodput_range: tuple[float, float],
    step_log_deviation: float,
) -> float:
    """Return the deviation of the logarithm of the days: of steps, of rates, and of luck.

    The range of rates is taken for two deviations each way. By luck failures are Poisson, and each
    costs a recovery and a part of an interval.
    """
    low, high = goodput_range
    rates = log(high / low) / 4 if low > 0 else 0.0
    failures = 0.0 if stopped.mtbf_s == inf else total_s / stopped.mtbf_s
    # The root of E[X^2] of a failure's cost, uniform over an interval: a Poisson sum varies by it.
    cost_s = hypot(stopped.recovery_s + interval_s / 2, interval_s / sqrt(12))
    luck = 0.0 if failures == 0 else sqrt(failures) * cost_s / total_s
    return hypot(step_log_deviation, hypot(rates, luck))


def _evaluation_s(workload: Workload, steps: int, step_s: float) -> float:
    """Return the seconds of evaluations: forward passes of some global batches each."""
    if not workload.eval_every_steps:
        return 0.0
    rounds = steps // workload.eval_every_steps
    return rounds * workload.eval_batches * _FORWARD_SHARE * step_s
