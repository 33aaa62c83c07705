"""Files of records in JSON and TOML: malformed ones are refused, written ones replaced whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tomli_w

from moewright.codec.data import FloatPolicy, from_data, to_data
from moewright.codec.data_paths import WeightedPath, format_data_paths, parse_data_paths
from moewright.codec.foreign import budget, read_apart
from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match
from moewright.spec.plan import Plan
from moewright.spec.units import GIB, format_bytes

# Where the shards of a stream of tokens lie: `<prefix>-00000`, `<prefix>-00001` and so on.
#
# `<prefix>.shards.json` says how many there are. Megatron-LM knows pairs of files alone: for it
# each shard is a corpus of a blend. Without weights it would stop after one pass over the blend,
# hence each has its share of the tokens as its weight.


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardList:
    """The content of `<prefix>.shards.json`."""

    shards: int
    documents: int
    tokens: int


def shard_list_path(prefix: Path) -> Path:
    """Return the file that says how many shards a stream has."""
    return prefix.with_name(f"{prefix.name}.shards.json")


def shard_prefix(prefix: Path, number: int) -> Path:
    """Return the prefix of the pair of a shard, counted from 0."""
    return prefix.with_name(f"{prefix.name}-{number:05d}")


def name_shards(plan: Plan) -> Plan:
    """Return a plan whose data names every shard that lies here as a corpus of its own.

    Raises:
        BadInput: a shard is missing, or the list of them is damaged.
    """
    data = plan.workload.data
    train, heldout = (_expand(text) for text in (data.train, data.heldout))
    data = replace(data, train=train, heldout=heldout)
    return replace(plan, workload=replace(plan.workload, data=data))


def _expand(text: str) -> str:
    parts = parse_data_paths(text)
    if not any(shard_list_path(Path(part.path)).is_file() for part in parts):
        return text
    return format_data_paths([shard for part in parts for shard in _split(part)])


def _split(part: WeightedPath) -> Iterator[WeightedPath]:
    """Yield the shards of a corpus, each with its part of the corpus's share."""
    prefix = Path(part.path)
    path = shard_list_path(prefix)
    if not path.is_file():
        yield replace(part, weight=f"{part.share:.6g}")
        return
    listed = read_json(ShardList, path)
    prefixes = [shard_prefix(prefix, number) for number in range(listed.shards)]
    try:
        sizes = [Path(f"{shard}.bin").stat().st_size for shard in prefixes]
    except OSError as error:
        rule = f"names {listed.shards} shards, of which one is missing: {error.filename}"
        raise BadInput(Reason(field=str(path), rule=rule)) from None
    for shard, size in zip(prefixes, sizes, strict=True):
        share = part.share * size / max(1, sum(sizes))
        yield WeightedPath(path=str(shard), share=share, weight=f"{share:.6g}")


# The name of a model by its folder or file.


def name_model(path: Path) -> str:
    """Return the name of a model's folder or file, or its id in the hub's cache.

    There Qwen/Qwen3-30B-A3B lies in models--Qwen--Qwen3-30B-A3B/snapshots/<revision>. A
    config.json is named by its folder, a file of another name by its own.
    """
    if path.is_file():
        if path.name != "config.json":
            return path.stem
        path = path.parent  # not of the file behind it: the cache links to blobs
    folder = path.resolve()
    model = folder.parent.parent.name
    if folder.parent.name == "snapshots" and model.startswith("models--"):
        return model.removeprefix("models--").replace("--", "/")
    return folder.name


LARGEST_TEXT_BYTES = GIB
_CHUNK_BYTES = 1 << 24  # large against the cost of a read, small against memory
# TOML has keys whose every part is looked up from the first one, so that time and memory can grow
# with the square of a text: what is not short is read at the border for foreign input.
_SHORT_TOML_CHARS = 1 << 13
_MOST_TOML_CHARS = 1 << 22
_MOST_LEVELS = 200
# What a file system without locks says.
_WITHOUT_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)
# Processes that may write one file at the same time.
_MAX_WRITERS = 100

