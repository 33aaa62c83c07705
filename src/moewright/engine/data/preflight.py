"""What a job's data must be before anything is measured, planned or started on it."""

from __future__ import annotations

from pathlib import Path

from moewright.engine.data.corpus import CORPUS_FILE, read_corpus
from moewright.engine.data.indexed import open_indexed
from moewright.engine.data.packing import (
    build_pack_sampler,
    is_chat_pair,
    open_chats,
    pack_chats,
)
from moewright.engine.data.sampler import SampleOrder, build_sampler
from moewright.engine.data.tokenizer import load_tokenizer
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.workload import DataSpec, DocumentMasking, Workload


def check_data(model: ModelSpec, workload: Workload) -> str:
    """Return the fingerprint of the training data, once all data will do for a run of this model.

    Raises:
        BadInput: naming the file, when one is missing, damaged, too small for a global batch, or
            has a larger vocabulary than the model.
    """
    data = workload.data
    if not data.train:
        rule = "is needed to train: the path of a .bin/.idx pair without its suffix"
        nearest = "out/train, from `moewright data build`"
        raise BadInput(Reason(field="data.train", rule=rule, nearest=nearest))
    fingerprint = _check_corpus(Path(data.train), workload, SampleOrder.SHUFFLED)
    if data.heldout:
        _check_corpus(Path(data.heldout), workload, SampleOrder.SEQUENTIAL)
    _check_vocabulary(data, model.vocab_size)
    return fingerprint


def _check_corpus(prefix: Path, workload: Workload, order: SampleOrder) -> str:
    """Return the fingerprint of a corpus that fills a global batch."""
    if is_chat_pair(prefix):
        return _check_chats(prefix, workload, order)
    dataset = open_indexed(prefix)
    build_sampler(
        dataset,
        seq_len=workload.seq_len,
        global_batch=workload.global_batch,
        seed=workload.seed,
        order=order,
    )
    return dataset.fingerprint


def _check_chats(prefix: Path, workload: Workload, order: SampleOrder) -> str:
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
    packs = pack_chats(chats, seq_len=workload.seq_len)
    build_pack_sampler(
        chats, packs, global_batch=workload.global_batch, seed=workload.seed, order=order
    )
    return chats.fingerprint


def _check_vocabulary(data: DataSpec, vocab_size: int) -> None:
    """Refuse a larger vocabulary than the model's; Megatron's own pairs do not state theirs."""
    sizes = []
    corpus_file = Path(data.train).parent / CORPUS_FILE
    if corpus_file.is_file():
        sizes.append((str(corpus_file), read_corpus(corpus_file.parent).vocab_size))
    if data.tokenizer:
        sizes.append((data.tokenizer, load_tokenizer(Path(data.tokenizer)).vocab_size))
    for path, size in sizes:
        require_vocabulary(path, size, vocab_size)


def require_vocabulary(path: str, size: int, vocab_size: int) -> None:
    """Raise BadInput where the vocabulary of a file has more ids than the model."""
    if size > vocab_size:
        rule = f"its vocabulary has {size} ids, more than the model's vocab_size {vocab_size}"
        raise BadInput(Reason(field=path, rule=rule, nearest=f"a vocab_size of {size}"))
