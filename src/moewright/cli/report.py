"""`moewright report`: a run as one static HTML file."""

from __future__ import annotations

from pathlib import Path


def report(run: Path, /, *, out: Path | None = None) -> int:
    """Write one HTML page about a run that opens offline: verdict, curves, predicted beside
    counted, expert load.

    Parameters
    ----------
    run
        The folder of a run, as `moewright train --out` made it.
    out
        The file to write; RUN/report.html when not given.
    """
    print(f"wrote {write_run_report(run, out or run / 'report.html')}")
    return 0


def write_run_report(run: Path, out: Path) -> Path:
    """Predict the ledger of every counted rank, on the routing the run recorded, and write the
    page."""
    from moewright.codec import read_run
    from moewright.diagnosis.compare_ledgers import compare_ranks
    from moewright.diagnosis.engine_run import diagnose_run
    from moewright.report.report_page import write_report

    record = read_run(run)
    write_report(record, compare_ranks(record), diagnose_run(record), out)
    return out
