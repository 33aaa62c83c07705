"""Corpora of chats, whose samples are packed into sequences (rules.packing) and read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moewright.engine.data.corpus import CORPUS_FILE, learnt_prefix, read_corpus
from moewright.engine.data.indexed import IndexedDataset, open_indexed, refuse_if_shrunk
from moewright.engine.data.sampler import SampleOrder, Sampler
from moewright.rules.packing import PackedSequences, pack_lengths
from moewright.spec.errors import BadInput, Reason

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatDataset:
    """A corpus of chats that was opened and checked: tokens, and which of them are learnt."""

    tokens: IndexedDataset
    learnt: IndexedDataset

    @property
    def fingerprint(self) -> str:
        return f"{self.tokens.fingerprint}-{self.learnt.fingerprint}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """Sequences that were read: inputs and targets [rows, seq_len], and the lengths in each row.

    A target is -1 where nothing is learnt. The lengths are those of the samples, then that of the
    padding, where there is any; padding repeats token 0.
    """

    inputs: Int64s
    targets: Int64s
    lengths: tuple[tuple[int, ...], ...]


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
    return ChatDataset(tokens=tokens, learnt=learnt)


def pack_chats(chats: ChatDataset, *, seq_len: int) -> PackedSequences:
    """Pack the samples of a corpus.

    Raises:
        BadInput: naming the record of the longest sample, when no sequence holds it.
    """
    lengths = chats.tokens.lengths
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
            f"{chats.tokens.documents} samples fill {packs.count} sequences of {packs.seq_len} "
            f"tokens; a global batch needs {global_batch}"
        )
        nearest = f"a global_batch of {packs.count}, or a shorter seq_len"
        raise BadInput(Reason(field=str(chats.tokens.bin_path), rule=rule, nearest=nearest))
    return Sampler(samples=packs.count, seed=seed, order=order)


def build_chat_sampler(
    chats: ChatDataset, *, batch_samples: int, seed: int, order: SampleOrder
) -> Sampler:
    """Build the sampler of single chats; raise BadInput when they fill no step."""
    count = chats.tokens.documents
    if count < batch_samples:
        rule = f"has {count} samples; a step of train.batch_samples needs {batch_samples}"
        nearest = f"batch_samples of {count}"
        raise BadInput(Reason(field=str(chats.tokens.bin_path), rule=rule, nearest=nearest))
    return Sampler(samples=count, seed=seed, order=order)


def read_packed(
    chats: ChatDataset, packs: PackedSequences, ids: Int64s, *, vocab_size: int
) -> PackedRows:
    """Read the sequences `ids`.

    Raises:
        BadInput: naming the file and the sample, when a token is outside [0, vocab_size).
    """
    refuse_if_shrunk(chats.tokens)
    refuse_if_shrunk(chats.learnt)
    inputs = np.zeros((len(ids), packs.seq_len), dtype=np.int64)
    targets = np.full((len(ids), packs.seq_len), -1, dtype=np.int64)
    lengths = []
    for row, index in enumerate(ids.tolist()):
        stop = 0
        row_lengths = []
        for sample in packs.sequence(index).tolist():
            span = _sample_span(chats.tokens, sample)
            tokens = np.asarray(chats.tokens.tokens[span], dtype=np.int64)
            is_learnt = np.asarray(chats.learnt.tokens[span]) == 1
            _check_tokens(chats.tokens, tokens, sample, vocab_size)
            start, stop = stop, stop + len(tokens)
            inputs[row, start:stop] = tokens
            # The target of a token is the next one of its sample.
            targets[row, start : stop - 1] = np.where(is_learnt[1:], tokens[1:], -1)
            row_lengths.append(len(tokens))
        if stop < packs.seq_len:
            row_lengths.append(packs.seq_len - stop)
        lengths.append(tuple(row_lengths))
    return PackedRows(inputs=inputs, targets=targets, lengths=tuple(lengths))


def _sample_span(dataset: IndexedDataset, sample: int) -> slice:
    start = int(dataset.document_starts[sample])
    return slice(start, start + int(dataset.lengths[sample]))


def _check_tokens(dataset: IndexedDataset, tokens: Int64s, sample: int, vocab_size: int) -> None:
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        rule = f"token {int(outside[0])} of sample {sample} is outside the vocabulary"
        nearest = f"an id below {vocab_size}"
        raise BadInput(Reason(field=str(dataset.bin_path), rule=rule, nearest=nearest))
