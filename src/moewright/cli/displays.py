"""How a run is shown while it goes on: a panel on a terminal, lines elsewhere, or nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moewright.engine.observe.display import RunDisplay


def open_display(*, is_quiet: bool = False, is_kept: bool = True) -> RunDisplay:
    """Open the display for standard output as it is; a panel may stay when its run has ended."""
    from moewright.engine.observe.display import StepLines

    if is_quiet or not _draws(sys.stdout.isatty()):
        return StepLines(prints_steps=not is_quiet)
    from moewright.report.run_panel import RunPanel

    return RunPanel(sys.stdout, is_kept=is_kept)


def _draws(is_terminal: bool) -> bool:
    """Tell whether standard output is a terminal on which text can be drawn over."""
    from rich.console import Console

    return is_terminal and not Console().is_dumb_terminal
