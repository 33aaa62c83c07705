"""Commands of a script whose effect is known without running them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moewright.intake.megatron.bash_expansion import OUTPUT_PREFIX, UNKNOWN_VALUE, ShellVariables

# Programs that succeed in a run that trains, and that set nothing.
PLAIN_PROGRAMS = (
    *(":", "true", "echo", "printf", "mkdir", "touch", "ls", "cat", "tee", "date", "hostname"),
    *("command", "which", "type", "hash", "module", "conda", "ulimit", "trap", "wait", "env"),
    *("ln", "chmod", "pwd", "alias", "shopt", "unalias", "nvidia-smi", "sudo", "ds_ssh"),
)
_MAX_SEQUENCE = 10_000


def print_text(commands: Sequence[Sequence[str]], folder: Path) -> str | None:
    """Return what simple commands print, without the last line end; None for others."""
    lines: list[str] = []
    for words in commands:
        line = _print_one(list(words), folder)
        if line is None:
            return None
        lines.append(line)
    return "".join(lines).rstrip("\n") if commands else None


def _print_one(words: list[str], folder: Path) -> str | None:
    program, arguments = words[0], [word for word in words[1:] if word != "--"]
    if program == "echo":
        plain = [word for word in arguments if word not in ("-n", "-e", "-ne")]
        return " ".join(plain) + "\n"
    if any(UNKNOWN_VALUE.search(word) for word in arguments):
        return None
    if program == "printf" and arguments:
        return _print_format(arguments[0], arguments[1:])
    if program == "pwd":
        return f"{folder}\n"
    if program == "dirname" and len(arguments) == 1:
        return f"{os.path.dirname(arguments[0]) or '.'}\n"
    if program == "basename" and arguments:
        name = arguments[0].rstrip("/").rpartition("/")[2]
        suffix = arguments[1] if len(arguments) > 1 else ""
        return f"{name.removesuffix(suffix) if suffix else name}\n"
    if program in ("realpath", "readlink") and arguments:
        return f"{arguments[-1]}\n"
    if program == "seq":
        return _print_sequence(arguments)
    if program == "expr" and len(arguments) == 3:
        return _print_expression(*arguments)
    return None


def _print_format(text: str, values: list[str]) -> str | None:
    """Return printf's text where its format holds plain values alone."""
    parts = text.replace("\\n", "\n").split("%")
    out = parts[0]
    for part in parts[1:]:
        if part[:1] not in ("s", "d") or not values:
            return None
        out += values.pop(0) + part[1:]
    return out


def _print_sequence(arguments: list[str]) -> str | None:
    if not all(word.lstrip("-").isdigit() for word in arguments) or not 1 <= len(arguments) <= 3:
        return None
    numbers = [int(word) for word in arguments]
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) == 3 else 1
    if not step or abs(numbers[-1] - first) > _MAX_SEQUENCE:
        return None
    return "".join(
        f"{number}\n" for number in range(first, numbers[-1] + (1 if step > 0 else -1), step)
    )


def _print_expression(left: str, sign: str, right: str) -> str | None:
    if not (left.lstrip("-").isdigit() and right.lstrip("-").isdigit()):
        return None
    first, second = int(left), int(right)
    values = {"+": first + second, "-": first - second, "*": first * second, "\\*": first * second}
    if second:
        values |= {"/": first // second, "%": first % second}
    return f"{values[sign]}\n" if sign in values else None


def read_words(words: Sequence[str], text: str | None, variables: ShellVariables) -> None:
    """Set the variables of `read` and `mapfile`; without a text their values are not known."""
    names = [word for word in words[1:] if not word.startswith("-")] or ["REPLY"]
    if text is None:
        for name in names:
            variables.arrays[name] = (f"\0{OUTPUT_PREFIX}{words[0]}\0",)
        return
    if words[0] != "read":
        variables.arrays[names[-1]] = tuple(text.splitlines())
        return
    separators = variables.first("IFS") or None
    line = text.partition("\n")[0]
    if any(word.startswith("-") and "a" in word for word in words):
        variables.arrays[names[-1]] = tuple(line.split(separators))
        return
    parts = line.split(separators, len(names) - 1)
    for place, name in enumerate(names):
        variables.arrays[name] = (parts[place].strip() if place < len(parts) else "",)


def take_option(words: Sequence[str], variables: ShellVariables) -> bool:
    """Take the next option of `getopts`; return whether there is one."""
    letters, name = words[1], words[2]
    arguments = variables.arrays["@"]
    place = int(variables.first("OPTIND") or "1") - 1
    if place >= len(arguments) or not arguments[place].startswith("-"):
        return False
    letter = arguments[place][1:2]
    value = arguments[place][2:]
    place += 1
    if f"{letter}:" in letters and not value:
        value = arguments[place] if place < len(arguments) else ""
        place += 1
    variables.arrays |= {
        name: (letter if letter in letters else "?",),
        "OPTARG": (value,),
        "OPTIND": (str(place + 1),),
    }
    return True
