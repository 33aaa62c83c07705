"""A job that fits in no layout: the nearest miss, devices that hold it, what makes it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moewright.codec import format_layout
from moewright.search.search import find_best_plan
from moewright.search.space import Objections
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row
from moewright.spec.units import format_bytes, format_seconds
from moewright.spec.workload import Workload

# The least memory is that of one sequence a micro-batch: larger ones need not be searched.
_LEAST_MEMORY = "mbs1"
_MOST_TIMES = 256  # so many times the devices are tried

ObjectionsByWorkload = Callable[[Workload], Objections]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobVariant:
    """A change of a job that saves memory, with the setting that makes it."""

    change: str
    setting: str
    workload: Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingVariant:
    """A change of a job under which a layout fits on the same devices.

    `host_bytes` are those that it holds in host memory a device.
    """

    change: str
    setting: str
    layout: str
    step_s: float
    host_bytes: int

    def describe(self) -> str:
        """Return the change, what it takes, and how to make it."""
        text = f"With {self.change} it fits here, at {format_seconds(self.step_s)} a step"
        if self.host_bytes:
            text += f" and {format_bytes(self.host_bytes)} of host memory a device"
        return f"{text}: {self.setting}"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Misfit(Record):
    """Why nothing fits, and what would.

    `layout` lacks the fewest bytes of all that are legal: `short_bytes` a device, on `peak_rank`,
    most of them `largest`. `enough` is the smallest number of devices, of those tried, that holds
    the job, 0 where none does or none was tried yet. `tried` are the changes of the job that were
    tried on the devices as they are, `fitting` those of them under which a layout fits.
    """

    model: str
    device: str
    devices: int
    layout: str
    short_bytes: int
    peak_rank: int
    largest: str
    enough: int = 0
    enough_layout: str = ""
    enough_step_s: float = 0.0
    tried: tuple[str, ...] = ()
    fitting: tuple[FittingVariant, ...] = ()
    is_final: bool = False

    def title(self) -> str:
        """Return that nothing fits, and by how much."""
        return (
            f"Nothing fits {self.devices:,} x {self.device}: the nearest lacks "
            f"{format_bytes(self.short_bytes)} a device"
        )

    def lines(self) -> tuple[str, ...]:
        """Return what is known so far, a sentence each; later records only add sentences."""
        lines = [
            f"{self.title()} on pipeline rank {self.peak_rank}, most of it {self.largest}: "
            f"{self.layout}. Layouts with offload, ZeRO and recompute are among those tried."
        ]
        if self.enough:
            lines.append(
                f"{self.enough:,} x {self.device} hold it, at {format_seconds(self.enough_step_s)} "
                f"a step: --on {self.enough}x{self.device.split()[0]}"
            )
        lines += (variant.describe() for variant in self.fitting)
        if self.is_final and not self.fitting and self.tried:
            lines.append(f"Not enough on these devices: {', '.join(self.tried)}.")
        return tuple(lines)

    def to_rows(self) -> list[Row]:
        """Return a row for each sentence."""
        return [{"nothing fits": line} for line in self.lines()]


def explain_misfit(
    nearest: Plan,
    variants: Sequence[JobVariant],
    allowed: ObjectionsByWorkload,
    fixed: str = "",
) -> Iterator[Misfit]:
    """Yield what is known of a job that fits in no layout, more each time.

    `nearest` is the nearest miss of its search, `fixed` is layout text whose keys are pinned, and
    `allowed` returns the objections to layouts under a workload.
    """
    estimate = nearest.estimate
    misfit = Misfit(
        model=nearest.model.name or "model",
        device=nearest.hardware.device.name,
        devices=nearest.hardware.count,
        layout=format_layout(nearest.layout),
        short_bytes=max(0, -estimate.margin_bytes),
        peak_rank=estimate.peak_rank,
        largest=estimate.largest,
    )
    yield misfit
    pins = fixed or _LEAST_MEMORY

    def find(workload: Workload, hardware: Hardware) -> Plan | None:
        return _find_plan(nearest.model, workload, hardware, pins, allowed(workload))

    enough = _find_enough(nearest.hardware, lambda hardware: find(nearest.workload, hardware))
    if enough is not None:
        misfit = replace(
            misfit,
            enough=enough.hardware.count,
            enough_layout=format_layout(enough.layout),
            enough_step_s=enough.estimate.step_s,
        )
        yield misfit
    for variant in variants:
        plan = find(variant.workload, nearest.hardware)
        misfit = replace(misfit, tried=(*misfit.tried, variant.change))
        if plan is not None:
            fitting = FittingVariant(
                change=variant.change,
                setting=variant.setting,
                layout=format_layout(plan.layout),
                step_s=plan.estimate.step_s,
                host_bytes=plan.estimate.host_bytes,
            )
            misfit = replace(misfit, fitting=(*misfit.fitting, fitting))
            yield misfit
    yield replace(misfit, is_final=True)


def _find_plan(
    model: ModelSpec, workload: Workload, hardware: Hardware, fixed: str, allowed: Objections
) -> Plan | None:
    """Return the best plan that fits; None where none does, or the job cannot be."""
    try:
        return find_best_plan(model, workload, hardware, fixed=fixed, allowed=allowed)
    except BadInput:
        return None


def _find_enough(hardware: Hardware, find: Callable[[Hardware], Plan | None]) -> Plan | None:
    """Return a plan on the fewest of the devices tried: doubled, then bisected in whole nodes."""
    fewer, more = hardware.count, 2 * hardware.count
    plan = find(replace(hardware, count=more))
    while plan is None:
        fewer, more = more, 2 * more
        if more > _MOST_TIMES * hardware.count:
            return None
        plan = find(replace(hardware, count=more))
    node = hardware.fabric.devices_per_node
    while more - fewer > node:
        count = (fewer + more) // 2 // node * node
        if count <= fewer:
            break
        between = find(replace(hardware, count=count))
        if between is None:
            fewer = count
        else:
            plan, more = between, count
    return plan
