"""Text to a corpus: one or two .bin/.idx pairs, a tokenizer, and a description.

They are `train` and `heldout`, tokenizer.json, and corpus.json. The text is read twice and never
held: once to see which documents are held out and to train a tokenizer, once to encode it.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from moewright.codec import read_json, write_json
from moewright.codec.folder_lock import lock_folder
from moewright.codec.foreign import read_apart
from moewright.engine.data.corpus import (
    CORPUS_FILE,
    Corpus,
    CorpusKind,
    CorpusSplit,
    DocumentCensus,
    check_heldout_fraction,
    find_heldout_limit,
    hash_document,
    learnt_prefix,
    read_corpus,
    unigram_entropy,
)
from moewright.engine.data.indexed import IndexedDataset, IndexedWriter, open_indexed, token_dtype
from moewright.engine.data.sharded import ShardedWriter, open_stream, remove_shards
from moewright.engine.data.source import DocumentReader, SkipReason, TextSource, find_source
from moewright.engine.data.tokenizer import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    TokenizerKind,
    build_byte_tokenizer,
    check_vocab_size,
    load_tokenizer,
    train_bpe,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import DataSpec

# A part of the stamp: raise it when the same input gives other files.
BUILD_VERSION = 2
_PROGRESS_FILE = ".build.json"
# Documents that are encoded together, by all cores.
_BATCH_DOCUMENTS = 256
# Text after which what is encoded is brought to the disk, where an interrupted build goes on.
_FLUSH_BYTES = 64_000_000
# Text that a BPE is trained on at most: documents with the smallest hashes, held-out ones left out.
_BPE_BYTES = 256_000_000
_HASHES = 1 << 64

StreamWriter = IndexedWriter | ShardedWriter

Progress = Callable[[str, int, int], None]  # what is done, bytes on disk so far, and in all


class RebuildPolicy(StrEnum):
    """The choice whether to build a corpus that is there already."""

    IF_CHANGED = "if_changed"
    ALWAYS = "always"


class BuildOutcome(StrEnum):
    """The outcome of a build: a new corpus, or the equal one that was there."""

    BUILT = "built"
    REUSED = "reused"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusOptions:
    """What a corpus is made of, and how.

    `field` is the field of text of JSON lines, Parquet and Arrow files. `tokenizer_path` names the
    tokenizer.json, or its folder, of TokenizerKind.PUBLISHED. `heldout_fraction` is the share of
    the text that is held out, 0 for none. `limit_bytes` is the text that is read at most, a fair
    sample of the files; None reads all. `shard_bytes` are the bytes of tokens after which a pair
    ends and the next begins; None writes one pair.
    """

    field: str = "text"
    tokenizer: TokenizerKind = TokenizerKind.BPE
    tokenizer_path: Path | None = None
    vocab_size: int = 4096
    heldout_fraction: float = 0.05
    limit_bytes: int | None = None
    shard_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildReport:
    """The report of a build; `data` is how a job names the corpus.

    `encode_s` are the seconds of reading and encoding the text, of the documents after
    `resumed_documents`, which an interrupted build had encoded.
    """

    corpus: Corpus
    outcome: BuildOutcome
    seconds: float
    data: DataSpec
    encode_s: float = 0.0
    resumed_documents: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _BuildProgress:
    """How far a build got: what both pairs hold on the disk, by the build's stamp."""

    stamp: str
    train: CorpusSplit = field(default_factory=CorpusSplit)
    heldout: CorpusSplit = field(default_factory=CorpusSplit)


