"""Chats of a step fill as many sequences as they need, each chat once and whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tiny_jobs
from chat_folders import CHATML, write_chat_folder, write_chats
from moewright.codec import parse_layout
from moewright.engine.data.build_chats import build_chats
from moewright.engine.data.chat_encoder import ChatOptions
from moewright.engine.data.corpus_rows import CorpusBlend, open_corpora
from moewright.engine.data.sampler import SampleOrder
from moewright.rules.batch_rampup import check_batch_samples
from moewright.rules.job import Job
from moewright.rules.limits.legality import check_legality
from moewright.rules.packing import round_up_step
from moewright.spec.errors import BadInput
from moewright.spec.workload import BatchRampSpec, DataSpec, DocumentMasking, RoutesSpec, Workload

SEQ_LEN = 112


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataSpec, DataSpec]:
    """Chats of one turn and of two."""
    folder = tmp_path_factory.mktemp("chats")
    tokenizer = write_chat_folder(folder / "hf", CHATML)
    built = []
    for turns in (1, 2):
        source = write_chats(folder / f"{turns}.jsonl", 40, turns=turns)
        options = ChatOptions(tokenizer=tokenizer, heldout_fraction=0.2)
        built.append(build_chats(source, folder / str(turns), options).data)
    return built[0], built[1]


def build_workload(data: DataSpec, samples: int) -> Workload:
    data = replace(data, documents=DocumentMasking.RESTARTED)
    return tiny_jobs.build_workload(
        data, seq_len=SEQ_LEN, global_batch=4, batch_samples=samples, steps=3
    )


def open_blend(workload: Workload) -> CorpusBlend:
    return open_corpora(workload.data.train, workload, SampleOrder.SHUFFLED)


def test_every_chat_of_a_step_is_in_one_sequence_of_its_corpus(
    corpora: tuple[DataSpec, DataSpec],
) -> None:
    first, second = corpora
    blend = replace(first, train=f"0.5 {first.train} 0.5 {second.train}")
    workload = build_workload(blend, 9)
    data = open_blend(workload)
    for step in range(4):
        sequences = data.pack_step(step, workload)
        packed = [sorted(packs.samples.tolist()) for packs in sequences.packs]
        parts = data.order.locate(9 * step, 9)
        assert packed == [sorted(part.ids.tolist()) for part in parts]
        rows = sequences.read(range(sequences.count + 2), 500)
        assert all(sum(lengths) == SEQ_LEN for lengths in rows.lengths)
        learnt = (rows.targets >= 0).any(axis=1)
        assert learnt.tolist() == [True] * sequences.count + [False] * 2
        # A rank that reads some of the rows reads the same ones.
        some = sequences.read(range(1, sequences.count), 500)
        assert np.array_equal(some.inputs, rows.inputs[1 : sequences.count])
        assert some.lengths == rows.lengths[1 : sequences.count]


def test_a_step_is_filled_up_to_whole_micro_batches_on_every_rank() -> None:
    size = round_up_step(5, 4)
    assert (size.sequences, size.filled) == (8, 5)
    assert [size.filled_in(range(first, first + 2)) for first in (0, 2, 4, 6)] == [2, 2, 1, 0]


def test_what_cannot_be_packed_for_each_step_is_refused(
    corpora: tuple[DataSpec, DataSpec], tmp_path: Path
) -> None:
    workload = build_workload(corpora[0], 500)
    with pytest.raises(BadInput, match=r"a step of train.batch_samples needs 500.*batch_samples"):
        open_blend(workload)
    text = tiny_jobs.write_corpus(tmp_path)
    with pytest.raises(BadInput, match=r"train.batch_samples=3: .* holds text"):
        open_blend(replace(workload, batch_samples=3, data=text))
    others = (
        replace(workload, data=replace(workload.data, documents=DocumentMasking.BOUNDED)),
        replace(workload, ramp=BatchRampSpec(ramp_start=2, ramp_increment=2, ramp_samples=8)),
        replace(workload, routes=RoutesSpec(record_routes="routes")),
    )
    fields = [reason.field for other in others for reason in check_batch_samples(other)]
    assert fields == ["data.documents", "workload.ramp_start", "workload.routes"]


def test_timetables_that_take_only_some_numbers_of_micro_batches_are_refused() -> None:
    workload = build_workload(DataSpec(), 8)
    texts = ("pp2,layout='Et|ttL'", "pp2,vpp2,layout='E|t|t|tL'")
    jobs = [
        Job(
            model=tiny_jobs.MODEL,
            workload=workload,
            layout=parse_layout(text, world_size=2),
        )
        for text in texts
    ]
    assert [bool(check_legality(job)) for job in jobs] == [False, True]
    fixed = replace(workload, batch_samples=0)
    assert not check_legality(replace(jobs[1], workload=fixed))
