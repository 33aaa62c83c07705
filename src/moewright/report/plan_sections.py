"""What the report says of the plan: time and memory beside what was measured, the job, and every
constant's source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moewright.codec import format_layout
from moewright.diagnosis.compare_ledgers import TOTAL, LedgerComparison, Section
from moewright.report.charts import Bar, ChartAxis, build_axis, build_bar, pick_colour
from moewright.report.console import describe_load_limit, show_flops, show_rate
from moewright.rules.parameters import count_parameters
from moewright.rules.steady_steps import median_phase_seconds
from moewright.spec.ledger import Component, Module
from moewright.spec.plan import Assumption, Plan
from moewright.spec.run import RunRecord
from moewright.spec.sourced import SourceKind
from moewright.spec.units import GIB, KIB, MIB, format_bytes, format_count, format_seconds
from moewright.spec.workload import (
    LossSpec,
    RouterAssignment,
    RouterDtype,
    RouterForce,
    RouterTraining,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """How a stack shows its values, and the units its axis may use, largest first."""

    name: str
    show: Callable[[float], str]
    units: tuple[tuple[str, float], ...]

    def build_axis(self, top: float) -> tuple[ChartAxis, float]:
        """An axis from 0 that covers `top`, and its end in SI units."""
        unit, scale = next((each for each in self.units if top >= each[1]), self.units[-1])
        ticks = build_axis((0.0, top / scale), f"{self.name}, {unit}", ticks=8)
        return ticks, ticks.high * scale


STEP_TIME = Quantity(name="time of a step", show=format_seconds, units=(("s", 1.0), ("ms", 1e-3)))
RANK_MEMORY = Quantity(
    name="memory of one rank", show=format_bytes, units=(("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LegendRow:
    """One row of the table under a bar pair; the texts carry their units."""

    label: str
    colour: str
    predicted: str
    observed: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedBars:
    title: str
    observed: str  # what the second column holds
    bars: tuple[Bar, ...]
    axis: ChartAxis
    legend: tuple[LegendRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FactList:
    title: str
    rows: tuple[tuple[str, str], ...]


def build_time_stacks(record: RunRecord) -> tuple[StackedBars, ...]:
    """Phases of the step, predicted and measured (median), and the parts behind the predicted step,
    on one axis."""
    measured = {phase.value: seconds for phase, seconds in median_phase_seconds(record)}
    estimate = record.plan.estimate
    ledgers = [ledger for ledger in estimate.ledgers if ledger.pp_rank == estimate.peak_rank]
    predicted = {row.phase.value: row.seconds for ledger in ledgers[:1] for row in ledger.time}
    parts = {share.part.value: share.seconds for share in estimate.shares}
    ordered = dict(sorted(parts.items(), key=lambda pair: -pair[1]))
    top = max(sum(each.values()) for each in (measured, predicted, parts))
    stacks = (
        _stack("Phases of a step", "measured", predicted, measured, STEP_TIME, top),
        _stack("Parts of the predicted step", "", ordered, {}, STEP_TIME, top),
    )
    return tuple(stack for stack in stacks if stack.bars)


def build_memory_stacks(
    plan: Plan, comparisons: Sequence[LedgerComparison]
) -> tuple[StackedBars, ...]:
    """Bytes by component and by module on the rank that counted most; the plan's fullest stage when
    none counted."""
    rows: list[tuple[tuple[str, ...], float, float]]
    if comparisons:
        fullest = max(
            comparisons,
            key=lambda each: sum(line.counted for line in each.lines_in(Section.MEMORY)),
        )
        lines = [line for line in fullest.lines_in(Section.MEMORY) if line.key[-1] != TOTAL]
        rows = [(line.key, line.predicted, line.counted) for line in lines]
    else:
        estimate = plan.estimate
        ledgers = [ledger for ledger in estimate.ledgers if ledger.pp_rank == estimate.peak_rank]
        rows = [
            ((row.component, row.module), row.bytes, 0)
            for ledger in ledgers[:1]
            for row in ledger.memory
        ]
    top = max(sum(row[1] for row in rows), sum(row[2] for row in rows))
    stacks = []
    for title, place, names in (
        ("By component", 0, tuple(Component)),
        ("By module", 1, tuple(Module)),
    ):
        predicted = {
            name.value: sum(row[1] for row in rows if row[0][place] == name) for name in names
        }
        counted = {
            name.value: sum(row[2] for row in rows if row[0][place] == name) for name in names
        }
        stacks.append(_stack(title, "counted", predicted, counted, RANK_MEMORY, top))
    return tuple(stack for stack in stacks if stack.bars)


def _stack(
    title: str,
    observed: str,
    predicted: Mapping[str, float],
    seen: Mapping[str, float],
    what: Quantity,
    top: float,
) -> StackedBars:
    ticks, longest = what.build_axis(top)
    names = [
        name for name in dict.fromkeys((*predicted, *seen)) if predicted.get(name) or seen.get(name)
    ]
    hues = {name: pick_colour(place) for place, name in enumerate(names)}

    def shown(values: Mapping[str, float], name: str) -> str:
        return what.show(values[name]) if values.get(name) else ""

    bars = []
    for label, values in (("predicted", predicted), (observed, seen)):
        parts = [
            (name.replace("_", " "), values.get(name, 0.0), shown(values, name), hues[name])
            for name in names
        ]
        whole = sum(values.values())
        if whole:
            bars.append(build_bar(label, parts, what.show(whole), longest))
    legend = tuple(
        LegendRow(
            label=name.replace("_", " "),
            colour=hues[name],
            predicted=shown(predicted, name),
            observed=shown(seen, name),
        )
        for name in names
    )
    return StackedBars(title=title, observed=observed, bars=tuple(bars), axis=ticks, legend=legend)


def build_plan_facts(plan: Plan) -> tuple[FactList, ...]:
    """The job as it was planned: layout, workload, model, and what was expected of them."""
    model, job, layout, estimate = plan.model, plan.workload, plan.layout, plan.estimate
    params = count_parameters(model)
    attention, moe = model.attention, model.moe
    shape = [
        ("name", model.name or "unnamed"),
        (
            "parameters",
            f"{format_count(params.total)}, {format_count(params.active)} active a token",
        ),
        ("layers", f"{model.layers}, {model.moe_layer_count} with experts"),
        ("hidden size", f"{model.hidden_size:,}"),
        (
            "attention",
            f"{attention.kind}, {attention.heads} heads, {attention.kv_heads} key-value heads",
        ),
        ("vocabulary", f"{model.vocab_size:,}"),
    ]
    if moe:
        shape.append(("experts", f"{moe.experts}, top {moe.router.top_k}, width {moe.ffn_size:,}"))
    return (
        FactList(
            title="Layout",
            rows=(
                ("layout", format_layout(layout)),
                ("ranks", f"{layout.world_size:,}: dp {layout.dp}, expert dp {layout.edp}"),
                (
                    "micro-batches",
                    f"{estimate.micro_batches} of {layout.mbs} x {job.seq_len:,} tokens",
                ),
                ("bubble", f"{estimate.bubble_fraction:.2%}"),
                ("device", plan.hardware.device.name),
                ("plan", plan.fingerprint),
            ),
        ),
        FactList(
            title="Workload",
            rows=(
                ("sequence length", f"{job.seq_len:,} tokens"),
                ("global batch", f"{job.global_batch:,} sequences, {job.tokens_per_step:,} tokens"),
                ("steps", f"{job.steps:,}"),
                ("precision", f"{job.precision}, gradients {job.grad_dtype}"),
                (
                    "optimizer",
                    f"AdamW, lr {job.optimizer.lr:g}, weight decay {job.optimizer.weight_decay:g}",
                ),
                ("auxiliary losses", _losses(job.loss)),
                ("routing", _routing(job.router)),
                ("seed", str(job.seed)),
            ),
        ),
        FactList(title="Model", rows=tuple(shape)),
        FactList(
            title="Expected",
            rows=(
                ("step", format_seconds(estimate.step_s)),
                ("speed", f"{show_rate(estimate.tokens_per_s_per_device)} tokens/s/rank"),
                (
                    "arithmetic",
                    f"{estimate.tflops_per_device:.4g} TFLOP/s/rank, MFU {estimate.mfu:.1%}",
                ),
                ("model FLOPs", f"{show_flops(estimate.model_flops_per_step)} a step"),
                (
                    "peak memory",
                    f"{format_bytes(estimate.peak_bytes)}, margin {format_bytes(estimate.margin_bytes)}",
                ),
                ("verdict", f"{estimate.verdict}; largest: {estimate.largest}"),
                *((("routing", describe_load_limit(estimate)),) if estimate.load_limit > 1 else ()),
            ),
        ),
    )


def list_sources(plan: Plan) -> tuple[Assumption, ...]:
    """Every default and constant that went into the estimate, the least certain kind first."""
    order = list(reversed(SourceKind))
    return tuple(sorted(plan.estimate.assumptions, key=lambda each: order.index(each.kind)))


def _routing(router: RouterTraining) -> str:
    """Who chooses the experts, and how, where not as by default."""
    if router.force is not RouterForce.NONE:
        return f"forced: {router.force}"
    how = (
        (router.assignment.value, router.assignment is not RouterAssignment.TOP_K),
        (f"jitter {router.jitter_eps:g}", router.jitter_eps > 0),
        (router.router_dtype.value, router.router_dtype is not RouterDtype.FP32),
    )
    return ", ".join(("by the router", *(text for text, said in how if said)))


def _losses(loss: LossSpec) -> str:
    """The coefficients that are on: micro-batch, sequence and global-batch balance, z."""
    on = (
        ("", loss.aux_coeff),
        ("sequence ", loss.seq_aux_coeff),
        ("global ", loss.global_aux_coeff),
        ("z ", loss.z_coeff),
    )
    return ", ".join(f"{name}{value:g}" for name, value in on if value) or "none"
