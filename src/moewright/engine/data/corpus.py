"""What a corpus is, the documents of its source, and the loss of one who counted its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moewright.codec import read_json
from moewright.engine.data.indexed import IndexedDataset, Tokens
from moewright.engine.data.source import SkipReason
from moewright.engine.data.tokenizer import TokenizerKind
from moewright.spec.errors import BadInput, Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentCensus:
    """The documents of a source as their first 64 hash bits and their characters [documents]."""

    hashes: npt.NDArray[np.uint64]
    chars: npt.NDArray[np.int64]
    files: int
    text_bytes: int
    skipped: Mapping[SkipReason, int]


def find_heldout_limit(
    hashes: npt.NDArray[np.uint64], chars: npt.NDArray[np.int64], fraction: float, root: str
) -> int:
    """Return the hash below which documents are held out.

    They are the documents with the smallest hashes whose characters are `fraction` of all, one at
    least; equal documents have one hash. 0 where the fraction is 0.

    Raises:
        BadInput: when one side would be empty.
    """
    unique, inverse = np.unique(hashes, return_inverse=True)
    if fraction == 0 and len(unique):
        return 0
    if len(unique) < 2:
        rule = (
            "needs two different documents of UTF-8 text at least, one to train on and one to "
            "hold out"
        )
        raise BadInput(Reason(field="source", rule=rule, value=f"{root} with {len(unique)}"))
    sums = np.cumsum(np.bincount(inverse, weights=chars))
    heldout = 1 + int(np.searchsorted(sums, fraction * sums[-1]))
    return int(unique[min(heldout, len(unique) - 1)])


def check_heldout_fraction(fraction: float) -> None:
    """Raise BadInput for a share of the text that cannot be held out."""
    if not 0 <= fraction <= 0.5:
        rule = "must be at least 0 (nothing is held out) and at most 0.5"
        value = f"{fraction:g}"
        raise BadInput(Reason(field="heldout_fraction", rule=rule, value=value, nearest="0.05"))


def hash_document(document: str) -> int:
    """Return the first 64 bits of a document's SHA-256."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big")


Counts = npt.NDArray[np.int64]

# Of a longer stream, blocks are counted that are evenly spaced over it.
_MAX_TOKENS = 1 << 26
_BLOCK_TOKENS = 1 << 20


def unigram_entropy(train: IndexedDataset, heldout: IndexedDataset, vocab_size: int) -> float:
    """Return the nats a token of the held-out stream under the train stream's unigram frequencies.

    One is added to every count (Laplace smoothing). Tokens outside the vocabulary are left out.
    """
    return unigram_nats(
        np.bincount(_sample(train, vocab_size), minlength=vocab_size),
        np.bincount(_sample(heldout, vocab_size), minlength=vocab_size),
    )


def unigram_nats(train_counts: Counts, heldout_counts: Counts) -> float:
    """Return these nats from the counts of each token [vocab]; 0 where nothing is held out."""
    total = int(heldout_counts.sum())
    if not total:
        return 0.0
    smoothed = train_counts + 1.0
    # As a difference of logarithms: shares of rare tokens are tiny.
    nats = np.log(smoothed.sum()) - np.log(smoothed)
    return float(nats @ heldout_counts / total)


def sum_token_counts(parts: Sequence[tuple[IndexedDataset, float]], vocab_size: int) -> Counts:
    """Return the counts of each token [vocab] in a blend of streams by their shares.

    They are of as many tokens as the streams have together.
    """
    counts = [np.bincount(_sample(pair, vocab_size), minlength=vocab_size) for pair, _ in parts]
    total = sum(int(part.sum()) for part in counts)
    blended = sum(
        share * total * part / max(1, part.sum())
        for part, (_, share) in zip(counts, parts, strict=True)
    )
    return np.rint(blended).astype(np.int64)


def _sample(dataset: IndexedDataset, vocab_size: int) -> Tokens:
    """Return the tokens of a stream, or of blocks that are evenly spaced over a long one."""
    tokens = dataset.tokens
    if len(tokens) <= _MAX_TOKENS:
        tokens = tokens[:]
    else:
        starts = np.linspace(0, len(tokens) - _BLOCK_TOKENS, _MAX_TOKENS // _BLOCK_TOKENS)
        tokens = np.concatenate(
            [tokens[start : start + _BLOCK_TOKENS] for start in starts.astype(np.int64)]
        )
    return tokens[(tokens >= 0) & (tokens < vocab_size)]


CORPUS_FILE = "corpus.json"
# What follows a pair's prefix in that of the pair which marks its learnt tokens.
LEARNT_SUFFIX = "_learnt"


class CorpusKind(StrEnum):
    """What the documents of a corpus are."""

    TEXT = "text"  # one stream, cut into sequences anywhere
    CHATS = "chats"  # samples that stay whole, of which the assistant's tokens alone are learnt
    PAIRS = "pairs"  # samples of two documents, a chosen and a rejected answer to one prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestSample:
    """The longest sample of a corpus of chats, and the record that it comes from."""

    tokens: int = 0
    where: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSplit:
    """One pair of files; a document of text ends with an end-of-document token, which counts."""

    documents: int = 0
    tokens: int = 0
    learnt_tokens: int = 0  # of chats and pairs
    fingerprint: str = ""  # "" where there is no pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A corpus, as corpus.json describes it.

    `unigram_entropy` is in nats a token: held-out tokens under the train unigram distribution; 0
    where nothing is held out. `stamp` identifies the source, the parameters and the versions that
    made the corpus.
    """

    source: str
    files: int
    skipped_files: int  # not UTF-8 text, or unreadable
    text_bytes: int
    tokenizer: TokenizerKind
    vocab_size: int
    train: CorpusSplit
    heldout: CorpusSplit
    unigram_entropy: float
    stamp: str
    empty_documents: int = 0  # left out
    kind: CorpusKind = CorpusKind.TEXT
    longest: LongestSample = LongestSample()  # of chats and pairs
    bad_records: int = 0  # of chats, left out


def count_samples(corpus: Corpus, split: CorpusSplit) -> str:
    """Return how many samples a split has, in words; of preferences they are pairs."""
    if corpus.kind is CorpusKind.PAIRS:
        return f"{split.documents // 2:,} pairs"
    return f"{split.documents:,} samples"


def learnt_prefix(prefix: Path) -> Path:
    """Return the prefix of the pair that marks the learnt tokens of a pair of chats.

    It has the same documents, of tokens 1 where the token is learnt and 0 elsewhere.
    """
    return prefix.with_name(prefix.name + LEARNT_SUFFIX)


def read_corpus(out: Path) -> Corpus:
    """Read the corpus.json of a folder, or raise BadInput."""
    return read_json(Corpus, out / CORPUS_FILE)


def corpus_entropy(train: IndexedDataset, heldout: IndexedDataset, vocab_size: int) -> float:
    """Return the unigram entropy of two pairs: that of their corpus.json, or counted anew."""
    with suppress(BadInput):  # pairs of other programs have no corpus.json
        corpus = read_corpus(heldout.prefix.parent)
        if (corpus.train.fingerprint, corpus.heldout.fingerprint) == (
            train.fingerprint,
            heldout.fingerprint,
        ):
            return corpus.unigram_entropy
    return unigram_entropy(train, heldout, vocab_size)
