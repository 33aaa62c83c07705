"""Every sample comes once an epoch, whatever the layout or the resumes; tokens are read right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.engine.data.indexed import open_indexed, write_indexed
from moewright.engine.data.sampler import (
    SampleOrder,
    Sampler,
    build_sampler,
    count_whole_batches,
    micro_batch_rows,
    permute,
    read_samples,
    sample_count,
)
from moewright.spec.errors import BadInput

SIZES = st.integers(1, 700)
SEEDS = st.integers(0, 2**64)
PINNED = [
    [2, 8, 3, 4, 1, 0, 9, 6, 5, 7],
    [4, 0, 3, 2, 1, 7, 8, 9, 5, 6],
    [2, 1, 3, 0, 7, 4, 6, 5, 8, 9],
]


@settings(max_examples=80, deadline=None)
@given(SIZES, SEEDS, st.integers(0, 10**6))
def test_permutation_is_one(size: int, seed: int, epoch: int) -> None:
    image = permute(np.arange(size), size, seed, epoch)
    assert sorted(image.tolist()) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(SIZES, SEEDS, st.integers(1, 97), st.sampled_from(SampleOrder))
def test_each_epoch_holds_every_sample_once(
    samples: int, seed: int, global_batch: int, order: SampleOrder
) -> None:
    sampler = Sampler(samples=samples, seed=seed, order=order)
    steps = -(-3 * samples // global_batch)
    stream = np.concatenate(
        [sampler.sample_ids(step * global_batch, global_batch) for step in range(steps)]
    )
    for epoch in range(3):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples].tolist()) == list(
            range(samples)
        )


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 60))
def test_layouts_share_one_order(
    seed: int, dp: int, mbs: int, micro_batches: int, samples: int
) -> None:
    """The union of all ranks' rows is what one process sees, over resumes and edges of epochs."""
    global_batch = dp * mbs * micro_batches
    single_process = Sampler(samples=samples, seed=seed)
    expected = single_process.sample_ids(0, 5 * global_batch)
    seen = []
    for step in range(5):
        resumed = Sampler(samples=samples, seed=seed)
        for dp_rank in range(dp):
            for micro_batch in range(micro_batches):
                rows = micro_batch_rows(
                    global_batch=global_batch,
                    dp=dp,
                    dp_rank=dp_rank,
                    mbs=mbs,
                    micro_batch=micro_batch,
                )
                assert len(rows) == mbs
                seen += resumed.sample_ids(step * global_batch, global_batch)[
                    rows.start : rows.stop
                ].tolist()
    assert seen == expected.tolist()


def test_rows_by_hand() -> None:
    def rows(dp_rank: int, micro_batch: int) -> list[int]:
        return list(
            micro_batch_rows(global_batch=8, dp=2, dp_rank=dp_rank, mbs=2, micro_batch=micro_batch)
        )

    assert [rows(0, 0), rows(0, 1), rows(1, 0), rows(1, 1)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(BadInput, match="nearest legal value: 8"):
        micro_batch_rows(global_batch=10, dp=2, dp_rank=0, mbs=2, micro_batch=0)
    with pytest.raises(ValueError, match="micro-batch 2 of 2"):
        rows(0, 2)


def test_order_depends_on_seed_and_epoch_and_is_pinned() -> None:
    index = np.arange(10)
    images = [
        permute(index, 10, seed, epoch).tolist()
        for seed, epoch in ((1234, 0), (1234, 1), (1235, 0))
    ]
    assert images == PINNED  # a change here would change the data order of every resumed run
    mean = np.abs(permute(np.arange(10_000), 10_000, 1, 0) - np.arange(10_000)).mean()
    assert 3200 < mean < 3470  # a uniform shuffle moves a sample by size / 3 on average


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    documents = [np.arange(7), np.arange(7, 8), np.arange(8, 31)]
    write_indexed(tmp_path / "d", documents, dtype=np.dtype("<u2"))
    return tmp_path / "d"


def test_fetch_packs_documents(prefix: Path) -> None:
    data = open_indexed(prefix)
    assert sample_count(data, 5) == 6
    assert sample_count(data, 30) == 1
    assert sample_count(data, 31) == 0
    rows = read_samples(data, np.array([5, 0]), seq_len=5, vocab_size=31)
    assert rows.dtype == np.int64
    assert rows.tolist() == [[25, 26, 27, 28, 29, 30], [0, 1, 2, 3, 4, 5]]


def test_every_target_once(prefix: Path) -> None:
    data = open_indexed(prefix)
    sampler = build_sampler(data, seq_len=5, global_batch=3, seed=3)
    rows = np.concatenate(
        [
            read_samples(data, sampler.sample_ids(step * 3, 3), seq_len=5, vocab_size=31)
            for step in range(2)
        ],
    )
    assert sorted(rows[:, 1:].ravel().tolist()) == list(range(1, 31))


def test_token_outside_the_vocabulary(prefix: Path) -> None:
    data = open_indexed(prefix)
    with pytest.raises(
        BadInput, match=r"d\.bin: token 28 at position 28 is outside the vocabulary.*below 28"
    ):
        read_samples(data, np.array([0, 5]), seq_len=5, vocab_size=28)


def test_file_cut_while_in_use(prefix: Path) -> None:
    data = open_indexed(prefix)
    path = prefix.parent / "d.bin"
    with path.open("rb+") as file:
        file.truncate(20)
    with pytest.raises(
        BadInput, match=r"d\.bin: changed while in use: 62 bytes when opened, 20 now"
    ):
        read_samples(data, np.array([5]), seq_len=5, vocab_size=31)
    path.unlink()
    with pytest.raises(BadInput, match="went away"):
        read_samples(data, np.array([5]), seq_len=5, vocab_size=31)


def test_too_little_for_a_batch(prefix: Path) -> None:
    data = open_indexed(prefix)
    with pytest.raises(BadInput, match="31 tokens give 6 samples of 5; a global batch needs 7"):
        build_sampler(data, seq_len=5, global_batch=7, seed=0)


def test_held_out_batches_do_not_repeat(prefix: Path) -> None:
    sampler = build_sampler(
        open_indexed(prefix), seq_len=5, global_batch=4, seed=0, order=SampleOrder.SEQUENTIAL
    )
    assert count_whole_batches(sampler.samples, global_batch=4, limit=8) == 1
    assert sampler.sample_ids(0, 4).tolist() == [0, 1, 2, 3]


def test_large_epochs_cost_no_memory() -> None:
    sampler = Sampler(samples=10**12, seed=5)
    ids = sampler.sample_ids(12_345_678 * 1024, 1024)
    assert len(set(ids.tolist())) == 1024
    assert ids.min() >= 0
    assert ids.max() < 10**12
