"""Chats to a corpus for fine-tuning: token pairs, and pairs that mark what is learnt.

A document is one sample: a chat, or a part of it that the template renders on its own
(chat_template). Of preferences a sample is two documents, the chosen answer and the rejected one.
It is rendered and encoded as transformers does. Records are read twice and never held: once to see
which are held out, once to write them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
import tokenizers

from moewright.codec import write_json, write_text
from moewright.codec.folder_lock import discard_new_folder, lock_folder
from moewright.codec.foreign import read_apart
from moewright.engine.data.build_corpus import (
    BuildOutcome,
    BuildReport,
    Progress,
    RebuildPolicy,
    describe_data,
    read_reusable_corpus,
    wrap_write_errors,
)
from moewright.engine.data.chat_encoder import ChatEncoder, ChatOptions, ChatSample
from moewright.engine.data.chat_forms import parse_columns
from moewright.engine.data.chat_template import TEMPLATE_FILE
from moewright.engine.data.chat_trees import join_trees
from moewright.engine.data.chats import Chat, ChatSchema, parse_record
from moewright.engine.data.corpus import (
    CORPUS_FILE,
    Corpus,
    CorpusKind,
    CorpusSplit,
    LongestSample,
    check_heldout_fraction,
    find_heldout_limit,
    hash_document,
    learnt_prefix,
    unigram_nats,
)
from moewright.engine.data.indexed import IndexedWriter, open_indexed, remove_pair, token_dtype
from moewright.engine.data.records import is_chat_file, read_rows
from moewright.engine.data.source import TextSource, find_source
from moewright.engine.data.tokenizer import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TokenizerKind,
)
from moewright.spec.errors import BadInput, Reason

# A part of the stamp: raise it when the same input gives other files.
_BUILD_VERSION = 3
_BATCH_CHATS = 256
BAD_FILE = "bad_records.txt"  # a line for each that was left out
# Files of a dataset's folder that describe it, and names of splits that nobody trains on.
_DESCRIPTIONS = frozenset(
    {
        "dataset_info.json",
        "dataset_infos.json",
        "dataset_dict.json",
        "state.json",
        "corpus.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "metadata.json",
    }
)
_TEST_SPLITS = frozenset({"test", "validation", "valid", "val", "dev", "eval"})


@read_apart
def build_chats(
    source: Path,
    out: Path,
    options: ChatOptions,
    *,
    rebuild: RebuildPolicy = RebuildPolicy.IF_CHANGED,
    report_progress: Progress = lambda _what, _done, _total: None,
) -> BuildReport:
    """Build a corpus of chats in folder `out`: all of it, or nothing.

    The chats with the smallest content hashes are held out. A folder that holds the same corpus is
    left alone.

    Raises:
        BadInput: naming the file and the line, where a record is broken, of another schema than
            those before it, too long, or has nothing to learn; or the folder cannot be written.
    """
    started = time.monotonic()
    check_heldout_fraction(options.heldout_fraction)
    encoder = ChatEncoder(options)
    text_source = _choose_files(find_source(source, out))
    stamp = _stamp(text_source, options, encoder)
    corpus = read_reusable_corpus(out, stamp, rebuild)
    outcome = BuildOutcome.REUSED
    if corpus is None:
        outcome = BuildOutcome.BUILT
        with wrap_write_errors(out):
            build = _ChatBuild(text_source, out, options, encoder, report_progress)
            corpus = build.run(stamp)
    seconds = time.monotonic() - started
    return BuildReport(
        corpus=corpus,
        outcome=outcome,
        seconds=seconds,
        data=describe_data(corpus, out),
        encode_s=seconds,
    )


class _ChatBuild:
    """One build of a corpus of chats, of which the folder holds nothing intact."""

    def __init__(
        self,
        source: TextSource,
        out: Path,
        options: ChatOptions,
        encoder: ChatEncoder,
        report_progress: Progress,
    ) -> None:
        self._source = source
        self._out = out
        self._options = options
        self._encoder = encoder
        self._report_progress = report_progress
        self._longest = LongestSample()
        self._schema: ChatSchema | None = None
        self._columns = parse_columns(options.columns)
        self.bad: list[str] = []

    def run(self, stamp: str) -> Corpus:
        """Write everything, or nothing where a chat is refused; corpus.json comes last."""
        hashes = np.array(
            [_hash_record(record) for _, record in self._iterate()],
            dtype=np.uint64,
        )
        if not len(hashes):
            rule = "holds no chats"
            raise BadInput(Reason(field="source", rule=rule, value=str(self._source.root)))
        sizes = np.ones(len(hashes), dtype=np.int64)
        fraction = self._options.heldout_fraction
        limit = find_heldout_limit(hashes, sizes, fraction, str(self._source.root))
        with discard_new_folder(self._out), lock_folder(self._out):
            return self._write(hashes, limit, stamp)

    def _write(self, hashes: npt.NDArray[np.uint64], limit: int, stamp: str) -> Corpus:
        vocab_size = self._encoder.tokenizer.vocab_size
        train = _SplitWriter(self._out / "train", vocab_size)
        heldout = _SplitWriter(self._out / "heldout", vocab_size)
        try:
            records = self._iterate()
            total = len(hashes)
            for first in range(0, total, _BATCH_CHATS):
                batch = list(islice(records, _BATCH_CHATS))
                keys = hashes[first : first + len(batch)].tolist()
                for key, samples in zip(keys, self._encode_batch(batch), strict=True):
                    for document in chain.from_iterable(samples):
                        (heldout if key < limit else train).append(document)
                self._report_progress("encoding", first + len(batch), total)
            # Before the pairs change: without it the folder is no corpus.
            (self._out / CORPUS_FILE).unlink(missing_ok=True)
            self._copy_tokenizer()
            (self._out / BAD_FILE).unlink(missing_ok=True)
            if self.bad:
                write_text(self._out / BAD_FILE, "".join(f"{line}\n" for line in self.bad))
            if not train.counts.sum() and not heldout.counts.sum():
                rule = f"holds no chat that can be learnt; {self.bad[0]}"
                raise BadInput(Reason(field=str(self._source.root), rule=rule))
            splits = train.finish(), heldout.finish()
        finally:
            train.discard()
            heldout.discard()
        corpus = self._describe(splits, unigram_nats(train.counts, heldout.counts), stamp)
        write_json(self._out / CORPUS_FILE, corpus)
        return corpus

    def _iterate(self) -> Iterator[tuple[str, Any]]:
        return _iterate_records(self._source, keeps_broken=self._options.skip_bad > 0)

    def _encode_batch(
        self, batch: Sequence[tuple[str, Any]]
    ) -> Iterator[Sequence[tuple[ChatSample, ...]]]:
        """Yield the samples of each record, none of a bad one that may be left out.

        Records are encoded together, and one by one where one of them is refused.

        Raises:
            BadInput: a record is bad, and no more may be.
        """
        longest, schema = self._longest, self._schema
        try:
            # All of them first: what has been yielded cannot be taken back.
            yield from list(self._take_all(batch))
        except BadInput:
            if not self._options.skip_bad:
                raise
            # As before the batch, which is read again.
            self._longest, self._schema = longest, schema
        else:
            return
        for row in batch:
            try:
                (samples,) = self._take_all([row])
            except BadInput as error:
                self._leave_out(error)
                samples = []
            yield samples

    def _take_all(self, batch: Sequence[tuple[str, Any]]) -> Iterator[list[tuple[ChatSample, ...]]]:
        chats = [(where, self._parse(record, where)) for where, record in batch]
        for samples in self._encode(chats):
            for sample in samples:
                self._note(sample)
            yield samples

    def _leave_out(self, error: BadInput) -> None:
        """Count a bad record; refuse one too many, naming the first."""
        self.bad.append(str(error))
        if len(self.bad) > self._options.skip_bad:
            rule = f"there are more bad records than {self._options.skip_bad}; {self.bad[0]}"
            nearest = str(2 * self._options.skip_bad)
            raise BadInput(
                Reason(
                    field="--skip-bad",
                    value=str(self._options.skip_bad),
                    rule=rule,
                    nearest=nearest,
                )
            )

    def _parse(self, record: Mapping[str, Any] | Reason, where: str) -> tuple[Chat, ...]:
        if isinstance(record, Reason):
            raise BadInput(record)
        chats = parse_record(record, where, self._columns)
        schema = chats[0].schema
        if self._schema is None:
            self._schema = schema
        if schema is not self._schema:
            rule = f"is of schema {schema}, and the chats before it of {self._schema}"
            nearest = "one schema in all files"
            raise BadInput(Reason(field=where, rule=rule, nearest=nearest))
        return chats

    def _encode(
        self, records: Sequence[tuple[str, tuple[Chat, ...]]]
    ) -> Iterator[list[tuple[ChatSample, ...]]]:
        """Yield the samples of each record: of one document each, or a pair's two."""
        chats = [(where, chat) for where, pair in records for chat in pair]
        encoded = iter(self._encoder.encode(chats))
        for where, pair in records:
            documents = [next(encoded) for _ in pair]
            if len(documents) == 1:
                yield [(document,) for document in documents[0]]
                continue
            if any(len(parts) > 1 for parts in documents):
                rule = "has an answer of several turns, of which the template does not keep all"
                raise BadInput(Reason(field=where, rule=rule, nearest="answers of one turn"))
            yield [tuple(parts[0] for parts in documents)]

    def _note(self, sample: tuple[ChatSample, ...]) -> None:
        """Count a sample, or refuse one that no sequence holds or that teaches nothing."""
        tokens = sum(len(document.tokens) for document in sample)
        where = sample[0].where
        limit = self._options.max_tokens
        if limit and tokens > limit:
            rule = f"gives a sample of {tokens:,} tokens; a sequence holds {limit:,}"
            raise BadInput(Reason(field=where, rule=rule, nearest="a shorter chat"))
        if not all(document.is_learnt[1:].any() for document in sample):
            rule = "gives a sample without a token to learn"
            raise BadInput(Reason(field=where, rule=rule))
        if len(sample) > 1 and np.array_equal(sample[0].tokens, sample[1].tokens):
            rule = "gives the same tokens for 'chosen' and 'rejected'"
            raise BadInput(Reason(field=where, rule=rule))
        if tokens > self._longest.tokens:
            self._longest = LongestSample(tokens=tokens, where=where)

    def _copy_tokenizer(self) -> None:
        """Write the tokenizer, its configuration and the template as the folder has them."""
        encoder = self._encoder
        for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
            if (encoder.folder / name).is_file():
                shutil.copyfile(encoder.folder / name, self._out / name)
        template = encoder.sources.get("default")
        if template is not None:
            write_text(self._out / TEMPLATE_FILE, template)

    def _describe(
        self, splits: tuple[CorpusSplit, CorpusSplit], unigram_entropy: float, stamp: str
    ) -> Corpus:
        return Corpus(
            source=f"chats of {self._source.root.name}",
            files=len(self._source.files),
            skipped_files=0,
            text_bytes=self._encoder.text_bytes,
            tokenizer=TokenizerKind.PUBLISHED,
            vocab_size=self._encoder.tokenizer.vocab_size,
            train=splits[0],
            heldout=splits[1],
            unigram_entropy=unigram_entropy,
            stamp=stamp,
            kind=CorpusKind.PAIRS if self._schema is ChatSchema.PREFERENCE else CorpusKind.CHATS,
            longest=self._longest,
            bad_records=len(self.bad),
        )


