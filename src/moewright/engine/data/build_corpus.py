"""Text to a corpus: `train` and `heldout` .bin/.idx pairs, tokenizer.json, and corpus.json that
describes them."""

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
from moewright.engine.data.source import SourceDocuments, TextSource, find_source, read_documents
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
BUILD_VERSION = 1  # part of the stamp: raise it when the same input gives other files
DEFAULT_LIMIT_BYTES = 16_000_000


class RebuildPolicy(StrEnum):
    IF_CHANGED = "if_changed"
    ALWAYS = "always"


class BuildOutcome(StrEnum):
    BUILT = "built"
    REUSED = "reused"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSplit:
    """One pair of files; tokens include one end-of-document token a document."""

    documents: int
    tokens: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """corpus.json. `unigram_entropy` is in nats a token: held-out tokens under the train unigram
    distribution."""

    source: str
    files: int
    skipped_files: int  # not UTF-8 text
    text_bytes: int
    tokenizer: TokenizerKind
    vocab_size: int
    train: CorpusSplit
    heldout: CorpusSplit
    unigram_entropy: float
    stamp: str  # of the source, the parameters and the versions that made it


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildReport:
    """What `build` did, and how a job names the result."""

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
    """Build a corpus in folder `out` from a text file, a folder, or (None) the interpreter's
    standard library.

    The documents with the smallest content hashes are held out, `heldout_fraction` of the text and
    one at least, so equal documents are never on both sides. Every file is replaced whole,
    corpus.json last; a folder that holds the same corpus (same source files, parameters, versions;
    files intact) is left alone. Raises BadInput.
    """
    started = time.monotonic()
    _validate_parameters(heldout_fraction, limit_bytes, out)
    found = find_source(source, out)
    parameters = (found.stamp, vocab_size, tokenizer, heldout_fraction, limit_bytes, BUILD_VERSION)
    stamp = hashlib.sha256(
        repr((*parameters, tokenizers.__version__, np.__version__)).encode()
    ).hexdigest()[:16]
    data = DataSpec(
        train=str(out / "train"), heldout=str(out / "heldout"), tokenizer=str(out / TOKENIZER_FILE)
    )
    corpus = _read_intact_corpus(out, stamp) if rebuild is RebuildPolicy.IF_CHANGED else None
    outcome = BuildOutcome.REUSED if corpus else BuildOutcome.BUILT
    if corpus is None:
        texts = read_documents(found, limit_bytes=limit_bytes)
        try:
            corpus = _write_corpus(
                out, found, texts, vocab_size, tokenizer, heldout_fraction, stamp
            )
        except OSError as error:
            raise BadInput(
                Reason(field=str(out), rule=f"cannot be written: {error.strerror or error}")
            ) from error
    return BuildReport(
        corpus=corpus, outcome=outcome, seconds=time.monotonic() - started, data=data
    )


def read_corpus(out: Path) -> Corpus:
    """The corpus.json of a folder. Raises BadInput."""
    return read_json(Corpus, out / CORPUS_FILE)


def unigram_entropy(train: IndexedDataset, heldout: IndexedDataset, vocab_size: int) -> float:
    """Nats a token of the held-out stream under the train stream's unigram frequencies, every count
    plus one.

    A model that has learnt no more than how often each token occurs has this loss.
    """
    counts = np.bincount(train.tokens, minlength=vocab_size) + 1.0
    nats = np.log(counts.sum()) - np.log(counts)
    return float(nats[heldout.tokens].mean())


def _validate_parameters(heldout_fraction: float, limit_bytes: int, out: Path) -> None:
    if not 0 < heldout_fraction <= 0.5:
        rule = "must be above 0 and at most 0.5"
        raise BadInput(
            Reason(
                field="heldout_fraction", rule=rule, value=f"{heldout_fraction:g}", nearest="0.05"
            )
        )
    if limit_bytes < 1:
        raise BadInput(
            Reason(
                field="limit_bytes", rule="must be positive", value=str(limit_bytes), nearest="1"
            )
        )
    if out.exists() and not out.is_dir():
        raise BadInput(Reason(field="out", rule="is a file; a folder is needed", value=str(out)))


def _read_intact_corpus(out: Path, stamp: str) -> Corpus | None:
    """The corpus in the folder when it is the one the stamp names and its files are whole."""
    try:
        corpus = read_corpus(out)
        if (
            corpus.stamp != stamp
            or load_tokenizer(out / TOKENIZER_FILE).vocab_size != corpus.vocab_size
        ):
            return None
        pairs = (
            (corpus.train, open_indexed(out / "train")),
            (corpus.heldout, open_indexed(out / "heldout")),
        )
    except BadInput:
        return None
    return corpus if all(split.fingerprint == data.fingerprint for split, data in pairs) else None


def _write_corpus(
    out: Path,
    source: TextSource,
    texts: SourceDocuments,
    vocab_size: int,
    kind: TokenizerKind,
    heldout_fraction: float,
    stamp: str,
) -> Corpus:
    train_texts, heldout_texts = split_documents(
        texts.documents, heldout_fraction, str(source.root)
    )
    learnt = (
        train_bpe(train_texts, vocab_size=vocab_size)
        if kind is TokenizerKind.BPE
        else build_byte_tokenizer()
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / CORPUS_FILE).unlink(
        missing_ok=True
    )  # until the new one is written, the folder holds no corpus
    learnt.save(out / TOKENIZER_FILE)
    train = _write_split(out / "train", train_texts, learnt)
    heldout = _write_split(out / "heldout", heldout_texts, learnt)
    corpus = Corpus(
        source=source.description,
        files=texts.files,
        skipped_files=texts.skipped_files,
        text_bytes=texts.text_bytes,
        tokenizer=kind,
        vocab_size=learnt.vocab_size,
        train=CorpusSplit(
            documents=train.documents, tokens=train.token_count, fingerprint=train.fingerprint
        ),
        heldout=CorpusSplit(
            documents=heldout.documents, tokens=heldout.token_count, fingerprint=heldout.fingerprint
        ),
        unigram_entropy=unigram_entropy(train, heldout, learnt.vocab_size),
        stamp=stamp,
    )
    write_json(out / CORPUS_FILE, corpus)
    return corpus


def split_documents(
    documents: Sequence[str], heldout_fraction: float, root: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Train and held-out documents, each in the order given. Raises BadInput when one side would be
    empty."""
    hashes = [hashlib.sha256(document.encode()).digest() for document in documents]
    sizes = dict.fromkeys(sorted(hashes), 0)
    for key, document in zip(hashes, documents, strict=True):
        sizes[key] += len(document)
    if len(sizes) < 2:
        rule = "needs two different documents of UTF-8 text at least, one to train on and one to hold out"
        raise BadInput(Reason(field="source", rule=rule, value=f"{root} with {len(sizes)}"))
    wanted = heldout_fraction * sum(sizes.values())
    held, taken = set[bytes](), 0
    for key in list(sizes)[:-1]:
        if taken >= wanted:
            break
        held.add(key)
        taken += sizes[key]
    train = tuple(
        document for key, document in zip(hashes, documents, strict=True) if key not in held
    )
    heldout = tuple(
        document for key, document in zip(hashes, documents, strict=True) if key in held
    )
    return train, heldout


def _write_split(prefix: Path, documents: Sequence[str], learnt: Tokenizer) -> IndexedDataset:
    write_indexed(prefix, learnt.encode_documents(documents), dtype=token_dtype(learnt.vocab_size))
    return open_indexed(prefix)
