"""`moewright budget`: tokens in days and device-hours."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from moewright.cli.answers import write_answer
from moewright.cli.options import BatchOptions, Count, JsonOption

_NO_OPTIONS = BatchOptions()


def budget(
    model: str,
    /,
    *,
    on: str = "",
    tokens: str,
    workload: BatchOptions = _NO_OPTIONS,
    devices: Annotated[tuple[Count, ...], Parameter(negative="", consume_multiple=True)] = (),
    price: float | None = None,
    json: JsonOption = None,
) -> int:
    """Tell what training MODEL on so many tokens takes in days and device-hours.

    Each number of devices gets its best plan that fits, with the same global batch.

    Parameters
    ----------
    model
        A model's name, with or without organisation; a config.json or its folder; or a job .toml.
    on
        Hardware as count x device, "256xH800"; a job brings its own.
    tokens
        Tokens to train on, such as 15T or 500B.
    devices
        Numbers of devices to compare; a quarter to four times those of --on when not given.
    price
        What an hour of a device costs you; without it no costs are shown.
    json
        Write the budget to this file; "-": to standard output, and the table to standard error.
    """
    from moewright.api.budgets import compute_budget
    from moewright.report.console import print_defaults
    from moewright.report.plan_text import print_rows

    answer = compute_budget(model, on, workload, tokens=tokens, price=price, counts=devices)
    with write_answer(answer, json) as console:
        print_defaults(console, answer.request.defaults)
        notes = ["Days count training steps only, without restarts and evaluations."]
        if answer.without_layout:
            counts = ", ".join(map(str, answer.without_layout))
            notes.append(f"No layout fits with the probability that a plan asks for: {counts}.")
        print_rows(console, answer, notes)
    return 0
