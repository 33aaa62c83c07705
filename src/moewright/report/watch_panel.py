"""A watched run on a terminal, drawn over itself: its steps as a curve, where it stands, alarms."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from moewright.diagnosis.run_watch import RunWatch, describe_change
from moewright.report.run_panel import draw_curve
from moewright.report.watch_document import list_facts
from moewright.spec.units import format_seconds

_CURVE_ROWS = 6  # so that the panel fits a terminal of 24 lines
_WIDEST = 100  # wider curves show no more
_LEAST_WIDTH = 30  # narrower curves show nothing
_SHOWN_LINES = 4  # of alarms, and of changes
_NAME_WIDTH = 9


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
