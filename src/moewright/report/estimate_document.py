"""An estimate as a document: the verdict on a layout, its memory, its time, its sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import fmean

from moewright.codec import format_layout
from moewright.codec.layout_words import describe_layout
from moewright.diagnosis.judgement import Judgement, Quality
from moewright.report.document import (
    Column,
    DocumentSection,
    Extent,
    Face,
    Phrase,
    Table,
    Tone,
    build_table,
    draw_bar,
    numbers,
    words,
)
from moewright.rules.expert_load import layer_load_factors
from moewright.spec.ledger import Component, Ledger, Module
from moewright.spec.plan import Assumption, Estimate, Plan, TimeShare, Verdict
from moewright.spec.units import (
    GIB,
    MIB,
    SourceKind,
    format_bytes,
    format_figures,
    format_given,
    format_seconds,
    mention,
    plural,
)

VERDICT_TONES = {
    Verdict.FITS: Tone.GOOD,
    Verdict.UNCERTAIN: Tone.DOUBTFUL,
    Verdict.OOM: Tone.BAD,
}
# A short answer shows so many peaks of pipeline ranks, and parts of the step.
_PEAKS_SHOWN = 4
_PARTS_SHOWN = 5
_BAR_WIDTH = 20
_FLOP_UNITS = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))


def build_verdict(plan: Plan, judgement: Judgement) -> DocumentSection:
    """Build what is estimated, whether it fits, and whether it is good."""
    tone = Tone.PLAIN
    if judgement.quality is Quality.SLOW:
        tone = Tone.DOUBTFUL
    return DocumentSection(
        title=job_title(plan),
        facts=(
            ("layout", describe_layout(plan.layout).sentence),
            ("as text", Phrase(text=format_layout(plan.layout), face=Face.CODE)),
            ("verdict", _verdict_line(plan.estimate)),
            ("speed", Phrase(text=judgement.speed, tone=tone)),
            ("measured", judgement.measured),
            ("routing", _describe_routing(plan.estimate)),
            *(("stragglers", text) for text in (describe_spread(plan.estimate),) if text),
        ),
    )


def build_estimate_parts(plan: Plan) -> tuple[DocumentSection, ...]:
    """Build the memory of the fullest rank, the time of the parts, and what went into them."""
    estimate = plan.estimate
    fullest = next(ledger for ledger in estimate.ledgers if ledger.pp_rank == estimate.peak_rank)
    return (
        _memory_section(fullest),
        *_peak_sections(estimate.ledgers),
        _time_section(estimate),
        build_assumptions(estimate.assumptions),
    )


def describe_measured_load(plan: Plan, even: Estimate) -> str:
    """Say what a measured load costs the hottest rank, beside the estimate of even routing."""
    estimate = plan.estimate
    factors = layer_load_factors(plan.workload, plan.layout)
    worst = max(range(len(factors)), key=factors.__getitem__)
    layer = plan.model.routed_layers[worst]
    most = f"most in layer {layer}, {format_figures(factors[worst])} x"
    return (
        f"measured load: the busiest of {plan.layout.ep} expert ranks gets "
        f"{format_figures(fmean(factors))} x its even share of tokens, mean over "
        f"{plural(len(factors), 'layer')} ({most}). Beside even routing: peak "
        f"{format_bytes(estimate.peak_bytes)} instead of {format_bytes(even.peak_bytes)}, margin "
        f"{format_bytes(estimate.margin_bytes)} instead of {format_bytes(even.margin_bytes)}, step "
        f"{format_seconds(estimate.step_s)} instead of {format_seconds(even.step_s)}"
    )


def describe_imbalance(estimate: Estimate) -> str:
    """Say what uneven routing does to the step and the peak; "" where routing is even."""
    uneven = estimate.imbalance
    if not uneven.even_step_s:
        return ""
    return (
        f"imbalance costs {uneven.cost:.1%} of an even step: busiest rank {uneven.load:.2f} x, "
        f"{uneven.peak_load:.2f} x in peaks; 1 run of 10 over "
        f"{format_seconds(uneven.step_p90_s)}, or {format_bytes(uneven.peak_p90_bytes)}"
    )


def describe_spread(estimate: Estimate) -> str:
    """Say how long a step takes that waits for its slowest ranks and links; "" without levels."""
    spread = estimate.spread
    if spread is None:
        return ""
    return (
        f"with the slowest ranks and links of the network, a step in two takes over "
        f"{format_seconds(spread.median_s)}, 1 in 10 over {format_seconds(spread.p90_s)}"
    )


def describe_load_limit(estimate: Estimate) -> str:
    """Say how uneven routing may get before the device is full."""
    return (
        "memory is full when the busiest expert-parallel rank gets "
        f"{estimate.load_limit:.2f} x its even share of tokens"
    )


def format_flops(value: float) -> str:
    """Return FLOPs as PFLOP, TFLOP, GFLOP or MFLOP with four significant figures."""
    unit, scale = next(
        ((unit, scale) for unit, scale in _FLOP_UNITS if value >= scale), _FLOP_UNITS[-1]
    )
    # Four figures of a larger number would be written with an exponent.
    digits = ",.0f" if value >= 1e4 * scale else ",.4g"
    return f"{value / scale:{digits}} {unit}"


def job_title(plan: Plan) -> str:
    """Return model, hardware and workload of a plan in one line."""
    workload = plan.workload
    return (
        f"{plan.model.name or 'model'} on {plan.layout.world_size} x {plan.hardware.device.name}: "
        f"sequence {workload.seq_len:,}, global batch {workload.global_batch:,}, "
        f"{workload.precision}, {format_flops(plan.estimate.model_flops_per_step)} a step"
    )


def build_assumptions(assumptions: Iterable[Assumption]) -> DocumentSection:
    """Build a table of what went into an estimate, of which a short answer says the counts.

    It puts constants of one kind and source into one row, the least certain kind first.
    """
    assumptions = tuple(assumptions)
    constants: dict[tuple[SourceKind, str], list[str]] = {}
    for assumption in assumptions:
        row = constants.setdefault((assumption.kind, assumption.source), [])
        row.append(f"{assumption.name} {assumption.value}")
    order = list(reversed(SourceKind))
    rows = [
        (kind.value, source, ", ".join(texts))
        for (kind, source), texts in sorted(
            constants.items(), key=lambda item: order.index(item[0][0])
        )
    ]
    counts = Counter(assumption.kind for assumption in assumptions)
    kinds = ", ".join(f"{counts[kind]} {kind.value}" for kind in SourceKind if counts[kind])
    return DocumentSection(
        title="What went into it",
        brief=f"Constants: {kinds} (-v: sources).",
        table=build_table(words("kind", "source", "what"), rows, short=0),
    )


def _describe_routing(estimate: Estimate) -> str:
    """Say in a line what uneven routing costs, and from which load on memory is full."""
    uneven = estimate.imbalance
    limit = ""
    if estimate.load_limit > 1:
        limit = f"memory full at {estimate.load_limit:.2f} x"
    if not uneven.even_step_s:
        return limit
    return (
        f"imbalance costs {uneven.cost:.1%}: busiest rank {uneven.load:.2f} x even, "
        f"{uneven.peak_load:.2f} x in peaks{mention(' ({})', limit)}; 1 run of 10 over "
        f"{format_seconds(uneven.step_p90_s)}, {format_bytes(uneven.peak_p90_bytes)}"
    )


def _verdict_line(estimate: Estimate) -> tuple[str | Phrase, ...]:
    text = (
        f": peak {format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.capacity_bytes)} "
        f"on pipeline rank {estimate.peak_rank}, margin {format_bytes(estimate.margin_bytes)}; "
        f"largest: {estimate.largest}"
    )
    if estimate.host_shortage:
        text += f"; {estimate.host_shortage}"
    return Phrase(text=estimate.verdict.value, tone=VERDICT_TONES[estimate.verdict]), text


def _memory_section(ledger: Ledger) -> DocumentSection:
    sizes = {(row.component, row.module): row.bytes for row in ledger.memory}
    modules = [
        module
        for module in Module
        if any(sizes.get((component, module)) for component in Component)
    ]
    unit, scale = ("GiB", GIB) if ledger.device_bytes >= GIB else ("MiB", MIB)
    rows = []
    for component in Component:
        row = [sizes.get((component, module), 0) for module in modules]
        if any(row):
            texts = (mention("{:.2f}", size / scale) for size in row)
            rows.append((component.value, *texts, f"{sum(row) / scale:.2f}"))
    # Memory of the host is shown above, but does not count in what the device holds.
    on_device = [component for component in Component if component is not Component.HOST]
    totals = (
        sum(sizes.get((component, module), 0) for component in on_device) for module in modules
    )
    table = build_table(
        (
            *words("component"),
            *numbers(*(module.value.replace("_", "\n") for module in modules), "total"),
        ),
        rows,
        total=(
            "total",
            *(f"{size / scale:.2f}" for size in totals),
            f"{ledger.device_bytes / scale:.2f}",
        ),
    )
    return DocumentSection(title=f"Memory of pipeline rank {ledger.pp_rank}, {unit}", table=table)


def _peak_sections(ledgers: tuple[Ledger, ...]) -> Iterable[DocumentSection]:
    """Yield the peak of each pipeline rank; of many ranks a short answer says the span."""
    if len(ledgers) == 1:
        return
    peaks = "  ".join(
        f"{ledger.pp_rank}: {format_bytes(ledger.device_bytes)}" for ledger in ledgers
    )
    extent = Extent.SHORT
    if len(ledgers) > _PEAKS_SHOWN:
        sizes = [ledger.device_bytes for ledger in ledgers]
        span = f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
        yield DocumentSection(brief=f"Peak of {len(sizes)} pipeline ranks   {span}")
        extent = Extent.LONG
    yield DocumentSection(lines=(f"Peak by pipeline rank   {peaks}",), extent=extent)


def _time_section(estimate: Estimate) -> DocumentSection:
    if estimate.untimed:
        return DocumentSection(lines=(estimate.untimed,))
    return DocumentSection(
        title="Time of a step",
        table=_time_table(estimate),
        notes=(
            f"{plural(estimate.micro_batches, 'micro-batch')}, "
            f"bubble {estimate.bubble_fraction:.2%}; "
            f"{format_figures(estimate.tokens_per_s_per_device)} tokens/s/device, "
            f"{format_figures(estimate.tflops_per_device)} TFLOP/s/device, "
            f"MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%}",
        ),
    )


def _time_table(estimate: Estimate) -> Table:
    shares = sorted(estimate.shares, key=lambda share: -share.seconds)
    shown = [share for share in shares if share.seconds or share.hidden_s]
    rest = shown[_PARTS_SHOWN:]
    return build_table(
        (*words("part"), *numbers("exposed", "hidden", "of step"), Column(name="")),
        [
            (
                share.part.value.replace("_", " "),
                *_time_cells(estimate, (share,)),
                draw_bar(share.seconds / estimate.step_s, _BAR_WIDTH),
            )
            for share in shown
        ],
        short=_PARTS_SHOWN,
        rest=(plural(len(rest), "smaller part"), *_time_cells(estimate, rest), ""),
        total=("step", format_seconds(estimate.step_s), "", "", ""),
    )


def _time_cells(estimate: Estimate, shares: Iterable[TimeShare]) -> tuple[str, str, str]:
    """Return the seconds of parts that are exposed and hidden, and the former's share of a step."""
    shares = tuple(shares)
    exposed_s = sum(share.seconds for share in shares)
    hidden_s = sum(share.hidden_s for share in shares)
    hidden = format_given(hidden_s, format_seconds)
    return format_seconds(exposed_s), hidden, f"{exposed_s / estimate.step_s:.1%}"