@read_apart
def build_corpus(
    source: Path | None,
    out: Path,
    options: CorpusOptions = CorpusOptions(),
    *,
    rebuild: RebuildPolicy = RebuildPolicy.IF_CHANGED,
    report_progress: Progress = lambda _what, _done, _total: None,
) -> BuildReport:
    """Build a corpus in folder `out` from a file or a folder.

    Where `source` is None, the text is the interpreter's standard library. The documents with the
    smallest content hashes are held out, so equal documents are never on both sides. Every file is
    replaced as a whole, corpus.json last; a folder that holds the same corpus (same source files,
    parameters, versions; files intact) is left alone. A build that was interrupted goes on where it
    last flushed.

    Raises:
        BadInput: for options or a source that give no corpus, or a folder that cannot be written
            or that another build writes.
    """
    started = time.monotonic()
    _check_options(options, out)
    text_source = find_source(source, out)
    stamp = _stamp(text_source, options)
    corpus = read_reusable_corpus(out, stamp, rebuild)
    outcome = BuildOutcome.REUSED
    encode_s = 0.0
    resumed_documents = 0
    if corpus is None:
        outcome = BuildOutcome.BUILT
        build = _CorpusBuild(text_source, out, options, stamp, report_progress)
        with wrap_write_errors(out):
            corpus = build.run(is_resumable=rebuild is RebuildPolicy.IF_CHANGED)
        encode_s = build.encode_s
        resumed_documents = build.resumed_documents
    return BuildReport(
        corpus=corpus,
        outcome=outcome,
        seconds=time.monotonic() - started,
        data=describe_data(corpus, out),
        encode_s=encode_s,
        resumed_documents=resumed_documents,
    )


@contextmanager
def wrap_write_errors(out: Path) -> Iterator[None]:
    """Turn errors of the disk inside into a refusal of the folder `out`."""
    try:
        yield
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise BadInput(Reason(field=str(out), rule=rule)) from error


