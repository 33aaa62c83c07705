"""Budgets: what training on so many tokens takes in days and device-hours, by number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log
from pathlib import Path
from statistics import NormalDist
from typing import TypedDict, Unpack

import numpy as np

from moewright.api.calendar import read_operations
from moewright.api.planning import find_best
from moewright.api.requests import PlanRequest, read_plan_request
from moewright.api.workload_choices import (
    LoadChoices,
    check_keywords,
    select_keywords,
    workload_options,
)
from moewright.codec import format_layout
from moewright.codec.layout_words import describe_layout
from moewright.codec.numbers import parse_count
from moewright.cost.calendar_time import CalendarTime, Operations, estimate_calendar
from moewright.cost.estimate import estimate
from moewright.report.calendar_section import build_calendar_section
from moewright.report.document import (
    Document,
    DocumentSection,
    Face,
    ItemList,
    Line,
    Phrase,
    build_table,
    numbers,
)
from moewright.rules.batch_rampup import count_steps
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.options import BudgetOptions, WorkloadOptions
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row
from moewright.spec.units import DAY_S, HOUR_S, format_figures, format_seconds, plural
from moewright.spec.workload import BatchRampSpec, Dtype, SaveMode

_LEAST_TOKENS = 10**6  # a plain number below it is one whose unit was left out
_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the devices named, where no counts are given
_MAX_DEVICES = 1_000_000
_ESTIMATED_BATCHES = 8  # of a ramp
_DEVIATIONS_80 = NormalDist().inv_cdf(0.9)
_NO_OPTIONS = BudgetOptions()


class OperationChoices(TypedDict, total=False):
    """The keywords of `budget` that say how the job is run (see BudgetOptions)."""

    devices: tuple[int, ...]
    mtbf: str
    checkpoint: SaveMode
    save_every: float
    restart: float
    storage: float
    spares: int
    repair: float
    slowdown: float
    deadline: float
    max_cost: float
    watts: float
    pue: float
    grid: float


class BudgetChoices(OperationChoices, LoadChoices, total=False):
    """The keywords of `budget` that say how the job is run, and more of the workload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetLine:
    """What the tokens take on one number of devices, under the best plan for it.

    `days_80` holds the days with a probability of 80 %, as far as steps are as long as predicted;
    restarts and evaluations are not counted. `cost` is device-hours times the user's own price.
    `calendar` has what failures, saves and stops make of the days, None where it was not asked for.
    """

    devices: int
    plan: Plan
    steps: int
    days: float
    days_80: tuple[float, float]
    device_hours: float
    ramp_days: float  # of the steps whose batch is below the full one
    cost: float | None  # None without a price
    calendar: CalendarTime | None = None

    @property
    def outcome(self) -> BudgetLine | CalendarTime:
        """Days, device-hours and cost with what failures make of them, where that was asked for."""
        return self.calendar or self


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
    deadline_days: float = 0.0  # 0: none
    max_cost: float = 0.0  # 0: any

    @property
    def best(self) -> BudgetLine | None:
        """The line that meets the deadline and the highest cost, None where none does.

        It is that of fewest device-hours; with a highest cost alone, that of fewest days.
        """
        allowed = [line for line in self.lines if self._is_allowed(line)]
        is_by_days = self.max_cost and not self.deadline_days
        key = _count_days if is_by_days else _count_device_hours
        return min(allowed, key=key, default=None)

    def _is_allowed(self, line: BudgetLine) -> bool:
        is_in_time = not self.deadline_days or _count_days(line) <= self.deadline_days
        cost = line.outcome.cost
        return is_in_time and (not self.max_cost or (cost or 0.0) <= self.max_cost)

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
            if line.ramp_days:
                row["ramp_days"] = line.ramp_days
            if line.calendar is not None:
                row["goodput"] = line.calendar.goodput
                row["calendar_days"] = line.calendar.days
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
    **choices: Unpack[BudgetChoices],
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
        **choices: how the job is run, as the options of `moewright budget`: with `mtbf`, "auto"
            or hours between failures, days are by the calendar too, with goodput, spares, energy.
            And of the workload, as `estimate` takes them: `load`, `from_trace`, `network`, `task`,
            `lora_rank`, `quantize_base`, `rampup_batch_size`.

    Raises:
        BadInput: something cannot be used, or nothing fits.

    Example:
        >>> import moewright as mw
        >>> answer = mw.budget("OLMoE-1B-7B-0924", on="8xH200", tokens="1T", global_batch=256)
        >>> len(answer.lines) > 1
        True
    """
    check_keywords("budget", choices, BudgetChoices)
    workload = workload_options(seq_len, global_batch, precision, choices=choices)
    options = BudgetOptions(price=price, **select_keywords(choices, OperationChoices))
    return compute_budget(model, on, workload, tokens=str(tokens), options=options)


def compute_budget(
    model: str | Path | ModelSpec,
    on: str | Hardware,
    workload: WorkloadOptions,
    *,
    tokens: str,
    options: BudgetOptions = _NO_OPTIONS,
) -> Budget:
    """Return the budget of a job on these counts of devices, or on those around the job's own.

    Raises:
        BadInput: something cannot be used, or nothing fits.
    """
    price = options.price
    total = check_budget_figures(tokens, price)
    request = read_plan_request(model, on, workload)
    operations = read_operations(options, request.hardware, request.workload)
    devices = request.hardware.count
    counts = options.devices or tuple(scale_devices(devices))
    for count in counts:
        if not 1 <= count <= _MAX_DEVICES:
            rule = f"must be in 1..{_MAX_DEVICES}"
            raise BadInput(Reason(field="--devices", value=str(count), rule=rule))
    lines = []
    without_layout = []
    for count in counts:
        line = price_devices(request, count, total, price, operations)
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
        deadline_days=options.deadline,
        max_cost=options.max_cost,
    )


def check_budget_figures(tokens: str, price: float | None) -> int:
    """Return the tokens as a number.

    Raises:
        BadInput: tokens or price are no amounts.
    """
    total = parse_count(tokens, "--tokens")
    if total < 1:
        raise BadInput(Reason(field="--tokens", value=tokens, rule="must be 1 or more"))
    if total < _LEAST_TOKENS and tokens.strip().isdecimal():
        rule = f"is fewer tokens than any training: say {tokens}B for billions, {tokens}T for more"
        raise BadInput(Reason(field="--tokens", value=tokens, rule=rule, nearest=f"{tokens}B"))
    if price is not None and not 0 < price < float("inf"):
        raise BadInput(Reason(field="--price", value=f"{price:g}", rule="must be above 0"))
    return total


def scale_devices(devices: int) -> list[int]:
    """Return the numbers of devices that are compared around a job's own, in ascending order."""
    return sorted({round(scale * devices) for scale in _SCALES if scale * devices >= 1})


