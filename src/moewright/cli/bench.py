"""Verbs that measure: this machine, the planner and its error, sweeps, and constants refitted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from moewright.cli.answers import print_now, reserve_stdout, write_answer, write_told_answer
from moewright.cli.exit_codes import STOPPED
from moewright.cli.option_types import Count, Flag, JsonOption
from moewright.cli.options import AnswerOptions, TrialOptions
from moewright.cli.progress import show_elapsed
from moewright.spec.units import GIGA

if TYPE_CHECKING:
    from rich.console import Console

    from moewright.calibration.fit_inputs import NextRun
    from moewright.diagnosis.bandwidth import CollectiveBandwidth
    from moewright.spec.hardware import Hardware


def bench_machine(
    *,
    nproc: Count = 2,
    out: Path = Path("runs/machine.toml"),
    force: Flag = False,
    json: JsonOption = None,
) -> int:
    """Measure GEMMs, attention and collectives in under a minute, and write a hardware file.

    Parameters
    ----------
    nproc
        Processes over which the collectives are measured.
    out
        The hardware file to write; when it exists and describes this machine, nothing is measured.
    force
        Measure again even so.
    json
        Write the hardware, and the bandwidths of its collectives, to this file; "-": to standard
        output, and the text to standard error.
    """
    from moewright.api.machines import describes_this_machine, write_machine_file
    from moewright.codec import read_toml
    from moewright.diagnosis.bandwidth import compute_bandwidths
    from moewright.engine.run.early_checks import refuse_too_many_processes
    from moewright.spec.hardware import Hardware

    refuse_too_many_processes(nproc, field="--nproc")
    with reserve_stdout(json):
        if out.exists() and not force and describes_this_machine(out, nproc=nproc):
            print_now(f"{out} describes this machine already; --force measures it again")
        else:
            write_machine_file(out, nproc=nproc, tell=print_now)
        hardware = read_toml(Hardware, out)
        bandwidths = compute_bandwidths(hardware)
        _print_bandwidths(hardware, bandwidths)
    write_told_answer({"hardware": hardware, "bandwidths": bandwidths}, json)
    return 0


def bench_search(*, json: JsonOption = None) -> int:
    """Search large models over many devices, and print how many layouts are scored a second.

    The rates of other planners are printed beside.

    Parameters
    ----------
    json
        Write each search and the other planners' rates to this file; "-": to standard output, and
        the text to standard error.
    """
    from moewright.bench.search_speed import (
        COUNTING_RULE,
        PEER_PLANNERS,
        measure_search_rates,
    )

    rates = []
    with reserve_stdout(json):
        print_now(f"{'search':<34}{'wall':>9}{'layouts':>13}{'a second and core':>20}")
        for rate in measure_search_rates():
            rates.append(rate)
            case = f"{rate.model} on {rate.hardware}"
            figures = f"{rate.wall_s:>7.2f} s{rate.layouts:>13,}{rate.per_core_s:>20,.0f}"
            print_now(f"{case:<34}{figures}")
        print_now(COUNTING_RULE)
        print_now("other planners, measured on a machine of two cores:")
        for planner in PEER_PLANNERS:
            print_now(f"{planner.name:<34}{'':>22}{planner.layouts_per_s:>20}  {planner.what}")
    write_told_answer({"searches": rates, "other_planners": PEER_PLANNERS}, json)
    return 0


def _print_bandwidths(hardware: Hardware, bandwidths: Sequence[CollectiveBandwidth]) -> None:
    """Print what nccl-tests would say of the largest messages, and which links are slow."""
    from moewright.diagnosis.bandwidth import find_slow_links
    from moewright.spec.units import format_bytes, format_figures, format_seconds

    for bandwidth in bandwidths:
        size = f"{format_bytes(bandwidth.payload_bytes)} in {format_seconds(bandwidth.seconds)}"
        line = (
            f"{bandwidth.op:<16}{bandwidth.group_size:>4} ranks  {size:<24}"
            f"algorithm {format_figures(bandwidth.algorithm_Bps / GIGA)} GB/s, "
            f"bus {format_figures(bandwidth.bus_Bps / GIGA)} GB/s"
        )
        if bandwidth.is_slow:
            line += "  SLOW beside the others"
        print_now(line)
    for slow in find_slow_links(hardware):
        line = (
            f"SLOW link between ranks {slow.link.first} and {slow.link.second}: "
            f"{format_figures(slow.link.Bps.value / GIGA)} GB/s each way, "
            f"{format_figures(slow.typical_Bps / GIGA)} GB/s between most"
        )
        if slow.rank >= 0:
            line += f"; rank {slow.rank} is on more of them"
        print_now(line)


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
        The folder of the sweep; `runs/<name of the sweep file>` when not given.
    json
        Write every row, predicted and measured, to this file; "-": to standard output, and the
        tables to standard error.
    """
    from rich.text import Text

    from moewright.api.sweeps import read_sweep_tables
    from moewright.codec import write_text
    from moewright.launching.launched_trials import TrialStoppedError
    from moewright.report.console import keep_whole

    folder = out or Path("runs") / sweep.stem
    try:
        # Trials print too, as processes of their own.
        with reserve_stdout(json):
            tables = read_sweep_tables(sweep, folder, predict=predict, tell=print_now, place=trials)
    except TrialStoppedError:
        print_now(f"stopped; the same command goes on with {folder}")
        return STOPPED
    files = tables.render_files()
    for name, content in files.items():
        write_text(folder / name, content)
    with write_answer(
        tables, json, html=trials.html, views=lambda: [tables.to_document()]
    ) as console:
        console.print(keep_whole(Text(files["table.md"])))
        console.print(f"wrote {folder}/{', '.join(files)}")
    return 0


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
            console.print(f"{row_id}: left out, {reason}")
        _print_errors(console, "before", result.errors_before)
        _print_errors(console, "after", result.errors_after)
        _print_errors(console, "each run left out of its fit", result.errors_left_out)
        for constant in result.constants:
            values = f"{constant.prior:.4g} -> {constant.value:.4g}"
            spread = f"+-{constant.sd:.0%}, was +-{constant.prior_sd:.0%}"
            console.print(f"{constant.name}: {values} ({spread})")
        console.print(
            f"{result.kept_count} constants keep their value: these runs say too little of them"
        )
        if result.next_run is not None:
            console.print(_describe_next_run(result.next_run))
    return 0


def _print_errors(console: Console, name: str, errors: Sequence[float]) -> None:
    from statistics import fmean

    mean = fmean(abs(error) for error in errors)
    worst = max(errors, key=abs)
    line = f"error {name}: mean {mean:.1%}, worst {worst:+.1%} ({len(errors)} runs)"
    console.print(line)


def _describe_next_run(run: NextRun) -> str:
    return (
        f"next, measure {run.model} in {run.layout}: uncertain by {run.log_time_sd:.0%}; "
        f"it takes {run.constant} from +-{run.sd:.0%} to +-{run.sd_after:.0%}"
    )
