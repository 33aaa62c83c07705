"""The report of a run: one static HTML page that needs neither network nor server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moewright.codec import format_layout, write_text
from moewright.diagnosis.compare_ledgers import LedgerComparison
from moewright.report.incident_section import build_incident_section
from moewright.report.plan_sections import (
    build_memory_stacks,
    build_plan_facts,
    build_time_stacks,
    list_sources,
)
from moewright.report.run_sections import (
    build_expert_section,
    build_ledger_table,
    build_loss_plot,
    build_verdict,
)
from moewright.spec.finding import Finding
from moewright.spec.run import RunRecord


def write_report(
    record: RunRecord,
    comparisons: Sequence[LedgerComparison],
    findings: Sequence[Finding],
    path: Path,
) -> None:
    """Write the page at `path`, with its styles, drawings and script inside.

    `comparisons` holds the compared ledgers of each rank (diagnosis.compare_ledgers), `findings`
    come from diagnosis.engine_run; either may be empty.

    Raises:
        BadInput: The page cannot be written.
    """
    write_text(path, render_report(record, comparisons, findings))


def render_report(
    record: RunRecord, comparisons: Sequence[LedgerComparison], findings: Sequence[Finding]
) -> str:
    """Return the page as text.

    What comes from files is escaped, and the page's own policy forbids any request.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plan = record.plan
    device = plan.hardware.device.name
    return environment.get_template("report.html.j2").render(
        title=plan.model.name or "run",
        subtitle=f"{format_layout(plan.layout)} on {plan.layout.world_size} x {device}",
        verdict=build_verdict(record, comparisons),
        loss=build_loss_plot(record) if record.steps else None,
        ledgers=[
            build_ledger_table(comparison, is_open=number == 0)
            for number, comparison in enumerate(comparisons)
        ],
        experts=build_expert_section(record),
        times=build_time_stacks(record),
        memories=build_memory_stacks(plan, comparisons),
        facts=build_plan_facts(plan),
        sources=list_sources(plan),
        findings=findings,
        sessions=record.sessions,
        incidents=build_incident_section(record.incidents),
    )
