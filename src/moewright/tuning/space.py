"""What tuning moves between: a layout and the few choices beside it that change nothing of what is
trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from moewright.codec import explicit_fields, format_layout, parse_layout
from moewright.rules.divisibility import divisors
from moewright.rules.legality import check_legality
from moewright.rules.parameters import count_parameters
from moewright.search.search import search
from moewright.search.space import (
    MICRO_BATCH_SIZES,
    MIN_CP_TOKENS,
    Objections,
    activation_policies,
    build_search_space,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind, Hardware
from moewright.spec.layout import CpComm, CudaGraphScope, DispatcherKind, Layout, Overlap, Schedule
from moewright.spec.model import ModelSpec
from moewright.spec.tuning_axis import TUNABLE_TRAIN_KEYS, TuningAxis
from moewright.spec.workload import BatchRampSpec, OptimizerSpec, Workload

MAX_POINTS = 4096  # of a space that a job spells out: each is priced
_SEARCHED = 16  # of the planner's ranking, where a job spells nothing out
_VPP = (1, 2, 3, 4)
_EXPERT_TP = (1, 2, 4, 8)
_BUCKETS = (1_000_000, 5_000_000, 40_000_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningPoint:
    layout: Layout
    bucket_elements: int = OptimizerSpec().bucket_elements
    gc_every_steps: int = Workload(seq_len=1, global_batch=1).gc_every_steps

    def __str__(self) -> str:
        beside = [
            f"{key}={getattr(self, key)}"
            for key in TUNABLE_TRAIN_KEYS
            if getattr(self, key) != _USUAL[key]
        ]
        return " ".join([format_layout(self.layout), *beside])

    def apply_to(self, workload: Workload) -> Workload:
        """The workload with the point's own choices; batches do not grow, so that all steps are
        alike."""
        optimizer = replace(workload.optimizer, bucket_elements=self.bucket_elements)
        return replace(
            workload, optimizer=optimizer, gc_every_steps=self.gc_every_steps, ramp=BatchRampSpec()
        )


_USUAL = {key: TuningPoint.__dataclass_fields__[key].default for key in TUNABLE_TRAIN_KEYS}


def point_from_job(layout: Layout, workload: Workload) -> TuningPoint:
    """A layout with the job's own choices."""
    return TuningPoint(
        layout=layout,
        bucket_elements=workload.optimizer.bucket_elements,
        gc_every_steps=workload.gc_every_steps,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningSpace:
    """Where tuning may go from `start`. `axes` as the job spells them out; () stands for what is
    usual.

    `allowed` gives the reasons against a layout that is legal but cannot be run.
    """

    model: ModelSpec
    workload: Workload
    hardware: Hardware
    start: TuningPoint
    axes: tuple[TuningAxis, ...]
    allowed: Objections

    def reasons_against(self, point: TuningPoint) -> tuple[Reason, ...]:
        """What speaks against running a point."""
        return (
            *check_legality(self.model, point.apply_to(self.workload), point.layout),
            *self.allowed(point.layout),
        )

    def contains(self, point: TuningPoint) -> bool:
        """Whether a point differs from the start in nothing but the axes, and there by their
        values."""
        if not self.axes:
            return True
        reached = self.start
        for axis in self.axes:
            near = [set_variable(reached, axis.key, value) for value in axis.values]
            same = [one for one in near if _like(one, point, axis.key)]
            if not same and not _like(reached, point, axis.key):
                return False
            reached = same[0] if same else reached
        return reached == point

    def neighbours(self, point: TuningPoint) -> Iterator[tuple[str, TuningPoint]]:
        """Runnable points that differ in one variable: its name and value, and the point."""
        seen = {point}
        for axis in self.axes or default_axes(self.model, self.workload, self.hardware):
            for value in axis.values:
                other = set_variable(point, axis.key, value)
                if (
                    other not in seen
                    and not _like(other, point, axis.key)
                    and not self.reasons_against(other)
                ):
                    seen.add(other)
                    yield f"{axis.key}={value}", other

    def list_points(self) -> tuple[TuningPoint, ...]:
        """Every runnable point of the axes that the job spells out, the start among them.

        Raises BadInput for more than MAX_POINTS, and where nothing is spelled out.
        """
        size = prod(len(axis.values) for axis in self.axes)
        if not self.axes or size > MAX_POINTS:
            rule = f"spells out {size} points" if self.axes else "spells nothing out"
            raise BadInput(
                Reason(field="tune", rule=f"{rule}; it must be 1..{MAX_POINTS} to try all of them")
            )
        found = {self.start: None}
        for values in product(*(axis.values for axis in self.axes)):
            point = self.start
            for axis, value in zip(self.axes, values, strict=True):
                point = set_variable(point, axis.key, value)
            if not self.reasons_against(point):
                found[point] = None
        return tuple(found)

    def candidate_points(self, beside: TuningPoint, hardware: Hardware) -> tuple[TuningPoint, ...]:
        """Points with the other choices of `beside` worth pricing on `hardware`: all that the job
        spells out; else the best of the planner's search."""
        if self.axes and prod(len(axis.values) for axis in self.axes) <= MAX_POINTS:
            alike = {
                replace(
                    one,
                    bucket_elements=beside.bucket_elements,
                    gc_every_steps=beside.gc_every_steps,
                )
                for one in self.list_points()
            }
            return tuple(sorted(alike, key=str))
        work = beside.apply_to(self.workload)
        found = search(self.model, work, hardware, top=_SEARCHED, allowed=self._inside)
        return tuple(replace(beside, layout=plan.layout) for plan in found.plans)

    def _inside(self, layout: Layout) -> tuple[Reason, ...]:
        if self.axes and not self.contains(replace(self.start, layout=layout)):
            return (
                Reason(
                    field="layout",
                    value=format_layout(layout),
                    rule="is not in the space of [tune]",
                ),
            )
        return self.allowed(layout)


def set_variable(point: TuningPoint, key: str, value: str) -> TuningPoint:
    """The point with one variable set, and what goes with it: sp with tp, the schedule with
    pipelines."""
    if key in TUNABLE_TRAIN_KEYS:
        changed: dict[str, Any] = {key: int(value)}
        return replace(point, **changed)
    text = f"layout='{value.strip(chr(39))}'" if key == "layout" else f"{key}={value}"
    read = parse_layout(text, world_size=point.layout.world_size)
    layout = replace(point.layout, **{name: getattr(read, name) for name in explicit_fields(text)})
    if key == "recompute":
        layout = replace(
            layout, recompute_block=read.recompute_block, recompute_span=read.recompute_span
        )
    if key == "offload":
        layout = replace(layout, offload_fraction=read.offload_fraction)
    if key == "tp":
        layout = replace(layout, sp=layout.tp > 1)
    if key in ("pp", "vpp"):
        layout = _piped(layout, key)
    return replace(point, layout=layout)


def _piped(layout: Layout, key: str) -> Layout:
    """A new number of stages goes with an even split; chunks a rank with the schedule that runs so
    many."""
    layout = replace(layout, stages="", vpp=1 if key == "pp" else layout.vpp)
    schedule = Schedule.INTERLEAVED if layout.vpp > 1 else Schedule.ONE_F_ONE_B
    return replace(layout, schedule=schedule, vpp_group=layout.vpp_group if layout.vpp > 1 else 0)


def _like(one: TuningPoint, other: TuningPoint, key: str) -> bool:
    """Whether two points agree in what an axis sets."""
    if key in TUNABLE_TRAIN_KEYS:
        return bool(getattr(one, key) == getattr(other, key))
    field = "stages" if key == "layout" else key
    beside = {"recompute": ("recompute_block", "recompute_span"), "offload": ("offload_fraction",)}
    names = (field, *beside.get(key, ()))
    return all(getattr(one.layout, name) == getattr(other.layout, name) for name in names)


def default_axes(
    model: ModelSpec, workload: Workload, hardware: Hardware
) -> tuple[TuningAxis, ...]:
    """What may change where the job says nothing: every degree by divisors, and the choices that
    cost no accuracy."""
    world, domain = hardware.count, hardware.fabric.domain_size
    cps = [cp for cp in divisors(world) if cp == 1 or cp * MIN_CP_TOKENS <= workload.seq_len]
    works_of = activation_policies(build_search_space(model, workload, hardware, ""))
    recomputes = dict.fromkeys("+".join(work.recompute) or "none" for work in works_of)
    overlaps = ["none", Overlap.GRAD, f"{Overlap.GRAD}+{Overlap.PARAM}"]
    parameters = count_parameters(model).total
    buckets = {min(size, parameters) for size in (*_BUCKETS, workload.optimizer.bucket_elements)}
    axes: list[tuple[str, Sequence[object]]] = [
        ("tp", [tp for tp in divisors(world) if tp <= domain]),
        ("cp", list(cps)),
        ("cp_comm", list(CpComm) if len(cps) > 1 else []),
        ("pp", list(divisors(world))),
        ("vpp", list(_VPP)),
        ("mbs", list(MICRO_BATCH_SIZES)),
        ("zero", [1, 3]),
        ("recompute", list(recomputes)),
        ("bucket_elements", sorted(buckets)),
        ("gc_every_steps", [0, 100]),
    ]
    if model.moe is not None:
        axes += [
            ("ep", list(divisors(world))),
            ("etp", [etp for etp in _EXPERT_TP if etp <= domain]),
            ("dispatcher", list(DispatcherKind)),
        ]
    if hardware.device.kind is DeviceKind.CUDA:
        overlaps += [f"{Overlap.EP}+{Overlap.GRAD}+{Overlap.PARAM}"]
        axes += [
            ("graphs", ["none", f"{CudaGraphScope.ATTN}+{CudaGraphScope.MOE_ROUTER}"]),
            ("offload", ["none", "optimizer"]),
        ]
    axes.append(("overlap", list(overlaps)))
    return tuple(
        TuningAxis(key=key, values=tuple(str(value) for value in values))
        for key, values in axes
        if values
    )
