"""The records of files: JSON lines, plain or gzipped, Parquet and Arrow; of chats JSON and CSV."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from moewright.codec.foreign import Account, budget
from moewright.engine.data.chat_turns import holds_chat
from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match

_JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_COLUMNAR = (".parquet", ".arrow", ".feather")
_COMPRESSED = (".jsonl.zst", ".jsonl.xz", ".jsonl.bz2")
_JSON = (".json", ".json.gz")
_TABLES = (".csv", ".tsv")
# Characters of one line of JSON; a longer one is taken for a file of another kind.
MAX_LINE_CHARS = 1 << 28
_BATCH_ROWS = 1024
# Lines that are unpacked and parsed within one budget, up to so many bytes.
_BATCH_LINES = 256
_BATCH_BYTES = 1 << 23
_BATCH_CELLS = 1 << 13
# Text packs to a tenth or less: what unpacks to so many times its bytes, and to more than these,
# was made to fill a disk.
_MAX_EXPANSION = 500
_MIN_UNPACKED_BYTES = 1 << 28
_JSON_MEMORY = 10  # times the bytes of a list, as Python's objects


def is_record_file(path: Path) -> bool:
    """Return whether a file holds records, by the ending of its name."""
    return path.name.lower().endswith((*_JSON_LINES, *_COLUMNAR, *_COMPRESSED))


def is_chat_file(path: Path) -> bool:
    """Return whether a file may hold chats: records, a list of them as JSON, or a table of text."""
    return is_record_file(path) or path.name.lower().endswith((*_JSON, *_TABLES))


def read_records(path: Path, field: str) -> Iterator[str]:
    """Yield the text of each record of a file, in its order.

    Raises:
        BadInput: naming the file and the line or row, where a record is broken, has no such field,
            or holds something else than text there; or the file cannot be read.
    """
    for where, record in read_rows(path, field):
        yield _text_of_record(record, field, where)


def read_rows(
    path: Path, field: str = "", *, keeps_broken: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield where each record of a file lies, as file and line, and its content as JSON data.

    Of a file with columns, `field` alone is read where it is given. With `keeps_broken` a line that
    is no record is its Reason in the record's place.

    Raises:
        BadInput: naming the file and the line or row, where a record is broken; or the file cannot
            be read.
    """
    name = path.name.lower()
    try:
        if name.endswith(_JSON_LINES):
            yield from _read_json_lines(path, keeps_broken=keeps_broken)
        elif name.endswith(_JSON):
            yield from _read_json(path, keeps_broken=keeps_broken)
        elif name.endswith(_TABLES):
            yield from _read_table(path, keeps_broken=keeps_broken)
        elif name.endswith(_COLUMNAR):
            yield from _read_columns(path, field)
        else:
            rule = "is compressed in a way that is not read; gzip it or unpack it"
            raise BadInput(Reason(field=str(path), rule=rule, nearest=f"{path.stem}.gz"))
    except (OSError, EOFError) as error:
        rule = f"cannot be read: {error}"
        raise BadInput(Reason(field=str(path), rule=rule)) from error


class _Expansion:
    """What is unpacked of a file, which is refused where it becomes too many times its bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._most_bytes = max(_MIN_UNPACKED_BYTES, _MAX_EXPANSION * path.stat().st_size)
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that were unpacked."""
        self._nbytes += nbytes
        if self._nbytes > self._most_bytes:
            rule = f"unpacks to more than {_MAX_EXPANSION} times its bytes"
            nearest = "its text in several files"
            raise BadInput(Reason(field=str(self._path), rule=rule, nearest=nearest))