T = TypeVar("T")


class _Malformed(ValueError):
    """A fault in JSON text that the json module lets pass."""


def read_json(cls: type[T], path: Path) -> T:
    """Return the record of type `cls` in a JSON file.

    Raises:
        BadInput: It names the file, the key, the rule and the nearest legal value.
    """
    return from_data(cls, read_json_data(path), where=str(path))


def read_toml(cls: type[T], path: Path) -> T:
    """Return the record of type `cls` in a TOML file; raises BadInput like read_json."""
    return from_data(cls, read_toml_data(path), where=str(path))


def write_json(path: Path, record: object) -> None:
    """Write a record as JSON; a reader sees the old file or the new one, never a part."""
    write_text(path, json.dumps(to_data(record), indent=1, allow_nan=False) + "\n")


def write_toml(path: Path, record: object) -> None:
    """Write a record as TOML and replace the file whole.

    TOML has no null: records that hold None go to JSON.
    """
    write_text(path, tomli_w.dumps(to_data(record)))


def read_json_data(path: Path, floats: FloatPolicy = FloatPolicy.FINITE) -> Any:
    """Return the plain data of a JSON file.

    Repeated keys, NaN, Infinity, bytes that are not UTF-8 and endless nesting are refused;
    FloatPolicy.NON_FINITE lets NaN and Infinity pass.
    """
    return parse_json(read_text(path), where=str(path), floats=floats)


def parse_json(text: str, *, where: str, floats: FloatPolicy = FloatPolicy.FINITE) -> Any:
    """Return the plain data of JSON text, as strictly as read_json_data.

    FloatPolicy.NON_FINITE lets NaN and Infinity pass.
    """
    try:
        if floats is FloatPolicy.NON_FINITE:
            return json.loads(text, object_pairs_hook=_unique_keys)
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        rule = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except _Malformed as error:
        rule = str(error)
    except ValueError:  # an integer beyond the interpreter's digit limit
        rule = "holds a number with too many digits"
    except RecursionError:
        rule = "is nested too deeply"
    raise BadInput(Reason(field=where, rule=rule))


def as_table(data: Any) -> dict[str, Any]:
    """Return data of somebody else's JSON where it is a table; else an empty one."""
    return data if isinstance(data, dict) else {}


def read_toml_data(path: Path) -> dict[str, Any]:
    """Return the plain data of a TOML file."""
    return parse_toml(read_text(path), where=str(path))


def parse_toml(text: str, *, where: str) -> dict[str, Any]:
    """Return the plain data of TOML text; `where` names it in the reasons of BadInput."""
    if len(text) > _MOST_TOML_CHARS:
        rule = f"has more than the {_MOST_TOML_CHARS:,} characters of TOML that are read"
        raise BadInput(Reason(field=where, rule=rule))
    if len(text) > _SHORT_TOML_CHARS:
        return _parse_toml_apart(text, where)
    return _parse_toml(text, where)


@read_apart
def _parse_toml_apart(text: str, where: str) -> dict[str, Any]:
    with budget(where, len(text)):
        return _parse_toml(text, where)


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        rule = f"is not TOML: {error}"
    except ValueError:
        rule = "holds a number with too many digits"
    except RecursionError:
        rule = "is nested too deeply"
    else:
        if _is_shallow(data):
            return data
        rule = "is nested too deeply"
    raise BadInput(Reason(field=where, rule=rule))


def _is_shallow(data: dict[str, Any]) -> bool:
    """Tell whether nothing is nested deeper than who walks through it may follow."""
    level: list[Any] = [data]
    for _ in range(_MOST_LEVELS):
        level = [
            value
            for parent in level
            for value in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(value, dict | list)
        ]
        if not level:
            return True
    return False


def write_text(path: Path, text: str) -> None:
    """Write a text file through a temporary file beside it and os.replace, and make its folders.

    What a killed process left of its temporary file is taken over by the next one.

    Raises:
        BadInput: The file cannot be written.
    """
    write_pieces(path, (text.encode(),))


