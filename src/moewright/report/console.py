"""Plans and estimates as tables for a terminal; output that is piped has the same text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from moewright.codec import format_layout
from moewright.diagnosis.judgement import Judgement, Quality
from moewright.rules.expert_load import layer_load_factors
from moewright.spec.ledger import Component, Ledger, Module
from moewright.spec.plan import Assumption, Estimate, Plan, TimeShare, Verdict
from moewright.spec.units import (
    GIB,
    MIB,
    SourceKind,
    format_bytes,
    format_figures,
    format_seconds,
    plural,
)

PIPED_WIDTH = 120
_WIDEST = 10_000  # no table has as many columns of letters
BAR_WIDTH = 10
# Without -v: as many peaks of pipeline ranks, and parts of the step.
_PEAKS_SHOWN = 4
_PARTS_SHOWN = 5
_NAME_WIDTH = 10  # of the name before a fact
FLOP_UNITS = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
STYLES = {Verdict.FITS: "green", Verdict.UNCERTAIN: "yellow", Verdict.OOM: "red"}


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """Print without a cut at the right edge; a terminal wraps what is longer."""
        super().print(*objects, **{"crop": False, **options})

    def on_broken_pipe(self) -> None:
        """Raise, and so leave a closed pipe to the caller; rich would exit with code 1."""
        raise BrokenPipeError


class _FittingTable(Table):
    """A table that is a list of its rows where a console is narrower than its words.

    So nothing in it is cut, and a layout can be copied whole.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or its rows one below the other."""
        least = self.__rich_measure__(console, options.update(max_width=_WIDEST)).minimum
        if least <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield _keep_whole(Text(str(self.title), style="bold"))
        names = [str(column.header).replace("\n", " ") for column in self.columns]
        indent = max(map(len, names))
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            yield Text("")
            for name, cell in zip(names, cells, strict=True):
                if str(cell):
                    yield _keep_whole(Text.assemble(f"{name:{indent}}  ", cell))
        yield Text("")


def _keep_whole(line: Text) -> Text:
    """Return a line that no console wraps or cuts; a terminal wraps it by itself."""
    line.no_wrap = True
    line.overflow = "ignore"
    return line


def make_console(stream: TextIO) -> Console:
    """Make a console on a stream: a terminal's own width and colours, else plain 120 columns."""
    width = None if stream.isatty() else PIPED_WIDTH
    return _Console(file=stream, width=width, highlight=False, markup=False)


def print_estimate(
    console: Console, plan: Plan, judgement: Judgement, *, verbose: bool = False
) -> None:
    """Print one layout's judged verdict, memory of its fullest rank, and time by part.

    Only `verbose` shows the peaks of many ranks, the smallest parts and every assumption.
    """
    print_verdict(console, plan, judgement)
    print_estimate_parts(console, plan, verbose=verbose)


def print_defaults(console: Console, defaults: Sequence[str]) -> None:
    """Print the values that nobody gave, and what was noted while reading, on one line."""
    if defaults:
        console.print(Text("; ".join(defaults)), soft_wrap=True)


def print_verdict(console: Console, plan: Plan, judgement: Judgement) -> None:
    """Print what is estimated, whether it fits, and whether it is good."""
    console.print(Text(job_title(plan), style="bold"), soft_wrap=True)
    console.print(Text(f"layout    {format_layout(plan.layout)}"), soft_wrap=True)
    print_fact(console, "verdict", _verdict_line(plan.estimate))
    style = ""
    if judgement.quality is Quality.SLOW:
        style = "yellow"
    print_fact(console, "speed", Text(judgement.speed, style=style))
    print_fact(console, "measured", Text(judgement.measured))
    print_fact(console, "routing", Text(_describe_routing(plan.estimate)))


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
        f"{uneven.peak_load:.2f} x in peaks{f' ({limit})' if limit else ''}; 1 run of 10 over "
        f"{format_seconds(uneven.step_p90_s)}, {format_bytes(uneven.peak_p90_bytes)}"
    )


def print_fact(console: Console, name: str, text: Text) -> None:
    """Print a text behind its name, wrapped beside it; nothing where there is no text."""
    for place, line in enumerate(text.wrap(console, console.width - _NAME_WIDTH)):
        head = Text(f"{'' if place else name:{_NAME_WIDTH}}")
        console.print(head.append_text(line), soft_wrap=True)


