"""The corpora of a job as rows of a batch, whether they are one stream of text or packed chats."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from moewright.codec.data_paths import WeightedPath, parse_data_paths
from moewright.engine.data.blend import Blend, StepSequences, build_blend, pack_step
from moewright.engine.data.corpus import corpus_entropy, sum_token_counts, unigram_nats
from moewright.engine.data.indexed import IndexedDataset
from moewright.engine.data.packing import (
    ChatDataset,
    Float64s,
    SampleRows,
    build_chat_sampler,
    build_pack_sampler,
    is_chat_pair,
    open_chats,
    pack_chats,
    read_packed,
)
from moewright.engine.data.sampler import (
    Int64s,
    SampleOrder,
    Sampler,
    attended_share,
    build_sampler,
    document_ends,
    read_samples,
)
from moewright.engine.data.sharded import open_stream
from moewright.rules.packing import IGNORED_TARGET, PackedSequences, packed_share
from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import DocumentMasking, Objective, Workload


class CorpusReader(Protocol):
    """A corpus that was opened and checked."""

    @property
    def pair(self) -> IndexedDataset:
        """The pair of its tokens."""
        ...

    @property
    def fingerprint(self) -> str:
        """What its content is known by."""
        ...

    @property
    def is_chats(self) -> bool:
        """Whether its samples are chats, of which some tokens alone are learnt."""
        ...

    def build_sampler(self, workload: Workload, order: SampleOrder, *, at_least: int) -> Sampler:
        """Build its sampler, or raise BadInput where it has fewer than `at_least` samples."""
        ...

    def attended_share(self, workload: Workload) -> float:
        """Return the share of the token pairs of sequences that documents leave."""
        ...

    def read(self, ids: Int64s, workload: Workload, vocab_size: int) -> SampleRows:
        """Read samples by their ids."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCorpus:
    """A stream of documents, cut into sequences anywhere."""

    pair: IndexedDataset
    is_chats: bool = False

    @property
    def fingerprint(self) -> str:
        return self.pair.fingerprint

    def build_sampler(self, workload: Workload, order: SampleOrder, *, at_least: int) -> Sampler:
        return build_sampler(
            self.pair,
            seq_len=workload.seq_len,
            global_batch=at_least,
            seed=workload.seed,
            order=order,
        )

    def attended_share(self, workload: Workload) -> float:
        return attended_share(self.pair, seq_len=workload.seq_len)

    def read(self, ids: Int64s, workload: Workload, vocab_size: int) -> SampleRows:
        seq_len = workload.seq_len
        tokens = read_samples(self.pair, ids, seq_len=seq_len, vocab_size=vocab_size)
        # A copy, because the inputs are a view of the same tokens.
        targets = tokens[:, 1:].copy()
        lengths: list[tuple[int, ...]] = []
        if workload.data.documents is not DocumentMasking.JOINED:
            for row, sample in enumerate(ids.tolist()):
                # The last token of a document has no target: it would be another document's.
                ends = document_ends(self.pair, sample, seq_len=seq_len)
                targets[row, [end - 1 for end in ends]] = IGNORED_TARGET
                # A set: a document may end where the sample does.
                edges = sorted({0, *ends, seq_len})
                lengths.append(tuple(stop - start for start, stop in pairwise(edges)))
        return SampleRows(inputs=tokens[:, :-1], targets=targets, lengths=tuple(lengths))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatCorpus:
    """Samples that stay whole, packed into sequences; each is a segment, and so is padding."""

    chats: ChatDataset
    packs: PackedSequences
    is_chats: bool = True

    @property
    def pair(self) -> IndexedDataset:
        return self.chats.tokens

    @property
    def fingerprint(self) -> str:
        return self.chats.fingerprint

    def build_sampler(self, workload: Workload, order: SampleOrder, *, at_least: int) -> Sampler:
        if workload.batch_samples:
            return build_chat_sampler(
                self.chats, batch_samples=at_least, seed=workload.seed, order=order
            )
        return build_pack_sampler(
            self.chats, self.packs, global_batch=at_least, seed=workload.seed, order=order
        )

    def attended_share(self, workload: Workload) -> float:
        del workload
        chats = self.chats
        return packed_share(chats.lengths, chats.tokens.lengths, self.packs)

    def read(self, ids: Int64s, workload: Workload, vocab_size: int) -> SampleRows:
        del workload
        return read_packed(self.chats, self.packs, ids, vocab_size=vocab_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusBlend:
    """The corpora of a job, one or several, and the order in which their samples are read."""

    corpora: tuple[CorpusReader, ...]
    parts: tuple[WeightedPath, ...]
    order: Blend

    @property
    def fingerprint(self) -> str:
        """What the data are known by: contents, and weights where there are several."""
        if len(self.corpora) == 1:
            return self.corpora[0].fingerprint
        names = [
            f"{part.share:.12g} {corpus.fingerprint}"
            for part, corpus in zip(self.parts, self.corpora, strict=True)
        ]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]

    @property
    def is_chats(self) -> bool:
        return self.corpora[0].is_chats

    def pack_step(self, step: int, workload: Workload) -> StepSequences:
        """Pack the chats of a step of `batch_samples`, counted from 0."""
        return pack_step(
            self.chats,
            self.order,
            step=step,
            samples=workload.batch_samples,
            seq_len=workload.seq_len,
        )

    @property
    def chats(self) -> tuple[ChatDataset, ...]:
        """The corpora that are chats or pairs."""
        return tuple(corpus.chats for corpus in self.corpora if isinstance(corpus, ChatCorpus))

    def add_references(self, references: Mapping[str, Float64s], *, where: str) -> CorpusBlend:
        """Return the blend with the log-probabilities of its pairs, by fingerprint of the corpus.

        Raises:
            BadInput: naming the corpus that `where` has none of.
        """
        corpora: list[CorpusReader] = []
        for corpus in self.corpora:
            assert isinstance(corpus, ChatCorpus)  # _check_objective
            if corpus.fingerprint not in references:
                rule = f"holds other pairs than those that {where} has log-probabilities of"
                raise BadInput(Reason(field=str(corpus.pair.bin_path), rule=rule))
            chats = replace(corpus.chats, reference=references[corpus.fingerprint])
            corpora.append(replace(corpus, chats=chats))
        return replace(self, corpora=tuple(corpora))

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(part.share for part in self.parts)

    def read(self, first: int, count: int, workload: Workload, vocab_size: int) -> SampleRows:
        """Read the samples from place `first` of the order on."""
        inputs = np.zeros((count, workload.seq_len), dtype=np.int64)
        targets = np.zeros_like(inputs)
        lengths: list[tuple[int, ...]] = [()] * count
        reference: list[tuple[float, ...]] = [()] * count
        is_bounded = False
        for part in self.order.locate(first, count):
            rows = self.corpora[part.corpus].read(part.ids, workload, vocab_size)
            inputs[part.rows] = rows.inputs
            targets[part.rows] = rows.targets
            # Not strict: where documents do not bound attention, there are no lengths.
            for row, row_lengths in zip(part.rows.tolist(), rows.lengths, strict=False):
                lengths[row] = row_lengths
                is_bounded = True
            for row, answers in zip(part.rows.tolist(), rows.reference, strict=False):
                reference[row] = answers
        return SampleRows(
            inputs=inputs,
            targets=targets,
            lengths=tuple(lengths) if is_bounded else (),
            reference=tuple(reference),
        )


