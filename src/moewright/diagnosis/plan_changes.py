"""A change of a job: what two plans of it hold, send, compute and are expected to take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf, sqrt

from moewright.codec import format_layout
from moewright.cost.constants import Constants
from moewright.cost.evidence import (
    error_covariance,
    list_choices,
    read_measured_choices,
    step_interval,
)
from moewright.cost.ledger import flop_rows
from moewright.cost.memory.estimate_memory import count_saved_bytes
from moewright.cost.routed_rows import count_expert_rows
from moewright.diagnosis.compare_ledgers import (
    Section,
    format_key,
    list_quantities,
)
from moewright.rules.graph_breaks import count_graph_breaks
from moewright.rules.grid import stage_rank
from moewright.rules.job import Job, plan_job
from moewright.rules.limits.engine_features import check_graphs
from moewright.spec.layout import LAYOUT_FIELDS, CudaGraphScope
from moewright.spec.ledger import Component, Ledger
from moewright.spec.plan import Plan, Verdict
from moewright.spec.record import Record, Row, format_cell, to_plain_data
from moewright.spec.units import divide

_STATES = frozenset({Component.WEIGHTS, Component.GRADIENTS, Component.MASTER, Component.MOMENTS})
_INTERVAL = 0.8  # as every band of the planner
_SAID_ELSEWHERE = ("model.name", "hardware.count")
# Parts of a workload that change how a trainer computes a step, or what it writes, and not what
# is trained.
_HOW = (
    "trainer",
    "fused_kernels",
    "profile",
    "trackers",
    "checkpoint",
    "hang_timeout_s",
    "start_timeout_s",
    "first_step_timeout_s",
    "compile_timeout_s",
    "gc_every_steps",
    "ledger_step",
    "router_log_every_steps",
    "check_every",
    "rebalance_every",
)
# Where data lie, and how often a state is written: no figure of a plan depends on them, and a file
# that was moved trains nothing else.
_UNPLANNED = ("workload.data.train", "workload.data.heldout", "workload.checkpoint.every_steps")


class Measure(StrEnum):
    """What a change of a job is measured by: the rank with the most of it, or all ranks."""

    STEP = "step_s"
    PEAK = "peak_bytes"
    STATES = "states_bytes"  # weights, gradients, master weights and moments
    SAVED = "saved_bytes"  # activations and logits, when most of them are kept
    HOST = "host_bytes"  # in host memory
    COMM = "comm_bytes"  # payload of collectives and messages, a step
    CALLS = "calls"  # of collectives and messages, a step
    FLOPS = "flops"  # a step
    ALL_FLOPS = "all_flops"  # a step, of all ranks together, however uneven their loads are
    GRAPH_BREAKS = "graph_breaks"  # passes of layers that wait for the device, a step

    @property
    def is_predicted(self) -> bool:
        """Whether the figure has an error; the others are counts, which the engine's equal."""
        return self in (Measure.STEP, Measure.PEAK)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureChange:
    """A measure before and after; `interval_80` is that of what is predicted after, else zeros."""

    measure: Measure
    before: float
    after: float
    interval_80: tuple[float, float] = (0.0, 0.0)

    @property
    def growth(self) -> float:
        """Return the change over the value before; infinite where that is 0 and this is not."""
        if self.after == self.before:
            return 0.0
        return divide(self.after, self.before, otherwise=inf) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchChange:
    """A field of a job that has another value; `changes_training` where other numbers come out.

    Of one that is not `is_planned` no figure of a plan depends.
    """

    field: str
    words: str
    before: str
    after: str
    changes_training: bool
    is_planned: bool = True

    def __str__(self) -> str:
        return f"{self.words}: {self.before} -> {self.after}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChange:
    """A row of a pipeline rank's ledger that differs: bytes, calls or FLOPs; 0: it has no such."""

    pp_rank: int
    section: Section
    key: tuple[str, ...]
    before: float
    after: float

    @property
    def label(self) -> str:
        return format_key(self.key)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PlanChanges(Record):
    """What a change of a job costs.

    `rows` are those of ledgers that differ, of every pipeline rank; of the fullest rank alone,
    `fullest`, where the numbers of pipeline ranks differ. `step_ratio` is the predicted step over
    that before, with its interval: errors that both predictions share cancel in it. It is 0 where a
    device has no times. `graph_obstacles_before` and `graph_obstacles_after` are the fields, with
    their values, that keep our engine from capturing a whole step as one graph.
    """

    layout_before: str
    layout_after: str
    switches: tuple[SwitchChange, ...]
    measures: tuple[MeasureChange, ...]
    rows: tuple[RowChange, ...]
    fullest: int
    step_ratio: float
    step_ratio_80: tuple[float, float]
    verdict_before: Verdict
    verdict_after: Verdict
    fit_probability_before: float
    fit_probability_after: float
    graph_obstacles_before: tuple[str, ...] = ()
    graph_obstacles_after: tuple[str, ...] = ()

    @property
    def is_neutral(self) -> bool:
        """Return whether nothing of the job that is planned is another."""
        return not any(switch.is_planned for switch in self.switches)

    @property
    def breaks_fit(self) -> bool:
        """Return whether the job fitted, or might, and does not any more."""
        return self.verdict_after is Verdict.OOM and self.verdict_before is not Verdict.OOM

    def find(self, measure: Measure) -> MeasureChange | None:
        """Return the change of a measure; None where it has none, as a step without times."""
        return next((item for item in self.measures if item.measure is measure), None)

    def title(self) -> str:
        """Return the layouts."""
        return f"{self.layout_before} -> {self.layout_after}"

    def to_rows(self) -> list[Row]:
        """Return a row for each measure."""
        return [
            {
                "measure": item.measure.value,
                "before": item.before,
                "after": item.after,
                "growth": item.growth,
            }
            for item in self.measures
        ]


