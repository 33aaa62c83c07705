"""The sections of the report about the plan: time, memory, the job, and every constant's source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moewright.codec import format_layout
from moewright.diagnosis.compare_ledgers import TOTAL, LedgerComparison, Section
from moewright.report.charts import Bar, ChartAxis, build_axis, build_bar, pick_colour
from moewright.report.console import describe_load_limit, format_flops, format_rate
from moewright.rules.parameters import count_parameters
from moewright.rules.steady_steps import median_phase_seconds
from moewright.spec.ledger import Component, Ledger, Module
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Assumption, Estimate, Plan
from moewright.spec.run import RunRecord
from moewright.spec.sourced import SourceKind
from moewright.spec.units import GIB, KIB, MIB, format_bytes, format_count, format_seconds
from moewright.spec.workload import (
    LossSpec,
    RouterAssignment,
    RouterDtype,
    RouterForce,
    RouterTraining,
    Workload,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """A quantity that stacked bars show, with the units its axis may use, largest first."""

    name: str
    show: Callable[[float], str]
    units: tuple[tuple[str, float], ...]

    def build_axis(self, top: float) -> tuple[ChartAxis, float]:
        """Return an axis from 0 that covers `top`, and where it ends in SI units."""
        unit, scale = next(
            ((unit, scale) for unit, scale in self.units if top >= scale), self.units[-1]
        )
        axis = build_axis((0.0, top / scale), f"{self.name}, {unit}", ticks=8)
        return axis, axis.high * scale


STEP_TIME = Quantity(name="time of a step", show=format_seconds, units=(("s", 1.0), ("ms", 1e-3)))
RANK_MEMORY = Quantity(
    name="memory of one rank", show=format_bytes, units=(("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LegendRow:
    """One row of the table under a pair of bars; the texts carry their units."""

    label: str
    colour: str
    predicted: str
    observed: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedBars:
    """A pair of stacked bars, predicted and observed, with their legend."""

    title: str
    observed: str  # what the second column holds
    bars: tuple[Bar, ...]
    axis: ChartAxis
    legend: tuple[LegendRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FactList:
    """Names and values under a title."""

    title: str
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bytes:
    """The bytes that one row of memory was predicted and counted to hold."""

    key: tuple[str, ...]  # component, module
    predicted: float
    counted: float


def build_time_stacks(record: RunRecord) -> tuple[StackedBars, ...]:
    """Build the bars of the step's phases and of the predicted step's parts, on one axis.

    Phases are predicted and measured (the median over steady steps); parts are predicted only.
    """
    estimate = record.plan.estimate
    measured = {phase.value: seconds for phase, seconds in median_phase_seconds(record)}
    fullest = _fullest_ledger(estimate)
    phases = fullest.time if fullest else ()
    predicted = {row.phase.value: row.seconds for row in phases}
    parts = {share.part.value: share.seconds for share in estimate.shares}
    parts = dict(sorted(parts.items(), key=lambda item: -item[1]))
    top = max(sum(seconds.values()) for seconds in (measured, predicted, parts))
    stacks = (
        _build_stack(("Phases of a step", "measured"), predicted, measured, STEP_TIME, top),
        _build_stack(("Parts of the predicted step", ""), parts, {}, STEP_TIME, top),
    )
    return tuple(stack for stack in stacks if stack.bars)


def build_memory_stacks(
    plan: Plan, comparisons: Sequence[LedgerComparison]
) -> tuple[StackedBars, ...]:
    """Build the bars of memory by component and by module, on one axis.

    They show the rank that counted most, or the plan's fullest rank when none counted.
    """
    rows = _counted_memory(comparisons) if comparisons else _predicted_memory(plan.estimate)
    top = max(sum(row.predicted for row in rows), sum(row.counted for row in rows))
    stacks = []
    for title, index, names in (
        ("By component", 0, tuple(Component)),
        ("By module", 1, tuple(Module)),
    ):
        predicted: dict[str, float] = {}
        counted: dict[str, float] = {}
        for name in names:
            named = [row for row in rows if row.key[index] == name]
            predicted[name.value] = sum(row.predicted for row in named)
            counted[name.value] = sum(row.counted for row in named)
        stacks.append(_build_stack((title, "counted"), predicted, counted, RANK_MEMORY, top))
    return tuple(stack for stack in stacks if stack.bars)


def _fullest_ledger(estimate: Estimate) -> Ledger | None:
    """Return the predicted ledger of the fullest rank; None when the estimate has none."""
    return next(
        (ledger for ledger in estimate.ledgers if ledger.pp_rank == estimate.peak_rank), None
    )


def _counted_memory(comparisons: Sequence[LedgerComparison]) -> list[_Bytes]:
    """Return the memory lines of the rank that counted most, without their totals."""
    fullest = max(
        (comparison.lines_in(Section.MEMORY) for comparison in comparisons),
        key=lambda lines: sum(line.counted for line in lines),
    )
    return [
        _Bytes(key=line.key, predicted=line.predicted, counted=line.counted)
        for line in fullest
        if line.key[-1] != TOTAL
    ]


def _predicted_memory(estimate: Estimate) -> list[_Bytes]:
    fullest = _fullest_ledger(estimate)
    rows = fullest.memory if fullest else ()
    return [_Bytes(key=(row.component, row.module), predicted=row.bytes, counted=0) for row in rows]


def _build_stack(
    titles: tuple[str, str],
    predicted: Mapping[str, float],
    observed: Mapping[str, float],
    quantity: Quantity,
    top: float,
) -> StackedBars:
    """Build a pair of bars; `titles` are those of the whole and of the observed column."""
    title, observed_title = titles
    axis, longest = quantity.build_axis(top)
    names = [
        name
        for name in dict.fromkeys((*predicted, *observed))
        if predicted.get(name) or observed.get(name)
    ]
    colours = {name: pick_colour(index) for index, name in enumerate(names)}

    def show(values: Mapping[str, float], name: str) -> str:
        return quantity.show(values[name]) if values.get(name) else ""

    bars = []
    for label, values in (("predicted", predicted), (observed_title, observed)):
        segments = [
            (name.replace("_", " "), values.get(name, 0.0), show(values, name), colours[name])
            for name in names
        ]
        total = sum(values.values())
        if total:
            bars.append(build_bar(label, segments, quantity.show(total), longest))
    legend = tuple(
        LegendRow(
            label=name.replace("_", " "),
            colour=colours[name],
            predicted=show(predicted, name),
            observed=show(observed, name),
        )
        for name in names
    )
    return StackedBars(
        title=title, observed=observed_title, bars=tuple(bars), axis=axis, legend=legend
    )


def build_plan_facts(plan: Plan) -> tuple[FactList, ...]:
    """Build the lists that describe the job as planned: layout, workload, model, expectations."""
    return (
        FactList(title="Layout", rows=_layout_facts(plan)),
        FactList(title="Workload", rows=_workload_facts(plan.workload)),
        FactList(title="Model", rows=_model_facts(plan.model)),
        FactList(title="Expected", rows=_estimate_facts(plan.estimate)),
    )


def _layout_facts(plan: Plan) -> tuple[tuple[str, str], ...]:
    layout = plan.layout
    estimate = plan.estimate
    micro_batch = f"{layout.mbs} x {plan.workload.seq_len:,} tokens"
    return (
        ("layout", format_layout(layout)),
        ("ranks", f"{layout.world_size:,}: dp {layout.dp}, expert dp {layout.edp}"),
        ("micro-batches", f"{estimate.micro_batches} of {micro_batch}"),
        ("bubble", f"{estimate.bubble_fraction:.2%}"),
        ("device", plan.hardware.device.name),
        ("plan", plan.fingerprint),
    )


def _workload_facts(workload: Workload) -> tuple[tuple[str, str], ...]:
    optimizer = workload.optimizer
    batch = f"{workload.global_batch:,} sequences, {workload.tokens_per_step:,} tokens"
    return (
        ("sequence length", f"{workload.seq_len:,} tokens"),
        ("global batch", batch),
        ("steps", f"{workload.steps:,}"),
        ("precision", f"{workload.precision}, gradients {workload.grad_dtype}"),
        ("optimizer", f"AdamW, lr {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}"),
        ("auxiliary losses", _list_losses(workload.loss)),
        ("routing", _describe_routing(workload.router)),
        ("seed", str(workload.seed)),
    )


def _model_facts(model: ModelSpec) -> tuple[tuple[str, str], ...]:
    attention = model.attention
    params = count_parameters(model)
    parameters = f"{format_count(params.total)}, {format_count(params.active)} active a token"
    heads = f"{attention.heads} heads, {attention.kv_heads} key-value heads"
    facts = [
        ("name", model.name or "unnamed"),
        ("parameters", parameters),
        ("layers", f"{model.layers}, {model.moe_layer_count} with experts"),
        ("hidden size", f"{model.hidden_size:,}"),
        ("attention", f"{attention.kind}, {heads}"),
        ("vocabulary", f"{model.vocab_size:,}"),
    ]
    if model.moe:
        moe = model.moe
        facts.append(("experts", f"{moe.experts}, top {moe.router.top_k}, width {moe.ffn_size:,}"))
    return tuple(facts)


def _estimate_facts(estimate: Estimate) -> tuple[tuple[str, str], ...]:
    peak = f"{format_bytes(estimate.peak_bytes)}, margin {format_bytes(estimate.margin_bytes)}"
    facts = [
        ("step", format_seconds(estimate.step_s)),
        ("speed", f"{format_rate(estimate.tokens_per_s_per_device)} tokens/s/rank"),
        ("arithmetic", f"{estimate.tflops_per_device:.4g} TFLOP/s/rank, MFU {estimate.mfu:.1%}"),
        ("model FLOPs", f"{format_flops(estimate.model_flops_per_step)} a step"),
        ("peak memory", peak),
        ("verdict", f"{estimate.verdict}; largest: {estimate.largest}"),
    ]
    if estimate.load_limit > 1:
        facts.append(("routing", describe_load_limit(estimate)))
    return tuple(facts)


def list_sources(plan: Plan) -> tuple[Assumption, ...]:
    """Return every default and constant behind the estimate, the least certain kind first."""
    order = list(reversed(SourceKind))
    return tuple(
        sorted(plan.estimate.assumptions, key=lambda assumption: order.index(assumption.kind))
    )


def _describe_routing(router: RouterTraining) -> str:
    """Say who chooses the experts, and how, where that is not the default."""
    if router.force is not RouterForce.NONE:
        return f"forced: {router.force}"
    texts = ["by the router"]
    if router.assignment is not RouterAssignment.TOP_K:
        texts.append(router.assignment.value)
    if router.jitter_eps > 0:
        texts.append(f"jitter {router.jitter_eps:g}")
    if router.router_dtype is not RouterDtype.FP32:
        texts.append(router.router_dtype.value)
    return ", ".join(texts)


def _list_losses(loss: LossSpec) -> str:
    """List the coefficients that are on: micro-batch, sequence and global-batch balance, z."""
    coefficients = (
        ("", loss.aux_coeff),
        ("sequence ", loss.seq_aux_coeff),
        ("global ", loss.global_aux_coeff),
        ("z ", loss.z_coeff),
    )
    return ", ".join(f"{name}{value:g}" for name, value in coefficients if value) or "none"
