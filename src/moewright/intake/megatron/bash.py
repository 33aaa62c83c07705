"""Launch scripts, read and never run: the part of bash that they are written in.

Assignments, arrays, exports, quotes, continued lines, ${X:-default}, $((arithmetic)), if, case, &&
and ||, `eval` and `bash -c`; loops only to see that they do not run. What only running would tell
(command substitutions, positional parameters, variables set elsewhere) stands in the words as its
name between zero bytes, so that whoever needs the value can say which one is missing.
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
_ASSIGN = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)", re.DOTALL)
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,  # bash divides whole numbers
    ast.Mod: operator.mod,
}
_COMPARED = {
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_CHOICE = re.compile(r"([^?]+)\?([^:?]+):([^:?]+)")  # a ? b : c
_OUTPUT = "output-of-"
_DEEPEST = 8  # evals and bash -c inside each other


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command as bash would start it: the variables that stand before it, its words, and its line
    in the script."""

    words: tuple[str, ...]
    exported: tuple[tuple[str, str], ...]
    line: int


def read_commands(
    text: str, environment: Mapping[str, str], arguments: Sequence[str] = ()
) -> tuple[Command, ...]:
    """Every command of a script that bash would reach, with its words expanded; BadInput names a
    line it cannot read.

    Variables come from the script, then from `environment`; `arguments` are what stands behind the
    script's name.
    """
    found: list[Command] = []
    try:
        for command in _Interpreter(environment, arguments).run(text, first_line=1, depth=0):
            found.append(command)
    except _ScriptExit:
        pass
    return tuple(found)


class _ScriptExit(Exception):
    """The script ends here."""


