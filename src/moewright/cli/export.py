"""Verbs of launch scripts: a plan as a script, a script as a plan, a command as what it trains."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from moewright.cli.answers import STANDARD_OUTPUT, write_answer
from moewright.cli.exit_codes import DOES_NOT_FIT, exit_code
from moewright.cli.option_types import Count, Flag, JsonOption, SetOption
from moewright.cli.options import LaunchFileOptions, LaunchScriptOptions
from moewright.spec.errors import BadInput, Reason
from moewright.spec.options import RunOptions

if TYPE_CHECKING:
    from moewright.spec.plan import Plan


_NO_SCRIPT = LaunchScriptOptions()
_NO_RUN = LaunchFileOptions()


def export(
    plan: Path | None = None,
    /,
    *,
    to: str | None = None,
    script: LaunchScriptOptions = _NO_SCRIPT,
    run: LaunchFileOptions = _NO_RUN,
    on: str = "",
    model: str = "",
    json: JsonOption = None,
) -> int:
    """Print a plan as the launch file of a trainer; what the target cannot say is refused.

    With --from-flags a launch script of Megatron-LM stands in the plan's place: alone it is
    estimated beside what would be better, with --to it is written for another target.

    Parameters
    ----------
    plan
        A plan, as `plan --json`, `estimate --json` or a run folder holds it.
    to
        megatron: a Megatron-LM launch script. bridge: a Megatron Bridge recipe. torchtitan: its
        configuration. slurm: a batch script. k8s: a TrainJob of Kubeflow Trainer. torchrun: the
        line that starts our own run. Or the name of an exporter that an installed package
        adds.
    on
        The hardware of the script, "H800" or "256xH800".
    model
        The model of a script that gives no sizes: a name, a config.json or its folder.
    json
        Write the script's plan to this file; "-": to standard output, and the tables to standard
        error.
    """
    from moewright.api.running import check_target, export_traces
    from moewright.api.running import export as render_launch_file
    from moewright.codec import read_json
    from moewright.spec.plan import Plan

    if to is not None:
        check_target(to)
    _check_json(plan, to, json)
    if plan is not None and script.from_flags is None:
        if to is None and run.traces is None:
            rule = "is needed with a plan: the target"
            raise BadInput(Reason(field="--to", rule=rule, nearest="--to megatron"))
        exported = read_json(Plan, plan)
    elif plan is None and script.from_flags is not None:
        exported = _read_script(script, on=on, model=model, json=json, is_shown=to is None)
    else:
        rule = "exactly one is needed: a plan, or a launch script"
        raise BadInput(Reason(field="PLAN or --from-flags", rule=rule))
    if to is not None:
        job = str(run.job) if run.job else ""
        run_dir = str(plan.parent if plan else Path())
        # `run` has more fields; as another class it would never equal the empty RunOptions.
        options = {field.name: getattr(run, field.name) for field in fields(RunOptions)}
        text = render_launch_file(
            exported,
            to=to,
            job=job,
            image=run.image,
            run_dir=run_dir,
            run=RunOptions(**options),
        )
        print(text, end="")
    if run.traces is not None:
        ranks = export_traces(exported, run.traces)
        # Standard output may be the launch file.
        print(f"{run.traces}: step.0.et to step.{ranks - 1}.et", file=sys.stderr)
    return 0


def _check_json(plan: Path | None, to: str | None, json: Path | None) -> None:
    """Refuse JSON of what is a plan already, and JSON where a launch file is printed."""
    if json is None:
        return
    if plan is not None:
        rule = "writes the plan of a launch script, and this is a plan already"
        raise BadInput(Reason(field="--json", value=str(json), rule=rule, nearest="leave it out"))
    if json == STANDARD_OUTPUT and to is not None:
        rule = "standard output takes the launch file of --to"
        raise BadInput(Reason(field="--json", value="-", rule=rule, nearest="--json plan.json"))


def _read_script(
    script: LaunchScriptOptions, *, on: str, model: str, json: Path | None, is_shown: bool
) -> Plan:
    """Return the plan of a launch script, printed in full where it is shown.

    Notes on how it was read go to stderr where a launch file or JSON goes to stdout.
    """
    from moewright.api.launch_scripts import find_better_layouts, read_flags
    from moewright.cli.plan import print_script_plan

    assert script.from_flags is not None
    reading = read_flags(
        script.from_flags,
        on=on,
        model=model,
        arguments=script.script_args,
        strict=script.strict,
        overrides=script.set_ or (),
    )
    with write_answer(reading.plan, json, beside_stdout=not is_shown) as console:
        if is_shown:
            better = find_better_layouts(reading.plan, reading.options)
            print_script_plan(console, better, reading.notes, is_verbose=script.verbose)
        else:
            for line in reading.notes:
                console.print(line)
    return reading.plan


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
    set_
        NAME=VALUE of an option, which wins over the command's, and null leaves it out.
    """

    pid: Count = 0
    log: Path | None = None
    seconds: Count = 60
    set_: SetOption = None


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
    from moewright.api.launch_scripts import capture as capture_command
    from moewright.api.launch_scripts import find_better_layouts, read_log, read_process
    from moewright.cli.plan import print_script_plan
    from moewright.spec.plan import Verdict

    if bool(command) + bool(source.pid) + bool(source.log) != 1:
        rule = "exactly one is needed: a command, a process, or a log"
        raise BadInput(Reason(field="COMMAND, --pid or --log", rule=rule))
    if source.pid:
        reading = read_process(
            source.pid, on=on, model=model, network=network, overrides=source.set_ or ()
        )
    elif source.log is not None:
        reading = read_log(
            source.log, on=on, model=model, network=network, overrides=source.set_ or ()
        )
    else:
        reading = capture_command(
            command,
            on=on,
            model=model,
            network=network,
            seconds=source.seconds,
            overrides=source.set_ or (),
        )
    with write_answer(reading.plan, json) as console:
        better = find_better_layouts(reading.plan, reading.options)
        print_script_plan(console, better, reading.notes, is_verbose=verbose)
    fits = reading.plan.estimate.verdict is not Verdict.OOM
    return exit_code(holds=fits, otherwise=DOES_NOT_FIT)
