"""`moewright validate`: score the planner on a table of measured runs."""

from __future__ import annotations

import sys
from pathlib import Path

from moewright.cli.options import JsonOption


def validate(
    table: Path,
    /,
    *,
    json: JsonOption = None,
    fit_on: Path | None = None,
    leave_out: str = "",
) -> int:
    """Score the planner on measured runs: errors, order of layouts, memory, verdicts.

    Every row that is skipped says why.

    Parameters
    ----------
    table
        A CSV with the columns of published measurements (id, model, hardware, num_gpus, seq_len,
        gbs, mbs, tp, ...).
    json
        Write the summary and every row, predicted and measured, to this file.
    fit_on
        Fit the constants on this table before scoring, instead of taking the planner's own.
    leave_out
        Cross-validate: fit each row's constants without the rows that share its values in these
        columns, such as "model,hardware"; "id" leaves out one row at a time.
    """
    from moewright.api.measuring import validate as score_planner
    from moewright.codec import write_json
    from moewright.report.console import make_console
    from moewright.report.score_text import print_score

    columns = [column.strip() for column in leave_out.split(",") if column.strip()]
    score = score_planner(table, fit_on=fit_on, leave_out=columns)
    console = make_console(sys.stdout)
    print_score(console, score)
    if json is not None:
        write_json(json, score)
        console.print(f"wrote {json}", soft_wrap=True)
    return 0