def print_estimate_parts(console: Console, plan: Plan, *, verbose: bool = False) -> None:
    """Print memory of the fullest rank, time by part, and what went into it."""
    estimate = plan.estimate
    fullest = next(ledger for ledger in estimate.ledgers if ledger.pp_rank == estimate.peak_rank)
    console.print(_memory_table(fullest))
    if len(estimate.ledgers) > _PEAKS_SHOWN and not verbose:
        sizes = [ledger.device_bytes for ledger in estimate.ledgers]
        console.print(
            f"Peak of {len(sizes)} pipeline ranks   {format_bytes(min(sizes))} to "
            f"{format_bytes(max(sizes))}"
        )
    elif len(estimate.ledgers) > 1:
        peaks = "  ".join(
            f"{ledger.pp_rank}: {format_bytes(ledger.device_bytes)}" for ledger in estimate.ledgers
        )
        console.print(Text(f"Peak by pipeline rank   {peaks}"))
    if estimate.untimed:
        console.print(Text(estimate.untimed), soft_wrap=True)
    else:
        console.print(_time_table(console, estimate, verbose=verbose))
        console.print(
            f"{plural(estimate.micro_batches, 'micro-batch')}, "
            f"bubble {estimate.bubble_fraction:.2%}; "
            f"{format_figures(estimate.tokens_per_s_per_device)} tokens/s/device, "
            f"{format_figures(estimate.tflops_per_device)} TFLOP/s/device, "
            f"MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%}"
        )
    if verbose:
        console.print(assumption_table(estimate.assumptions))
    else:
        console.print(Text(summarise_sources(estimate.assumptions)))


def print_measured_load(console: Console, plan: Plan, even: Estimate | None) -> None:
    """Print what a measured load costs the hottest rank, beside the estimate of even routing.

    Nothing is printed without an even estimate, that is, where no load was measured.
    """
    if even is None:
        return
    estimate = plan.estimate
    factors = layer_load_factors(plan.workload, plan.layout)
    worst = max(range(len(factors)), key=factors.__getitem__)
    layer = plan.model.routed_layers[worst]
    text = (
        f"measured load: the busiest of {plan.layout.ep} expert ranks gets {fmean(factors):.3g} x "
        f"its even share of tokens, mean over {plural(len(factors), 'layer')} "
        f"(most in layer {layer}, {factors[worst]:.3g} x). Beside even routing: peak "
        f"{format_bytes(estimate.peak_bytes)} instead of {format_bytes(even.peak_bytes)}, margin "
        f"{format_bytes(estimate.margin_bytes)} instead of {format_bytes(even.margin_bytes)}, step "
        f"{format_seconds(estimate.step_s)} instead of {format_seconds(even.step_s)}"
    )
    console.print(text, soft_wrap=True)


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


def describe_load_limit(estimate: Estimate) -> str:
    """Say how uneven routing may get before the device is full."""
    return (
        "memory is full when the busiest expert-parallel rank gets "
        f"{estimate.load_limit:.2f} x its even share of tokens"
    )


def format_flops(value: float) -> str:
    """Return FLOPs as PFLOP, TFLOP, GFLOP or MFLOP with four significant figures."""
    unit, scale = next(
        ((unit, scale) for unit, scale in FLOP_UNITS if value >= scale), FLOP_UNITS[-1]
    )
    digits = ",.0f" if value >= 1e4 * scale else ",.4g"
    return f"{value / scale:{digits}} {unit}"


