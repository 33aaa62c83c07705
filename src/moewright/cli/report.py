"""`moewright report`: a run as one static HTML file."""

from __future__ import annotations

from pathlib import Path

from moewright.cli.answers import write_answer
from moewright.cli.options import JsonOption


def report(run: Path, /, *others: Path, out: Path | None = None, json: JsonOption = None) -> int:
    """Write one HTML page about a run, or several over each other, that opens offline.

    The page shows the verdict, what holds the run back with priced fixes, loss, experts, time,
    memory, plan, and the predicted and the counted ledger.

    Parameters
    ----------
    run
        The folder of a run, as `moewright train --out` made it, or the plan.json in it.
    others
        Folders of runs to lay over it: loss, step time and phases side by side.
    out
        The file to write; RUN/report.html when not given.
    json
        Write what the page shows (run, findings, comparisons) to this file; "-": to standard
        output, and all else to standard error.
    """
    from moewright.api.reporting import build_report, find_run_folder, write_page

    first, *rest = (build_report(path) for path in (run, *others))
    page = write_page(first, out or find_run_folder(run) / "report.html", rest)
    with write_answer((first, *rest) if rest else first, json, written=(page,)):
        return 0
