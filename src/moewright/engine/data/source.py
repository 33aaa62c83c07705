"""Where text comes from: the interpreter's standard library, or a file or folder of text.

Files of records (JSON lines, Parquet, Arrow) are read by their field of text; any other file is
text as it stands. A file is read piece by piece, so its size is bounded by the disk alone.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from moewright.engine.data.records import is_record_file, read_records
from moewright.spec.errors import BadInput, Reason

STDLIB_EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
DOCUMENT_CHARS = 1 << 16  # longer files are cut: a corpus has many documents
LONE_FILE_DOCUMENTS = 64  # a single file must have some to hold out
LONE_FILE_CHARS = 256  # shorter pieces are no text
_CHUNK_BYTES = 1 << 22  # large against the cost of a read, small against memory


class SkipReason(StrEnum):
    """Why a file or a record gave no document."""

    NOT_TEXT = "files skipped as not UTF-8 text"
    UNREADABLE = "files skipped as unreadable"
    EMPTY = "empty documents left out"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """Files in a fixed pseudo-random order, so that a limit takes a fair sample.

    The order is by hash of the relative path. `stamp` hashes names, sizes and modification times.
    """

    description: str
    root: Path
    files: tuple[Path, ...]
    stamp: str


class DocumentReader:
    """The documents of a source, in its order, with counts of what was read and skipped.

    Args:
        source: the files.
        field: the field of text of record files.
        limit_bytes: bytes of text to read at most; None reads all.
    """

    def __init__(
        self, source: TextSource, *, field: str = "text", limit_bytes: int | None = None
    ) -> None:
        self._source = source
        self._field = field
        self._limit_bytes = limit_bytes
        self.files = 0
        self.file_bytes = 0  # read so far, on disk
        self.text_bytes = 0
        self.skipped: Counter[SkipReason] = Counter()
        self._read_bytes = 0  # towards the limit

    def __iter__(self) -> Iterator[str]:
        """Yield the documents that hold more than white space.

        A document is a record, or a file of text, or a piece of a longer one cut at a line end.
        Pieces have 65,536 characters at most; a source that is one file of text gives 64 pieces or
        more, if each has 256.

        Raises:
            BadInput: a record file is damaged, or has no such field.
        """
        for path in self._source.files:
            if self._remaining_bytes() == 0:
                return
            pieces = self._record_texts(path) if is_record_file(path) else self._pieces(path)
            for text in pieces:
                if not text.strip():
                    self.skipped[SkipReason.EMPTY] += 1
                    continue
                self.text_bytes += len(text.encode())
                yield text
            self.file_bytes += path.stat().st_size

    def _remaining_bytes(self) -> int | None:
        if self._limit_bytes is None:
            return None
        return self._limit_bytes - self._read_bytes

    def _record_texts(self, path: Path) -> Iterator[str]:
        """Yield the texts of a record file within the limit; a record stays whole."""
        self.files += 1
        for text in read_records(path, self._field):
            remaining = self._remaining_bytes()
            if remaining is not None and len(text.encode()) > remaining:
                self._read_bytes += remaining
                return
            self._read_bytes += len(text.encode())
            yield text

    def _pieces(self, path: Path) -> Iterator[str]:
        """Yield the pieces of a file of text."""
        try:
            measured = _measure_text(path, self._remaining_bytes())
        except OSError:
            self.skipped[SkipReason.UNREADABLE] += 1
            return
        if measured is None:
            self.skipped[SkipReason.NOT_TEXT] += 1
            return
        text_bytes, chars = measured
        self.files += 1
        self._read_bytes += text_bytes
        size = DOCUMENT_CHARS
        if len(self._source.files) == 1:
            size = min(size, max(chars // LONE_FILE_DOCUMENTS, LONE_FILE_CHARS))
        pieces = _split_text(_decode(path, text_bytes), size)
        yield from (piece for piece in pieces if piece)


def find_source(path: Path | None, out: Path) -> TextSource:
    """Find the files of text of a file or a folder.

    Where `path` is None, they are the .py files of the running interpreter's standard library
    without its tests. Names that begin with a dot and the folder `out` are left out of a folder.

    Raises:
        BadInput: when there is no text there, or `out` is the source itself.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in _walk(root, STDLIB_EXCLUDED) if file.suffix == ".py"]
        interpreter = f"{platform.python_implementation()} {platform.python_version()}"
        description = f"standard library of {interpreter}, tests left out"
    else:
        root = path
        files = _list_files(path, out)
        description = f"text of {path.name or path}"
    if not files:
        raise BadInput(Reason(field="source", rule="holds no files of text", value=str(root)))
    ordered = sorted(files, key=lambda file: _hash(str(file.relative_to(root))))
    digest = hashlib.sha256(description.encode())
    for file in ordered:
        info = file.stat()
        line = f"{file}\0{info.st_size}\0{info.st_mtime_ns}\0"
        # Names of files need not be UTF-8.
        digest.update(line.encode("utf-8", "surrogateescape"))
    return TextSource(
        description=description, root=root, files=tuple(ordered), stamp=digest.hexdigest()[:16]
    )


