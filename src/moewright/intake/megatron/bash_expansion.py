"""The variables of a script, and what bash makes of words, expressions and arithmetic."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from moewright.intake.megatron.bash_patterns import quote_pattern, replace_pattern, strip_pattern
from moewright.intake.megatron.bash_tokens import (
    ShellToken,
    read_whole,
    split_expressions,
    split_replacement,
    syntax_refusal,
    tokenize,
)
from moewright.intake.megatron.unknown import (
    UNKNOWN_VALUE,
    UnknownValue,
    find_unknown,
    name_unknown,
)

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables that a launcher or a login sets, and no file of a job.
_GIVEN = re.compile(
    r"(SLURM|PBS|OMPI|PMI|PALS|LSB|FLUX|JOB_COMPLETION)_\w+|HOME|USER|PWD|PATH|HOSTNAME|SHELL|TMPDIR"
    r"|PYTHONPATH|LD_LIBRARY_PATH|RANDOM|SECONDS|UID|LOGNAME|IFS|OPTARG|OPTIND|BASH_\w+|FUNCNAME|LINENO"
    r"|(LOCAL_|NODE_|GROUP_)?RANK"
)
# A value that is a default of another variable, and a variable that a condition asks for.
_DEFAULTED = re.compile(r"\"?\$\{(\w+):?-[^{}]*\}\"?")
_ASKED = re.compile(r"\$\{?[#!]?(\w+|[#@*])")
_ASSIGNMENT = re.compile(
    r"([A-Za-z_][A-Za-z0-9_]*)(?:\[((?:[^][]|\[[^]]*\])*)\])?(\+?)=(.*)", re.DOTALL
)
_ARRAY_KEYS = re.compile(r"\$\{!([A-Za-z_][A-Za-z0-9_]*)\[@\]\}")
_WHOLE_ARRAY = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\[@\](:[^}]*)?\}|\$(@)|\$\{(@)(:[^}]*)?\}")
_PARAMETER = re.compile(
    r"(!|\#)?([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-])"  # its name, ! for what it names, # length
    r"(?:\[((?:[^][]|\[[^]]*\])*)\])?"  # which elements of an array
    r"(?:(:?[-=+?]|:|%%?|\#\#?|//|/[%\#]?|\^\^?|,,?)(.*))?",  # what is done with the value
    re.DOTALL,
)
_TERNARY = re.compile(r"([^?]+)\?([^:?]+):([^:?]+)")  # a ? b : c
_UPDATE = re.compile(
    r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*(\*\*|<<|>>|[-+*/%&|^])?=(?!=)\s*(.+)", re.DOTALL
)
_STEP = re.compile(r"\s*(?:(\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(\+\+|--))\s*")
_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,  # bash divides whole numbers
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_MAX_POWER = 64
# What Linux takes as one argument of a program (MAX_ARG_STRLEN), and as all of them (a quarter of
# the usual stack); variables that double themselves stop here.
_MAX_WORD_LENGTH = 1 << 17
_MAX_WORDS_LENGTH = 1 << 21
_MAX_WORDS = 100_000


class ShellVariables:
    """A script's variables; each is an array, and `tables` are the associative ones.

    `run_command` returns what the commands of a $(...) print, or None where only running tells.
    Those in `constants` keep their values, whatever the script assigns to them. `unread_origin` is
    what may have set those that have no value: a file that is not here. `assumed_unset` are those
    that were taken to have none all the same, as by ${name:-default}, with that origin. `origins`
    are the variables that have a default in the place of another's value, with that other one, and
    `deciding` those without a value of their own that the last condition asked for.
    """

    def __init__(self, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
        self.arrays: dict[str, tuple[str, ...]] = {
            name: (value,) for name, value in environment.items()
        }
        # The version of bash that scripts are read as: what they ask for is never newer.
        self.arrays |= {"BASH_VERSION": ("5.2.0",), "BASH_VERSINFO": ("5", "2", "0")}
        self.tables: dict[str, dict[str, str]] = {}
        self.constants: Mapping[str, str] = {}
        self.unread_origin = ""
        self.assumed_unset: dict[str, str] = {}
        self.origins: dict[str, str] = {}
        self.deciding: tuple[str, ...] = ()
        self.run_command: Callable[[str, int], str | None] = lambda text, line: None
        self.set_arguments(arguments)

    def copy(self) -> ShellVariables:
        """Return variables that a subshell may change."""
        other = ShellVariables({}, ())
        other.arrays = dict(self.arrays)
        other.tables = {name: dict(table) for name, table in self.tables.items()}
        other.run_command = self.run_command
        other.constants = self.constants
        other.unread_origin = self.unread_origin
        other.assumed_unset = self.assumed_unset
        other.origins = dict(self.origins)
        return other

    def set_constants(self, values: Mapping[str, str]) -> None:
        """Set variables that no assignment changes."""
        self.constants = values
        self.arrays |= {name: (value,) for name, value in values.items()}

    def set_arguments(self, arguments: Sequence[str]) -> None:
        """Set the positional parameters."""
        self.arrays = {name: value for name, value in self.arrays.items() if not name.isdigit()}
        self.arrays |= {str(number): (value,) for number, value in enumerate(arguments, 1)}
        self.arrays |= {
            "#": (str(len(arguments)),),
            "@": tuple(arguments),
            "*": tuple(arguments),
        }

    def first(self, name: str) -> str:
        return next(iter(self.arrays.get(name, ())), "")

    def assign(self, word: ShellToken, *, is_table: bool = False) -> str:
        """Set what the word assigns; return the name, "" where it is neither name nor assignment.

        A bare name, as after `export`, keeps its value.
        """
        match = _ASSIGNMENT.fullmatch(word.text)
        if not match:
            return word.text if NAME.fullmatch(word.text) else ""
        name, key, appends, text = match.groups()
        if name in self.constants:
            return name
        if text.startswith("(") and text.endswith(")"):
            self._assign_array(name, text[1:-1], word.line, appends=bool(appends), table=is_table)
            return name
        value = name_unknown(self.substitute(text, word.line), name)
        source = _DEFAULTED.fullmatch(text)
        self.origins.pop(name, None)
        if source is not None and not self.first(source[1]):
            self.origins[name] = source[1]
        if key is not None:
            self._assign_element(name, key, value, word.line, appends=bool(appends))
            return name
        old = self._kept(name, appends=bool(appends))
        self.arrays[name] = ("".join(old[:1]) + value, *old[1:])
        return name

    def ask(self, text: str) -> None:
        """Take a condition's text: which of its variables a user may set to another value."""
        names = dict.fromkeys(_ASKED.findall(text))
        settable = (self.origins.get(name, "" if self.first(name) else name) for name in names)
        self.deciding = tuple(filter(None, settable)) or self.deciding

    def _assign_array(self, name: str, text: str, line: int, *, appends: bool, table: bool) -> None:
        tokens = [token for token in tokenize(text, line) if not token.is_separator]
        if table or name in self.tables:
            entries = self.tables.get(name, {}) if appends else {}
            for token in tokens:
                key, _, value = token.text.partition("]=")
                entries[self.substitute(key.lstrip("["), line)] = self.substitute(value, line)
            self.tables[name] = dict(entries)
            return
        items = tuple(name_unknown(item, name) for token in tokens for item in self.expand(token))
        old = self._kept(name, appends=bool(appends))
        self.arrays[name] = (*old, *items)

    def _kept(self, name: str, *, appends: bool) -> tuple[str, ...]:
        """Return the items that an assignment leaves: those of +=, which come first."""
        return self.arrays.get(name, ()) if appends else ()

    def _assign_element(self, name: str, key: str, value: str, line: int, *, appends: bool) -> None:
        if name in self.tables:
            key = self.substitute(key, line)
            old = self.tables[name].get(key, "") if appends else ""
            self.tables[name][key] = old + value
            return
        place = self.integer(key, line)
        if place > _MAX_WORDS:
            raise syntax_refusal(line, f"{name}[{place}]: too many elements")
        values = list(self.arrays.get(name, ()))
        values += [""] * (place + 1 - len(values))
        values[place] = (values[place] if appends else "") + value
        self.arrays[name] = tuple(values)

    def expand(self, word: ShellToken) -> list[str]:
        """Return the words that bash makes of one.

        Quotes are removed, expressions replaced by their values, unquoted values split at blanks,
        and braces multiplied.
        """
        words: list[str] = []
        current: str | None = None
        for quoting, text in word.pieces:
            if quoting == "single":
                current = (current or "") + text
                continue
            array = self._whole_array(text, word.line)
            if quoting == "double" and array is not None:
                if array:
                    words += [(current or "") + array[0], *array[1:]]
                    current = words.pop()
                continue
            value = self.substitute(text, word.line, quoted=quoting == "double")
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
        words = words if current is None else [*words, current]
        if word.unquoted and "{" in word.unquoted and "$" not in word.unquoted:
            expanded = (text for item in words for text in _expand_braces(item))
            words = list(islice(expanded, _MAX_WORDS + 1))
        if len(words) > _MAX_WORDS or sum(map(len, words)) > _MAX_WORDS_LENGTH:
            raise syntax_refusal(word.line, f"{word.text[:40]} stands for too many words")
        return words

    def pattern(self, word: ShellToken) -> str:
        """Return a word as a glob pattern in which quoted parts stand for themselves."""
        parts = []
        for quoting, text in word.pieces:
            value = text if quoting == "single" else self.substitute(text, word.line)
            if quoting != "bare":
                value = quote_pattern(value)
            parts.append(value)
        pattern = "".join(parts)
        if re.search(r"[@!+*?]\(", pattern):
            raise syntax_refusal(word.line, f"the pattern {pattern[:40]} is not read")
        return pattern

    def substitute(self, text: str, line: int, *, quoted: bool = False) -> str:
        """Return the text with its expressions replaced; an assigned value's quotes go too."""
        parts = []
        length = 0
        for kind, piece in split_expressions(text, line, '"' if quoted else ""):
            if kind == "text":
                parts.append(piece)
            elif kind == "arithmetic":
                parts.append(self.arithmetic(piece, line))
            elif kind == "command":
                parts.append(self._command_output(piece, line))
            else:
                parts.append(self._parameter(piece, line))
            length += len(parts[-1])
            if length > _MAX_WORD_LENGTH:
                rule = f"a word of more than {_MAX_WORD_LENGTH} characters is not read"
                raise syntax_refusal(line, rule)
        return "".join(parts)

    def _command_output(self, text: str, line: int) -> str:
        output = self.run_command(text, line)
        if output is not None:
            return output
        program = next(iter(text.split()), "")[:40]
        return UnknownValue(origin=f"what {program} prints").mark()

    def absent(self, name: str) -> UnknownValue:
        """Return what is known of a variable that has no value here."""
        is_given = _GIVEN.fullmatch(name) or not NAME.fullmatch(name)
        return UnknownValue(name=name, origin="" if is_given else self.unread_origin)

    def assume_unset(self, name: str) -> None:
        """Take a variable to have no value, though a file that is not here may set it."""
        if self.absent(name).origin:
            self.assumed_unset[name] = self.unread_origin

    def _whole_array(self, text: str, line: int) -> list[str] | None:
        """Return the elements that "${name[@]}", its keys, "$@" or a range of them stand for."""
        if keys := _ARRAY_KEYS.fullmatch(text):
            return self._keys(keys[1])
        match = _WHOLE_ARRAY.fullmatch(text)
        if not match:
            return None
        name = match[1] or match[3] or match[4]
        values = list(self.arrays.get(name, ()))
        if name in self.tables:
            values = list(self.tables[name].values())
        elif name in self.constants:
            values = self.constants[name].split()
        elif name not in self.arrays and self.absent(name).origin:
            values = [self.absent(name).mark()]
        bounds = match[2] or match[5]
        return self._slice_array(name, values, bounds[1:], line) if bounds else values

    def _keys(self, name: str) -> list[str]:
        """Return the keys of a table or the places of an array."""
        table = self.tables.get(name)
        keys = table if table is not None else range(len(self.arrays.get(name, ())))
        return [str(key) for key in keys]

    def _slice_array(self, name: str, values: list[str], bounds: str, line: int) -> list[str]:
        first, _, count = bounds.partition(":")
        begin = self.integer(first, line)
        if name == "@":  # counts from $0
            begin = max(0, begin - 1)
        return values[begin : begin + self.integer(count, line) if count else None]

    def _parameter(self, body: str, line: int) -> str:
        """Return the value of ${body}."""
        match = _PARAMETER.fullmatch(body)
        if not match:
            return UnknownValue(name="".join(body[:40].split())).mark()
        mark, name, index, operation, word = match.groups()
        if mark == "#":
            return self._length(name, index, line)
        if mark == "!":
            if index is not None and index in "@*":
                return " ".join(self._keys(name))
            name, index = self.first(name), None
            if unknown := find_unknown(name):
                return unknown.mark()
        value = self._element(name, index, line)
        if not operation:
            return self._mark_absent(name, value)
        if operation[-1] in "-=+?":
            return self._default(name, value, operation, word, line)
        if value is None:
            return self.absent(name).mark()
        if UNKNOWN_VALUE.search(value):
            return value
        return self._transform(value, operation, word, line)

    def _default(self, name: str, value: str | None, operation: str, word: str, line: int) -> str:
        is_empty = value is None or (value == "" and operation.startswith(":"))
        if value is None and not operation.endswith("?"):
            self.assume_unset(name)
        if operation.endswith("+"):
            return "" if is_empty else self._text(word, line)
        if operation[-1] in "-=" and is_empty:
            value = self._text(word, line)
            if operation.endswith("="):
                self.arrays[name] = (value,)
        return self._mark_absent(name, value)

    def _mark_absent(self, name: str, value: str | None) -> str:
        return self.absent(name).mark() if value is None else value

    def _transform(self, value: str, operation: str, word: str, line: int) -> str:
        """Return a part of a value, or the value with something replaced."""
        if operation == ":":
            first, _, count = word.partition(":")
            begin = self.integer(first, line)
            begin += len(value) if begin < 0 else 0
            if begin < 0:
                return ""
            end = None
            if count:
                length = self.integer(count, line)
                end = begin + length if length >= 0 else len(value) + length
            return value[begin:end]
        if operation[0] == "^":
            return value.upper() if operation == "^^" else value[:1].upper() + value[1:]
        if operation[0] == ",":
            return value.lower() if operation == ",," else value[:1].lower() + value[1:]
        if operation[0] == "/":
            pattern, replacement = split_replacement(word, line)
            by = "".join(
                text if quoting == "single" else self.substitute(text, line)
                for quoting, text in replacement.pieces
            )
            return replace_pattern(value, self.pattern(pattern), by, operation)
        return strip_pattern(value, self.pattern(read_whole(word, line)), operation)

    def _length(self, name: str, index: str | None, line: int) -> str:
        if index is not None and index in "@*":
            elements = self.tables.get(name, self.arrays.get(name, ()))
            if unknown := find_unknown("".join(elements)):  # it may stand for several
                return unknown.mark()
            if name not in self.arrays and name not in self.tables and self.absent(name).origin:
                return self.absent(name).mark()
            return str(len(elements))
        value = self._element(name, index, line)
        if value is None or UNKNOWN_VALUE.search(value):
            return (find_unknown(value or "") or self.absent(name)).mark()
        return str(len(value))

    def _element(self, name: str, index: str | None, line: int) -> str | None:
        """Return an element of a variable, or all of them for @ and *; None if it is not set."""
        if name in self.tables:
            table = self.tables[name]
            if index is not None and index in "@*":
                return " ".join(table.values())
            return table.get(self.substitute(index or "0", line), "")
        values = self.arrays.get(name)
        if values is None:
            return None
        if name in ("@", "*") or (index is not None and index in "@*"):
            is_star = "*" in (name, index)
            return (self.first("IFS")[:1] if is_star and "IFS" in self.arrays else " ").join(values)
        place = self.integer(index, line) if index is not None else 0
        if -len(values) <= place < len(values):
            return values[place]
        unknown = find_unknown("".join(values))  # it may stand for several
        return "" if unknown is None else unknown.mark()

    def _text(self, text: str, line: int) -> str:
        return " ".join(
            word for token in tokenize(text, line) for word in self.expand(token) or [""]
        )

    def integer(self, text: str, line: int) -> int:
        """Return the value of arithmetic that must be known.

        Raises:
            BadInput: it is not.
        """
        value = self.arithmetic(text, line)
        if UNKNOWN_VALUE.search(value):
            raise syntax_refusal(line, f"{text[:40]} is only known when the script runs")
        return int(value)

    def arithmetic(self, text: str, line: int) -> str:
        """Return the value of an arithmetic expression, with the changes that it makes."""
        value = "0"
        for part in text.split(",") if "," in text and "(" not in text else [text]:
            value = self._arithmetic_part(part, line)
        return value

    def _arithmetic_part(self, text: str, line: int) -> str:
        if step := _STEP.fullmatch(text):
            name = step[2] or step[3]
            old = self._arithmetic_part(name, line)
            if UNKNOWN_VALUE.search(old):
                self.arrays[name] = (old,)
                return old
            change = 1 if (step[1] or step[4]) == "++" else -1
            self.arrays[name] = (str(int(old) + change),)
            return self.first(name) if step[1] else old
        if update := _UPDATE.fullmatch(text):
            name, sign, right = update.groups()
            value = self._arithmetic_part(f"{name} {sign} ({right})" if sign else right, line)
            self.arrays[name] = (value,)
            return value
        expression = self.substitute(text, line)
        if unknown := UNKNOWN_VALUE.search(expression):
            return unknown[0]
        expression = NAME.sub(lambda match: self._number(match[0], line), expression)
        if unknown := UNKNOWN_VALUE.search(expression):
            return unknown[0]
        if match := _TERNARY.fullmatch(expression):
            expression = f"({match[2]}) if ({match[1]}) else ({match[3]})"
        expression = expression.replace("&&", " and ").replace("||", " or ")
        expression = re.sub(r"!(?!=)", " not ", expression)
        try:
            return str(_compute(ast.parse(expression.strip() or "0", mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            raise syntax_refusal(line, f"$(({text.strip()[:40]})) is not read") from None

    def _number(self, name: str, line: int) -> str:
        """Return the value of a name inside arithmetic, where a value may be an expression."""
        value = self.first(name).strip()
        if not value:
            return self.absent(name).mark()
        if re.fullmatch(r"-?\d+", value) or UNKNOWN_VALUE.search(value):
            return f"({value})" if value.startswith("-") else value
        return (
            f"({self._arithmetic_part(value, line)})" if value != name else self.absent(name).mark()
        )


def _expand_braces(text: str) -> Iterator[str]:
    """Yield the words of {a,b} and {1..4}."""
    match = re.search(r"\{([^{}]*)\}", text)
    if not match:
        yield text
        return
    span = re.fullmatch(r"(-?\d+)\.\.(-?\d+)", match[1])
    if span:
        first, last = int(span[1]), int(span[2])
        step = 1 if last >= first else -1
        if abs(last - first) > 10_000:
            yield text
            return
        items = [str(number) for number in range(first, last + step, step)]
    elif "," in match[1]:
        items = match[1].split(",")
    else:
        yield text
        return
    head, tail = text[: match.start()], text[match.end() :]
    for item in items:
        yield from _expand_braces(head + item + tail)


def _wrap_64(value: int) -> int:
    """Return what 64 bits keep of a number, as bash computes."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _compute(node: ast.expr) -> int:
    """Return the value of an arithmetic expression.

    Raises:
        ValueError: it holds something else.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        power = _compute(node.right)
        if not 0 <= power <= _MAX_POWER:
            raise ValueError("too large")
        return _wrap_64(_compute(node.left) ** power)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _compute(node.left), _compute(node.right)
        if isinstance(node.op, ast.Div | ast.FloorDiv):  # towards zero
            return (abs(left) // abs(right)) * (1 if (left < 0) == (right < 0) else -1)
        if isinstance(node.op, ast.LShift) and right >= _MAX_POWER:
            raise ValueError("too large")
        return _wrap_64(_ARITHMETIC[type(node.op)](left, right))
    if isinstance(node, ast.UnaryOp):
        value = _compute(node.operand)
        if isinstance(node.op, ast.Not):
            return int(not value)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BoolOp):
        values = [bool(_compute(value)) for value in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        compare = _COMPARISONS[type(node.ops[0])]
        return int(compare(_compute(node.left), _compute(node.comparators[0])))
    if isinstance(node, ast.IfExp):
        return _compute(node.body if _compute(node.test) else node.orelse)
    raise ValueError("not arithmetic")
