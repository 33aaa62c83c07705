"""Checkpoints over real processes and gloo: resharding between world sizes, and kills in the middle
of a save."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from moewright.engine.checkpoint import (
    CheckpointSaver,
    Coordinator,
    find_latest,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    single_process,
)
from moewright.engine.comm import collectives
from moewright.engine.run.launch import launch
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.spec.workload import CheckpointSpec, SaveMode
from sharded import blank_shards, full_state, shard_bytes, shard_state

pytestmark = pytest.mark.spawn


def meet(context: RankContext) -> Coordinator:
    collectives.join_world(
        rank=context.rank,
        world_size=context.world_size,
        store=context.open_store(),
        backend="gloo",
        timeout_s=context.timeouts.collective_s,
    )
    return Coordinator(
        rank=context.rank, world_size=context.world_size, gather=collectives.gather_json
    )


def save_worker(
    context: RankContext, *, directory: Path, layout: str, step: int, killed: int = -1
) -> RankOutcome:
    """Save one step; rank `killed` dies when its file is written but not yet on disk."""
    comm = meet(context)
    pieces = shard_state(full_state(step), layout, comm.rank, comm.world_size)
    if comm.rank == killed:
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)  # this forked process only
    save_checkpoint(directory, step=step, shards=pieces, extra={"step": step}, keep=1, comm=comm)
    collectives.leave_world()
    return RankOutcome.DONE


def load_worker(context: RankContext, *, directory: Path, layout: str, step: int) -> RankOutcome:
    comm = meet(context)
    truth = shard_state(full_state(step), layout, comm.rank, comm.world_size)
    wanted = blank_shards(truth)
    checkpoint = find_latest(directory)
    assert checkpoint is not None
    assert load_checkpoint(checkpoint, shards=wanted, comm=comm) == {"step": step}
    assert shard_bytes(wanted) == shard_bytes(truth)
    collectives.leave_world()
    return RankOutcome.DONE


@pytest.mark.parametrize(
    ("source", "before", "target", "after"),
    [
        ("rows", 2, "columns", 4),
        ("flat", 4, "rows", 2),
        ("replicated", 2, "flat", 4),
        ("columns", 4, "replicated", 1),
    ],
)
def test_state_moves_between_world_sizes(
    tmp_path: Path, source: str, before: int, target: str, after: int
) -> None:
    directory = tmp_path / "checkpoints"
    saver = partial(save_worker, directory=directory, layout=source, step=7)
    assert launch(saver, nproc=before, run_dir=tmp_path) == ExitCode.DONE
    loader = partial(load_worker, directory=directory, layout=target, step=7)
    assert launch(loader, nproc=after, run_dir=tmp_path) == ExitCode.DONE


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_in_its_file_commits_nothing(
    tmp_path: Path, killed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "checkpoints"
    saver = partial(save_worker, directory=directory, layout="rows")
    assert launch(partial(saver, step=1), nproc=2, run_dir=tmp_path) == ExitCode.DONE
    assert (
        launch(partial(saver, step=2, killed=killed), nproc=2, run_dir=tmp_path)
        == ExitCode.RANK_FAILED
    )
    assert f"rank {killed} was killed by SIGKILL" in capfd.readouterr().err
    assert [path.name for path in list_checkpoints(directory)] == ["step-00000001"]
    assert (directory / ".saving-step-00000002").exists()
    assert launch(partial(saver, step=2), nproc=2, run_dir=tmp_path) == ExitCode.DONE
    assert [path.name for path in directory.iterdir()] == ["step-00000002"]


def save_step(directory: Path, step: int, mode: SaveMode = SaveMode.SYNC) -> None:
    spec = CheckpointSpec(keep=1, mode=mode)
    saver = CheckpointSaver(
        directory,
        spec=spec,
        extra={"step": step},
        comm=single_process(),
        build_background_comm=single_process,
    )
    saver.save(step, shard_state(full_state(step), "rows", 0, 1))
    saver.wait()


def loads(directory: Path) -> int:
    """The step of the latest checkpoint, once it has loaded bit for bit."""
    checkpoint = find_latest(directory)
    assert checkpoint is not None
    step = int(checkpoint.name.removeprefix("step-"))
    truth = shard_state(full_state(step), "flat", 0, 1)
    wanted = blank_shards(truth)
    assert load_checkpoint(checkpoint, shards=wanted, comm=single_process()) == {"step": step}
    assert shard_bytes(wanted) == shard_bytes(truth)
    return step


def killed_save(directory: Path, step: int, events: int, mode: SaveMode) -> bool:
    """Save in a process that dies before its `events`-th access to the file system; False when it
    had fewer."""
    child = os.fork()
    if child == 0:
        left = events

        def count(event: str, _: object) -> None:
            nonlocal left
            left -= event == "open" or event.startswith(("os.", "shutil."))
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        save_step(directory, step, mode)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("mode", list(SaveMode))
def test_a_kill_before_any_access_to_the_disk_leaves_a_good_checkpoint(
    mode: SaveMode, tmp_path: Path
) -> None:
    """The purge of the old checkpoint is part of the sweep; the next save clears what a killed one
    left."""
    steps = []
    for events in range(1, 100):
        directory = tmp_path / str(events)
        save_step(directory, 1)
        if not killed_save(directory, 2, events, mode):
            break
        steps.append(loads(directory))
        save_step(directory, 3)
        assert [path.name for path in directory.iterdir()] == ["step-00000003"]
    assert steps == sorted(steps)
    assert steps.count(1) > 5  # killed before the commit
    assert steps.count(2) > 2  # killed in the purge
