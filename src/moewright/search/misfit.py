"""A job that fits in no layout or loses to uneven routing, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from moewright.codec import format_layout, format_layout_changes
from moewright.cost.estimate import estimate
from moewright.rules.job import plan_job
from moewright.rules.limits.legality import check_legality
from moewright.search.search import find_best_plan
from moewright.search.space import Objections
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate, Plan
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
    # Bisection takes for granted that more nodes hold what fewer do; counts with other divisors
    # may fit better or worse, so that `enough` is the fewest of those tried.
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


REMEDY = "Against imbalance"  # what sentences on remedies begin with
_CAPACITIES = (1.0, 1.5, 2.0)
_WORTH_SAYING = 0.01  # of an even step


def explain_imbalance(plan: Plan) -> tuple[str, ...]:
    """Say what a capacity and fewer or more expert ranks would make of a step that waits.

    Nothing is said where uneven routing costs less than 1 % of the step.
    """
    uneven = plan.estimate.imbalance
    if uneven.cost < _WORTH_SAYING:
        return ()
    lines = []
    if not plan.layout.capacity and not plan.layout.rank_capacity:
        texts = list(_price_capacities(plan))
        if texts:
            lines.append(f"{REMEDY}, capacities that drop rows: {', '.join(texts)}.")
    for ep in (plan.layout.ep // 2, plan.layout.ep * 2):
        layout = replace(plan.layout, ep=ep)
        if ep > 0 and _is_legal(plan, layout):
            lines.append(_explain_expert_ranks(plan, layout))
    lines.append(
        f"{REMEDY}, replicas and placement by a measured load (--load) save at most "
        f"{format_seconds(plan.estimate.step_s - uneven.even_step_s)} of the step."
    )
    return tuple(lines)


def _price_capacities(plan: Plan) -> Iterator[str]:
    for capacity in _CAPACITIES:
        layout = replace(plan.layout, capacity=capacity)
        if _is_legal(plan, layout):
            step_s = _estimate(plan, layout).step_s
            change = step_s / plan.estimate.step_s - 1
            yield f"{capacity:g} {format_seconds(step_s)} ({change:+.1%})"


def _explain_expert_ranks(plan: Plan, layout: Layout) -> str:
    """Say what other expert ranks make of the step, and from which load on they are faster.

    Steps are linear in the load of the hottest rank, and the excess of one number of ranks over
    that of another is the same at every load.
    """
    own = plan.estimate
    other = _estimate(plan, layout)
    changes = format_layout_changes(layout, plan.layout)
    change = other.step_s / own.step_s - 1
    text = f"{REMEDY}, {changes}: {format_seconds(other.step_s)} a step ({change:+.1%})"
    if other.margin_bytes < 0:
        text += f", {format_bytes(-other.margin_bytes)} over the memory"
    own_cost_s = own.step_s - own.imbalance.even_step_s
    other_cost_s = other.step_s - (other.imbalance.even_step_s or other.step_s)
    gained_s = other_cost_s - own_cost_s
    behind_s = own.imbalance.even_step_s - (other.imbalance.even_step_s or other.step_s)
    if gained_s and behind_s / gained_s > 0:
        load = 1 + (own.imbalance.load - 1) * behind_s / gained_s
        side = "above" if gained_s < 0 else "below"
        text += f"; faster {side} {load:.2f} x on the busiest rank"
    return f"{text}."


def _is_legal(plan: Plan, layout: Layout) -> bool:
    return not check_legality(replace(plan_job(plan), layout=layout))


def _estimate(plan: Plan, layout: Layout) -> Estimate:
    return estimate(plan.model, plan.workload, plan.hardware, layout)
