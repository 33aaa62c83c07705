"""An interpreter of launch scripts that starts nothing: the part of bash they are written in.

It reads assignments, arrays, exports, quotes, continued lines, ${X:-default}, $((arithmetic)), if,
case, && and ||, `eval` and `bash -c`. A loop is read only if it does not run. A value that is only
known when the script runs (the output of commands, positional parameters, variables set elsewhere)
stands in the words as its name between zero bytes, so that the reader of the value can say which
one is missing.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from moewright.intake.megatron.bash_tokens import (
    ShellToken,
    TokenReader,
    split_expressions,
    syntax_refusal,
    tokenize,
)

UNKNOWN_VALUE = re.compile("\0([^\0]*)\0")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)", re.DOTALL)
_WHOLE_ARRAY = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\[@\]\}|\$(@)")
_PARAMETER = re.compile(
    r"([A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-])"  # its name
    r"(\[[@*0-9]+\])?"  # which elements of an array
    r"(?:(:?[-=+?])(.*))?",  # what to do where it is not set, and the word for it
    re.DOTALL,
)
_TERNARY = re.compile(r"([^?]+)\?([^:?]+):([^:?]+)")  # a ? b : c
_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_TESTS = ("[", "[[", "test")
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,  # bash divides whole numbers
    ast.Mod: operator.mod,
}
_COMPARISONS = {
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_OUTPUT_PREFIX = "output-of-"
_MAX_DEPTH = 8  # of evals and bash -c inside each other


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command as bash would start it: its words, its environment and its line in the script.

    `exported` are the exported variables and those that stand before the command.
    """

    words: tuple[str, ...]
    exported: tuple[tuple[str, str], ...]
    line: int


def read_commands(
    text: str, environment: Mapping[str, str], arguments: Sequence[str] = ()
) -> tuple[Command, ...]:
    """Return every command of a script that bash would reach, with its words expanded.

    Variables come from the script, then from `environment`; `arguments` are the words that would
    stand behind the script's name on the command line.

    Raises:
        BadInput: names a line that cannot be read.
    """
    commands: list[Command] = []
    try:
        for command in _Interpreter(environment, arguments).run(text, first_line=1, depth=0):
            commands.append(command)
    except _ScriptExit:
        pass
    return tuple(commands)


class _ScriptExit(Exception):
    """The script has reached `exit`."""


