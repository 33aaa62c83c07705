"""Figures of a lesson's job: its model, device, layout, memory, messages and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NoReturn

from moewright.diagnosis.published import find_published_run
from moewright.rules.grid import GROUPS, group_size
from moewright.rules.shapes.parameters import count_parameters
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import LAYOUT_FIELDS
from moewright.spec.ledger import Component, Ledger, Module
from moewright.spec.plan import TimePart
from moewright.view.course.lesson import Lesson
from moewright.view.course.quantity import Quantity, Unit


def peak_ledger(lesson: Lesson) -> Ledger:
    """Return the predicted ledger of the pipeline rank that is fullest."""
    estimate = lesson.plan.estimate
    return estimate.ledgers[estimate.peak_rank]


def sum_memory(ledger: Ledger, component: Component) -> int:
    """Return the bytes of a component over all modules."""
    return sum(row.bytes for row in ledger.memory if row.component is component)


def _memory(lesson: Lesson, part: str) -> Quantity:
    if part == "states":
        states = (Component.WEIGHTS, Component.GRADIENTS, Component.MASTER, Component.MOMENTS)
        total = sum(sum_memory(peak_ledger(lesson), component) for component in states)
        return Quantity(number=total, unit=Unit.BYTES)
    if part not in set(Component):
        _refuse("memory", part)
    return Quantity(number=sum_memory(peak_ledger(lesson), Component(part)), unit=Unit.BYTES)


def _kept(lesson: Lesson, part: str) -> Quantity:
    """Return the activations of one module."""
    if part not in set(Module):
        _refuse("kept", part)
    kept = sum_kept(peak_ledger(lesson), Module(part))
    return Quantity(number=kept, unit=Unit.BYTES)


def sum_kept(ledger: Ledger, module: Module) -> int:
    """Return the activations of a module on a rank."""
    rows = (row for row in ledger.memory if row.component is Component.ACTIVATIONS)
    return sum(row.bytes for row in rows if row.module is module)


def _time(lesson: Lesson, part: str) -> Quantity:
    if part not in set(TimePart):
        _refuse("time", part)
    shares = lesson.plan.estimate.shares
    seconds = sum(share.seconds for share in shares if share.part == part)
    return Quantity(number=seconds, unit=Unit.SECONDS)


def _hidden(lesson: Lesson, part: str) -> Quantity:
    if part not in set(TimePart):
        _refuse("hidden", part)
    shares = lesson.plan.estimate.shares
    seconds = sum(share.hidden_s for share in shares if share.part == part)
    return Quantity(number=seconds, unit=Unit.SECONDS)


def whole_group(group: str) -> str:
    """Return the group that a ledger's group is a part of, or itself."""
    parts = {"cp_a2a": "cp", "cp_kv": "cp", "ep_near": "ep", "ep_far": "ep"}
    return parts.get(group, group)


def _sent(lesson: Lesson, part: str) -> Quantity:
    """Return what a rank of the fullest stage hands to the collectives of a group in a step."""
    if part not in GROUPS:
        _refuse("sent", part)
    rows = (row for row in peak_ledger(lesson).comm if whole_group(row.group) == part)
    return Quantity(number=sum(row.bytes for row in rows), unit=Unit.BYTES)


def _calls(lesson: Lesson, part: str) -> Quantity:
    if part not in GROUPS:
        _refuse("calls", part)
    rows = (row for row in peak_ledger(lesson).comm if whole_group(row.group) == part)
    return Quantity(number=sum(row.calls for row in rows), unit=Unit.COUNT)


def _published(lesson: Lesson, part: str) -> Quantity:
    """Return the tokens a second on a device of a published run; its id has _ for -."""
    run = find_published_run(part.replace("_", "-"))
    if run is None:
        _refuse("measured", part)
    return Quantity(number=run.measured, unit=Unit.COUNT)


def _group(lesson: Lesson, part: str) -> Quantity:
    if part not in GROUPS:
        _refuse("group", part)
    return Quantity(number=group_size(lesson.plan.layout, part), unit=Unit.COUNT)


def _layout(lesson: Lesson, part: str) -> Quantity:
    layout = lesson.plan.layout
    if part in ("dp", "edp", "world_size"):
        return Quantity(number=getattr(layout, part), unit=Unit.COUNT)
    if part not in {field.name for field in LAYOUT_FIELDS}:
        _refuse("layout", part)
    value = getattr(layout, part)
    if isinstance(value, int | float):
        return Quantity(number=value, unit=Unit.COUNT)
    word = "+".join(value) if isinstance(value, tuple) else str(value)
    return Quantity(number=0, unit=Unit.TEXT, word=word or "none")


