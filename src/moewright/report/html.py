"""The report of a run: one static HTML page that needs neither network nor server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moewright.codec import layout_text, write_text
from moewright.diagnosis.compare_ledgers import Comparison
from moewright.report.plan_page import memory_stacks, plan_facts, sources, time_stacks
from moewright.report.run_page import experts, ledger_table, loss_plot, verdict
from moewright.spec.finding import Finding
from moewright.spec.run import RunRecord


def write_report(
    record: RunRecord, comparisons: Sequence[Comparison], findings: Sequence[Finding], path: Path
) -> None:
    """Write the page at `path`, styles, drawings and script inside it. BadInput when it cannot be
    written.

    `comparisons` holds one Comparison a rank (tune.compare), `findings` come from tune.diagnose;
    either may be empty.
    """
    write_text(path, render(record, comparisons, findings))


def render(
    record: RunRecord, comparisons: Sequence[Comparison], findings: Sequence[Finding]
) -> str:
    """The page as text. What comes from files is escaped; the page's own policy forbids any
    request."""
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plan = record.plan
    return pages.get_template("report.html.j2").render(
        title=plan.model.name or "run",
        subtitle=f"{layout_text(plan.layout)} on {plan.layout.world_size} x {plan.hardware.device.name}",
        verdict=verdict(record, comparisons),
        loss=loss_plot(record) if record.steps else None,
        ledgers=[ledger_table(each, opened=place == 0) for place, each in enumerate(comparisons)],
        experts=experts(record),
        times=time_stacks(record),
        memories=memory_stacks(plan, comparisons),
        facts=plan_facts(plan),
        sources=sources(plan),
        findings=findings,
        sessions=record.sessions,
    )
