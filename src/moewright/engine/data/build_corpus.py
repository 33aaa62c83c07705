"""Text to a corpus: two .bin/.idx pairs, a tokenizer, and a description.

They are `train` and `heldout`, tokenizer.json, and corpus.json.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import tokenizers

from moewright.codec import read_json, write_json
from moewright.engine.data.indexed import IndexedDataset, open_indexed, token_dtype, write_indexed
from moewright.engine.data.source import find_source, read_documents
from moewright.engine.data.tokenizer import (
    Tokenizer,
    TokenizerKind,
    build_byte_tokenizer,
    load_tokenizer,
    train_bpe,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import DataSpec

CORPUS_FILE = "corpus.json"
TOKENIZER_FILE = "tokenizer.json"
# A part of the stamp: raise it when the same input gives other files.
BUILD_VERSION = 1
DEFAULT_LIMIT_BYTES = 16_000_000


class RebuildPolicy(StrEnum):
    """The choice whether to build a corpus that is there already."""

    IF_CHANGED = "if_changed"
    ALWAYS = "always"


class BuildOutcome(StrEnum):
    """The outcome of a build: a new corpus, or the equal one that was there."""

    BUILT = "built"
    REUSED = "reused"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSplit:
    """One pair of files; tokens include one end-of-document token for each document."""

    documents: int
    tokens: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A corpus, as corpus.json describes it.

    `unigram_entropy` is in nats a token: held-out tokens under the train unigram distribution.
    `stamp` identifies the source, the parameters and the versions that made the corpus.
    """

    source: str
    files: int
    skipped_files: int  # not UTF-8 text
    text_bytes: int
    tokenizer: TokenizerKind
    vocab_size: int
    train: CorpusSplit
    heldout: CorpusSplit
    unigram_entropy: float
    stamp: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildReport:
    """The report of a build; `data` is how a job names the corpus."""

    corpus: Corpus
    outcome: BuildOutcome
    seconds: float
    data: DataSpec


def build_corpus(
    source: Path | None,
    out: Path,
    *,
    vocab_size: int = 4096,
    tokenizer: TokenizerKind = TokenizerKind.BPE,
    heldout_fraction: float = 0.05,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
    rebuild: RebuildPolicy = RebuildPolicy.IF_CHANGED,
) -> BuildReport:
    """Build a corpus in folder `out` from a text file or a folder.

    Where `source` is None, the text is the interpreter's standard library. The documents with the
    smallest content hashes are held out, `heldout_fraction` of the text and one at least, so equal
    documents are never on both sides. Every file is replaced as a whole, corpus.json last; a folder
    that holds the same corpus (same source files, parameters, versions; files intact) is left
    alone.

    Raises:
        BadInput: for parameters or a source that give no corpus, or a folder that cannot be
            written.
    """
    started = time.monotonic()
    _validate_parameters(heldout_fraction, limit_bytes, out)
    text_source = find_source(source, out)
    parameters = (
        text_source.stamp,
        vocab_size,
        tokenizer,
        heldout_fraction,
        limit_bytes,
        BUILD_VERSION,
        tokenizers.__version__,
        np.__version__,
    )
    stamp = hashlib.sha256(repr(parameters).encode()).hexdigest()[:16]
    corpus = _read_intact_corpus(out, stamp) if rebuild is RebuildPolicy.IF_CHANGED else None
    outcome = BuildOutcome.REUSED
    if corpus is None:
        outcome = BuildOutcome.BUILT
        documents = read_documents(text_source, limit_bytes=limit_bytes)
        train_texts, heldout_texts = split_documents(
            documents.documents, heldout_fraction, str(text_source.root)
        )
        if tokenizer is TokenizerKind.BPE:
            built_tokenizer = train_bpe(train_texts, vocab_size=vocab_size)
        else:
            built_tokenizer = build_byte_tokenizer()
        try:
            train, heldout = _write_data(out, built_tokenizer, train_texts, heldout_texts)
            corpus = Corpus(
                source=text_source.description,
                files=documents.files,
                skipped_files=documents.skipped_files,
                text_bytes=documents.text_bytes,
                tokenizer=tokenizer,
                vocab_size=built_tokenizer.vocab_size,
                train=_describe_split(train),
                heldout=_describe_split(heldout),
                unigram_entropy=unigram_entropy(train, heldout, built_tokenizer.vocab_size),
                stamp=stamp,
            )
            write_json(out / CORPUS_FILE, corpus)
        except OSError as error:
            rule = f"cannot be written: {error.strerror or error}"
            raise BadInput(Reason(field=str(out), rule=rule)) from error
    data = DataSpec(
        train=str(out / "train"), heldout=str(out / "heldout"), tokenizer=str(out / TOKENIZER_FILE)
    )
    return BuildReport(
        corpus=corpus, outcome=outcome, seconds=time.monotonic() - started, data=data
    )


