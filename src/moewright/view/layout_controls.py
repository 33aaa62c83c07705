"""The keys of a layout as a page offers them: the steps of each, and which of them are legal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from moewright.codec import format_layout
from moewright.rules.job import Job
from moewright.rules.limits.divisibility import divisors
from moewright.rules.limits.legality import check_legality
from moewright.spec.choices import FieldKind, LayoutField
from moewright.spec.layout import LAYOUT_FIELDS, Layout, Schedule
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload

_MOST_STEPS = 12  # buttons in a row
_NUMBERS = (FieldKind.NUMBER, FieldKind.FACTOR)


class ControlKind(StrEnum):
    """How a page shows a key."""

    SLIDER = "slider"  # numbers in ascending order
    CHOICE = "choice"  # one of several names
    SET = "set"  # any of several names


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutStep:
    """A value that a key may take, and the layout text with it; `rule` is "" where it is legal."""

    value: str
    layout: str
    rule: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutControl:
    """A key of a layout with its steps; of a set, each step adds or removes its name.

    `rule` is what the value of now breaks, "" where nothing or where another key is at fault, and
    `nearest` the nearest legal step.
    """

    key: str
    label: str
    kind: ControlKind
    value: str
    steps: tuple[LayoutStep, ...]
    rule: str = ""
    nearest: LayoutStep | None = None


def list_controls(
    model: ModelSpec, workload: Workload, layout: Layout
) -> tuple[LayoutControl, ...]:
    """List the controls of a layout, legal or not: numbers, then names, then sets."""
    shown = [
        field
        for field in LAYOUT_FIELDS
        if field.facts.label and (model.moe is not None or not _is_for_experts(field))
    ]
    job = Job(model=model, workload=workload, layout=layout)
    return (
        *(_build_slider(job, field) for field in shown if field.kind in _NUMBERS),
        *(_build_choice(job, field) for field in shown if field.kind is FieldKind.NAME),
        *(_build_set(job, field) for field in shown if field.kind is FieldKind.SET),
    )


def _is_for_experts(field: LayoutField) -> bool:
    """Whether a number has no slider where the model has no experts; names show all the same."""
    return field.facts.needs_experts and field.kind in _NUMBERS


def _build_slider(job: Job, field: LayoutField) -> LayoutControl:
    key = field.name
    now = getattr(job.layout, key)
    shown = sorted({*_slider_values(job, field), now})
    steps = [_try_number(job, field, value) for value in shown]
    rule = _own_rule(next(step.rule for step in steps if step.value == str(now)), key)
    nearest = None
    if rule:
        legal = [step for step in steps if not step.rule]
        nearest = min(legal, key=lambda step: abs(float(step.value) - now), default=None)
    return LayoutControl(
        key=key,
        label=field.facts.label,
        kind=ControlKind.SLIDER,
        value=str(now),
        steps=tuple(steps),
        rule=rule,
        nearest=nearest,
    )


def _own_rule(rule: str, key: str) -> str:
    """Return a broken rule where it is about a key, "" where another key breaks it."""
    return rule if rule.startswith(f"{key}: ") else ""


def _slider_values(job: Job, field: LayoutField) -> Sequence[float]:
    """Return the values that a slider offers, legal or not."""
    model = job.model
    world = job.layout.world_size
    if field.name in ("tp", "cp"):
        return _powers(min(32, world))
    if field.name == "pp":
        return [step for step in divisors(world) if step <= model.layers][:_MOST_STEPS]
    if field.name == "vpp":
        return range(1, 9)
    if field.name == "ep" and model.moe is not None:
        return [step for step in divisors(model.moe.experts) if world % step == 0][:_MOST_STEPS]
    if field.name == "etp":
        return _powers(min(8, world))
    if field.name == "mbs":
        return _powers(min(32, job.workload.global_batch))
    return field.facts.levels or field.facts.tried


def _powers(highest: int) -> list[int]:
    return [1 << exponent for exponent in range(highest.bit_length())]


def _try_number(job: Job, field: LayoutField, value: float) -> LayoutStep:
    """Return the step of a number, with what follows from it: sp of tp, the schedule of vpp."""
    key = field.name
    layout = job.layout
    changed = _with_value(layout, key, value)
    if key == "tp":
        changed = replace(changed, sp=value > 1)
    if key == "vpp" and not layout.schedule.splits_backward:
        schedule = Schedule.INTERLEAVED if value > 1 else Schedule.ONE_F_ONE_B
        changed = replace(changed, schedule=schedule)
    if key == "pp" and value == 1:
        changed = replace(changed, vpp=1, schedule=Schedule.ONE_F_ONE_B)
    return _check_step(job, changed, str(value))


def _with_value(layout: Layout, key: str, value: Any) -> Layout:
    """Return the layout with another value of a key, which has the key's type."""
    return replace(layout, **{key: value})


def _check_step(job: Job, layout: Layout, value: str) -> LayoutStep:
    reasons = check_legality(replace(job, layout=layout))
    rule = ""
    if reasons:
        rule = f"{reasons[0].field.removeprefix('layout.')}: {reasons[0].rule}"
    return LayoutStep(value=value, layout=format_layout(layout), rule=rule)


def _build_choice(job: Job, field: LayoutField) -> LayoutControl:
    key = field.name
    now = getattr(job.layout, key)
    steps = tuple(
        _check_step(job, _choose(job.layout, key, name), name.value) for name in field.names
    )
    rule = _own_rule(next(step.rule for step in steps if step.value == now.value), key)
    return LayoutControl(
        key=key,
        label=field.facts.label,
        kind=ControlKind.CHOICE,
        value=now.value,
        steps=steps,
        rule=rule,
        nearest=next((step for step in steps if not step.rule), None) if rule else None,
    )


def _choose(layout: Layout, key: str, name: StrEnum) -> Layout:
    """Return the layout with another name, and the virtual stages that a schedule asks for."""
    changed = _with_value(layout, key, name)
    if key != "schedule":
        return changed
    chunks = {Schedule.ONE_F_ONE_B: 1, Schedule.ZB_H1: 1, Schedule.INTERLEAVED: 2}
    if name in (layout.schedule, Schedule.INTERLEAVED) and layout.vpp > 1:
        return changed
    if name is Schedule.GIS:
        return replace(changed, vpp=max(2, layout.vpp), vpp_group=0)
    return replace(changed, vpp=chunks.get(Schedule(name), 2), vpp_group=0)


def _build_set(job: Job, field: LayoutField) -> LayoutControl:
    chosen = getattr(job.layout, field.name)
    steps = []
    for name in field.names:
        toggled = [other for other in chosen if other is not name]
        if name not in chosen:
            toggled = _add_name(chosen, name, field)
        changed = _with_value(job.layout, field.name, tuple(sorted(toggled)))
        steps.append(_check_step(job, changed, name.value))
    return LayoutControl(
        key=field.name,
        label=field.facts.label,
        kind=ControlKind.SET,
        value="+".join(chosen),
        steps=tuple(steps),
    )


def _add_name(chosen: Sequence[StrEnum], name: StrEnum, field: LayoutField) -> list[StrEnum]:
    """Return a set with another name, and without those that it does not go with."""
    whole = field.facts.whole
    companions = field.facts.beside_whole
    if name == whole:
        return [*(other for other in chosen if other in companions), name]
    if name in companions:
        return [*chosen, name]
    return [*(other for other in chosen if other != whole), name]
