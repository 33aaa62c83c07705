"""A run as one HTML page, and what the page shows as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moewright.api.advising import advise_job, has_times
from moewright.codec import find_run_folder, read_run, write_text
from moewright.codec.run_files import COMPARISON_FILE
from moewright.diagnosis.compare_ledgers import LedgerComparison, compare_ranks
from moewright.diagnosis.engine_run import build_run_waterfall, diagnose_run, find_critical_rank
from moewright.diagnosis.priced_fixes import FixContext, Trainer, price_findings
from moewright.report.run_outcome import describe_saved, list_outcome_lines
from moewright.spec.finding import Finding, Waterfall
from moewright.spec.record import Record, Row, format_json
from moewright.spec.run import RunRecord
from moewright.view.page import render_page
from moewright.view.run_view import RunsView, RunView, build_run_view


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunReport(Record):
    """What the page of a run shows: its records, its walls, and counts next to predictions."""

    run: RunRecord
    findings: tuple[Finding, ...]
    comparisons: tuple[LedgerComparison, ...]  # one for each rank that counted a ledger
    name: str = ""  # the folder

    def title(self) -> str:
        """Return the title of the run."""
        return self.run.title()

    def to_rows(self) -> list[Row]:
        """Return the rows of the run."""
        return self.run.to_rows()

    def frame_rows(self) -> list[Row]:
        """Return the steps of the run."""
        return self.run.frame_rows()


def build_report(run: Path) -> RunReport:
    """Read the folder of a run, and compare and diagnose what it recorded.

    The ledger of every rank that was counted is predicted on the routing that the run recorded.
    """
    folder = find_run_folder(run)
    record = read_run(folder)
    comparisons = compare_ranks(record)
    return RunReport(
        run=record,
        findings=diagnose_run(record, comparisons),
        comparisons=comparisons,
        name=str(folder),
    )


def _build_waterfall(report: RunReport) -> Waterfall | None:
    # A run that has finished steps has a finding.
    if not report.findings:
        return None
    run = report.run
    return build_run_waterfall(run, find_critical_rank(run), run.plan)


def describe_outcome(
    report: RunReport, folder: Path, written: Sequence[Path], *, next_steps: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return whether the run of a folder was good and what to do now, in six lines.

    `next_steps` stand in place of those of a run of `train`.
    """
    from moewright.engine.checkpoint.commit import find_latest

    run = report.run
    return tuple(
        list_outcome_lines(
            run,
            report.comparisons,
            report.findings,
            _build_waterfall(report),
            saved=describe_saved(find_latest(folder / "checkpoints"), run, written),
            next_steps=next_steps or tuple(_list_next_steps(run, folder)),
        )
    )


def _list_next_steps(run: RunRecord, folder: Path) -> Iterator[str]:
    yield f"moewright diagnose {folder}"
    if run.plan.workload.data.tokenizer:
        yield f"moewright chat {folder}"
    yield "--extend trains as many steps again"


def view_run(report: RunReport) -> RunView:
    """Return what the page of a run shows: what to change first, and its fixes with prices."""
    run = report.run
    waterfall = _build_waterfall(report)
    context = FixContext(job=run.plan, trainer=Trainer.OURS)
    findings = price_findings(report.findings, context)
    advice = None
    if has_times(run.plan):
        trainer = Trainer.OURS
        advised = advise_job(run.plan, trainer=trainer, findings=findings, waterfall=waterfall)
        advice = advised.advice
    return build_run_view(
        run, report.comparisons, findings, waterfall, advice=advice, name=report.name
    )


def write_comparisons(report: RunReport, folder: Path) -> Path:
    """Write predicted, counted, rule and verdict of every row of all ranks, and return the file."""
    path = folder / COMPARISON_FILE
    write_text(path, format_json(report.comparisons))
    return path


def write_page(report: RunReport, out: Path, others: Sequence[RunReport] = ()) -> Path:
    """Write the HTML page of a report to `out`, and return `out`; `others` are laid over it."""
    views = tuple(map(view_run, (report, *others)))
    records: tuple[Record, ...] = views
    if others:
        records = (RunsView(runs=views), *views)
    write_text(out, render_page(records, ", ".join(view.name for view in views)))
    return out