def read_corpus(out: Path) -> Corpus:
    """Read the corpus.json of a folder, or raise BadInput."""
    return read_json(Corpus, out / CORPUS_FILE)


def unigram_entropy(train: IndexedDataset, heldout: IndexedDataset, vocab_size: int) -> float:
    """Return the nats a token of the held-out stream under the train stream's unigram frequencies.

    One is added to every count (Laplace smoothing). A model that has learnt no more than how often
    each token occurs has this loss.
    """
    counts = np.bincount(train.tokens, minlength=vocab_size) + 1.0
    nats = np.log(counts.sum()) - np.log(counts)
    return float(nats[heldout.tokens].mean())


def _validate_parameters(heldout_fraction: float, limit_bytes: int, out: Path) -> None:
    if not 0 < heldout_fraction <= 0.5:
        raise BadInput(
            Reason(
                field="heldout_fraction",
                rule="must be above 0 and at most 0.5",
                value=f"{heldout_fraction:g}",
                nearest="0.05",
            )
        )
    if limit_bytes < 1:
        rule = "must be positive"
        raise BadInput(Reason(field="limit_bytes", rule=rule, value=str(limit_bytes), nearest="1"))
    if out.exists() and not out.is_dir():
        raise BadInput(Reason(field="out", rule="is a file; a folder is needed", value=str(out)))


def _read_intact_corpus(out: Path, stamp: str) -> Corpus | None:
    """Read the corpus in the folder, if it is the one of the stamp and its files are intact."""
    try:
        corpus = read_corpus(out)
        vocab_size = load_tokenizer(out / TOKENIZER_FILE).vocab_size
        if corpus.stamp != stamp or vocab_size != corpus.vocab_size:
            return None
        train = open_indexed(out / "train")
        heldout = open_indexed(out / "heldout")
    except BadInput:
        return None
    is_intact = (
        corpus.train.fingerprint == train.fingerprint
        and corpus.heldout.fingerprint == heldout.fingerprint
    )
    return corpus if is_intact else None


def _write_data(
    out: Path, tokenizer: Tokenizer, train_texts: Sequence[str], heldout_texts: Sequence[str]
) -> tuple[IndexedDataset, IndexedDataset]:
    """Write everything but corpus.json; until that is written, the folder holds no corpus."""
    out.mkdir(parents=True, exist_ok=True)
    (out / CORPUS_FILE).unlink(missing_ok=True)
    tokenizer.save(out / TOKENIZER_FILE)
    train = _write_split(out / "train", train_texts, tokenizer)
    heldout = _write_split(out / "heldout", heldout_texts, tokenizer)
    return train, heldout


def _describe_split(dataset: IndexedDataset) -> CorpusSplit:
    return CorpusSplit(
        documents=dataset.documents, tokens=dataset.token_count, fingerprint=dataset.fingerprint
    )


def split_documents(
    documents: Sequence[str], heldout_fraction: float, root: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split documents into train and held-out ones, each in the order given.

    Raises:
        BadInput: when one side would be empty.
    """
    hashes = [hashlib.sha256(document.encode()).digest() for document in documents]
    chars_by_hash = dict.fromkeys(sorted(hashes), 0)
    for key, document in zip(hashes, documents, strict=True):
        chars_by_hash[key] += len(document)
    if len(chars_by_hash) < 2:
        rule = (
            "needs two different documents of UTF-8 text at least, one to train on and one to "
            "hold out"
        )
        value = f"{root} with {len(chars_by_hash)}"
        raise BadInput(Reason(field="source", rule=rule, value=value))
    target_chars = heldout_fraction * sum(chars_by_hash.values())
    heldout_hashes: set[bytes] = set()
    heldout_chars = 0
    for key in list(chars_by_hash)[:-1]:
        if heldout_chars >= target_chars:
            break
        heldout_hashes.add(key)
        heldout_chars += chars_by_hash[key]
    train: list[str] = []
    heldout: list[str] = []
    for key, document in zip(hashes, documents, strict=True):
        side = heldout if key in heldout_hashes else train
        side.append(document)
    return tuple(train), tuple(heldout)


def _write_split(prefix: Path, documents: Sequence[str], tokenizer: Tokenizer) -> IndexedDataset:
    dtype = token_dtype(tokenizer.vocab_size)
    write_indexed(prefix, tokenizer.encode_documents(documents), dtype=dtype)
    return open_indexed(prefix)
