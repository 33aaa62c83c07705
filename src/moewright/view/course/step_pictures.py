"""Pictures of a step: its parts, the walls that they make, and the rate of thin products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log2
from types import MappingProxyType
from typing import NoReturn

from moewright.cost.memory.estimate_memory import expected_symbols
from moewright.cost.time.op_time import DeviceRates
from moewright.rules.job import plan_job
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Op
from moewright.spec.plan import TimePart
from moewright.spec.units import format_seconds
from moewright.view.course.drawing import (
    BarPart,
    CoursePicture,
    Drawing,
    StackedBar,
    draw_bars,
    picture,
)
from moewright.view.course.lesson import Lesson
from moewright.view.course.quantity import Quantity, Unit
from moewright.view.page import TIME_COLOURS

_BYTES = 2  # of a bf16 number
_MOST_ROWS = 16384
# The walls of a step, and the parts that are their price; what is left is the work itself.
WALLS: Mapping[str, tuple[TimePart, ...]] = MappingProxyType(
    {
        "memory": (TimePart.RECOMPUTE, TimePart.OFFLOAD),
        "communication": (
            TimePart.EP_COMM,
            TimePart.TP_COMM,
            TimePart.CP_COMM,
            TimePart.PP_COMM,
            TimePart.DP_COMM,
        ),
        "host": (TimePart.HOST,),
        "bubble": (TimePart.BUBBLE,),
    }
)
_WALL_COLOURS = MappingProxyType(
    {
        "work": "#2f9e83",
        "memory": "#a0744c",
        "communication": "#e07b39",
        "host": "#66738a",
        "bubble": "#8d96a3",
    }
)


def draw_step(lesson: Lesson) -> CoursePicture:
    """Draw every part of the step; what is hidden under other work is pale."""
    estimate = lesson.plan.estimate
    seconds = {share.part.value: (share.seconds, share.hidden_s) for share in estimate.shares}
    bars = []
    rows = []
    for name, colour in TIME_COLOURS.items():
        exposed, hidden = seconds.get(name, (0.0, 0.0))
        if max(exposed, hidden) < 0.002 * estimate.step_s:
            continue
        text = f"{format_seconds(exposed)}, {exposed / estimate.step_s:.0%}"
        parts = [BarPart(name=name, amount=exposed, colour=colour, text=text)]
        if hidden:
            text += f" (+{format_seconds(hidden)} hidden)"
            under = f"{format_seconds(hidden)} under other work"
            parts.append(BarPart(name=name, amount=hidden, colour=colour, text=under, kind="faint"))
        bars.append(StackedBar(name=name.replace("_", " "), parts=tuple(parts), text=text))
        rows.append((name, format_seconds(exposed), format_seconds(hidden)))
    step = format_seconds(estimate.step_s)
    says = f"A step takes {step}: " + ", ".join(f"{bar.name} {bar.text}" for bar in bars)
    columns = ("part", "on the critical path", "hidden")
    return picture(says, lambda drawing: _draw_plain(drawing, bars), columns, rows)


def _draw_plain(drawing: Drawing, bars: list[StackedBar]) -> None:
    draw_bars(drawing, 0, bars)


def sum_wall(lesson: Lesson, wall: str) -> float:
    """Return the seconds of a step that a wall takes; "work" is what none takes."""
    estimate = lesson.plan.estimate
    if wall == "work":
        return estimate.step_s - sum(sum_wall(lesson, name) for name in WALLS)
    return sum(share.seconds for share in estimate.shares if share.part in WALLS[wall])


def draw_walls(lesson: Lesson) -> CoursePicture:
    """Draw the step as work and walls, in one bar and one by one."""
    step = lesson.plan.estimate.step_s
    parts = []
    for name, colour in _WALL_COLOURS.items():
        seconds = sum_wall(lesson, name)
        text = f"{format_seconds(seconds)}, {seconds / step:.0%}"
        parts.append(BarPart(name=name, amount=seconds, colour=colour, text=text))
    whole = StackedBar(name="step", parts=tuple(parts), text=format_seconds(step))
    single = [StackedBar(name=part.name, parts=(part,), text=part.text) for part in parts]

    def draw(drawing: Drawing) -> None:
        end = draw_bars(drawing, 0, [whole])
        draw_bars(drawing, end + 10, single)

    says = f"Of {format_seconds(step)} a step, " + "; ".join(
        f"{part.name} takes {part.text}" for part in parts
    )
    return picture(says, draw, ("what", "seconds"), [(part.name, part.text) for part in parts])


def rows_per_expert(lesson: Lesson) -> float:
    """Return the rows that an expert of the hottest rank computes in one call."""
    plan = lesson.plan
    moe = plan.model.moe
    assert moe is not None
    rates = DeviceRates(plan.hardware)
    sym = expected_symbols(plan_job(plan), plan.hardware, rates.constants)
    return sym.R * plan.layout.ep / moe.experts


def expert_intensity(lesson: Lesson, rows: float) -> float:
    """Return the FLOPs a byte of an expert's first product, [rows, h] x [h, f], read once."""
    model = lesson.plan.model
    moe = model.moe
    assert moe is not None
    wide, narrow = model.hidden_size, moe.ffn_size
    moved = _BYTES * (rows * wide + wide * narrow + rows * narrow)
    return 2 * rows * wide * narrow / moved


