"""`moewright validate`: score the planner on a table of measured runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moewright.spec.errors import BadInput, Reason


def validate(
    table: Path,
    /,
    *,
    json: Annotated[Path | None, Parameter(name="--json")] = None,
    fit_on: Path | None = None,
    leave_out: str = "",
) -> int:
    """Score the planner on measured runs: errors, order of layouts, memory, verdicts; every skipped
    row says why.

    Parameters
    ----------
    table
        A CSV with the columns of published measurements (id, model, hardware, num_gpus, seq_len, gbs, mbs, tp, ...).
    json
        Write the summary and every row, predicted and measured, to this file.
    fit_on
        Fit the constants on this table before scoring, instead of taking the planner's own.
    leave_out
        Cross-validate: fit each row's constants without the rows that share its values in these columns, such as
        "model,hardware"; "id" leaves out one row at a time.
    """
    from moewright.calibration.cross_validate import calibrate_leaving_out, calibrate_on
    from moewright.calibration.score import score_table
    from moewright.calibration.table import read_table
    from moewright.codec import write_json
    from moewright.report.console import make_console
    from moewright.report.score_text import print_score

    if fit_on is not None and leave_out:
        rule = "says where constants come from, and so does --leave-out"
        raise BadInput(
            Reason(field="--fit-on", value=str(fit_on), rule=rule, nearest="one of the two")
        )
    rows = read_table(table)
    columns = [column.strip() for column in leave_out.split(",") if column.strip()]
    if fit_on is not None:
        found = score_table(rows, calibrate_on(read_table(fit_on).rows, table_name=fit_on.name))
    elif columns:
        found = score_table(rows, calibrate_leaving_out(rows.rows, columns))
    else:
        found = score_table(rows)
    console = make_console(sys.stdout)
    print_score(console, found)
    if json is not None:
        write_json(json, found)
        console.print(f"wrote {json}", soft_wrap=True)
    return 0
