"""Corpora of chats, whose samples are packed into sequences (rules.packing) and read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moewright.engine.data.corpus import CORPUS_FILE, CorpusKind, learnt_prefix, read_corpus
from moewright.engine.data.indexed import IndexedDataset, open_indexed, refuse_if_shrunk
from moewright.engine.data.sampler import SampleOrder, Sampler
from moewright.rules.packing import PackedSequences, pack_lengths
from moewright.spec.errors import BadInput, Reason

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatDataset:
    """A corpus of chats that was opened and checked: tokens, and which of them are learnt.

    A sample is `sample_documents` documents after each other: a chat, or the two answers of a pair.
    `reference` [documents] are the log-probabilities of the answers of pairs under the model that
    the trained one is held against, as far as they are known.
    """

    tokens: IndexedDataset
    learnt: IndexedDataset
    sample_documents: int = 1
    reference: Float64s | None = None

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.tokens.documents // self.sample_documents

    @property
    def lengths(self) -> Int64s:
        """The tokens of each sample."""
        lengths: Int64s = self.tokens.lengths.reshape(-1, self.sample_documents).sum(1)
        return lengths

    @property
    def holds_pairs(self) -> bool:
        return self.sample_documents == 2

    @property
    def fingerprint(self) -> str:
        return f"{self.tokens.fingerprint}-{self.learnt.fingerprint}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleRows:
    """Samples that were read: inputs and targets [rows, seq_len], and the lengths in each row.

    A target is -1 where nothing is learnt. The lengths are those of what attends only itself; ()
    where documents do not bound attention. Where sequences are packed they are those of the
    documents, then that of the padding, where there is any; padding repeats token 0. Of pairs,
    `reference` has the log-probability of each answer under the reference, 0 where it is not known
    yet; () of text.
    """

    inputs: Int64s
    targets: Int64s
    lengths: tuple[tuple[int, ...], ...]
    reference: tuple[tuple[float, ...], ...] = ()


def is_chat_pair(prefix: Path) -> bool:
    """Return whether a pair holds chats: a pair of learnt tokens lies beside it."""
    learnt = learnt_prefix(prefix)
    return learnt.with_name(f"{learnt.name}.idx").is_file()


def open_chats(prefix: Path) -> ChatDataset:
    """Open both pairs of a corpus of chats.

    Raises:
        BadInput: naming the file which is missing, damaged or of another corpus.
    """
    tokens = open_indexed(prefix)
    learnt = open_indexed(learnt_prefix(prefix))
    if not np.array_equal(tokens.lengths, learnt.lengths):
        rule = f"has not the samples of {tokens.bin_path.name}; build the data again"
        raise BadInput(Reason(field=str(learnt.bin_path), rule=rule))
    corpus_file = prefix.parent / CORPUS_FILE
    is_pairs = corpus_file.is_file() and read_corpus(prefix.parent).kind is CorpusKind.PAIRS
    return ChatDataset(tokens=tokens, learnt=learnt, sample_documents=2 if is_pairs else 1)


def pack_chats(chats: ChatDataset, *, seq_len: int) -> PackedSequences:
    """Pack the samples of a corpus.

    Raises:
        BadInput: naming the record of the longest sample, when no sequence holds it.
    """
    lengths = chats.lengths
    longest = int(lengths.max())
    if longest > seq_len:
        prefix = chats.tokens.prefix
        where = str(chats.tokens.bin_path)
        corpus_file = prefix.parent / CORPUS_FILE
        if corpus_file.is_file():
            where = read_corpus(prefix.parent).longest.where or where
        rule = (
            f"gives a sample of {longest:,} tokens; a sequence of train.seq_len holds {seq_len:,}"
        )
        raise BadInput(Reason(field=where, rule=rule, nearest=f"a seq_len of {longest}"))
    return pack_lengths(lengths, seq_len)


def build_pack_sampler(
    chats: ChatDataset,
    packs: PackedSequences,
    *,
    global_batch: int,
    seed: int,
    order: SampleOrder = SampleOrder.SHUFFLED,
) -> Sampler:
    """Build the sampler of packed sequences; raise BadInput when they fill no global batch."""
    if packs.count < global_batch:
        rule = (
            f"{chats.samples} samples fill {packs.count} sequences of {packs.seq_len} "
            f"tokens; a global batch needs {global_batch}"
        )
        nearest = f"a global_batch of {packs.count}, or a shorter seq_len"
        raise BadInput(Reason(field=str(chats.tokens.bin_path), rule=rule, nearest=nearest))
    return Sampler(samples=packs.count, seed=seed, order=order)


def build_chat_sampler(
    chats: ChatDataset, *, batch_samples: int, seed: int, order: SampleOrder
) -> Sampler:
    """Build the sampler of single chats; raise BadInput when they fill no step."""
    count = chats.samples
    if count < batch_samples:
        rule = f"has {count} samples; a step of train.batch_samples needs {batch_samples}"
        nearest = f"batch_samples of {count}"
        raise BadInput(Reason(field=str(chats.tokens.bin_path), rule=rule, nearest=nearest))
    return Sampler(samples=count, seed=seed, order=order)


def read_packed(
    chats: ChatDataset, packs: PackedSequences, ids: Int64s, *, vocab_size: int
) -> SampleRows:
    """Read the sequences `ids`.

    Raises:
        BadInput: naming the file and the document, when a token is outside [0, vocab_size).
    """
    refuse_if_shrunk(chats.tokens)
    refuse_if_shrunk(chats.learnt)
    inputs = np.zeros((len(ids), packs.seq_len), dtype=np.int64)
    targets = np.full((len(ids), packs.seq_len), -1, dtype=np.int64)
    lengths = []
    reference = []
    for row, index in enumerate(ids.tolist()):
        stop = 0
        row_lengths = []
        documents = sequence_documents(chats, packs, index).tolist()
        for document in documents:
            span = _document_span(chats.tokens, document)
            tokens = np.asarray(chats.tokens.tokens[span], dtype=np.int64)
            is_learnt = np.asarray(chats.learnt.tokens[span]) == 1
            _check_tokens(chats.tokens, tokens, document, vocab_size)
            start, stop = stop, stop + len(tokens)
            inputs[row, start:stop] = tokens
            # The target of a token is the next one of its sample.
            # The last token of a document has no next one.
            targets[row, start : stop - 1] = np.where(is_learnt[1:], tokens[1:], -1)
            row_lengths.append(len(tokens))
        # Padding is a segment of its own, so that no document attends to it.
        if stop < packs.seq_len:
            row_lengths.append(packs.seq_len - stop)
        lengths.append(tuple(row_lengths))
        reference.append(_read_reference(chats, documents))
    return SampleRows(
        inputs=inputs, targets=targets, lengths=tuple(lengths), reference=tuple(reference)
    )


def sequence_documents(chats: ChatDataset, packs: PackedSequences, index: int) -> Int64s:
    """Return the documents of a sequence, in order."""
    count = chats.sample_documents
    documents: Int64s = packs.sequence(index)[:, None] * count + np.arange(count)
    return documents.ravel()


def _read_reference(chats: ChatDataset, documents: list[int]) -> tuple[float, ...]:
    if not chats.holds_pairs:
        return ()
    if chats.reference is None:
        return (0.0,) * len(documents)
    return tuple(chats.reference[documents].tolist())


def _document_span(dataset: IndexedDataset, document: int) -> slice:
    start = int(dataset.document_starts[document])
    return slice(start, start + int(dataset.lengths[document]))


def _check_tokens(dataset: IndexedDataset, tokens: Int64s, document: int, vocab_size: int) -> None:
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        rule = f"token {int(outside[0])} of document {document} is outside the vocabulary"
        nearest = f"an id below {vocab_size}"
        raise BadInput(Reason(field=str(dataset.bin_path), rule=rule, nearest=nearest))
