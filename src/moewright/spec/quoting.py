r"""The border: how text of records enters what others read, quoted as each target quotes.

Text that a stranger may have written is never put into a script, a page or a table as it stands.
Each target is a class of text, which is made by `write` (or `dump`) alone: its template is a
literal of the source, and each value that enters it is quoted, unless it is of the same class.

    >>> Shell.write("cd {}", "my runs")
    cd 'my runs'
    >>> Python.write("path = {}", "a\rimport os")
    path = 'a\rimport os'

Functions that return a target can return nothing else, which the type checker sees.
"""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from html import escape
from pathlib import PurePath
from re import findall, fullmatch, sub
from string import Formatter
from typing import Any, NoReturn, Self
from unicodedata import category

from moewright.spec.errors import BadInput, Reason, escape_controls, has_controls

# A spreadsheet computes a cell that begins with one of these; the wide ones in some countries.
_FORMULA_STARTS = ("=", "+", "@", "-", "＝", "＋", "＠", "－")


class Target(str):
    """Text of one target, in which everything that is not a literal of the source is quoted."""

    __slots__ = ()

    def __new__(cls, *_: object) -> Self:
        """Refuse: text becomes a target only through `write`."""
        raise TypeError(f"{cls.__name__} is made by write()")

    @classmethod
    def _make(cls, text: str) -> Self:
        return str.__new__(cls, text)

    @classmethod
    def write(cls, template: str, /, *values: object) -> Self:
        """Return a literal with values in place of its {}, each quoted."""
        return cls._make(_Writer(cls).vformat(template, values, {}))

    @classmethod
    def mention(cls, template: str, /, value: object) -> Self:
        """Return a literal with a value, quoted; nothing where there is no value."""
        return cls.write(template, value) if value else cls.write("")

    @classmethod
    def concat(cls, parts: Iterable[Self], separator: str = "") -> Self:
        """Return parts with a literal between them."""
        return cls._make(separator.join(parts))

    @classmethod
    def quote(cls, value: object) -> str:
        """Return a value as a constant of the target."""
        raise NotImplementedError


class _Writer(Formatter):
    """str.format with quoted values."""

    def __init__(self, target: type[Target]) -> None:
        self._target = target

    def format_field(self, value: Any, format_spec: str) -> str:
        if type(value) is self._target:
            return str.__str__(value)
        if format_spec:
            if isinstance(value, str):
                raise TypeError(f"text takes no format: {format_spec}")
            value = format(value, format_spec)
        return self._target.quote(value)

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion:
            raise TypeError("a target quotes by itself: no !r")
        return value


def _plain(value: object) -> object:
    """Return an enum's value, and a path as text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    return value


class Script(Target):
    """Lines of a language whose comments begin with # and end with the line."""

    __slots__ = ()

    @classmethod
    def lines(cls, parts: Iterable[Self]) -> Self:
        """Return lines, each with its end."""
        return cls._make("".join(f"{line}\n" for line in parts))

    @classmethod
    def comment(cls, template: str, /, *values: object) -> Self:
        """Return a line of comment, in which values stand as they print."""
        return cls._make(escape_controls(f"# {template.format(*map(_plain, values))}"))


class Shell(Script):
    """Lines of a script for sh, bash or sbatch; values are words."""

    __slots__ = ()

    @classmethod
    def quote(cls, value: object) -> str:
        """Return one word.

        Raises:
            BadInput: it holds control characters, which no POSIX shell can spell.
        """
        text = str(_plain(value))
        if has_controls(text):
            _refuse(text, "holds control characters, which a shell script cannot spell")
        return shlex.quote(text)

    @classmethod
    def words(cls, values: Iterable[object]) -> Self:
        """Return words with spaces between them."""
        return cls._make(" ".join(map(cls.quote, values)))

    @classmethod
    def trust(cls, text: str) -> Self:
        """Return lines of shell that the user wrote to be run, as they are."""
        return cls._make(text)


class Python(Script):
    """Lines of a Python file; values are constants, lists and dicts of them."""

    __slots__ = ()

    @classmethod
    def quote(cls, value: object) -> str:
        """Return an expression that evaluates to a value."""
        value = _plain(value)
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(value, bool | int | float):
            return repr(value)
        if isinstance(value, str):
            return repr(str.__str__(value))
        if isinstance(value, list):
            return f"[{', '.join(map(cls._item, value))}]"
        if isinstance(value, tuple):
            ending = "," if len(value) == 1 else ""
            return f"({', '.join(map(cls._item, value))}{ending})"
        raise TypeError(f"{type(value).__name__} is no constant of Python")

    @classmethod
    def name(cls, text: str) -> Self:
        """Return a name, with dots or without.

        Raises:
            BadInput: it is none, and might be code.
        """
        if not all(map(str.isidentifier, text.split("."))):
            _refuse(text, "is no name of Python")
        return cls._make(text)

    @classmethod
    def number(cls, text: str) -> Self:
        """Return a number as it is spelt.

        Raises:
            BadInput: it is none, and might be code.
        """
        if not fullmatch(r"[-+]?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?", text):
            _refuse(text, "is no number")
        return cls._make(text)

    @classmethod
    def _item(cls, value: object) -> str:
        if isinstance(value, cls):
            return str.__str__(value)
        return cls.quote(value)


def _refuse(text: str, rule: str) -> NoReturn:
    raise BadInput(Reason(field="text of an export", value=json.dumps(text[:60]), rule=rule))


