"""Budgets: what training on so many tokens takes in days and device-hours, by number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from moewright.api.planning import find_best, workload_options
from moewright.api.requests import PlanRequest, WorkloadOptions, read_plan_request
from moewright.codec import format_layout
from moewright.codec.numbers import parse_count
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row
from moewright.spec.workload import Dtype

_DAY_S = 86400
_HOUR_S = 3600
_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the devices named, where no counts are given
_MAX_DEVICES = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetLine:
    """What the tokens take on one number of devices, under the best plan for it.

    `days_80` holds the days with a probability of 80 %, as far as steps are as long as predicted;
    restarts and evaluations are not counted. `cost` is device-hours times the user's own price.
    """

    devices: int
    plan: Plan
    steps: int
    days: float
    days_80: tuple[float, float]
    device_hours: float
    cost: float | None  # None without a price


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Budget(Record):
    """The answer of `budget`: a line for each number of devices on which a layout fits.

    `without_layout` are the numbers on which none fits with the probability that a plan asks for.
    """

    request: PlanRequest
    tokens: int
    price: float | None  # the user's, for an hour of a device
    lines: tuple[BudgetLine, ...]
    without_layout: tuple[int, ...]

    def title(self) -> str:
        """Return model, tokens, batch and where the price is from."""
        workload = self.request.workload
        price = ""
        if self.price is not None:
            price = f"; {self.price:g} an hour of a device is your price"
        return (
            f"{self.request.model.name} on {self.tokens:,} tokens, "
            f"{workload.tokens_per_step:,} a step{price}"
        )

    def to_rows(self) -> list[Row]:
        """Return a row for each number of devices."""
        rows: list[Row] = []
        for line in self.lines:
            row: dict[str, object] = {
                "devices": line.devices,
                "step_s": line.plan.estimate.step_s,
                "steps": line.steps,
                "days": line.days,
                "days_low": line.days_80[0],
                "days_high": line.days_80[1],
                "device_hours": line.device_hours,
            }
            if line.cost is not None:
                row["cost"] = line.cost
            rows.append(row | {"layout": format_layout(line.plan.layout)})
        return rows


def budget(
    model: str | Path | ModelSpec,
    *,
    on: str | Hardware = "",
    tokens: int | str,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Dtype | str | None = None,
    price: float | None = None,
) -> Budget:
    """Tell the days and device-hours of training on `tokens`, on more and fewer devices too.

    The global batch is the same on every number of devices.

    Args:
        model: as for `plan`.
        on: count x device, such as "256xH800"; a quarter to four times as many are compared.
        tokens: tokens to train on, such as 15e12 or "15T".
        seq_len: tokens a sequence.
        global_batch: sequences a step.
        precision: compute precision.
        price: what an hour of a device costs you; None leaves costs out.

    Raises:
        BadInput: something cannot be used, or nothing fits.

    Example:
        >>> import moewright as mw
        >>> answer = mw.budget("OLMoE-1B-7B-0924", on="8xH200", tokens="1T", global_batch=256)
        >>> len(answer.lines) > 1
        True
    """
    options = workload_options(seq_len, global_batch, precision)
    return compute_budget(model, on, options, tokens=str(tokens), price=price)


def compute_budget(
    model: str | Path | ModelSpec,
    on: str | Hardware,
    options: WorkloadOptions,
    *,
    tokens: str,
    price: float | None,
    counts: Sequence[int] = (),
) -> Budget:
    """Return the budget of a job on these counts of devices, or on those around the job's own.

    Raises:
        BadInput: something cannot be used, or nothing fits.
    """
    total = check_budget_figures(tokens, price)
    request = read_plan_request(model, on, options)
    devices = request.hardware.count
    if not counts:
        counts = scale_devices(devices)
    for count in counts:
        if not 1 <= count <= _MAX_DEVICES:
            rule = f"must be in 1..{_MAX_DEVICES}"
            raise BadInput(Reason(field="--devices", value=str(count), rule=rule))
    lines = []
    without_layout = []
    for count in counts:
        line = price_devices(request, count, total, price)
        if line is None:
            without_layout.append(count)
        else:
            lines.append(line)
    if not lines:
        rule = f"no layout fits {', '.join(map(str, counts))} devices with the global batch"
        raise BadInput(Reason(field="--on", value=str(devices), rule=rule, nearest="more devices"))
    return Budget(
        request=request,
        tokens=total,
        price=price,
        lines=tuple(lines),
        without_layout=tuple(without_layout),
    )


def check_budget_figures(tokens: str, price: float | None) -> int:
    """Return the tokens as a number.

    Raises:
        BadInput: tokens or price are no amounts.
    """
    total = parse_count(tokens, "--tokens")
    if total < 1:
        raise BadInput(Reason(field="--tokens", value=tokens, rule="must be 1 or more"))
    if price is not None and not 0 < price < float("inf"):
        raise BadInput(Reason(field="--price", value=f"{price:g}", rule="must be above 0"))
    return total


def scale_devices(devices: int) -> list[int]:
    """Return the numbers of devices that are compared around a job's own, in ascending order."""
    return sorted({round(scale * devices) for scale in _SCALES if scale * devices >= 1})


def price_devices(
    request: PlanRequest, count: int, tokens: int, price: float | None
) -> BudgetLine | None:
    """Return the budget on so many devices; None where no layout fits surely enough."""
    plan = find_best(replace(request, hardware=replace(request.hardware, count=count)))
    if plan is None or plan.estimate.fit_probability < plan.rule.fit_probability:
        return None
    steps = ceil(tokens / request.workload.tokens_per_step)
    estimate = plan.estimate
    low_s, high_s = estimate.step_interval_80
    device_hours = steps * estimate.step_s * count / _HOUR_S
    return BudgetLine(
        devices=count,
        plan=plan,
        steps=steps,
        days=steps * estimate.step_s / _DAY_S,
        days_80=(steps * low_s / _DAY_S, steps * high_s / _DAY_S),
        device_hours=device_hours,
        cost=None if price is None else price * device_hours,
    )
