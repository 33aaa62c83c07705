"""Launch commands of scripts that the user's own shell runs, and of processes that run already."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from moewright.api.launch_scripts import ScriptPlan, plan_launch, read_logged_flags
from moewright.diagnosis.traces.megatron_log import read_log as read_megatron_log
from moewright.intake.megatron.bash import Command, ShellReading, read_commands
from moewright.intake.megatron.called_scripts import find_called_script
from moewright.intake.megatron.launch import find_launch
from moewright.intake.megatron.stand_in_programs import RecordedCommand, record_commands
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware

_SUBMITTERS = ("sbatch", "qsub", "bsub")


def capture(
    words: Sequence[str],
    *,
    on: str | Hardware,
    model: str = "",
    network: str = "",
    seconds: int = 60,
) -> ScriptPlan:
    """Plan what a command would train: a shell runs it, and nothing that trains is started.

    Args:
        words: the command, such as ("bash", "run.sh", "1", "2").
        on: count x device, or the device alone: the command states the count.
        model: stands in where the command gives no sizes.
        network: kinds of network in place of the hardware's own.
        seconds: how long the command may take.

    Raises:
        BadInput: the command starts no training, or its job cannot be planned.
    """
    if not words:
        rule = "is needed: what starts the training"
        nearest = "moewright capture --on H100 -- bash run.sh"
        raise BadInput(Reason(field="command", rule=rule, nearest=nearest))
    commands = tuple(_record_all(words, seconds))
    name = next((word for word in words if word.endswith(".sh")), words[0])
    return _plan_commands(commands, Path(name), on=on, model=model, network=network)


def read_process(pid: int, *, on: str | Hardware, model: str = "", network: str = "") -> ScriptPlan:
    """Plan what a running process trains, by its command line and environment in /proc.

    Raises:
        BadInput: there is no such process that may be looked at, or it trains nothing.
    """
    folder = Path("/proc") / str(pid)
    try:
        words = folder.joinpath("cmdline").read_text(errors="replace").split("\0")[:-1]
        pairs = folder.joinpath("environ").read_text(errors="replace").split("\0")
    except OSError as error:
        rule = f"cannot be looked at: {error.strerror}"
        raise BadInput(Reason(field="--pid", value=str(pid), rule=rule)) from None
    split = (pair.partition("=") for pair in pairs if pair)
    environment = {name: value for name, _, value in split}
    command = RecordedCommand(words=_with_ranks(words, environment), environment=environment)
    return _plan_commands((command,), folder, on=on, model=model, network=network)


def read_log(log: Path, *, on: str | Hardware, model: str = "", network: str = "") -> ScriptPlan:
    """Plan what a log's run trains, by the arguments that Megatron-LM dumped at its start.

    Raises:
        BadInput: the log has no arguments, or they do not say the ranks.
    """
    arguments = read_megatron_log(log).arguments
    plan = read_logged_flags(arguments, log, model=model, on=on, network=network)
    if plan is None:
        rule = "has no dump of arguments with the number of ranks"
        raise BadInput(Reason(field="--log", value=str(log)[:60], rule=rule))
    return plan


def _with_ranks(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return a rank's own command with the torchrun that its environment tells of."""
    world = environment.get("WORLD_SIZE", "")
    local = environment.get("LOCAL_WORLD_SIZE", world)
    is_rank = not any(word.rpartition("/")[2] == "torchrun" for word in words)
    if not (is_rank and world.isdigit() and local.isdigit() and int(local)):
        return tuple(words)
    nodes = max(1, int(world) // int(local))
    return ("torchrun", f"--nnodes={nodes}", f"--nproc_per_node={local}", *words[1:])


def _record_all(words: Sequence[str], seconds: int) -> Iterator[RecordedCommand]:
    """Yield what a command starts, and what the scripts start that it hands to a scheduler."""
    for command in record_commands(words, seconds=seconds):
        called = find_called_script(list(command.words), None)
        is_submitted = command.words[0] in _SUBMITTERS and called is not None and called.path
        if is_submitted and called is not None and Path(called.path).is_file():
            yield from record_commands(("bash", called.path, *called.arguments), seconds=seconds)
        else:
            yield command


def _plan_commands(
    commands: Sequence[RecordedCommand],
    source: Path,
    *,
    on: str | Hardware,
    model: str,
    network: str,
) -> ScriptPlan:
    """Return the plan of the first command that trains."""
    started: list[Command] = []
    for command in commands:
        # The words may hold a shell of their own, as in `srun bash -c '...'`.
        reading = read_commands(shlex.join(command.words), command.environment)
        exported = tuple(command.environment.items())
        started += [replace(inner, exported=exported) for inner in reading.commands]
    launch = find_launch(ShellReading(commands=tuple(started)))
    return plan_launch(launch, source, model=model, on=on, network=network)
