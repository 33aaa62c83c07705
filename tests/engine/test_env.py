from __future__ import annotations

import os

import pytest

from moewright.engine.run.env import read_torchrun_env, set_allocator
from moewright.spec.errors import BadInput

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def set_variables(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    for key, value in (TORCHRUN | changes).items():
        monkeypatch.setenv(key, value)


def test_what_torchrun_sets_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch)
    env = read_torchrun_env()
    assert env is not None
    assert (env.rank, env.world_size, env.local_rank, env.host, env.port) == (
        1,
        2,
        1,
        "127.0.0.1",
        29500,
    )
    monkeypatch.delenv("RANK")
    assert read_torchrun_env() is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(BadInput, match="SLURM_STEP_NUM_TASKS=8: srun started so many tasks"):
        read_torchrun_env()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("RANK", "2", "RANK=2: must be below WORLD_SIZE=2; nearest legal value: 1"),
        ("RANK", "-1", "RANK=-1: must be a whole number"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0: must be in 1..1000000; nearest legal value: 1"),
        ("LOCAL_RANK", "one", "LOCAL_RANK=one: must be a whole number"),
        ("MASTER_PORT", "", "MASTER_PORT: must be a whole number; nearest legal value: 29500"),
        (
            "MASTER_PORT",
            "99999",
            "MASTER_PORT=99999: must be in 0..65535; nearest legal value: 65535",
        ),
    ],
)
def test_what_it_cannot_have_set_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: str, value: str, message: str
) -> None:
    set_variables(monkeypatch, **{key: value})
    with pytest.raises(BadInput) as refused:
        read_torchrun_env()
    assert message in str(refused.value)


def test_a_variable_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(BadInput, match="MASTER_PORT: is not set"):
        read_torchrun_env()


def test_the_allocator_grows_its_segments_unless_a_variable_sets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, "")  # so that the variable is as it was afterwards
        monkeypatch.delenv(name)
    assert "(PYTORCH_ALLOC_CONF=expandable_segments:True)" in set_allocator()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv(names[1], "max_split_size_mb:256")
    assert set_allocator() == "the allocator follows PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:256"
    assert names[0] not in os.environ