class _Interpreter:
    """Variables while the script is read from top to bottom; every variable is an array."""

    def __init__(self, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
        self.variables: dict[str, tuple[str, ...]] = {
            name: (value,) for name, value in environment.items()
        }
        self.variables |= {str(place): (value,) for place, value in enumerate(arguments, 1)}
        self.variables |= {
            "#": (str(len(arguments)),),
            "@": tuple(arguments),
            "*": tuple(arguments),
        }
        self.exported: dict[str, None] = {}

    def run(self, text: str, *, first_line: int, depth: int) -> Iterator[Command]:
        if depth > _DEEPEST:
            raise syntax_refusal(first_line, f"starts shells more than {_DEEPEST} deep")
        reader = TokenReader(tuple(tokenize(text, first_line)))
        yield from self._block(reader, (), True, depth)

    def _block(
        self, reader: TokenReader, ends: tuple[str, ...], live: bool, depth: int
    ) -> Iterator[Command]:
        """Statements up to one of the words in `ends`; those of a branch that is not taken are read
        past."""
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
                reader.take()
                yield from self._block(reader, ("}",), live and token.unquoted == "{", depth)
                reader.expect("}")
            else:
                yield from self._list(reader, live, depth)
        if ends:
            raise syntax_refusal(reader.line, f"`{ends[-1]}` is missing")

    def _if(self, reader: TokenReader, live: bool, depth: int) -> Iterator[Command]:
        reader.take()
        done = not live
        while True:
            held = list(self._block(reader, ("then",), not done, depth)) if not done else None
            if held is None:
                list(self._block(reader, ("then",), False, depth))
            taken = not done and self.status
            reader.expect("then")
            yield from self._block(reader, ("elif", "else", "fi"), taken, depth)
            done = done or taken
            word = reader.take().unquoted
            if word == "fi":
                return
            if word == "else":
                yield from self._block(reader, ("fi",), not done, depth)
                reader.expect("fi")
                return

    def _loop(self, reader: TokenReader, live: bool, depth: int) -> Iterator[Command]:
        """A loop that ends before it begins, such as one over arguments that nobody gives; others
        are refused."""
        token, runs = reader.take(), False
        if token.unquoted in ("while", "until"):
            yield from self._block(reader, ("do",), live, depth)
            runs = self.status == (token.unquoted == "while")
        else:
            reader.take()
            while (word := reader.take()).unquoted != "do":
                runs = runs or (
                    word.unquoted != "in" and not word.is_operator and bool(self.fields(word))
                )
        if token.unquoted in ("while", "until"):
            reader.expect("do")
        if live and runs:
            raise syntax_refusal(
                token.line, f"`{token.unquoted}` is not read; write the commands out"
            )
        yield from self._block(reader, ("done",), False, depth)
        reader.expect("done")
        self.status = True

    def _case(self, reader: TokenReader, live: bool, depth: int) -> Iterator[Command]:
        line, word = reader.take().line, reader.take()
        value = self._asked(" ".join(self.fields(word)), line) if live else ""
        reader.expect("in")
        while True:
            while (token := reader.peek()) is not None and (
                token.is_separator or token.text == "("
            ):
                reader.take()
            if (token := reader.take()).unquoted == "esac":
                return
            fits = False
            while token.text != ")" or not token.is_operator:
                fits = fits or (
                    not token.is_operator and fnmatchcase(value, "".join(self.fields(token)))
                )
                token = reader.take()
            yield from self._block(reader, (";;", "esac"), live and fits, depth)
            live = live and not fits

    status = True  # of the last command: what `if`, && and || ask

    def _list(self, reader: TokenReader, live: bool, depth: int) -> Iterator[Command]:
        """Commands joined by && and ||; of a pipe the first counts."""
        wanted = live
        while True:
            words = reader.take_command()
            if wanted and words:
                yield from self._simple(words, depth)
            joint = reader.peek()
            if joint is None or joint.text not in ("&&", "||", "|"):
                return
            reader.take()
            # What reads another's output trains nothing.
            wanted = joint.text != "|" and live and self.status == (joint.text == "&&")

    def _simple(self, words: list[ShellToken], depth: int) -> Iterator[Command]:
        self.status = True
        line = words[0].line
        if words[0].unquoted == "!":
            yield from self._simple(words[1:], depth) if len(words) > 1 else ()
            self.status = not self.status
            return
        if words[0].unquoted in ("[", "[[", "test"):
            self.status = self._test(words)
            return
        if words[0].unquoted == "exit":
            raise _ScriptExit
        if words[0].unquoted in _DECLARING:
            for word in words[1:]:
                if self._assign(word) and words[0].unquoted == "export":
                    self._export(word.text)
            return
        before = []
        while words and (match := _ASSIGN.fullmatch(words[0].text)) and words[0].is_assignment:
            before.append((match[1], self.variables.get(match[1], ())))
            self._assign(words.pop(0))
        if not words:
            return
        own = {name: self._one(name) for name, _ in before}
        exported = {name: self._one(name) for name in self.exported} | own
        for name, value in before:
            self.variables[name] = value
        flat = [field for word in words for field in self.fields(word)]
        if not flat:
            return
        inner = _inner(flat)
        if inner:
            yield from self.run(inner, first_line=line, depth=depth + 1)
        else:
            yield Command(words=tuple(flat), exported=tuple(exported.items()), line=line)

    def _export(self, text: str) -> None:
        self.exported[_NAME.match(text)[0]] = None  # type: ignore[index]

    def _assign(self, word: ShellToken) -> bool:
        """Set what the word assigns; a bare name after `export` keeps its value."""
        match = _ASSIGN.fullmatch(word.text)
        if not match:
            return _NAME.fullmatch(word.text) is not None
        name, more, value = match.groups()
        if value.startswith("(") and value.endswith(")"):
            inside = [token for token in tokenize(value[1:-1], word.line) if not token.is_separator]
            new: tuple[str, ...] = tuple(field for token in inside for field in self.fields(token))
        else:
            new = ("".join(self._parts(value, word.line, quoted=True)),)
        old = self.variables.get(name, ())
        if more and not value.startswith("("):
            new = ((old[0] if old else "") + new[0], *old[1:])
        elif more:
            new = (*old, *new)
        self.variables[name] = new
        return True

    def _one(self, name: str) -> str:
        return next(iter(self.variables.get(name, ())), "")

    def fields(self, word: ShellToken) -> list[str]:
        """The words that bash makes of one: quotes removed, values in, unquoted values split at
        blanks."""
        found: list[str] = []
        current: str | None = None
        for kind, text in word.pieces:
            if kind == "single":
                current = (current or "") + text
                continue
            whole = _array(text) if kind != "bare" or text.startswith("$") else None
            if kind == "double" and whole is not None:
                values = list(self.variables.get(whole, ()))
                if values:
                    found.append((current or "") + values[0])
                    found += values[1:]
                    current = found.pop()
                continue
            parts = list(self._parts(text, word.line, quoted=kind == "double"))
            if kind == "double" or text[0] not in "$`":
                current = (current or "") + "".join(parts)
                continue
            joined = "".join(parts)
            pieces = joined.split()
            if not pieces:
                continue
            if current is not None and joined[:1].isspace():
                found.append(current)
                current = None
            found += [(current or "") + pieces[0], *pieces[1:]]
            current = None if joined[-1].isspace() else found.pop()
        return found if current is None else [*found, current]

    def _parts(self, text: str, line: int, *, quoted: bool) -> Iterator[str]:
        """Text with $-expressions replaced; an assignment's value still has its quotes."""
        for kind, piece in split_expressions(text, line):
            if kind == "text":
                yield piece
            elif kind == "arithmetic":
                yield self._number(piece, line)
            elif kind == "command":
                yield f"\0{_OUTPUT}{next(iter(piece.split()), '')[:40]}\0"
            else:
                yield self._value(piece, line)

    def _value(self, body: str, line: int) -> str:
        """The value of ${body}."""
        match = re.fullmatch(
            r"([A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-])(\[[@*0-9]+\])?(?:(:?[-=+?])(.*))?",
            body,
            re.DOTALL,
        )
        if not match:
            return f"\0{''.join(body[:40].split())}\0"
        name, index, operation, word = match.groups()
        values = self.variables.get(name)
        if values is not None:
            index = "[@]" if name in ("@", "*") else index
            at = 0 if index is None else None if index[1] in "@*" else int(index[1:-1])
            value = " ".join(values) if at is None else values[at] if at < len(values) else ""
        else:
            value = None
        empty = value is None or (value == "" and bool(operation) and operation.startswith(":"))
        if operation and operation.endswith("+"):
            return "" if empty else self._text(word, line)
        if operation and operation[-1] in "-=" and empty:
            value = self._text(word, line)
            if operation.endswith("="):
                self.variables[name] = (value,)
        return f"\0{name}\0" if value is None else value

    def _text(self, word: str, line: int) -> str:
        return (
            "".join("".join(self.fields(token)) for token in tokenize(word, line)) if word else ""
        )

    def _number(self, text: str, line: int) -> str:
        plain = "".join(self._parts(text, line, quoted=True))
        if lacking := UNKNOWN_VALUE.search(plain):
            return lacking[0]
        plain = _NAME.sub(lambda match: self._one(match[0]) or f"\0{match[0]}\0", plain)
        if lacking := UNKNOWN_VALUE.search(plain):
            return lacking[0]
        if match := _CHOICE.fullmatch(plain):
            plain = f"({match[2]}) if ({match[1]}) else ({match[3]})"
        try:
            return str(_computed(ast.parse(plain.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            raise syntax_refusal(line, f"$(({text.strip()[:40]})) is not read") from None

    def _test(self, words: list[ShellToken]) -> bool:
        """[ ... ]: comparisons of texts and numbers, -z, -n, !, and of files none."""
        line, plain = words[0].line, []
        for word in words[1:]:
            fields = self.fields(word)
            plain.append(fields[0] if len(fields) == 1 else " ".join(fields))
        plain = [word for word in plain if word not in ("]", "]]")]
        for joint in ("-o", "||", "-a", "&&"):
            if joint in plain:
                at = plain.index(joint)
                sides = [self._compare(part, line) for part in (plain[:at], plain[at + 1 :])]
                return any(sides) if joint in ("-o", "||") else all(sides)
        return self._compare(plain, line)

    def _asked(self, text: str, line: int) -> str:
        """A text that decides what is run next: variables without value are empty; BadInput for
        what programs print."""
        text = UNKNOWN_VALUE.sub(
            lambda match: match[0] if match[1].startswith(_OUTPUT) else "", text
        )
        if found := UNKNOWN_VALUE.search(text):
            raise syntax_refusal(
                line, f"what follows depends on the {found[1]}, which only running tells"
            )
        return text

    def _compare(self, plain: list[str], line: int) -> bool:
        if plain[:1] == ["!"]:
            return not self._compare(plain[1:], line)
        texts = [self._asked(word, line) for word in plain]
        match texts:
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
            case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as name, right]:
                try:
                    compared: bool = getattr(operator, name[1:])(int(left), int(right))
                except ValueError:
                    raise syntax_refusal(
                        line, f"{left!r} {name} {right!r} compares no numbers"
                    ) from None
                return compared
        raise syntax_refusal(line, "the test is not read; write the branch out")


def _inner(words: list[str]) -> str:
    """The command line that `eval ...` and `bash -c '...'` would read again; "" for another
    command."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for at, word in enumerate(words[:-2]):
        if word.rpartition("/")[2] in ("bash", "sh") and words[at + 1] in ("-c", "-lc", "-ec"):
            return words[at + 2]
    return ""


def _array(text: str) -> str | None:
    match = re.fullmatch(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\[@\]\}|\$(@)", text)
    return (match[1] or match[2]) if match else None


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        number: int = _ARITHMETIC[type(node.op)](_computed(node.left), _computed(node.right))
        return number
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        return int(
            _COMPARED[type(node.ops[0])](_computed(node.left), _computed(node.comparators[0]))
        )
    if isinstance(node, ast.IfExp):
        return _computed(node.body if _computed(node.test) else node.orelse)
    raise ValueError("not arithmetic")
