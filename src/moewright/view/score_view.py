"""The planner's score on measured runs as a page shows it."""

from __future__ import annotations

from moewright.calibration.score import Score
from moewright.spec.record import Row
from moewright.view.table_view import TableView, build_table


def view_score(score: Score) -> TableView:
    """Return errors by what is stated and by publisher, and every scored row."""
    summary = score.summary
    splits: list[Row] = [
        {
            "rows": split.by,
            "name": split.name,
            "count": split.speeds.rows,
            "median error": split.speeds.median_error,
            "90th percentile": split.speeds.p90_error,
            "bias": split.speeds.bias,
        }
        for split in summary.splits
    ]
    rows: list[Row] = [
        {
            "row": row.id,
            "publisher": row.publisher,
            "stated": row.stated,
            "measured tokens/s": row.measured_tokens_per_s_per_gpu,
            "predicted tokens/s": row.predicted_tokens_per_s_per_gpu,
            "measured peak, GB": row.measured_peak_memory_gb,
            "predicted peak, GB": row.predicted_peak_memory_gb,
        }
        for row in score.rows
        if row.skipped is None
    ]
    return TableView(
        heading=f"{summary.scored} of {summary.rows} rows scored",
        lines=(f"{summary.skipped} rows were skipped, each with its reason.",),
        tables=(build_table("Errors of speeds", splits), build_table("Every row", rows)),
    )
