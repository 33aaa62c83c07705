"""Saves that are written while training goes on: what is stored, who waits, how they fail."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moewright.engine.checkpoint import (
    CheckpointSaver,
    LocalShard,
    commit,
    find_latest,
    list_checkpoints,
    load_checkpoint,
    single_process,
)
from moewright.engine.checkpoint.files import write_payload
from moewright.spec.errors import BadInput
from moewright.spec.workload import CheckpointSpec, SaveMode

PATIENCE_S = 20.0


class Gate:
    """A gate before every write of a payload, which waits until the gate is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        write = write_payload

        def write_when_open(path: Path, *arguments: object) -> object:
            self.reached.set()
            assert self._open.wait(PATIENCE_S)
            return write(path, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(commit, "write_payload", write_when_open)

    def open(self) -> None:
        self._open.set()


def saver(directory: Path, **spec: int) -> CheckpointSaver:
    return CheckpointSaver(
        directory,
        spec=CheckpointSpec(mode=SaveMode.ASYNC, **spec),
        extra={"seed": 7},
        comm=single_process(),
        build_background_comm=single_process,
    )


def local_shard(tensor: torch.Tensor) -> LocalShard:
    return LocalShard(
        name="w", global_shape=tuple(tensor.shape), offsets=(0,) * tensor.dim(), tensor=tensor
    )


def load_weight(checkpoint: Path) -> torch.Tensor:
    loaded = torch.zeros(6)
    load_checkpoint(checkpoint, shards=[local_shard(loaded)], comm=single_process())
    return loaded


def test_what_is_stored_is_the_state_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training changes the tensors before the first byte is written; the checkpoint ignores it."""
    gate = Gate(monkeypatch)
    weight = torch.arange(6.0)
    saving = saver(tmp_path)
    first = saving.save(1, [local_shard(weight)])  # returns although nothing can be written yet
    assert gate.reached.wait(PATIENCE_S)
    weight += 100
    assert find_latest(tmp_path) is None
    saving.raise_failure()
    gate.open()
    second = saving.save(2, [local_shard(weight)])
    assert list_checkpoints(tmp_path)[0] == first  # the second waited for the first
    weight += 100
    saving.wait()
    assert torch.equal(load_weight(first), torch.arange(6.0))
    assert torch.equal(load_weight(second), torch.arange(6.0) + 100)


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    weight = torch.arange(6.0)
    saving = saver(tmp_path)
    saving.save(1, [local_shard(weight)])
    returned = threading.Event()

    def second() -> None:
        saving.save(2, [local_shard(weight)])
        returned.set()

    waiting = threading.Thread(target=second)
    waiting.start()
    assert not returned.wait(0.3)
    gate.open()
    assert returned.wait(PATIENCE_S)
    waiting.join()
    saving.wait()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]


def train_until_raised(saving: CheckpointSaver) -> None:
    """Go on with steps of training until one raises."""
    pause = threading.Event()
    for _ in range(1000):
        saving.raise_failure()
        pause.wait(0.01)


def save_again(saving: CheckpointSaver) -> None:
    saving.save(3, [local_shard(torch.arange(6.0))])


@pytest.mark.parametrize("provoke", [train_until_raised, CheckpointSaver.wait, save_again])
def test_a_failure_is_told_with_its_cause_and_the_last_good_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provoke: Callable[[CheckpointSaver], None]
) -> None:
    weight = torch.arange(6.0)
    saving = saver(tmp_path)
    good = saving.save(1, [local_shard(weight)])
    saving.wait()

    def fail_on_full_disk(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(commit, "write_payload", fail_on_full_disk)
        saving.save(2, [local_shard(weight)])
        with pytest.raises(BadInput, match="no room: a checkpoint needs 24 B"):
            provoke(saving)
    assert [path.name for path in tmp_path.iterdir()] == [good.name]
    assert torch.equal(load_weight(good), weight)
    saving.raise_failure()  # told once
    saving.save(4, [local_shard(weight)])
    saving.wait()
    assert find_latest(tmp_path) == tmp_path / "step-00000004"


def test_checkpoints_at_multiples_are_kept_for_good(tmp_path: Path) -> None:
    saving = saver(tmp_path, keep=2, keep_every_steps=4)
    for step in range(1, 12):
        saving.save(step, [local_shard(torch.arange(6.0))])
    saving.wait()
    assert [int(path.name[-2:]) for path in list_checkpoints(tmp_path)] == [4, 8, 10, 11]
