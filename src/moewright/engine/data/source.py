"""Where text comes from: the interpreter's own standard library, or any file or folder of UTF-8
text."""

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
    """Files in a fixed pseudo-random order (by hash of the relative path), so that a limit takes a
    fair sample."""

    description: str
    root: Path
    files: tuple[Path, ...]
    stamp: str  # of names, sizes and modification times


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceDocuments:
    """Documents read, and files left out because they were not UTF-8 text or could not be read."""

    documents: tuple[str, ...]
    text_bytes: int
    files: int
    skipped_files: int


def find_source(path: Path | None, out: Path) -> TextSource:
    """None: the .py files of the running interpreter's standard library without its tests.

    Names that begin with a dot and the folder `out` are left out of a folder. Raises BadInput.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in _walk(root, STDLIB_EXCLUDED) if file.suffix == ".py"]
        description = f"standard library of {platform.python_implementation()} {platform.python_version()}, tests left out"
    else:
        root, description = path, f"text of {path.name or path}"
        if path.is_dir():
            if out.resolve() == path.resolve():
                raise BadInput(
                    Reason(
                        field="out",
                        rule="is the source itself; choose another folder",
                        value=str(out),
                    )
                )
            files = [
                file
                for file in _walk(path, frozenset())
                if out.resolve() not in file.resolve().parents
            ]
        elif path.is_file():
            files = [path]
        else:
            raise BadInput(Reason(field="source", rule="no such file or folder", value=str(path)))
    if not files:
        raise BadInput(Reason(field="source", rule="holds no files of text", value=str(root)))
    ordered = sorted(files, key=lambda file: _hash(str(file.relative_to(root))))
    digest = hashlib.sha256(description.encode())
    for file in ordered:
        info = file.stat()
        digest.update(
            f"{file}\0{info.st_size}\0{info.st_mtime_ns}\0".encode("utf-8", "surrogateescape")
        )
    return TextSource(
        description=description, root=root, files=tuple(ordered), stamp=digest.hexdigest()[:16]
    )


def read_documents(source: TextSource, *, limit_bytes: int) -> SourceDocuments:
    """Read at most `limit_bytes` of text. A document is a file, or a piece of a longer one cut at a
    line end.

    Pieces have 65,536 characters at most; a source that is one file gives 64 pieces or more, if
    each gets 256.
    """
    documents: list[str] = []
    left, files, skipped = limit_bytes, 0, 0
    for file in source.files:
        if left <= 0:
            break
        text = _read(file, left)
        if text is None:
            skipped += 1
            continue
        files += 1
        left -= len(text.encode())
        size = DOCUMENT_CHARS
        if len(source.files) == 1:
            size = min(size, max(len(text) // LONE_FILE_DOCUMENTS, LONE_FILE_CHARS))
        documents += [piece for piece in _split_text(text, size) if piece.strip()]
    text_bytes = sum(len(document.encode()) for document in documents)
    return SourceDocuments(
        documents=tuple(documents), text_bytes=text_bytes, files=files, skipped_files=skipped
    )


def _walk(root: Path, excluded: frozenset[str]) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = sorted(
            name for name in names if name not in excluded and not name.startswith(".")
        )
        yield from (
            Path(folder, name)
            for name in files
            if not name.startswith(".") and Path(folder, name).is_file()
        )


def _read(path: Path, limit_bytes: int) -> str | None:
    """Text of a file, cut at the last line end within the limit; None when it is not UTF-8 text."""
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError:
        return None
    if len(data) > limit_bytes:
        cut = data.rfind(b"\n", 0, limit_bytes) + 1 or limit_bytes
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
        cut = text.rfind("\n", start, start + size) + 1 or start + size
        yield text[start:cut]
        start = cut
    yield text[start:]


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
