"""Pictures of where memory goes: the fullest device, what a layer keeps, what recompute buys."""

from __future__ import annotations

from moewright.spec.errors import BadInput
from moewright.spec.ledger import Component, Module
from moewright.spec.units import format_bytes, format_seconds
from moewright.view.course.bars import BarLimit, BarPart, StackedBar, draw_bars
from moewright.view.course.drawing import CoursePicture, Drawing, picture
from moewright.view.course.job_figures import peak_ledger, sum_kept, sum_memory
from moewright.view.course.lesson import Lesson
from moewright.view.palette import MEMORY_COLOURS, MODULE_COLOURS

_RECOMPUTE_CHOICES = (("nothing", "none"), ("selected modules", "select"), ("whole layers", "full"))


def _list_parts(lesson: Lesson) -> tuple[BarPart, ...]:
    ledger = peak_ledger(lesson)
    parts = []
    for name, colour in MEMORY_COLOURS.items():
        amount = sum_memory(ledger, Component(name))
        if amount and name != Component.HOST:
            text = format_bytes(amount)
            parts.append(BarPart(name=name, amount=amount, colour=colour, text=text))
    return tuple(parts)


def draw_device(lesson: Lesson) -> CoursePicture:
    """Draw the fullest device: every component on top of the other, and each by itself."""
    parts = _list_parts(lesson)
    estimate = lesson.plan.estimate
    capacity = BarLimit(
        amount=estimate.capacity_bytes, name=f"capacity {format_bytes(estimate.capacity_bytes)}"
    )
    peak = format_bytes(estimate.peak_bytes)
    whole = StackedBar(name="device", parts=parts, text=peak, kind=estimate.verdict.value)
    single = [StackedBar(name=part.name, parts=(part,), text=part.text) for part in parts]

    def draw(drawing: Drawing) -> None:
        end = draw_bars(drawing, 0, [whole], capacity)
        draw_bars(drawing, end + 14, single)

    says = (
        f"The fullest device holds {peak} at its peak; it can hold "
        f"{format_bytes(estimate.capacity_bytes)}: {estimate.verdict.value}."
    )
    return picture(says, draw, ("component", "bytes"), [(part.name, part.text) for part in parts])


def draw_kept(lesson: Lesson) -> CoursePicture:
    """Draw what the modules of the model keep for backward."""
    ledger = peak_ledger(lesson)
    bars = []
    for name, colour in MODULE_COLOURS.items():
        amount = sum_kept(ledger, Module(name))
        if amount:
            text = format_bytes(amount)
            part = BarPart(name=name, amount=amount, colour=colour, text=text)
            bars.append(StackedBar(name=name.replace("_", " "), parts=(part,), text=text))
    bars.sort(key=lambda bar: -bar.amount)
    most = bars[0]
    says = f"Of what forward keeps for backward, {most.name} has most: {most.text}."
    rows = [(bar.name, bar.text) for bar in bars]
    return picture(says, lambda drawing: _draw_all(drawing, bars), ("module", "kept"), rows)


def _draw_all(drawing: Drawing, bars: list[StackedBar]) -> None:
    draw_bars(drawing, 0, bars)


def draw_recompute(lesson: Lesson) -> CoursePicture:
    """Draw the peak and the step under each choice of recompute."""
    estimates = []
    for name, value in _RECOMPUTE_CHOICES:
        try:
            estimate = lesson.change({"recompute": value}).plan.estimate
        except BadInput:  # a layout that this choice does not go with
            continue
        estimates.append((name, estimate))
    bars = []
    for name, estimate in estimates:
        kind = estimate.verdict.value
        text = f"{format_bytes(estimate.peak_bytes)}, {format_seconds(estimate.step_s)}"
        colour = MEMORY_COLOURS["activations"]
        part = BarPart(name=name, amount=estimate.peak_bytes, colour=colour, text=text)
        bars.append(StackedBar(name=name, parts=(part,), text=text, kind=kind))
    capacity = lesson.plan.estimate.capacity_bytes
    limit = BarLimit(amount=capacity, name=f"capacity {format_bytes(capacity)}")
    says = "Peak and step where backward computes again: " + "; ".join(
        f"{bar.name} {bar.text}" for bar in bars
    )
    rows = [
        (name, format_bytes(item.peak_bytes), format_seconds(item.step_s), item.verdict.value)
        for name, item in estimates
    ]
    return picture(
        says,
        lambda drawing: _draw_limited(drawing, bars, limit),
        ("computed again", "peak", "step", "verdict"),
        rows,
    )


def _draw_limited(drawing: Drawing, bars: list[StackedBar], limit: BarLimit) -> None:
    draw_bars(drawing, 0, bars, limit)