class _CorpusBuild:
    """One build of a corpus, of which the folder holds nothing intact."""

    def __init__(
        self,
        source: TextSource,
        out: Path,
        options: CorpusOptions,
        stamp: str,
        report_progress: Progress,
    ) -> None:
        self._source = source
        self._out = out
        self._options = options
        self._stamp = stamp
        self._report_progress = report_progress
        self._total_bytes = sum(path.stat().st_size for path in source.files)
        self.encode_s = 0.0
        self.resumed_documents = 0

    def run(self, *, is_resumable: bool) -> Corpus:
        """Build everything; corpus.json, which comes last, makes it a corpus."""
        census = self._take_census()
        limit = find_heldout_limit(
            census.hashes,
            census.chars,
            self._options.heldout_fraction,
            str(self._source.root),
        )
        self._out.mkdir(parents=True, exist_ok=True)
        with lock_folder(self._out):
            return self._write(census, limit, is_resumable=is_resumable)

    def _take_census(self) -> DocumentCensus:
        hashes: list[int] = []
        chars: list[int] = []
        reader = self._open_reader()
        for document in reader:
            hashes.append(hash_document(document))
            chars.append(len(document))
            self._report_progress("reading", reader.file_bytes, self._total_bytes)
        return DocumentCensus(
            hashes=np.array(hashes, dtype=np.uint64),
            chars=np.array(chars, dtype=np.int64),
            files=reader.files,
            text_bytes=reader.text_bytes,
            skipped=dict(reader.skipped),
        )

    def _open_reader(self) -> DocumentReader:
        options = self._options
        return DocumentReader(self._source, field=options.field, limit_bytes=options.limit_bytes)

    def _write(self, census: DocumentCensus, limit: int, *, is_resumable: bool) -> Corpus:
        progress_path = self._out / _PROGRESS_FILE
        progress = _read_progress(progress_path, self._stamp) if is_resumable else None
        if progress is None:
            # First of all: without it the folder is no corpus while its files change.
            (self._out / CORPUS_FILE).unlink(missing_ok=True)
            progress_path.unlink(missing_ok=True)
            tokenizer = self._make_tokenizer(census, limit)
            tokenizer.save(self._out / TOKENIZER_FILE)
            progress = _BuildProgress(stamp=self._stamp)
        else:
            tokenizer = load_tokenizer(self._out / TOKENIZER_FILE)
            self.resumed_documents = progress.train.documents + progress.heldout.documents
        self._encode(tokenizer, census, limit, progress)
        progress_path.unlink(missing_ok=True)
        corpus = self._describe(census, tokenizer, has_heldout=limit > 0)
        write_json(self._out / CORPUS_FILE, corpus)
        return corpus

    def _make_tokenizer(self, census: DocumentCensus, limit: int) -> Tokenizer:
        options = self._options
        if options.tokenizer is TokenizerKind.BYTES:
            return build_byte_tokenizer()
        if options.tokenizer is TokenizerKind.BPE:
            return train_bpe(self._bpe_documents(census, limit), vocab_size=options.vocab_size)
        path = _require_tokenizer_path(options)
        config = (path if path.is_dir() else path.parent) / TOKENIZER_CONFIG_FILE
        if config.is_file():
            shutil.copyfile(config, self._out / TOKENIZER_CONFIG_FILE)
        return load_tokenizer(path)

    def _bpe_documents(self, census: DocumentCensus, limit: int) -> Iterator[str]:
        """Yield the documents to train a tokenizer on: all to train on, or a sample by hash."""
        share = min(1.0, _BPE_BYTES / max(1, census.text_bytes))
        # Hashes are uniform, so that a stretch of them is a fair sample.
        stop = limit + int(share * (_HASHES - limit))
        reader = self._open_reader()
        for document, key in zip(reader, census.hashes.tolist(), strict=True):
            if limit <= key < stop:
                self._report_progress("tokenizer", reader.file_bytes, self._total_bytes)
                yield document

    def _encode(
        self, tokenizer: Tokenizer, census: DocumentCensus, limit: int, progress: _BuildProgress
    ) -> None:
        """Encode the documents after those of `progress` into both pairs, and finish them."""
        started = time.monotonic()
        dtype = token_dtype(tokenizer.vocab_size)
        train, heldout = (
            self._open_writer(name, dtype, split)
            for name, split in (("train", progress.train), ("heldout", progress.heldout))
        )
        reader = self._open_reader()
        documents = iter(reader)
        position = train.documents + heldout.documents
        next(islice(documents, position, position), None)
        flushed_bytes = reader.text_bytes
        while batch := list(islice(documents, _BATCH_DOCUMENTS)):
            keys = census.hashes[position : position + len(batch)].tolist()
            for key, tokens in zip(keys, tokenizer.encode_documents(batch), strict=True):
                writer = heldout if key < limit else train
                writer.append(tokens)
            position += len(batch)
            self._report_progress("encoding", reader.file_bytes, self._total_bytes)
            if reader.text_bytes - flushed_bytes >= _FLUSH_BYTES:
                flushed_bytes = reader.text_bytes
                self._flush(train, heldout)
        # Training data first; corpus.json, which makes it a corpus, comes after both.
        train.finish()
        if heldout.documents:
            heldout.finish()
        else:
            heldout.discard()
        self.encode_s = time.monotonic() - started

    def _open_writer(self, name: str, dtype: np.dtype[Any], split: CorpusSplit) -> StreamWriter:
        """Open the writer of a split, which goes on after what an earlier one flushed."""
        prefix = self._out / name
        shard_bytes = self._options.shard_bytes
        if shard_bytes is not None:
            return ShardedWriter(
                prefix, dtype=dtype, shard_bytes=shard_bytes, documents=split.documents
            )
        remove_shards(prefix)
        return IndexedWriter(prefix, dtype=dtype, documents=split.documents, tokens=split.tokens)

    def _flush(self, train: StreamWriter, heldout: StreamWriter) -> None:
        train.flush()
        heldout.flush()
        progress = _BuildProgress(
            stamp=self._stamp,
            train=CorpusSplit(documents=train.documents, tokens=train.tokens),
            heldout=CorpusSplit(documents=heldout.documents, tokens=heldout.tokens),
        )
        write_json(self._out / _PROGRESS_FILE, progress)

    def _describe(
        self, census: DocumentCensus, tokenizer: Tokenizer, *, has_heldout: bool
    ) -> Corpus:
        train = open_stream(self._out / "train")
        heldout = open_stream(self._out / "heldout") if has_heldout else None
        entropy = 0.0
        if heldout is not None:
            entropy = unigram_entropy(train, heldout, tokenizer.vocab_size)
        empty = census.skipped.get(SkipReason.EMPTY, 0)
        return Corpus(
            source=self._source.description,
            files=census.files,
            skipped_files=sum(census.skipped.values()) - empty,
            text_bytes=census.text_bytes,
            tokenizer=self._options.tokenizer,
            vocab_size=tokenizer.vocab_size,
            train=_describe_split(train),
            heldout=_describe_split(heldout) if heldout is not None else CorpusSplit(),
            unigram_entropy=entropy,
            stamp=self._stamp,
            empty_documents=empty,
        )


