"""`moewright bench sweep`: a table of layouts, run or estimated, beside what was published."""

from __future__ import annotations

from pathlib import Path

from moewright.cli.answers import print_now, reserve_stdout, write_answer
from moewright.cli.exit_codes import STOPPED
from moewright.cli.options import Flag, JsonOption, TrialOptions

_HERE = TrialOptions()


def bench_sweep(
    sweep: Path,
    /,
    *,
    predict: Flag = False,
    out: Path | None = None,
    trials: TrialOptions = _HERE,
    json: JsonOption = None,
) -> int:
    """Run the layouts of a sweep one after the other, or only estimate them, and print the table.

    With --launcher slurm each row is a job of the scheduler, --at-once of them beside each other.
    A trial that is finished is not run again: the same command goes on where it was stopped. Beside
    the table in Markdown the folder gets it as CSV and as a drawing.

    Parameters
    ----------
    sweep
        A sweep file, with sections job and table; recipes/seed0_best.toml is one.
    predict
        Estimate only: nothing is run.
    out
        The folder of the sweep; runs/<name of the sweep file> when not given.
    json
        Write every row, predicted and measured, to this file; "-": to standard output, and the
        tables to standard error.
    """
    from moewright.api.launched_trials import TrialStoppedError
    from moewright.api.sweeps import read_sweep_tables
    from moewright.codec import write_text

    folder = out or Path("runs") / sweep.stem
    try:
        with reserve_stdout(json):
            tables = read_sweep_tables(sweep, folder, predict=predict, tell=print_now, place=trials)
    except TrialStoppedError:
        print(f"stopped; the same command goes on with {folder}", flush=True)
        return STOPPED
    files = tables.render_files()
    for name, content in files.items():
        write_text(folder / name, content)
    with write_answer(
        tables, json, html=trials.html, views=lambda: [tables.to_document()]
    ) as console:
        console.print(files["table.md"], soft_wrap=True)
        console.print(f"wrote {folder}/{', '.join(files)}", soft_wrap=True)
    return 0
