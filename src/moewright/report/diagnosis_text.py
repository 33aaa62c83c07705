"""A diagnosis as text: where the step goes, the walls with evidence and fixes, the waterfall."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moewright.diagnosis.priced_fixes import PricedJob
from moewright.diagnosis.traces.breakdown import Breakdown
from moewright.diagnosis.traces.capture import KernelKind
from moewright.diagnosis.traces.megatron_log import MegatronLog
from moewright.report.console import make_table
from moewright.spec.finding import Finding, Fix, Waterfall
from moewright.spec.units import TERA, format_bytes, format_seconds

_NAME_WIDTH = 72
_FINDINGS = 4
_TIMERS = 12


def print_breakdown(console: Console, parts: Sequence[Breakdown]) -> None:
    """Seconds of a step, mean over the ranks, and the kernels of the first."""
    step = fmean(part.step_s for part in parts)
    first = parts[0]
    over = f"{first.steps} steps" if first.steps else "all of it (no step is marked)"
    ranks = f"{len(parts)} ranks" if len(parts) > 1 else f"rank {first.rank}"
    console.print(
        Text(
            f"{ranks}, {first.device or 'unnamed device'}, {over}; {format_seconds(step)} a step (measured)"
        )
    )
    table = make_table(
        "part of the step", "seconds", "share", "", text_columns=("part of the step", "")
    )
    _row(table, "compute", fmean(part.compute_s for part in parts), step, "union of its kernels")
    for work in KernelKind:
        seconds = fmean(dict(part.kind_times).get(work, 0.0) for part in parts)
        if seconds:
            _row(table, f"  {work}", seconds, step, "own union")
    for comm in dict.fromkeys(each.comm for part in parts for each in part.comm_times):
        ours = [each for part in parts for each in part.comm_times if each.comm is comm]
        exposed, busy, moved = (
            sum(values) / len(parts)
            for values in zip(
                *((each.exposed_s, each.busy_s, each.bytes) for each in ours), strict=True
            )
        )
        rate = f", {format_bytes(moved)} handed in" if moved else ""
        note = f"of {format_seconds(busy)} in {ours[0].calls:.0f} calls{rate}; {'; '.join(ours[0].evidence)}"
        _row(table, f"exposed {comm}", exposed, step, note)
    _row(table, "copies not hidden", fmean(part.copies_s for part in parts), step, "")
    for cause in dict.fromkeys(cause for part in parts for cause, _ in part.idle_times):
        _row(
            table,
            f"idle: {cause}",
            fmean(dict(part.idle_times).get(cause, 0.0) for part in parts),
            step,
            "",
        )
    console.print(table)
    top = make_table(
        "top kernels", "work", "ms a step", "calls", "share", text_columns=("top kernels", "work")
    )
    for kernel in first.top_kernels:
        name = (
            kernel.name if len(kernel.name) <= _NAME_WIDTH else kernel.name[: _NAME_WIDTH - 1] + "…"
        )
        share = f"{kernel.seconds / first.step_s:.1%}"
        top.add_row(name, kernel.kind, f"{kernel.seconds * 1e3:.2f}", f"{kernel.calls:,.0f}", share)
    console.print(top)
    for note in dict.fromkeys(note for part in parts for note in part.notes):
        console.print(Text(note))


def _row(table: Table, name: str, seconds: float, step: float, note: str) -> None:
    if seconds > 0:
        table.add_row(name, format_seconds(seconds), f"{seconds / step:.1%}", note)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """The wall to work on first in front, with its fixes; what comes after it in short."""
    for place, finding in enumerate(findings[:_FINDINGS]):
        head = (
            f"{'WALL' if place == 0 else 'then'}: {finding.wall} ({finding.cause}): {finding.title}"
        )
        console.print(Text(head, style="bold" if place == 0 else ""), soft_wrap=True)
        for line in finding.evidence:
            console.print(Text(f"  seen: {line}"), soft_wrap=True)
        for number, fix in enumerate(finding.fixes, 1):
            console.print(Text(f"  {number}. {_fix(fix)}"), soft_wrap=True)


def _fix(fix: Fix) -> str:
    said = fix.text
    if fix.excluded:
        return f"{said} [not here: {fix.excluded}]"
    if fix.price is not None:
        price = fix.price
        said += (
            f" [predicted: step {price.step_share:+.1%}, memory {'+' if price.peak_bytes >= 0 else '-'}"
            f"{format_bytes(abs(price.peak_bytes))}, {price.verdict}; ours: {price.layout}]"
        )
    if fix.megatron:
        said += f" [Megatron: {fix.megatron}]"
    return said + (f" [excludes {fix.excludes}]" if fix.excludes else "")


def print_waterfall(console: Console, fall: Waterfall, model_flops_per_device: float = 0.0) -> None:
    """Ideal to measured, each drop with its share of the measured step, and the rates at both ends
    where FLOPs are known."""
    if fall.ideal_s > fall.measured_s:
        text = f"the job given would take {format_seconds(fall.ideal_s)} a step at the peak rate, longer than"
        console.print(
            Text(
                f"{text} the measured {format_seconds(fall.measured_s)}: it is not the job that ran"
            ),
            soft_wrap=True,
        )
        return
    table = make_table(
        "from ideal to measured",
        "seconds",
        "share",
        "how known",
        "",
        text_columns=("from ideal to measured", "how known", ""),
    )
    table.add_row(
        "ideal step",
        format_seconds(fall.ideal_s),
        f"{fall.ideal_s / fall.measured_s:.1%}",
        "",
        fall.ideal_note,
    )
    for drop in fall.drops:
        sign = "+" if drop.seconds >= 0 else "-"
        amount = f"{sign}{format_seconds(abs(drop.seconds))}"
        table.add_row(
            drop.name, amount, f"{drop.seconds / fall.measured_s:+.1%}", drop.basis, drop.note
        )
    table.add_row("measured step", format_seconds(fall.measured_s), "100.0%", "measured", "")
    console.print(table)
    if model_flops_per_device:
        ideal, measured = (
            model_flops_per_device / seconds / TERA for seconds in (fall.ideal_s, fall.measured_s)
        )
        console.print(
            Text(
                f"{measured:.1f} TFLOP/s a device measured, {ideal:.1f} at the peak: MFU {measured / ideal:.1%}"
            )
        )


def _print_timers(console: Console, log: MegatronLog) -> None:
    """The longest first; they lie inside each other."""
    if not log.timers:
        return
    table = make_table(
        "timer of the trainer (measured)",
        "least",
        "most",
        "share",
        text_columns=("timer of the trainer (measured)",),
    )
    for name, timer in sorted(log.timers.items(), key=lambda each: -each[1].max_s)[:_TIMERS]:
        share = f"{timer.max_s / log.step_s:.1%}" if log.step_s else ""
        table.add_row(name, format_seconds(timer.min_s), format_seconds(timer.max_s), share)
    console.print(table)


def print_log(console: Console, log: MegatronLog, known: PricedJob | None) -> None:
    """What the log measured, beside what was predicted."""
    if log.iterations:
        settled = log.steady_iterations
        text = f"{len(log.iterations)} iterations, {len(settled)} after warm-up: {format_seconds(log.step_s)} a step"
        if log.tflops_per_device:
            text += f", {log.tflops_per_device:.1f} TFLOP/s a device as the trainer counts"
        console.print(Text(f"{text} (measured)"), soft_wrap=True)
        skipped, broken = (
            sum(each.skipped for each in log.iterations),
            sum(each.nan_losses for each in log.iterations),
        )
        if skipped or broken:
            console.print(Text(f"{skipped} iterations skipped, {broken} with NaN (measured)"))
    _print_timers(console, log)
    for report in sorted(log.memory_reports, key=lambda each: -each.max_reserved_bytes)[:1]:
        held, given = (
            format_bytes(report.max_reserved_bytes),
            format_bytes(report.max_allocated_bytes),
        )
        console.print(
            Text(
                f"rank {report.rank} is the fullest of {len(log.memory_reports)}: {held} held, {given} given out (measured)"
            )
        )
    if known is None:
        return
    found = known.estimate
    rate = known.workload.tokens_per_step / known.layout.world_size
    line = f"predicted: {format_seconds(found.step_s)} a step, {found.tflops_per_device:.1f} TFLOP/s, MFU {found.mfu:.1%}"
    console.print(
        Text(f"{line}, HFU {found.hfu:.1%}, peak {format_bytes(found.peak_bytes)}"), soft_wrap=True
    )
    if log.step_s:
        tflops = found.model_flops_per_step / known.layout.world_size / log.step_s / TERA
        text = f"measured: {rate / log.step_s:,.0f} tokens/s a device, {tflops:.1f} TFLOP/s by our count of model FLOPs"
        console.print(Text(text), soft_wrap=True)
