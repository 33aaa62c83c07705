"""The Megatron pair: what is written is read back, and damage is refused by the file's name."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moewright.engine.checkpoint import refuse_mismatch
from moewright.engine.data import indexed
from moewright.engine.data.indexed import (
    HEADER,
    MAGIC,
    open_indexed,
    token_dtype,
    write_indexed,
)
from moewright.spec.errors import BadInput

DOCUMENTS = tuple(
    np.arange(start, start + size) for start, size in ((0, 5), (100, 1), (7, 0), (300, 12))
)
UINT16 = np.dtype("<u2")


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_indexed(tmp_path / "train", DOCUMENTS, dtype=UINT16)
    return tmp_path / "train"


def test_round_trip(prefix: Path) -> None:
    data = open_indexed(prefix)
    assert data.tokens.tolist() == np.concatenate(DOCUMENTS).tolist()
    assert data.lengths.tolist() == [5, 1, 0, 12]
    assert data.document_marks.tolist() == [0, 1, 2, 3, 4]
    assert (data.token_count, data.documents) == (18, 4)
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        "train.bin",
        "train.idx",
        "train.seal.json",
    ]


def test_bytes_are_megatrons(prefix: Path) -> None:
    index = (prefix.parent / "train.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack("<QBQQ", index[9:34]) == (1, 8, 4, 5)
    assert struct.unpack("<4i", index[34:50]) == (5, 1, 0, 12)
    assert struct.unpack("<4q", index[50:82]) == (0, 10, 12, 12)
    assert struct.unpack("<5q", index[82:]) == (0, 1, 2, 3, 4)


def test_a_pair_of_megatrons_own_needs_no_seal(prefix: Path) -> None:
    (prefix.parent / "train.seal.json").unlink()
    assert open_indexed(prefix).token_count == 18


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), min_size=1, max_size=9),
    st.sampled_from(["<i4", "<i8"]),
)
def test_any_documents_round_trip(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], name: str
) -> None:
    prefix = tmp_path_factory.mktemp("pair") / "p"
    write_indexed(
        prefix, [np.array(document, dtype=np.int64) for document in documents], dtype=np.dtype(name)
    )
    flat = [token for document in documents for token in document]
    if not flat:
        with pytest.raises(BadInput, match="no tokens"):
            open_indexed(prefix)
        return
    data = open_indexed(prefix)
    assert data.tokens.tolist() == flat
    assert data.lengths.tolist() == [len(document) for document in documents]


def refused(prefix: Path, name: str, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        open_indexed(prefix)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["train.idx", "train.bin"])
def test_missing(prefix: Path, name: str) -> None:
    (prefix.parent / name).unlink()
    refused(prefix, name, "does not exist")


def test_folder_in_place_of_a_file(prefix: Path) -> None:
    (prefix.parent / "train.bin").unlink()
    (prefix.parent / "train.bin").mkdir()
    refused(prefix, "train.bin", "is not a file")


@pytest.mark.parametrize("keep", [0, 1, 9, 20, 33, 34, 60, 121])
def test_truncated_index(prefix: Path, keep: int) -> None:
    path = prefix.parent / "train.idx"
    path.write_bytes(path.read_bytes()[:keep])
    refused(prefix, "train.idx", "not a Megatron index" if keep < 9 else "truncated")


@pytest.mark.parametrize("change", [-1, -2, 1, -36])
def test_bin_of_another_size(prefix: Path, change: int) -> None:
    path = prefix.parent / "train.bin"
    path.write_bytes((path.read_bytes() + b"\x00")[: 36 + change])
    refused(prefix, "train.bin", "truncated")


@pytest.mark.parametrize("name", ["train.idx", "train.bin"])
def test_every_flipped_bit_is_noticed(prefix: Path, name: str) -> None:
    path = prefix.parent / name
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        refused(prefix, name, "train")


@pytest.mark.parametrize("sealed", [True, False])
def test_two_names_swapped(prefix: Path, sealed: bool) -> None:
    if not sealed:
        (prefix.parent / "train.seal.json").unlink()
    bin_path = prefix.parent / "train.bin"
    idx_path = prefix.parent / "train.idx"
    other = prefix.parent / "other"
    bin_path.rename(other)
    idx_path.rename(bin_path)
    other.rename(idx_path)
    refused(prefix, "train.idx", "not a Megatron index")


def test_tokens_of_another_pair_of_the_same_size(prefix: Path) -> None:
    write_indexed(prefix.parent / "heldout", [document + 1 for document in DOCUMENTS], dtype=UINT16)
    (prefix.parent / "heldout.bin").replace(prefix.parent / "train.bin")
    refused(prefix, "train.bin", "damaged or swapped")


def test_damage_without_a_seal(prefix: Path) -> None:
    (prefix.parent / "train.seal.json").unlink()
    path = prefix.parent / "train.idx"
    whole = bytearray(path.read_bytes())
    for place, words in (
        (9, "version 0"),
        (17, "dtype code 9"),
        (34, "pointers"),
        (50, "pointers"),
        (82, "marks"),
    ):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        refused(prefix, "train.idx", words)
    path.write_bytes(HEADER.pack(MAGIC, 1, 8, 2**60, 2**60))
    refused(prefix, "train.idx", "promises")


def test_broken_seal(prefix: Path) -> None:
    (prefix.parent / "train.seal.json").write_text("[" * 100_000)
    refused(prefix, "train.seal.json", "nested too deeply")


def test_fingerprint_follows_content_and_not_place(prefix: Path, tmp_path: Path) -> None:
    first = open_indexed(prefix).fingerprint
    write_indexed(tmp_path / "again", DOCUMENTS, dtype=UINT16)
    assert open_indexed(tmp_path / "again").fingerprint == first
    write_indexed(tmp_path / "again", [*DOCUMENTS[:-1], DOCUMENTS[-1] + 1], dtype=UINT16)
    changed = open_indexed(tmp_path / "again")
    with pytest.raises(BadInput, match="fingerprint is"):
        refuse_mismatch({"fingerprint": first}, {"fingerprint": changed.fingerprint})
    refuse_mismatch({"fingerprint": changed.fingerprint}, {"fingerprint": changed.fingerprint})


def test_large_files_are_sampled_from_end_to_end(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_path = prefix.parent / "train.bin"
    idx_path = prefix.parent / "train.idx"
    bin_path.write_bytes(bytes(2000))
    monkeypatch.setattr(indexed, "WHOLE_FILE_BYTES", 640)
    monkeypatch.setattr(indexed, "SAMPLE_BYTES", 10)
    seen = {indexed.fingerprint_files(bin_path, idx_path)}
    for place in (0, 985, 1999):
        damaged = bytearray(2000)
        damaged[place] = 1
        bin_path.write_bytes(damaged)
        seen.add(indexed.fingerprint_files(bin_path, idx_path))
    bin_path.write_bytes(bytes(2001))
    seen.add(indexed.fingerprint_files(bin_path, idx_path))
    assert len(seen) == 5


def test_a_failed_write_leaves_the_old_pair(prefix: Path) -> None:
    def broken() -> object:
        yield DOCUMENTS[0]
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_indexed(prefix, broken(), dtype=UINT16)  # type: ignore[arg-type]
    assert open_indexed(prefix).token_count == 18
    assert len(list(prefix.parent.iterdir())) == 3


def test_dtype_of_a_vocabulary() -> None:
    assert token_dtype(4096) == np.dtype("uint16")
    assert token_dtype(65500) == np.dtype("int32")
