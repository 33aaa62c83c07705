"""Commands and tests of a script whose effect is known without running them."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from moewright.intake.megatron.bash_expansion import ShellVariables
from moewright.intake.megatron.bash_patterns import matches_pattern, search_expression
from moewright.intake.megatron.bash_tokens import ShellToken, syntax_refusal
from moewright.intake.megatron.unknown import UNKNOWN_VALUE, UnknownValue, find_unknown
from moewright.spec.errors import BadInput
from moewright.spec.units import is_whole_number, mention

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
        # Unknown values pass through echo: it prints them as they are, wherever they come from.
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
    if not 1 <= len(arguments) <= 3 or not all(map(_is_integer, arguments)):
        return None
    numbers = [int(word) for word in arguments]
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) == 3 else 1
    if not step or abs(numbers[-1] - first) > _MAX_SEQUENCE:
        return None
    return "".join(
        f"{number}\n" for number in range(first, numbers[-1] + (1 if step > 0 else -1), step)
    )


def _is_integer(word: str) -> bool:
    return is_whole_number(word.removeprefix("-"))


def _print_expression(left: str, sign: str, right: str) -> str | None:
    if not all(map(_is_integer, (left, right))):
        return None
    first, second = int(left), int(right)
    values = {"+": first + second, "-": first - second, "*": first * second, "\\*": first * second}
    if second:
        values |= {"/": first // second, "%": first % second}
    return f"{values[sign]}\n" if sign in values else None


_READ_VALUES = "adinNptu"  # options of `read` that take a value
_MAPFILE_VALUES = "dnOsuCc"


def read_words(words: Sequence[str], text: str | None, variables: ShellVariables) -> None:
    """Set the variables of `read` and `mapfile`; without a text their values are not known."""
    is_read = words[0] == "read"
    options, names = _split_options(words[1:], _READ_VALUES if is_read else _MAPFILE_VALUES)
    names = [*filter(None, (options.get("a", ""),)), *names] or ["REPLY"]
    if text is None:
        for name in names:
            unknown = UnknownValue(name=name, origin=f"what {words[0]} reads")
            variables.arrays[name] = (unknown.mark(),)
        return
    if not is_read:
        variables.arrays[names[-1]] = tuple(text.splitlines())
        return
    separators = variables.first("IFS") or None
    end = options.get("d", "\n")
    # Without an end, -d '', all of the text is one line.
    line = text.partition(end)[0] if end else text
    if "a" in options:
        variables.arrays[names[0]] = tuple(line.split(separators))
        return
    # The last name takes the rest of the line, as in bash.
    parts = line.split(separators, len(names) - 1)
    for place, name in enumerate(names):
        variables.arrays[name] = (parts[place].strip() if place < len(parts) else "",)


def _split_options(words: Sequence[str], valued: str) -> tuple[dict[str, str], list[str]]:
    """Return options, those in `valued` with their values, and the names behind them."""
    options: dict[str, str] = {}
    left = list(words)
    while left and left[0].startswith("-"):
        letters = left.pop(0)[1:]
        for place, letter in enumerate(letters):
            value = ""
            if letter in valued:
                # What stands behind it in the same word is its value, else the next word.
                value = letters[place + 1 :] or (left.pop(0) if left else "")
            options[letter] = value
            if letter in valued:
                break
    return options, left


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


_FILE_TESTS = ("-a", "-b", "-c", "-d", "-e", "-f", "-h", "-L", "-p", "-r", "-s", "-w", "-x")
_NUMBER_TESTS = ("-eq", "-ne", "-lt", "-le", "-gt", "-ge")


# What launchers tell a process of its place: what the first one runs is read.
_RANKS = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID"),
    *("SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK"),
    *("PALS_RANKID", "PALS_LOCAL_RANKID", "VC_TASK_INDEX", "JOB_COMPLETION_INDEX"),
)


class DecisionNeeded(BadInput):
    """What runs next depends on an unknown value."""

    def __init__(self, unknown: UnknownValue, line: int) -> None:
        rule = f"what follows depends on {unknown.origin}, which only running tells"
        nearest = mention("--set {}=...", unknown.name)
        super().__init__(*syntax_refusal(line, rule, nearest).reasons)
        self.unknown = unknown


def require_known(text: str, line: int) -> str:
    """Return a text that decides which commands run next; unset variables are empty in it.

    Raises:
        DecisionNeeded: the text depends on what only running tells.
    """
    unknown = find_unknown(text)
    if unknown is not None and unknown.origin:
        raise DecisionNeeded(unknown, line)
    return UNKNOWN_VALUE.sub("", text)


class Condition:
    """A test, parsed and evaluated from left to right.

    `has_patterns` tells [[ ]], whose right sides are patterns, from [ ]. A file that is not known
    here is taken to be there, as it is in a run; `note` is called with its name.
    """

    def __init__(
        self,
        words: list[ShellToken],
        variables: ShellVariables,
        *,
        has_patterns: bool,
        note: Callable[[int, str], None],
    ) -> None:
        self.words = words
        self.variables = variables
        self.has_patterns = has_patterns
        self.note = note
        self.position = 0
        self.line = words[0].line if words else 1

    def holds(self) -> bool:
        """Return whether the test holds.

        Raises:
            BadInput: it cannot be read, or depends on what only running tells.
        """
        if not self.words:
            return False
        value = self._either()
        if self.position < len(self.words):
            raise syntax_refusal(self.line, "the test is not read; write the branch out")
        return value

    def _peek(self) -> str:
        """Return the next word as it is spelled; "" at the end."""
        if self.position >= len(self.words):
            return ""
        return self.words[self.position].text

    def _take(self) -> ShellToken:
        if self.position >= len(self.words):
            raise syntax_refusal(self.line, "the test ends too early")
        self.position += 1
        return self.words[self.position - 1]

    def _either(self) -> bool:
        value = self._both()
        while self._peek() == ("||" if self.has_patterns else "-o"):
            self._take()
            other = self._both()
            value = value or other
        return value

    def _both(self) -> bool:
        value = self._one_test()
        while self._peek() == ("&&" if self.has_patterns else "-a"):
            self._take()
            other = self._one_test()
            value = value and other
        return value

    def _one_test(self) -> bool:
        if self._peek() == "!":
            self._take()
            return not self._one_test()
        if self._peek() in ("(", "\\("):
            self._take()
            value = self._either()
            self._take()
            return value
        return self._comparison()

    def _comparison(self) -> bool:
        first = self._take()
        following = self._peek()
        is_alone = self.position >= len(self.words) or following in ("&&", "||", "-a", "-o", ")")
        is_option = first.unquoted.startswith("-") and len(first.text) == 2 and not is_alone
        # `[ -f = x ]` compares texts: what follows tells whether -f is a test or a word.
        if is_option and following not in ("=", "==", "!=", *_NUMBER_TESTS):
            return self._unary(first.unquoted, self._take())
        if is_alone:
            return self._value(first) != ""
        return self._binary(first, self._take().text, self._take())

    def _unary(self, test: str, word: ShellToken) -> bool:
        if test == "-v":
            return self._value(word) in self.variables.arrays
        if test in ("-z", "-n") and (name := self._unread_name(word)):
            self.variables.assume_unset(name)
            return test == "-z"
        value = self._value(word)
        if test in ("-z", "-n"):
            return (value == "") == (test == "-z")
        if test in _FILE_TESTS:
            if not _exists(value):
                self.note(self.line, f"{test} {value}")
            return True
        raise syntax_refusal(self.line, f"the test {test} is not read; write the branch out")

    def _binary(self, left: ShellToken, sign: str, right: ShellToken) -> bool:
        if sign == "=~":
            return self._matches(left, right)
        value = self._value(left)
        if sign in ("=", "==", "!="):
            if self.has_patterns:
                pattern = require_known(self.variables.pattern(right), self.line)
                is_equal = matches_pattern(value, pattern)
            else:
                is_equal = value == self._value(right)
            return is_equal == (sign != "!=")
        if sign in ("<", ">", "\\<", "\\>"):
            other = self._value(right)
            return value < other if sign.endswith("<") else value > other
        if sign in _NUMBER_TESTS:
            return self._compare_numbers(left, sign, right)
        raise syntax_refusal(self.line, "the test is not read; write the branch out")

    def _compare_numbers(self, left: ShellToken, sign: str, right: ShellToken) -> bool:
        numbers = []
        for word in (left, right):
            value = self._value(word)
            # [[ a -gt b ]] evaluates both sides as arithmetic, [ a -gt b ] takes digits alone.
            if self.has_patterns and not re.fullmatch(r"\s*-?\d+\s*", value):
                value = require_known(self.variables.arithmetic(value or "0", self.line), self.line)
            try:
                numbers.append(int(value))
            except ValueError:
                name = "" if value.strip() else self._unset_name(word.text)
                if name in _RANKS or name.endswith("_RANK"):
                    numbers.append(0)
                    continue
                rule = f"{value!r} {sign} compares no numbers"
                nearest = ""
                if name:
                    is_argument = name.isdigit()
                    variable = f"argument {name}" if is_argument else name
                    nearest = '--script-args "..."' if is_argument else f"--set {name}=..."
                    rule = f"{variable} is not set, and {sign} compares numbers"
                raise syntax_refusal(self.line, rule, nearest) from None
        return bool(getattr(operator, sign[1:])(*numbers))

    def _unread_name(self, word: ShellToken) -> str:
        """Return the variable that a word is, where only a file that is not here may set it."""
        match = UNKNOWN_VALUE.fullmatch(" ".join(self.variables.expand(word)))
        name = match[1] if match is not None else ""
        is_absent = name not in self.variables.arrays and name not in self.variables.tables
        return name if is_absent and self.variables.absent(name).origin else ""

    def _unset_name(self, text: str) -> str:
        """Return the first variable of a word that has no value; "" where all have one."""
        names: list[str] = re.findall(r"[A-Za-z_]\w*|(?<=\$)\d|(?<=\$\{)\d", text)
        for name in names:
            value = self.variables.first(name)
            if unknown := UNKNOWN_VALUE.search(value):
                return str(unknown[1])
            if not value:
                return name
        return ""

    def _matches(self, left: ShellToken, right: ShellToken) -> bool:
        """Return whether a value matches a regular expression, and set BASH_REMATCH."""
        value = self._value(left)
        text = right.text
        # A regular expression may hold brackets and bars, which the tokenizer has cut into words.
        while self._peek() and self._peek() not in ("&&", "||"):
            text += self._take().text
        if len(right.pieces) == 1 and right.pieces[0][0] != "bare":
            # What is quoted on the right of =~ is matched letter by letter.
            text = re.escape(self._value(right))
        else:
            text = require_known(self.variables.substitute(text, self.line), self.line)
        expression = re.sub(r"\[\[:(\w+):\]\]", _character_class, text)
        try:
            groups = search_expression(
                expression, value, where=f"line {self.line}: the expression {text[:40]}"
            )
        except re.error:
            rule = f"the expression {text[:40]} is not read"
            raise syntax_refusal(self.line, rule) from None
        self.variables.arrays["BASH_REMATCH"] = groups or ()
        return groups is not None

    def _value(self, word: ShellToken) -> str:
        return require_known(" ".join(self.variables.expand(word)), self.line)


def _character_class(match: re.Match[str]) -> str:
    classes = {"digit": "[0-9]", "alpha": "[A-Za-z]", "alnum": "[A-Za-z0-9]", "space": r"\s"}
    return classes.get(match[1], match[0])


def _exists(name: str) -> bool:
    try:
        return bool(name) and Path(name).exists()
    except (OSError, ValueError):
        return False
