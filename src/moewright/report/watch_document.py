"""A watched run as a document, and on a terminal as a panel that is drawn over itself."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from moewright.diagnosis.run_watch import RunWatch, describe_change, describe_least_shift
from moewright.report.document import (
    Document,
    DocumentSection,
    Face,
    ItemList,
    Phrase,
    Table,
    Tone,
    build_table,
    numbers,
    words,
)
from moewright.report.run_panel import draw_curve
from moewright.spec.units import format_bytes, format_seconds, mention

_MAX_SHOWN = 8  # before -v
_CURVE_ROWS = 6  # so that the panel fits a terminal of 24 lines
_WIDEST = 100  # wider curves show no more
_LEAST_WIDTH = 30  # narrower curves show nothing
_SHOWN_LINES = 4  # of alarms, and of changes
_NAME_WIDTH = 9


def build_watch_document(watch: RunWatch) -> Document:
    """Build the state of a run and what was seen in its steps."""
    tone = Tone.judge(holds=not watch.alarms)
    heading = watch.title()
    changes = tuple(map(describe_change, watch.changes))
    sections = [DocumentSection(facts=tuple(list_facts(watch)))]
    if watch.alarms:
        alarms = tuple(
            (Phrase(text=f"{alarm.kind}: ", tone=tone, face=Face.STRONG), alarm.text)
            for alarm in watch.alarms
        )
        sections.append(
            DocumentSection(title="Alarms", items=ItemList(items=alarms, short=_MAX_SHOWN))
        )
    if changes:
        sections.append(
            DocumentSection(title="Changes", items=ItemList(items=changes, short=_MAX_SHOWN))
        )
    if watch.timers:
        sections.append(DocumentSection(title="Timers", table=_build_timers(watch)))
    if watch.recurrences:
        sections.append(DocumentSection(title="What recurs", table=_build_recurrences(watch)))
    return Document(subject=watch.source, heading=heading, sections=tuple(sections))


def list_facts(watch: RunWatch) -> Iterator[tuple[str, str]]:
    """Yield what is known of a run: its names and a sentence each."""
    of = mention(" of {:,}", watch.total)
    yield "trainer", watch.trainer
    yield "step", f"{watch.latest:,}{of}, {watch.steps:,} read"
    yield "now", f"{format_seconds(watch.step_s)} {watch.unit}, the median of the latest 50"
    if watch.predicted_s:
        low, high = watch.band_s
        ends = f"{format_seconds(low)} to {format_seconds(high)}"
        yield (
            "plan",
            f"{format_seconds(watch.predicted_s)} a step, {ends} in 95 of 100 cases; the run takes "
            f"{watch.step_s / watch.predicted_s:.2f} x as long",
        )
    if isfinite(watch.loss):
        trend = ""
        if watch.latest_loss:
            low, high = watch.loss_band
            trend = f"; {watch.latest_loss:.4g} over the latest 100 steps, where the 500 before "
            trend += f"lead to {low:.4g} to {high:.4g}"
        yield "loss", f"{watch.loss:.4g}{trend}"
    if watch.peak_bytes:
        expected = ""
        if watch.predicted_peak_bytes:
            expected = f"; the plan expects {format_bytes(watch.predicted_peak_bytes)}"
            low, high = watch.peak_band_bytes
            if high:
                expected += f", {format_bytes(low)} to {format_bytes(high)} in 95 of 100 cases,"
            expected += f" of {format_bytes(watch.capacity_bytes)}"
        yield "memory", f"{format_bytes(watch.peak_bytes)} on the fullest device{expected}"
    if watch.days_left:
        goodput = mention(" and a goodput of {:.1%}", watch.goodput)
        yield "left", f"{watch.days_left:.2f} days at the pace of the latest 500 steps{goodput}"
    if watch.ranks:
        probed = [rank for rank in watch.ranks if rank.probe_s]
        text = f"{len(watch.ranks):,} recorded"
        if probed:
            slowest = max(probed, key=lambda rank: rank.probe_s)
            fastest = min(rank.probe_s for rank in probed)
            text += (
                f"; the slowest device (rank {slowest.rank}) takes "
                f"{slowest.probe_s / fastest:.2f} of the fastest's time"
            )
        yield "ranks", text
    if watch.imbalance:
        yield "experts", f"the hottest rank has {watch.imbalance:.2f} times the mean rows"
    yield "sees", describe_least_shift(watch.least_shift)


def _build_timers(watch: RunWatch) -> Table:
    return build_table(
        (*words("timer"), *numbers("of the slowest rank", "of a step")),
        (
            (timer.name, format_seconds(timer.seconds), f"{timer.seconds / watch.step_s:.0%}")
            for timer in watch.timers[:_MAX_SHOWN]
        ),
    )


def _build_recurrences(watch: RunWatch) -> Table:
    return build_table(
        (*words("what"), *numbers("every", "times", "adds", "of all time")),
        (
            (
                item.name or ("" if item.period else "no regular time"),
                mention("{:,} steps", item.period),
                f"{item.count:,}",
                format_seconds(item.added_s),
                f"{item.share:.2%}",
            )
            for item in watch.recurrences
        ),
    )


class WatchPanel:
    """A panel that is drawn anew for each state of a run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def draw(self, watch: RunWatch) -> None:
        """Draw a state in the place of the one before."""
        is_ascii = not self._console.encoding.startswith("utf")
        panel = build_panel(watch, self._console.width, is_ascii=is_ascii)
        self._live.update(panel, refresh=True)

    def close(self) -> None:
        """Leave the last state where it is."""
        self._live.stop()


def build_panel(watch: RunWatch, width: int, *, is_ascii: bool = False) -> RenderableType:
    """Return the curve of the latest steps, the facts, the newest changes and the alarms."""
    lines: list[RenderableType] = [Text(watch.title(), style="bold")]
    if len(watch.recent_s) > 1:
        columns = max(_LEAST_WIDTH, min(_WIDEST, width - 2 * _NAME_WIDTH))
        rows, low, high = draw_curve(watch.recent_s, columns, _CURVE_ROWS, is_ascii=is_ascii)
        ends = {0: format_seconds(high), len(rows) - 1: format_seconds(low)}
        lines += [
            Text(f"{row.ljust(columns)} {ends.get(place, '')}", no_wrap=True)
            for place, row in enumerate(rows)
        ]
    for name, line in list_facts(watch):
        lines.append(Text(f"{name:<{_NAME_WIDTH}} {line}", overflow="ellipsis", no_wrap=True))
    for change in watch.changes[-_SHOWN_LINES:]:
        lines.append(Text(f"{'change':<{_NAME_WIDTH}} {describe_change(change)}"))
    for alarm in watch.alarms[-_SHOWN_LINES:]:
        lines.append(Text(f"{alarm.kind.value:<{_NAME_WIDTH}} {alarm.text}", style="bold red"))
    return Group(*lines)