class _SplitWriter:
    """The two pairs of a split: tokens, and which of them are learnt."""

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self._prefix = prefix
        self._tokens = IndexedWriter(prefix, dtype=token_dtype(vocab_size))
        self._learnt = IndexedWriter(learnt_prefix(prefix), dtype=np.dtype("<u1"))
        self.counts = np.zeros(vocab_size, dtype=np.int64)  # of learnt tokens, by id

    def append(self, sample: ChatSample) -> None:
        self._tokens.append(sample.tokens)
        self._learnt.append(sample.is_learnt)
        learnt = sample.tokens[sample.is_learnt == 1]
        self.counts += np.bincount(learnt, minlength=len(self.counts))

    def finish(self) -> CorpusSplit:
        """Put the pairs in their place, and describe them; a split without documents has none."""
        if not self._tokens.documents:
            for prefix in (self._prefix, learnt_prefix(self._prefix)):
                remove_pair(prefix)
            return CorpusSplit()
        # These first: tokens without them would be taken for text.
        self._learnt.finish()
        self._tokens.finish()
        return CorpusSplit(
            documents=self._tokens.documents,
            tokens=self._tokens.tokens,
            learnt_tokens=int(self.counts.sum()),
            fingerprint=open_indexed(self._prefix).fingerprint,
        )

    def discard(self) -> None:
        """Remove what was not finished."""
        self._tokens.discard()
        self._learnt.discard()