class Yaml(Script):
    """A YAML document in block style."""

    __slots__ = ()

    @classmethod
    def quote(cls, value: object) -> str:
        """Return a scalar; text stands in double quotes."""
        value = _plain(value)
        if isinstance(value, str):
            text = json.dumps(str.__str__(value), ensure_ascii=False)
            return "".join(map(_escape_for_yaml, text))
        if isinstance(value, float) and not math.isfinite(value):
            return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[str(value)]
        return json.dumps(value)

    @classmethod
    def dump(cls, data: Mapping[str, object]) -> Self:
        """Return tables, lists and scalars; text of several lines is a block."""
        return cls._make("".join(f"{line}\n" for line in cls._lines(data, 0)))

    @classmethod
    def _lines(cls, value: object, depth: int) -> Iterator[str]:
        indent = "  " * depth
        if isinstance(value, Mapping):
            for key, inner in value.items():
                name = key if fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", key) else cls.quote(key)
                if isinstance(inner, Mapping | list) and inner:
                    yield f"{indent}{name}:"
                    yield from cls._lines(inner, depth + 1)
                else:
                    yield f"{indent}{name}: {cls.quote(inner)}"
            return
        assert isinstance(value, Sequence)
        for item in value:
            if isinstance(item, Mapping):
                first, *others = cls._lines(item, depth + 1)
                yield f"{indent}- {first.lstrip()}"
                yield from others
            elif _is_block(item):
                yield f"{indent}- |-"
                yield from (f"{indent}    {line}" for line in item.split("\n"))
            else:
                yield f"{indent}- {cls.quote(item)}"


def _is_block(item: object) -> bool:
    """Return whether an item is text of several lines that a block of YAML holds as it is."""
    if not isinstance(item, str) or "\n" not in item or item[:1].isspace():
        return False
    lines = item.split("\n")
    return bool(lines[-1]) and all(map(str.isprintable, lines))


def _escape_for_yaml(letter: str) -> str:
    if letter.isprintable():
        return letter
    code = ord(letter)
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\u{code:04x}"


class Toml(Target):
    """A TOML document."""

    __slots__ = ()

    @classmethod
    def dump(cls, data: Mapping[str, Any]) -> Self:
        """Return tables and values.

        Raises:
            BadInput: a text holds lone surrogates, which TOML has not.
        """
        import tomli_w

        text = tomli_w.dumps(data)
        if any(category(letter) == "Cs" for letter in set(text)):
            _refuse(text, "holds lone surrogates, which TOML cannot spell")
        # Where a letter does not print it stands in quotes, and may be written as its number.
        return cls._make("\n".join(sub(r".", _escape_for_toml, line) for line in text.split("\n")))


def _escape_for_toml(match: Any) -> str:
    letter: str = match[0]
    return _escape_for_yaml(letter)


class Json(Target):
    """JSON in ASCII, as files and standard output hold it."""

    __slots__ = ()

    @classmethod
    def dump(cls, data: object, *, indent: int | None = None) -> Self:
        """Return plain data; NaN and infinite numbers are refused as ValueError."""
        text = json.dumps(data, indent=indent, allow_nan=False)
        return cls._make(text.replace("\x7f", "\\u007f"))


class Html(Target):
    """HTML and SVG; values are text of an element or of a quoted attribute."""

    __slots__ = ()

    @classmethod
    def quote(cls, value: object) -> str:
        """Return text that no element or attribute ends in; line ends stay."""
        lines = str(_plain(value)).split("\n")
        return escape("\n".join(map(escape_controls, lines)))

    @classmethod
    def embed(cls, data: object) -> Self:
        """Return data as JSON that no element of HTML can end: "<" stands as an escape."""
        text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
        return cls._make(
            text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        )

    @classmethod
    def trust(cls, text: str) -> Self:
        """Return a style sheet or a script of the package, as it is."""
        return cls._make(text)


class Markdown(Target):
    """Markdown; values are text of a paragraph or of a table's cell."""

    __slots__ = ()

    @classmethod
    def quote(cls, value: object) -> str:
        """Return text in which nothing is markup."""
        return sub(r"[\\`*\[\]<>|&]", r"\\\g<0>", escape_controls(str(_plain(value))))

    @classmethod
    def code(cls, text: str) -> Self:
        """Return a code span, whose fence is longer than any in the text."""
        plain = escape_controls(text)
        fence = "`" * (1 + max(map(len, findall("`+", plain)), default=0))
        pad = " " if "`" in plain else ""
        return cls._make(f"{fence}{pad}{plain}{pad}{fence}")

    @classmethod
    def row(cls, cells: Iterable[object]) -> Self:
        """Return a row of a table; of Markdown, each bar that would end a cell is quoted."""
        return cls._make(" | ".join(map(cls._cell, cells)))

    @classmethod
    def _cell(cls, value: object) -> str:
        if not isinstance(value, cls):
            return cls.quote(value)
        # A bar ends a cell in code spans too, unless an odd number of backslashes is before it.
        return sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", str.__str__(value))


class Csv(Target):
    """Comma-separated values, of which a spreadsheet computes none."""

    __slots__ = ()

    @classmethod
    def quote(cls, value: object) -> str:
        """Return the text of a cell.

        Numbers and percentages stay as they are, and so does a dash for what is not known.
        """
        cell = escape_controls(str(_plain(value)))
        if not cell.lstrip().startswith(_FORMULA_STARTS) or cell == "-":
            return cell
        try:
            float(cell.removesuffix("%"))
        except ValueError:
            return f"'{cell}"
        return cell

    @classmethod
    def dump(cls, rows: Iterable[Iterable[object]]) -> Self:
        """Return rows, one a line."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows([cls.quote(cell) for cell in row] for row in rows)
        return cls._make(stream.getvalue())
