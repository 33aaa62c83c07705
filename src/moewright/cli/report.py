"""`moewright report`: a run as one static HTML file."""

from __future__ import annotations

from pathlib import Path

from moewright.cli.answers import open_console, write_answer
from moewright.cli.options import JsonOption


def report(run: Path, /, *, out: Path | None = None, json: JsonOption = None) -> int:
    """Write one HTML page about a run that opens offline.

    The page shows the verdict, curves, the predicted and the counted ledger, and the load of the
    experts.

    Parameters
    ----------
    run
        The folder of a run, as `moewright train --out` made it, or the plan.json in it.
    out
        The file to write; RUN/report.html when not given.
    json
        Write what the page shows (run, findings, comparisons) to this file; "-": to standard
        output, and all else to standard error.
    """
    from moewright.api.reporting import build_report, find_run_folder, write_page

    run_report = build_report(run)
    page = write_page(run_report, out or find_run_folder(run) / "report.html")
    console = open_console(json)
    console.print(f"wrote {page}", soft_wrap=True)
    write_answer(console, json, run_report)
    return 0