def price_devices(
    request: PlanRequest,
    count: int,
    tokens: int,
    price: float | None,
    operations: Operations | None = None,
) -> BudgetLine | None:
    """Return the budget on so many devices; None where no layout fits surely enough."""
    plan = find_best(replace(request, hardware=replace(request.hardware, count=count)))
    if plan is None or plan.estimate.fit_probability < plan.rule.fit_probability:
        return None
    workload = plan.workload
    batches = dict(count_steps(workload, ceil(tokens / workload.seq_len)))
    # What is left are the batches of a ramp.
    full_steps = batches.pop(workload.global_batch, 0)
    step_s = plan.estimate.step_s
    times = _step_times(plan, tuple(batches))
    ramp_s = sum(steps * time_s for steps, time_s in zip(batches.values(), times, strict=True))
    total_s = full_steps * step_s + ramp_s
    low_s, high_s = plan.estimate.step_interval_80
    device_hours = total_s * count / HOUR_S
    steps = full_steps + sum(batches.values())
    calendar = None
    if operations is not None:
        # Steps vary by factors: the interval is symmetric in the logarithm.
        log_deviation = log(high_s / low_s) / (2 * _DEVIATIONS_80)
        calendar = estimate_calendar(plan, total_s, steps, log_deviation, operations)
    return BudgetLine(
        devices=count,
        plan=plan,
        steps=steps,
        days=total_s / DAY_S,
        days_80=(total_s * low_s / step_s / DAY_S, total_s * high_s / step_s / DAY_S),
        device_hours=device_hours,
        ramp_days=ramp_s / DAY_S,
        cost=None if price is None else price * device_hours,
        calendar=calendar,
    )


def _count_device_hours(line: BudgetLine) -> float:
    return line.outcome.device_hours