def count_attended_share(parts: Sequence[WeightedPath], workload: Workload) -> float:
    """Return the share of the token pairs of sequences that the documents of corpora leave."""
    return sum(
        part.share * _open_corpus(Path(part.path), workload).attended_share(workload)
        for part in parts
    )


def open_corpora(
    text: str, workload: Workload, order: SampleOrder, *, field: str = "data.train"
) -> CorpusBlend:
    """Open the corpora that a job names.

    Raises:
        BadInput: naming the file that is missing, damaged or too small, or the field of a blend
            that is none.
    """
    parts = parse_data_paths(text, field)
    corpora = tuple(_open_corpus(Path(part.path), workload) for part in parts)
    kinds = {corpus.is_chats for corpus in corpora}
    if len(kinds) > 1:
        rule = "blends chats with text, which are not packed alike"
        raise BadInput(Reason(field=field, value=text[:60], rule=rule))
    # In a blend one corpus may have fewer samples than a batch.
    at_least = 1
    if len(corpora) == 1:
        at_least = workload.batch_samples or workload.global_batch
    samplers = [corpus.build_sampler(workload, order, at_least=at_least) for corpus in corpora]
    shares = [part.share for part in parts]
    return CorpusBlend(corpora=corpora, parts=parts, order=build_blend(samplers, shares))


def blend_entropy(train: CorpusBlend, heldout: CorpusBlend, vocab_size: int) -> float:
    """Return the unigram entropy of held-out corpora under those that are trained on, in nats."""
    if len(train.corpora) == len(heldout.corpora) == 1:
        return corpus_entropy(train.corpora[0].pair, heldout.corpora[0].pair, vocab_size)
    train_shares, heldout_shares = (
        [(corpus.pair, share) for corpus, share in zip(data.corpora, data.shares, strict=True)]
        for data in (train, heldout)
    )
    return unigram_nats(
        sum_token_counts(train_shares, vocab_size), sum_token_counts(heldout_shares, vocab_size)
    )


def join_lengths(lengths: Iterable[Sequence[int]]) -> list[int]:
    """Return the lengths of all rows, row after row."""
    return [length for row in lengths for length in row]


def _check_objective(prefix: Path, chats: ChatDataset | None, workload: Workload) -> None:
    """Refuse pairs of answers without an objective that weighs them, and it without pairs."""
    objective = workload.loss.objective
    holds_pairs = chats is not None and chats.holds_pairs
    if holds_pairs is (objective is Objective.DPO):
        return
    rule = f"{prefix} holds no pairs of a chosen and a rejected answer"
    nearest = Objective.NEXT_TOKEN
    if holds_pairs:
        rule = f"{prefix} holds pairs of a chosen and a rejected answer, which is not to be learnt"
        nearest = Objective.DPO
    raise BadInput(Reason(field="train.objective", value=objective, rule=rule, nearest=nearest))


def _open_corpus(prefix: Path, workload: Workload) -> CorpusReader:
    if not is_chat_pair(prefix):
        _check_objective(prefix, None, workload)
        if workload.batch_samples:
            rule = f"{prefix} holds text, of which every sequence is full; chats alone are packed"
            value = str(workload.batch_samples)
            raise BadInput(Reason(field="train.batch_samples", value=value, rule=rule, nearest="0"))
        return TextCorpus(pair=open_stream(prefix))
    if workload.data.documents is not DocumentMasking.RESTARTED:
        rule = f"{prefix} holds chats, which are packed and never attend each other"
        raise BadInput(
            Reason(
                field="data.documents",
                value=workload.data.documents,
                rule=rule,
                nearest=DocumentMasking.RESTARTED,
            )
        )
    chats = open_chats(prefix)
    _check_objective(prefix, chats, workload)
    return ChatCorpus(chats=chats, packs=pack_chats(chats, seq_len=workload.seq_len))
