"""A tuning as a page shows it: every point that was tried, with its ruling."""

from __future__ import annotations

from moewright.spec.record import Row
from moewright.tuning.decisions import TuningResult
from moewright.view.table_view import TableView, build_table


def view_tuning(result: TuningResult, model: str) -> TableView:
    """Return the decisions of a tuning in their order, and why each phase ended."""
    rows: list[Row] = [
        {
            "phase": decision.phase.value,
            "tried": str(decision.point),
            "why": decision.why,
            "predicted step, s": decision.predicted_s or None,
            "measured step, s": decision.step_s or None,
            "runs": decision.run_count,
            "ruling": decision.ruling.value,
            "reason": decision.reason,
        }
        for decision in result.decisions
    ]
    heading = f"{model}: no layout was found valid"
    if result.winner is not None:
        heading = f"{model}: {result.winner}"
    return TableView(
        heading=heading,
        lines=tuple(f"{phase.value} ended: {why}." for phase, why in result.stops),
        tables=(build_table("What was tried", rows),),
    )