def compare_plans(before: Plan, after: Plan) -> PlanChanges:
    """Put two plans of a job side by side."""
    has_times = not (before.estimate.untimed or after.estimate.untimed)
    ratio = after.estimate.step_s / before.estimate.step_s if has_times else 0.0
    ratio_80 = (ratio, ratio)
    if ratio and (deviation := difference_deviation(before, after)):
        ratio_80 = step_interval(ratio, deviation, _INTERVAL)
    return PlanChanges(
        layout_before=format_layout(before.layout),
        layout_after=format_layout(after.layout),
        switches=tuple(list_switches(before, after)),
        measures=tuple(_list_measures(before, after, has_times=has_times)),
        rows=tuple(_list_rows(before, after)),
        fullest=after.estimate.peak_rank,
        step_ratio=ratio,
        step_ratio_80=ratio_80,
        verdict_before=before.estimate.verdict,
        verdict_after=after.estimate.verdict,
        fit_probability_before=before.estimate.fit_probability,
        fit_probability_after=after.estimate.fit_probability,
        graph_obstacles_before=_list_graph_obstacles(before),
        graph_obstacles_after=_list_graph_obstacles(after),
    )


def _list_graph_obstacles(plan: Plan) -> tuple[str, ...]:
    """Return the fields, with their values, that the engine would refuse beside graphs=full."""
    job = plan_job(plan)
    captured = replace(job, layout=replace(job.layout, graphs=(CudaGraphScope.FULL,)))
    return tuple(f"{reason.field}={reason.value}" for reason in check_graphs(captured))


def difference_deviation(before: Plan, after: Plan) -> float:
    """Return the standard deviation of the logarithm of the ratio of two plans' steps.

    Errors that come from choices which both make cancel (cost.selection). 0: they are priced alike.
    """
    choices = [list_choices(plan_job(plan), plan.hardware) for plan in (before, after)]
    unproven: list[tuple[str, ...]] = [(), ()]
    if before.hardware.device.kind.is_accelerator:
        measured = read_measured_choices()
        unproven = [measured.support(names).formula for names in choices]
    covariance = error_covariance(choices, unproven, Constants(after.hardware))
    variance = float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    return sqrt(max(0.0, variance))