def make_table(*columns: str, text_columns: Iterable[str] = (), title: str = "") -> Table:
    """Make an empty table; the `text_columns` hold words and may wrap, the others numbers."""
    table = _FittingTable(
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


def job_title(plan: Plan) -> str:
    """Return model, hardware and workload of a plan in one line."""
    workload = plan.workload
    return (
        f"{plan.model.name or 'model'} on {plan.layout.world_size} x {plan.hardware.device.name}: "
        f"sequence {workload.seq_len:,}, global batch {workload.global_batch:,}, "
        f"{workload.precision}, {format_flops(plan.estimate.model_flops_per_step)} a step"
    )


def draw_bar(console: Console, share: float, width: int = BAR_WIDTH) -> str:
    """Return a bar of `width` cells, a share of them full."""
    full, empty = ("#", ".") if console.options.ascii_only else ("█", "░")
    cells = min(width, max(0, round(share * width)))
    return full * cells + empty * (width - cells)


def assumption_table(assumptions: Iterable[Assumption]) -> Table:
    """Return a table of what went into an estimate.

    It puts constants of one kind and source into one row, the least certain kind first.
    """
    constants: dict[tuple[SourceKind, str], list[str]] = {}
    for assumption in assumptions:
        row = constants.setdefault((assumption.kind, assumption.source), [])
        row.append(f"{assumption.name} {assumption.value}")
    order = list(reversed(SourceKind))
    columns = ("kind", "source", "what")
    table = make_table(*columns, text_columns=columns, title="What went into it")
    for (kind, source), texts in sorted(
        constants.items(), key=lambda item: order.index(item[0][0])
    ):
        table.add_row(kind.value, Text(source), Text(", ".join(texts)))
    return table


def _verdict_line(estimate: Estimate) -> Text:
    line = Text()
    line.append(estimate.verdict.value, style=STYLES[estimate.verdict])
    line.append(
        f": peak {format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.capacity_bytes)} "
        f"on pipeline rank {estimate.peak_rank}, margin {format_bytes(estimate.margin_bytes)}; "
        f"largest: {estimate.largest}"
    )
    if estimate.host_shortage:
        line.append(f"; {estimate.host_shortage}")
    return line


def _memory_table(ledger: Ledger) -> Table:
    sizes = {(row.component, row.module): row.bytes for row in ledger.memory}
    modules = [
        module
        for module in Module
        if any(sizes.get((component, module)) for component in Component)
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
        row = [sizes.get((component, module), 0) for module in modules]
        if any(row):
            texts = (f"{size / scale:.2f}" if size else "" for size in row)
            table.add_row(component.value, *texts, f"{sum(row) / scale:.2f}")
    table.add_section()
    # Memory of the host is shown above, but does not count in what the device holds.
    on_device = [component for component in Component if component is not Component.HOST]
    totals = (
        sum(sizes.get((component, module), 0) for component in on_device) for module in modules
    )
    total = Text(f"{ledger.device_bytes / scale:.2f}", style="bold")
    table.add_row("total", *(f"{size / scale:.2f}" for size in totals), total)
    return table


def summarise_sources(assumptions: Iterable[Assumption]) -> str:
    """Count what went into an estimate, by kind of source."""
    counts = Counter(assumption.kind for assumption in assumptions)
    kinds = ", ".join(f"{counts[kind]} {kind.value}" for kind in SourceKind if counts[kind])
    return f"Constants: {kinds} (-v: sources)."


def _time_table(console: Console, estimate: Estimate, *, verbose: bool) -> Table:
    table = make_table(
        "part", "exposed", "hidden", "of step", "", text_columns=("part",), title="Time of a step"
    )
    shares = sorted(estimate.shares, key=lambda share: -share.seconds)
    shown = [share for share in shares if share.seconds or share.hidden_s]
    rest: list[TimeShare] = []
    if not verbose:
        shown, rest = shown[:_PARTS_SHOWN], shown[_PARTS_SHOWN:]
    for share in shown:
        of_step = share.seconds / estimate.step_s
        table.add_row(
            share.part.value.replace("_", " "),
            format_seconds(share.seconds),
            format_seconds(share.hidden_s) if share.hidden_s else "",
            f"{of_step:.1%}",
            draw_bar(console, of_step, 2 * BAR_WIDTH),
        )
    if rest:
        rest_s = sum(share.seconds for share in rest)
        hidden_s = sum(share.hidden_s for share in rest)
        table.add_row(
            plural(len(rest), "smaller part"),
            format_seconds(rest_s),
            format_seconds(hidden_s) if hidden_s else "",
            f"{rest_s / estimate.step_s:.1%}",
            "",
        )
    table.add_section()
    table.add_row("step", Text(format_seconds(estimate.step_s), style="bold"), "", "", "")
    return table
