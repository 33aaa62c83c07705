"""`moewright fit`: refit the constants of the time model to one's own runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from moewright.cli.answers import write_answer
from moewright.cli.options import JsonOption

if TYPE_CHECKING:
    from rich.console import Console

    from moewright.calibration.fit_inputs import NextRun


def fit(
    table: Path,
    /,
    *,
    on: str,
    out: Annotated[Path, Parameter(name="--out")],
    json: JsonOption = None,
) -> int:
    """Refit the constants of a hardware to measured runs, and write a hardware file with them.

    Parameters
    ----------
    table
        A CSV of measured runs with the columns that `validate` reads, or a folder of runs that
        `train` wrote; one will do.
    on
        The hardware, as "H800" or "runs/machine.toml"; rows measured on other parts are left out.
    out
        The hardware file to write; name it in --on from then on.
    json
        Write the fit (constants, errors, the hardware) to this file; "-": to standard output, and
        the text to standard error.
    """
    from moewright.api.machines import check_hardware_path
    from moewright.api.measuring import fit as fit_hardware
    from moewright.codec import write_toml

    check_hardware_path(out)
    result = fit_hardware(table, on=on)
    write_toml(out, result.hardware)
    with write_answer(result, json, written=(out,)) as console:
        for row_id, reason in result.left_out:
            console.print(f"{row_id}: left out, {reason}", soft_wrap=True, highlight=False)
        _print_errors(console, "before", result.errors_before)
        _print_errors(console, "after", result.errors_after)
        _print_errors(console, "each run left out of its fit", result.errors_left_out)
        for constant in result.constants:
            values = f"{constant.prior:.4g} -> {constant.value:.4g}"
            spread = f"+-{constant.sd:.0%}, was +-{constant.prior_sd:.0%}"
            console.print(f"{constant.name}: {values} ({spread})", highlight=False)
        console.print(
            f"{result.kept_count} constants keep their value: these runs say too little of them",
            highlight=False,
        )
        if result.next_run is not None:
            line = _describe_next_run(result.next_run)
            console.print(line, soft_wrap=True, highlight=False)
    return 0


def _print_errors(console: Console, name: str, errors: Sequence[float]) -> None:
    from statistics import fmean

    mean = fmean(abs(error) for error in errors)
    worst = max(errors, key=abs)
    line = f"error {name}: mean {mean:.1%}, worst {worst:+.1%} ({len(errors)} runs)"
    console.print(line, highlight=False)


def _describe_next_run(run: NextRun) -> str:
    return (
        f"next, measure {run.model} in {run.layout}: uncertain by {run.log_time_sd:.0%}; "
        f"it takes {run.constant} from +-{run.sd:.0%} to +-{run.sd_after:.0%}"
    )