def _count_days(line: BudgetLine) -> float:
    return line.outcome.days


def _step_times(plan: Plan, batch_sizes: Sequence[int]) -> list[float]:
    """Return seconds of a step with each of these global batches, in ascending order.

    A step grows by about as much with each micro-batch, so between a few batches it is
    interpolated.
    """
    if not batch_sizes:
        return []
    stride = ceil(len(batch_sizes) / _ESTIMATED_BATCHES)
    sampled = sorted({*batch_sizes[::stride], batch_sizes[-1]})
    times = [
        estimate(
            plan.model,
            # Without a ramp, the step that is estimated is one of this batch.
            replace(plan.workload, global_batch=size, ramp=BatchRampSpec()),
            plan.hardware,
            plan.layout,
        ).step_s
        for size in sampled
    ]
    return [float(time_s) for time_s in np.interp(batch_sizes, sampled, times)]


_DAYS_OF_HOURS = 2.0  # below so many days a duration is told in hours


def build_budget_document(budget: Budget) -> Document:
    """Build the table of a budget, then the layout of each number of devices."""
    calendars = [line.calendar for line in budget.lines if line.calendar is not None]
    sections = [_build_figures(budget)]
    if calendars:
        sections.append(build_calendar_section(calendars))
    if budget.deadline_days or budget.max_cost:
        sections.append(DocumentSection(lines=(_describe_best(budget),)))
    return Document(
        heading=f"{budget.title()}: {budget.lines[0].steps:,} steps",
        sections=(*sections, _list_layouts(budget)),
    )


def _describe_best(budget: Budget) -> str:
    """Say which number of devices is best within the deadline and the highest cost."""
    best = budget.best
    bounds = [f"within {budget.deadline_days:g} days"] * bool(budget.deadline_days)
    bounds += [f"for at most {budget.max_cost:,.0f}"] * bool(budget.max_cost)
    limits = " and ".join(bounds)
    if best is None:
        return f"No number of devices above ends {limits}."
    reason = "with the fewest device-hours" if budget.deadline_days else "soonest"
    days = format_figures(_count_days(best))
    return f"{best.devices:,} devices end {limits} {reason}: {days} days."


def _build_figures(budget: Budget) -> DocumentSection:
    least = min(line.device_hours for line in budget.lines)
    has_ramp = any(line.ramp_days for line in budget.lines)
    has_cost = budget.price is not None
    names = ["devices", "step", "days", "80 %", "device-hours", "x least"]
    names += ["ramp"] * has_ramp + ["cost"] * has_cost
    rows: list[tuple[Line, ...]] = [
        (
            f"{line.devices:,}",
            format_seconds(line.plan.estimate.step_s),
            *_format_days(line.days, line.days_80),
            f"{line.device_hours:,.0f}",
            f"{line.device_hours / least:.2f}",
            *(_format_days(line.ramp_days)[:1] * has_ramp),
            *((f"{line.cost or 0:,.0f}",) * has_cost),
        )
        for line in budget.lines
    ]
    has_calendar = any(line.calendar is not None for line in budget.lines)
    rest = "the calendar below has the rest" if has_calendar else "--mtbf auto adds the calendar"
    notes = [f"Days count training steps only; {rest}."]
    if budget.without_layout:
        counts = ", ".join(map(str, budget.without_layout))
        notes.append(f"No layout fits with the probability that a plan asks for: {counts}.")
    return DocumentSection(table=build_table(numbers(*names), rows), notes=tuple(notes))


def _list_layouts(budget: Budget) -> DocumentSection:
    items = tuple(
        (
            f"{plural(line.devices, 'device')}: {describe_layout(line.plan.layout).sentence}: ",
            Phrase(text=format_layout(line.plan.layout), face=Face.CODE),
        )
        for line in budget.lines
    )
    return DocumentSection(items=ItemList(items=items))


def _format_days(days: float, interval: tuple[float, float] = (0.0, 0.0)) -> tuple[str, str]:
    """Return a duration, and an interval of it in the same unit: days, or hours of a short one."""
    scale = 24.0 if days < _DAYS_OF_HOURS else 1.0
    unit = " h" if scale > 1 else ""
    texts = [format_figures(value * scale) for value in (days, *interval)]
    return f"{texts[0]}{unit}", f"{texts[1]} to {texts[2]}{unit}"