def _roof_share(lesson: Lesson, rows: float) -> float:
    """Return the share of the peak that the memory's bandwidth allows."""
    hardware = lesson.plan.hardware
    peak = DeviceRates(hardware).peak_flops(lesson.plan.workload.precision)
    bandwidth_Bps = hardware.device.memory_Bps.value
    return min(1.0, bandwidth_Bps * expert_intensity(lesson, rows) / peak)


def _rate_share(lesson: Lesson, rows: float) -> float:
    """Return the share of the peak that products of experts reach with so many rows."""
    rates = DeviceRates(lesson.plan.hardware)
    dtype = lesson.plan.workload.precision
    rate = min(rates.rate(Op.GROUPED_GEMM, dtype, rows), rates.peak_flops(dtype))
    return min(rate / rates.peak_flops(dtype), _roof_share(lesson, rows))


def draw_roofline(lesson: Lesson) -> CoursePicture:
    """Draw what share of the peak an expert's product may and does reach, by its rows."""
    rows = rows_per_expert(lesson)
    steps = [2 ** (place / 2) for place in range(2 * int(log2(_MOST_ROWS)) + 1)]
    roof = [_roof_share(lesson, step) for step in steps]
    rate = [_rate_share(lesson, step) for step in steps]

    def draw(drawing: Drawing) -> None:
        left, right, top, height = 44.0, 14.0, 14.0, 190.0
        width = drawing.width - left - right

        def at(row: float, share: float) -> tuple[float, float]:
            x = left + width * min(1.0, log2(max(row, 1.0)) / log2(_MOST_ROWS))
            return x, top + height * (1 - share)

        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            drawing.line((left, at(1, share)[1]), (left + width, at(1, share)[1]))
            drawing.text(left - 6, at(1, share)[1] + 4, f"{share:.0%}", "quiet", anchor="end")
        for mark in (1, 16, 256, 4096):
            drawing.text(at(mark, 0)[0], top + height + 17, f"{mark:,}", "quiet", anchor="middle")
        drawing.text(left + width, top + height + 34, "rows an expert gets", "quiet", anchor="end")
        drawing.path([at(*point) for point in zip(steps, roof, strict=True)], "limit")
        drawing.path([at(*point) for point in zip(steps, rate, strict=True)], "rate", "#2f9e83")
        x, y = at(rows, _rate_share(lesson, rows))
        drawing.box(x - 5, y - 5, (10, 10), "#e07b39", hint=f"{rows:,.0f} rows")
        told = f"this job: {rows:,.0f} rows, {_rate_share(lesson, rows):.0%}"
        drawing.text(left + width, at(rows, 0.12)[1], told, "strong", anchor="end")
        below = drawing.keys(top + height + 42, [("#2f9e83", "reached")])
        x, y = drawing.choose(narrow=(0, below + 10), wide=(90, below - 9))
        drawing.text(x, y, "dashed: what the memory's bandwidth allows", "quiet")

    table = [
        (f"{step:,.0f}", f"{limit:.0%}", f"{share:.0%}")
        for step, limit, share in list(zip(steps, roof, rate, strict=True))[::4]
    ]
    says = (
        f"An expert of this job gets {rows:,.0f} rows at once and its products reach "
        f"{_rate_share(lesson, rows):.0%} of the device's peak."
    )
    return picture(says, draw, ("rows", "bandwidth allows", "reached"), table)


def _roof(lesson: Lesson, part: str) -> Quantity:
    rows = rows_per_expert(lesson)
    hardware = lesson.plan.hardware
    peak = DeviceRates(hardware).peak_flops(lesson.plan.workload.precision)
    numbers = {
        "rows": (rows, Unit.COUNT),
        "intensity": (expert_intensity(lesson, rows), Unit.NUMBER),
        "ridge": (peak / hardware.device.memory_Bps.value, Unit.NUMBER),
        "reached": (_rate_share(lesson, rows), Unit.PERCENT),
    }
    if part not in numbers:
        _refuse("roof", part)
    number, unit = numbers[part]
    return Quantity(number=number, unit=unit)


def _wall(lesson: Lesson, part: str) -> Quantity:
    if part != "work" and part not in WALLS:
        _refuse("wall", part)
    return Quantity(number=sum_wall(lesson, part), unit=Unit.SECONDS)


def _refuse(name: str, part: str) -> NoReturn:
    raise BadInput(Reason(field="chapter", value=f"{name}.{part}", rule="there is no such figure"))


STEP_FIGURES: Mapping[str, Callable[[Lesson, str], Quantity]] = MappingProxyType(
    {"roof": _roof, "wall": _wall}
)
