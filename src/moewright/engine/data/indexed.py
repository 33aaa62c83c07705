"""Megatron's indexed token files: `<prefix>.bin` holds the tokens, `<prefix>.idx` their index.

Index layout, little-endian: 9 bytes magic, uint64 version 1, uint8 dtype code, uint64 sequences,
uint64 document marks, int32 lengths [sequences] in tokens, int64 pointers [sequences] in bytes,
int64 document marks (sequence numbers, 0 first, `sequences` last). Ours add `<prefix>.seal.json`
with a fingerprint, so that damage inside a file of the right size is refused too; files without one
(Megatron's own) are read as they are.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from moewright.codec import read_bytes, read_json, write_json
from moewright.spec.errors import BadInput, Reason

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1  # Megatron-core's format, the only one there has been
HEADER = struct.Struct("<9sQBQQ")
DTYPES: tuple[tuple[int, str], ...] = (
    (1, "<u1"),
    (2, "<i1"),
    (3, "<i2"),
    (4, "<i4"),
    (5, "<i8"),
    (8, "<u2"),
)

_LENGTH = np.dtype("<i4")  # tokens of a sequence
SAMPLE_BYTES = 1 << 20
_LARGEST_INDEX_BYTES = 64 << 30
# A fingerprint reads files up to this size whole, longer ones in 64 samples.
WHOLE_FILE_BYTES = 64 * SAMPLE_BYTES

Tokens = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSeal:
    """The content of `<prefix>.seal.json`, which guards its pair."""

    fingerprint: str
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IndexedDataset:
    """A .bin/.idx pair that was opened and checked.

    `tokens` is the whole stream [token_count], memory-mapped read-only. `document_starts` are the
    positions in the stream of the documents' first tokens, rising. `fingerprint` covers the sizes
    and the content of both files (see fingerprint_files). With `shards`, the stream lies in those.
    """

    prefix: Path
    tokens: Tokens
    lengths: Int64s  # [sequences], tokens
    document_marks: Int64s  # [documents + 1], numbers of sequences
    document_starts: Int64s  # [documents]
    fingerprint: str
    shards: tuple[IndexedDataset, ...] = ()

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @property
    def documents(self) -> int:
        return len(self.document_marks) - 1

    @property
    def bin_path(self) -> Path:
        return _with_suffix(self.prefix, ".bin")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the narrowest dtype that Megatron's writer would choose for a vocabulary.

    That is uint16 below 65,500 ids, else int32.
    """
    if vocab_size < 65500:
        return np.dtype("<u2")
    return np.dtype("<i4")