def write_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file as write_text does, piece by piece; what they raise leaves no file.

    Raises:
        BadInput: The file cannot be written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = _open_temporary(path)
        with os.fdopen(handle, "wb") as stream:
            stream.truncate()
            stream.writelines(pieces)
            stream.flush()
            os.fsync(stream.fileno())
            os.fchmod(stream.fileno(), 0o644)
            temporary.replace(path)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise BadInput(
            Reason(field=str(path), rule=f"cannot be written: {error.strerror or error}")
        ) from None


def _open_temporary(path: Path) -> tuple[int, Path]:
    """Open the first temporary file of a path that no live process writes, and lock it.

    The kernel drops the lock of a process that ends, however it ends.
    """
    if not path.name:  # "", "." and "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    for number in range(_MAX_WRITERS):
        temporary = path.with_name(f".{path.name[:64]}.{number}.part")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(temporary, flags, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last writer may have put it in its place before it was locked here.
            if os.path.samestat(os.fstat(handle), os.lstat(temporary)):
                return handle, temporary
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:
            if error.errno in _WITHOUT_LOCKS:
                return handle, temporary
            os.close(handle)
            raise
        os.close(handle)
    raise OSError(errno.EBUSY, f"{_MAX_WRITERS} processes write it")


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 text file.

    Raises:
        BadInput: It cannot be read (see read_bytes), or is not UTF-8.
    """
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        rule = f"is not text in UTF-8 (byte {error.start})"
    raise BadInput(Reason(field=str(path), rule=rule))


def read_bytes(path: Path, *, limit_bytes: int = LARGEST_TEXT_BYTES) -> bytes:
    """Return the content of a regular file.

    A device, a pipe or a socket is never opened, and no more than the limit is ever read.

    Raises:
        BadInput: It is missing (the nearest name in its folder is given), a folder, no regular
            file, larger than `limit_bytes`, or cannot be read.
    """
    content = bytearray()
    for piece in read_pieces(path):
        content += piece
        if len(content) > limit_bytes:
            rule = f"is larger than the {format_bytes(limit_bytes)} that are read"
            raise BadInput(Reason(field=str(path), rule=rule))
    return bytes(content)


def read_part(path: Path, size: int, *, begin: int = 0) -> bytes:
    """Return so many bytes of a regular file from a place on, fewer where it ends; -1: all.

    Raises:
        BadInput: it cannot be read (see read_pieces).
    """
    return next(read_pieces(path, piece_bytes=size, begin=begin), b"")


def read_pieces(path: Path, *, piece_bytes: int = _CHUNK_BYTES, begin: int = 0) -> Iterator[bytes]:
    """Yield the content of a regular file from a place on in pieces, none of them empty.

    Raises:
        BadInput: It is missing (the nearest name in its folder is given), a folder, no regular
            file, or cannot be read.
    """
    try:
        if path.is_dir():
            rule = "is a folder, a file is wanted"
        elif not path.exists():
            raise BadInput(_missing_file(path))
        elif not path.is_file():
            rule = "is not a regular file"
        else:
            with path.open("rb") as stream:
                stream.seek(begin)
                while piece := stream.read(piece_bytes):
                    yield piece
            return
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise BadInput(Reason(field=str(path), rule=rule))


def _missing_file(path: Path) -> Reason:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = closest_match(path.name, names)
    near = str(path.with_name(close)) if close else ""
    return Reason(field=str(path), rule="no such file", nearest=near)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _Malformed(f"key {json.dumps(repeated)} stands twice")
    return table


def _refuse_constant(name: str) -> NoReturn:
    raise _Malformed(f"holds {name}, which is not JSON")


def read_complete_lines(path: Path) -> list[str]:
    """Return the lines of a file that end with a newline; [] where there is no file.

    Text after the last newline is left out: its writer was killed before the line was complete.
    """
    if not path.exists():
        return []
    return read_text(path).split("\n")[:-1]


def append_line(path: Path, line: str) -> None:
    """Append a line after the last complete one, in place of a torn one; return once on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write(line.encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
