"""Scripts that a script starts or reads: the words that name them, and their text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moewright.intake.megatron.launchers import LAUNCHERS
from moewright.intake.megatron.unknown import UNKNOWN_VALUE
from moewright.spec.errors import BadInput, Reason

_SHELLS = ("bash", "sh", "zsh", "dash")
SUBMITTERS = ("sbatch", "qsub", "bsub")
SCRIPT_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
# Programs whose words may be scripts that they do not start.
_PRINTERS = (
    *("echo", "printf", "which", "cat", "ls", "chmod", "cp", "mv", "rm", "ln", "cd", "touch"),
    *("dirname", "basename", "realpath", "readlink", "sed", "awk", "grep", "head", "tail", "wc"),
    *("mkdir", "stat", "du", "tar", "rsync", "scp", "dos2unix", "tee", "diff", "cmp"),
)
_STARTS_TRAINER = re.compile(rf"\s*(\S*/)?({'|'.join(LAUNCHERS)})\s[^\0]*\s--[a-z]")
# Scripts of an installation, which set no sizes of a job.
_ENVIRONMENT_SCRIPTS = (
    *("activate", ".bashrc", ".bash_profile", ".profile", ".zshrc", "conda.sh", "modules.sh"),
    *("lmod.sh", "bash", "setvars.sh", "vars.sh", "init.sh", "bashrc", "profile", "oneapi-vars.sh"),
)
_INSTALLATION = re.compile(r"(^|[._-])(venv|modules?|mpi_variables)([._-]|$)")
# The variable by which a job of a scheduler knows that it is one.
_JOBS = {"sbatch": "SLURM_JOB_ID", "qsub": "PBS_JOBID", "bsub": "LSB_JOBID"}
# What srun tells the first of its tasks, and where it may stand behind `time` and `exec`.
_TASK_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_SRUN_PLACES = 3
_MAX_BYTES = 1 << 20
_TAIL_PARTS = 2  # of a path on another machine that name a file: its folder and itself
_LEVELS = 6  # folders above a script where it may be started from


@dataclass(frozen=True, kw_only=True, slots=True)
class CalledScript:
    """A script that a command starts: its text, or else its path, and its arguments.

    `scheduled` are the variables that a scheduler sets in the job of a submitted script.
    """

    path: str
    text: str
    arguments: tuple[str, ...]
    scheduled: Mapping[str, str] = field(default_factory=dict)


def find_called_script(words: list[str], stdin: str | None) -> CalledScript | None:
    """Return the script in `bash -c`, `bash run.sh`, `srun bash ...`, `sbatch run.sh`, `./run.sh`.

    `stdin` is a here-document that the command reads. A command that starts a trainer is none.
    """
    if words[0] in _PRINTERS:
        return None
    script = _find_script(words, stdin)
    if script is not None and not script.scheduled and "srun" in words[:_SRUN_PLACES]:
        return replace(script, scheduled=dict.fromkeys(_TASK_VARIABLES, "0"))
    return script


def _find_script(words: list[str], stdin: str | None) -> CalledScript | None:
    for place, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in LAUNCHERS:
            return None
        if name in _SHELLS:
            return _shell_script(words[place + 1 :], stdin)
        if name in SUBMITTERS:
            script = _submitted_script(words[place + 1 :], stdin)
            variables = _scheduled_variables(words[place:])
            return None if script is None else replace(script, scheduled=variables)
        if name.endswith(SCRIPT_SUFFIXES) and (place == 0 or "/" in word):
            return CalledScript(path=word, text="", arguments=tuple(words[place + 1 :]))
        if _STARTS_TRAINER.match(word):  # `launcher -c "python ..."`, whatever the launcher is
            return CalledScript(path="", text=word, arguments=())
    return None


def _shell_script(words: list[str], stdin: str | None) -> CalledScript | None:
    """Return the script of a shell's words: behind its options, or what it is handed."""
    place = 0
    while place < len(words) and words[place].startswith(("-", "+")):
        is_long = words[place].startswith("--")
        if not is_long and words[place].endswith("c") and place + 1 < len(words):
            arguments = tuple(words[place + 3 :])
            return CalledScript(path="", text=words[place + 1], arguments=arguments)
        place += 2 if words[place] in ("-o", "+o", "--rcfile", "--init-file") else 1
    if place < len(words):
        return CalledScript(path=words[place], text="", arguments=tuple(words[place + 1 :]))
    return _read_input(stdin)


def _read_input(stdin: str | None) -> CalledScript | None:
    """Return the script that a shell reads from its standard input, where it has one."""
    return CalledScript(path="", text=stdin, arguments=()) if stdin else None


def _submitted_script(words: list[str], stdin: str | None) -> CalledScript | None:
    """Return the script that is handed to a scheduler."""
    for place, word in enumerate(words):
        if word.startswith("--wrap"):
            text = word.partition("=")[2] or " ".join(words[place + 1 : place + 2])
            return CalledScript(path="", text=text, arguments=())
        if word.endswith((*SCRIPT_SUFFIXES, ".sub")):
            return CalledScript(path=word, text="", arguments=tuple(words[place + 1 :]))
    return _read_input(stdin)


def _scheduled_variables(words: Sequence[str]) -> dict[str, str]:
    """Return what a scheduler tells a job: that it is one, and on how many nodes."""
    variables = {_JOBS[words[0].rpartition("/")[2]]: "1"}
    for word, following in zip(words, (*words[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        if name in ("--nodes", "-N"):
            nodes = value if equals else following
            variables |= dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes)
    return variables


def is_environment_script(name: str) -> bool:
    """Whether a file prepares a shell or an installation, and no job."""
    path = Path(UNKNOWN_VALUE.sub("", name))
    is_system = name.startswith(("/etc/", "/opt/", "/usr/"))
    is_installation = _INSTALLATION.search(path.name) is not None
    return path.name in _ENVIRONMENT_SCRIPTS or is_system or is_installation


def read_script_file(name: str, folders: Sequence[Path], written: Mapping[str, str]) -> str | None:
    """Return the text of a script; None where it is neither written by the script nor beside it.

    Raises:
        BadInput: the file is no text, or too long for a script.
    """
    plain = _plain_path(name)
    if plain in written:
        return written[plain]
    path = find_script_file(name, folders)
    if path is None:
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            rule = f"is longer than {_MAX_BYTES} bytes, so it is no script"
            raise BadInput(Reason(field=str(path)[:80], rule=rule))
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def find_script_file(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the file of a script; None where it is not there.

    Scripts of a folder are often started from one above, of which their paths are told; a path of
    another machine (/root/slime/scripts/models/x.sh) is looked for by its last parts.
    """
    plain = _plain_path(name)
    above = [parent for folder in folders for parent in (folder, *folder.parents)[:_LEVELS]]
    places = [folder / plain for folder in dict.fromkeys((*folders, *above))]
    parts = Path(plain).parts
    if Path(plain).is_absolute() and len(parts) > _TAIL_PARTS:
        tails = [Path(*parts[first:]) for first in range(2, len(parts) - _TAIL_PARTS + 1)]
        places += [folder / tail for tail in tails for folder in dict.fromkeys(above)]
    return next(filter(_is_file, places), None)


def _plain_path(name: str) -> str:
    plain = UNKNOWN_VALUE.sub("", name).lstrip("/") if UNKNOWN_VALUE.search(name) else name
    return plain.removeprefix("./")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
