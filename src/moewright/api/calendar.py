"""How a job is run, from what the caller says of it and what is published."""

from __future__ import annotations

from math import inf

from moewright.cost.calendar_time import Operations, read_reliability, unit_devices
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.options import BudgetOptions
from moewright.spec.units import HOUR_S, MINUTE_S
from moewright.spec.workload import SaveMode, Workload

AUTO = "auto"
# Options with the least and the most that make sense, in their own units.
_RANGES = {
    "save_every": (0.0, 1e5),
    "restart": (0.0, 1e4),
    "storage": (0.0, 1e7),
    "repair": (0.0, 1e4),
    "slowdown": (0.0, 10.0),
    "deadline": (0.0, 1e5),
    "max_cost": (0.0, 1e15),
    "watts": (0.0, 1e5),
    "pue": (1.0, 5.0),
    "grid": (0.0, 5.0),
}
_LEAST_MTBF_HOURS = 1e-3


def read_operations(
    options: BudgetOptions, hardware: Hardware, workload: Workload
) -> Operations | None:
    """Return how a job is run; None where no time between failures is asked about.

    Raises:
        BadInput: an option is out of its range, or counts only with --mtbf.
    """
    _check_options(options)
    if not options.mtbf:
        return None
    facts = read_reliability()
    rate, rate_range = facts.middle_rate, facts.rate_range
    if options.mtbf != AUTO:
        hours = _read_hours(options.mtbf)
        rate = 0.0 if hours == inf else 1 / (hours * HOUR_S * hardware.count)
        # What the user states has no range.
        rate_range = (rate, rate)
    watts = options.watts or dict(facts.board_watts).get(hardware.device.name, 0.0)
    restart_s = facts.recovery_s.value
    # Not `or`: a restart may take 0 minutes.
    if options.restart is not None:
        restart_s = options.restart * MINUTE_S
    is_stated = workload.checkpoint.every_steps > 0
    mode = workload.checkpoint.mode if is_stated else SaveMode.ASYNC
    if options.checkpoint is not None:
        mode = _read_mode(options.checkpoint)
    return Operations(
        rate_per_device_s=rate,
        rate_range=rate_range,
        mode=mode,
        save_every_s=options.save_every * MINUTE_S,
        recovery_s=restart_s,
        storage_Bps=options.storage * 1e9,
        spares=_count_spare_units(options.spares, hardware),
        repair_s=options.repair * HOUR_S,
        slowdown=options.slowdown,
        board_watts=watts,
        price=options.price,
        pue=options.pue,
        grid_kg_per_kWh=options.grid,
    )


def _check_options(options: BudgetOptions) -> None:
    defaults = BudgetOptions()
    for name, (least, most) in _RANGES.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            # nan alone differs from itself: neither bound is the nearer.
            near = f"{min(max(value, least), most):g}" if value == value else f"{least:g}"
            rule = f"must be in {least:g}..{most:g}"
            raise _refuse(name, f"{value:g}", rule, near)
    if options.spares is not None and options.spares < 0:
        raise _refuse("spares", str(options.spares), "must be 0 or more", "0")
    if options.max_cost and options.price is None:
        cost = f"{options.max_cost:g}"
        raise _refuse("max_cost", cost, "counts only with --price", "--price 2.5")
    if not options.mtbf:
        for name in ("checkpoint", "spares", *_RANGES):
            value = getattr(options, name)
            if name not in ("deadline", "max_cost") and value != getattr(defaults, name):
                raise _refuse(name, str(value), "counts only with --mtbf", "--mtbf auto")


def _read_hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not hours >= _LEAST_MTBF_HOURS:
        raise _refuse("mtbf", text, "must be auto or hours above 0.001, such as 8", AUTO)
    return hours


def _read_mode(text: str) -> SaveMode:
    try:
        return SaveMode(text)
    except ValueError:
        raise _refuse("checkpoint", text, "must be sync or async", "async") from None


def _count_spare_units(spares: int | None, hardware: Hardware) -> int:
    """Return spare devices in whole units, -1 for as many as cost least."""
    if spares is None:
        return -1
    return -(-spares // unit_devices(hardware.fabric, hardware.count))


def _refuse(name: str, value: str, rule: str, nearest: str) -> BadInput:
    field = f"--{name.replace('_', '-')}"
    return BadInput(Reason(field=field, value=value, rule=rule, nearest=nearest))
