"""`moewright budget`: tokens in days and device-hours."""

from __future__ import annotations

from moewright.cli.answers import write_answer
from moewright.cli.options import BatchOptions, BudgetOutputs, CalendarOptions

_NO_WORKLOAD = BatchOptions()
_NO_OPTIONS = CalendarOptions()
_NO_OUTPUTS = BudgetOutputs()


def budget(
    model: str,
    /,
    *,
    on: str = "",
    tokens: str,
    workload: BatchOptions = _NO_WORKLOAD,
    options: CalendarOptions = _NO_OPTIONS,
    outputs: BudgetOutputs = _NO_OUTPUTS,
) -> int:
    """Tell what training MODEL on so many tokens takes in days and device-hours.

    Each number of devices gets its best plan that fits, with the same global batch. With --mtbf
    days are by the calendar too.

    Parameters
    ----------
    model
        A model's name, with or without organisation; a config.json or its folder; or a job .toml.
    on
        Hardware as count x device, "256xH800"; a job brings its own.
    tokens
        Tokens to train on, such as 15T or 500B.
    """
    from moewright.api.budget_document import build_budget_document
    from moewright.api.budgets import compute_budget
    from moewright.report.console import print_defaults
    from moewright.report.document_text import print_document

    answer = compute_budget(model, on, workload, tokens=tokens, options=options)
    document = build_budget_document(answer)
    with write_answer(answer, outputs.json, html=outputs.html, views=lambda: [document]) as console:
        print_defaults(console, answer.request.defaults)
        print_document(console, document, verbose=outputs.verbose)
    return 0
