"""The state of a script while it is read: variables, functions, files, and plain commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moewright.intake.megatron.bash_builtins import Condition, read_words, take_option
from moewright.intake.megatron.bash_expansion import ShellVariables
from moewright.intake.megatron.bash_tokens import ShellToken, find_expressions, syntax_refusal
from moewright.intake.megatron.called_scripts import read_script_file
from moewright.intake.megatron.unknown import UNKNOWN_VALUE, UnknownValue, show_unknown
from moewright.spec.errors import BadInput
from moewright.spec.units import whole_number

MAX_DEPTH = 12  # of evals, functions and scripts inside each other
Redirections = tuple[tuple[ShellToken, ShellToken | None], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command as bash would start it: its words, its environment and its line in the script.

    `exported` are the exported variables and those that stand before the command; `decision` is
    what decides whether it runs, where only running tells.
    """

    words: tuple[str, ...]
    exported: tuple[tuple[str, str], ...]
    line: int
    decision: UnknownValue | None = None


_SED_FLAGS = ("-e", "-E", "-r", "--expression")
_SED_SPECIAL = re.compile(r"[\\^$.*\[\]+?(){}|&]")  # of a pattern or what takes its place
_HEREDOC_QUOTE = re.compile(r'(\\?)"')


def _quote_heredoc(text: str, line: int) -> str:
    """Return a here-document as text between double quotes.

    Its own double quotes are text, and so is a backslash before one; those inside $(...) are not.
    """
    spans = find_expressions(text, line)
    ends = (0, *(end for _, end in spans))
    starts = (*(start for start, _ in spans), len(text))
    plain = (text[end:start] for end, start in zip(ends, starts, strict=True))
    escaped = [_HEREDOC_QUOTE.sub(_escape_quote, part) for part in plain]
    inner = [text[start:end] for start, end in spans]
    return "".join(part for pair in zip(escaped, (*inner, ""), strict=True) for part in pair)


def _escape_quote(match: re.Match[str]) -> str:
    backslash = "\\\\" if match[1] else ""
    return f'{backslash}\\"'


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellReading:
    """The commands that a script starts, and notes on what was taken for granted.

    `exit_line` is the line at which the script leaves before its end, 0 where it does not, and
    `deciding` are the variables and arguments, not set, that the condition before it asked for;
    `files` are the texts that it writes itself, by path. `fault` is why it is read no further.
    """

    commands: tuple[Command, ...]
    notes: tuple[str, ...] = ()
    exit_line: int = 0
    deciding: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    fault: BadInput | None = None


@dataclass(slots=True)
class ScriptExit(Exception):
    """The script has reached `exit` in a line."""

    line: int


class FunctionReturn(Exception):
    """A function, or a sourced script, has reached `return`."""


@dataclass(slots=True)
class LoopJump(Exception):
    """A loop has reached `break` or `continue`; `levels` are the loops that are left."""

    levels: int
    goes_on: bool


@dataclass(slots=True)
class FunctionScope:
    """The variables that a function has declared `local`, with what they were before."""

    hidden: dict[str, tuple[str, ...] | None] = field(default_factory=dict)


