"""What a corpus is: one or two .bin/.idx pairs and a corpus.json that describes them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from moewright.codec import read_json
from moewright.engine.data.indexed import IndexedDataset
from moewright.engine.data.tokenizer import TokenizerKind
from moewright.engine.data.unigram import unigram_entropy
from moewright.spec.errors import BadInput

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
