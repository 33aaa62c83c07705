"""The space that tuning moves in: layouts, and the other choices that do not change training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from moewright.codec import explicit_fields, format_layout, parse_layout
from moewright.codec.layout_text import FIELD_OF_KEY, fields_of_key
from moewright.rules.job import Job
from moewright.rules.limits.divisibility import divisors
from moewright.rules.limits.legality import check_legality
from moewright.rules.shapes.parameters import count_parameters
from moewright.search.search import search
from moewright.search.space import (
    MIN_CP_TOKENS,
    Objections,
    activation_policies,
    build_search_space,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import CudaGraphScope, Layout, Overlap, Schedule
from moewright.spec.model import ModelSpec
from moewright.spec.options import TUNABLE_TRAIN_KEYS, TuningAxis
from moewright.spec.stage_string import EVEN_SPLIT
from moewright.spec.workload import BatchRampSpec, OptimizerSpec, Workload

MAX_POINTS = 4096  # of a space that a job spells out: each is priced
_SEARCHED = 16  # of the planner's ranking, where a job spells nothing out
_BUCKETS = (1_000_000, 5_000_000, 40_000_000)
_GC_INTERVALS = (0, 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningPoint:
    """A layout with the choices of training that tuning may change."""

    layout: Layout
    bucket_elements: int = OptimizerSpec().bucket_elements
    gc_every_steps: int = Workload(seq_len=1, global_batch=1).gc_every_steps

    def __str__(self) -> str:
        changed = [
            f"{key}={getattr(self, key)}"
            for key in TUNABLE_TRAIN_KEYS
            if getattr(self, key) != _DEFAULTS[key]
        ]
        return " ".join([format_layout(self.layout), *changed])

    def apply_to(self, workload: Workload) -> Workload:
        """Return the workload with the point's own choices.

        Batches do not grow, so that all steps are alike.
        """
        optimizer = replace(workload.optimizer, bucket_elements=self.bucket_elements)
        return replace(
            workload, optimizer=optimizer, gc_every_steps=self.gc_every_steps, ramp=BatchRampSpec()
        )


_DEFAULTS = {key: TuningPoint.__dataclass_fields__[key].default for key in TUNABLE_TRAIN_KEYS}


def point_from_job(layout: Layout, workload: Workload) -> TuningPoint:
    """Return a layout with the job's own choices."""
    return TuningPoint(
        layout=layout,
        bucket_elements=workload.optimizer.bucket_elements,
        gc_every_steps=workload.gc_every_steps,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningSpace:
    """The points that tuning may reach from `start`.

    `axes` are as the job spells them out; () stands for the default ones. `allowed` returns the
    reasons against a layout that is legal but cannot be run.
    """

    model: ModelSpec
    workload: Workload
    hardware: Hardware
    start: TuningPoint
    axes: tuple[TuningAxis, ...]
    allowed: Objections

    def reasons_against(self, point: TuningPoint) -> tuple[Reason, ...]:
        """Return the reasons against running a point; () for none."""
        illegal = check_legality(
            Job(model=self.model, workload=point.apply_to(self.workload), layout=point.layout)
        )
        return (*illegal, *self.allowed(point.layout))

    def contains(self, point: TuningPoint) -> bool:
        """Return whether a point is the start with values of the axes, and nothing else changed."""
        if not self.axes:
            return True
        reached = self.start
        for axis in self.axes:
            moved = (set_variable(reached, axis.key, value) for value in axis.values)
            agreeing = next((other for other in moved if _agree(other, point, axis.key)), None)
            if agreeing is not None:
                reached = agreeing
            elif not _agree(reached, point, axis.key):
                return False
        return reached == point

    def neighbours(self, point: TuningPoint) -> Iterator[tuple[str, TuningPoint]]:
        """Yield runnable points that differ in one variable, each with its name and value."""
        seen = {point}
        for axis in self.axes or default_axes(self.model, self.workload, self.hardware):
            for value in axis.values:
                other = set_variable(point, axis.key, value)
                if other in seen or _agree(other, point, axis.key) or self.reasons_against(other):
                    continue
                seen.add(other)
                yield f"{axis.key}={value}", other

    def list_points(self) -> tuple[TuningPoint, ...]:
        """Return every runnable point of the axes that the job spells out, the start among them.

        Raises:
            BadInput: there are more than MAX_POINTS, or nothing is spelled out.
        """
        size = self._count_points()
        if not self.axes or size > MAX_POINTS:
            spelled_out = f"spells out {size} points" if self.axes else "spells nothing out"
            rule = f"{spelled_out}; it must be 1..{MAX_POINTS} to try all of them"
            raise BadInput(Reason(field="tune", rule=rule))
        points = {self.start: None}
        for values in product(*(axis.values for axis in self.axes)):
            point = self.start
            for axis, value in zip(self.axes, values, strict=True):
                point = set_variable(point, axis.key, value)
            if not self.reasons_against(point):
                points[point] = None
        return tuple(points)

    def candidate_points(
        self, incumbent: TuningPoint, hardware: Hardware
    ) -> tuple[TuningPoint, ...]:
        """Return points with the other choices of `incumbent` that are worth pricing.

        They are all that the job spells out; else the best of the planner's search on `hardware`.
        """
        if self.axes and self._count_points() <= MAX_POINTS:
            points = {
                replace(
                    point,
                    bucket_elements=incumbent.bucket_elements,
                    gc_every_steps=incumbent.gc_every_steps,
                )
                for point in self.list_points()
            }
            return tuple(sorted(points, key=str))
        workload = incumbent.apply_to(self.workload)
        ranked = search(self.model, workload, hardware, top=_SEARCHED, allowed=self._object)
        return tuple(replace(incumbent, layout=plan.layout) for plan in ranked.plans)

    def _count_points(self) -> int:
        return prod(len(axis.values) for axis in self.axes)

    def _object(self, layout: Layout) -> tuple[Reason, ...]:
        """Return the reasons against a layout, those of the job's own axes among them."""
        if self.axes and not self.contains(replace(self.start, layout=layout)):
            rule = "is not in the space of [tune]"
            return (Reason(field="layout", value=format_layout(layout), rule=rule),)
        return self.allowed(layout)


def set_variable(point: TuningPoint, key: str, value: str) -> TuningPoint:
    """Return the point with one variable set, and the fields that depend on it.

    Sequence parallelism follows tp; even stages and the schedule follow pp and vpp.
    """
    if key in TUNABLE_TRAIN_KEYS:
        changed: dict[str, Any] = {key: int(value)}
        return replace(point, **changed)
    text = f"{key}={value}"
    if key == "layout":
        pattern = value.strip("'")
        text = f"layout='{pattern}'"
    parsed = parse_layout(text, world_size=point.layout.world_size)
    fields = {*explicit_fields(text), *fields_of_key(key)}
    layout = replace(point.layout, **{name: getattr(parsed, name) for name in fields})
    if key == "tp":
        layout = replace(layout, sp=layout.tp > 1)
    elif key == "pp":
        layout = _with_even_stages(layout, vpp=1)
    elif key == "vpp":
        layout = _with_even_stages(layout, vpp=layout.vpp)
    return replace(point, layout=layout)


def _with_even_stages(layout: Layout, *, vpp: int) -> Layout:
    """Return the layout with an even split, and the schedule that runs so many virtual stages."""
    if vpp > 1:
        schedule = Schedule.INTERLEAVED
        if layout.schedule is Schedule.GIS:
            schedule = layout.schedule
        return replace(layout, stages=EVEN_SPLIT, vpp=vpp, schedule=schedule)
    return replace(layout, stages=EVEN_SPLIT, vpp=vpp, schedule=Schedule.ONE_F_ONE_B, vpp_group=0)


def _agree(first: TuningPoint, second: TuningPoint, key: str) -> bool:
    """Return whether two points agree in what an axis sets."""
    if key in TUNABLE_TRAIN_KEYS:
        return bool(getattr(first, key) == getattr(second, key))
    return all(
        getattr(first.layout, name) == getattr(second.layout, name) for name in fields_of_key(key)
    )


def default_axes(
    model: ModelSpec, workload: Workload, hardware: Hardware
) -> tuple[TuningAxis, ...]:
    """Return the axes where the job spells none out.

    They are every degree by divisors, and the choices that cost no accuracy: those of which no
    hardware decides come with the values of their own record.
    """
    axes = _common_axes(model, workload, hardware)
    if model.moe is not None:
        axes |= _expert_axes(hardware)
    overlaps = ["none", Overlap.GRAD, f"{Overlap.GRAD}+{Overlap.PARAM}"]
    if hardware.device.kind.runs_cuda:
        axes["graphs"] = ["none", f"{CudaGraphScope.ATTN}+{CudaGraphScope.MOE_ROUTER}"]
    if hardware.device.kind.is_accelerator:
        overlaps.append(f"{Overlap.EP}+{Overlap.GRAD}+{Overlap.PARAM}")
        axes["offload"] = ["none", "optimizer"]
    axes["overlap"] = overlaps
    for key, field in FIELD_OF_KEY.items():
        if field.facts.tried and (model.moe is not None or not field.facts.needs_experts):
            axes.setdefault(key, field.facts.tried)
    return tuple(
        TuningAxis(key=key, values=tuple(str(value) for value in values))
        for key, values in axes.items()
        if values
    )


def _common_axes(
    model: ModelSpec, workload: Workload, hardware: Hardware
) -> dict[str, Sequence[object]]:
    """Return the axes of any model on any hardware."""
    world_size = hardware.count
    domain = hardware.fabric.domain_size
    degrees = divisors(world_size)
    cps = [cp for cp in degrees if cp == 1 or cp * MIN_CP_TOKENS <= workload.seq_len]
    policies = activation_policies(build_search_space(model, workload, hardware, ""))
    recomputes = dict.fromkeys("+".join(policy.recompute) or "none" for policy in policies)
    parameters = count_parameters(model).total
    sizes = (*_BUCKETS, workload.optimizer.bucket_elements)
    buckets = {min(size, parameters) for size in sizes}
    return {
        "tp": [tp for tp in degrees if tp <= domain],
        "cp": cps,
        "cp_comm": _tried("cp_comm") if len(cps) > 1 else [],
        "pp": list(degrees),
        "vpp": _tried("vpp"),
        "mbs": _tried("mbs"),
        "zero": _tried("zero"),
        "recompute": list(recomputes),
        "bucket_elements": sorted(buckets),
        "gc_every_steps": list(_GC_INTERVALS),
    }


def _expert_axes(hardware: Hardware) -> dict[str, Sequence[object]]:
    """Return the axes of a model with experts."""
    domain = hardware.fabric.domain_size
    return {
        "ep": list(divisors(hardware.count)),
        "etp": [etp for etp in _tried("etp") if etp <= domain],
        "dispatcher": _tried("dispatcher"),
    }


def _tried(key: str) -> tuple[Any, ...]:
    return FIELD_OF_KEY[key].facts.tried