def _count_chars(value: Any) -> int:
    """Return about how many characters a record has."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_count_chars, value.values()))
    if isinstance(value, list):
        return sum(map(_count_chars, value))
    return 8


def _open_unpacked(path: Path) -> IO[bytes] | gzip.GzipFile:
    """Open a file of records, of which one that ends in .gz is packed."""
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rb")
    return path.open("rb")


def _read_json(path: Path, *, keeps_broken: bool) -> Iterator[tuple[str, Any]]:
    """Yield the records of one list, of the one list of an object, or of lines all the same."""
    size = path.stat().st_size
    account = Account(size)
    with _open_unpacked(path) as file:
        with budget(str(path), _BATCH_BYTES, account=account):
            first = file.readline(MAX_LINE_CHARS + 1)
        is_lines = False
        if first.lstrip()[:1] == b"{":
            with suppress(BadInput), budget(str(path), len(first), account=account):
                # An object in the first line and more after it: lines, whatever the name says.
                is_lines = isinstance(_parse_line(first, str(path)), dict) and bool(file.read(1))
    if is_lines:
        yield from _read_json_lines(path, keeps_broken=keeps_broken)
        return
    if size > MAX_LINE_CHARS:
        rule = f"is one JSON value of more than {MAX_LINE_CHARS:,} bytes"
        raise BadInput(Reason(field=str(path), rule=rule, nearest="JSON lines, a record each"))
    whole = budget(str(path), size, file_bytes=_JSON_MEMORY * size, account=account)
    with whole, _open_unpacked(path) as file:
        expansion = _Expansion(path)
        pieces = []
        while piece := file.read(_BATCH_BYTES):
            expansion.add(len(piece))
            pieces.append(piece)
        data = _parse_line(b"".join(pieces), str(path), "JSON")
    lists = [data] if isinstance(data, list) else []
    if isinstance(data, dict):
        lists = [value for value in data.values() if _holds_records(value)] or [[data]]
    elif isinstance(data, list) and holds_chat(data):
        lists = [[data]]
    if len(lists) != 1:
        rule = f"must hold one list of records, and holds {len(lists)}"
        raise BadInput(Reason(field=str(path), rule=rule, nearest="a list of objects"))
    for number, record in enumerate(lists[0], 1):
        where = f"{path}: record {number}"
        if isinstance(record, dict):
            yield where, record
            continue
        if holds_chat(record):
            yield where, {"messages": record}
            continue
        reason = Reason(field=where, rule=f"is no JSON object but {type(record).__name__}")
        if not keeps_broken:
            raise BadInput(reason)
        yield where, reason


def _holds_records(value: Any) -> bool:
    """Return whether a value is a list of records: of objects, which are not one chat's turns."""
    is_list = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    return is_list and not holds_chat(value)


def _read_table(path: Path, *, keeps_broken: bool) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a table whose first line names its columns."""
    csv.field_size_limit(MAX_LINE_CHARS)
    delimiter = "\t" if path.name.lower().endswith(".tsv") else ","
    account = Account(path.stat().st_size)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter)
            is_done = False
            while not is_done:
                where = f"{path}, after line {reader.line_num}"
                with budget(where, _BATCH_BYTES, account=account):
                    rows = _read_cells(reader)
                is_done = not rows
                for number, row in rows:
                    where = f"{path}:{number}"
                    if None not in row and None not in row.values():
                        yield where, row
                        continue
                    rule = f"has not the {len(reader.fieldnames or ())} cells of the first line"
                    if not keeps_broken:
                        raise BadInput(Reason(field=where, rule=rule))
                    yield where, Reason(field=where, rule=rule)
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadInput(Reason(field=str(path), rule=f"is no table of text: {error}")) from error


def _read_cells(reader: csv.DictReader[str]) -> list[tuple[int, dict[str, Any]]]:
    """Return the next rows of a table with their lines: so many, or of so many cells."""
    rows: list[tuple[int, dict[str, Any]]] = []
    cells = 0
    for row in reader:
        rows.append((reader.line_num, row))
        cells += len(row)
        if len(rows) >= _BATCH_LINES or cells >= _BATCH_CELLS:
            break
    return rows


def _read_json_lines(path: Path, *, keeps_broken: bool) -> Iterator[tuple[str, Any]]:
    with _open_unpacked(path) as file:
        number = 0
        is_done = False
        position = 0
        expansion = _Expansion(path)
        account = Account(path.stat().st_size)
        while not is_done:
            with budget(f"{path}, after line {number}", _BATCH_BYTES, account=account):
                rows, number, is_done = _read_batch(path, file, number, keeps_broken)
            expansion.add(file.tell() - position)
            position = file.tell()
            yield from rows


def _read_batch(
    path: Path, file: Any, number: int, keeps_broken: bool
) -> tuple[list[tuple[str, Any]], int, bool]:
    """Return the records of the lines after `number`, the last line's number, and if it is all."""
    rows: list[tuple[str, Any]] = []
    nbytes = 0
    for _ in range(_BATCH_LINES):
        line = file.readline(MAX_LINE_CHARS + 1)
        if not line:
            return rows, number, True
        number += 1
        nbytes += len(line)
        where = f"{path}:{number}"
        if len(line) > MAX_LINE_CHARS:
            rule = f"is longer than {MAX_LINE_CHARS:,} bytes"
            raise BadInput(Reason(field=where, rule=rule))
        if line.strip():
            try:
                record = _parse_object(line, where)
            except BadInput as error:
                if not keeps_broken:
                    raise
                record = error.reasons[0]
            rows.append((where, record))
        if nbytes > _BATCH_BYTES:
            break
    return rows, number, False


