"""Plans and estimates as tables for a terminal; the same text, 120 columns wide, when the output is
piped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moewright.codec import format_layout
from moewright.rules.routing import layer_load_factors
from moewright.spec.ledger import Component, Ledger, Module
from moewright.spec.plan import Assumption, Estimate, Plan, Verdict
from moewright.spec.sourced import SourceKind
from moewright.spec.units import GIB, MIB, format_bytes, format_seconds

PIPED_WIDTH = 120
BAR_WIDTH = 10
FLOP_UNITS = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
STYLES = {Verdict.FITS: "green", Verdict.UNCERTAIN: "yellow", Verdict.OOM: "red"}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the caller, as every other stream does; rich would end the program with code
        1."""
        raise BrokenPipeError


def make_console(stream: TextIO) -> Console:
    """A console on `stream`: the terminal's own width and colours, or plain text of 120 columns."""
    return _Console(
        file=stream, width=None if stream.isatty() else PIPED_WIDTH, highlight=False, markup=False
    )


def print_plans(
    console: Console,
    plans: Sequence[Plan],
    *,
    picked: Sequence[Plan] = (),
    rejected: Sequence[tuple[str, int]] = (),
    why: Sequence[str] = (),
) -> None:
    """Plans, best first, the picked one marked; `why` it wins; what was assumed; how many layouts a
    rule rejected."""
    if plans:
        console.print(_job(plans[0]), soft_wrap=True)
        console.print(_ranking(console, plans, picked))
        limits = [
            (place, plan.estimate)
            for place, plan in enumerate(plans, 1)
            if plan.estimate.load_limit > 1
        ]
        told = [*why, *(f"{place}: {describe_load_limit(one)}" for place, one in limits)]
        for line in told:
            console.print(Text(line))
        if told:
            console.print()
        console.print(_assumptions(plans[0].estimate.assumptions))
    else:
        console.print(Text("No legal layout fits.", style="red"))
    if rejected:
        console.print(_rejections(rejected))


def print_ranking(console: Console, plans: Sequence[Plan], *, picked: Sequence[Plan]) -> None:
    """Plans of one job as a table alone, the picked one marked."""
    console.print(_ranking(console, plans, picked))


def print_estimate(console: Console, plan: Plan) -> None:
    """One layout: verdict, memory of the fullest stage by component and module, time by part, what
    was assumed."""
    estimate = plan.estimate
    console.print(_job(plan), soft_wrap=True)
    console.print(Text(f"layout    {format_layout(plan.layout)}"), soft_wrap=True)
    console.print(_verdict(estimate))
    console.print(
        _memory(next(ledger for ledger in estimate.ledgers if ledger.pp_rank == estimate.peak_rank))
    )
    if len(estimate.ledgers) > 1:
        peaks = "  ".join(
            f"{ledger.pp_rank}: {format_bytes(ledger.device_bytes)}" for ledger in estimate.ledgers
        )
        console.print(Text(f"Peak by pipeline rank   {peaks}\n"))
    console.print(_time(console, estimate))
    console.print(
        f"{estimate.micro_batches} micro-batches, bubble {estimate.bubble_fraction:.2%}; "
        f"{show_rate(estimate.tokens_per_s_per_device)} tokens/s/device, "
        f"{estimate.tflops_per_device:.4g} TFLOP/s/device, MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%}\n"
    )
    console.print(_assumptions(estimate.assumptions))


def show_rate(value: float) -> str:
    """A rate with four significant figures and thousands set apart."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def show_flops(value: float) -> str:
    """FLOPs as PFLOP, TFLOP, GFLOP or MFLOP with four significant figures."""
    unit, scale = next((each for each in FLOP_UNITS if value >= each[1]), FLOP_UNITS[-1])
    return (
        f"{value / scale:,.0f} {unit}" if value >= 1e4 * scale else f"{value / scale:,.4g} {unit}"
    )


def _job(plan: Plan) -> Text:
    job = plan.workload
    return Text(
        f"{plan.model.name or 'model'} on {plan.layout.world_size} x {plan.hardware.device.name}: "
        f"sequence {job.seq_len:,}, global batch {job.global_batch:,}, {job.precision}, "
        f"{show_flops(plan.estimate.model_flops_per_step)} a step",
        style="bold",
    )


def _bar(console: Console, part: float, width: int = BAR_WIDTH) -> str:
    full, empty = ("#", ".") if console.options.ascii_only else ("█", "░")
    cells = min(width, max(0, round(part * width)))
    return full * cells + empty * (width - cells)


def make_table(*columns: str, text_columns: Iterable[str] = (), title: str = "") -> Table:
    """An empty table; columns in `left` hold words and may wrap, the others numbers."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in columns:
        if column in text_columns:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def _ranking(console: Console, plans: Sequence[Plan], picked: Sequence[Plan]) -> Table:
    columns = (
        "",
        "layout",
        "step",
        "tok/s/dev",
        "TFLOP/s/dev",
        "MFU",
        "peak of capacity",
        "margin",
        "verdict",
    )
    table = make_table(*columns, text_columns=("layout",))
    for place, plan in enumerate(plans, 1):
        estimate = plan.estimate
        part = estimate.peak_bytes / estimate.capacity_bytes
        table.add_row(
            f"{'> ' if plan in picked else ''}{place}",
            Text(
                format_layout(plan.layout).replace(",", ", "),
                style="bold" if plan in picked else "",
            ),  # may wrap there
            format_seconds(estimate.step_s),
            show_rate(estimate.tokens_per_s_per_device),
            f"{estimate.tflops_per_device:.4g}",
            f"{estimate.mfu:.1%}",
            f"{format_bytes(estimate.peak_bytes)} {_bar(console, part)}",
            format_bytes(estimate.margin_bytes),
            Text(estimate.verdict.value, style=STYLES[estimate.verdict]),
        )
    return table


