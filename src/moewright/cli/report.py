"""`moewright report`: a run as one static HTML file."""

from __future__ import annotations

from pathlib import Path


def report(run: Path, /, *, out: Path | None = None) -> int:
    """Write one HTML page about a run that opens offline.

    The page shows the verdict, curves, the predicted and the counted ledger, and the load of the
    experts.

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
    """Write the page of a run's folder to `out`, and return `out`.

    The ledger of every rank that was counted is predicted on the routing that the run recorded.
    """
    from moewright.codec import read_run
    from moewright.diagnosis.compare_ledgers import compare_ranks
    from moewright.diagnosis.engine_run import diagnose_run
    from moewright.report.report_page import write_report

    record = read_run(run)
    write_report(record, compare_ranks(record), diagnose_run(record), out)
    return out