class _Interpreter:
    """The variables of a script while it is read from top to bottom; every variable is an array.

    `status` is whether the last command succeeded, which `if`, && and || ask.
    """

    def __init__(self, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
        self.status = True
        self.exported: dict[str, None] = {}
        self.variables: dict[str, tuple[str, ...]] = {
            name: (value,) for name, value in environment.items()
        }
        self.variables |= {str(number): (value,) for number, value in enumerate(arguments, 1)}
        self.variables |= {
            "#": (str(len(arguments)),),
            "@": tuple(arguments),
            "*": tuple(arguments),
        }

    def run(self, text: str, *, first_line: int, depth: int) -> Iterator[Command]:
        if depth > _MAX_DEPTH:
            raise syntax_refusal(first_line, f"starts shells more than {_MAX_DEPTH} deep")
        reader = TokenReader(tuple(tokenize(text, first_line)))
        yield from self._block(reader, (), True, depth)

    def _block(
        self, reader: TokenReader, ends: tuple[str, ...], live: bool, depth: int
    ) -> Iterator[Command]:
        """Run the statements up to one of the words in `ends`, or skip them where not `live`."""
        while (token := reader.peek()) is not None:
            if (token.text if token.is_operator else token.unquoted) in ends:
                return
            if token.is_separator:
                reader.take()
            elif token.unquoted == "if":
                yield from self._if(reader, live, depth)
            elif token.unquoted in ("while", "until", "for", "select"):
                yield from self._loop(reader, live, depth)
            elif token.unquoted == "case":
                yield from self._case(reader, live, depth)
            elif token.unquoted == "{" or reader.skip_function_header():
                is_group = token.unquoted == "{"  # the body of a function is skipped
                reader.take()
                yield from self._block(reader, ("}",), live and is_group, depth)
                reader.expect("}")
            else:
                yield from self._list(reader, live, depth)
        if ends:
            raise syntax_refusal(reader.line, f"`{ends[-1]}` is missing")

    def _if(self, reader: TokenReader, live: bool, depth: int) -> Iterator[Command]:
        reader.take()
        is_open = live  # no branch has been taken yet
        while True:
            for _ in self._block(reader, ("then",), is_open, depth):
                pass  # a condition counts by its status, not by what it would start
            is_taken = is_open and self.status
            reader.expect("then")
            yield from self._block(reader, ("elif", "else", "fi"), is_taken, depth)
            is_open = is_open and not is_taken
            keyword = reader.take().unquoted
            if keyword == "fi":
                return
            if keyword == "else":
                yield from self._block(reader, ("fi",), is_open, depth)
                reader.expect("fi")
                return

    def _loop(self, reader: TokenReader, live: bool, depth: int) -> Iterator[Command]:
        """Skip a loop that does not run, such as one over arguments that nobody gives.

        Raises:
            BadInput: the loop runs.
        """
        keyword = reader.take()
        if keyword.unquoted in ("while", "until"):
            yield from self._block(reader, ("do",), live, depth)
            runs = self.status == (keyword.unquoted == "while")
            reader.expect("do")
        else:
            runs = self._has_items(reader)
        if live and runs:
            rule = f"`{keyword.unquoted}` is not read; write the commands out"
            raise syntax_refusal(keyword.line, rule)
        yield from self._block(reader, ("done",), False, depth)
        reader.expect("done")
        self.status = True

    def _has_items(self, reader: TokenReader) -> bool:
        """Take the head of `for name in items; do`; return whether it has items."""
        reader.take()
        has_items = False
        while (token := reader.take()).unquoted != "do":
            if not has_items and token.unquoted != "in" and not token.is_operator:
                has_items = bool(self.expand(token))
        return has_items

    def _case(self, reader: TokenReader, live: bool, depth: int) -> Iterator[Command]:
        line = reader.take().line
        subject = reader.take()
        value = self._require_known(" ".join(self.expand(subject)), line) if live else ""
        reader.expect("in")
        while True:
            while (token := reader.peek()) is not None and (
                token.is_separator or token.text == "("
            ):
                reader.take()
            token = reader.take()
            if token.unquoted == "esac":
                return
            matches = False
            while token.text != ")" or not token.is_operator:
                if not matches and not token.is_operator:
                    matches = fnmatchcase(value, "".join(self.expand(token)))
                token = reader.take()
            yield from self._block(reader, (";;", "esac"), live and matches, depth)
            live = live and not matches

    def _list(self, reader: TokenReader, live: bool, depth: int) -> Iterator[Command]:
        """Run commands joined by && and ||, and the first of a pipe: the others train nothing."""
        is_run = live
        while True:
            words = reader.take_command()
            if is_run and words:
                yield from self._command(words, depth)
            joint = reader.peek()
            if joint is None or joint.text not in ("&&", "||", "|"):
                return
            reader.take()
            is_run = joint.text != "|" and live and self.status == (joint.text == "&&")

    def _command(self, words: list[ShellToken], depth: int) -> Iterator[Command]:
        self.status = True
        first = words[0]
        if first.unquoted == "!":
            if len(words) > 1:
                yield from self._command(words[1:], depth)
            self.status = not self.status
        elif first.unquoted in _TESTS:
            self.status = self._evaluate_test(words)
        elif first.unquoted == "exit":
            raise _ScriptExit
        elif first.unquoted in _DECLARATIONS:
            self._declare(words[1:], is_export=first.unquoted == "export")
        else:
            yield from self._start(words, depth)

    def _declare(self, words: list[ShellToken], *, is_export: bool) -> None:
        for word in words:
            if self._assign(word) and is_export:
                self.exported[_NAME.match(word.text)[0]] = None  # type: ignore[index]

    def _start(self, words: list[ShellToken], depth: int) -> Iterator[Command]:
        """Yield a command with the variables before it, or set these where no command follows."""
        line = words[0].line
        previous = []
        while words and (match := _ASSIGNMENT.fullmatch(words[0].text)) and words[0].is_assignment:
            previous.append((match[1], self.variables.get(match[1], ())))
            self._assign(words.pop(0))
        if not words:
            return
        own = {name: self._first_value(name) for name, _ in previous}
        exported = {name: self._first_value(name) for name in self.exported} | own
        for name, value in previous:
            self.variables[name] = value
        expanded = [text for word in words for text in self.expand(word)]
        if not expanded:
            return
        inner = _inner_script(expanded)
        if inner:
            yield from self.run(inner, first_line=line, depth=depth + 1)
        else:
            yield Command(words=tuple(expanded), exported=tuple(exported.items()), line=line)

    def _assign(self, word: ShellToken) -> bool:
        """Set what the word assigns; a bare name, as after `export`, keeps its value.

        Return whether the word is an assignment or a name.
        """
        match = _ASSIGNMENT.fullmatch(word.text)
        if not match:
            return _NAME.fullmatch(word.text) is not None
        name, appends, text = match.groups()
        if text.startswith("(") and text.endswith(")"):
            tokens = [token for token in tokenize(text[1:-1], word.line) if not token.is_separator]
            items = tuple(item for token in tokens for item in self.expand(token))
            old = self.variables.get(name, ()) if appends else ()
            self.variables[name] = (*old, *items)
            return True
        value = self._substitute(text, word.line)
        old = self.variables.get(name, ()) if appends else ()
        self.variables[name] = ("".join(old[:1]) + value, *old[1:])
        return True

    def _first_value(self, name: str) -> str:
        return next(iter(self.variables.get(name, ())), "")

    def expand(self, word: ShellToken) -> list[str]:
        """Return the words that bash makes of one.

        Quotes are removed, expressions replaced by their values, and unquoted values split at
        blanks.
        """
        words: list[str] = []
        current: str | None = None
        for quoting, text in word.pieces:
            if quoting == "single":
                current = (current or "") + text
                continue
            array = _whole_array_name(text) if quoting == "double" else None
            if array is not None:
                values = list(self.variables.get(array, ()))
                if values:
                    words += [(current or "") + values[0], *values[1:]]
                    current = words.pop()
                continue
            value = self._substitute(text, word.line)
            if quoting == "double" or text[0] not in "$`":
                current = (current or "") + value
                continue
            split = value.split()
            if not split:
                continue
            if current is not None and value[:1].isspace():
                words.append(current)
                current = None
            words += [(current or "") + split[0], *split[1:]]
            current = None if value[-1].isspace() else words.pop()
        return words if current is None else [*words, current]

    def _substitute(self, text: str, line: int) -> str:
        """Return the text with its expressions replaced; an assigned value's quotes go too."""
        parts = []
        for kind, piece in split_expressions(text, line):
            if kind == "text":
                parts.append(piece)
            elif kind == "arithmetic":
                parts.append(self._evaluate_arithmetic(piece, line))
            elif kind == "command":
                program = next(iter(piece.split()), "")[:40]
                parts.append(f"\0{_OUTPUT_PREFIX}{program}\0")
            else:
                parts.append(self._expand_parameter(piece, line))
        return "".join(parts)

    def _expand_parameter(self, body: str, line: int) -> str:
        """Return the value of ${body}."""
        match = _PARAMETER.fullmatch(body)
        if not match:
            return f"\0{''.join(body[:40].split())}\0"
        name, index, operation, word = match.groups()
        value = self._indexed_value(name, index)
        if not operation:
            return f"\0{name}\0" if value is None else value
        is_empty = value is None or (value == "" and operation.startswith(":"))
        if operation.endswith("+"):
            return "" if is_empty else self._expand_text(word, line)
        if operation[-1] in "-=" and is_empty:
            value = self._expand_text(word, line)
            if operation.endswith("="):
                self.variables[name] = (value,)
        return f"\0{name}\0" if value is None else value

    def _indexed_value(self, name: str, index: str | None) -> str | None:
        """Return an element of a variable, or all of them for @ and *; None if it is not set."""
        values = self.variables.get(name)
        if values is None:
            return None
        if name in ("@", "*") or (index is not None and index[1] in "@*"):
            return " ".join(values)
        position = int(index[1:-1]) if index is not None else 0
        return values[position] if position < len(values) else ""

    def _expand_text(self, text: str, line: int) -> str:
        return "".join("".join(self.expand(token)) for token in tokenize(text, line))

    def _evaluate_arithmetic(self, text: str, line: int) -> str:
        expression = self._substitute(text, line)
        if unknown := UNKNOWN_VALUE.search(expression):
            return unknown[0]
        expression = _NAME.sub(
            lambda match: self._first_value(match[0]) or f"\0{match[0]}\0", expression
        )
        if unknown := UNKNOWN_VALUE.search(expression):
            return unknown[0]
        if match := _TERNARY.fullmatch(expression):
            expression = f"({match[2]}) if ({match[1]}) else ({match[3]})"
        try:
            return str(_compute(ast.parse(expression.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            raise syntax_refusal(line, f"$(({text.strip()[:40]})) is not read") from None

    def _evaluate_test(self, words: list[ShellToken]) -> bool:
        """Return whether the test [ ... ] holds; a test of a file is false."""
        line = words[0].line
        operands = [" ".join(self.expand(word)) for word in words[1:]]
        operands = [operand for operand in operands if operand not in ("]", "]]")]
        for joint in ("-o", "||", "-a", "&&"):
            if joint in operands:
                middle = operands.index(joint)
                left = self._compare(operands[:middle], line)
                right = self._compare(operands[middle + 1 :], line)
                return (left or right) if joint in ("-o", "||") else (left and right)
        return self._compare(operands, line)

    def _require_known(self, text: str, line: int) -> str:
        """Return a text that decides which commands run next; unset variables are empty in it.

        Raises:
            BadInput: the text depends on what a program prints.
        """
        text = UNKNOWN_VALUE.sub(
            lambda match: match[0] if match[1].startswith(_OUTPUT_PREFIX) else "", text
        )
        if output := UNKNOWN_VALUE.search(text):
            rule = f"what follows depends on the {output[1]}, which only running tells"
            raise syntax_refusal(line, rule)
        return text

    def _compare(self, operands: list[str], line: int) -> bool:
        if operands[:1] == ["!"]:
            return not self._compare(operands[1:], line)
        match [self._require_known(operand, line) for operand in operands]:
            case ["-z", value]:
                return value == ""
            case ["-n", value] | [value]:
                return value != ""
            case ["-f" | "-d" | "-e" | "-s" | "-x", _]:
                return False
            case [left, "=" | "==", right]:
                return left == right
            case [left, "!=", right]:
                return left != right
            case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as comparison, right]:
                try:
                    return bool(getattr(operator, comparison[1:])(int(left), int(right)))
                except ValueError:
                    rule = f"{left!r} {comparison} {right!r} compares no numbers"
                    raise syntax_refusal(line, rule) from None
        raise syntax_refusal(line, "the test is not read; write the branch out")


def _inner_script(words: list[str]) -> str:
    """Return the text that `eval ...` and `bash -c '...'` read again; "" for another command."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for position, word in enumerate(words[:-2]):
        is_shell = word.rpartition("/")[2] in ("bash", "sh")
        if is_shell and words[position + 1] in ("-c", "-lc", "-ec"):
            return words[position + 2]
    return ""


def _whole_array_name(text: str) -> str | None:
    """Return the name in "${name[@]}" or "$@"; None for another text."""
    match = _WHOLE_ARRAY.fullmatch(text)
    return (match[1] or match[2]) if match else None


def _compute(node: ast.expr) -> int:
    """Return the value of an arithmetic expression.

    Raises:
        ValueError: it holds something else.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return int(_ARITHMETIC[type(node.op)](_compute(node.left), _compute(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_compute(node.operand)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        compare = _COMPARISONS[type(node.ops[0])]
        return int(compare(_compute(node.left), _compute(node.comparators[0])))
    if isinstance(node, ast.IfExp):
        return _compute(node.body if _compute(node.test) else node.orelse)
    raise ValueError("not arithmetic")