def _rejections(rejected: Iterable[tuple[str, int]]) -> Table:
    table = make_table("layouts", "rule", text_columns=("rule",), title="Rejected")
    for rule, count in sorted(rejected, key=lambda pair: (-pair[1], pair[0])):
        table.add_row(f"{count:,}", Text(rule))
    return table


def _assumptions(assumptions: Iterable[Assumption]) -> Table:
    """Constants of one kind and source share a row, the least certain kind first."""
    shared: dict[tuple[SourceKind, str], list[str]] = {}
    for each in assumptions:
        shared.setdefault((each.kind, each.source), []).append(f"{each.name} {each.value}")
    order = list(reversed(SourceKind))
    table = make_table(
        "kind", "source", "what", text_columns=("kind", "source", "what"), title="What went into it"
    )
    for (kind, source), constants in sorted(shared.items(), key=lambda row: order.index(row[0][0])):
        table.add_row(kind.value, Text(source), Text(", ".join(constants)))
    return table


def _verdict(estimate: Estimate) -> Text:
    text = Text("verdict   ")
    text.append(estimate.verdict.value, style=STYLES[estimate.verdict])
    text.append(
        f": peak {format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.capacity_bytes)} on pipeline rank "
        f"{estimate.peak_rank}, margin {format_bytes(estimate.margin_bytes)}; largest: {estimate.largest}"
    )
    return text.append(f"; {describe_load_limit(estimate)}" if estimate.load_limit > 1 else "")


def print_measured_load(console: Console, plan: Plan, even: Estimate | None) -> None:
    """What a measured load costs the hottest rank beside even routing; nothing where none was
    measured."""
    if even is None:
        return
    found = plan.estimate
    factors = layer_load_factors(plan.model, plan.workload, plan.layout)
    worst = max(range(len(factors)), key=factors.__getitem__)
    layer = plan.model.routed_layers[worst]
    text = (
        f"measured load: the hottest of {plan.layout.ep} expert ranks gets {fmean(factors):.3g} x the even rows, mean "
        f"over {len(factors)} layers (most in layer {layer}, {factors[worst]:.3g} x). Beside even routing: peak "
        f"{format_bytes(found.peak_bytes)} instead of {format_bytes(even.peak_bytes)}, margin "
        f"{format_bytes(found.margin_bytes)} instead of {format_bytes(even.margin_bytes)}, step "
        f"{format_seconds(found.step_s)} instead of {format_seconds(even.step_s)}"
    )
    console.print(text, soft_wrap=True)


def describe_load_limit(estimate: Estimate) -> str:
    """How uneven routing may get before the device is full."""
    return f"full when the hottest expert rank gets {estimate.load_limit:.2f} x the even rows"


def _memory(ledger: Ledger) -> Table:
    cells = {(row.component, row.module): row.bytes for row in ledger.memory}
    modules = [
        module
        for module in Module
        if any(cells.get((component, module)) for component in Component)
    ]
    unit, scale = ("GiB", GIB) if ledger.device_bytes >= GIB else ("MiB", MIB)
    table = make_table(
        "component",
        *(module.value.replace("_", "\n") for module in modules),
        "total",
        text_columns=("component",),
        title=f"Memory of pipeline rank {ledger.pp_rank}, {unit}",
    )
    for component in Component:
        row = [cells.get((component, module), 0) for module in modules]
        if any(row):
            sizes = (f"{size / scale:.2f}" if size else "" for size in row)
            table.add_row(component.value, *sizes, f"{sum(row) / scale:.2f}")
    table.add_section()
    here = [component for component in Component if component is not Component.HOST]
    columns = (sum(cells.get((component, module), 0) for component in here) for module in modules)
    whole = Text(f"{ledger.device_bytes / scale:.2f}", style="bold")
    table.add_row("total", *(f"{size / scale:.2f}" for size in columns), whole)
    return table


def _time(console: Console, estimate: Estimate) -> Table:
    table = make_table(
        "part", "exposed", "hidden", "of step", "", text_columns=("part",), title="Time of a step"
    )
    for share in sorted(estimate.shares, key=lambda share: -share.seconds):
        if not (share.seconds or share.hidden_s):
            continue
        part = share.seconds / estimate.step_s
        hidden = format_seconds(share.hidden_s) if share.hidden_s else ""
        name = share.part.value.replace("_", " ")
        table.add_row(
            name,
            format_seconds(share.seconds),
            hidden,
            f"{part:.1%}",
            _bar(console, part, 2 * BAR_WIDTH),
        )
    table.add_section()
    table.add_row("step", Text(format_seconds(estimate.step_s), style="bold"), "", "", "")
    return table
