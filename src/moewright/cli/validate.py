"""`moewright validate`: score the planner on a table of measured runs."""

from __future__ import annotations

from pathlib import Path

from moewright.cli.answers import write_answer
from moewright.cli.options import AnswerOptions, Count, JsonOption
from moewright.cli.progress import show_elapsed

_SHORT = AnswerOptions()


def validate(
    *tables: Path,
    json: JsonOption = None,
    fit_on: Path | None = None,
    leave_out: str = "",
    own_rows: Count = 0,
    own_columns: str = "",
    answer: AnswerOptions = _SHORT,
) -> int:
    """Score the planner on measured runs: errors, order of layouts, memory, verdicts.

    Every row that is skipped says why.

    Parameters
    ----------
    tables
        One or more CSV files with the columns of published measurements (id, model, hardware,
        num_gpus, seq_len, gbs, mbs, tp, ...).
    json
        Write the summary and every row, predicted and measured, to this file; "-": to standard
        output, and the tables to standard error.
    fit_on
        Fit the constants on this table before scoring, instead of taking the planner's own.
    leave_out
        Cross-validate: fit each row's constants without the rows that share its values in these
        columns, such as "publisher" or "framework,hardware"; "id" leaves out one row at a time.
    own_rows
        With --leave-out, fit so many of the left-out rows nevertheless and score the others: what a
        user's first runs teach.
    own_columns
        Take the --own-rows from those that share a row's values in these columns as well, such as
        "model,hardware": runs of the same model on the same part.
    """
    from moewright.api.measuring import validate as score_planner
    from moewright.report.document_text import print_document
    from moewright.report.score_document import build_score_document

    with show_elapsed("scoring every row"):
        score = score_planner(
            *tables,
            fit_on=fit_on,
            leave_out=_split_columns(leave_out),
            own_rows=own_rows,
            own_columns=_split_columns(own_columns),
        )
    document = build_score_document(score)
    with write_answer(score, json, html=answer.html, views=lambda: [document]) as console:
        print_document(console, document, verbose=answer.verbose)
    return 0


def _split_columns(text: str) -> list[str]:
    return [column.strip() for column in text.split(",") if column.strip()]
