"""A run beside the nearest published runs as a page shows it."""

from __future__ import annotations

from moewright.diagnosis.run_comparison import RunComparison
from moewright.report.diagnosis_text import format_fix
from moewright.spec.record import Row
from moewright.view.table_view import TableView, build_table


def view_run_comparison(comparison: RunComparison) -> TableView:
    """Return the published runs with their sources, the parts of the step, and what closes gaps."""
    runs: list[Row] = [
        {
            "run": item.run.id,
            "model": item.run.model,
            "devices": f"{item.run.devices} x {item.run.device}",
            "precision": item.run.precision,
            "layout": item.run.layout,
            "tokens/s a device": item.run.measured,
            "of the bf16 peak": item.run.mfu or None,
            "this job so": item.expected or None,
            "near": item.run.nearness.value,
            "differs in": item.run.differs,
            "source": item.run.source,
        }
        for item in comparison.nearest
    ]
    gaps: list[Row] = [
        {
            "part of the step": gap.name.value,
            "measured, s": gap.measured_s if gap.is_measured else None,
            "predicted, s": gap.predicted_s,
            "gap, s": gap.gap_s,
        }
        for gap in comparison.gaps
    ]
    closers: list[Row] = [
        {"for": closer.gap, "change": format_fix(closer.fix), "source": closer.source}
        for closer in comparison.closers
    ]
    speeds = (
        f"Measured {comparison.measured:,.0f} tokens/s a device "
        f"({comparison.mfu:.1%} of the bf16 peak), predicted {comparison.predicted:,.0f} "
        f"({comparison.predicted_mfu:.1%})."
    )
    return TableView(
        heading=comparison.headline,
        lines=tuple(line for line in (speeds, comparison.standing, *comparison.notes) if line),
        tables=(
            build_table("Nearest published runs", runs),
            build_table("Where the gap lies", gaps),
            build_table("What closes it", closers),
        ),
    )