class ShellSession:
    """The state of a script while it is read from top to bottom.

    `status` is whether the last command succeeded, which `if`, && and || ask; None where only
    running tells.
    """

    def __init__(
        self, environment: Mapping[str, str], arguments: Sequence[str], script: Path | None
    ) -> None:
        self.status: bool | None = True
        self.decision = UnknownValue()  # what a status that is not known depends on
        self.environment = tuple(environment)  # what a started shell inherits too
        self.exported: dict[str, None] = {}
        self.variables = ShellVariables(environment, arguments)
        self.variables.arrays["PIPESTATUS"] = ("0",)  # a script that goes on had no failure
        self.functions: dict[str, tuple[ShellToken, ...]] = {}
        self.files: dict[str, str] = {}  # what the script itself writes, by name
        self.script = script
        self.folder = Path.cwd()
        self.scopes: list[FunctionScope] = []
        self.notes: list[str] = []
        self.depth = 0
        self.tried_branches = 0
        self.started: set[tuple[Path | None, tuple[str, ...]]] = {(script, tuple(arguments))}
        if script is not None:
            self.variables.arrays |= {"0": (str(script),), "BASH_SOURCE": (str(script),)}

    def condition(self, words: list[ShellToken], line: int, *, has_patterns: bool) -> bool:
        def note(at: int, test: str) -> None:
            self.notes.append(f"line {at}: {show_unknown(test)[:80]} is taken to be there")

        if not words:
            raise syntax_refusal(line, "the test is empty")
        self.variables.ask(" ".join(word.text for word in words))
        return Condition(words, self.variables, has_patterns=has_patterns, note=note).holds()

    def keep_status(self) -> None:
        """Set $? to what the last command ended with, as the next one sees it."""
        value = self.decision.mark() if self.status is None else str(int(not self.status))
        self.variables.arrays["?"] = (value,)

    def set_arithmetic_status(self, text: str, line: int) -> None:
        self.variables.ask(re.sub(r"(?<![$\w{])([A-Za-z_]\w*)", r"$\1", text))
        value = self.variables.arithmetic(text, line)
        if UNKNOWN_VALUE.search(value):
            self.status = None
            self.decision = UnknownValue(origin=f"whether (({text.strip()[:30]})) holds")
        else:
            self.status = int(value) != 0

    def declare(self, kind: str, words: list[ShellToken]) -> None:
        options = "".join(word.text for word in words if word.text.startswith("-"))
        for word in words:
            if word.text.startswith(("-", "+")):
                continue
            name = word.text.partition("=")[0].partition("[")[0].rstrip("+")
            if kind in ("local", "declare", "typeset") and self.scopes and "g" not in options:
                self.scopes[-1].hidden.setdefault(name, self.variables.arrays.get(name))
                if "=" not in word.text and name not in self.variables.constants:
                    self.variables.arrays[name] = ("",)
            if "A" in options:
                self.variables.tables.setdefault(name, {})
            assigned = self.variables.assign(word, is_table="A" in options)
            if assigned and (kind == "export" or "x" in options):
                self.exported[assigned] = None

    def builtins(self) -> Mapping[str, Callable[[list[str], int, str | None], None]]:
        return {
            "shift": self._shift,
            "set": self._set,
            "unset": self._unset,
            "let": self._let,
            "read": self._read,
            "mapfile": self._read,
            "readarray": self._read,
            "getopts": self._getopts,
            "cd": self._cd,
            "pushd": self._cd,
            "false": self._fail,
        }

    def keep_file(
        self,
        words: Sequence[str],
        heredoc: str,
        redirections: Redirections,
    ) -> None:
        """Remember the text that `cat <<EOF > file` writes: the script may run it."""
        names = list(words[1:]) if words[0] == "tee" else []
        for redirection, target in redirections:
            if redirection.text.lstrip("1").startswith(">") and target is not None:
                names += self.variables.expand(target)
            elif redirection.text.startswith(">") and len(redirection.text.lstrip(">")) > 0:
                names.append(redirection.text.lstrip(">"))
        self.files |= {name.removeprefix("./"): heredoc for name in names}

    def keep_filtered(self, parts: Sequence[tuple[Sequence[ShellToken], Redirections]]) -> None:
        """Remember the text that filters in a pipe make of a template, and write to a file."""
        (first, _), (_, redirections) = parts[0], parts[-1]
        if not (first and redirections and first[0].unquoted == "sed"):
            return

        def read(name: str) -> str | None:
            return read_script_file(name, self.folders(), self.files)

        text: str | None = None
        for tokens, targets in parts:
            redirected = {id(token) for pair in targets for token in pair}
            words = [token for token in tokens if id(token) not in redirected]
            expanded = [word for token in words for word in self.variables.expand(token)]
            text = apply_filter(expanded, text, read)
        if text is not None:
            self.keep_file(("sed",), text, redirections)

    def heredoc(self, redirections: Redirections) -> str | None:
        """Return what a here-document or a here-string hands to a command."""
        for redirection, target in redirections:
            if redirection.heredoc is not None:
                if redirection.is_literal:
                    return redirection.heredoc
                text = _quote_heredoc(redirection.heredoc, redirection.line)
                return self.variables.substitute(text, redirection.line, quoted=True)
            if redirection.text == "<<<" and target is not None:
                return " ".join(self.variables.expand(target))
        return None

    def inherited(self) -> Mapping[str, tuple[str, ...]]:
        """Return the variables that a started shell inherits."""
        return {
            name: self.variables.arrays.get(name, ())
            for name in (*self.environment, *self.exported, "HOME", "USER", "PATH", "PWD")
        }

    def folders(self) -> tuple[Path, ...]:
        folders = [self.folder]
        if self.script is not None:
            folders.append(self.script.parent)
        return tuple(dict.fromkeys((*folders, Path())))

    def _shift(self, words: list[str], line: int, heredoc: str | None) -> None:
        count = whole_number("".join(words[1:2]), otherwise=1)
        arguments = self.variables.arrays["@"]
        self.status = count <= len(arguments)
        if self.status:
            self.variables.set_arguments(arguments[count:])

    def _set(self, words: list[str], line: int, heredoc: str | None) -> None:
        if "--" in words:
            self.variables.set_arguments(words[words.index("--") + 1 :])

    def _unset(self, words: list[str], line: int, heredoc: str | None) -> None:
        for name in words[1:]:
            self.variables.arrays.pop(name, None)
            self.variables.tables.pop(name, None)
            self.functions.pop(name, None)

    def _let(self, words: list[str], line: int, heredoc: str | None) -> None:
        for text in words[1:]:
            self.set_arithmetic_status(text, line)

    def _read(self, words: list[str], line: int, heredoc: str | None) -> None:
        self.status = heredoc is not None
        read_words(words, heredoc, self.variables)
        if heredoc is None:
            self.status = None
            self.decision = UnknownValue(origin=f"what {words[0]} reads")

    def _getopts(self, words: list[str], line: int, heredoc: str | None) -> None:
        self.status = take_option(words, self.variables)

    def _cd(self, words: list[str], line: int, heredoc: str | None) -> None:
        names = [word for word in words[1:] if word != "--"]
        if names and not UNKNOWN_VALUE.search(names[-1]):
            self.folder = self.folder / names[-1]

    def _fail(self, words: list[str], line: int, heredoc: str | None) -> None:
        self.status = False


