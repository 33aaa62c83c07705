"""Log-probabilities of preference pairs under the reference: the model as training begins.

They are made once, by the forward passes of the layout that trains, before the first step; adapters
add nothing then, so that under LoRA the reference is the model without them. A run that goes on
reads those that it began with.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from moewright.codec.files import write_pieces
from moewright.engine.comm.collectives import all_reduce
from moewright.engine.data.blend import StepSequences
from moewright.engine.data.corpus_rows import ChatCorpus, CorpusBlend
from moewright.engine.data.packing import Float64s, sequence_documents
from moewright.engine.data.sampler import micro_batch_rows
from moewright.engine.hf.folder import fingerprint_hf_folder, is_hf_folder
from moewright.engine.model.micro_batch import MicroBatch
from moewright.engine.model.preferences import sum_answers
from moewright.engine.model.transformer import ModelOutput
from moewright.engine.pipeline.executor import Key
from moewright.engine.pipeline.run_batch import evaluate_batch
from moewright.engine.run.corpus_loader import build_from_rows
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.worker import RankContext
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import format_seconds
from moewright.spec.workload import Workload

REFERENCE_FILE = "reference.safetensors"


def attach_references(
    state: TrainState,
    blends: Sequence[CorpusBlend],
    run_dir: Path,
    context: RankContext,
    *,
    steps_done: int,
) -> list[CorpusBlend]:
    """Return the corpora of pairs with the log-probabilities of their answers.

    Every rank of the world calls this. The file that rank 0 writes holds them by the fingerprints
    of the corpora.

    Raises:
        BadInput: in a run that goes on, when the file is missing, damaged or of other corpora.
    """
    path = run_dir / REFERENCE_FILE
    if steps_done:
        references = _read_references(path)
    else:
        references = _compute_references(state, blends, context)
        if context.rank == 0:
            metadata = {"weights": _describe_weights(state.runtime.workload)}
            write_pieces(path, [save(dict(references), metadata=metadata)])
    return [blend.add_references(references, where=str(path)) for blend in blends]


def _read_references(path: Path) -> Mapping[str, Float64s]:
    try:
        references: dict[str, Float64s] = load_file(path)
    except (OSError, SafetensorError) as error:
        rule = (
            "holds the log-probabilities that this run began with, and cannot be read: "
            f"{' '.join(str(error).split())}"
        )
        raise BadInput(Reason(field=str(path), rule=rule, nearest="a new --out")) from error
    return references


def _describe_weights(workload: Workload) -> str:
    """Return what the weights of the reference are known by."""
    if not workload.weights:
        return f"seed {workload.seed}"
    folder = Path(workload.weights)
    return fingerprint_hf_folder(folder) if is_hf_folder(folder) else workload.weights


def _compute_references(
    state: TrainState, blends: Sequence[CorpusBlend], context: RankContext
) -> Mapping[str, Float64s]:
    started = time.monotonic()
    references: dict[str, Float64s] = {}
    for blend in blends:
        for corpus in blend.corpora:
            if isinstance(corpus, ChatCorpus) and corpus.fingerprint not in references:
                references[corpus.fingerprint] = compute_reference(state, corpus, context)
    if context.rank == 0:
        pairs = sum(map(len, references.values())) // 2
        seconds = format_seconds(time.monotonic() - started)
        print(f"log-probabilities of {pairs:,} pairs under the reference: {seconds}", flush=True)
    return references


def compute_reference(state: TrainState, corpus: ChatCorpus, context: RankContext) -> Float64s:
    """Return the log-probabilities [documents] of the answers of a corpus, on all ranks."""
    runtime = state.runtime
    layout = runtime.mesh.layout
    sequences = StepSequences(
        corpora=(corpus.chats,), packs=(corpus.packs,), seq_len=runtime.workload.seq_len
    )
    count = runtime.job.micro_batches
    batch_size = count * layout.mbs * layout.dp
    # The ranks of a TP and of a CP group have the same sums: one of them adds them up.
    adds_up = not (runtime.mesh.coordinate("tp") or runtime.mesh.coordinate("cp"))
    # A document is in one sequence of one rank, so that a sum over ranks is its value.
    sums = np.zeros(corpus.chats.tokens.documents)
    for first in range(0, corpus.packs.count, batch_size):
        context.note(f"log-probabilities of pairs from sequence {first} on")
        rows = [
            micro_batch_rows(
                global_batch=batch_size,
                dp=layout.dp,
                dp_rank=runtime.mesh.coordinate("dp"),
                mbs=layout.mbs,
                micro_batch=number,
            )
            for number in range(count)
        ]
        rows = [range(first + part.start, first + part.stop) for part in rows]
        batches = [
            build_from_rows(
                runtime, sequences.read(part, runtime.model.vocab_size), is_chats=True
            ).to(runtime.device)
            for part in rows
        ]
        add = partial(_add_sums, state, corpus, rows, batches, sums if adds_up else None)
        evaluate_batch(runtime, state.model, batches, add)
    total = all_reduce(torch.from_numpy(sums).to(runtime.device), runtime.mesh.group("world"))
    reference: Float64s = total.cpu().numpy()
    return reference


def _add_sums(
    state: TrainState,
    corpus: ChatCorpus,
    rows: Sequence[range],
    batches: Sequence[MicroBatch],
    sums: Float64s | None,
    key: Key,
    out: ModelOutput,
) -> None:
    """Put the log-probabilities of a micro-batch's answers into `sums` [documents]."""
    micro_batch, chunk = key
    answers = batches[micro_batch].answers
    if not state.model.chunks[chunk].has_loss or answers is None:
        return
    values = sum_answers(state.runtime, answers, out.nll).flatten().cpu().numpy()
    # The last batch is filled up with sequences that are none of the corpus.
    filled = range(rows[micro_batch].start, min(rows[micro_batch].stop, corpus.packs.count))
    if sums is not None and filled:
        documents = [sequence_documents(corpus.chats, corpus.packs, row) for row in filled]
        sums[np.concatenate(documents)] = values
