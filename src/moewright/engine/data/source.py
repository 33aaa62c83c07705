"""Where text comes from: the interpreter's standard library, or a file or folder of UTF-8 text."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moewright.spec.errors import BadInput, Reason

STDLIB_EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
DOCUMENT_CHARS = 1 << 16
LONE_FILE_DOCUMENTS = 64
LONE_FILE_CHARS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """Files in a fixed pseudo-random order, so that a limit takes a fair sample.

    The order is by hash of the relative path. `stamp` hashes names, sizes and modification times.
    """

    description: str
    root: Path
    files: tuple[Path, ...]
    stamp: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceDocuments:
    """The documents that were read; files that hold no UTF-8 text are skipped."""

    documents: tuple[str, ...]
    text_bytes: int
    files: int
    skipped_files: int


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


def read_documents(source: TextSource, *, limit_bytes: int) -> SourceDocuments:
    """Read at most `limit_bytes` of text.

    A document is a file, or a piece of a longer one cut at a line end. Pieces have 65,536
    characters at most; a source that is one file gives 64 pieces or more, if each has 256.
    """
    documents: list[str] = []
    remaining_bytes = limit_bytes
    files = 0
    skipped_files = 0
    for file in source.files:
        if remaining_bytes <= 0:
            break
        text = _read(file, remaining_bytes)
        if text is None:
            skipped_files += 1
            continue
        files += 1
        remaining_bytes -= len(text.encode())
        size = DOCUMENT_CHARS
        if len(source.files) == 1:
            size = min(size, max(len(text) // LONE_FILE_DOCUMENTS, LONE_FILE_CHARS))
        documents += [piece for piece in _split_text(text, size) if piece.strip()]
    return SourceDocuments(
        documents=tuple(documents),
        text_bytes=sum(len(document.encode()) for document in documents),
        files=files,
        skipped_files=skipped_files,
    )


def _walk(root: Path, excluded: frozenset[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name for name in subfolders if name not in excluded and not name.startswith(".")
        )
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _read(path: Path, limit_bytes: int) -> str | None:
    """Read a file up to the last line end within the limit; None when it is not UTF-8 text."""
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError:
        return None
    if len(data) > limit_bytes:
        after_line = data.rfind(b"\n", 0, limit_bytes) + 1
        cut = after_line or limit_bytes
        while cut and data[cut] & 0xC0 == 0x80:  # not inside a character
            cut -= 1
        data = data[:cut]
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _split_text(text: str, size: int) -> Iterator[str]:
    start = 0
    while len(text) - start > size:
        after_line = text.rfind("\n", start, start + size) + 1
        cut = after_line or start + size
        yield text[start:cut]
        start = cut
    yield text[start:]


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
