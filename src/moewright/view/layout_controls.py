"""The keys of a layout as a page offers them: the steps of each, and which of them are legal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from moewright.codec import format_layout
from moewright.rules.job import Job
from moewright.rules.limits.divisibility import divisors
from moewright.rules.limits.legality import check_legality
from moewright.spec.layout import (
    CpComm,
    DispatcherKind,
    Layout,
    Offload,
    Overlap,
    Recompute,
    Schedule,
)
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload

_MOST_STEPS = 12


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


_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "tp": "Tensor parallel",
        "cp": "Context parallel",
        "pp": "Pipeline stages",
        "vpp": "Virtual stages a rank",
        "ep": "Expert parallel",
        "etp": "Expert tensor parallel",
        "mbs": "Micro-batch",
        "zero": "ZeRO",
        "schedule": "Schedule",
        "dispatcher": "Dispatcher",
        "cp_comm": "Context exchange",
        "recompute": "Recompute",
        "overlap": "Overlap",
        "offload": "Offload",
    }
)
_CHOICES: tuple[tuple[str, type[StrEnum]], ...] = (
    ("schedule", Schedule),
    ("dispatcher", DispatcherKind),
    ("cp_comm", CpComm),
)
_SETS: tuple[tuple[str, type[StrEnum]], ...] = (
    ("recompute", Recompute),
    ("overlap", Overlap),
    ("offload", Offload),
)


def list_controls(
    model: ModelSpec, workload: Workload, layout: Layout
) -> tuple[LayoutControl, ...]:
    """List the controls of a layout, legal or not."""
    return (
        *_list_sliders(model, workload, layout),
        *_list_choices(model, workload, layout),
        *_list_sets(model, workload, layout),
    )


def _list_sliders(model: ModelSpec, workload: Workload, layout: Layout) -> Iterator[LayoutControl]:
    for key, values in _slider_values(model, workload, layout).items():
        now = getattr(layout, key)
        shown = sorted({*values, now})
        steps = [_try_number(model, workload, layout, key, value) for value in shown]
        rule = _own_rule(next(step.rule for step in steps if step.value == str(now)), key)
        nearest = None
        if rule:
            legal = [step for step in steps if not step.rule]
            nearest = min(legal, key=lambda step: abs(int(step.value) - now), default=None)
        yield LayoutControl(
            key=key,
            label=_LABELS[key],
            kind=ControlKind.SLIDER,
            value=str(now),
            steps=tuple(steps),
            rule=rule,
            nearest=nearest,
        )


def _own_rule(rule: str, key: str) -> str:
    """Return a broken rule where it is about a key, "" where another key breaks it."""
    return rule if rule.startswith(f"{key}: ") else ""


def _slider_values(
    model: ModelSpec, workload: Workload, layout: Layout
) -> dict[str, Sequence[int]]:
    """Return the values that a slider of each degree offers, legal or not."""
    world = layout.world_size
    values: dict[str, Sequence[int]] = {
        "tp": _powers(min(32, world)),
        "cp": _powers(min(32, world)),
        "pp": [step for step in divisors(world) if step <= model.layers][:_MOST_STEPS],
        "vpp": range(1, 9),
    }
    if model.moe is not None:
        shared = [step for step in divisors(model.moe.experts) if world % step == 0]
        values["ep"] = shared[:_MOST_STEPS]
        values["etp"] = _powers(min(8, world))
    values["mbs"] = _powers(min(32, workload.global_batch))
    values["zero"] = (0, 1, 2, 3)
    return values


def _powers(highest: int) -> list[int]:
    return [1 << exponent for exponent in range(highest.bit_length())]


def _try_number(
    model: ModelSpec, workload: Workload, layout: Layout, key: str, value: int
) -> LayoutStep:
    """Return the step of a number, with what follows from it: sp of tp, the schedule of vpp."""
    changed = _with_value(layout, key, value)
    if key == "tp":
        changed = replace(changed, sp=value > 1)
    if key == "vpp" and not layout.schedule.splits_backward:
        schedule = Schedule.INTERLEAVED if value > 1 else Schedule.ONE_F_ONE_B
        changed = replace(changed, schedule=schedule)
    if key == "pp" and value == 1:
        changed = replace(changed, vpp=1, schedule=Schedule.ONE_F_ONE_B)
    return _check_step(model, workload, changed, str(value))


def _with_value(layout: Layout, key: str, value: Any) -> Layout:
    """Return the layout with another value of a key, which has the key's type."""
    return replace(layout, **{key: value})


def _check_step(model: ModelSpec, workload: Workload, layout: Layout, value: str) -> LayoutStep:
    reasons = check_legality(Job(model=model, workload=workload, layout=layout))
    rule = ""
    if reasons:
        rule = f"{reasons[0].field.removeprefix('layout.')}: {reasons[0].rule}"
    return LayoutStep(value=value, layout=format_layout(layout), rule=rule)


def _list_choices(model: ModelSpec, workload: Workload, layout: Layout) -> Iterator[LayoutControl]:
    for key, names in _CHOICES:
        now = getattr(layout, key)
        steps = tuple(
            _check_step(model, workload, _choose(layout, key, name), name.value) for name in names
        )
        rule = _own_rule(next(step.rule for step in steps if step.value == now.value), key)
        yield LayoutControl(
            key=key,
            label=_LABELS[key],
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


def _list_sets(model: ModelSpec, workload: Workload, layout: Layout) -> Iterator[LayoutControl]:
    for key, names in _SETS:
        chosen = getattr(layout, key)
        steps = []
        for name in names:
            toggled = [other for other in chosen if other is not name]
            if name not in chosen:
                toggled = _add_name(chosen, name)
            changed = _with_value(layout, key, tuple(sorted(toggled)))
            steps.append(_check_step(model, workload, changed, name.value))
        yield LayoutControl(
            key=key,
            label=_LABELS[key],
            kind=ControlKind.SET,
            value="+".join(chosen),
            steps=tuple(steps),
        )


def _add_name(chosen: Sequence[StrEnum], name: StrEnum) -> list[StrEnum]:
    """Return a set with another name; full recompute goes with none but the loss."""
    exclusive = {Recompute.FULL}
    if name is Recompute.FULL:
        return [other for other in chosen if other is Recompute.LOSS] + [name]
    if name is Recompute.LOSS:
        return [*chosen, name]
    return [*(other for other in chosen if other not in exclusive), name]