def list_switches(before: Plan, after: Plan) -> Iterator[SwitchChange]:
    """Yield every field of two plans' jobs that differs.

    The model's name is none, and the number of devices is that of the layout's ranks.
    """
    for noun in ("model", "workload", "hardware"):
        was = dict(_flatten(to_plain_data(getattr(before, noun)), noun))
        now = dict(_flatten(to_plain_data(getattr(after, noun)), noun))
        for name in dict.fromkeys((*was, *now)):
            if name in _SAID_ELSEWHERE or was.get(name) == now.get(name):
                continue
            part = name.split(".")[1]
            yield SwitchChange(
                field=name,
                words=" ".join(name.split(".")[1:]).replace("_", " "),
                before=_format(was.get(name)),
                after=_format(now.get(name)),
                changes_training=noun == "model"
                or (noun == "workload" and part not in _HOW and name not in _UNPLANNED),
                is_planned=name not in _UNPLANNED,
            )
    for field in LAYOUT_FIELDS:
        old, new = getattr(before.layout, field.name), getattr(after.layout, field.name)
        if old != new:
            yield SwitchChange(
                field=f"layout.{field.name}",
                words=(field.facts.label or field.name.replace("_", " ")).lower(),
                before=field.format(old) or "none",
                after=field.format(new) or "none",
                changes_training=False,
            )
    if before.layout.world_size != after.layout.world_size:
        yield SwitchChange(
            field="layout.world_size",
            words="ranks",
            before=str(before.layout.world_size),
            after=str(after.layout.world_size),
            changes_training=False,
        )


def _flatten(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the values of nested tables by their paths."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}")
    else:
        yield path, value


def _format(value: object) -> str:
    if value is None or value in ("", []):
        return "none"
    if isinstance(value, list):
        return format_cell(tuple(map(str, value)))
    return format_cell(value)


def _list_measures(before: Plan, after: Plan, *, has_times: bool) -> Iterator[MeasureChange]:
    was, now = before.estimate, after.estimate
    if has_times:
        yield MeasureChange(
            measure=Measure.STEP,
            before=was.step_s,
            after=now.step_s,
            interval_80=now.step_interval_80,
        )
    yield MeasureChange(
        measure=Measure.PEAK,
        before=was.peak_bytes,
        after=now.peak_bytes,
        interval_80=now.peak_interval_80,
    )
    for measure in Measure:
        if not measure.is_predicted:
            yield MeasureChange(
                measure=measure,
                before=_count_most(before, measure),
                after=_count_most(after, measure),
            )


def _count_most(plan: Plan, measure: Measure) -> int:
    """Return the count of the rank that has most, or of all ranks."""
    job = plan_job(plan)
    if measure is Measure.ALL_FLOPS:
        return _count_all_flops(job)
    if measure is Measure.SAVED:
        # Not at the peak: what is kept then also changes because the peak comes at another moment.
        return count_saved_bytes(job, plan.hardware)
    if measure is Measure.GRAPH_BREAKS:
        return max(count_graph_breaks(job, pp_rank) for pp_rank in range(job.layout.pp))
    return max((_count(ledger, measure) for ledger in plan.estimate.ledgers), default=0)


def _count_all_flops(job: Job) -> int:
    """Return the FLOPs of a step of all ranks.

    What the hottest expert rank has more of the others have less of: in the mean loads are even.
    """
    layout = job.layout
    total = 0
    for pp_rank in range(layout.pp):
        rank = stage_rank(layout, pp_rank)
        even = count_expert_rows(job, rank, micro_batches=job.micro_batches, selection=None)
        total += sum(row.flops for row in flop_rows(job, pp_rank, even))
    return total * (layout.world_size // layout.pp)


def _count(ledger: Ledger, measure: Measure) -> int:
    components = {
        Measure.STATES: _STATES,
        Measure.HOST: frozenset({Component.HOST}),
    }
    match measure:
        case Measure.COMM:
            return sum(row.bytes for row in ledger.comm)
        case Measure.CALLS:
            return sum(row.calls for row in ledger.comm)
        case Measure.FLOPS:
            return sum(row.flops for row in ledger.flops)
        case _:
            kept = components[measure]
            return sum(row.bytes for row in ledger.memory if row.component in kept)


def _list_rows(before: Plan, after: Plan) -> Iterator[RowChange]:
    was = {ledger.pp_rank: ledger for ledger in before.estimate.ledgers}
    now = {ledger.pp_rank: ledger for ledger in after.estimate.ledgers}
    pairs = [(was[rank], now[rank]) for rank in now if rank in was]
    if was.keys() != now.keys():
        pairs = [(was[before.estimate.peak_rank], now[after.estimate.peak_rank])]
    for old, new in pairs:
        columns = list_quantities(old)
        for section, column in list_quantities(new).items():
            for key in dict.fromkeys((*columns[section], *column)):
                if columns[section].get(key, 0) != column.get(key, 0):
                    yield RowChange(
                        pp_rank=new.pp_rank,
                        section=section,
                        key=key,
                        before=columns[section].get(key, 0),
                        after=column.get(key, 0),
                    )