def _model(lesson: Lesson, part: str) -> Quantity:
    model = lesson.plan.model
    moe = model.moe
    assert moe is not None
    counts = count_parameters(model)
    numbers: dict[str, tuple[float, Unit]] = {
        "layers": (model.layers, Unit.COUNT),
        "hidden": (model.hidden_size, Unit.COUNT),
        "vocabulary": (model.vocab_size, Unit.COUNT),
        "experts": (moe.experts, Unit.COUNT),
        "top_k": (moe.router.top_k, Unit.COUNT),
        "expert_width": (moe.ffn_size, Unit.COUNT),
        "heads": (model.attention.heads, Unit.COUNT),
        "parameters": (counts.total, Unit.SHORT),
        "active": (counts.active, Unit.SHORT),
    }
    if part == "name":
        name = model.name.rpartition("/")[2].partition(" ")[0]
        return Quantity(number=0, unit=Unit.TEXT, word=name)
    if part not in numbers:
        _refuse("model", part)
    number, unit = numbers[part]
    return Quantity(number=number, unit=unit)


def _work(lesson: Lesson, part: str) -> Quantity:
    workload = lesson.plan.workload
    if part not in ("seq_len", "global_batch", "tokens_per_step"):
        _refuse("work", part)
    return Quantity(number=getattr(workload, part), unit=Unit.COUNT)


def _device(lesson: Lesson, part: str) -> Quantity:
    hardware = lesson.plan.hardware
    device, fabric = hardware.device, hardware.fabric
    precision = lesson.plan.workload.precision
    peak = next((peak.rate.value for peak in device.peaks if peak.dtype is precision), 0.0)
    numbers: dict[str, tuple[float, Unit]] = {
        "count": (hardware.count, Unit.COUNT),
        "memory": (lesson.plan.estimate.capacity_bytes, Unit.BYTES),
        "flops": (peak, Unit.SHORT),
        "bandwidth": (device.memory_Bps.value, Unit.SHORT),
        "domain": (fabric.domain_size, Unit.COUNT),
        "link": (fabric.domain_Bps.value, Unit.SHORT),
        "network": (fabric.network_Bps.value, Unit.SHORT),
    }
    if part == "name":
        return Quantity(number=0, unit=Unit.TEXT, word=device.name)
    if part not in numbers:
        _refuse("device", part)
    number, unit = numbers[part]
    return Quantity(number=number, unit=unit)


def _estimate(name: str, unit: Unit) -> Callable[[Lesson, str], Quantity]:
    def read(lesson: Lesson, part: str) -> Quantity:
        if part:
            _refuse(name, part)
        return Quantity(number=getattr(lesson.plan.estimate, name), unit=unit)

    return read


def _verdict(lesson: Lesson, part: str) -> Quantity:
    return Quantity(number=0, unit=Unit.TEXT, word=lesson.plan.estimate.verdict.value)


def _refuse(name: str, part: str) -> NoReturn:
    raise BadInput(Reason(field="chapter", value=f"{name}.{part}", rule="there is no such figure"))


JOB_FIGURES: Mapping[str, Callable[[Lesson, str], Quantity]] = MappingProxyType(
    {
        "measured": _published,
        "memory": _memory,
        "kept": _kept,
        "time": _time,
        "hidden": _hidden,
        "sent": _sent,
        "calls": _calls,
        "group": _group,
        "layout": _layout,
        "model": _model,
        "work": _work,
        "device": _device,
        "verdict": _verdict,
        "peak": _estimate("peak_bytes", Unit.BYTES),
        "capacity": _estimate("capacity_bytes", Unit.BYTES),
        "margin": _estimate("margin_bytes", Unit.BYTES),
        "step": _estimate("step_s", Unit.SECONDS),
        "mfu": _estimate("mfu", Unit.PERCENT),
        "hfu": _estimate("hfu", Unit.PERCENT),
        "micro_batches": _estimate("micro_batches", Unit.COUNT),
        "bubble": _estimate("bubble_fraction", Unit.PERCENT),
        "speed": _estimate("tokens_per_s_per_device", Unit.COUNT),
        "flops": _estimate("model_flops_per_step", Unit.SHORT),
        "load_limit": _estimate("load_limit", Unit.TIMES),
    }
)
