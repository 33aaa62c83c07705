"""The tests of a script: [ ... ] and [[ ... ]]."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from pathlib import Path

from moewright.intake.megatron.bash_expansion import OUTPUT_PREFIX, UNKNOWN_VALUE, ShellVariables
from moewright.intake.megatron.bash_patterns import matches_pattern
from moewright.intake.megatron.bash_tokens import ShellToken, syntax_refusal
from moewright.spec.errors import BadInput, Reason

_FILE_TESTS = ("-a", "-b", "-c", "-d", "-e", "-f", "-h", "-L", "-p", "-r", "-s", "-w", "-x")
_NUMBER_TESTS = ("-eq", "-ne", "-lt", "-le", "-gt", "-ge")


class OutputNeeded(BadInput):
    """A text that decides what runs next depends on what `program` prints."""

    def __init__(self, program: str, reason: Reason) -> None:
        super().__init__(reason)
        self.program = program


def require_known(text: str, line: int) -> str:
    """Return a text that decides which commands run next; unset variables are empty in it.

    Raises:
        OutputNeeded: the text depends on what a program prints.
    """
    text = UNKNOWN_VALUE.sub(
        lambda match: match[0] if match[1].startswith(OUTPUT_PREFIX) else "", text
    )
    if output := UNKNOWN_VALUE.search(text):
        rule = f"what follows depends on the {output[1]}, which only running tells"
        program = output[1].removeprefix(OUTPUT_PREFIX)
        raise OutputNeeded(program, syntax_refusal(line, rule).reasons[0])
    return text


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
            BadInput: it cannot be read, or depends on what a program prints.
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
        if is_option and following not in ("=", "==", "!=", *_NUMBER_TESTS):
            return self._unary(first.unquoted, self._take())
        if is_alone:
            return self._value(first) != ""
        return self._binary(first, self._take().text, self._take())

    def _unary(self, test: str, word: ShellToken) -> bool:
        if test == "-v":
            return self._value(word) in self.variables.arrays
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
            if self.has_patterns and not re.fullmatch(r"\s*-?\d+\s*", value):
                value = require_known(self.variables.arithmetic(value or "0", self.line), self.line)
            try:
                numbers.append(int(value))
            except ValueError:
                name = re.search(r"\$\{?(\w+)", word.text)
                rule = f"{value!r} {sign} compares no numbers"
                if not value.strip() and name is not None:
                    variable = f"argument {name[1]}" if name[1].isdigit() else name[1]
                    rule = f"{variable} is not set, and {sign} compares numbers: give it before"
                raise syntax_refusal(self.line, rule) from None
        return bool(getattr(operator, sign[1:])(*numbers))

    def _matches(self, left: ShellToken, right: ShellToken) -> bool:
        """Return whether a value matches a regular expression, and set BASH_REMATCH."""
        value = self._value(left)
        text = right.text
        while self._peek() and self._peek() not in ("&&", "||"):
            text += self._take().text
        if len(right.pieces) == 1 and right.pieces[0][0] != "bare":
            text = re.escape(self._value(right))
        else:
            text = require_known(self.variables.substitute(text, self.line), self.line)
        try:
            match = re.search(re.sub(r"\[\[:(\w+):\]\]", _character_class, text), value)
        except re.error:
            rule = f"the expression {text[:40]} is not read"
            raise syntax_refusal(self.line, rule) from None
        groups = () if match is None else (match[0], *(group or "" for group in match.groups()))
        self.variables.arrays["BASH_REMATCH"] = groups
        return match is not None

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