def _iterate_records(source: TextSource, *, keeps_broken: bool) -> Iterator[tuple[str, Any]]:
    for path in source.files:
        yield from join_trees(read_rows(path, keeps_broken=keeps_broken))


def _hash_record(record: Any) -> int:
    if isinstance(record, Reason):
        return hash_document(str(record))
    return hash_document(json.dumps(record, sort_keys=True, default=str))


def _choose_files(source: TextSource) -> TextSource:
    """Return the files of records, of which those for testing are left out beside others.

    A folder of a dataset has cards, licences and descriptions of itself as well.

    Raises:
        BadInput: naming a file, where none holds records.
    """
    files = [path for path in source.files if is_chat_file(path) and path.name not in _DESCRIPTIONS]
    if not files:
        rule = "is no file of records, so it holds no chats"
        nearest = "JSON lines, one chat each, in a file that ends in .jsonl"
        raise BadInput(Reason(field=str(source.files[0]), rule=rule, nearest=nearest))
    kept = [path for path in files if not _is_for_testing(path.relative_to(source.root))]
    return replace(source, files=tuple(kept or files))


def _is_for_testing(path: Path) -> bool:
    """Tell by its name, or that of its folder, whether a file is of a split that is not trained."""
    names = (*path.parts[:-1], path.name.partition(".")[0])
    return any(name.lower().partition("-")[0] in _TEST_SPLITS for name in names)


def _stamp(source: TextSource, options: ChatOptions, encoder: ChatEncoder) -> str:
    """Return the identity of what is built: source, options, tokenizer, template and versions."""
    parameters = (
        source.stamp,
        encoder.tokenizer.inner.to_str(),
        sorted(encoder.sources.items()),
        sorted(encoder.special_tokens.items()),
        options.heldout_fraction,
        options.max_tokens,
        options.columns,
        options.skip_bad,
        _BUILD_VERSION,
        tokenizers.__version__,
        jinja2.__version__,
    )
    return hashlib.sha256(repr(parameters).encode()).hexdigest()[:16]
