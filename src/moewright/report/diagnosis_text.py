"""A diagnosis as text: where the step goes in whole and in detail, and what a log measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moewright.diagnosis.traces.breakdown import Breakdown
from moewright.diagnosis.traces.capture import KernelKind
from moewright.diagnosis.traces.megatron_log import MegatronLog
from moewright.diagnosis.traces.step_details import ChangeLevel, StepChange, StepDetails
from moewright.report.console import make_table
from moewright.spec.finding import Waterfall
from moewright.spec.plan import Plan
from moewright.spec.units import (
    GB,
    TERA,
    format_bytes,
    format_change,
    format_figures,
    format_seconds,
    plural,
)

_MAX_NAME_WIDTH = 72  # of kernels, which carry their template arguments
_MAX_TIMERS = 12  # Megatron-LM prints dozens


def print_breakdown(
    console: Console, breakdowns: Sequence[Breakdown], *, verbose: bool = True
) -> None:
    """Print the seconds of a step, mean over the ranks, and the top kernels of the first rank."""
    first = breakdowns[0]
    step_s = fmean(rank.step_s for rank in breakdowns)
    ranks = f"{len(breakdowns)} ranks" if len(breakdowns) > 1 else f"rank {first.rank}"
    length = f"{plural(first.steps, 'step')}; {format_seconds(step_s)} a step"
    if not first.steps:
        length = f"no step is marked: all of its {format_seconds(step_s)} are taken as one"
    console.print(Text(f"{ranks}, {first.device or 'unnamed device'}, {length} (measured)"))
    console.print(_breakdown_table(breakdowns, step_s))
    if verbose:
        console.print(_kernel_table(first))
    # Ranks mostly say the same.
    for note in dict.fromkeys(note for rank in breakdowns for note in rank.notes):
        console.print(Text(note))


def _breakdown_table(breakdowns: Sequence[Breakdown], step_s: float) -> Table:
    heading = "part of the step"
    table = make_table(heading, "seconds", "share", "", text_columns=(heading, ""))
    compute_s = fmean(rank.compute_s for rank in breakdowns)
    _add_part(table, "compute", compute_s, step_s, "union of its kernels")
    for kind in KernelKind:
        # Ranks without it count: the mean is one over all of them.
        seconds = fmean(dict(rank.kind_times).get(kind, 0.0) for rank in breakdowns)
        _add_part(table, f"  {kind}", seconds, step_s, "own union")
    comms = [time for rank in breakdowns for time in rank.comm_times]
    for comm in dict.fromkeys(time.comm for time in comms):
        times = [time for time in comms if time.comm is comm]
        exposed_s = sum(time.exposed_s for time in times) / len(breakdowns)
        busy_s = sum(time.busy_s for time in times) / len(breakdowns)
        payload_bytes = sum(time.bytes for time in times) / len(breakdowns)
        note = f"of {format_seconds(busy_s)} in {plural(times[0].calls, 'call')}"
        if payload_bytes:
            note += f", {format_bytes(payload_bytes)} of payload"
        note += f"; {'; '.join(times[0].evidence)}"
        _add_part(table, f"exposed {comm}", exposed_s, step_s, note)
    copies_s = fmean(rank.copies_s for rank in breakdowns)
    _add_part(table, "copies not hidden", copies_s, step_s, "")
    for cause in dict.fromkeys(cause for rank in breakdowns for cause, _ in rank.idle_times):
        seconds = fmean(dict(rank.idle_times).get(cause, 0.0) for rank in breakdowns)
        _add_part(table, f"idle: {cause}", seconds, step_s, "")
    return table


def _add_part(table: Table, name: str, seconds: float, step_s: float, note: str) -> None:
    if seconds > 0:
        table.add_row(name, format_seconds(seconds), f"{seconds / step_s:.1%}", note)


def _kernel_table(breakdown: Breakdown) -> Table:
    table = make_table(
        "top kernels", "work", "ms a step", "calls", "share", text_columns=("top kernels", "work")
    )
    for kernel in breakdown.top_kernels:
        name = kernel.name
        if len(name) > _MAX_NAME_WIDTH:
            name = name[: _MAX_NAME_WIDTH - 1] + "…"
        table.add_row(
            name,
            kernel.kind,
            f"{kernel.seconds * 1e3:.2f}",
            f"{kernel.calls:,.0f}",
            f"{kernel.seconds / breakdown.step_s:.1%}",
        )
    return table


def print_waterfall(
    console: Console, waterfall: Waterfall, model_flops_per_device: float = 0.0
) -> None:
    """Print the way from the ideal to the measured step, each drop with its share of the latter.

    The rates at both ends are printed where the model FLOPs of a device are known.
    """
    ideal_s = waterfall.ideal_s
    measured_s = waterfall.measured_s
    if ideal_s > measured_s:
        text = (
            f"the job as described would take {format_seconds(ideal_s)} a step at the peak rate, "
            f"longer than the measured {format_seconds(measured_s)}: it is not the job that ran"
        )
        console.print(Text(text))
        return
    console.print(_waterfall_table(waterfall))
    if model_flops_per_device:
        ideal_tflops = model_flops_per_device / ideal_s / TERA
        measured_tflops = model_flops_per_device / measured_s / TERA
        rates = (
            f"{format_figures(measured_tflops)} TFLOP/s a device measured, "
            f"{format_figures(ideal_tflops)} at the peak"
        )
        console.print(Text(f"{rates}: MFU {measured_tflops / ideal_tflops:.1%}"))


def _waterfall_table(waterfall: Waterfall) -> Table:
    measured_s = waterfall.measured_s
    table = make_table(
        "from ideal to measured",
        "seconds",
        "share",
        "basis",
        "",
        text_columns=("from ideal to measured", "basis", ""),
    )
    ideal_share = f"{waterfall.ideal_s / measured_s:.1%}"
    table.add_row(
        "ideal step", format_seconds(waterfall.ideal_s), ideal_share, "", waterfall.ideal_note
    )
    for drop in waterfall.drops:
        amount = format_change(drop.seconds, format_seconds)
        share = f"{drop.seconds / measured_s:+.1%}"
        table.add_row(drop.name, amount, share, drop.basis, drop.note)
    table.add_row("measured step", format_seconds(measured_s), "100.0%", "measured", "")
    return table


def print_log(console: Console, log: MegatronLog, job: Plan | None) -> None:
    """Print what a console log measured, and what was predicted where the job is known."""
    for line in describe_log(log):
        console.print(Text(line))
    if log.timers:
        console.print(_timer_table(log))
    if job is not None:
        _print_prediction(console, log, job)


def describe_log(log: MegatronLog) -> Iterator[str]:
    """Yield what a console log measured: iterations, those skipped, and the fullest rank."""
    if log.iterations:
        text = (
            f"{plural(len(log.iterations), 'iteration')}, "
            f"{len(log.steady_iterations)} after warm-up: "
            f"{format_seconds(log.step_s)} a step"
        )
        if log.tflops_per_device:
            text += f", {log.tflops_per_device:.1f} TFLOP/s a device as the trainer counts"
        yield f"{text} (measured)"
    skipped = sum(iteration.skipped for iteration in log.iterations)
    nan_losses = sum(iteration.nan_losses for iteration in log.iterations)
    if skipped or nan_losses:
        yield f"{plural(skipped, 'iteration')} skipped, {nan_losses} with NaN (measured)"
    if log.memory_reports:
        fullest = max(log.memory_reports, key=lambda report: report.max_reserved_bytes)
        yield (
            f"rank {fullest.rank} is the fullest of {len(log.memory_reports)}: "
            f"{format_bytes(fullest.max_reserved_bytes)} reserved, "
            f"{format_bytes(fullest.max_allocated_bytes)} allocated (measured)"
        )


def _timer_table(log: MegatronLog) -> Table:
    """Put the longest timers first; timers lie inside each other."""
    heading = "timer of the trainer (measured)"
    table = make_table(heading, "least", "most", "share", text_columns=(heading,))
    longest = sorted(log.timers.items(), key=lambda item: -item[1].max_s)[:_MAX_TIMERS]
    for name, timer in longest:
        share = ""
        if log.step_s:
            share = f"{timer.max_s / log.step_s:.1%}"
        table.add_row(name, format_seconds(timer.min_s), format_seconds(timer.max_s), share)
    return table


def _print_prediction(console: Console, log: MegatronLog, job: Plan) -> None:
    estimate = job.estimate
    devices = job.layout.world_size
    text = (
        f"predicted: {format_seconds(estimate.step_s)} a step, "
        f"{estimate.tflops_per_device:.1f} TFLOP/s, MFU {estimate.mfu:.1%}, "
        f"HFU {estimate.hfu:.1%}, peak {format_bytes(estimate.peak_bytes)}"
    )
    console.print(Text(text))
    if log.step_s:
        tokens_per_s = job.workload.tokens_per_step / devices / log.step_s
        tflops = estimate.model_flops_per_step / devices / log.step_s / TERA
        text = (
            f"measured: {tokens_per_s:,.0f} tokens/s a device, {tflops:.1f} TFLOP/s by our count "
            "of model FLOPs"
        )
        console.print(Text(text))


_SHOWN_LAYERS = 4  # slowest
_SHOWN_CHANGES = 8  # of each level
_NAME_WIDTH = 72


def print_details(console: Console, details: Sequence[StepDetails]) -> None:
    """Print phases, slowest layers, achieved bandwidths and the spread over steps."""
    first = details[0]
    phases = {
        row.phase: fmean(
            next((other.seconds for other in rank.phases if other.phase is row.phase), 0.0)
            for rank in details
        )
        for row in first.phases
    }
    if phases:
        parts = ", ".join(f"{phase} {format_seconds(s)}" for phase, s in phases.items())
        text = f"phases of the layers: {parts} a step (measured, own unions)"
        console.print(Text(text))
    if len(first.layers) > 1:
        slowest = sorted(first.layers, key=lambda row: -row.seconds)[:_SHOWN_LAYERS]
        middle = format_seconds(median(row.seconds for row in first.layers))
        parts = ", ".join(f"{row.layer}: {format_seconds(row.seconds)}" for row in slowest)
        text = f"slowest of {len(first.layers)} layers: {parts}; the median {middle} (measured)"
        console.print(Text(text))
    lengths_s = first.step_lengths_s
    if len(lengths_s) > 1:
        low, middle, high = (
            format_seconds(s) for s in (min(lengths_s), median(lengths_s), max(lengths_s))
        )
        text = f"{len(lengths_s)} steps of {low} to {high}, median {middle} (measured, on the host)"
        console.print(Text(text))
    if first.collectives:
        console.print(_collective_table(first))


def _collective_table(details: StepDetails) -> Table:
    heading = "collective (measured)"
    table = make_table(
        heading, "ranks", "calls", "payload", "bus GB/s", "best", text_columns=(heading,)
    )
    for rate in sorted(details.collectives, key=lambda rate: -rate.payload_bytes * rate.calls):
        table.add_row(
            f"{rate.comm} {rate.op}",
            str(rate.size),
            f"{rate.calls:,}",
            format_bytes(round(rate.payload_bytes)),
            f"{rate.bus_Bps / GB:.1f}",
            f"{rate.best_Bps / GB:.1f}",
        )
    return table


def print_changes(console: Console, changes: Sequence[StepChange]) -> None:
    """Print the largest changes of each level."""
    for level in ChangeLevel:
        of_level = [change for change in changes if change.level is level]
        if of_level:
            console.print(_change_table(level, of_level[:_SHOWN_CHANGES]))
            if len(of_level) > _SHOWN_CHANGES:
                console.print(f"and {len(of_level) - _SHOWN_CHANGES} smaller")


def _change_table(level: ChangeLevel, changes: Sequence[StepChange]) -> Table:
    heading = f"{level} (measured)"
    table = make_table(heading, "before", "after", "change", text_columns=(heading,))
    for change in changes:
        name = change.name
        if len(name) > _NAME_WIDTH:
            name = f"{name[: _NAME_WIDTH - 1]}…"
        table.add_row(
            name,
            format_seconds(change.before_s),
            format_seconds(change.after_s),
            format_change(change.change_s, format_seconds),
        )
    return table
