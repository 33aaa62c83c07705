"""Shards of a corpus as Megatron-LM is told them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import moewright as mw
from moewright.codec.files import name_shards
from moewright.engine.data.indexed import open_indexed
from moewright.engine.data.sharded import ShardedWriter, open_stream
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan


@pytest.fixture(scope="module")
def base() -> Plan:
    return mw.estimate("Qwen3-30B-A3B", "ep8,mbs2", on="8xH100", global_batch=64)


def write_shards(folder: Path, name: str, documents: int = 9) -> Path:
    writer = ShardedWriter(folder / name, dtype=np.dtype(np.uint16), shard_bytes=60)
    for number in range(documents):
        writer.append(np.arange(10 + number, dtype=np.uint16))
    writer.finish()
    return folder / name


def with_data(plan: Plan, train: str, heldout: str = "") -> Plan:
    data = replace(plan.workload.data, train=train, heldout=heldout)
    return replace(plan, workload=replace(plan.workload, data=data))


def read_blend(script: str, option: str) -> dict[str, float]:
    """Return the weight of each prefix behind an option."""
    words = shlex.split(script.replace("\\\n", " "), comments=True)
    rest = words[words.index(option) + 1 :]
    end = next(index for index, word in enumerate(rest) if word.startswith("--"))
    return {path: float(weight) for weight, path in zip(rest[:end:2], rest[1:end:2], strict=True)}


def test_every_shard_is_a_corpus_of_its_share_of_the_tokens(base: Plan, tmp_path: Path) -> None:
    train, heldout = write_shards(tmp_path, "train"), write_shards(tmp_path, "heldout", 2)
    script = mw.export(with_data(base, str(train), str(heldout)), to="megatron")
    blend = read_blend(script, "--train-data-path")
    tokens = {str(shard.prefix): shard.token_count for shard in open_stream(train).shards}
    assert len(tokens) > 2
    assert list(blend) == list(tokens)
    total = sum(tokens.values())
    assert blend == pytest.approx({path: count / total for path, count in tokens.items()}, 1e-5)
    assert all(open_indexed(Path(path)).documents for path in blend)
    # One shard needs no weight.
    assert f"--valid-data-path {heldout}-00000" in script


def test_a_blend_keeps_the_weights_of_its_corpora(base: Plan, tmp_path: Path) -> None:
    train = write_shards(tmp_path, "web")
    plan = with_data(base, f"3 {train} 1 elsewhere/code")
    blend = read_blend(mw.export(plan, to="megatron"), "--data-path")
    assert blend.pop("elsewhere/code") == pytest.approx(0.25)
    assert sum(blend.values()) == pytest.approx(0.75, rel=1e-4)
    bridge = mw.export(plan, to="bridge")
    assert f"{train}-00000" in bridge
    assert f"'{train}'" not in bridge
    # Our engine reads them under their common name.
    engine = mw.export(plan, to="slurm", job="job.toml")
    assert f"{train}-00000" not in engine


def test_a_shard_that_is_missing_is_named(base: Plan, tmp_path: Path) -> None:
    train = write_shards(tmp_path, "train")
    Path(f"{train}-00001.bin").unlink()
    with pytest.raises(BadInput, match=r"train-00001\.bin"):
        name_shards(with_data(base, str(train)))
