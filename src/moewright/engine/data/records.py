"""The records of files: JSON lines, plain or gzipped, Parquet and Arrow."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match

_JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_COLUMNAR = (".parquet", ".arrow", ".feather")
_COMPRESSED = (".jsonl.zst", ".jsonl.xz", ".jsonl.bz2")
# Characters of one line of JSON; a longer one is taken for a file of another kind.
MAX_LINE_CHARS = 1 << 28
_BATCH_ROWS = 1024


def is_record_file(path: Path) -> bool:
    """Return whether a file holds records, by the ending of its name."""
    return path.name.lower().endswith((*_JSON_LINES, *_COLUMNAR, *_COMPRESSED))


def read_records(path: Path, field: str) -> Iterator[str]:
    """Yield the text of each record of a file, in its order.

    Raises:
        BadInput: naming the file and the line or row, where a record is broken, has no such field,
            or holds something else than text there; or the file cannot be read.
    """
    for where, record in read_rows(path, field):
        yield _text_of_record(record, field, where)


def read_rows(path: Path, field: str = "") -> Iterator[tuple[str, Any]]:
    """Yield where each record of a file lies, as file and line, and its content as JSON data.

    Of a file with columns, `field` alone is read where it is given.

    Raises:
        BadInput: naming the file and the line or row, where a record is broken; or the file cannot
            be read.
    """
    name = path.name.lower()
    try:
        if name.endswith(_JSON_LINES):
            yield from _read_json_lines(path)
        elif name.endswith(_COLUMNAR):
            yield from _read_columns(path, field)
        else:
            rule = "is compressed in a way that is not read; gzip it or unpack it"
            raise BadInput(Reason(field=str(path), rule=rule, nearest=f"{path.stem}.gz"))
    except (OSError, EOFError) as error:
        rule = f"cannot be read: {error}"
        raise BadInput(Reason(field=str(path), rule=rule)) from error


def _read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    open_file = gzip.open if path.name.lower().endswith(".gz") else open
    with open_file(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_CHARS + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > MAX_LINE_CHARS:
                rule = f"is longer than {MAX_LINE_CHARS:,} bytes"
                raise BadInput(Reason(field=where, rule=rule))
            if line.strip():
                record = _parse_line(line, where)
                if not isinstance(record, dict):
                    rule = "is no JSON object; each line must be one"
                    raise BadInput(Reason(field=where, rule=rule))
                yield where, record


def _parse_line(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        column = min(error.pos, len(error.doc.rstrip())) + 1
        rule = f"is no line of JSON: {error.msg} at column {column}"
        raise BadInput(Reason(field=where, rule=rule)) from error
    except (ValueError, RecursionError) as error:
        rule = f"is no line of JSON: {error}"
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
    try:
        if path.name.lower().endswith(".parquet"):
            file = parquet.ParquetFile(path)
            _check_column(path, field, file.schema_arrow)
            batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=[field] if field else None)
        else:
            batches = _read_arrow_batches(path, field, pyarrow, ipc)
        row = 0
        for batch in batches:
            columns = batch.select([field]) if field else batch
            for record in columns.to_pylist():
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
