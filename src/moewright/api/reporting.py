"""A run as one HTML page, and what the page shows as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moewright.codec import PLAN_FILE, read_run
from moewright.diagnosis.compare_ledgers import LedgerComparison, compare_ranks
from moewright.diagnosis.engine_run import diagnose_run
from moewright.spec.finding import Finding
from moewright.spec.record import Record, Row
from moewright.spec.run import RunRecord


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunReport(Record):
    """What the page of a run shows: its records, its walls, and counts next to predictions."""

    run: RunRecord
    findings: tuple[Finding, ...]
    comparisons: tuple[LedgerComparison, ...]  # one for each rank that counted a ledger

    def title(self) -> str:
        """Return the title of the run."""
        return self.run.title()

    def to_rows(self) -> list[Row]:
        """Return the rows of the run."""
        return self.run.to_rows()


def find_run_folder(path: Path) -> Path:
    """Return the folder of a run, of which `path` may also be the plan file."""
    if path.name == PLAN_FILE and path.is_file():
        return path.parent
    return path


def build_report(run: Path) -> RunReport:
    """Read the folder of a run, and compare and diagnose what it recorded.

    The ledger of every rank that was counted is predicted on the routing that the run recorded.
    """
    record = read_run(find_run_folder(run))
    return RunReport(run=record, findings=diagnose_run(record), comparisons=compare_ranks(record))


def write_page(report: RunReport, out: Path) -> Path:
    """Write the HTML page of a report to `out`, and return `out`."""
    from moewright.report.report_page import write_report

    write_report(report.run, report.comparisons, report.findings, out)
    return out