def _list_files(path: Path, out: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise BadInput(Reason(field="source", rule="no such file or folder", value=str(path)))
    if out.resolve() == path.resolve():
        rule = "is the source itself; choose another folder"
        raise BadInput(Reason(field="out", rule=rule, value=str(out)))
    files = _walk(path, frozenset())
    return [file for file in files if out.resolve() not in file.resolve().parents]


def _walk(root: Path, excluded: frozenset[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        # In place, as os.walk reads it: others are not entered.
        subfolders[:] = sorted(
            name for name in subfolders if name not in excluded and not name.startswith(".")
        )
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _measure_text(path: Path, limit_bytes: int | None) -> tuple[int, int] | None:
    """Return the bytes of a file up to the last line end within the limit, and their characters.

    None stands for a file that is not UTF-8 text, or that is no regular file.
    """
    size = path.stat().st_size
    is_cut = limit_bytes is not None and size > limit_bytes
    stop = _find_cut(path, limit_bytes) if is_cut and limit_bytes is not None else size
    chars = 0
    try:
        for text in _decode(path, stop):
            if "\0" in text:
                return None
            chars += len(text)
    except UnicodeDecodeError:
        return None
    return stop, chars


def _find_cut(path: Path, limit_bytes: int) -> int:
    """Return the bytes up to the last line end within the limit, or up to a character's end."""
    with path.open("rb") as file:
        stop = limit_bytes
        while stop > 0:
            start = max(0, stop - _CHUNK_BYTES)
            file.seek(start)
            after_line = file.read(stop - start).rfind(b"\n") + 1
            if after_line:
                return start + after_line
            stop = start
        cut = limit_bytes
        while cut:
            file.seek(cut)
            if file.read(1)[0] & 0xC0 != 0x80:  # not inside a character
                break
            cut -= 1
        return cut


def _decode(path: Path, size: int) -> Iterator[str]:
    """Yield the text of the first `size` bytes of a file in chunks."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        # A decoder with a state, for a chunk may end inside of a character.
        while size > 0 and (data := file.read(min(size, _CHUNK_BYTES))):
            size -= len(data)
            yield decoder.decode(data)
    yield decoder.decode(b"", final=True)


def _split_text(chunks: Iterator[str], size: int) -> Iterator[str]:
    """Yield pieces of at most `size` characters, each but the last up to a line end if it can."""
    text = ""
    for chunk in chunks:
        text += chunk
        start = 0
        while len(text) - start > size:
            after_line = text.rfind("\n", start, start + size) + 1
            cut = after_line or start + size
            yield text[start:cut]
            start = cut
        text = text[start:]
    yield text


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
