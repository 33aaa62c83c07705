"""Blends of corpora: which sample comes from where, whatever the layout and after any restart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_jobs
from chat_folders import CHATML, write_chat_folder, write_chats
from moewright.cli.main import main
from moewright.codec.data_paths import format_data_paths, parse_data_paths
from moewright.engine.data.blend import PATTERN_PLACES, Blend, build_blend
from moewright.engine.data.build_chats import build_chats
from moewright.engine.data.chat_encoder import ChatOptions
from moewright.engine.data.corpus_rows import blend_entropy, open_corpora
from moewright.engine.data.preflight import check_data
from moewright.engine.data.sampler import SampleOrder, Sampler
from moewright.intake.job import read_job
from moewright.spec.errors import BadInput
from moewright.spec.workload import DocumentMasking

SIZES = (7, 40, 3)
SHARES = (0.5, 0.3, 0.2)


def build(shares: tuple[float, ...] = SHARES) -> Blend:
    samplers = [Sampler(samples=size, seed=3) for size in SIZES[: len(shares)]]
    return build_blend(samplers, shares)


def read_places(blend: Blend, first: int, count: int) -> list[tuple[int, int]]:
    """Return the corpus and the id of each place."""
    places = [(-1, -1)] * count
    for part in blend.locate(first, count):
        for row, sample in zip(part.rows.tolist(), part.ids.tolist(), strict=True):
            places[row] = (part.corpus, sample)
    return places


@given(weights=st.lists(st.integers(1, 50), min_size=2, max_size=5))
@settings(max_examples=20, deadline=None)
def test_samples_are_dealt_as_megatron_deals_them(weights: list[int]) -> None:
    """Written from its description: the dataset with the largest error comes next."""
    shares = np.array(weights) / sum(weights)
    taken = np.zeros(len(weights))
    expected = []
    for place in range(400):
        errors = shares * max(place, 1.0) - taken
        expected.append(int(errors.argmax()))
        taken[expected[-1]] += 1
    samplers = [Sampler(samples=9, seed=1)] * len(weights)
    blend = build_blend(samplers, shares.tolist())
    assert blend.pattern[:400].tolist() == expected
    assert np.abs(blend.counts - shares * PATTERN_PLACES).max() < 2


def test_any_stretch_is_the_same_stretch_of_one_sequence() -> None:
    blend = build()
    count = PATTERN_PLACES + 50
    whole = read_places(blend, 0, count)
    for first, length in ((0, 1), (5, 17), (PATTERN_PLACES - 3, 9), (PATTERN_PLACES, 50)):
        assert read_places(blend, first, length) == whole[first : first + length]
    for corpus, size in enumerate(SIZES):
        own = [sample for place, sample in whole if place == corpus]
        assert own == Sampler(samples=size, seed=3).sample_ids(0, len(own)).tolist()
        assert sorted(own[:size]) == list(range(size))


def test_samples_before_one_comes_twice_are_counted() -> None:
    blend = build()
    seen = set()
    for number, place in enumerate(read_places(blend, 0, 100)):
        if place in seen:
            assert blend.samples == number
            break
        seen.add(place)
    else:
        raise AssertionError("no sample came twice")
    assert build((1.0,)).samples == SIZES[0]


def test_one_path_may_hold_spaces_and_a_blend_takes_turns() -> None:
    assert parse_data_paths("") == ()
    assert [part.path for part in parse_data_paths("my data/train")] == ["my data/train"]
    parts = parse_data_paths("3 a/train 1.0 b/train")
    assert [part.share for part in parts] == [0.75, 0.25]
    assert format_data_paths(parts) == "3 a/train 1.0 b/train"
    for text in ("0.5 a 0.5", "0.5 a b 0.5", "0 a 1 b", "-1 a 2 b", "inf a 1 b"):
        with pytest.raises(BadInput, match=r"data\.heldout"):
            parse_data_paths(text, "data.heldout")


def test_a_job_names_a_blend_by_paths_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\nconfig = "OLMoE-1B-7B-0924"\n[data]\ntrain = "0.7 web/train 0.3 code/train"\n'
        "[train]\nseq_len = 128\nglobal_batch = 8\nsteps = 2\n"
    )
    train = read_job(job).workload.data.train
    assert train == f"0.7 {tmp_path}/web/train 0.3 {tmp_path}/code/train"
    job.write_text(job.read_text().replace("0.3 code", "code 0.3"))
    assert main(["plan", str(job), "--on", "8xH100"]) == 2
    line = capsys.readouterr().err
    assert "data.train" in line
    assert "weights and paths take turns" in line


def test_a_blend_is_checked_and_known_by_contents_and_weights(tmp_path: Path) -> None:
    first = tiny_jobs.write_corpus(tmp_path / "first")
    second = tiny_jobs.write_corpus(tmp_path / "second", documents=12)
    texts = [f"{weight} {first.train} 1 {second.train}" for weight in ("1", "3")]
    heldout = f"1 {first.heldout} 1 {second.heldout}"
    fingerprints = set()
    for text in (*texts, first.train):
        data = replace(first, train=text, heldout=heldout)
        workload = tiny_jobs.build_workload(data)
        fingerprints.add(check_data(tiny_jobs.MODEL, workload))
    assert len(fingerprints) == 3
    workload = tiny_jobs.build_workload(replace(first, train=texts[0]))
    train = open_corpora(texts[0], workload, SampleOrder.SHUFFLED)
    held = open_corpora(heldout, workload, SampleOrder.SEQUENTIAL)
    assert 0 < blend_entropy(train, held, 257) < 6
    rows = train.read(0, 6, workload, 257)
    alone = [open_corpora(d.train, workload, SampleOrder.SHUFFLED) for d in (first, second)]
    expected = [list(data.read(0, 3, workload, 257).inputs) for data in alone]
    for row, corpus in zip(rows.inputs, train.order.pattern[:6].tolist(), strict=True):
        assert np.array_equal(row, expected[corpus].pop(0))
    missing = replace(first, train=f"1 {first.train} 1 {tmp_path}/none")
    with pytest.raises(BadInput, match=r"none\.idx: does not exist"):
        check_data(tiny_jobs.MODEL, tiny_jobs.build_workload(missing))


def test_chats_and_text_are_not_blended(tmp_path: Path) -> None:
    text = tiny_jobs.write_corpus(tmp_path / "text")
    folder = write_chat_folder(tmp_path / "hf", CHATML)
    options = ChatOptions(tokenizer=folder, heldout_fraction=0.0)
    chats = build_chats(write_chats(tmp_path / "c.jsonl"), tmp_path / "chats", options).data
    data = replace(
        text, train=f"1 {text.train} 1 {chats.train}", documents=DocumentMasking.RESTARTED
    )
    workload = tiny_jobs.build_workload(data, seq_len=256, global_batch=2)
    with pytest.raises(BadInput, match="blends chats with text"):
        open_corpora(data.train, workload, SampleOrder.SHUFFLED)
    two = f"2 {chats.train} 1 {chats.train}"
    rows = open_corpora(two, workload, SampleOrder.SHUFFLED).read(0, 3, workload, 400)
    assert len(rows.lengths) == 3
    assert json.loads((tmp_path / "chats" / "corpus.json").read_text())["kind"] == "chats"
