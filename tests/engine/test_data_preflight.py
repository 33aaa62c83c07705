from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tiny_jobs
from moewright.engine.data.indexed import open_indexed
from moewright.engine.data.preflight import check_data
from moewright.spec.errors import BadInput
from moewright.spec.workload import DataSpec


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    return tiny_jobs.write_corpus(tmp_path)


def refusal(data: DataSpec, *, vocab_size: int = tiny_jobs.VOCABULARY, **changes: object) -> str:
    model = replace(tiny_jobs.MODEL, vocab_size=vocab_size)
    with pytest.raises(BadInput) as refused:
        check_data(model, tiny_jobs.build_workload(data, **changes))  # type: ignore[arg-type]
    return str(refused.value)


def test_whole_data_gives_its_fingerprint(data: DataSpec) -> None:
    assert (
        check_data(tiny_jobs.MODEL, tiny_jobs.build_workload(data))
        == open_indexed(Path(data.train)).fingerprint
    )
    assert check_data(tiny_jobs.MODEL, tiny_jobs.build_workload(replace(data, tokenizer="")))


def test_data_that_is_not_named(data: DataSpec) -> None:
    assert "data.train: is needed to train" in refusal(replace(data, train=""))
    assert check_data(tiny_jobs.MODEL, tiny_jobs.build_workload(replace(data, heldout="")))


def test_a_pair_of_another_program_needs_no_description(data: DataSpec) -> None:
    """Megatron's preprocessing writes .bin and .idx alone."""
    for name in ("corpus.json", "train.seal.json", "heldout.seal.json"):
        Path(data.train).with_name(name).unlink()
    assert check_data(tiny_jobs.MODEL, tiny_jobs.build_workload(replace(data, tokenizer="")))


@pytest.mark.turns
@pytest.mark.parametrize(
    "name",
    ["train.bin", "train.idx", "heldout.bin", "heldout.idx", "corpus.json", "tokenizer.json"],
)
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damage_is_named(data: DataSpec, name: str, damage: str) -> None:
    path = Path(data.train).with_name(name)
    content = path.read_bytes()
    if damage == "missing":
        if name == "corpus.json":
            pytest.skip("pairs of other programs have none")
        path.unlink()
    else:
        path.write_bytes(content[:-2] if damage == "truncated" else b"\xff" + content[1:])
    # only the pair tells a flipped .bin from a flipped .idx, so either may be named first
    assert path.stem in refusal(data)


def test_swapped_pairs(data: DataSpec) -> None:
    train = Path(f"{data.train}.bin")
    heldout = Path(f"{data.heldout}.bin")
    heldout_bytes = heldout.read_bytes()
    train.rename(heldout)
    train.write_bytes(heldout_bytes)
    assert "train.bin" in refusal(data)


def test_a_vocabulary_larger_than_the_models(data: DataSpec) -> None:
    message = refusal(data, vocab_size=256)
    assert (
        "corpus.json: its vocabulary has 257 ids, more than the model's vocab_size 256" in message
    )
    assert check_data(replace(tiny_jobs.MODEL, vocab_size=257), tiny_jobs.build_workload(data))


def test_less_than_a_global_batch(data: DataSpec) -> None:
    assert "heldout.bin" in refusal(data, global_batch=1000)
    assert "train.bin" in refusal(data, global_batch=10**6)