def _parse_object(line: bytes, where: str) -> Any:
    record = _parse_line(line, where)
    if holds_chat(record):
        return {"messages": record}
    if not isinstance(record, dict):
        raise BadInput(Reason(field=where, rule="is no JSON object; each line must be one"))
    return record


def _parse_line(line: bytes, where: str, kind: str = "line of JSON") -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        column = min(error.pos, len(error.doc.rstrip())) + 1
        rule = f"is no {kind}: {error.msg} at column {column}"
        raise BadInput(Reason(field=where, rule=rule)) from error
    except (ValueError, RecursionError) as error:
        rule = f"is no {kind}: {error}"
        raise BadInput(Reason(field=where, rule=rule)) from error


def _text_of_record(record: Any, field: str, where: str) -> str:
    if field not in record:
        _refuse_field(where, field, list(record))
    text = record[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        kind = type(text).__name__
        rule = f"must be text, and is of type {kind}"
        raise BadInput(Reason(field=f"{where}: {field}", rule=rule))
    return text.encode("utf-8", "replace").decode()  # a lone surrogate has no bytes


def _read_columns(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a Parquet or Arrow file, batch by batch, of one column or of all."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        rule = "needs pyarrow to be read: pip install 'moewright[data]'"
        raise BadInput(Reason(field=str(path), rule=rule)) from None
    nbytes = _BATCH_BYTES
    try:
        with budget(str(path), nbytes):
            if path.name.lower().endswith(".parquet"):
                file = parquet.ParquetFile(path)
                _check_column(path, field, file.schema_arrow)
                columns = [field] if field else None
                # In this thread, whose budget covers it.
                batches = file.iter_batches(
                    batch_size=_BATCH_ROWS, columns=columns, use_threads=False
                )
            else:
                batches = _read_arrow_batches(path, field, pyarrow, ipc)
        row = 0
        expansion = _Expansion(path)
        account = Account(path.stat().st_size)
        while True:
            with budget(f"{path}, after row {row}", nbytes, account=account):
                batch = next(batches, None)
                if batch is None:
                    return
                batch.validate(full=True)  # offsets may point outside of the values
                records = (batch.select([field]) if field else batch).to_pylist()
            expansion.add(sum(map(_count_chars, records)))
            for record in records:
                row += 1
                yield f"{path}: row {row}", record
    except pyarrow.ArrowException as error:
        rule = f"is damaged: {error}"
        raise BadInput(Reason(field=str(path), rule=rule)) from error


def _read_arrow_batches(path: Path, field: str, pyarrow: Any, ipc: Any) -> Iterator[Any]:
    """Yield the record batches of an Arrow file, or of a stream as `datasets` caches them."""
    with pyarrow.memory_map(str(path)) as source:
        try:
            reader = ipc.open_file(source)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:
            # The attempt to read a file has moved on.
            source.seek(0)
            reader = ipc.open_stream(source)
            batches = iter(reader)
        _check_column(path, field, reader.schema)
        yield from batches


def _check_column(path: Path, field: str, schema: Any) -> None:
    if field and field not in schema.names:
        _refuse_field(str(path), field, list(schema.names))


def _refuse_field(where: str, field: str, fields: list[str]) -> None:
    rule = f"has no field {field!r}; it has {', '.join(fields) or 'none'}; choose one with --field"
    raise BadInput(Reason(field=where, rule=rule, nearest=closest_match(field, fields)))
