"""What a job's data must be before anything is measured, planned or started on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moewright.codec.data_paths import parse_data_paths
from moewright.engine.data.corpus import CORPUS_FILE, read_corpus
from moewright.engine.data.corpus_rows import open_corpora
from moewright.engine.data.sampler import SampleOrder
from moewright.engine.data.tokenizer import load_tokenizer
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.workload import DataSpec, Workload


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
    fingerprint = open_corpora(data.train, workload, SampleOrder.SHUFFLED).fingerprint
    if data.heldout:
        whole = replace(workload, batch_samples=0)
        open_corpora(data.heldout, whole, SampleOrder.SEQUENTIAL, field="data.heldout")
    _check_vocabulary(data, model.vocab_size)
    return fingerprint


def _check_vocabulary(data: DataSpec, vocab_size: int) -> None:
    """Refuse a larger vocabulary than the model's; Megatron's own pairs do not state theirs."""
    sizes = []
    for part in (*parse_data_paths(data.train), *parse_data_paths(data.heldout, "data.heldout")):
        corpus_file = Path(part.path).parent / CORPUS_FILE
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
