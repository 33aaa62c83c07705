"""Files of nouns: JSON and TOML, refused in one line when malformed, replaced whole when
written."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tomli_w

from moewright.codec.data import FloatPolicy, from_data, to_data
from moewright.codec.names import closest_match
from moewright.spec.errors import BadInput, Reason

T = TypeVar("T")


class _Malformed(ValueError):
    """A fault json itself lets pass."""


def read_json(cls: type[T], path: Path) -> T:
    """The noun in a JSON file; BadInput names the file, the key, the rule and the nearest legal
    value."""
    return from_data(cls, read_json_data(path), where=str(path))


def read_toml(cls: type[T], path: Path) -> T:
    """The noun in a TOML file; BadInput as for read_json."""
    return from_data(cls, read_toml_data(path), where=str(path))


def write_json(path: Path, record: object) -> None:
    """Write a noun as JSON; a reader sees the old file or the new one, never a part."""
    write_text(path, json.dumps(to_data(record), indent=1, allow_nan=False) + "\n")


def write_toml(path: Path, record: object) -> None:
    """Write a noun as TOML (which has no null: nouns with a None in them go to JSON), replaced
    whole."""
    write_text(path, tomli_w.dumps(to_data(record)))


def read_json_data(path: Path) -> Any:
    """Plain data of a JSON file; repeated keys, NaN, Infinity, bytes not UTF-8, endless nesting are
    refused."""
    return parse_json(read_text(path), where=str(path))


def parse_json(text: str, *, where: str, floats: FloatPolicy = FloatPolicy.FINITE) -> Any:
    """Plain data of JSON text, as strict as json_data; MEASURED lets NaN and Infinity pass."""
    try:
        if floats is FloatPolicy.NON_FINITE:
            return json.loads(text, object_pairs_hook=_unique)
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        rule = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except _Malformed as error:
        rule = str(error)
    except ValueError:  # an integer beyond the interpreter's digit limit
        rule = "holds a number with too many digits"
    except RecursionError:
        rule = "is nested too deeply"
    raise BadInput(Reason(field=where, rule=rule))


def read_toml_data(path: Path) -> dict[str, Any]:
    """Plain data of a TOML file."""
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        rule = f"is not TOML: {error}"
    except ValueError:
        rule = "holds a number with too many digits"
    except RecursionError:
        rule = "is nested too deeply"
    raise BadInput(Reason(field=str(path), rule=rule))


def write_text(path: Path, text: str) -> None:
    """Write a text file through a temporary neighbour and os.replace; folders are made. BadInput
    when it cannot be."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name[:64]}.", delete=False
        ) as stream:
            temporary = Path(stream.name)
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o644)  # temporary files are born private
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise BadInput(
            Reason(field=str(path), rule=f"cannot be written: {error.strerror or error}")
        ) from None


def read_text(path: Path) -> str:
    """A UTF-8 text file, whole; BadInput for a missing file (nearest name beside it), a folder,
    other bytes."""
    try:
        if path.is_dir():
            rule = "is a folder, a file is wanted"
        elif not path.exists():
            beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            close = closest_match(path.name, beside)
            raise BadInput(
                Reason(
                    field=str(path),
                    rule="no such file",
                    nearest=str(path.with_name(close)) if close else "",
                )
            )
        elif not path.is_file():
            rule = "is not a regular file"
        else:
            return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        rule = f"is not text in UTF-8 (byte {error.start})"
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise BadInput(Reason(field=str(path), rule=rule))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _Malformed(f"key {json.dumps(repeated)} stands twice")
    return table


def _no_constant(name: str) -> NoReturn:
    raise _Malformed(f"holds {name}, which is not JSON")


def read_complete_lines(path: Path) -> list[str]:
    """The lines of a file that have their end: whoever wrote what stands behind them was killed
    over it. [] of none."""
    return read_text(path).split("\n")[:-1] if path.exists() else []


def append_line(path: Path, line: str) -> None:
    """Write a line behind the whole ones, over a torn one; it is on disk on return."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write(line.encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
