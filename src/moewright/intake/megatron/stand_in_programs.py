"""A run of a user's script in which programs that train or submit are stand-ins that take notes.

The user's own shell runs the script, so that every construct means what it means there. Stand-ins
stand in front of PATH, and as functions in every bash that is started, so that a script may change
PATH; a program that is called by its full path is caught before it starts. Each writes its words
and its environment to a file and succeeds. What else the script does, such as making folders, is
done.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from moewright.spec.errors import BadInput, Reason

# What trains, or takes a script elsewhere to train.
_TRAINERS = ("torchrun", "python", "python3", "deepspeed", "accelerate")
_LAUNCHERS = (
    *("srun", "sbatch", "mpirun", "mpiexec", "ssh", "pdsh", "qsub", "bsub", "docker", "podman"),
    *("singularity", "apptainer", "enroot", "kubectl", "ray"),
    *("uv", "numactl"),
)
# What fetches or waits; it is left out.
_LEFT_OUT = ("pip", "pip3", "wget", "curl", "sleep", "nsys", "ncu")
_SECONDS = 60
_STANDARD_ERROR = 2
_FOLDER = "MOEWRIGHT_STAND_INS"
_MAX_COMMANDS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCommand:
    """A command that would have started: its words, and the environment it was started in."""

    words: tuple[str, ...]
    environment: Mapping[str, str]


def record_commands(
    words: Sequence[str], *, seconds: int = _SECONDS
) -> tuple[RecordedCommand, ...]:
    """Run a command with stand-ins for programs that train; return what they were started with.

    Raises:
        BadInput: the command does not exist, or takes longer than `seconds`.
    """
    with tempfile.TemporaryDirectory(prefix="moewright-") as folder:
        programs = Path(folder) / "bin"
        programs.mkdir()
        record = Path(folder) / "commands"
        record.touch()
        for name in (*_TRAINERS, *_LAUNCHERS, *_LEFT_OUT):
            path = programs / name
            path.write_text(_stand_in(name, record), encoding="utf-8")
            path.chmod(0o755)
        functions = Path(folder) / "functions.sh"
        resource = resources.files("moewright.intake.megatron").joinpath("data/stand_ins.sh")
        functions.write_text(resource.read_text(encoding="utf-8"), encoding="utf-8")
        environment = dict(os.environ)
        environment |= {
            "PATH": f"{programs}{os.pathsep}{environment.get('PATH', '')}",
            "BASH_ENV": str(functions),
            _FOLDER: str(programs),
        }
        _run(words, environment, seconds)
        return tuple(_read_record(record, str(programs)))


def _run(words: Sequence[str], environment: Mapping[str, str], seconds: int) -> None:
    try:
        process = subprocess.Popen(
            list(words), env=dict(environment), stdout=_STANDARD_ERROR, start_new_session=True
        )
    except OSError as error:
        rule = f"cannot be started: {error.strerror}"
        raise BadInput(Reason(field="command", value=words[0][:60], rule=rule)) from None
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        rule = f"has not ended after {seconds} s, although nothing was trained"
        raise BadInput(
            Reason(field="command", value=shlex.join(words)[:60], rule=rule, nearest="--seconds")
        ) from None


def _stand_in(name: str, record: Path) -> str:
    """Return a program that writes its words and its environment, each ended by a zero byte.

    `python -c` and `python -` compute things for the script: the real one runs.
    """
    real = _real_program(name) if name.startswith("python") else ""
    lines = ["#!/bin/sh"]
    if real:
        lines.append(f'case "$1" in -c|-|-V|--version|"") exec {shlex.quote(real)} "$@";; esac')
    if name in _LEFT_OUT:
        if name in ("nsys", "ncu"):
            lines += _record_lines(name, record)
        return "\n".join([*lines, "exit 0", ""])
    return "\n".join([*lines, *_record_lines(name, record), "exit 0", ""])


def _record_lines(name: str, record: Path) -> list[str]:
    file = shlex.quote(str(record))
    return [
        f"{{ printf 'command\\0%d\\0%s\\0' \"$#\" {name}; [ $# -eq 0 ] || printf '%s\\0' \"$@\"",
        f"env -0; printf 'end\\0'; }} >> {file}",
    ]


def _real_program(name: str) -> str:
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        path = Path(folder) / name
        if folder and path.is_file() and os.access(path, os.X_OK):
            return str(path)
    return ""


def _read_record(record: Path, programs: str) -> list[RecordedCommand]:
    own = ("BASH_ENV", _FOLDER)
    fields = record.read_text(encoding="utf-8", errors="replace").split("\0")
    commands: list[RecordedCommand] = []
    place = 0
    while place < len(fields) - 2 and len(commands) < _MAX_COMMANDS:
        count = int(fields[place + 1])
        words = tuple(fields[place + 2 : place + 3 + count])
        place += 3 + count
        end = fields.index("end", place)
        pairs = (field.partition("=") for field in fields[place:end])
        environment = {name: value for name, _, value in pairs if name not in own}
        plain_words = tuple(word.removeprefix(f"{programs}/") for word in words)
        commands.append(RecordedCommand(words=plain_words, environment=environment))
        place = end + 1
    return commands