class IndexedWriter:
    """A pair that is written document by document, one sequence for each.

    The pair appears as a whole when it is finished, the index last. Until then what was written
    lies in hidden files beside it, which outlive the process: a writer that is given their sizes
    goes on after the last documents that were flushed.

    Args:
        prefix: path of the pair without suffix.
        dtype: dtype of the tokens in the file.
        documents: documents that an earlier writer flushed; what follows them is dropped.
        tokens: the tokens of those documents.

    Raises:
        ValueError: for a dtype that Megatron has no code for.
    """

    def __init__(
        self, prefix: Path, *, dtype: np.dtype[Any], documents: int = 0, tokens: int = 0
    ) -> None:
        code = next((code for code, name in DTYPES if np.dtype(name) == dtype), None)
        if code is None:
            raise ValueError(f"no Megatron dtype code for {dtype}")
        self._code = code
        self._dtype = dtype
        self._prefix = prefix
        self._parts = {
            name: _part_path(prefix, name) for name in ("bin", "lengths", "idx", "seal.json")
        }
        self.documents = documents
        self.tokens = tokens
        self._bin = _open_part(self._parts["bin"], tokens * dtype.itemsize)
        self._lengths = _open_part(self._parts["lengths"], documents * _LENGTH.itemsize)

    def append(self, document: Tokens) -> None:
        self._bin.write(np.ascontiguousarray(document, dtype=self._dtype).tobytes())
        self._lengths.write(np.asarray(len(document), dtype=_LENGTH).tobytes())
        self.documents += 1
        self.tokens += len(document)

    def flush(self) -> None:
        """Bring every document that was appended to the disk."""
        for file in (self._bin, self._lengths):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Leave what was written to a later writer."""
        self.flush()
        self._bin.close()
        self._lengths.close()

    def finish(self) -> None:
        """Write the index and the seal, and put the pair in its place."""
        self._bin.close()
        self._lengths.close()
        lengths = np.fromfile(self._parts["lengths"], dtype=_LENGTH)
        _write_index(self._parts["idx"], self._code, self._dtype.itemsize, lengths)
        fingerprint = fingerprint_files(self._parts["bin"], self._parts["idx"])
        seal = PairSeal(fingerprint=fingerprint, documents=self.documents, tokens=self.tokens)
        write_json(self._parts["seal.json"], seal)
        # An older index must not meet the new tokens.
        _with_suffix(self._prefix, ".idx").unlink(missing_ok=True)
        # The index last: without one there is no pair.
        for name in ("bin", "seal.json", "idx"):
            os.replace(self._parts[name], _with_suffix(self._prefix, f".{name}"))
        self._parts["lengths"].unlink()

    def discard(self) -> None:
        """Remove what was written; after `finish` there is nothing to remove."""
        self._bin.close()
        self._lengths.close()
        for path in self._parts.values():
            path.unlink(missing_ok=True)


def count_flushed(prefix: Path, *, limit: int) -> tuple[int, int]:
    """Return the documents, at most `limit`, that a writer of a pair left, and their tokens."""
    path = _part_path(prefix, "lengths")
    if not limit or not path.is_file():
        return 0, 0
    lengths = np.fromfile(path, dtype=_LENGTH, count=limit)
    return len(lengths), int(lengths.sum(dtype=np.int64))


def write_indexed(prefix: Path, documents: Iterable[Tokens], *, dtype: np.dtype[Any]) -> None:
    """Write one sequence for each document.

    Each file appears as a whole or not at all; the index comes last.

    Raises:
        ValueError: for a dtype that Megatron has no code for.
    """
    writer = IndexedWriter(prefix, dtype=dtype)
    try:
        for document in documents:
            writer.append(document)
        writer.finish()
    finally:
        writer.discard()


def remove_pair(prefix: Path) -> None:
    """Remove the files of a pair, as far as they are there."""
    for suffix in (".idx", ".bin", ".seal.json"):
        _with_suffix(prefix, suffix).unlink(missing_ok=True)


def open_indexed(prefix: Path) -> IndexedDataset:
    """Check a pair, and map it.

    Raises:
        BadInput: naming the file which is missing, damaged or swapped.
    """
    idx_path = _with_suffix(prefix, ".idx")
    bin_path = _with_suffix(prefix, ".bin")
    seal_path = _with_suffix(prefix, ".seal.json")
    for path in (idx_path, bin_path):
        if path.exists() and not path.is_file():
            raise _file_error(path, "is not a file")
        if not path.exists():
            nearest = f"moewright data build --out {prefix.parent}"
            raise _file_error(path, "does not exist", nearest)
    lengths, document_marks, dtype = _read_index(idx_path)
    expected_bytes = int(lengths.sum()) * dtype.itemsize
    actual_bytes = bin_path.stat().st_size
    if actual_bytes != expected_bytes:
        rule = (
            f"has {actual_bytes} bytes but {idx_path.name} describes {expected_bytes}: "
            "truncated, or of another pair"
        )
        raise _file_error(bin_path, rule)
    if expected_bytes == 0:
        raise _file_error(bin_path, "holds no tokens")
    fingerprint = fingerprint_files(bin_path, idx_path)
    if seal_path.is_file() and read_json(PairSeal, seal_path).fingerprint != fingerprint:
        rule = (
            f"it or {idx_path.name} is not what {seal_path.name} was written for: "
            "damaged or swapped"
        )
        raise _file_error(bin_path, rule)
    return IndexedDataset(
        prefix=prefix,
        tokens=np.memmap(bin_path, dtype=dtype, mode="r"),
        lengths=lengths,
        document_marks=document_marks,
        document_starts=np.concatenate(([0], np.cumsum(lengths)))[document_marks[:-1]],
        fingerprint=fingerprint,
    )


def refuse_if_shrunk(dataset: IndexedDataset) -> None:
    """Raise BadInput when the mapped file was cut while in use.

    Reading past its end would kill the process.
    """
    for shard in dataset.shards:
        refuse_if_shrunk(shard)
    if dataset.shards:
        return
    opened_bytes = dataset.token_count * dataset.tokens.dtype.itemsize
    try:
        current_bytes = dataset.bin_path.stat().st_size
    except OSError as error:
        rule = f"went away while in use ({error.strerror})"
        raise _file_error(dataset.bin_path, rule) from error
    if current_bytes != opened_bytes:
        rule = f"changed while in use: {opened_bytes} bytes when opened, {current_bytes} now"
        raise _file_error(dataset.bin_path, rule)


def fingerprint_files(bin_path: Path, idx_path: Path) -> str:
    """Return 16 hex digits of sha256 over sizes and content.

    Of files above 64 MiB, 64 evenly spaced blocks of 1 MiB are read.
    """
    digest = hashlib.sha256()
    for path in (bin_path, idx_path):
        size = path.stat().st_size
        digest.update(struct.pack("<Q", size))
        with path.open("rb") as file:
            if size <= WHOLE_FILE_BYTES:
                digest.update(file.read())
                continue
            for block in range(64):
                # From the first MiB to the last, both among them.
                file.seek((size - SAMPLE_BYTES) * block // 63)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _part_path(prefix: Path, name: str) -> Path:
    return prefix.with_name(f".{prefix.name}.{name}.part")


def _with_suffix(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _file_error(path: Path, rule: str, nearest: str = "") -> BadInput:
    return BadInput(Reason(field=str(path), rule=rule, nearest=nearest))


def _open_part(path: Path, size: int) -> BinaryIO:
    """Open a file for appending after its first `size` bytes; what follows them is cut off."""
    file = path.open("r+b" if size else "w+b")
    file.truncate(size)
    file.seek(size)
    return file


def _write_index(path: Path, code: int, itemsize: int, lengths: npt.NDArray[np.int32]) -> None:
    pointers = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1].astype(np.int64) * itemsize, out=pointers[1:])
    marks = np.arange(len(lengths) + 1, dtype="<i8")
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(marks)))
        for array in (lengths.astype("<i4"), pointers, marks):
            file.write(array.tobytes())


def _read_index(path: Path) -> tuple[Int64s, Int64s, np.dtype[Any]]:
    """Return the lengths and the document marks, and the dtype of the tokens."""
    data = read_bytes(path, limit_bytes=_LARGEST_INDEX_BYTES)
    if not data.startswith(MAGIC):
        rule = f"is not a Megatron index: it begins with {data[:9]!r} instead of {MAGIC!r}"
        raise _file_error(path, rule)
    if len(data) < HEADER.size:
        rule = f"is truncated: {len(data)} bytes, the header alone has {HEADER.size}"
        raise _file_error(path, rule)
    _, version, code, sequences, marks = HEADER.unpack_from(data)
    if version != VERSION:
        raise _file_error(path, f"has version {version}; only {VERSION} is known")
    if code not in dict(DTYPES):
        codes = ", ".join(str(known_code) for known_code, _ in DTYPES)
        raise _file_error(path, f"has dtype code {code}; integer codes are {codes}")
    expected_bytes = HEADER.size + 12 * sequences + 8 * marks
    if len(data) != expected_bytes:
        rule = (
            f"has {len(data)} bytes, its header promises {expected_bytes}: "
            "truncated, damaged, or with multimodal modes"
        )
        raise _file_error(path, rule)
    dtype = np.dtype(dict(DTYPES)[code])
    pointers_at = HEADER.size + 4 * sequences
    marks_at = HEADER.size + 12 * sequences
    lengths = np.frombuffer(data, "<i4", sequences, HEADER.size).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, pointers_at)
    document_marks = np.frombuffer(data, "<i8", marks, marks_at).astype(np.int64)
    ends = np.cumsum(lengths) * dtype.itemsize
    if sequences and (lengths.min() < 0 or pointers[0] != 0 or np.any(pointers[1:] != ends[:-1])):
        rule = "is damaged: sequence pointers do not follow from the sequence lengths"
        raise _file_error(path, rule)
    if (
        marks == 0
        or document_marks[0] != 0
        or document_marks[-1] != sequences
        or np.any(document_marks[1:] < document_marks[:-1])
    ):
        rule = f"is damaged: document marks do not rise from 0 to its {sequences} sequences"
        raise _file_error(path, rule)
    return lengths, document_marks, dtype
