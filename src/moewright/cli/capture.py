"""`moewright capture`: what a command would train, found by running it with nothing started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moewright.cli.answers import write_answer
from moewright.cli.exit_codes import DOES_NOT_FIT
from moewright.cli.options import Count, Flag, JsonOption
from moewright.spec.errors import BadInput, Reason

_Words = Annotated[str, Parameter(allow_leading_hyphen=True, show_default=False)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSources:
    """What is read instead of a command, and how long a command may take.

    Parameters
    ----------
    pid
        A process that trains already, instead of a command.
    log
        A log of Megatron-LM, whose dump of arguments is read instead of a command.
    seconds
        How long the command may take.
    """

    pid: Count = 0
    log: Path | None = None
    seconds: Count = 60


_NO_SOURCES = CaptureSources()


def capture(
    *command: _Words,
    on: str = "",
    model: str = "",
    network: str = "",
    source: CaptureSources = _NO_SOURCES,
    verbose: Annotated[Flag, Parameter(name=("--verbose", "-v"))] = False,
    json: JsonOption = None,
) -> int:
    """Run COMMAND with stand-ins for all that trains, and plan the training it would have started.

    For launch scripts that --from-flags cannot follow: moewright capture --on H100 -- bash run.sh.
    Your own shell runs the script, with stand-ins for torchrun, python, srun, sbatch and the like;
    nothing is trained or submitted, but what else the script does, such as making folders, is done.
    Exit codes: 0 the layout fits, or may, 2 bad input, 3 the layout does not fit.

    Parameters
    ----------
    command
        What starts the training, behind --.
    on
        The hardware: the device alone, "H800", or with its count, "256xH800".
    model
        The model of a script that gives no sizes: a name, a config.json or its folder.
    network
        The network in place of the hardware's own, such as ib, roce or nvl72.
    verbose
        Print memory, time and assumptions too.
    json
        Write the plan of the script to this file; "-": to standard output.
    """
    from moewright.api.captured_scripts import capture as capture_command
    from moewright.api.captured_scripts import read_log, read_process
    from moewright.api.launch_scripts import find_better_layouts
    from moewright.cli.estimate import print_script_plan
    from moewright.spec.plan import Verdict

    if bool(command) + bool(source.pid) + bool(source.log) != 1:
        rule = "exactly one is needed: a command, a process, or a log"
        raise BadInput(Reason(field="COMMAND, --pid or --log", rule=rule))
    if source.pid:
        reading = read_process(source.pid, on=on, model=model, network=network)
    elif source.log is not None:
        reading = read_log(source.log, on=on, model=model, network=network)
    else:
        reading = capture_command(
            command, on=on, model=model, network=network, seconds=source.seconds
        )
    with write_answer(reading.plan, json) as console:
        better = find_better_layouts(reading.plan)
        print_script_plan(console, better, reading.notes, is_verbose=verbose)
    return DOES_NOT_FIT if reading.plan.estimate.verdict is Verdict.OOM else 0
