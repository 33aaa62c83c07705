"""A stream of tokens in several pairs of files: `<prefix>-00000`, `<prefix>-00001` and so on.

Each pair is one of Megatron's (data.indexed) and ends with a document. `<prefix>.shards.json` says
how many there are, so that one that is missing is seen. The stream, and so every sample, is that of
one pair with all documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from moewright.codec import read_json, write_json
from moewright.codec.files import ShardList, shard_list_path, shard_prefix
from moewright.engine.data.indexed import (
    IndexedDataset,
    IndexedWriter,
    Int64s,
    Tokens,
    count_flushed,
    open_indexed,
    remove_pair,
)
from moewright.spec.errors import BadInput, Reason


class ShardedTokens:
    """The tokens of shards as one stream, read by slices or by positions."""

    def __init__(self, parts: Sequence[Tokens]) -> None:
        self._parts = tuple(parts)
        self._starts = np.concatenate(([0], np.cumsum([len(part) for part in parts])))
        self.dtype = parts[0].dtype

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: slice | Int64s) -> Tokens:
        if isinstance(index, slice):
            return self._read_slice(*index.indices(len(self))[:2])
        shards = np.searchsorted(self._starts, index, side="right") - 1
        tokens = np.empty(index.shape, dtype=self.dtype)
        for shard in np.unique(shards).tolist():
            chosen = shards == shard
            tokens[chosen] = self._parts[shard][index[chosen] - self._starts[shard]]
        return tokens

    def _read_slice(self, first: int, stop: int) -> Tokens:
        parts = [
            part[max(0, first - start) : max(0, stop - start)]
            for part, start in zip(self._parts, self._starts.tolist(), strict=False)
            if first < start + len(part) and start < stop
        ]
        if parts:
            return np.concatenate(parts)
        return np.empty(0, dtype=self.dtype)


class ShardedWriter:
    """Shards that are written document by document; a new one begins after `shard_bytes`.

    They appear when all of them are finished. Until then they lie in hidden files, which outlive
    the process, as those of IndexedWriter do.

    Args:
        prefix: path of the stream without suffix.
        dtype: dtype of the tokens in the files.
        shard_bytes: bytes of tokens after which a shard ends with its document.
        documents: documents that an earlier writer flushed; what follows them is dropped.
    """

    def __init__(
        self, prefix: Path, *, dtype: np.dtype[Any], shard_bytes: int, documents: int = 0
    ) -> None:
        self._prefix = prefix
        self._dtype = dtype
        self._shard_bytes = shard_bytes
        self._full: list[tuple[int, int]] = []  # documents and tokens of shards that are complete
        remaining = documents
        while True:
            shard = self._shard_prefix(len(self._full))
            flushed, tokens = count_flushed(shard, limit=remaining)
            remaining -= flushed
            # The shard of the last flushed document goes on; one after it would be new.
            if not remaining or not flushed:
                break
            self._full.append((flushed, tokens))
        self._writer = IndexedWriter(shard, dtype=dtype, documents=flushed, tokens=tokens)

    @property
    def documents(self) -> int:
        """The documents of all shards."""
        return sum(documents for documents, _ in self._full) + self._writer.documents

    @property
    def tokens(self) -> int:
        """The tokens of all shards."""
        return sum(tokens for _, tokens in self._full) + self._writer.tokens

    def append(self, document: Tokens) -> None:
        if self._writer.tokens * self._dtype.itemsize >= self._shard_bytes:
            self._full.append((self._writer.documents, self._writer.tokens))
            self._writer.close()
            self._writer = IndexedWriter(self._shard_prefix(len(self._full)), dtype=self._dtype)
        self._writer.append(document)

    def flush(self) -> None:
        """Bring every document that was appended to the disk."""
        self._writer.flush()

    def finish(self) -> None:
        """Put the shards in their places, and the list of them last; no pair of old stays."""
        shards = ShardList(shards=len(self._full) + 1, documents=self.documents, tokens=self.tokens)
        # The old list goes first, so that no list names shards of two builds.
        remove_shards(self._prefix)
        self._writer.finish()
        for number, (documents, tokens) in enumerate(self._full):
            IndexedWriter(
                self._shard_prefix(number), dtype=self._dtype, documents=documents, tokens=tokens
            ).finish()
        remove_pair(self._prefix)
        write_json(shard_list_path(self._prefix), shards)

    def discard(self) -> None:
        """Remove what was written, and shards of old."""
        self._writer.discard()
        for number, (documents, tokens) in enumerate(self._full):
            IndexedWriter(
                self._shard_prefix(number), dtype=self._dtype, documents=documents, tokens=tokens
            ).discard()
        remove_shards(self._prefix)

    def _shard_prefix(self, number: int) -> Path:
        return shard_prefix(self._prefix, number)


def open_stream(prefix: Path) -> IndexedDataset:
    """Open a stream, of one pair or of several.

    Raises:
        BadInput: naming the file which is missing, damaged or swapped.
    """
    path = shard_list_path(prefix)
    if not path.is_file():
        return open_indexed(prefix)
    listed = read_json(ShardList, path)
    if listed.shards < 1:
        raise BadInput(Reason(field=str(path), rule="names no shard"))
    shards = [open_indexed(shard_prefix(prefix, number)) for number in range(listed.shards)]
    if len({shard.tokens.dtype for shard in shards}) > 1:
        raise BadInput(Reason(field=str(path), rule="its shards hold tokens of several dtypes"))
    tokens = ShardedTokens([shard.tokens for shard in shards])
    documents = sum(shard.documents for shard in shards)
    if (documents, len(tokens)) != (listed.documents, listed.tokens):
        rule = (
            f"says {listed.documents} documents of {listed.tokens} tokens, its shards hold "
            f"{documents} of {len(tokens)}: shards of another build"
        )
        raise BadInput(Reason(field=str(path), rule=rule))
    firsts = np.cumsum([0, *(shard.token_count for shard in shards)])
    sequences = np.cumsum([0, *(len(shard.lengths) for shard in shards)])
    names = "\n".join(shard.fingerprint for shard in shards)
    return IndexedDataset(
        prefix=prefix,
        tokens=cast(Tokens, tokens),
        lengths=np.concatenate([shard.lengths for shard in shards]),
        document_marks=np.concatenate(
            [[0]]
            + [
                shard.document_marks[1:] + first
                for shard, first in zip(shards, sequences.tolist(), strict=False)
            ]
        ),
        document_starts=np.concatenate(
            [
                shard.document_starts + first
                for shard, first in zip(shards, firsts.tolist(), strict=False)
            ]
        ),
        fingerprint=hashlib.sha256(names.encode()).hexdigest()[:16],
        shards=tuple(shards),
    )


def remove_shards(prefix: Path) -> None:
    """Remove the shards of a stream, as far as they are there, and the list of them first."""
    shard_list_path(prefix).unlink(missing_ok=True)
    for path in sorted(prefix.parent.glob(f"{prefix.name}-[0-9][0-9][0-9][0-9][0-9].*")):
        path.unlink()