def apply_filter(
    words: Sequence[str], text: str | None, read: Callable[[str], str | None]
) -> str | None:
    """Return what `sed` makes of a text, or of the file that it names; None where not followed.

    It is followed where it puts plain words for others; what another filter writes stays unknown.
    """
    if not words or words[0] != "sed":
        return None
    operands = [word for word in words[1:] if word not in _SED_FLAGS]
    edits = [word for word in operands if _parse_edits(word) is not None]
    names = [word for word in operands if word not in edits]
    if not edits or len(names) > 1 or any(name.startswith("-") for name in names):
        return None
    if names:
        text = read(names[0])
    if text is None:
        return None
    for word in edits:
        for pattern, put, is_global in _parse_edits(word) or ():
            count = -1 if is_global else 1
            text = "".join(
                line.replace(pattern, put, count) for line in text.splitlines(keepends=True)
            )
    return text


def _parse_edits(word: str) -> tuple[tuple[str, str, bool], ...] | None:
    """Parse s/A/B/ and more of them behind semicolons; None where one is more than plain words."""
    edits = []
    for part in word.strip().split(";"):
        edit = part.strip()
        pieces = edit[2:].split(edit[1]) if len(edit) > 2 and edit[0] == "s" else []
        if len(pieces) != 3 or pieces[2] not in ("", "g") or not pieces[0]:
            return None
        is_known = UNKNOWN_VALUE.search(edit) is None
        if _SED_SPECIAL.search(pieces[0]) or re.search(r"[\\&]", pieces[1]) or not is_known:
            return None
        edits.append((pieces[0], pieces[1], pieces[2] == "g"))
    return tuple(edits)