def _stamp(source: TextSource, options: CorpusOptions) -> str:
    """Return the identity of what is built: source, options and versions."""
    tokenizer_digest = ""
    if options.tokenizer is TokenizerKind.PUBLISHED:
        inner = load_tokenizer(_require_tokenizer_path(options)).inner
        tokenizer_digest = hashlib.sha256(inner.to_str().encode()).hexdigest()
    parameters: tuple[object, ...] = (
        source.stamp,
        options.field,
        options.vocab_size,
        options.tokenizer,
        tokenizer_digest,
        options.heldout_fraction,
        options.limit_bytes,
        BUILD_VERSION,
        tokenizers.__version__,
        np.__version__,
    )
    if options.shard_bytes is not None:
        parameters += (options.shard_bytes,)
    return hashlib.sha256(repr(parameters).encode()).hexdigest()[:16]


def _require_tokenizer_path(options: CorpusOptions) -> Path:
    if options.tokenizer_path is None:
        rule = "is needed: the tokenizer.json, or its folder, of a published tokenizer"
        raise BadInput(Reason(field="tokenizer", rule=rule))
    return options.tokenizer_path


def _check_options(options: CorpusOptions, out: Path) -> None:
    check_heldout_fraction(options.heldout_fraction)
    if options.limit_bytes is not None and options.limit_bytes < 1:
        rule = "must be positive"
        value = str(options.limit_bytes)
        raise BadInput(Reason(field="limit_bytes", rule=rule, value=value, nearest="1"))
    if options.shard_bytes is not None and options.shard_bytes < 1:
        value = str(options.shard_bytes)
        reason = Reason(field="shard_bytes", rule="must be positive", value=value, nearest="1")
        raise BadInput(reason)
    if options.tokenizer is TokenizerKind.BPE:
        check_vocab_size(options.vocab_size)
    if out.exists() and not out.is_dir():
        raise BadInput(Reason(field="out", rule="is a file; a folder is needed", value=str(out)))


def _read_progress(path: Path, stamp: str) -> _BuildProgress | None:
    """Read how far a build of this stamp got; None where there is none to go on with."""
    try:
        progress = read_json(_BuildProgress, path)
    except BadInput:
        return None
    return progress if progress.stamp == stamp else None


def describe_data(corpus: Corpus, out: Path) -> DataSpec:
    """Return the data of a job that trains on a corpus."""
    return DataSpec(
        train=str(out / "train"),
        heldout=str(out / "heldout") if corpus.heldout.documents else "",
        tokenizer=str(out / TOKENIZER_FILE),
    )


def read_reusable_corpus(out: Path, stamp: str, rebuild: RebuildPolicy) -> Corpus | None:
    """Return the corpus of the folder where it need not be built again."""
    return _read_intact_corpus(out, stamp) if rebuild is RebuildPolicy.IF_CHANGED else None


def _read_intact_corpus(out: Path, stamp: str) -> Corpus | None:
    """Read the corpus in the folder, if it is the one of the stamp and its files are intact."""
    try:
        corpus = read_corpus(out)
        vocab_size = load_tokenizer(out / TOKENIZER_FILE).vocab_size
        if corpus.stamp != stamp or vocab_size != corpus.vocab_size:
            return None
        splits = [(out / "train", corpus.train)]
        if corpus.heldout.documents:
            splits.append((out / "heldout", corpus.heldout))
        if corpus.kind is CorpusKind.CHATS:
            for prefix, _ in splits:
                open_indexed(learnt_prefix(prefix))
        fingerprints = [open_stream(prefix).fingerprint for prefix, _ in splits]
    except BadInput:
        return None
    if fingerprints == [split.fingerprint for _, split in splits]:
        return corpus
    return None


def _describe_split(dataset: IndexedDataset) -> CorpusSplit:
    return CorpusSplit(
        documents=dataset.documents, tokens=dataset.token_count, fingerprint=dataset.fingerprint
    )
